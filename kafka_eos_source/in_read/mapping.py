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
from kafka_eos_source.in_read.packed_frame import fitted, pack, packed_frame_schema
from kafka_eos_source.runtime.json_input import parse_json
from kafka_eos_source.spark.pickled import from_option

#: A user's function, like that of Spark's ``mapInArrow``.
ArrowFunction = Callable[[Iterator[pa.RecordBatch]], Iterable[pa.RecordBatch]]


@dataclass(frozen=True)
class MapInRead:
    """Applies a function to batches of the source; travels as an option of the source.

    Its rows are packed, or the tasks stage them themselves (`staged_frame`).

    Attributes:
        columns: columns of the frame that the function takes.
        rows: schema of the rows that it returns.
        function: the pickled function (`spark.pickled`); None leaves the rows unchanged.
        frame: id of the frame that `map_in_read` returned; only staged rows need it.
    """

    columns: ReadColumns
    rows: StructType
    function: str | None
    frame: str = ""

    def to_json(self) -> str:
        """Returns the text of the option."""
        return json.dumps(
            {
                "columns": self.columns.to_json(),
                "rows": self.rows.jsonValue(),
                "function": self.function,
                "frame": self.frame,
            },
            separators=(",", ":"),
        )

    @classmethod
    def from_json(cls, written: str) -> MapInRead:
        """Returns the step that `to_json` wrote, without unpickling the function.

        Raises:
            ValueError, TypeError, KeyError: if `to_json` did not write this.
        """
        fields: dict[str, Any] = parse_json(written)
        step = cls(
            ReadColumns.from_json(fields["columns"]),
            StructType.fromJson(fields["rows"]),
            fields["function"],
            fields.get("frame", ""),
        )
        _ = step.columns.schema  # raises now if a column is unknown
        return step

    @cached_property
    def schema(self) -> StructType:
        """Schema of the frame that Spark gets if the rows are packed."""
        return packed_frame_schema(self.rows)

    def __call__(self, batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        """Returns the packed result of the function for the source's batches of one task.

        Raises:
            InvalidRecordError: as `pack`.
        """
        return pack(self._result(batches), self.rows)

    def mapped(self, batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        """Returns the rows of the function's result, with the declared schema, for one task.

        Raises:
            InvalidRecordError: as `fitted`.
        """
        return fitted(self._result(batches), self.rows)

    def _result(self, batches: Iterable[pa.RecordBatch]) -> Iterable[pa.RecordBatch]:
        frames = map(self.columns.frame, batches)
        return frames if self.function is None else from_option(self.function)(frames)
