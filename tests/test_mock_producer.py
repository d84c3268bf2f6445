"""How the producer reports a failed transaction, with the real client on a mock cluster.

librdkafka reports a failure in three ways (a fatal event, a delivery report, an error of the next call), and
confluent-kafka changes each of them. Whichever comes first, the producer raises one error of this package.
"""

from __future__ import annotations

import gc
import threading
from collections.abc import Callable, Iterator

import pyarrow as pa
import pytest
from confluent_kafka import KafkaError, Producer
from confluent_kafka.admin import AdminClient
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
from kafka_eos_source.model import TopicPartition
from kafka_eos_source.runtime.deadline import Deadline

BATCHED_ROWS = {"value": pa.array([b"a", b"b"])}
SINGLE_ROWS = {**BATCHED_ROWS, "timestamp": pa.array([1_700_000_000_000, 1_700_000_000_000])}

batched_and_singly = pytest.mark.parametrize(
    "rows", [BATCHED_ROWS, SINGLE_ROWS], ids=["as a batch", "one by one"]
)


@pytest.fixture
def mock() -> Iterator[MockCluster]:
    with MockCluster() as cluster:
        cluster.create_topic("out", 1)
        yield cluster


def twenty_seconds() -> Deadline:
    return Deadline.after_seconds(20)


def wait_until(condition: Callable[[], bool]) -> None:
    deadline, pause = twenty_seconds(), threading.Event()
    while not condition():
        assert not deadline.expired, "the condition never became true"
        pause.wait(0.005)


def producer_in_transaction(mock: MockCluster) -> TransactionalProducer:
    """Returns a producer that has begun a transaction."""
    config = producer_config({"bootstrap.servers": mock.bootstrap_servers}, transactional_id="app")
    producer = TransactionalProducer(config)
    producer.init(twenty_seconds())
    producer.begin()
    return producer


def send(producer: RecordProducer, rows: dict[str, pa.Array]) -> None:
    producer.send(pa.record_batch(rows), "out", twenty_seconds())


def is_alive(client: int, kind: type[object] = Producer) -> bool:
    """Returns whether the client with this ``id()`` still exists."""
    return any(type(each) is kind and id(each) == client for each in gc.get_objects())


def stop_polling(producer: TransactionalProducer) -> None:
    producer._closed.set()
    producer._poller.join()


@batched_and_singly
def test_a_fatal_error_that_the_flush_receives_raises_fenced_error(
    mock: MockCluster, rows: dict[str, pa.Array]
) -> None:
    """A callback that runs while the fatal error arrives must not end with `SystemError`.

    Such a callback kept the lock that it held; the next statistics callback and `close` then waited forever.
    """
    producer = producer_in_transaction(mock)
    stop_polling(producer)
    mock.fail(Api.ADD_PARTITIONS_TO_TXN, KafkaError.PRODUCER_FENCED)
    send(producer, rows)
    with pytest.raises(FencedError):
        producer.flush(twenty_seconds())
    producer.close()


@batched_and_singly
def test_a_fatal_error_that_the_poller_receives_is_raised_by_the_flush(
    mock: MockCluster, rows: dict[str, pa.Array]
) -> None:
    """The error must not end the poller's thread, or a flush waits for records until its deadline."""
    producer = producer_in_transaction(mock)
    mock.fail(Api.ADD_PARTITIONS_TO_TXN, KafkaError.PRODUCER_FENCED)
    send(producer, rows)
    wait_until(lambda: producer._fatal is not None)
    assert producer._poller.is_alive()
    with pytest.raises(FencedError):
        producer.flush(twenty_seconds())
    producer.close()


@batched_and_singly
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
def test_a_flush_raises_the_error_that_failed_the_transaction(
    mock: MockCluster, api: Api, code: int, expected: type[KafkaEosError], rows: dict[str, pa.Array]
) -> None:
    """Delivery reports say less: batched rows have none, single rows report only that they were purged."""
    producer = producer_in_transaction(mock)
    mock.fail(api, code)
    send(producer, rows)
    with pytest.raises(expected):
        producer.flush(twenty_seconds())
    with pytest.raises(expected):
        send(producer, rows)
    producer.close()


def test_checking_for_a_failure_adds_no_request_to_a_successful_transaction(mock: MockCluster) -> None:
    producer = producer_in_transaction(mock)
    send(producer, BATCHED_ROWS)
    producer.flush(twenty_seconds())
    assert producer._failure() is None
    producer.commit(twenty_seconds())
    assert committed(read(mock.bootstrap_servers, "out", 0)) == [b"a", b"b"]
    transactional = {Api.ADD_PARTITIONS_TO_TXN: 1, Api.ADD_OFFSETS_TO_TXN: 0, Api.END_TXN: 1}
    assert {api: mock.requests()[api] for api in transactional} == transactional
    producer.close()


@batched_and_singly
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
    """With ``processing.guarantee=at_least_once``, only the flush can report that records were lost."""
    producer = RecordProducer(producer_config({"bootstrap.servers": mock.bootstrap_servers}), "test")
    mock.fail(Api.PRODUCE, code)
    send(producer, rows)
    with pytest.raises(expected):
        producer.flush(twenty_seconds())
    producer.close()
    assert read(mock.bootstrap_servers, "out", 0) == []


def test_without_a_transaction_records_that_no_broker_accepts_in_time_fail_the_flush(
    mock: MockCluster,
) -> None:
    config = {"bootstrap.servers": mock.bootstrap_servers, "message.timeout.ms": "300"}
    producer = RecordProducer(producer_config(config), "test")
    mock.set_leader("out", 0, -1)
    send(producer, BATCHED_ROWS)
    with pytest.raises(UnavailableError, match="writing records"):
        producer.flush(twenty_seconds())
    producer.close()


@batched_and_singly
def test_closing_the_producer_does_not_end_its_transaction(
    mock: MockCluster, rows: dict[str, pa.Array]
) -> None:
    """The client's own ``close`` would abort it; after a commit with an unknown outcome, nothing may."""
    producer = producer_in_transaction(mock)
    client = id(producer._client)
    send(producer, rows)
    producer.flush(twenty_seconds())
    producer.close()
    assert not is_alive(client)
    assert mock.requests()[Api.END_TXN] == 0


def test_t149_closing_the_producer_ends_the_client_with_which_it_asks_for_offsets(mock: MockCluster) -> None:
    """It does not wait for the garbage collector, which may find the producer hours later."""
    gc.disable()
    try:
        producer = producer_in_transaction(mock)
        assert producer.ends([TopicPartition("out", 0)]) == {TopicPartition("out", 0): 0}
        client = id(producer._source_admin()._client)
        assert is_alive(client, AdminClient)
        producer.close()
        assert not is_alive(client, AdminClient)
    finally:
        gc.enable()


def test_closing_after_a_commit_of_unknown_outcome_does_not_end_the_transaction(mock: MockCluster) -> None:
    producer = producer_in_transaction(mock)
    client = id(producer._client)
    send(producer, BATCHED_ROWS)
    producer.flush(twenty_seconds())
    mock.fail(Api.END_TXN, KafkaError.UNKNOWN)
    with pytest.raises(OutcomeUnknownError):
        producer.commit(twenty_seconds())
    producer.close()
    assert not is_alive(client)
    assert mock.requests()[Api.END_TXN] == 1


@batched_and_singly
def test_closing_the_producer_does_not_wait_for_brokers(mock: MockCluster, rows: dict[str, pa.Array]) -> None:
    """A driver without brokers must be able to exit once its ``commitTimeoutMs`` has passed."""
    producer = producer_in_transaction(mock)
    client = id(producer._client)
    send(producer, rows)
    producer.flush(twenty_seconds())
    mock.set_down(1)
    send(producer, rows)
    closing = threading.Thread(target=producer.close, daemon=True)
    closing.start()
    closing.join(20)
    assert not closing.is_alive()
    assert not is_alive(client)
