"""Loads native/protobuf.c and declares its structs and functions."""

from __future__ import annotations

import ctypes
import os
import sys
import sysconfig
from ctypes import POINTER, Structure, c_char_p, c_int32, c_int64, c_void_p
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from kafka_eos_source import native
from kafka_eos_source.native.loader import VARIABLE, is_turned_off
from kafka_eos_source.registry.protobuf.program import Program

#: The version that the library must report. A library from another build of this package is not used.
VERSION = 2

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


class Library(NamedTuple):
    """The functions of the library."""

    decode: Any
    capacity: Any
    free: Any
    encode: Any
    free_encoded: Any


class Choice(NamedTuple):
    """The library; or None, and why it is not used."""

    library: Library | None
    why_not: str


def library_path() -> Path:
    """Returns the path of the library, in a source tree and in an installation."""
    folder = Path(str(native.__file__)).parent
    suffixes = (".abi3.so", sysconfig.get_config_var("EXT_SUFFIX"))
    candidates = [folder / f"protobuf{suffix}" for suffix in suffixes]
    return next((path for path in candidates if path.exists()), candidates[0])


@lru_cache(maxsize=1)
def choice() -> Choice:
    """Returns the library if it can be used. Otherwise the Python twin does its work."""
    path = library_path()
    if is_turned_off():
        return Choice(None, f"{VARIABLE}={os.environ[VARIABLE]} turns it off")
    if sys.byteorder != "little":
        return Choice(None, "it supports only machines that store the lowest byte first")
    if not path.exists():
        return Choice(None, "it was not built: no C compiler was found when the package was installed")
    try:
        return Choice(load(path), "")
    except (OSError, AttributeError, ValueError) as failure:
        return Choice(None, f"{path.name} cannot be loaded: {failure}")


def load(path: Path) -> Library:
    """Loads the library from a file.

    Raises:
        ValueError: if it has another version.
    """
    library = ctypes.CDLL(str(path))
    version = library.kafka_eos_protobuf_version()
    if version != VERSION:
        raise ValueError(f"it has version {version}, but this package needs version {VERSION}")
    decode = library.kafka_eos_protobuf_decode
    decode.restype = POINTER(Decoded)
    decode.argtypes = (
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
    capacity = library.kafka_eos_protobuf_capacity
    capacity.restype = c_int64
    capacity.argtypes = (POINTER(Decoded),)
    free = library.kafka_eos_protobuf_free
    free.restype = None
    free.argtypes = (POINTER(Decoded),)
    encode = library.kafka_eos_protobuf_encode
    encode.restype = POINTER(Encoded)
    encode.argtypes = (POINTER(ProgramTables), c_void_p, c_void_p, c_int64, c_char_p, c_int64, c_int64)
    free_encoded = library.kafka_eos_protobuf_free_encoded
    free_encoded.restype = None
    free_encoded.argtypes = (POINTER(Encoded),)
    return Library(decode, capacity, free, encode, free_encoded)


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
