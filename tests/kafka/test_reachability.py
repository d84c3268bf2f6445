"""A cluster that cannot be reached: the error names the address, where it comes from, and the fix."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Iterator

import pytest

from kafka_eos_source.errors import KafkaEosError, UnavailableError
from kafka_eos_source.kafka import admin, admin_client, connection, failure, probe
from kafka_eos_source.kafka import cluster as cluster_module
from kafka_eos_source.kafka.admin import ClusterReader, SourceAdmin
from kafka_eos_source.kafka.admin_client import Complaints, request
from kafka_eos_source.kafka.cluster import Cluster
from kafka_eos_source.kafka.config import producer_config
from kafka_eos_source.kafka.error_codes import ErrorCode, KafkaError
from kafka_eos_source.kafka.probe import check_reachable
from kafka_eos_source.kafka.producer import RecordProducer
from kafka_eos_source.model import TopicPartition
from kafka_eos_source.runtime.deadline import Deadline
from tests.support.simulated_kafka import Fault, SimulatedKafka

NO_SUCH_HOST = "broker.kafka-eos.invalid"
SECONDS = 0.2


@pytest.fixture(autouse=True)
def _quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(probe, "_ADVERTISED_SECONDS", 0.1)
    monkeypatch.setattr(probe, "_PASS_SECONDS", 0.5)
    monkeypatch.setattr(failure, "_worked", set())
    monkeypatch.setattr(admin_client, "_answered", set())


@pytest.fixture
def refusing() -> Iterator[str]:
    """The address of a port that refuses connections, and that nobody else gets meanwhile."""
    with socket.socket() as bound:
        bound.bind(("127.0.0.1", 0))
        yield f"127.0.0.1:{bound.getsockname()[1]}"


def refused(bootstrap: str, **more: str) -> UnavailableError:
    with pytest.raises(UnavailableError) as caught:
        check_reachable({"bootstrap.servers": bootstrap, **more}, SECONDS)
    return caught.value


def test_a_cluster_that_answers_has_no_complaint() -> None:
    with SimulatedKafka({"t": 1}, brokers=3) as cluster:
        assert check_reachable({"bootstrap.servers": cluster.bootstrap}) == ""
        assert check_reachable({"bootstrap.servers": cluster.bootstrap}, every=True) == ""


def test_each_bootstrap_address_is_named_with_its_cause(refusing: str) -> None:
    error = refused(f"{refusing},{NO_SUCH_HOST}:9092")
    assert f"cannot connect to {refusing}: the connection was refused" in error.message
    assert f"cannot connect to {NO_SUCH_HOST}:9092: the host name does not resolve" in error.message
    assert "kafka.bootstrap.servers" in error.message
    assert "check the addresses" in error.fix


@pytest.mark.parametrize("host", [NO_SUCH_HOST, "127.0.0.1"])
def test_an_advertised_address_that_cannot_be_reached_is_named_as_such(host: str, refusing: str) -> None:
    port = int(refusing.rpartition(":")[2])
    with SimulatedKafka({"t": 1}) as cluster:
        cluster.advertised[1] = (host, port)
        error = refused(cluster.bootstrap)
        assert f"the bootstrap server {cluster.bootstrap} answered" in error.message
        assert f"broker 1 at {host}:{port} (its advertised.listeners)" in error.message
        why = "does not resolve" if host == NO_SUCH_HOST else "was refused"
        assert why in error.message
        assert "advertised.listeners" in error.fix


def test_brokers_that_cannot_be_reached_while_others_can_are_a_warning(
    refusing: str, caplog: pytest.LogCaptureFixture
) -> None:
    with SimulatedKafka({"t": 1}, brokers=3) as cluster:
        cluster.advertised[2] = (NO_SUCH_HOST, 9092)
        cluster.advertised[3] = ("127.0.0.1", int(refusing.rpartition(":")[2]))
        found = check_reachable({"bootstrap.servers": cluster.bootstrap}, every=True)
    for named in (f"broker 2 at {NO_SUCH_HOST}:9092", f"broker 3 at {refusing}"):
        assert named in found
        assert named in caplog.text
    assert "broker 1" not in found


def test_a_silent_broker_does_not_delay_a_start_while_another_answers() -> None:
    with SimulatedKafka({"t": 1}, brokers=3) as cluster:
        cluster.hung.add(1)
        healthy = cluster.bootstrap.partition(",")[2]
        started = time.monotonic()
        assert check_reachable({"bootstrap.servers": healthy}) == ""
    assert time.monotonic() - started < 2.5  # the silent one would take 3 s


def test_brokers_that_accept_connections_and_are_silent_may_answer_later(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("kafka_eos_source.kafka.cluster._LEAST_CONNECT_SECONDS", 0.1)
    with SimulatedKafka({"t": 1}) as cluster:
        cluster.hung.add(1)
        found = check_reachable({"bootstrap.servers": cluster.bootstrap}, SECONDS)
        assert found == f"cannot connect to {cluster.bootstrap}: it did not answer in time"


@pytest.mark.parametrize("others", ["slow", "down"])
def test_slow_brokers_are_not_taken_for_brokers_that_refuse(
    monkeypatch: pytest.MonkeyPatch, refusing: str, others: str
) -> None:
    """The client leaves a connection itself, or gives up, so the brokers may answer a later request."""
    monkeypatch.setattr(connection, "SILENT_SECONDS", 0.2)
    monkeypatch.setattr(cluster_module, "SILENT_SECONDS", 0.2)
    with SimulatedKafka({"t": 1}, brokers=3 if others == "slow" else 1) as cluster:
        cluster.fault = lambda kind: Fault("delay", 700) if kind != "ApiVersions" else None
        bootstrap = cluster.bootstrap if others == "slow" else f"{refusing},{cluster.bootstrap}"
        assert check_reachable({"bootstrap.servers": bootstrap}, SECONDS)


@pytest.mark.parametrize("protocol", ["plaintext", "ssl"])
def test_a_listener_of_another_protocol_is_a_likely_cause(protocol: str) -> None:
    """As brokers do, this one ends a connection whose first bytes are no request of the listener's."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        listener.settimeout(10)

        def serve() -> None:
            while True:
                try:
                    accepted, _ = listener.accept()
                except OSError:
                    return
                with accepted:
                    accepted.recv(1 << 16)

        threading.Thread(target=serve, daemon=True).start()
        address = f"127.0.0.1:{listener.getsockname()[1]}"
        error = refused(address, **{"security.protocol": protocol})
        assert f"cannot connect to {address}: it ended the connection" in error.message
        assert "kafka.security.protocol" in error.message


def test_a_task_whose_time_is_up_names_the_advertised_address() -> None:
    with SimulatedKafka({"t": 1}) as server:
        server.advertised[1] = (NO_SUCH_HOST, 9092)
        cluster, deadline = Cluster({"bootstrap.servers": server.bootstrap}), Deadline.after_seconds(0.5)
        with pytest.raises(
            UnavailableError, match=rf"broker 1 at {NO_SUCH_HOST}:9092 \(its advertised"
        ) as caught:
            cluster.retried(
                "reading the ends", deadline, lambda: cluster.offsets([TopicPartition("t", 0)], deadline)
            )
        cluster.close()
    assert "reading the ends" in caught.value.message


# -- admin requests


def test_a_query_that_starts_names_the_advertised_address_within_seconds() -> None:
    with SimulatedKafka({"t": 1}) as cluster:
        cluster.advertised[1] = (NO_SUCH_HOST, 9092)
        begun = time.monotonic()
        with pytest.raises(UnavailableError, match=rf"broker 1 at {NO_SUCH_HOST}:9092 .*advertised"):
            SourceAdmin({"bootstrap.servers": cluster.bootstrap}, "read_committed", 3, 10).named(["t"])
        assert time.monotonic() - begun < 10


def test_the_first_request_of_a_new_query_does_not_wait_for_brokers_that_are_silent(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Something else may listen at a wrong address."""
    monkeypatch.setattr(admin, "FIRST_SECONDS", 0.3)
    monkeypatch.setattr(admin, "START_SECONDS", 0.1)
    monkeypatch.setattr(cluster_module, "_LEAST_CONNECT_SECONDS", 0.1)
    with SimulatedKafka({"t": 1}) as cluster:
        config = {"bootstrap.servers": cluster.bootstrap}
        cluster.hung.add(1)
        source = SourceAdmin(config, "read_committed", 100_000, 10)
        source.new_query()
        with pytest.raises(UnavailableError, match=f"connect to {cluster.bootstrap}: it did not answer"):
            source.named(["t"])
        cluster.hung.clear()
        assert source.named(["t"]).partitions, "brokers have answered"
        cluster.hung.add(1)
        cluster.drop_connections()
        source.new_query()
        threading.Timer(1.5, cluster.hung.clear).start()
        assert source.named(["t"]).partitions, "then a query waits for them, although it begins"


@pytest.mark.parametrize("who", ["source", "sink"])
def test_a_topic_that_does_not_exist_is_answered_with_similar_names(
    who: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kafka_eos_source.kafka.transaction._NEW_TOPIC_SECONDS", 0.1)
    with SimulatedKafka({"orders": 1, "other": 1, "__orders": 1}) as cluster:
        config = {"bootstrap.servers": cluster.bootstrap}

        def look_up() -> None:
            if who == "source":
                SourceAdmin(config, "read_committed", 1, 10).named(["order"])
            else:
                producer = RecordProducer(producer_config(config), "check")
                producer.check_partitions({"order": -1}, Deadline.after_seconds(5))

        with pytest.raises(UnavailableError, match=r"'order' does not exist.*mean 'orders' or 'other'\?"):
            look_up()


def test_a_command_fails_soon_if_connections_are_refused(
    refusing: str, caplog: pytest.LogCaptureFixture
) -> None:
    deadline = Deadline.after_seconds(60)
    with (
        ClusterReader({"bootstrap.servers": refusing}) as reader,
        pytest.raises(UnavailableError, match=f"cannot connect to {refusing}: the connection was refused"),
    ):
        reader.topics(deadline)
    assert deadline.remaining_seconds() > 50


def _no_answer(_seconds: float) -> None:
    raise KafkaError(ErrorCode.NO_ANSWER)


@pytest.mark.parametrize("starts", [True, False])
def test_only_a_query_that_starts_fails_soon(refusing: str, starts: bool) -> None:
    config = {"bootstrap.servers": refusing}
    complaints = Complaints(config)
    if starts:  # but this process has reached the brokers before
        complaints.answered()
    deadline = Deadline.after_seconds(0.5)
    with pytest.raises(UnavailableError, match="the connection was refused"):
        request("asking", _no_answer, deadline, complaints, refusing, starts=starts)
    assert deadline.expired


def test_a_temporary_error_that_a_broker_answers_is_no_reason_to_look_for_brokers(refusing: str) -> None:
    def send(_seconds: float) -> None:
        raise KafkaError(ErrorCode.COORDINATOR_LOAD_IN_PROGRESS, "it loads")

    complaints = Complaints({"bootstrap.servers": refusing})
    with pytest.raises(KafkaEosError, match="it loads"):
        request("asking", send, Deadline.after_seconds(0.1), complaints, refusing, starts=True)
