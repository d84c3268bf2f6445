"""Loads the C kernel, and declares its signatures.

The modules that use the kernel describe what it does: `wire.fetched_batches`, `kernel_messages`, and others
in `kafka.wire`.
"""

from __future__ import annotations

import ctypes
from collections.abc import Collection
from ctypes import POINTER, Structure, c_int32, c_int64, c_uint32, c_void_p
from functools import lru_cache, reduce
from operator import or_
from typing import Any

from kafka_eos_source.native.loader import load

#: Bits of the last argument of ``decode``: what to copy of each message, besides its position.
WANT_KEY, WANT_VALUE, WANT_TIMESTAMP, WANT_HEADERS = 1, 2, 4, 8
#: The same, by the column of Spark's schema that needs it.
WANTS = {
    "key": WANT_KEY,
    "value": WANT_VALUE,
    "timestamp": WANT_TIMESTAMP,
    "timestampType": WANT_TIMESTAMP,
    "headers": WANT_HEADERS,
}


def wants(columns: Collection[str]) -> int:
    """Returns the `WANTS` of these columns in one number. Other columns need nothing from the kernel."""
    return reduce(or_, (WANTS.get(name, 0) for name in columns), 0)


class Part(Structure):
    """``part_t``: a buffer that the kernel allocated, of which ``bytes`` are used."""

    _fields_ = (("at", c_void_p), ("bytes", c_int64), ("capacity", c_int64))


class Column(Structure):
    """``column_t``: the buffers of an Arrow array with values of variable size."""

    _fields_ = (("validity", Part), ("offsets", Part), ("data", Part), ("nulls", c_int64))


class Block(Structure):
    """``block_t``, up to the last member that Python reads."""

    _fields_ = (
        ("rows", c_int64),
        ("entries", c_int64),
        ("offsets", Part),
        ("partitions", Part),
        ("topics", Part),
        ("timestamps_ms", Part),
        ("timestamp_types", Part),
        ("header_counts", Part),
        ("keys", Column),
        ("values", Column),
        ("header_names", Column),
        ("header_values", Column),
        ("no_memory", c_int64),
        ("damaged", c_int64),
    )


_SIGNATURES: dict[str, tuple[Any, tuple[Any, ...]]] = {
    "free": (None, (POINTER(Block),)),
    "place_rows": (None, (c_void_p, c_int64, c_void_p, c_int32, c_int32)),
    "group": (
        c_int64,
        (c_void_p, c_void_p, c_int64, c_void_p, c_int64, c_void_p, c_void_p, c_void_p, c_void_p, c_void_p),
    ),
    "seal": (
        c_int64,
        (
            *(c_void_p, c_void_p, c_void_p, c_int64, c_int64, c_int32, c_int64),
            *(c_void_p, c_int64, c_void_p, c_void_p, c_int64),
        ),
    ),
    "stamp": (None, (c_void_p, c_int64, c_int64, c_int32, c_int32)),
    "list": (c_int64, (c_void_p, c_int64, c_int32, c_void_p, c_int64)),
    "decode": (POINTER(Block), (c_void_p, c_int64, c_int32)),
    "crc32c": (c_uint32, (c_uint32, c_void_p, c_int64)),
}


class Kernel:
    """The functions of kernel.c without their prefix. Its comments describe them. None holds the GIL."""

    free: Any
    place_rows: Any
    group: Any
    seal: Any
    stamp: Any
    list: Any
    decode: Any
    crc32c: Any

    def __init__(self, library: ctypes.CDLL) -> None:
        for name, (result, arguments) in _SIGNATURES.items():
            found = library[f"kafka_eos_{name}"]
            found.restype, found.argtypes = result, arguments
            setattr(self, name, found)


@lru_cache(maxsize=1)
def kernel() -> Kernel:
    """Returns the C kernel.

    Raises:
        KernelUnavailableError: if the library is missing or cannot be used.
    """
    return Kernel(load("kernel"))
