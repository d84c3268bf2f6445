"""Operations on Arrow binary arrays with numpy, which join and cut the bytes of many rows without a loop.

The arrays are `pa.BinaryArray`, whose offsets have 32 bits; so one array holds at most 2 GiB of values.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

Bytes = NDArray[np.uint8]
Ints = NDArray[np.int64]

_STRINGS = (pa.types.is_string, pa.types.is_large_string, pa.types.is_large_binary)


def to_binary(array: pa.Array) -> pa.BinaryArray:
    """Returns strings or binary values of any Arrow type as binary, without copying plain strings."""
    if pa.types.is_binary(array.type):
        return array
    if any(is_type(array.type) for is_type in _STRINGS):
        return array.cast(pa.binary())
    # Not every version of Arrow can cast views and dictionaries directly to binary.
    plain = pa.string() if "string" in str(array.type) else pa.binary()
    return array.cast(plain).cast(pa.binary())


def of_type(array: pa.BinaryArray, type_: pa.DataType) -> pa.Array:
    """Returns the bytes as a string or binary type. Keeps invalid UTF-8, which the input may contain."""
    if pa.types.is_string(type_):
        return pa.Array.from_buffers(type_, len(array), array.buffers(), offset=array.offset)
    if pa.types.is_large_string(type_):
        large = array.cast(pa.large_binary())
        return pa.Array.from_buffers(type_, len(large), large.buffers(), offset=large.offset)
    return array.cast(type_)


def offsets(array: pa.BinaryArray) -> NDArray[np.int32]:
    """Returns where each value begins in `data`, and where the last one ends: ``len(array) + 1`` numbers."""
    if len(array) == 0:
        return np.zeros(1, np.int32)
    return np.frombuffer(array.buffers()[1], np.int32, len(array) + 1, array.offset * 4)


def data(array: pa.BinaryArray) -> Bytes:
    """Returns the bytes of all values, which `offsets` refers to."""
    buffer = array.buffers()[2]
    return np.frombuffer(buffer, np.uint8) if buffer else np.zeros(0, np.uint8)


def valid(array: pa.Array) -> NDArray[np.bool_]:
    """Returns True for each value that is not null."""
    if array.null_count == 0:
        return np.ones(len(array), np.bool_)
    return np.asarray(array.is_valid().to_numpy(zero_copy_only=False), np.bool_)


def bitmap(is_valid: NDArray[np.bool_]) -> pa.Buffer | None:
    """Returns Arrow's validity bitmap; None if no value is null."""
    return None if bool(is_valid.all()) else pa.py_buffer(np.packbits(is_valid, bitorder="little"))


def from_parts(
    begins: NDArray[Any], values: Bytes, is_valid: NDArray[np.bool_] | None = None
) -> pa.BinaryArray:
    """Returns the array whose ``i``-th value is ``values[begins[i]:begins[i + 1]]``."""
    nulls = None if is_valid is None else bitmap(is_valid)
    buffers = [nulls, pa.py_buffer(np.ascontiguousarray(begins, np.int32)), pa.py_buffer(values)]
    return pa.Array.from_buffers(pa.binary(), len(begins) - 1, buffers)


def from_matrix(rows: Bytes) -> pa.BinaryArray:
    """Returns an array with one value for each row of a byte matrix, without copying.

    Raises:
        OverflowError: if the matrix is larger than 2 GiB.
    """
    count, width = rows.shape
    if count * width > np.iinfo(np.int32).max:
        raise OverflowError(f"{count} values of {width} bytes exceed the 2 GiB that one Arrow array holds")
    return from_parts(np.arange(count + 1, dtype=np.int64) * width, rows.reshape(-1))


def head(array: pa.BinaryArray, width: int) -> Bytes:
    """Returns the first ``width`` bytes of each value as a matrix. No value may be null.

    Raises:
        ValueError: if a value is shorter.
    """
    begins = offsets(array)
    flat = data(array)[begins[0] : begins[-1]]
    count = len(array)
    if flat.size == count * width and bool((np.diff(begins) == width).all()):
        return flat.reshape(count, width)
    if count and int(np.diff(begins).min()) < width:
        raise ValueError(f"a value has {int(np.diff(begins).min())} bytes, expected {width} or more")
    starts = begins[:-1].astype(np.int64)
    cut = substrings(starts, starts + width, data(array))
    return data(cut)[: count * width].reshape(count, width)


def join(*parts: pa.BinaryArray | bytes) -> pa.BinaryArray:
    """Concatenates the parts of each row. A null counts as empty; ``bytes`` are the same in each row."""
    if len(parts) == 1 and not isinstance(parts[0], bytes) and parts[0].null_count == 0:
        return parts[0]
    scalars = [pa.scalar(part, pa.binary()) if isinstance(part, bytes) else part for part in parts]
    return pc.binary_join_element_wise(*scalars, pa.scalar(b"", pa.binary()), null_handling="replace")


def substrings(starts: Ints, ends: Ints, values: Bytes) -> pa.BinaryArray:
    """Returns, for each ``i``, the bytes of ``values`` from ``starts[i]`` to ``ends[i]`` (exclusive).

    Each range must begin at or after the end of the range before it.
    """
    count = len(starts)
    # An array with the ranges and the gaps between them; every second value is a range.
    edges = np.empty(max(2 * count, 1), np.int32)
    edges[0::2] = starts if count else 0
    edges[1::2] = ends
    return from_parts(edges, values).take(pa.array(np.arange(0, 2 * count, 2, dtype=np.int64)))


def concat(arrays: Sequence[pa.Array], type_: pa.DataType) -> pa.Array:
    """Returns one array with the values of all arrays; an empty one of ``type_`` if there are none."""
    if len(arrays) == 1:
        return arrays[0]
    return pa.concat_arrays(arrays) if arrays else pa.array([], type_)
