"""Groups the rows of a shard by key, and converts them to what a processor takes: rows or pandas frames.

Grouping holds the rows in memory twice: in order of arrival and in order of their keys. `shard_rows` divides
those of a large micro-batch first.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from kafka_eos_source.errors import InvalidRecordError
from kafka_eos_source.state.encoding.layout import KeyCodec
from kafka_eos_source.state.processor.codec import make_row
from kafka_eos_source.state.processor.window import WINDOW_KEYS

if TYPE_CHECKING:
    import pandas as pd

RowStyle = Literal["rows", "pandas"]
Key = tuple[Any, ...]

#: Number of rows that are converted to Python objects at a time; a key may have more.
SLICE_ROWS = 16_384


@dataclass(frozen=True)
class Groups:
    """Rows in order of their keys; the rows of a key are in order of arrival.

    Attributes:
        table: the rows.
        group_keys: the distinct encoded keys, in order of arrival of their first rows.
        keys: the same keys as the processor receives them.
        edges: the rows of key ``i`` are ``edges[i]`` to ``edges[i + 1]`` (exclusive).
    """

    table: pa.Table
    group_keys: pa.BinaryArray
    keys: list[Key]
    edges: list[int]

    def windows(self) -> Iterator[tuple[int, int]]:
        """Yields the ranges of keys that form a window.

        A window has at most `WINDOW_KEYS` keys, and at most `SLICE_ROWS` rows unless it has a single key.
        """
        start, count = 0, len(self.keys)
        while start < count:
            end = int(np.searchsorted(self.edges, self.edges[start] + SLICE_ROWS, "right")) - 1
            end = min(max(end, start + 1), start + WINDOW_KEYS)
            yield start, end
            start = end


class KeyColumns:
    """The grouping columns of a shard: encodes the keys of rows, and decodes them for the processor.

    Args:
        schema: schema of the grouping columns.
        style: whether the processor takes rows or pandas frames.
    """

    def __init__(self, schema: pa.Schema, style: RowStyle) -> None:
        self._schema = schema
        self._style = style
        self.codec = KeyCodec(schema)

    def group(self, table: pa.Table) -> Groups:
        """Sorts the rows by key."""
        # The cast is needed because Spark may send another time zone, or strings with 64-bit offsets.
        columns = [_whole(table.column(field.name).cast(field.type)) for field in self._schema]
        encoded = self.codec.encode(columns).dictionary_encode()
        codes = encoded.indices.to_numpy()
        order = np.argsort(codes, kind="stable")
        counts = np.bincount(codes, minlength=len(encoded.dictionary))
        edges = np.concatenate([[0], np.cumsum(counts)])
        first = pa.array(order[edges[:-1]])
        keys = self._tuples([column.take(first) for column in columns])
        ordered = table if _is_sorted(codes) else table.take(pa.array(order))
        return Groups(ordered, encoded.dictionary, keys, edges.tolist())

    def keys(self, group_keys: pa.BinaryArray) -> list[Key]:
        """Returns encoded keys as the processor receives them."""
        return self._tuples(self.codec.decode(group_keys))

    def values(self, groups: Groups, start: int, end: int) -> Iterator[Iterator[Any]]:
        """Yields the rows of each key from ``start`` to ``end`` (exclusive), as the processor takes them."""
        first, last = groups.edges[start], groups.edges[end]
        if end - start == 1 and last - first > SLICE_ROWS:
            yield self._lazily(groups.table.slice(first, last - first))
            return
        part = groups.table.slice(first, last - first)
        edges = [edge - first for edge in groups.edges[start : end + 1]]
        if self._style == "pandas":
            frame = to_pandas(part)
            yield from (iter([_cut(frame, low, high)]) for low, high in pairwise(edges))
        else:
            rows = to_rows(part)
            yield from (iter(rows[low:high]) for low, high in pairwise(edges))

    def _lazily(self, table: pa.Table) -> Iterator[Any]:
        for start in range(0, table.num_rows, SLICE_ROWS):
            part = table.slice(start, SLICE_ROWS)
            if self._style == "pandas":
                yield to_pandas(part)
            else:
                yield from to_rows(part)

    def _tuples(self, columns: Sequence[pa.Array]) -> list[Key]:
        if self._style == "pandas":
            table = pa.Table.from_arrays(list(columns), names=[str(i) for i in range(len(columns))])
            return list(to_pandas(table).itertuples(index=False, name=None))
        return list(zip(*map(_objects, self._schema.names, columns), strict=True))


def to_rows(table: pa.Table) -> list[Any]:
    """Returns each row as a `Row` with all columns, converted by Arrow's ``as_py`` as in Spark's worker.

    Raises:
        InvalidRecordError: if Python has no object for a value, such as a time after the year 9999.
    """
    names = table.column_names
    return [make_row(names, values) for values in zip(*map(_objects, names, table.columns), strict=True)]


def _objects(name: str, column: pa.Array | pa.ChunkedArray) -> list[Any]:
    try:
        return column.to_pylist()  # type: ignore[no-any-return]
    except (OverflowError, ValueError) as error:
        raise InvalidRecordError(
            f"column {name!r} ({column.type}) has a value for which Python has no object ({error}), such as "
            "a time after the year 9999, which Spark can hold.",
            fix="before the operator, filter such rows out or set the value to null. The timestamp of a "
            "record is such a time if its producer sets microseconds.",
        ) from error


def to_pandas(table: pa.Table) -> pd.DataFrame:
    """Returns a pandas frame of all columns. Timestamps are naive, in the time zone of their column."""
    frame = table.to_pandas(date_as_object=True)
    for name, field in zip(frame.columns, table.schema, strict=True):
        if pa.types.is_timestamp(field.type) and field.type.tz is not None:
            frame[name] = frame[name].dt.tz_localize(None)
    return frame


def _cut(whole: pd.DataFrame, low: int, high: int) -> pd.DataFrame:
    part = whole.iloc[low:high].copy()  # the processor may change its frame
    part.index = range(high - low)
    return part


def _whole(column: pa.ChunkedArray) -> pa.Array:
    combined = column.combine_chunks()
    return combined if isinstance(combined, pa.Array) else pa.concat_arrays(combined.chunks)


def _is_sorted(codes: NDArray[Any]) -> bool:
    return bool((codes[1:] >= codes[:-1]).all())
