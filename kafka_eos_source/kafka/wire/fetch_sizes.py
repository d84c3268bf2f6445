"""How many bytes a Fetch asks for, so that answers fit into memory and contain little that nobody wants."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from kafka_eos_source.kafka.wire.fetched_batches import FetchedBatches

#: The most bytes of one answer, and of all answers that may be in memory, unless the user sets
#: ``fetch.max.bytes``.
_MOST_BYTES, _MOST_BYTES_OF_ALL = 16 << 20, 64 << 20
#: The most bytes of one partition in an answer, unless the user sets ``max.partition.fetch.bytes``. Fetches
#: of 2 MiB take 20 % less time than 1 MiB; 4 MiB save no more, and compressed data grows when it arrives.
_PARTITION_BYTES = 2 << 20
#: Bytes per offset, and of one record batch, that the first Fetch of a topic expects.
_FIRST_MEAN_BYTES, _FIRST_BATCH_BYTES = 1024.0, 64 << 10


@dataclass(slots=True)
class _Topic:
    """What the answers about a topic have shown.

    Attributes:
        mean_bytes: bytes per offset.
        batch_bytes: size of the largest record batch.
    """

    mean_bytes: float = _FIRST_MEAN_BYTES
    batch_bytes: int = _FIRST_BATCH_BYTES


class FetchSizes:
    """Estimates how large answers will be from those that have arrived.

    Args:
        conf: properties of the consumer.
    """

    def __init__(self, conf: Mapping[str, str]) -> None:
        asked_bytes = conf.get("fetch.max.bytes")
        #: The most bytes of one answer that the user wants; None = any.
        self._most_bytes = None if asked_bytes is None else int(asked_bytes)
        self._partition_bytes = int(conf.get("max.partition.fetch.bytes", _PARTITION_BYTES))
        self._topics: dict[str, _Topic] = {}

    def of_partition(self, topic: str, offsets: int) -> int:
        """Returns the most bytes to ask of a partition of which so many offsets are wanted."""
        seen = self._topics.setdefault(topic, _Topic())
        return min(int(offsets * seen.mean_bytes) + seen.batch_bytes, self._partition_bytes)

    def of_answer(self, answers: int) -> int:
        """Returns the most bytes of one answer, if so many answers may be in memory at once."""
        if self._most_bytes is not None:
            return self._most_bytes
        return min(_MOST_BYTES, _MOST_BYTES_OF_ALL // answers)

    def learn(self, batches: FetchedBatches) -> None:
        """Adjusts the estimates to batches that have arrived."""
        seen = self._topics.setdefault(batches.tp.topic, _Topic())
        seen.mean_bytes = batches.mean_bytes
        seen.batch_bytes = max(batches.largest_bytes, seen.batch_bytes // 2)
