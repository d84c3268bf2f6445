"""Converts columns slice by slice, so that one call never makes more than a worker's memory can hold."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import pyarrow as pa

from kafka_eos_source.registry.codec import MOST_BYTES, Converted

#: So many Python values are turned into a part of a column at once.
_ROWS = 32


def slices(convert: Callable[[pa.Array], Converted], column: pa.Array, done: str) -> Iterator[Converted]:
    """Converts a column, and yields what was converted slice by slice.

    A record that takes too much memory by itself has an error.

    Args:
        convert: converts the first rows of a column, at most `MOST_BYTES` of them; none if the first row
            alone takes more.
        column: the column.
        done: what happens to the records, for errors: "decoded" or "encoded".
    """
    at, rows = 0, len(column)
    while True:
        found = convert(column.slice(at, rows))
        made = len(found.values)
        if not made and at < len(column):
            made = 1
            text = f"the record takes more than {MOST_BYTES >> 20} MiB when it is {done}"
            found = Converted(pa.nulls(1, found.values.type), {0: text})
        yield found
        at += made
        rows = 2 * made  # codecs that cannot stop in the middle try again with fewer rows
        if at >= len(column):
            return


class Collector:
    """Collects Python values row by row, until their column takes too much memory.

    Args:
        arrow_type: the type of the column.
        most_bytes: the most memory of the column.
    """

    def __init__(self, arrow_type: pa.DataType, most_bytes: int) -> None:
        self._type = arrow_type
        self._left = most_bytes
        self._waiting: list[Any] = []
        self._parts: list[pa.Array] = []
        #: Whether the values that were added last do not fit any more.
        self.is_full = False

    def add(self, value: Any) -> None:
        """Adds a value, which is ignored if it does not fit."""
        self._waiting.append(value)
        if len(self._waiting) == _ROWS:
            self._convert()

    def converted(self, errors: Mapping[int, str]) -> Converted:
        """Returns the values that fit, with the errors of their rows."""
        self._convert()
        values = pa.concat_arrays(self._parts) if self._parts else pa.array([], self._type)
        return Converted.of(values, errors)

    def _convert(self) -> None:
        part = pa.array(self._waiting, self._type)
        self._waiting = []
        if self.is_full:
            return
        if part.nbytes > self._left:
            self.is_full = True
            fitting = 0
            while part.slice(0, fitting + 1).nbytes <= self._left:
                fitting += 1
            part = part.slice(0, fitting)
        self._left -= part.nbytes
        self._parts.append(part)
