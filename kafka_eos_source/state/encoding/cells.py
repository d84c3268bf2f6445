"""Encodes fixed-width columns as byte matrices with one row per value; the bytes sort like the values.

========================  =====  ===========================================================================
type                      bytes  encoding
========================  =====  ===========================================================================
bool                      1      0 or 1
int8 to int64             1-8    big endian, sign bit flipped
date32, timestamp, time   4, 8   like the integer that Arrow stores
float, double             4, 8   big endian; all bits flipped if negative, otherwise the sign bit
decimal128                16     big endian, sign bit flipped
========================  =====  ===========================================================================
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from kafka_eos_source.state.encoding.binary import Bytes, bitmap, valid

_VARIABLE = (
    pa.types.is_string,
    pa.types.is_binary,
    pa.types.is_large_string,
    pa.types.is_large_binary,
)
_FLOATS = (pa.types.is_float32, pa.types.is_float64)
_INTEGERS = (
    pa.types.is_signed_integer,
    pa.types.is_date32,
    pa.types.is_timestamp,
    pa.types.is_time,
    pa.types.is_duration,
)


def is_variable(type_: pa.DataType) -> bool:
    """Whether values of the type vary in length: strings and binary."""
    return any(is_type(type_) for is_type in _VARIABLE)


def is_float(type_: pa.DataType) -> bool:
    """Whether the type is float or double."""
    return any(is_type(type_) for is_type in _FLOATS)


def width(type_: pa.DataType) -> int | None:
    """Returns the bytes per value of this type; None if the width varies or the type is not supported."""
    if pa.types.is_boolean(type_):
        return 1
    if pa.types.is_decimal128(type_):
        return 16
    if is_float(type_) or any(is_type(type_) for is_type in _INTEGERS):
        return int(type_.bit_width) // 8
    return None


def raw(array: pa.Array, dtype: Any) -> NDArray[Any]:
    """Returns the values of a fixed-width column as a numpy array, with zeros for nulls."""
    if len(array) == 0:
        return np.zeros(0, dtype)
    values = np.frombuffer(array.buffers()[1], dtype, len(array), array.offset * np.dtype(dtype).itemsize)
    return np.where(valid(array), values, values.dtype.type(0)) if array.null_count else values


def pack(array: pa.Array, *, normalize: bool = False) -> Bytes:
    """Returns the column as bytes, with one row per value and zeros for nulls.

    Args:
        array: column of a type that has a `width`.
        normalize: whether to encode -0.0 as 0.0 and every NaN as the same value, as Spark does for grouping.
    """
    type_, count = array.type, len(array)
    size = width(type_)
    assert size is not None, type_
    if count == 0:
        return np.zeros((0, size), np.uint8)
    if pa.types.is_boolean(type_):
        return raw(array.cast(pa.uint8()), np.uint8).reshape(count, 1)
    if pa.types.is_decimal128(type_):
        words = np.frombuffer(array.buffers()[1], "<u8", 2 * count, array.offset * 16).reshape(count, 2)[
            :, ::-1
        ]
        big = words.astype(">u8")
        big[:, 0] ^= np.uint64(1 << 63)
    elif is_float(type_):
        big = to_order(raw(array, f"<f{size}"), normalize=normalize).astype(f">u{size}")
    else:
        sign = np.dtype(f"u{size}").type(1 << (8 * size - 1))
        big = (raw(array, f"<u{size}") ^ sign).astype(f">u{size}")
    packed = big.view(np.uint8).reshape(count, size)
    if array.null_count:
        packed[~valid(array)] = 0
    return packed


def unpack(packed: Bytes, type_: pa.DataType, is_valid: NDArray[np.bool_] | None = None) -> pa.Array:
    """Returns the column that `pack` encoded. Rows that are not valid become null."""
    count, size = packed.shape
    nulls = None if is_valid is None else bitmap(is_valid)
    if pa.types.is_boolean(type_):
        bits = pa.py_buffer(np.packbits(packed[:, 0] != 0, bitorder="little"))
        return pa.Array.from_buffers(type_, count, [nulls, bits])
    packed = np.ascontiguousarray(packed)
    values: NDArray[Any]
    if pa.types.is_decimal128(type_):
        values = packed.reshape(-1).view(">u8").reshape(count, 2)[:, ::-1].astype("<u8")
        values[:, 1] ^= np.uint64(1 << 63)
    else:
        big = packed.reshape(-1).view(f">u{size}").astype(f"<u{size}")
        sign = big.dtype.type(1 << (8 * size - 1))
        values = from_order(big) if is_float(type_) else big ^ sign
    return pa.Array.from_buffers(type_, count, [nulls, pa.py_buffer(np.ascontiguousarray(values))])


def to_order(values: NDArray[Any], *, normalize: bool = False) -> NDArray[Any]:
    """Returns floats as unsigned integers in the same order. All NaN are equal and largest, as in Spark."""
    size = values.dtype.itemsize
    nan = np.isnan(values)
    values = values + values.dtype.type(0) if normalize else values  # -0.0 + 0.0 = 0.0
    if bool(nan.any()):
        values = np.where(nan, values.dtype.type("nan"), values)
    bits = values.view(f"<u{size}")
    sign = bits.dtype.type(1 << (8 * size - 1))
    return np.where(bits & sign, ~bits, bits | sign)


def from_order(bits: NDArray[Any]) -> NDArray[Any]:
    """Returns the floats that `to_order` encoded."""
    size = bits.dtype.itemsize
    sign = bits.dtype.type(1 << (8 * size - 1))
    return np.where(bits & sign, bits ^ sign, ~bits).view(f"<f{size}")


def zero(type_: pa.DataType) -> pa.Array:
    """Returns an array with one zero of a fixed-width type, such as false or the epoch."""
    return pa.Array.from_buffers(type_, 1, [None, pa.py_buffer(bytes(16))])
