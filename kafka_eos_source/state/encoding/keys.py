"""Group keys: the grouping columns as bytes, and the keys of `layout` for many rows at once.

A group key of one column is as short as it can be, and costs next to nothing to make:

* string or binary: its own bytes. Null is the byte 0xff; a value that begins with 0xff (no valid UTF-8 does)
  has another 0xff before it.
* a type of fixed width: its bytes of `cells`, which sort as the values do. Null has no bytes.

A group key of several columns is a row of `rows`. -0.0 groups with 0.0, and all NaN are one, as in Spark.
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
    """Grouping columns to group keys and back. The schema is all that is needed to read them.

    Args:
        schema: of the grouping columns, one at least: bool, int8 to int64, float, double, decimal, string,
            binary, date, time, timestamp. Nulls group together, whatever the schema says of them.

    Raises:
        InvalidSchemaError: no column, or one of another type.
    """

    def __init__(self, schema: pa.Schema) -> None:
        if not len(schema):
            raise InvalidSchemaError("no grouping column", fix="name one at least")
        self.schema = pa.schema([pa.field(field.name, field.type) for field in schema])
        self._rows = RowCodec(self.schema, normal=True)
        self._lone: pa.DataType | None = schema.field(0).type if len(schema) == 1 else None

    def encode(self, columns: Sequence[pa.Array]) -> pa.BinaryArray:
        """The group key of each row; none is null."""
        if self._lone is None:
            return self._rows.encode(columns)
        (column,) = columns
        if cells.is_variable(self._lone):
            return _escaped(binary.to_binary(column))
        packed = cells.pack(column, normal=True)
        if not column.null_count:
            return binary.from_matrix(packed)
        is_valid = binary.valid(column)
        begins = np.concatenate([[0], np.cumsum(is_valid * packed.shape[1])])
        return binary.from_parts(begins, packed[is_valid].reshape(-1))

    def decode(self, keys: pa.BinaryArray) -> list[pa.Array]:
        """The grouping columns of group keys.

        Raises:
            ValueError: a key is not one of this codec.
        """
        if self._lone is None:
            return self._rows.decode(keys)
        if cells.is_variable(self._lone):
            return [binary.of_type(_unescaped(keys), self._lone)]
        size = cells.width(self._lone) or 0
        lengths = np.diff(binary.offsets(keys))
        is_valid = lengths == size
        if not bool((is_valid | (lengths == 0)).all()):
            raise ValueError(f"a key that is not {size} bytes long, as {self._lone} is")
        if bool(is_valid.all()):
            return [cells.unpack(binary.head(keys, size), self._lone)]
        packed = np.zeros((len(keys), size), np.uint8)
        packed[is_valid] = binary.head(keys.filter(pa.array(is_valid)), size)
        return [cells.unpack(packed, self._lone, is_valid)]


def _escaped(column: pa.BinaryArray) -> pa.BinaryArray:
    if _has_escape(column):
        marked = pc.starts_with(column, pattern=_ESCAPE)
        column = pc.if_else(marked, binary.join(_ESCAPE, column), column)
    return column.fill_null(_ESCAPE) if column.null_count else column


def _unescaped(keys: pa.BinaryArray) -> pa.BinaryArray:
    if not _has_escape(keys):
        return keys
    begins = binary.offsets(keys).astype(np.int64)
    marked = pc.starts_with(keys, pattern=_ESCAPE).to_numpy(zero_copy_only=False)
    column = binary.substrings(begins[:-1] + marked, begins[1:], binary.data(keys))
    return pc.if_else(pc.equal(keys, pa.scalar(_ESCAPE, pa.binary())), pa.scalar(None, pa.binary()), column)


def _has_escape(values: pa.BinaryArray) -> bool:
    """Whether any value begins with 0xff: a look at all bytes is faster than one at each beginning."""
    begins = binary.offsets(values)
    return bool((binary.data(values)[begins[0] : begins[-1]] == 0xFF).any())


def numbered(group_keys: pa.BinaryArray) -> tuple[Ints, pa.BinaryArray]:
    """Of each group key its number, from 0 in the order in which distinct ones come first; and these keys."""
    encoded = group_keys.dictionary_encode()
    return np.asarray(encoded.indices, np.int64), encoded.dictionary


def numbered_in_order(group_keys: pa.BinaryArray) -> tuple[Ints, pa.BinaryArray]:
    """`numbered`, with the numbers in the order of the keys: a store finds keys in order twice as fast."""
    number, distinct = numbered(group_keys)
    order = pc.sort_indices(distinct)
    rank = np.empty(len(distinct), np.int64)
    rank[np.asarray(order)] = np.arange(len(distinct))
    return rank[number], distinct.take(order)


def keyed_keys(table: int, group_keys: pa.BinaryArray, rest: pa.BinaryArray | None = None) -> pa.BinaryArray:
    """`layout.keyed` of each row."""
    lead = np.empty((len(group_keys), 5), np.uint8)
    lead[:, 0] = table
    lead[:, 1:] = _lengths(group_keys)
    return _joined(lead, group_keys, rest)


def timed_keys(
    table: int, times_ms: Ints, group_keys: pa.BinaryArray, rest: pa.BinaryArray | None = None
) -> pa.BinaryArray:
    """`layout.timed` of each row."""
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
    """Keys, taken apart; one of each a key.

    Attributes:
        tables: first byte.
        group_keys: see `KeyCodec`.
        rests: what comes behind them.
        times_ms: of timed tables; 0 in others.
    """

    tables: NDArray[np.uint8]
    group_keys: pa.BinaryArray
    rests: pa.BinaryArray
    times_ms: Ints


def split_keys(keys: pa.BinaryArray) -> Entries:
    """`layout.split` of each key, whatever tables they are of.

    Raises:
        ValueError: one is no key of a processor's table.
    """
    begins = binary.offsets(keys).astype(np.int64)
    starts, ends = begins[:-1], begins[1:]
    # Padded, so that a look past the last key's end is no error; it is checked below.
    flat = np.concatenate([binary.data(keys)[: begins[-1]], np.zeros(16, np.uint8)])
    tables = flat[starts]
    if bool((starts == ends).any()) or bool(np.isin(tables, (0, layout.TIMED)).any()):
        raise ValueError("not a key of a table among the keys")
    is_timed = tables > layout.TIMED
    at = starts + np.where(is_timed, 9, 1)
    lengths = _big_endian(flat, np.minimum(at, begins[-1]), 4).astype(np.int64)
    group_starts = at + 4
    group_ends = group_starts + lengths
    if bool((group_ends > ends).any()):
        raise ValueError("a key cut short among the keys")
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
