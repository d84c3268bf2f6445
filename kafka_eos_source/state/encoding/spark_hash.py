"""Computes Spark's hash of key columns, which decides the shard of a row, for many rows at once.

``hash(c1, c2, …)`` and ``repartition(n, c1, c2, …)`` both use Murmur3 (x86, 32 bits) with seed 42. The hash
of a column is the seed of the next column; a null does not change it. This follows Spark's `Murmur3_x86_32`
and `HashExpression`, which differ from the published algorithm: each byte after the last whole word is mixed
in as a separate signed word.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from kafka_eos_source.errors import InvalidSchemaError
from kafka_eos_source.state.encoding import binary, cells
from kafka_eos_source.state.encoding.binary import Bytes, Ints

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
        columns: one or more columns of equal length, of types that `keys.KeyCodec` supports.
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
    if cells.is_variable(type_):
        text = binary.to_binary(column)
        begins = binary.offsets(text).astype(np.int64)
        return _bytes(binary.data(text), begins[:-1], np.diff(begins), seeds)
    if pa.types.is_boolean(type_):
        return _int(cells.raw(column.cast(pa.uint8()), np.uint8).astype(np.uint32), seeds)
    if pa.types.is_decimal128(type_):
        return _decimal(column, seeds)
    if cells.is_float(type_):
        return _float(column, seeds)
    if pa.types.is_timestamp(type_):
        column = column.cast(pa.timestamp("us", type_.tz))
    elif pa.types.is_time(type_):
        column = column.cast(pa.time64("ns"))
    elif pa.types.is_duration(type_):
        column = column.cast(pa.duration("us"))
    size = cells.width(column.type)
    if size is None:
        raise InvalidSchemaError(
            f"a key column is {type_}, whose hash cannot decide a shard.",
            fix="group by bool, int8 to int64, float, double, decimal, string, binary, date or timestamp.",
        )
    values = cells.raw(column, f"<i{size}")
    if size == 8:
        return _long(values.view(np.uint64), seeds)
    return _int(values.astype(np.int32).view(np.uint32), seeds)


def _float(column: pa.Array, seeds: Words) -> Words:
    """Hashes the bits of floats; -0.0 counts as 0.0, and all NaN are equal (``doubleToLongBits``)."""
    size = column.type.bit_width // 8
    values = cells.raw(column, f"<f{size}")
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
