"""The first step of an aggregation, done by the tasks that read Kafka.

Rows that are only counted or summed need not become Spark's rows first: the read groups them in Arrow, and
one partial row for each key and read task goes on, in parcels. It is what Spark's own sources do with
``SupportsPushDownAggregates``, which Python sources do not have; so it is an option of the source.
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

from kafka_eos_source.in_read.columns import ReadColumns
from kafka_eos_source.state.packed_batches import PACKED_SCHEMA, pack
from kafka_eos_source.state.vector.aggregates import Aggregate
from kafka_eos_source.state.vector.processor import AggregateProcessor
from kafka_eos_source.state.vector.windows import Window, window_from_json


@dataclass(frozen=True)
class AggregateInRead:
    """From batches of the source's rows to parcels of partial rows. Travels as an option of the source.

    Attributes:
        columns: of the frame that is aggregated, those that are used.
        keys: columns of the key.
        aggregates: by the name of their result.
        window: of them, if there is one.
        shards: of the operator.
    """

    columns: ReadColumns
    keys: tuple[str, ...]
    aggregates: Mapping[str, Aggregate]
    window: Window | None
    shards: int

    def to_json(self) -> str:
        """For the option."""
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
        """Of `to_json`. Raises: ValueError, TypeError, KeyError, InvalidSchemaError: it is not."""
        found: dict[str, Any] = json.loads(written)
        made = cls(
            ReadColumns.from_json(found["columns"]),
            tuple(found["keys"]),
            {name: Aggregate.from_json(each) for name, each in found["aggregates"]},
            None if found["window"] is None else window_from_json(found["window"]),
            int(found["shards"]),
        )
        _ = made.partial_schema  # made now, so that it is refused now
        return made

    @cached_property
    def schema(self) -> StructType:
        """Of what is read."""
        return from_arrow_schema(PACKED_SCHEMA)

    @cached_property
    def partial_schema(self) -> pa.Schema:
        """Of the rows in the parcels."""
        return self._processor.partial_schema

    def __call__(self, batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        """Rows of the source, of one task, in; parcels with a partial row for each group out."""
        partial = self._processor.partial(map(self.columns.frame, batches))
        return pack(partial, self.partial_schema, self.keys, self.shards)

    @cached_property
    def _processor(self) -> AggregateProcessor:
        return AggregateProcessor(self.columns.schema, self.keys, self.aggregates, window=self.window)


def used_columns(
    keys: Sequence[str], aggregates: Mapping[str, Aggregate], window: Window | None
) -> list[str]:
    """The columns that an aggregation reads."""
    found = [*keys, *(column for each in aggregates.values() for column in each.columns())]
    if window is not None:
        found.append(window.on)
    return list(dict.fromkeys(found))
