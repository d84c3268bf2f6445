"""The step that `map_in_read` adds to the read tasks: a user's function over Arrow batches."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import pyarrow as pa
from pyspark.sql.types import StructType

from kafka_eos_source.in_read.columns import ReadColumns
from kafka_eos_source.in_read.packed_frame import pack, packed_frame_schema
from kafka_eos_source.spark.pickled import from_option

#: A user's function, like that of Spark's ``mapInArrow``.
ArrowFunction = Callable[[Iterator[pa.RecordBatch]], Iterable[pa.RecordBatch]]


@dataclass(frozen=True)
class MapInRead:
    """Applies a function to batches of the source and packs its result; travels as an option of the source.

    Attributes:
        columns: columns of the frame that the function takes.
        rows: schema of the rows that it returns.
        function: the pickled function (`spark.pickled`); None leaves the rows unchanged.
    """

    columns: ReadColumns
    rows: StructType
    function: str | None

    def to_json(self) -> str:
        """Returns the text of the option."""
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
        """Returns the step that `to_json` wrote, without unpickling the function.

        Raises:
            ValueError, TypeError, KeyError: if `to_json` did not write this.
        """
        fields: dict[str, Any] = json.loads(written)
        step = cls(
            ReadColumns.from_json(fields["columns"]), StructType.fromJson(fields["rows"]), fields["function"]
        )
        _ = step.columns.schema  # raises now if a column is unknown
        return step

    @cached_property
    def schema(self) -> StructType:
        """Schema of the frame that Spark gets."""
        return packed_frame_schema(self.rows)

    def __call__(self, batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        """Returns the packed result of the function for the source's batches of one task.

        Raises:
            InvalidRecordError: as `pack`.
        """
        frames = map(self.columns.frame, batches)
        return pack(frames if self.function is None else from_option(self.function)(frames), self.rows)
