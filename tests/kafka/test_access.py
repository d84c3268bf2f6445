"""The client finds the addresses of brokers, sets the options of its sockets, logs in, and logs that."""

from __future__ import annotations

import logging
import socket
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import closing
from typing import Any

import pytest
from kafka.protocol.metadata import MetadataRequest

from kafka_eos_source.errors import InvalidOptionError
from kafka_eos_source.kafka import access
from kafka_eos_source.kafka import access as module
from kafka_eos_source.kafka import cluster as cluster_module
from kafka_eos_source.kafka.access import Access, Addresses, listed, new_exchange
from kafka_eos_source.kafka.cluster import Cluster, TemporaryError
from kafka_eos_source.kafka.config import admin_config, check_consumer, check_producer, producer_config
from kafka_eos_source.kafka.connection import Connection
from kafka_eos_source.kafka.failure import LoginRefusedError
from kafka_eos_source.kafka.tokens import Tokens
from kafka_eos_source.runtime.deadline import Deadline
from tests.support.simulated_kafka import SimulatedKafka

SECONDS = 10
UNUSED = "127.0.0.2"


def made(options: Mapping[str, str]) -> Addresses:
    return Addresses.of(check_consumer(options))


def resolves(monkeypatch: pytest.MonkeyPatch, **hosts: list[str]) -> list[Any]:
    """Makes names resolve to these addresses; returns the families that are asked for."""
    asked: list[Any] = []

    def getaddrinfo(host: str, port: int, family: int, kind: int) -> list[Any]:
        asked.append(family)
        return [(socket.AF_INET, kind, 0, "", (each, port)) for each in hosts[host]]

    monkeypatch.setattr(module.socket, "getaddrinfo", getaddrinfo)
    return asked


def test_bootstrap_servers_are_hosts_with_ports() -> None:
    text = "a:1, PLAINTEXT://b:2,,[::1]:3,c"
    assert listed(text) == [("a", 1), ("b", 2), ("::1", 3), ("c", 9092)]
    assert sorted(made({"bootstrap.servers": text}).bootstrap()) == sorted(listed(text))


def test_all_addresses_of_a_name_are_tried(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
        resolves(monkeypatch, broker=[UNUSED, "127.0.0.1"], gone=[UNUSED, "127.0.0.3"], one=[UNUSED])
        with made({}).connect("broker", port, Deadline.after_seconds(SECONDS)) as connected:
            assert connected.getpeername() == ("127.0.0.1", port)
        refused = r"127\.0\.0\.2: Connection refused; 127\.0\.0\.3: Connection refused"
        with pytest.raises(ConnectionRefusedError, match=refused):
            made({}).connect("gone", port, Deadline.after_seconds(SECONDS))
        with pytest.raises(ConnectionRefusedError, match="Connection refused"):
            made({}).connect("one", port, Deadline.after_seconds(SECONDS))


def test_an_address_that_does_not_answer_leaves_time_for_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener, socket.socket() as full:
        full.bind((UNUSED, listener.getsockname()[1]))
        full.listen(0)
        waiting = []
        for _ in range(3):  # until its queue is full
            client = socket.socket()
            client.setblocking(False)
            client.connect_ex(full.getsockname())
            waiting.append(client)
        resolves(monkeypatch, broker=[UNUSED, "127.0.0.1"], silent=[UNUSED])
        started = time.monotonic()
        with made({}).connect("broker", listener.getsockname()[1], Deadline.after_seconds(1)) as connected:
            assert connected.getpeername()[0] == "127.0.0.1"
        assert 0.4 < time.monotonic() - started < 1
        with pytest.raises(TimeoutError):
            made({}).connect("silent", listener.getsockname()[1], Deadline.after_seconds(0.1))
        for client in waiting:
            client.close()


@pytest.mark.parametrize(
    ("family", "asked"), [("any", socket.AF_UNSPEC), ("v4", socket.AF_INET), ("V6", socket.AF_INET6)]
)
def test_the_family_of_addresses_is_limited(family: str, asked: int, monkeypatch: pytest.MonkeyPatch) -> None:
    found = resolves(monkeypatch, broker=[UNUSED])
    with pytest.raises(OSError, match="refused"):
        made({"broker.address.family": family}).connect("broker", 1, Deadline.after_seconds(SECONDS))
    assert found == [asked]


def test_bootstrap_servers_are_replaced_by_canonical_names(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = resolves(monkeypatch, alias=["10.0.0.1", "10.0.0.2"])
    names = {"10.0.0.1": "one.example", "10.0.0.2": "two.example"}
    monkeypatch.setattr(module.socket, "getnameinfo", lambda address, _: (names[address[0]], "1"))
    canonical = {
        "client.dns.lookup": "resolve_canonical_bootstrap_servers_only",
        "bootstrap.servers": "alias:1",
    }
    found = made(canonical)
    assert sorted(found.bootstrap()) == [("one.example", 1), ("two.example", 1)]
    assert sorted(found.bootstrap()) == [("one.example", 1), ("two.example", 1)]
    assert len(calls) == 1  # it is not asked for again at once
    assert made({**canonical, "client.dns.lookup": "use_all_dns_ips"}).bootstrap() == [("alias", 1)]


def test_a_bootstrap_server_without_an_address_keeps_its_name(monkeypatch: pytest.MonkeyPatch) -> None:
    def getaddrinfo(*_: Any) -> None:
        raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")

    monkeypatch.setattr(module.socket, "getaddrinfo", getaddrinfo)
    found = made(
        {"client.dns.lookup": "resolve_canonical_bootstrap_servers_only", "bootstrap.servers": "alias:1"}
    )
    assert found.bootstrap() == [("alias", 1)]
    with pytest.raises(socket.gaierror):
        found.connect("alias", 1, Deadline.after_seconds(SECONDS))


def test_sockets_get_their_options() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]

        def option(options: Mapping[str, str], level: int, name: int) -> int:
            with made(options).connect("127.0.0.1", port, Deadline.after_seconds(SECONDS)) as connected:
                return connected.getsockopt(level, name)

        no_delay = (socket.IPPROTO_TCP, socket.TCP_NODELAY)
        assert option({}, *no_delay) == 1
        assert option({"socket.nagle.disable": "false"}, *no_delay) == 0
        keep_alive = (socket.SOL_SOCKET, socket.SO_KEEPALIVE)
        assert option({}, *keep_alive) == 0
        assert option({"socket.keepalive.enable": "true"}, *keep_alive) == 1
        for java, name in (("send", socket.SO_SNDBUF), ("receive", socket.SO_RCVBUF)):
            chosen = option({f"{java}.buffer.bytes": "40000"}, socket.SOL_SOCKET, name)
            assert chosen in (40_000, 80_000)  # Linux doubles it
            system = option({f"{java}.buffer.bytes": "-1"}, socket.SOL_SOCKET, name)
            assert system not in (40_000, 80_000)


# -- debug and reconnect


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


# -- SASL

SOON = Deadline.after_seconds(60)


@pytest.mark.parametrize("name", ["SCRAM-SHA-256", "SCRAM-SHA-512"])
def test_scram_escapes_the_user(name: str) -> None:
    """RFC 5802, section 5.1: a comma would end the user."""
    first = new_exchange(name, {"sasl.username": "a,b=c", "sasl.password": "p"}, None, "h", SOON).auth_bytes()
    assert first.startswith(b"n,,n=a=2Cb=3Dc,r=")


def test_plain_sends_the_user_as_it_is() -> None:
    exchange = new_exchange("PLAIN", {"sasl.username": "a,b=c", "sasl.password": "ü"}, None, "h", SOON)
    assert exchange.auth_bytes() == b"a,b=c\0a,b=c\0" + "ü".encode()


def test_oauthbearer_sends_token_and_extensions() -> None:
    kafka = {
        "enable.sasl.oauthbearer.unsecure.jwt": "true",
        "sasl.oauthbearer.config": "principal=me",
        "sasl.oauthbearer.extensions": "pool=p,cluster=c",
    }
    tokens = Tokens.of(kafka)
    sent = new_exchange("OAUTHBEARER", kafka, tokens, "h", SOON).auth_bytes()
    token = tokens.current(SOON).token.encode()
    assert sent == b"n,,\x01auth=Bearer " + token + b"\x01pool=p\x01cluster=c\x01\x01"


def test_an_executor_without_the_package_of_kerberos_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "gssapi", None)
    with pytest.raises(InvalidOptionError, match="needs the Python package 'gssapi'") as caught:
        new_exchange("GSSAPI", {}, None, "h", SOON)
    assert "pip install 'kafka-eos-source[kerberos]'" in caught.value.fix


@pytest.mark.parametrize(
    ("iterations", "is_refused"),
    [("1", True), ("4095", True), ("4096", False), ("16384", False), ("1000001", True), ("many", True)],
)
def test_scram_refuses_a_broker_that_asks_for_few_or_endless_iterations(
    iterations: str, is_refused: bool
) -> None:
    """Java's client refuses fewer than 4,096 as well."""
    kafka = {"sasl.username": "u", "sasl.password": "p"}
    exchange = new_exchange("SCRAM-SHA-256", kafka, None, "h", SOON)
    nonce = exchange.auth_bytes().rpartition(b"r=")[2]
    answer = b"r=" + nonce + b"more,s=c2FsdA==,i=" + iterations.encode()
    if is_refused:
        with pytest.raises(LoginRefusedError, match=f"asks for {iterations} iterations"):
            exchange.receive(answer)
    else:
        exchange.receive(answer)
        assert b"p=" in exchange.auth_bytes()
