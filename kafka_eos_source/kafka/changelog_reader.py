"""One partition of a changelog, read for its keys and values.

`consume` and two list comprehensions: 0.8 µs a record of CPU, librdkafka's own threads included (110-byte
records). Filling numpy arrays from ``rd_kafka_consume_batch_queue`` and slicing the records out of
librdkafka's buffers was no faster: what it saves in objects it pays for freeing message by message. Some
thousand messages at once are: more do not stay in the processor's cache, fewer cost calls.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from kafka_eos_source.deadline import Deadline
from kafka_eos_source.errors import RetriableError
from kafka_eos_source.kafka.consumer import AssignedConsumer
from kafka_eos_source.kafka.failure import unreachable
from kafka_eos_source.kafka.look import ClusterLook, LogEnds
from kafka_eos_source.model import TopicPartition

_BOUNDS_SECONDS = 10.0


@dataclass(slots=True)
class Pulled:
    """What one look at the partition gave.

    Attributes:
        keys, values: of records in offset order; a null value deletes.
        position: the offset behind the last record, None = there was none.
        log_end: the log was read to its end, which is this offset; control markers count.
        out_of_range: the position is not in the log (any more).
        gone: the cluster does not know the partition (any more).
    """

    keys: Sequence[bytes | None] = ()
    values: Sequence[bytes | None] = ()
    position: int | None = None
    log_end: int | None = None
    out_of_range: bool = False
    gone: bool = False


class ChangelogReader:
    """Reads one partition with a client that is open anyhow. Not thread-safe.

    Args:
        consumer: from `state.changelog.committed.changelog_client`: read_committed.
        tp: the partition.
    """

    def __init__(self, consumer: AssignedConsumer, tp: TopicPartition) -> None:
        self._consumer = consumer
        self._tp = tp

    @property
    def last_complaint(self) -> str:
        """What the client last said, the likely reason when nothing comes."""
        return self._consumer.last_complaint

    def start(self, position: int) -> None:
        """Reads on from this offset, whatever was read before."""
        self._consumer.assign({self._tp: position})

    def stop(self) -> None:
        """Fetches no more."""
        self._consumer.release()

    def take(self, at_most: int, wait_seconds: float, end: int) -> Pulled:
        """What is there now; when nothing is, waits for something.

        Args:
            at_most: records.
            wait_seconds: how long.
            end: offsets from here on (excluded) are left out.

        Raises:
            AuthorizationError: credentials or an ACL on the topic.
        """
        taken = self._consumer.take(at_most, wait_seconds)
        pulled = Pulled(
            log_end=taken.log_ends.get(self._tp),
            out_of_range=self._tp in taken.out_of_range,
            gone=self._tp in taken.gone,
        )
        messages: Sequence[Any] = taken.messages
        if messages:
            pulled.position = int(messages[-1].offset()) + 1
            if pulled.position > end:
                messages = [message for message in messages if message.offset() < end]
                pulled.position = end
            pulled.keys = [message.key() for message in messages]
            pulled.values = [message.value() for message in messages]
        return pulled

    def readable(self, deadline: Deadline) -> tuple[int, int]:
        """First offset in the log, and the last stable offset, at this moment.

        Raises:
            UnavailableError: not answered before ``deadline``, or no such partition.
        """
        while True:
            try:
                return self._consumer.log_bounds(
                    self._tp, max(0.1, deadline.remaining_seconds(_BOUNDS_SECONDS))
                )
            except RetriableError as failure:
                if deadline.expired:
                    raise unreachable(
                        self._consumer.bootstrap_servers,
                        deadline.budget_seconds * 1000,
                        self.last_complaint or failure.message,
                    ) from failure

    def ends(self) -> LogEnds:
        """All ends of the log. Makes a client for it; where `readable` is not enough.

        Raises:
            UnavailableError: no broker answers.
        """
        with ClusterLook(self._consumer.connection) as look:
            return look.logs([self._tp])[self._tp]
