"""The staged parts of one batch on the driver: proved whole, then read as often as a commit is tried."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence

import pyarrow as pa

from kafka_eos_source.errors import StagedPartError
from kafka_eos_source.model import StagedPart
from kafka_eos_source.stage.files import StagingFolder


class StagedRows:
    """All rows of a batch, in the order of its tasks.

    Attributes:
        rows: how many.
        topics: each output topic, with the highest partition asked for (-1 = none was).
    """

    def __init__(self, folder: StagingFolder, batch: str, parts: Iterable[StagedPart]) -> None:
        """Proves length, checksum and number of rows of every part before anything is sent to Kafka.

        Raises:
            StagedPartError: a part is missing or not what its task wrote.
        """
        parts = list(parts)
        self._buffers: Sequence[pa.Buffer] = [
            _proved(folder.read(batch, part), part, batch) for part in parts if part.rows
        ]
        self.rows = sum(part.rows for part in parts)
        self.topics: Mapping[str, int] = _highest(parts)

    def batches(self) -> Iterator[pa.RecordBatch]:
        """Every staged Arrow batch; may be called again."""
        for buffer in self._buffers:
            yield from pa.ipc.open_stream(buffer)


def _proved(buffer: pa.Buffer, part: StagedPart, batch: str) -> pa.Buffer:
    try:
        rows = sum(each.num_rows for each in pa.ipc.open_stream(buffer))
    except pa.ArrowInvalid as error:
        raise StagedPartError(
            f"staged part {part.name or '(inline)'} of batch {batch} is no Arrow stream: {error}.",
            fix="restart the query: the batch is staged anew. Nothing was sent to Kafka.",
        ) from error
    if rows != part.rows:
        raise StagedPartError(
            f"staged part {part.name or '(inline)'} of batch {batch} has {rows:,} rows; "
            f"its task counted {part.rows:,}.",
            fix="restart the query: the batch is staged anew. Nothing was sent to Kafka.",
        )
    return buffer


def _highest(parts: Iterable[StagedPart]) -> dict[str, int]:
    topics: dict[str, int] = {}
    for part in parts:
        for topic, partition in part.topics:
            topics[topic] = max(partition, topics.get(topic, partition))
    return topics
