"""Aggregation in the read: the tasks that read Kafka combine the rows of each key before Spark sees them.

The records then never become Spark rows. The read groups them in Arrow and hands Spark packed batches with
one partial row per key and read task. Spark's built-in sources do this through
``SupportsPushDownAggregates``. Python sources have no such interface, so the operator passes the aggregation
to the source as an option.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import pyarrow as pa
from pyspark.sql.pandas.types import from_arrow_schema
from pyspark.sql.types import StructType

from kafka_eos_source.in_read.step import StepInRead, with_column_of_packets
from kafka_eos_source.model import ReadTask
from kafka_eos_source.state.aggregates import Aggregate
from kafka_eos_source.state.shard_rows import PACKED_SCHEMA, pack, pack_past_packets
from kafka_eos_source.state.vector.processor import AggregateProcessor
from kafka_eos_source.state.vector.windows import Window


@dataclass(frozen=True)
class AggregateInRead(StepInRead):
    """Turns batches of the source's rows into packed batches of partial rows.

    Attributes:
        keys: names of the key columns.
        aggregates: aggregates by the name of their result.
        window: the window; None = aggregate over all rows of a key.
        shards: number of shards of the operator.
    """

    keys: tuple[str, ...]
    aggregates: Mapping[str, Aggregate]
    window: Window | None
    shards: int

    @property
    def what(self) -> str:
        return "combines the rows of each key"

    def check(self) -> None:
        """Creates the processor, which checks the columns."""
        _ = self.partial_schema

    @cached_property
    def schema(self) -> StructType:
        """Columns that the read returns to Spark."""
        packed = from_arrow_schema(PACKED_SCHEMA)
        return with_column_of_packets(packed) if self.sets_aside else packed

    @cached_property
    def partial_schema(self) -> pa.Schema:
        """Columns of the rows in the packed batches."""
        return self._processor.partial_schema

    def __call__(
        self, batches: Iterable[pa.RecordBatch], task: ReadTask | None = None
    ) -> Iterator[pa.RecordBatch]:
        """Turns the rows that one task read into packed batches with one partial row per group."""
        frames, partial = self.columns.frames(batches, task), self._processor.partial
        if self.sets_aside:
            return pack_past_packets(partial, frames, self.partial_schema, self.keys, self.shards)
        return pack(partial(frames), self.partial_schema, self.keys, self.shards)

    @cached_property
    def _processor(self) -> AggregateProcessor:
        return AggregateProcessor(self.columns.schema, self.keys, self.aggregates, window=self.window)


def used_columns(
    keys: Sequence[str],
    aggregates: Mapping[str, Aggregate],
    window: Window | None,
    removed: str | None = None,
) -> list[str]:
    """Returns the names of the columns that an aggregation reads, without duplicates."""
    names = [*keys, *(column for each in aggregates.values() for column in each.columns())]
    if window is not None:
        names.append(window.on)
    if removed is not None:
        names.append(removed)
    return list(dict.fromkeys(names))
