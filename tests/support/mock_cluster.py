"""librdkafka's mock cluster: a broker in threads of this process, which shares no code with this project.

It keeps what librdkafka's producer writes, byte for byte, and returns errors on demand. It is no model of
transactions: for those, see `tests/README.md`.
"""

from __future__ import annotations

import ctypes
from ctypes import POINTER, c_char_p, c_int, c_int16, c_size_t, c_void_p
from functools import lru_cache
from types import TracebackType
from typing import Any

from confluent_kafka import KafkaError, Producer, cimpl


@lru_cache(maxsize=1)
def _library() -> ctypes.CDLL:
    return ctypes.CDLL(cimpl.__file__)


@lru_cache(maxsize=64)
def function(name: str, result: Any, *arguments: Any) -> Any:
    """Returns a function of librdkafka with this C signature."""
    found = _library()[name]  # indexing creates a new object, so other users' signatures do not change
    found.restype, found.argtypes = result, list(arguments)
    return found


def client_pointer(client: Any) -> int:
    """Returns the ``rd_kafka_t`` pointer of a `Producer` or `Consumer`; valid while the client is open.

    PyObject_HEAD takes two words, and confluent-kafka's ``Handle`` starts with the pointer.
    """
    address = ctypes.c_void_p.from_address(id(client) + 2 * ctypes.sizeof(ctypes.c_void_p)).value
    assert address is not None
    return address


#: The API key of these requests.
_FETCH = 1


class MockCluster:
    """A mock broker, which runs until `close` and starts within milliseconds.

    Attributes:
        bootstrap_servers: the address that clients connect to.
    """

    def __init__(self) -> None:
        self._host: Any = Producer({"test.mock.num.brokers": 1, "log_level": 0})
        self._cluster: int = function("rd_kafka_handle_mock_cluster", c_void_p, c_void_p)(
            client_pointer(self._host)
        )
        listeners = function("rd_kafka_mock_cluster_bootstraps", c_char_p, c_void_p)(self._cluster)
        self.bootstrap_servers = str(listeners.decode())

    def __enter__(self) -> MockCluster:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Ends the broker; clients lose their connections."""
        self._cluster = 0
        self._host = None  # drops the last reference

    def create_topic(self, name: str, partitions: int) -> None:
        create = function("rd_kafka_mock_topic_create", c_int, c_void_p, c_char_p, c_int, c_int)
        _check(create(self._cluster, name.encode(), partitions, 1))

    def fail_fetches(self, *codes: int) -> None:
        """Sets the error codes of the next fetch requests (0 = no error), instead of those that were set.

        ``KafkaError._TRANSPORT`` cuts the connection instead of answering. A request that is answered with
        an error has no effect.
        """
        function("rd_kafka_mock_clear_request_errors", None, c_void_p, c_int16)(self._cluster, _FETCH)
        push = function(
            "rd_kafka_mock_push_request_errors_array", None, c_void_p, c_int16, c_size_t, POINTER(c_int)
        )
        push(self._cluster, _FETCH, len(codes), (c_int * len(codes))(*codes))


def _check(code: int) -> None:
    assert code == 0, f"the mock cluster refused the call: {KafkaError(code).str()}"
