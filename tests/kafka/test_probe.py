"""Questions to one broker alone: the doctor's, and those of an embedded cluster that starts."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from kafka_eos_source.errors import AuthorizationError, InvalidRecordError, KafkaEosError
from kafka_eos_source.kafka.probe import append_time, broker_ids, finalized_features
from kafka_eos_source.model import TopicPartition
from kafka_eos_source.runtime.deadline import Deadline
from tests.support.simulated_kafka import Fault, SimulatedKafka

SECONDS = 5.0


def address(cluster: SimulatedKafka) -> tuple[str, int]:
    host, _, port = cluster.bootstrap.partition(",")[0].partition(":")
    return host, int(port)


def login(password: str) -> dict[str, str]:
    return {
        "security.protocol": "SASL_PLAINTEXT",
        "sasl.mechanisms": "PLAIN",
        "sasl.username": "alice",
        "sasl.password": password,
    }


def test_the_probe_returns_the_broker_ids_of_the_metadata() -> None:
    with SimulatedKafka({}, brokers=3) as cluster:
        assert broker_ids(*address(cluster), {}, SECONDS) == {1, 2, 3}
        cluster.fence(2)
        assert broker_ids(*address(cluster), {}, SECONDS) == {1, 3}


def test_the_probe_logs_in_before_it_asks_for_metadata() -> None:
    with SimulatedKafka({}) as cluster:
        cluster.users = {"alice": "hunter2"}
        assert broker_ids(*address(cluster), login("hunter2"), SECONDS) == {1}
        with pytest.raises(AuthorizationError) as refused:
            broker_ids(*address(cluster), login("wrong-password"), SECONDS)
    assert "wrong-password" not in str(refused.value)


def test_features_are_asked_for_without_a_login() -> None:
    with SimulatedKafka({}) as cluster:
        cluster.users = {"alice": "hunter2"}
        assert finalized_features(*address(cluster), login("anything"), SECONDS) == {"transaction.version": 2}
        assert cluster.received == {"ApiVersions": 1}
        cluster.version = 0
        assert finalized_features(*address(cluster), {}, SECONDS) == {}


def test_a_broker_that_is_older_than_features_is_told_from_one_without() -> None:
    with SimulatedKafka({}) as cluster:
        cluster.announced["ApiVersions"] = (0, 2)
        assert finalized_features(*address(cluster), {}, SECONDS) is None


@contextmanager
def listener(sent: bytes) -> Iterator[tuple[str, int]]:
    """Accepts one connection, sends these bytes, and closes it."""

    def serve() -> None:
        connection, _ = server.accept()
        with connection:
            connection.recv(1000)
            connection.sendall(sent)

    with socket.create_server(("127.0.0.1", 0)) as server:
        thread = threading.Thread(target=serve)
        thread.start()
        yield server.getsockname()
        thread.join(10)
    assert not thread.is_alive()


@pytest.mark.parametrize("sent", [b"", b"\0\0", b"HTTP/1.1 400 Bad Request\r\n\r\n", bytes(12)])
def test_what_no_broker_sends_is_an_error_of_the_connection(sent: bytes) -> None:
    for ask in (finalized_features, broker_ids):
        with listener(sent) as (host, port), pytest.raises(OSError, match=f"{host}:{port}"):
            ask(host, port, {}, SECONDS)


def test_a_broker_that_hangs_is_given_up_in_time() -> None:
    with SimulatedKafka({}) as cluster:
        cluster.fault = lambda kind: Fault("silent") if kind == "Metadata" else None
        with pytest.raises(OSError, match="no answer"):
            broker_ids(*address(cluster), {}, 0.3)
        cluster.hung = {1}
        with pytest.raises(OSError, match=r"127\.0\.0\.1"):
            finalized_features(*address(cluster), {}, 0.3)


def test_certificates_that_cannot_be_read_are_named() -> None:
    with SimulatedKafka({}) as cluster, pytest.raises(KafkaEosError, match="/nowhere"):
        finalized_features(
            *address(cluster),
            {"security.protocol": "SASL_SSL", "ssl.ca.location": "/nowhere"},
            SECONDS,
        )


def test_the_clock_of_a_broker_is_asked_for_with_two_records() -> None:
    with SimulatedKafka({"t": 1}) as cluster:
        cluster.users = {"alice": "hunter2"}
        kafka = {"bootstrap.servers": cluster.bootstrap, **login("hunter2")}
        sent, _, acknowledged = append_time(kafka, TopicPartition("t", 0), Deadline.after_seconds(SECONDS))
        assert sent <= acknowledged
        assert cluster.committed("t") == {0: [b"clock check of kafka-eos doctor"] * 2}
        cluster.most_bytes = 10
        with pytest.raises(InvalidRecordError, match="writing a record to t-0"):
            append_time(kafka, TopicPartition("t", 0), Deadline.after_seconds(SECONDS))
