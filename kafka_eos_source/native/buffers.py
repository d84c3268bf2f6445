"""What the C libraries take and return, as ctypes and Arrow see it: the Python side of buffers.h."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from ctypes import Structure, c_char_p, c_int64, c_void_p, py_object
from typing import Any

import pyarrow as pa

#: How a call ended that found no memory.
NO_MEMORY = 1


class Part(Structure):
    """``part_t``: a buffer that a library allocated, of which ``bytes`` are used."""

    _fields_ = (("at", c_void_p), ("bytes", c_int64), ("capacity", c_int64))


class Memory:
    """Owns what a call of a library returned, and frees it with the last array that refers to it.

    Args:
        pointer: what the call returned.
        free: the library's function that frees it.
        content: what the memory was for, for the error.

    Attributes:
        pointer: likewise.
        block: the struct at that address.

    Raises:
        MemoryError: if the call returned NULL, which means that there was not enough memory.
    """

    def __init__(self, pointer: Any, free: Callable[[Any], None], content: str) -> None:
        if not pointer:
            raise MemoryError(f"not enough memory for {content}")
        self._free = free
        self.pointer = pointer
        self.block = pointer.contents

    def __del__(self) -> None:
        if hasattr(self, "block"):
            self._free(self.pointer)

    def buffer(self, part: Part) -> pa.Buffer:
        """Returns a buffer that refers to a part of the memory."""
        return pa.foreign_buffer(part.at, part.bytes, self) if part.at else pa.py_buffer(b"")

    def columns(self, kind: type[Structure]) -> Sequence[Any]:
        """Returns the ``column_count`` structs that follow the struct at the end of a block."""
        address = ctypes.addressof(self.block) + ctypes.sizeof(self.block)
        found: Sequence[Any] = (kind * self.block.column_count).from_address(address)
        return found


def column_of_bytes(column: pa.Array) -> tuple[pa.Array, tuple[int | None, ...]]:
    """Returns a column as an array of bytes, and its description for C.

    The description is valid as long as the array lives. It consists of the addresses of validity, offsets and
    data, the bytes of an offset, the number of the first row, and the number of rows.
    """
    if isinstance(column, pa.ChunkedArray):
        column = column.combine_chunks()
    if pa.types.is_string(column.type):
        column = column.view(pa.binary())
    elif not (pa.types.is_binary(column.type) or pa.types.is_large_binary(column.type)):
        column = column.cast(pa.large_binary())
    addresses = [None if each is None else each.address for each in column.buffers()]
    return column, (*addresses, 8 if pa.types.is_large_binary(column.type) else 4, column.offset, len(column))


def array_pointer(capsule: object) -> int | None:
    """Returns the address of the C structure of an exported Arrow array."""
    get_pointer = ctypes.pythonapi.PyCapsule_GetPointer
    get_pointer.restype, get_pointer.argtypes = c_void_p, (py_object, c_char_p)
    pointer: int | None = get_pointer(capsule, b"arrow_array")
    return pointer
