"""The producer without transactions against brokers that refuse, lose, delay, cut and forget."""

from __future__ import annotations

import time
from collections.abc import Iterator

import pyarrow as pa
import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from kafka_eos_source.commit import at_least_once
from kafka_eos_source.errors import (
    AuthorizationError,
    InvalidRecordError,
    KafkaEosError,
    OperatorError,
    RetriableError,
    UnavailableError,
)
from kafka_eos_source.kafka import queue, transaction
from kafka_eos_source.kafka.config import producer_config
from kafka_eos_source.kafka.producer import RecordProducer, by_topic
from kafka_eos_source.options.parse import parse_write
from tests.kafka.wire_kit import FAULT, PARTITIONS, ROWS, TOPIC, expected, planned, rows, soon, write
from tests.kafka.wire_kit import producer as transactional
from tests.support.fetched_log import OUT_OF_ORDER
from tests.support.simulated_kafka import NOT_LEADER, TOO_LARGE, Fault, SimulatedKafka

UNKNOWN_PRODUCER_ID, TOPIC_NOT_AUTHORIZED, CLUSTER_NOT_AUTHORIZED = 59, 29, 31


def producer(cluster: SimulatedKafka, **properties: str) -> RecordProducer:
    """Returns a client whose batches are tiny, so that each partition has many of them."""
    config = {
        "bootstrap.servers": cluster.bootstrap,
        "socket.timeout.ms": "200",
        "socket.connection.setup.timeout.ms": "300",
        "batch.size": "300",
        **properties,
    }
    return RecordProducer(producer_config(config), "test")


def send(client: RecordProducer, part: int, count: int = ROWS) -> None:
    client.begin_count()
    client.send(rows(part, count), TOPIC, soon())
    client.flush(soon())
    assert client.enqueued == count
    assert client.queued == 0


@pytest.fixture
def cluster() -> Iterator[SimulatedKafka]:
    with SimulatedKafka({TOPIC: PARTITIONS}, brokers=2) as made:
        yield made


@given(
    st.lists(
        st.tuples(
            st.sampled_from(["ApiVersions", "Metadata", "InitProducerId", "Produce"]),
            st.integers(1, 12),
            FAULT,
        ),
        max_size=8,
    ),
    st.booleans(),
)
@example([("Produce", number, Fault("error", NOT_LEADER)) for number in (1, 3, 5)], True)
@example([("Produce", number, Fault("unsure", NOT_LEADER)) for number in (2, 4, 7, 12)], True)
@example([("Produce", number, Fault("late", 60)) for number in (1, 2, 6)], True)
@settings(deadline=None, max_examples=60, suppress_health_check=[HealthCheck.too_slow])
def test_whatever_happens_to_requests_and_answers_no_record_is_lost(
    faults: list[tuple[str, int, Fault]], is_idempotent: bool
) -> None:
    """An idempotent producer also doubles none, and keeps their order."""
    with SimulatedKafka({TOPIC: PARTITIONS}, brokers=2) as cluster:
        cluster.fault = planned(*faults)
        client = producer(cluster, **({} if is_idempotent else {"enable.idempotence": "false", "acks": "1"}))
        for part in range(2):
            send(client, part)
        client.close()
        found = cluster.committed(TOPIC)
        if is_idempotent:
            assert found == expected(2)
        assert {number: sorted(set(values)) for number, values in found.items()} == expected(2)


def test_without_idempotence_the_order_is_kept(cluster: SimulatedKafka) -> None:
    """A broker would accept a later batch whose predecessor it refused, so none follows before the answer."""
    cluster.fault = planned(*[("Produce", number, Fault("error", NOT_LEADER)) for number in (1, 4, 6, 9)])
    client = producer(cluster, **{"enable.idempotence": "false", "acks": "1"})
    send(client, 0)
    client.close()
    assert cluster.committed(TOPIC) == expected(1)
    assert cluster.received["InitProducerId"] == 0


@pytest.mark.parametrize("code", [OUT_OF_ORDER, UNKNOWN_PRODUCER_ID])
def test_a_broker_that_lost_records_gets_the_next_epoch(cluster: SimulatedKafka, code: int) -> None:
    """KIP-360: what it lost was acknowledged, which no producer can mend; what follows is written once."""
    client = producer(cluster)
    send(client, 0)
    cluster.lose(TOPIC, 1, 1)
    if code == UNKNOWN_PRODUCER_ID:
        cluster.fault = planned(("Produce", 1, Fault("error", code)), ("Produce", 2, Fault("error", code)))
    send(client, 1)
    send(client, 2)
    found, wanted = cluster.committed(TOPIC), expected(3)
    lost = set(wanted[1]) - set(found[1])
    assert lost
    assert all(value.startswith(b"0-") for value in lost)
    assert found == {**wanted, 1: [value for value in wanted[1] if value not in lost]}
    assert cluster.received["InitProducerId"] == 1
    client.close()


def test_after_the_last_epoch_comes_another_producer_id(
    cluster: SimulatedKafka, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(transaction, "_LAST_EPOCH", 1)
    client = producer(cluster)
    for part in range(4):
        send(client, part)
        for number in range(PARTITIONS):
            cluster.lose(TOPIC, number, 1)
    send(client, 4)
    assert [value for value in cluster.committed(TOPIC)[0] if value.startswith(b"4-")] == [
        b"4-%04d" % number for number in range(0, ROWS, PARTITIONS)
    ]
    assert len(cluster.producer_ids) > 1
    client.close()


@pytest.mark.parametrize("compression", ["none", "zstd"])
@pytest.mark.parametrize("in_transaction", [False, True])
def test_a_batch_that_the_topic_does_not_accept_is_sent_as_smaller_ones(
    cluster: SimulatedKafka, compression: str, in_transaction: bool
) -> None:
    cluster.most_bytes = 200
    properties = {"batch.size": "2000", "compression.type": compression}
    queue._smaller_batches.clear()
    if in_transaction:
        client = transactional(cluster, **properties)
        client.init(soon())
        write(client, 0, 300)
        client.close()
    else:
        plain = producer(cluster, **properties)
        send(plain, 0, 300)
        asked = cluster.received["Produce"]
        send(plain, 1, 300)
        assert cluster.received["Produce"] - asked < asked, "the next batches are small at once"
        plain.close()
    assert cluster.committed(TOPIC) == expected(1 if in_transaction else 2, 300)


@pytest.mark.parametrize("compression", ["none", "zstd"])
def test_many_batches_that_the_topic_does_not_accept_do_not_fail_one_by_one(
    cluster: SimulatedKafka, compression: str
) -> None:
    """Each refusal costs a pause: one for each batch, and each of its halves, would take minutes."""
    client = producer(cluster, **{"batch.size": "2000", "compression.type": compression})
    queue._smaller_batches.clear()
    send(client, 0, 3_000)
    cluster.most_bytes = 250
    queue._smaller_batches.clear()
    asked = cluster.received["Metadata"]
    send(client, 1, 3_000)
    assert cluster.received["Metadata"] - asked <= 8, "the client looks for leaders after each refusal"
    assert cluster.committed(TOPIC) == expected(2, 3_000)
    client.close()


def test_a_record_that_the_topic_does_not_accept_fails(cluster: SimulatedKafka) -> None:
    cluster.most_bytes = 200
    client = producer(cluster)
    client.send(pa.record_batch({"value": pa.array([b"a" * 150, b"b"])}), TOPIC, soon())
    with pytest.raises(InvalidRecordError, match=r"max\.message\.bytes"):
        client.flush(soon())
    client.close()


def test_a_record_that_is_larger_than_the_client_may_send_is_named(cluster: SimulatedKafka) -> None:
    client = producer(cluster, **{"message.max.bytes": "2000"})
    client.send(pa.record_batch({"value": pa.array([b"x" * 5000])}), TOPIC, soon())
    with pytest.raises(InvalidRecordError, match=f"writing a record of 5,000 bytes to topic '{TOPIC}'"):
        client.flush(soon())
    client.close()


@pytest.mark.parametrize(
    ("kind", "code", "error"),
    [
        ("Produce", TOPIC_NOT_AUTHORIZED, AuthorizationError),
        ("Produce", -1, OperatorError),
        ("Produce", 47, RetriableError),
        ("InitProducerId", CLUSTER_NOT_AUTHORIZED, AuthorizationError),
        ("Metadata", TOPIC_NOT_AUTHORIZED, AuthorizationError),
    ],
)
def test_what_a_broker_refuses_for_good_fails_the_flush(
    cluster: SimulatedKafka, kind: str, code: int, error: type[KafkaEosError]
) -> None:
    client = producer(cluster)
    cluster.fault = lambda name: Fault("error", code) if name == kind else None
    client.send(rows(0), TOPIC, soon())
    with pytest.raises(error) as raised:
        client.flush(soon())
    assert type(raised.value) is error
    client.close()
    assert cluster.committed(TOPIC) == expected(0)


def test_records_that_no_broker_accepts_in_time_fail_the_flush(cluster: SimulatedKafka) -> None:
    client = producer(cluster)
    client.send(rows(0), TOPIC, soon())
    cluster.fault = lambda kind: Fault("error", NOT_LEADER) if kind == "Produce" else None
    with pytest.raises(UnavailableError):
        client.flush(soon(0.5))
    client.close()


def test_connections_that_brokers_closed_between_two_tasks_are_opened_again(cluster: SimulatedKafka) -> None:
    client = producer(cluster)
    send(client, 0)
    cluster.drop_connections()
    send(client, 1)
    client.close()
    assert cluster.committed(TOPIC) == expected(2)


def test_rows_of_several_topics_go_to_their_topics() -> None:
    with SimulatedKafka({"a": 1, "b": 2}) as cluster:
        client = producer(cluster)
        client.check_partitions({"a": 0, "b": -1}, soon())
        topics = ["a", "b", "a", "b", "b"]
        values = pa.array([b"%d" % number for number in range(len(topics))])
        client.send(
            pa.record_batch({"topic": pa.array(topics), "value": values, "key": values}), None, soon()
        )
        client.flush(soon())
        assert cluster.committed("a") == {0: [b"0", b"2"]}
        assert sorted(value for part in cluster.committed("b").values() for value in part) == [
            b"1",
            b"3",
            b"4",
        ]
        with pytest.raises(InvalidRecordError, match="topic 'a' has 1"):
            client.check_partitions({"a": 1}, soon())
        client.close()


@given(st.lists(st.sampled_from("abc"), min_size=1, max_size=40))
def test_rows_of_each_topic_keep_their_order(topics: list[str]) -> None:
    columns = {"topic": pa.array(topics), "value": pa.array(list(range(len(topics))))}
    found = {topic: part["value"].to_pylist() for topic, part in by_topic(columns, None)}
    assert found == {
        topic: [index for index, each in enumerate(topics) if each == topic] for topic in set(topics)
    }


def test_with_the_topic_option_all_rows_go_to_one_topic() -> None:
    columns = {"value": pa.array([b"a"])}
    assert list(by_topic(columns, "t")) == [("t", columns)]


def test_a_topic_that_refuses_even_single_records_is_named_once(cluster: SimulatedKafka) -> None:
    """A batch of several records becomes smaller until one record is left, and then fails."""
    queue._smaller_batches.clear()
    client = producer(cluster)
    cluster.fault = lambda kind: Fault("error", TOO_LARGE) if kind == "Produce" else None
    client.send(rows(0), TOPIC, soon())
    with pytest.raises(InvalidRecordError):
        client.flush(soon())
    client.close()


def test_a_task_may_compute_its_rows_for_longer_than_it_may_wait_for_brokers(
    cluster: SimulatedKafka, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(at_least_once, "_producers", {})
    options = parse_write(
        {
            "kafka.bootstrap.servers": cluster.bootstrap,
            "topic": TOPIC,
            "processing.guarantee": "at_least_once",
            "commitTimeoutMs": "1000",
        },
        streaming=False,
    )

    def slow() -> Iterator[pa.RecordBatch]:
        time.sleep(1.1)
        yield rows(0)
        time.sleep(1.1)

    assert at_least_once.produce(options, slow()).records == ROWS
    assert cluster.committed(TOPIC) == expected(1)
