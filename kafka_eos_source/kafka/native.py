"""Calls librdkafka's C functions directly, where confluent-kafka has no API or handles single records only.

The extension module in confluent-kafka's wheel exports every public symbol of librdkafka on all platforms.
"""

from __future__ import annotations

import ctypes
import sysconfig
from functools import lru_cache
from typing import Any

from confluent_kafka import cimpl

ERROR_TEXT_BYTES = 512


@lru_cache(maxsize=1)
def _library() -> ctypes.CDLL:
    return ctypes.CDLL(cimpl.__file__)


@lru_cache(maxsize=64)
def function(name: str, result: Any, *arguments: Any) -> Any:
    """Returns a function of librdkafka with this C signature."""
    found = _library()[name]  # indexing creates a new object, so other users' signatures do not change
    found.restype, found.argtypes = result, list(arguments)
    return found


def has_pointers() -> bool:
    """Returns whether `client_pointer` works in this Python: CPython with the GIL, 64 bits."""
    return ctypes.sizeof(ctypes.c_void_p) == 8 and not sysconfig.get_config_var("Py_GIL_DISABLED")


def client_pointer(client: Any) -> int:
    """Returns the ``rd_kafka_t`` pointer of a `Producer` or `Consumer`; valid while the client is open.

    PyObject_HEAD takes two words, and confluent-kafka's ``Handle`` starts with the pointer.
    """
    address = ctypes.c_void_p.from_address(id(client) + 2 * ctypes.sizeof(ctypes.c_void_p)).value
    assert address is not None
    return address
