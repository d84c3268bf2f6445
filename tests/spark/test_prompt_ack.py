"""Immediate TCP acknowledgements are switched on for the sockets of this process."""

import socket
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context

import pytest

from kafka_eos_source.spark.worker import acknowledge


def _switched_on() -> None:
    assert acknowledge() == 0
    with (
        socket.create_server(("127.0.0.1", 0)) as server,
        socket.create_connection(server.getsockname()) as one,
        server.accept()[0] as other,
        socket.socketpair()[0],  # not a TCP socket
        open(__file__, "rb"),
    ):
        assert acknowledge() == 3
        one.sendall(b"all is as it was")
        assert other.recv(100) == b"all is as it was"
    assert acknowledge() == 0


def test_acknowledgements_are_switched_on_for_every_tcp_socket_and_no_other() -> None:
    """Runs in a separate process, because clients left by other tests may open sockets at any time."""
    with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as process:
        process.submit(_switched_on).result()


def test_a_system_without_the_socket_option_is_accepted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(socket, "TCP_QUICKACK")
    assert acknowledge() == 0
