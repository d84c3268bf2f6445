"""A function over the source's rows, called by the tasks that read them: what `map_in_read` puts there."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import pyarrow as pa
from pyspark.sql.types import StructType

from kafka_eos_source.in_read.columns import ReadColumns
from kafka_eos_source.in_read.packed import pack, packed_schema
from kafka_eos_source.spark.pickled import from_option

#: From batches of rows to batches of rows, as Spark's ``mapInArrow`` takes it.
ArrowFunction = Callable[[Iterator[pa.RecordBatch]], Iterable[pa.RecordBatch]]


@dataclass(frozen=True)
class MapInRead:
    """From batches of the source to parcels of a function's rows. Travels as an option of the source.

    Attributes:
        columns: of the frame that the function is given.
        rows: schema of what it gives.
        function: pickled (`option_objects`); None = the frame's rows as they are.
    """

    columns: ReadColumns
    rows: StructType
    function: str | None

    def to_json(self) -> str:
        """For the option."""
        return json.dumps(
            {
                "columns": self.columns.to_json(),
                "rows": self.rows.jsonValue(),
                "function": self.function,
            },
            separators=(",", ":"),
        )

    @classmethod
    def from_json(cls, written: str) -> MapInRead:
        """Of `to_json`. The function is not unpickled. Raises: ValueError, TypeError, KeyError: it is not."""
        found: dict[str, Any] = json.loads(written)
        made = cls(
            ReadColumns.from_json(found["columns"]), StructType.fromJson(found["rows"]), found["function"]
        )
        _ = made.columns.schema  # made now, so that it is refused now
        return made

    @cached_property
    def schema(self) -> StructType:
        """Of what is read."""
        return packed_schema(self.rows)

    def __call__(self, batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        """Rows of the source, of one task, in; parcels out. Raises: InvalidRecordError: as `pack`."""
        frames = map(self.columns.frame, batches)
        return pack(frames if self.function is None else from_option(self.function)(frames), self.rows)
