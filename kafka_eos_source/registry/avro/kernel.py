"""Loads the C library of the Avro codec, and declares its signatures and structures."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from ctypes import POINTER, Structure, c_char_p, c_int64, c_void_p, py_object
from functools import lru_cache
from typing import Any

import numpy as np
import pyarrow as pa

from kafka_eos_source.native import load

#: ``error_t`` of avro.c.
ERROR = np.dtype(
    [("row", "i8"), ("node", "i8"), ("code", "i8"), ("detail", "i8"), ("more", "i8"), ("text", "S48")]
)

#: How a call ended: STOPPED says that it converted only the first rows, because of its limit.
NO_MEMORY, STOPPED = 1, 2


class Part(Structure):
    """``part_t``: a buffer that the library allocated, of which ``bytes`` are used."""

    _fields_ = (("at", c_void_p), ("bytes", c_int64), ("capacity", c_int64))


class ColumnBuffers(Structure):
    """``column_t``."""

    _fields_ = (
        ("kind", c_int64),
        ("first", c_int64),
        ("count", c_int64),
        ("rows", c_int64),
        ("validity", Part),
        ("values", Part),
        ("heap", Part),
    )


class Block(Structure):
    """``block_t``; ``columns`` has ``column_count`` entries."""

    _fields_ = (
        ("rows", c_int64),
        ("status", c_int64),
        ("column_count", c_int64),
        ("errors", Part),
        ("columns", ColumnBuffers * 0),
    )


class Input(Structure):
    """``input_t``."""

    _fields_ = (
        ("nodes", c_void_p),
        ("links", c_void_p),
        ("symbols", c_void_p),
        ("text", c_void_p),
        ("columns", c_void_p),
        ("column_count", c_int64),
        ("validity", c_void_p),
        ("offsets", c_void_p),
        ("data", c_void_p),
        ("offset_width", c_int64),
        ("offset", c_int64),
        ("rows", c_int64),
        ("start", c_int64),
        ("most_bytes", c_int64),
    )


class Values(Structure):
    """``values_t``."""

    _fields_ = (
        ("nodes", c_void_p),
        ("links", c_void_p),
        ("symbols", c_void_p),
        ("text", c_void_p),
        ("array", c_void_p),
        ("array_count", c_int64),
        ("prefix", c_char_p),
        ("prefix_bytes", c_int64),
        ("most_bytes", c_int64),
    )


class AvroKernel:
    """The functions of avro.c without their prefix. Its comments describe them. None holds the GIL."""

    def __init__(self, library: ctypes.CDLL) -> None:
        self.decode: Any = library["kafka_eos_avro_decode"]
        self.decode.restype, self.decode.argtypes = POINTER(Block), (POINTER(Input),)
        self.encode: Any = library["kafka_eos_avro_encode"]
        self.encode.restype, self.encode.argtypes = POINTER(Block), (POINTER(Values),)
        self.free: Any = library["kafka_eos_avro_free"]
        self.free.restype, self.free.argtypes = None, (POINTER(Block),)


@lru_cache(maxsize=1)
def kernel() -> AvroKernel:
    """Returns the library.

    Raises:
        KernelUnavailableError: if it is missing or cannot be used.
    """
    return AvroKernel(load("avro"))


class Memory:
    """Owns a block, and frees it when the last array that refers to it is gone."""

    def __init__(self, kernel: AvroKernel, pointer: Any) -> None:
        if not pointer:
            raise MemoryError("not enough memory for a batch of Avro records")
        self._free = kernel.free
        self.pointer = pointer
        self.block = pointer.contents

    def __del__(self) -> None:
        if hasattr(self, "pointer"):
            self._free(self.pointer)


def buffer(memory: Memory, part: Part) -> pa.Buffer:
    """Returns a buffer that refers to a part of a block."""
    return pa.foreign_buffer(part.at, part.bytes, memory) if part.at else pa.py_buffer(b"")


def columns(memory: Memory) -> Sequence[ColumnBuffers]:
    """Returns the columns of a block."""
    address = ctypes.addressof(memory.block) + Block.columns.offset
    found: Sequence[ColumnBuffers] = (ColumnBuffers * memory.block.column_count).from_address(address)
    return found


def array_pointer(capsule: object) -> int | None:
    """Returns the address of the C structure of an exported Arrow array."""
    get_pointer = ctypes.pythonapi.PyCapsule_GetPointer
    get_pointer.restype, get_pointer.argtypes = c_void_p, (py_object, c_char_p)
    pointer: int | None = get_pointer(capsule, b"arrow_array")
    return pointer
