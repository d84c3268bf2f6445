"""Acknowledging at once, on the sockets of this process."""

import socket
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context

import pytest

from kafka_eos_source.spark.worker import acknowledge


def _look() -> None:
    assert acknowledge() == 0
    with (
        socket.create_server(("127.0.0.1", 0)) as server,
        socket.create_connection(server.getsockname()) as one,
        server.accept()[0] as other,
        socket.socketpair()[0],  # not TCP's
        open(__file__, "rb"),
    ):
        assert acknowledge() == 3
        one.sendall(b"all is as it was")
        assert other.recv(100) == b"all is as it was"
    assert acknowledge() == 0


def test_every_tcp_connection_and_nothing_else() -> None:
    """In a process of its own: a client that another test left behind connects when it likes."""
    with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as process:
        process.submit(_look).result()


def test_where_there_is_no_such_option(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(socket, "TCP_QUICKACK")
    assert acknowledge() == 0
