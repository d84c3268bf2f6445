"""Encodes grouping columns as group keys, and makes the keys of `layout`, for many rows at once.

A group key of a single column is short and cheap to make:

* String or binary: the bytes themselves. Null is the byte 0xff. A value that begins with 0xff, which is never
  valid UTF-8, is preceded by another 0xff.
* Fixed-width type: the bytes of `cells`, which sort like the values. Null is empty.

A group key of several columns is a row in the format of `rows`. As in Spark, -0.0 and 0.0 are equal, and all
NaN are equal.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from kafka_eos_source.errors import InvalidSchemaError
from kafka_eos_source.state import layout
from kafka_eos_source.state.encoding import binary, cells
from kafka_eos_source.state.encoding.binary import Ints
from kafka_eos_source.state.encoding.rows import RowCodec

_ESCAPE = b"\xff"
_SIGN = np.uint64(1 << 63)


class KeyCodec:
    """Encodes grouping columns as group keys, and decodes them. Decoding requires only the schema.

    Args:
        schema: one or more grouping columns of type bool, int8 to int64, float, double, decimal, string,
            binary, date, time or timestamp. Nulls form a group, even in a column that is not nullable.

    Raises:
        InvalidSchemaError: if there is no column, or a column has another type.
    """

    def __init__(self, schema: pa.Schema) -> None:
        if not len(schema):
            raise InvalidSchemaError("there is no grouping column.", fix="group by at least one column.")
        self.schema = pa.schema([pa.field(field.name, field.type) for field in schema])
        self._rows = RowCodec(self.schema, normalize=True)
        self._single: pa.DataType | None = schema.field(0).type if len(schema) == 1 else None

    def encode(self, columns: Sequence[pa.Array]) -> pa.BinaryArray:
        """Returns the group key of each row, which is never null."""
        if self._single is None:
            return self._rows.encode(columns)
        (column,) = columns
        if cells.is_variable(self._single):
            return _escaped(binary.to_binary(column))
        packed = cells.pack(column, normalize=True)
        if not column.null_count:
            return binary.from_matrix(packed)
        is_valid = binary.valid(column)
        begins = np.concatenate([[0], np.cumsum(is_valid * packed.shape[1])])
        return binary.from_parts(begins, packed[is_valid].reshape(-1))

    def decode(self, keys: pa.BinaryArray) -> list[pa.Array]:
        """Returns the grouping columns of the group keys.

        Raises:
            ValueError: if this codec did not encode a key.
        """
        if self._single is None:
            return self._rows.decode(keys)
        if cells.is_variable(self._single):
            return [binary.of_type(_unescaped(keys), self._single)]
        size = cells.width(self._single) or 0
        lengths = np.diff(binary.offsets(keys))
        is_valid = lengths == size
        if not bool((is_valid | (lengths == 0)).all()):
            raise ValueError(f"a key is not {size} bytes long, which the type {self._single} requires")
        if bool(is_valid.all()):
            return [cells.unpack(binary.head(keys, size), self._single)]
        packed = np.zeros((len(keys), size), np.uint8)
        packed[is_valid] = binary.head(keys.filter(pa.array(is_valid)), size)
        return [cells.unpack(packed, self._single, is_valid)]


def _escaped(column: pa.BinaryArray) -> pa.BinaryArray:
    if _has_escape(column):
        starts_with_escape = pc.starts_with(column, pattern=_ESCAPE)
        column = pc.if_else(starts_with_escape, binary.join(_ESCAPE, column), column)
    return column.fill_null(_ESCAPE) if column.null_count else column


def _unescaped(keys: pa.BinaryArray) -> pa.BinaryArray:
    if not _has_escape(keys):
        return keys
    begins = binary.offsets(keys).astype(np.int64)
    starts_with_escape = pc.starts_with(keys, pattern=_ESCAPE).to_numpy(zero_copy_only=False)
    column = binary.substrings(begins[:-1] + starts_with_escape, begins[1:], binary.data(keys))
    return pc.if_else(pc.equal(keys, pa.scalar(_ESCAPE, pa.binary())), pa.scalar(None, pa.binary()), column)


def _has_escape(values: pa.BinaryArray) -> bool:
    """Whether any value contains 0xff. Checking all bytes is faster than checking the start of each value."""
    begins = binary.offsets(values)
    return bool((binary.data(values)[begins[0] : begins[-1]] == 0xFF).any())


def numbered(group_keys: pa.BinaryArray) -> tuple[Ints, pa.BinaryArray]:
    """Numbers the distinct group keys from 0 in order of arrival.

    Returns:
        The number of each group key, and the distinct group keys by number.
    """
    encoded = group_keys.dictionary_encode()
    return np.asarray(encoded.indices, np.int64), encoded.dictionary


def numbered_in_order(group_keys: pa.BinaryArray) -> tuple[Ints, pa.BinaryArray]:
    """Numbers the distinct group keys like `numbered`, but in key order.

    A store finds keys that are in order twice as fast.
    """
    number, distinct = numbered(group_keys)
    order = pc.sort_indices(distinct)
    rank = np.empty(len(distinct), np.int64)
    rank[np.asarray(order)] = np.arange(len(distinct))
    return rank[number], distinct.take(order)


def keyed_keys(table: int, group_keys: pa.BinaryArray, rest: pa.BinaryArray | None = None) -> pa.BinaryArray:
    """Returns the `layout.keyed` key of each row."""
    lead = np.empty((len(group_keys), 5), np.uint8)
    lead[:, 0] = table
    lead[:, 1:] = _lengths(group_keys)
    return _joined(lead, group_keys, rest)


def timed_keys(
    table: int, times_ms: Ints, group_keys: pa.BinaryArray, rest: pa.BinaryArray | None = None
) -> pa.BinaryArray:
    """Returns the `layout.timed` key of each row."""
    lead = np.empty((len(group_keys), 13), np.uint8)
    lead[:, 0] = table
    lead[:, 1:9] = ((times_ms.view(np.uint64)) ^ _SIGN).astype(">u8").view(np.uint8).reshape(-1, 8)
    lead[:, 9:] = _lengths(group_keys)
    return _joined(lead, group_keys, rest)


def _joined(lead: binary.Bytes, group_keys: pa.BinaryArray, rest: pa.BinaryArray | None) -> pa.BinaryArray:
    parts = [group_keys] if rest is None else [group_keys, rest]
    if len(lead) and bool((lead == lead[0]).all()):
        return binary.join(lead[0].tobytes(), *parts)
    return binary.join(binary.from_matrix(lead), *parts)


def _lengths(values: pa.BinaryArray) -> binary.Bytes:
    return np.diff(binary.offsets(values)).astype(">u4").view(np.uint8).reshape(-1, 4)


class Entries(NamedTuple):
    """The parts of many keys; each array has one element per key.

    Attributes:
        tables: the tables: the first byte of each key.
        group_keys: the group keys, see `KeyCodec`.
        rests: the bytes after the group keys.
        times_ms: the times in timed tables; 0 in keyed tables.
    """

    tables: NDArray[np.uint8]
    group_keys: pa.BinaryArray
    rests: pa.BinaryArray
    times_ms: Ints


def split_keys(keys: pa.BinaryArray) -> Entries:
    """Splits each key like `layout.split`. The keys may be from different tables.

    Raises:
        ValueError: if one of them is not a key of a table.
    """
    begins = binary.offsets(keys).astype(np.int64)
    starts, ends = begins[:-1], begins[1:]
    # The padding allows reads past the end of a truncated key, which is detected below.
    flat = np.concatenate([binary.data(keys)[: begins[-1]], np.zeros(16, np.uint8)])
    tables = flat[starts]
    if bool((starts == ends).any()) or bool(np.isin(tables, (0, layout.TIMED)).any()):
        raise ValueError("a value among the keys is not a key of a table")
    is_timed = tables > layout.TIMED
    at = starts + np.where(is_timed, 9, 1)
    lengths = _big_endian(flat, np.minimum(at, begins[-1]), 4).astype(np.int64)
    group_starts = at + 4
    group_ends = group_starts + lengths
    if bool((group_ends > ends).any()):
        raise ValueError("a value among the keys is truncated")
    times_ms = np.zeros(len(keys), np.int64)
    times_ms[is_timed] = (_big_endian(flat, starts[is_timed] + 1, 8) ^ _SIGN).view(np.int64)
    values = binary.data(keys)
    return Entries(
        tables,
        binary.substrings(group_starts, group_ends, values),
        binary.substrings(group_ends, ends, values),
        times_ms,
    )


def _big_endian(flat: binary.Bytes, at: Ints, size: int) -> NDArray[np.uint64]:
    number = np.zeros(len(at), np.uint64)
    for byte in range(size):
        number = (number << np.uint64(8)) | flat[at + byte]
    return number
