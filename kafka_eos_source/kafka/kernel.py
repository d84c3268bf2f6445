"""The C kernel with librdkafka's functions bound to it: signatures, and whether it is in use.

What it does is told where it is used: `kernel_consumer`, `read.kernel_columns`, `librdkafka`, `deliveries`.
Each has a twin in Python with the same results, which is used where there is no kernel.
"""

from __future__ import annotations

import ctypes
import logging
from ctypes import POINTER, Structure, c_int32, c_int64, c_void_p
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np

from kafka_eos_source.kafka.native import function, has_pointers
from kafka_eos_source.native.loader import KernelUnavailableError, load

_log = logging.getLogger(__name__)

#: Bits of ``take``'s last argument: what is copied of each message besides where it was.
WANT_KEY, WANT_VALUE, WANT_TIMESTAMP, WANT_HEADERS = 1, 2, 4, 8

#: ``event_t`` of kernel.c.
EVENT = np.dtype([("topic", "u8"), ("offset", "i8"), ("partition", "i4"), ("err", "i4"), ("text", "S256")])


class Part(Structure):
    """``part_t``: memory of the kernel's, of which ``bytes`` are used."""

    _fields_ = (("at", c_void_p), ("bytes", c_int64), ("capacity", c_int64))


class Column(Structure):
    """``column_t``: the buffers of an Arrow array with variable sizes."""

    _fields_ = (("validity", Part), ("offsets", Part), ("data", Part), ("nulls", c_int64))


class Block(Structure):
    """``block_t`` as far as it is ours to read."""

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
    )


#: What ``kafka_eos_bind`` wants, in its order.
_OF_LIBRDKAFKA = (
    "rd_kafka_consume_callback_queue",
    "rd_kafka_yield",
    "rd_kafka_message_timestamp",
    "rd_kafka_message_headers",
    "rd_kafka_header_get_all",
    "rd_kafka_produceva",
    "rd_kafka_error_code",
    "rd_kafka_error_destroy",
    "rd_kafka_headers_new",
    "rd_kafka_header_add",
    "rd_kafka_headers_destroy",
    "rd_kafka_conf_interceptor_add_on_new",
    "rd_kafka_interceptor_add_on_acknowledgement",
)

_SIGNATURES: dict[str, tuple[Any, tuple[Any, ...]]] = {
    "take": (POINTER(Block), (c_void_p, c_int32, c_int64, c_int64, c_int32)),
    "free": (None, (POINTER(Block),)),
    "produce": (c_int64, (c_void_p, c_void_p, c_void_p, c_int64, c_void_p, c_void_p, c_void_p, c_void_p)),
    "place": (None, (c_void_p, c_int64, c_int32)),
    "deliveries": (c_void_p, (c_void_p,)),
    "failed": (c_int64, (c_void_p, POINTER(c_int32))),
    "reset": (None, (c_void_p,)),
}


class Kernel:
    """The functions of kernel.c without their prefix; its comments say what they do. None holds the GIL."""

    take: Any
    free: Any
    produce: Any
    place: Any
    deliveries: Any
    failed: Any
    reset: Any

    def __init__(self, library: ctypes.CDLL) -> None:
        pointers = (c_void_p * len(_OF_LIBRDKAFKA))(
            *(ctypes.cast(function(name, None), c_void_p) for name in _OF_LIBRDKAFKA)
        )
        if library.kafka_eos_bind(pointers, len(pointers)) != 0:
            raise KernelUnavailableError("it asks for other functions of librdkafka than it is given")
        for name, (result, arguments) in _SIGNATURES.items():
            found = library[f"kafka_eos_{name}"]
            found.restype, found.argtypes = result, arguments
            setattr(self, name, found)


class Choice(NamedTuple):
    """Attributes:
    kernel: None = the Python twin does its work.
    why_not: a clause; empty when there is a kernel.
    """

    kernel: Kernel | None
    why_not: str


@lru_cache(maxsize=1)
def choice() -> Choice:
    """What this process uses, chosen at the first call. Says at debug level when that is the twin."""
    if has_pointers():
        try:
            return Choice(Kernel(load()), "")
        except (KernelUnavailableError, AttributeError) as failure:  # AttributeError: a symbol is not there
            why_not = str(failure)
    else:
        why_not = "clients' handles are known on CPython with a GIL and 64 bits only"
    _log.debug("the C kernel is not in use, its Python twin is: %s", why_not)
    return Choice(None, why_not)
