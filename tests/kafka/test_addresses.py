"""The client finds the addresses of brokers, tries all of them, and sets the options of its sockets."""

from __future__ import annotations

import socket
import time
from collections.abc import Mapping
from typing import Any

import pytest

from kafka_eos_source.kafka import access as module
from kafka_eos_source.kafka.access import Addresses, listed
from kafka_eos_source.kafka.config import check_consumer
from kafka_eos_source.runtime.deadline import Deadline

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
