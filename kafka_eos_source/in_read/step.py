"""Maps columns of the source to the columns of a frame that consists only of them."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import pyarrow as pa
from pyspark.sql.types import StructType

from kafka_eos_source.in_read.packed_frame import fitted, pack, packed_frame_schema
from kafka_eos_source.runtime.json_input import parse_json
from kafka_eos_source.spark.arrow import read_arrow_schema
from kafka_eos_source.spark.pickled import from_option


@dataclass(frozen=True)
class ReadColumn:
    """A column of a frame that comes from one column of the source.

    Attributes:
        name: its name in the frame.
        source: its name in the source.
        as_text: whether the frame casts its bytes to a string, as in ``cast(key as string)``.
    """

    name: str
    source: str
    as_text: bool = False


@dataclass(frozen=True)
class ReadColumns:
    """Turns batches of the source into batches of the frame."""

    columns: tuple[ReadColumn, ...]

    def to_json(self) -> list[list[str | bool]]:
        """Returns lists that JSON can represent."""
        return [[each.name, each.source, each.as_text] for each in self.columns]

    @classmethod
    def from_json(cls, written: Iterable[tuple[str, str, bool]]) -> ReadColumns:
        """Returns the columns that `to_json` wrote.

        Raises:
            ValueError, TypeError: if `to_json` did not write this.
        """
        return cls(tuple(ReadColumn(*each) for each in written))

    @property
    def of_source(self) -> tuple[str, ...]:
        """Columns to read from the source."""
        return tuple(dict.fromkeys(each.source for each in self.columns))

    @cached_property
    def schema(self) -> pa.Schema:
        """Arrow schema of the frame.

        Raises:
            KeyError: if the source has no such column.
        """
        source = read_arrow_schema(True)
        return pa.schema(
            [
                pa.field(each.name, pa.string() if each.as_text else source.field(each.source).type)
                for each in self.columns
            ]
        )

    def frame(self, batch: pa.RecordBatch) -> pa.RecordBatch:
        """Returns a batch of the frame for a batch with the columns `of_source`."""
        columns = [_as_text(batch.column(each.source), each.as_text) for each in self.columns]
        return pa.RecordBatch.from_arrays(columns, schema=self.schema)


def _as_text(column: pa.Array, as_text: bool) -> pa.Array:
    """Returns the bytes as text. Like Spark's cast, this does not check that they are UTF-8."""
    return column.view(pa.string()) if as_text else column


# HOUSE: from kafka_eos_source.in_read.step
# HOUSE| """The step that `map_in_read` adds to the read tasks: a user's function over Arrow batches."""

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
