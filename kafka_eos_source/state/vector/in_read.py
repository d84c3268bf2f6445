"""Aggregation in the read: the tasks that read Kafka combine the rows of each key before Spark sees them.

The records then never become Spark rows. The read groups them in Arrow and hands Spark packed batches with
one partial row per key and read task. Spark's built-in sources do this through
``SupportsPushDownAggregates``. Python sources have no such interface, so the operator passes the aggregation
to the source as an option.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import pyarrow as pa
from pyspark.sql.pandas.types import from_arrow_schema
from pyspark.sql.types import StructType

from kafka_eos_source.in_read.step import ReadColumns
from kafka_eos_source.runtime.json_input import parse_json
from kafka_eos_source.state.shard_batches import PACKED_SCHEMA, pack
from kafka_eos_source.state.vector.aggregates import Aggregate
from kafka_eos_source.state.vector.processor import AggregateProcessor
from kafka_eos_source.state.vector.windows import Window, window_from_json


@dataclass(frozen=True)
class AggregateInRead:
    """Turns batches of the source's rows into packed batches of partial rows.

    The operator passes it to the source as the option ``aggregate.in.read``.

    Attributes:
        columns: columns of the aggregated frame that the aggregation uses.
        keys: names of the key columns.
        aggregates: aggregates by the name of their result.
        window: the window; None = aggregate over all rows of a key.
        shards: number of shards of the operator.
    """

    columns: ReadColumns
    keys: tuple[str, ...]
    aggregates: Mapping[str, Aggregate]
    window: Window | None
    shards: int

    def to_json(self) -> str:
        """Returns the value of the option."""
        return json.dumps(
            {
                "columns": self.columns.to_json(),
                "keys": self.keys,
                "aggregates": [[name, each.to_json()] for name, each in self.aggregates.items()],
                "window": None if self.window is None else self.window.to_json(),
                "shards": self.shards,
            },
            separators=(",", ":"),
        )

    @classmethod
    def from_json(cls, written: str) -> AggregateInRead:
        """Parses the text that `to_json` wrote.

        Raises:
            ValueError, TypeError, KeyError: if the text has another form.
            InvalidSchemaError: if the aggregation does not fit the columns.
        """
        values: dict[str, Any] = parse_json(written)
        parsed = cls(
            ReadColumns.from_json(values["columns"]),
            tuple(values["keys"]),
            {name: Aggregate.from_json(each) for name, each in values["aggregates"]},
            None if values["window"] is None else window_from_json(values["window"]),
            int(values["shards"]),
        )
        _ = parsed.partial_schema  # creates the processor, which checks the columns
        return parsed

    @cached_property
    def schema(self) -> StructType:
        """Columns that the read returns to Spark."""
        return from_arrow_schema(PACKED_SCHEMA)

    @cached_property
    def partial_schema(self) -> pa.Schema:
        """Columns of the rows in the packed batches."""
        return self._processor.partial_schema

    def __call__(self, batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        """Turns the rows that one task read into packed batches with one partial row per group."""
        partial = self._processor.partial(map(self.columns.frame, batches))
        return pack(partial, self.partial_schema, self.keys, self.shards)

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
