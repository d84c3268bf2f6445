"""The keys of a store, which are also the keys of its changelog records, and the shards that they belong to.

::

    keyed   table (1 byte, 0x01 … 0x7f) │ length of group key (4, big endian) │ group key │ rest
    timed   table (1 byte, 0x81 … 0xff) │ time (8, big endian, sign flipped) │ length (4) │ group key │ rest
    0x00    reserved: the batch record of a changelog partition (`model.Owner`)

The *group key* holds the grouping columns. Every key contains it, so that ``kafka-eos state rescale`` can
move a changelog to another number of shards without knowing the processor. The keys contain lengths instead
of separators, so a group key that is a prefix of another one never matches its entries. Timed tables are
ordered by time across all group keys: a range scan from the start of the table finds the entries that are
due.

A group key of a single column is short and cheap to make:

* String or binary: the bytes themselves. Null is the byte 0xff. A value that begins with 0xff, which is never
  valid UTF-8, is preceded by another 0xff.
* Fixed-width type: the cell of `binary`, which sorts like the values. Null is empty.

A group key of several columns is a row in the format of `binary.RowCodec`. As in Spark, -0.0 and 0.0 are
equal, and all NaN are equal.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from kafka_eos_source.errors import InvalidSchemaError
from kafka_eos_source.state.encoding import binary
from kafka_eos_source.state.encoding.binary import Bytes, Ints, RowCodec

if TYPE_CHECKING:
    from kafka_eos_source.state.model import StateAccess

_LENGTH = struct.Struct(">I")
_TIMED = struct.Struct(">BQI")
_KEYED = struct.Struct(">BI")
_TIME_SIGN = 1 << 63

#: Tables above this number are timed.
TIMED = 0x80


class Entry(NamedTuple):
    """The parts of a key. ``time_ms`` is None in a keyed table."""

    table: int
    group_key: bytes
    rest: bytes
    time_ms: int | None = None


def keyed(table: int, group_key: bytes, rest: bytes = b"") -> bytes:
    """Returns a key of a keyed table (1 to 127)."""
    return _KEYED.pack(table, len(group_key)) + group_key + rest


def timed(table: int, time_ms: int, group_key: bytes, rest: bytes = b"") -> bytes:
    """Returns a key of a timed table (129 to 255), which is ordered by time first."""
    return _TIMED.pack(table, time_ms + _TIME_SIGN, len(group_key)) + group_key + rest


def before(table: int, time_ms: int) -> bytes:
    """Returns the exclusive end of a scan over a timed table's entries earlier than ``time_ms``."""
    return struct.pack(">BQ", table, time_ms + _TIME_SIGN)


def earliest_ms(state: StateAccess, table: int) -> int | None:
    """Returns the time of the earliest entry of a timed table; None if the table is empty."""
    prefix = bytes([table])
    first = next(iter(state.range(prefix, upper_bound(prefix))), None)
    return None if first is None else split(first[0]).time_ms


def split(key: bytes) -> Entry:
    """Returns the parts of a key that `keyed` or `timed` made.

    Raises:
        ValueError: if the key has neither layout.
    """
    if not key or key[0] in (0, TIMED):
        raise ValueError(f"not a key of a table: {key[:32]!r}")
    time_ms = None
    at = 1
    if key[0] > TIMED:
        time_ms = int.from_bytes(key[1:9], "big") - _TIME_SIGN
        at = 9
    if len(key) < at + 4:
        raise ValueError(f"a key is truncated: {key[:32]!r}")
    (length,) = _LENGTH.unpack_from(key, at)
    at += 4
    if len(key) < at + length:
        raise ValueError(f"a key is truncated: {key[:32]!r}")
    return Entry(key[0], key[at : at + length], key[at + length :], time_ms)


def upper_bound(prefix: bytes) -> bytes | None:
    """Returns the first key after all keys with this prefix; None if the prefix is empty or all 0xff."""
    stripped = prefix.rstrip(b"\xff")
    return stripped[:-1] + bytes([stripped[-1] + 1]) if stripped else None


# ---------------------------------------- many keys at once

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
        binary.check_cells(self.schema)
        self._rows = RowCodec(self.schema, normalize=True)
        self._single: pa.DataType | None = schema.field(0).type if len(schema) == 1 else None

    def encode(self, columns: Sequence[pa.Array]) -> pa.BinaryArray:
        """Returns the group key of each row, which is never null."""
        if self._single is None:
            return self._rows.encode(columns)
        (column,) = columns
        if binary.is_variable(self._single):
            return _escaped(binary.to_binary(column))
        packed = binary.pack(column, normalize=True)
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
        if binary.is_variable(self._single):
            return [binary.of_type(_unescaped(keys), self._single)]
        size = binary.width(self._single) or 0
        lengths = np.diff(binary.offsets(keys))
        is_valid = lengths == size
        if not bool((is_valid | (lengths == 0)).all()):
            raise ValueError(f"a key is not {size} bytes long, which the type {self._single} requires")
        if bool(is_valid.all()):
            return [binary.unpack(binary.head(keys, size), self._single)]
        packed = np.zeros((len(keys), size), np.uint8)
        packed[is_valid] = binary.head(keys.filter(pa.array(is_valid)), size)
        return [binary.unpack(packed, self._single, is_valid)]


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
    if bool((starts == ends).any()) or bool(np.isin(tables, (0, TIMED)).any()):
        raise ValueError("a value among the keys is not a key of a table")
    is_timed = tables > TIMED
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


# ---------------------------------------- Spark's hash of key columns, which decides the shard of a row
#
# ``hash(c1, c2, …)`` and ``repartition(n, c1, c2, …)`` both use Murmur3 (x86, 32 bits) with seed 42. The hash
# of a column is the seed of the next column; a null does not change it. This follows Spark's `Murmur3_x86_32`
# and `HashExpression`, which differ from the published algorithm: each byte after the last whole word is
# mixed in as a separate signed word.

Words = NDArray[np.uint32]

_SEED = 42
#: Up to this precision, Spark stores a decimal as a long, and hashes it as a long.
_LONG_DIGITS = 18

_C1, _C2 = np.uint32(0xCC9E2D51), np.uint32(0x1B873593)
_F1, _F2 = np.uint32(0x85EBCA6B), np.uint32(0xC2B2AE35)
_M, _N = np.uint32(5), np.uint32(0xE6546B64)


def hash_columns(columns: Sequence[pa.Array], seed: int = _SEED) -> NDArray[np.int32]:
    """Returns Spark's ``hash`` of each row.

    Args:
        columns: one or more columns of equal length, of types that `KeyCodec` supports.
        seed: another seed gives hashes that are independent of those that decide the shards.

    Raises:
        InvalidSchemaError: if a column has another type.
    """
    hashes = np.full(len(columns[0]), seed, np.uint32)
    for column in columns:
        hashed = _column(column, hashes)
        hashes = np.where(binary.valid(column), hashed, hashes) if column.null_count else hashed
    return hashes.view(np.int32)


def shards_of(columns: Sequence[pa.Array], shards: int) -> Ints:
    """Returns the shard of each row, ``pmod(hash(…), shards)``, as in ``repartition(shards, …)``."""
    return np.mod(hash_columns(columns).astype(np.int64), shards)


def _column(column: pa.Array, seeds: Words) -> Words:
    """Returns the hash of each value; callers ignore the hashes of nulls."""
    type_ = column.type
    if len(column) == 0:
        return seeds
    if pa.types.is_dictionary(type_):
        return _column(column.cast(type_.value_type), seeds)
    if binary.is_variable(type_):
        text = binary.to_binary(column)
        begins = binary.offsets(text).astype(np.int64)
        return _bytes(binary.data(text), begins[:-1], np.diff(begins), seeds)
    if pa.types.is_boolean(type_):
        return _int(binary.raw(column.cast(pa.uint8()), np.uint8).astype(np.uint32), seeds)
    if pa.types.is_decimal128(type_):
        return _decimal(column, seeds)
    if binary.is_float(type_):
        return _float(column, seeds)
    if pa.types.is_timestamp(type_):
        column = column.cast(pa.timestamp("us", type_.tz))
    elif pa.types.is_time(type_):
        column = column.cast(pa.time64("ns"))
    elif pa.types.is_duration(type_):
        column = column.cast(pa.duration("us"))
    size = binary.width(column.type)
    if size is None:
        raise InvalidSchemaError(
            f"a key column is {type_}, whose hash cannot decide a shard.",
            fix="group by bool, int8 to int64, float, double, decimal, string, binary, date or timestamp.",
        )
    values = binary.raw(column, f"<i{size}")
    if size == 8:
        return _long(values.view(np.uint64), seeds)
    return _int(values.astype(np.int32).view(np.uint32), seeds)


def _float(column: pa.Array, seeds: Words) -> Words:
    """Hashes the bits of floats; -0.0 counts as 0.0, and all NaN are equal (``doubleToLongBits``)."""
    size = column.type.bit_width // 8
    values = binary.raw(column, f"<f{size}")
    values = np.where(np.isnan(values), values.dtype.type("nan"), values + values.dtype.type(0))
    if size == 4:
        return _int(values.view(np.uint32), seeds)
    return _long(values.view(np.uint64), seeds)


def _decimal(column: pa.Array, seeds: Words) -> Words:
    count = len(column)
    words = np.frombuffer(column.buffers()[1], "<u8", 2 * count, column.offset * 16).reshape(count, 2)
    if column.type.precision <= _LONG_DIGITS:
        return _long(np.ascontiguousarray(words[:, 0]), seeds)
    # The bytes of Java's BigInteger.toByteArray: big endian, with the fewest bytes that keep the sign.
    big = words[:, ::-1].astype(">u8").view(np.uint8).reshape(count, 16)
    sign = np.where(big[:, 0] & 0x80, np.uint8(0xFF), np.uint8(0))[:, None]
    idle = (big[:, :-1] == sign) & ((big[:, 1:] ^ sign) < 0x80)
    leading = np.logical_and.accumulate(idle, axis=1).sum(axis=1)
    starts = np.arange(count, dtype=np.int64) * 16 + leading
    return _bytes(big.reshape(-1), starts, 16 - leading, seeds)


def _int(values: Words, seeds: Words) -> Words:
    return _final(_mix(seeds, values), np.uint32(4))


def _long(values: NDArray[np.uint64], seeds: Words) -> Words:
    low, high = values.astype(np.uint32), (values >> np.uint64(32)).astype(np.uint32)
    return _final(_mix(_mix(seeds, low), high), np.uint32(8))


def _bytes(data: Bytes, starts: Ints, lengths: Ints, seeds: Words) -> Words:
    """Hashes byte strings in ``data``, one word at a time over all rows that have another word."""
    hashes = seeds.copy()
    # A view with a word at every byte; the padding makes the last ones complete.
    padded = np.concatenate([data, np.zeros(4, np.uint8)])
    words: Any = np.ndarray((len(padded) - 3,), "<u4", padded, strides=(1,))
    whole = lengths >> 2
    rows = np.arange(len(starts))
    at = 0
    while len(rows := rows[whole[rows] > at]):
        hashes[rows] = _mix(hashes[rows], words[starts[rows] + 4 * at])
        at += 1
    rows = np.arange(len(starts))
    done = whole * 4
    at = 0
    while len(rows := rows[lengths[rows] - done[rows] > at]):
        left = padded[starts[rows] + done[rows] + at].view(np.int8).astype(np.int32).view(np.uint32)
        hashes[rows] = _mix(hashes[rows], left)
        at += 1
    return _final(hashes, lengths.astype(np.uint32))


def _mix(hashes: Words, words: Words) -> Words:
    words = words * _C1
    words = (words << np.uint32(15)) | (words >> np.uint32(17))
    hashes = hashes ^ (words * _C2)
    hashes = (hashes << np.uint32(13)) | (hashes >> np.uint32(19))
    mixed: Words = hashes * _M + _N
    return mixed


def _final(hashes: Words, length: Words | np.uint32) -> Words:
    hashes = np.bitwise_xor(hashes, length)
    hashes ^= hashes >> np.uint32(16)
    hashes *= _F1
    hashes ^= hashes >> np.uint32(13)
    hashes *= _F2
    hashes ^= hashes >> np.uint32(16)
    return hashes
