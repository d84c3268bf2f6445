"""Maps columns of the source to the columns of a frame that consists only of them."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property

import pyarrow as pa

from kafka_eos_source.spark.arrow import read_arrow_schema


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
