"""librdkafka's own functions, for what confluent-kafka does not offer or does one record at a time.

The extension module of confluent-kafka's wheel resolves every public symbol, on any platform.
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
    """A function of librdkafka, with its C signature."""
    found = _library()[name]  # an object of its own, so that signatures of others are left alone
    found.restype, found.argtypes = result, list(arguments)
    return found


def has_pointers() -> bool:
    """Whether `client_pointer` works here: CPython with its GIL, 64 bits."""
    return ctypes.sizeof(ctypes.c_void_p) == 8 and not sysconfig.get_config_var("Py_GIL_DISABLED")


def client_pointer(client: Any) -> int:
    """The ``rd_kafka_t`` of a `Producer` or `Consumer`; valid while that is open.

    PyObject_HEAD is two words, and confluent-kafka's ``Handle`` starts with the pointer.
    """
    address = ctypes.c_void_p.from_address(id(client) + 2 * ctypes.sizeof(ctypes.c_void_p)).value
    assert address is not None
    return address
