"""The producer when its transaction fails, with the real client on a mock cluster.

librdkafka tells of a failure in three ways (a fatal event, a delivery report, the next call's error), and
confluent-kafka changes each of them on the way. Whichever comes first, one error of ours comes out.
"""

from __future__ import annotations

import gc
import threading
from collections.abc import Callable, Iterator

import pyarrow as pa
import pytest
from confluent_kafka import KafkaError, Producer
from mock_cluster import Api, MockCluster
from mock_log import committed, read

from kafka_eos_source.errors import (
    AbortableError,
    AuthorizationError,
    FencedError,
    InvalidRecordError,
    KafkaEosError,
    OperatorError,
    OutcomeUnknownError,
    UnavailableError,
)
from kafka_eos_source.kafka.config import producer_config
from kafka_eos_source.kafka.producer import RecordProducer
from kafka_eos_source.kafka.transactional import TransactionalProducer
from kafka_eos_source.runtime.deadline import Deadline

FAST = {"value": pa.array([b"a", b"b"])}
SINGLY = {**FAST, "timestamp": pa.array([1_700_000_000_000, 1_700_000_000_000])}

either_way = pytest.mark.parametrize("rows", [FAST, SINGLY], ids=["as a batch", "one by one"])


@pytest.fixture
def mock() -> Iterator[MockCluster]:
    with MockCluster() as cluster:
        cluster.create_topic("out", 1)
        yield cluster


def soon() -> Deadline:
    return Deadline.after_seconds(20)


def until(condition: Callable[[], bool]) -> None:
    deadline, pause = soon(), threading.Event()
    while not condition():
        assert not deadline.expired, "it never came to it"
        pause.wait(0.005)


def begun(mock: MockCluster) -> TransactionalProducer:
    """A producer within a transaction."""
    config = producer_config({"bootstrap.servers": mock.bootstrap_servers}, transactional_id="app")
    producer = TransactionalProducer(config)
    producer.init(soon())
    producer.begin()
    return producer


def send(producer: RecordProducer, rows: dict[str, pa.Array]) -> None:
    producer.send(pa.record_batch(rows), "out", soon())


def is_alive(client: int) -> bool:
    """Whether the client that had this ``id`` is still there."""
    return any(type(each) is Producer and id(each) == client for each in gc.get_objects())


def stop_polling(producer: TransactionalProducer) -> None:
    producer._closed.set()
    producer._poller.join()


@either_way
def test_a_fatal_error_that_the_flush_hears_of_is_an_error_of_ours(
    mock: MockCluster, rows: dict[str, pa.Array]
) -> None:
    """And no `SystemError`: with that ends a callback that ran while the fatal error was on its way.

    If such a callback took a lock it kept it. The next statistics waited for it, and `close` for the poller.
    """
    producer = begun(mock)
    stop_polling(producer)
    mock.fail(Api.ADD_PARTITIONS_TO_TXN, KafkaError.PRODUCER_FENCED)
    send(producer, rows)
    with pytest.raises(FencedError):
        producer.flush(soon())
    producer.close()


@either_way
def test_a_fatal_error_that_the_poller_hears_of_is_not_lost(
    mock: MockCluster, rows: dict[str, pa.Array]
) -> None:
    """Its thread died of it, and a flush could wait for forgotten records until its deadline."""
    producer = begun(mock)
    mock.fail(Api.ADD_PARTITIONS_TO_TXN, KafkaError.PRODUCER_FENCED)
    send(producer, rows)
    until(lambda: producer._fatal is not None)
    assert producer._poller.is_alive()
    with pytest.raises(FencedError):
        producer.flush(soon())
    producer.close()


@either_way
@pytest.mark.parametrize(
    ("api", "code", "expected"),
    [
        (Api.ADD_PARTITIONS_TO_TXN, KafkaError.TRANSACTION_ABORTABLE, AbortableError),
        (Api.ADD_PARTITIONS_TO_TXN, KafkaError.TOPIC_AUTHORIZATION_FAILED, AuthorizationError),
        (Api.PRODUCE, KafkaError.UNKNOWN_PRODUCER_ID, AbortableError),
        (Api.PRODUCE, KafkaError.PRODUCER_FENCED, FencedError),
        (Api.PRODUCE, KafkaError.MSG_SIZE_TOO_LARGE, InvalidRecordError),
    ],
)
def test_a_flush_says_why_the_transaction_failed(
    mock: MockCluster, api: Api, code: int, expected: type[KafkaEosError], rows: dict[str, pa.Array]
) -> None:
    """The records know less: those sent as a batch report nothing, the others that they were purged."""
    producer = begun(mock)
    mock.fail(api, code)
    send(producer, rows)
    with pytest.raises(expected):
        producer.flush(soon())
    with pytest.raises(expected):
        send(producer, rows)
    producer.close()


def test_asking_adds_nothing_to_a_transaction_that_goes_well(mock: MockCluster) -> None:
    producer = begun(mock)
    send(producer, FAST)
    producer.flush(soon())
    assert producer._failure() is None
    producer.commit(soon())
    assert committed(read(mock.bootstrap_servers, "out", 0)) == [b"a", b"b"]
    transactional = {Api.ADD_PARTITIONS_TO_TXN: 1, Api.ADD_OFFSETS_TO_TXN: 0, Api.END_TXN: 1}
    assert {api: mock.requests()[api] for api in transactional} == transactional
    producer.close()


@either_way
@pytest.mark.parametrize(
    ("code", "expected"),
    [
        (KafkaError.TOPIC_AUTHORIZATION_FAILED, AuthorizationError),
        (KafkaError.MSG_SIZE_TOO_LARGE, InvalidRecordError),
        (KafkaError.UNKNOWN, OperatorError),
    ],
)
def test_without_a_transaction_a_refused_record_fails_the_flush(
    mock: MockCluster, code: int, expected: type[KafkaEosError], rows: dict[str, pa.Array]
) -> None:
    """``processing.guarantee=at_least_once``: nothing else would ever say that the records are lost."""
    producer = RecordProducer(producer_config({"bootstrap.servers": mock.bootstrap_servers}), "test")
    mock.fail(Api.PRODUCE, code)
    send(producer, rows)
    with pytest.raises(expected):
        producer.flush(soon())
    producer.close()
    assert read(mock.bootstrap_servers, "out", 0) == []


def test_without_a_transaction_records_that_nobody_takes_in_time_fail_the_flush(mock: MockCluster) -> None:
    config = {"bootstrap.servers": mock.bootstrap_servers, "message.timeout.ms": "300"}
    producer = RecordProducer(producer_config(config), "test")
    mock.set_leader("out", 0, -1)
    send(producer, FAST)
    with pytest.raises(UnavailableError, match="writing records"):
        producer.flush(soon())
    producer.close()


@either_way
def test_closing_does_not_end_the_transaction(mock: MockCluster, rows: dict[str, pa.Array]) -> None:
    """The client's own ``close`` aborts it: after a commit whose outcome is unknown nothing may."""
    producer = begun(mock)
    client = id(producer._client)
    send(producer, rows)
    producer.flush(soon())
    producer.close()
    assert not is_alive(client)
    assert mock.requests()[Api.END_TXN] == 0


def test_closing_after_a_commit_of_unknown_outcome_does_not_end_the_transaction(mock: MockCluster) -> None:
    producer = begun(mock)
    client = id(producer._client)
    send(producer, FAST)
    producer.flush(soon())
    mock.fail(Api.END_TXN, KafkaError.UNKNOWN)
    with pytest.raises(OutcomeUnknownError):
        producer.commit(soon())
    producer.close()
    assert not is_alive(client)
    assert mock.requests()[Api.END_TXN] == 1


@either_way
def test_closing_waits_for_no_broker(mock: MockCluster, rows: dict[str, pa.Array]) -> None:
    """A driver whose brokers went away must come to an end: its ``commitTimeoutMs`` is over."""
    producer = begun(mock)
    client = id(producer._client)
    send(producer, rows)
    producer.flush(soon())
    mock.set_down(1)
    send(producer, rows)
    closing = threading.Thread(target=producer.close, daemon=True)
    closing.start()
    closing.join(20)
    assert not closing.is_alive()
    assert not is_alive(client)
