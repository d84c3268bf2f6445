"""Connections of the client: when they are replaced and opened again, and what the log says about them."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import closing
from typing import Any

import pytest
from kafka.protocol.metadata import MetadataRequest

from kafka_eos_source.kafka import access
from kafka_eos_source.kafka import cluster as cluster_module
from kafka_eos_source.kafka.access import Access
from kafka_eos_source.kafka.cluster import Cluster, TemporaryError
from kafka_eos_source.kafka.config import admin_config, check_consumer, check_producer, producer_config
from kafka_eos_source.kafka.connection import Connection
from kafka_eos_source.runtime.deadline import Deadline
from tests.support.simulated_kafka import SimulatedKafka

SECONDS = 10


@pytest.fixture
def brokers() -> Iterator[SimulatedKafka]:
    with SimulatedKafka({"t": 1}) as running:
        yield running


@pytest.fixture
def _log_as_before(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Restores the levels and handlers of the client's loggers."""
    loggers = [
        access._client,
        *(access._client.getChild(name) for each in access._CONTEXTS.values() for name in each),
    ]
    before = [each.level for each in loggers]
    handlers = list(access._client.handlers)
    monkeypatch.setattr(access, "_asked", set())
    yield
    for each, level in zip(loggers, before, strict=True):
        each.setLevel(level)
    access._client.handlers[:] = handlers


def client(brokers: SimulatedKafka, **options: str) -> Cluster:
    named = {name.replace("_", "."): value for name, value in options.items()}
    return Cluster(admin_config(check_consumer({"bootstrap.servers": brokers.bootstrap, **named})))


def soon() -> Deadline:
    return Deadline.after_seconds(SECONDS)


@pytest.mark.parametrize(
    ("kafka", "creates"), [({}, False), ({"allow.auto.create.topics": "T"}, True)], ids=["default", "true"]
)
def test_only_a_sink_that_says_so_lets_brokers_create_topics(
    kafka: dict[str, str], creates: bool, brokers: SimulatedKafka, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[MetadataRequest] = []
    send = Connection.send

    def recorded(self: Connection, request: MetadataRequest, *more: Any, **named: Any) -> None:
        asked.append(request)
        send(self, request, *more, **named)

    monkeypatch.setattr(Connection, "send", recorded)
    options = {"bootstrap.servers": brokers.bootstrap, **kafka}
    config = producer_config(check_producer(options, exactly_once=False))
    with closing(Cluster(config)) as cluster:
        cluster.metadata(["t"], soon())
    assert [each.allow_auto_topic_creation for each in asked] == [creates]


@pytest.mark.parametrize(("limit_ms", "connections"), [("0", 1), ("540000", 1), ("1", 3)])
def test_an_idle_connection_is_replaced_before_its_next_request(
    limit_ms: str, connections: int, brokers: SimulatedKafka, monkeypatch: pytest.MonkeyPatch
) -> None:
    with closing(client(brokers, connections_max_idle_ms=limit_ms)) as cluster:
        for _ in range(3):
            cluster.metadata([], soon())
            for each in cluster.network._connections:
                each._used -= 1.0  # a second passes
    assert brokers.received["ApiVersions"] == connections


def test_an_idle_connection_is_kept_while_it_is_asked(brokers: SimulatedKafka) -> None:
    with closing(client(brokers, connections_max_idle_ms="60000")) as cluster:
        before = cluster.anyone(soon()).expires
        cluster.metadata([], soon())
        assert cluster.anyone(soon()).expires > before


def test_pauses_between_connections_double() -> None:
    def pauses(**options: str) -> list[float]:
        named = {name.replace("_", "."): value for name, value in options.items()}
        access = Access.of(check_consumer(named), SECONDS, SECONDS)
        return [access.pause_seconds(failures) for failures in (1, 2, 3, 1000)]

    assert pauses() == [0, 0, 0, 0]
    assert pauses(reconnect_backoff_ms="100", reconnect_backoff_max_ms="300") == [0.1, 0.2, 0.3, 0.3]
    assert pauses(reconnect_backoff_ms="50") == [0.05, 0.1, 0.2, 10]
    assert pauses(reconnect_backoff_max_ms="150") == [0.1, 0.15, 0.15, 0.15]
    assert pauses(reconnect_backoff_ms="500", reconnect_backoff_max_ms="1") == [0.5, 0.5, 0.5, 0.5]


def test_a_broker_that_refused_a_connection_is_left_alone_for_the_pause(
    brokers: SimulatedKafka, monkeypatch: pytest.MonkeyPatch
) -> None:
    with closing(client(brokers, reconnect_backoff_ms="3600000")) as cluster:
        brokers.__exit__(None)
        with pytest.raises(TemporaryError, match="refused"):
            cluster.anyone(soon())
        monkeypatch.setattr(cluster_module.Network, "connect", lambda *_: pytest.fail("it connects again"))
        with pytest.raises(TemporaryError, match="refused"):
            cluster._connect(*cluster._access.addresses.bootstrap()[0], soon())


@pytest.mark.usefixtures("_log_as_before")
@pytest.mark.parametrize(
    ("contexts", "said"),
    [
        ("broker", {"broker"}),
        ("protocol", {"requests.ApiVersions", "requests.Metadata"}),
        ("metadata,mock", {"requests.Metadata"}),
        ("all", {"broker", "requests.ApiVersions", "requests.Metadata"}),
        ("eos", set()),
    ],
)
def test_debug_logs_its_contexts(
    contexts: str, said: set[str], brokers: SimulatedKafka, caplog: pytest.LogCaptureFixture
) -> None:
    with closing(client(brokers, debug=contexts)) as cluster:
        cluster.metadata([], soon())
    names = {each.name.removeprefix(f"{access._PACKAGE}.") for each in caplog.records}
    assert names == said
    if "broker" in said:
        assert any("connected to 127.0.0.1" in each for each in caplog.messages)


@pytest.mark.usefixtures("_log_as_before")
def test_lines_go_to_standard_error_where_nobody_configured_logging(
    brokers: SimulatedKafka, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(logging.getLogger(), "handlers", [])
    for _ in range(2):
        with closing(client(brokers, debug="broker")) as cluster:
            cluster.metadata([], soon())
    lines = [each for each in capsys.readouterr().err.splitlines() if "connected to 127.0.0.1" in each]
    assert len(lines) == 2  # one for each connection


@pytest.mark.usefixtures("_log_as_before")
@pytest.mark.parametrize(
    ("level", "shown"), [("3", logging.ERROR), ("4", logging.WARNING), ("7", logging.INFO)]
)
def test_log_level_hides_lines(level: str, shown: int) -> None:
    Access.of(check_consumer({"log_level": level}), SECONDS, SECONDS)
    assert access.broker_log.getEffectiveLevel() == shown


@pytest.mark.usefixtures("_log_as_before")
@pytest.mark.parametrize("order", [1, -1], ids=["quiet-first", "quiet-last"])
def test_a_client_that_logs_errors_only_hides_no_warning_of_another(order: int) -> None:
    for each in [{"log_level": "0"}, {}][::order]:
        Access.of(check_consumer(each), SECONDS, SECONDS)
    assert access.broker_log.isEnabledFor(logging.WARNING)
    Access.of(check_consumer({"log_level": "7"}), SECONDS, SECONDS)
    assert access.broker_log.isEnabledFor(logging.INFO)
