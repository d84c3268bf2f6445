"""Loads the C library of the Protobuf codec, and declares its signatures and structures."""

from __future__ import annotations

import ctypes
from ctypes import POINTER, Structure, c_char_p, c_int32, c_int64, c_void_p
from functools import lru_cache
from typing import Any

import numpy as np
import numpy.typing as npt

from kafka_eos_source.native import load
from kafka_eos_source.registry.protobuf.program import Program

_PART = [("at", "u8"), ("bytes", "i8"), ("capacity", "i8")]

#: ``column_t``.
COLUMN = np.dtype(
    [
        ("validity", _PART),
        ("values", _PART),
        ("offsets", _PART),
        ("entry_offsets", _PART),
        ("data", _PART),
        ("dropped", _PART),
        ("elements", "i8"),
        ("filled", "i8"),
        ("seconds", "i8"),
        ("slot", "i8"),
        ("nanos", "i4"),
        ("unused", "i4"),
    ]
)

#: ``rows_t``.
ROWS = np.dtype([("rows", "i8"), ("capacity", "i8")])

#: ``error_t``.
ERROR = np.dtype([("row", "i8"), ("code", "i4"), ("field", "i4"), ("detail", "i8")])


class Part(Structure):
    """``part_t``: a buffer that the library allocated, of which ``bytes`` are used."""

    _fields_ = (("at", c_void_p), ("bytes", c_int64), ("capacity", c_int64))


class Decoded(Structure):
    """``decoded_t``, up to the last member that Python reads."""

    _fields_ = (
        ("columns", c_void_p),
        ("frames", c_void_p),
        ("validity", Part),
        ("errors", Part),
        ("no_memory", c_int64),
        ("rows", c_int64),
    )


class Encoded(Structure):
    """``encoded_t``, up to the last member that Python reads."""

    _fields_ = (
        ("validity", Part),
        ("offsets", Part),
        ("data", Part),
        ("errors", Part),
        ("no_memory", c_int64),
        ("rows", c_int64),
    )


class ProgramTables(Structure):
    """``program_t``."""

    _fields_ = (
        *(
            (name, c_void_p)
            for name in ("fields", "messages", "frames", "members", "dense", "known", "constants")
        ),
        *((name, c_int32) for name in ("field_count", "message_count", "frame_count", "oneof_count")),
    )


class ProtobufKernel:
    """The functions of protobuf.c without their prefix. Its comments describe them. None holds the GIL."""

    def __init__(self, library: ctypes.CDLL) -> None:
        self.decode: Any = library["kafka_eos_protobuf_decode"]
        self.decode.restype = POINTER(Decoded)
        self.decode.argtypes = (
            POINTER(ProgramTables),
            c_void_p,
            c_int32,
            c_void_p,
            c_void_p,
            c_int64,
            c_int64,
            c_int32,
            c_int64,
            POINTER(Decoded),
        )
        self.capacity: Any = library["kafka_eos_protobuf_capacity"]
        self.capacity.restype, self.capacity.argtypes = c_int64, (POINTER(Decoded),)
        self.free: Any = library["kafka_eos_protobuf_free"]
        self.free.restype, self.free.argtypes = None, (POINTER(Decoded),)
        self.encode: Any = library["kafka_eos_protobuf_encode"]
        self.encode.restype = POINTER(Encoded)
        self.encode.argtypes = (
            *(POINTER(ProgramTables), c_void_p, c_void_p),
            *(c_int64, c_char_p, c_int64, c_int64),
        )
        self.free_encoded: Any = library["kafka_eos_protobuf_free_encoded"]
        self.free_encoded.restype, self.free_encoded.argtypes = None, (POINTER(Encoded),)


@lru_cache(maxsize=1)
def kernel() -> ProtobufKernel:
    """Returns the library.

    Raises:
        KernelUnavailableError: if it is missing or cannot be used.
    """
    return ProtobufKernel(load("protobuf"))


def tables(program: Program) -> ProgramTables:
    """Returns the struct with the tables of a program, which must outlive it."""
    arrays = (
        program.fields,
        program.messages,
        program.frames,
        program.members,
        program.dense,
        program.known,
        program.constants,
    )
    counts = (len(program.fields), len(program.messages), len(program.frames), len(program.oneofs))
    return ProgramTables(*(array.ctypes.data for array in arrays), *counts)


def view(address: int | None, dtype: np.dtype[Any], count: int) -> npt.NDArray[Any]:
    """Returns an array on memory of the library, which must outlive it."""
    if not address or not count:
        return np.zeros(0, dtype)
    memory = memoryview((ctypes.c_char * (dtype.itemsize * count)).from_address(address))
    found: npt.NDArray[Any] = np.frombuffer(memory, dtype, count)
    return found
