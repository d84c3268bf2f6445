"""What the conversion of a column returns, and how large the result may become.

Documents are foreign, so a conversion keeps within the limits below. They count what a document or a schema
contains, and not seconds, so that a slow machine makes no record bad.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field

import pyarrow as pa

#: The most memory, in bytes, of the column that one call of a decoder or an encoder makes. A record of a few
#: kilobytes can decode to gigabytes, and a batch has 10,000 records, so the limit is for the call. It is also
#: the most that a single record can take.
MOST_BYTES = 256 << 20

#: The most columns of a reader schema, and the most types of a JSON Schema. A type counts at each place where
#: it is used, because it becomes columns there.
MAX_FIELDS = 20_000
#: How deep types may be nested in each other. Arrow's and Spark's code for types is recursive.
MAX_DEPTH = 64
_LONGEST_PATH = 300


@dataclass(frozen=True)
class Converted:
    """A converted column, and the rows that could not be converted.

    Attributes:
        values: One value per row that was converted; null where the input is null or the row has an error.
            If more would take too much memory, only the first rows were converted; none if the first row
            alone takes too much.
        errors: Message by row number, for rows that do not fit their schema.
    """

    values: pa.Array
    errors: Mapping[int, str] = field(default_factory=dict)

    def first(self, rows: int) -> Converted:
        """Returns only the first rows."""
        return self if rows >= len(self.values) else self.of(self.values.slice(0, rows), self.errors)

    @classmethod
    def of(cls, values: pa.Array, errors: Mapping[int, str]) -> Converted:
        """Returns values with the errors of their rows, and without the errors of later rows."""
        return cls(values, {row: text for row, text in errors.items() if row < len(values)})


def inside(path: str, step: str) -> str:
    """Returns the path of a field inside another, for errors; only the end of a long path."""
    found = path + step
    return found if len(found) <= _LONGEST_PATH else "…" + found[1 - _LONGEST_PATH :]


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
