"""librdkafka's mock cluster: brokers in threads of this process that return errors on demand.

Real clients talk to it over TCP, so tests see how librdkafka really reacts to an answer. But it is not a
broker, so it can test how errors are handled, not whether transactions are safe:

* It answers TxnOffsetCommit and forgets it, so transactional offsets can never be read back.
* ``init_transactions`` neither aborts an older owner's transaction nor raises the epoch.
* It never answers CONCURRENT_TRANSACTIONS by itself, and transactions do not time out.
* Its Fetch ignores the isolation level.
"""

from __future__ import annotations

import ctypes
from collections import Counter
from ctypes import POINTER, c_char_p, c_int, c_int16, c_int32, c_size_t, c_void_p
from enum import IntEnum
from functools import lru_cache
from types import TracebackType
from typing import Any, Literal

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


class Api(IntEnum):
    """API keys of requests in Kafka's protocol."""

    PRODUCE = 0
    FETCH = 1
    METADATA = 3
    OFFSET_COMMIT = 8
    OFFSET_FETCH = 9
    FIND_COORDINATOR = 10
    INIT_PRODUCER_ID = 22
    ADD_PARTITIONS_TO_TXN = 24
    ADD_OFFSETS_TO_TXN = 25
    END_TXN = 26
    TXN_OFFSET_COMMIT = 28


class MockCluster:
    """Mock brokers 1 to ``brokers``, which run until `close` and start within milliseconds.

    Attributes:
        bootstrap_servers: the addresses that clients connect to.
    """

    def __init__(self, brokers: int = 1) -> None:
        self._host: Any = Producer({"test.mock.num.brokers": brokers, "log_level": 0})
        self._cluster: int = function("rd_kafka_handle_mock_cluster", c_void_p, c_void_p)(
            client_pointer(self._host)
        )
        listeners = function("rd_kafka_mock_cluster_bootstraps", c_char_p, c_void_p)(self._cluster)
        self.bootstrap_servers = str(listeners.decode())
        function("rd_kafka_mock_start_request_tracking", None, c_void_p)(self._cluster)

    def __enter__(self) -> MockCluster:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Ends the brokers; clients lose their connections."""
        self._cluster = 0
        self._host = None  # drops the last reference

    def create_topic(self, name: str, partitions: int) -> None:
        create = function("rd_kafka_mock_topic_create", c_int, c_void_p, c_char_p, c_int, c_int)
        _check(create(self._cluster, name.encode(), partitions, 1))

    def delete_topic(self, name: str) -> None:
        _check(
            function("rd_kafka_mock_topic_delete", c_int, c_void_p, c_char_p)(self._cluster, name.encode())
        )

    def fail(self, api: Api, *codes: int) -> None:
        """Sets the error codes of the next requests of this kind to any broker (0 = no error).

        ``KafkaError._TRANSPORT`` cuts the connection instead of answering. A request that is answered with
        an error has no effect.
        """
        errors = (c_int * len(codes))(*codes)
        push = function(
            "rd_kafka_mock_push_request_errors_array", None, c_void_p, c_int16, c_size_t, POINTER(c_int)
        )
        push(self._cluster, api, len(codes), errors)

    def answer(self, broker: int, api: Api, *answers: tuple[int, int]) -> None:
        """Sets error code and delay in ms for the next requests of this kind to ``broker``.

        They are used before those of `fail`. Code 0 with a delay longer than ``socket.timeout.ms`` makes a
        request that takes effect and whose answer is lost.
        """
        push = function(
            "rd_kafka_mock_broker_push_request_error_rtts", c_int, c_void_p, c_int32, c_int16, c_size_t
        )
        pairs = [c_int(number) for answer in answers for number in answer]
        _check(push(self._cluster, broker, api, len(answers), *pairs))

    def unused_answers(self, broker: int, api: Api) -> int:
        """Returns how many answers of `answer` are not used yet."""
        count = c_size_t()
        ask = function(
            "rd_kafka_mock_broker_error_stack_cnt", c_int, c_void_p, c_int32, c_int16, POINTER(c_size_t)
        )
        _check(ask(self._cluster, broker, api, ctypes.byref(count)))
        return count.value

    def clear_failures(self, api: Api) -> None:
        """Removes the answers of `fail` that were not used."""
        function("rd_kafka_mock_clear_request_errors", None, c_void_p, c_int16)(self._cluster, api)

    def set_coordinator(self, kind: Literal["transaction", "group"], key: str, broker: int) -> None:
        move = function("rd_kafka_mock_coordinator_set", c_int, c_void_p, c_char_p, c_char_p, c_int32)
        _check(move(self._cluster, kind.encode(), key.encode(), broker))

    def set_leader(self, topic: str, partition: int, broker: int) -> None:
        move = function("rd_kafka_mock_partition_set_leader", c_int, c_void_p, c_char_p, c_int32, c_int32)
        _check(move(self._cluster, topic.encode(), partition, broker))

    def set_down(self, broker: int) -> None:
        """Stops a broker's network: it loses its connections, but stays leader and coordinator."""
        _check(function("rd_kafka_mock_broker_set_down", c_int, c_void_p, c_int32)(self._cluster, broker))

    def set_up(self, broker: int) -> None:
        _check(function("rd_kafka_mock_broker_set_up", c_int, c_void_p, c_int32)(self._cluster, broker))

    def set_rtt(self, broker: int, rtt_ms: int) -> None:
        """Delays every answer of the broker, in ms."""
        delay = function("rd_kafka_mock_broker_set_rtt", c_int, c_void_p, c_int32, c_int)
        _check(delay(self._cluster, broker, rtt_ms))

    def requests(self) -> Counter[int]:
        """Returns how many requests of each kind (`Api`) the brokers have received."""
        count = c_size_t()
        get = function("rd_kafka_mock_get_requests", c_void_p, c_void_p, POINTER(c_size_t))
        found = get(self._cluster, ctypes.byref(count))
        if not found:
            return Counter()
        try:
            key = function("rd_kafka_mock_request_api_key", c_int16, c_void_p)
            return Counter(key(each) for each in (c_void_p * count.value).from_address(found))
        finally:
            function("rd_kafka_mock_request_destroy_array", None, c_void_p, c_size_t)(found, count)


def _check(code: int) -> None:
    assert code == 0, f"the mock cluster refused the call: {KafkaError(code).str()}"
