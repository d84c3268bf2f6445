"""The columns of a frame that are the source's own, as a step in the read finds them."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property

import pyarrow as pa

from kafka_eos_source.spark.schema import read_arrow_schema


@dataclass(frozen=True)
class ReadColumn:
    """A column of a frame that is one of the source's.

    Attributes:
        name: in the frame.
        source: in the source.
        as_text: whether bytes became a string: ``cast(key as string)``.
    """

    name: str
    source: str
    as_text: bool = False


@dataclass(frozen=True)
class ReadColumns:
    """From batches of the source to batches of the frame."""

    columns: tuple[ReadColumn, ...]

    def to_json(self) -> list[list[str | bool]]:
        """As lists, for an option."""
        return [[each.name, each.source, each.as_text] for each in self.columns]

    @classmethod
    def from_json(cls, written: Iterable[tuple[str, str, bool]]) -> ReadColumns:
        """Of `to_json`. Raises: ValueError, TypeError: it is not."""
        return cls(tuple(ReadColumn(*each) for each in written))

    @property
    def of_source(self) -> tuple[str, ...]:
        """What is read of each record."""
        return tuple(dict.fromkeys(each.source for each in self.columns))

    @cached_property
    def schema(self) -> pa.Schema:
        """Of the frame. Raises: KeyError: a column that no source has."""
        source = read_arrow_schema(True)
        return pa.schema(
            [
                pa.field(each.name, pa.string() if each.as_text else source.field(each.source).type)
                for each in self.columns
            ]
        )

    def frame(self, batch: pa.RecordBatch) -> pa.RecordBatch:
        """The columns of the frame, of a batch with the columns `of_source`."""
        columns = [_as_text(batch.column(each.source), each.as_text) for each in self.columns]
        return pa.RecordBatch.from_arrays(columns, schema=self.schema)


def _as_text(column: pa.Array, as_text: bool) -> pa.Array:
    """Bytes as they are: Spark's cast does not look whether they are UTF-8, nor does this."""
    return column.view(pa.string()) if as_text else column
