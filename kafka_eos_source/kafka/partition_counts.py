"""Partition counts of output topics, cached, and the check of the partitions that records name."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from kafka_eos_source.errors import InvalidRecordError
from kafka_eos_source.runtime.deadline import Deadline

#: How long a topic's partition count is cached.
_VALID_SECONDS = 60.0


@dataclass(frozen=True)
class _Count:
    """The cached partition count of a topic."""

    partitions: int
    valid_until: Deadline


class PartitionCounts:
    """Partition counts of topics, each cached for a minute: asking takes almost as long as a small batch.

    Args:
        ask: returns the partition count of a topic, before a deadline.
    """

    def __init__(self, ask: Callable[[str, Deadline], int]) -> None:
        self._ask = ask
        self._counts: dict[str, _Count] = {}

    def last(self, topic: str) -> int | None:
        """Returns the count of the last check, however old; None if there was no check."""
        known = self._counts.get(topic)
        return None if known is None else known.partitions

    def clear(self) -> None:
        """Forgets all counts."""
        self._counts.clear()

    def check(self, highest: Mapping[str, int], deadline: Deadline) -> None:
        """Checks that every topic exists and has enough partitions.

        librdkafka does not check this before it queues a record.

        Args:
            highest: topic → the highest partition that any record names; -1 = no record names one.
            deadline: for the brokers' answer.

        Raises:
            UnavailableError: if a topic does not exist.
            AuthorizationError: if the principal may not describe a topic.
            InvalidRecordError: if a record names a partition that its topic does not have.
        """
        for topic, partition in highest.items():
            known = self._counts.get(topic)
            if known is not None and partition < known.partitions and not known.valid_until.expired:
                continue
            count = self._ask(topic, deadline)
            self._counts[topic] = _Count(count, Deadline.after_seconds(_VALID_SECONDS))
            if partition >= count:
                raise InvalidRecordError(
                    f"column 'partition' has the value {partition}, but topic {topic!r} has {count} "
                    f"partitions (0 to {count - 1}).",
                    fix="correct the column, set it to null to let the partitioner choose, "
                    "or add partitions to the topic.",
                )
