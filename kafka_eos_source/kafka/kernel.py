"""Loads the C kernel, binds librdkafka's functions to it, and declares its signatures.

The modules that use the kernel describe what it does: `kernel_consumer`, `read.kernel_columns`, and those of
`kafka.wire`.
"""

from __future__ import annotations

import ctypes
import logging
from collections.abc import Collection
from ctypes import POINTER, Structure, c_int32, c_int64, c_uint32, c_void_p
from functools import lru_cache, reduce
from operator import or_
from typing import Any, NamedTuple

import numpy as np

from kafka_eos_source.kafka.native import function, has_pointers
from kafka_eos_source.native.loader import KernelUnavailableError, load

_log = logging.getLogger(__name__)

#: Bits of the last argument of ``take`` and ``decode``: what to copy of each message, besides its position.
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


#: ``event_t`` of kernel.c.
EVENT = np.dtype([("topic", "u8"), ("offset", "i8"), ("partition", "i4"), ("err", "i4"), ("text", "S256")])


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
        ("broken_names", Part),
        ("events", Part),
        ("no_memory", c_int64),
        ("damaged", c_int64),
    )


#: The functions of librdkafka that ``kafka_eos_bind`` expects, in that order.
_BOUND_FUNCTIONS = (
    "rd_kafka_consume_callback_queue",
    "rd_kafka_yield",
    "rd_kafka_message_timestamp",
    "rd_kafka_message_headers",
    "rd_kafka_header_get_all",
)

_SIGNATURES: dict[str, tuple[Any, tuple[Any, ...]]] = {
    "take": (POINTER(Block), (c_void_p, c_int32, c_int64, c_int64, c_int32)),
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

    take: Any
    free: Any
    place_rows: Any
    group: Any
    seal: Any
    stamp: Any
    list: Any
    decode: Any
    crc32c: Any

    def __init__(self, library: ctypes.CDLL) -> None:
        pointers = (c_void_p * len(_BOUND_FUNCTIONS))(
            *(ctypes.cast(function(name, None), c_void_p) for name in _BOUND_FUNCTIONS)
        )
        if library.kafka_eos_bind(pointers, len(pointers)) != 0:
            raise KernelUnavailableError("the kernel was built for another list of librdkafka functions")
        for name, (result, arguments) in _SIGNATURES.items():
            found = library[f"kafka_eos_{name}"]
            found.restype, found.argtypes = result, arguments
            setattr(self, name, found)


class Choice(NamedTuple):
    """Whether this process uses the kernel.

    Attributes:
        kernel: None = this process uses the Python twin.
        why_not: why the kernel is not available, as a clause; empty if it is.
    """

    kernel: Kernel | None
    why_not: str


@lru_cache(maxsize=1)
def choice() -> Choice:
    """Returns whether this process uses the kernel. The first call decides, and logs at debug level."""
    if has_pointers():
        try:
            return Choice(Kernel(load()), "")
        except (KernelUnavailableError, AttributeError) as failure:  # AttributeError: a symbol is missing
            why_not = str(failure)
    else:
        why_not = "the kernel needs a 64-bit CPython with the GIL, whose layout of client objects is known"
    _log.debug("using the Python twin of the C kernel, because the kernel is not available: %s", why_not)
    return Choice(None, why_not)


def kernel() -> Kernel:
    """Returns the C kernel of this process.

    Raises:
        KernelUnavailableError: if the kernel cannot be used; the text gives the reason.
    """
    found = choice()
    if found.kernel is None:
        raise KernelUnavailableError(found.why_not)
    return found.kernel
