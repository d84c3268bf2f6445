"""The probe that asks a listener which brokers it knows, tested with answers in Kafka's encoding."""

from __future__ import annotations

import socket
import struct
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from kafka_eos_source.embedded.probe import broker_ids


def text(value: str) -> bytes:
    return struct.pack(">h", len(value)) + value.encode()


def metadata(*ids: int) -> bytes:
    """Encodes an answer of version 4: throttle time, brokers, and a rest that the probe ignores."""
    brokers = b"".join(
        struct.pack(">i", id_) + text("127.0.0.1") + struct.pack(">ih", 9092, -1) for id_ in ids
    )
    return struct.pack(">ii", 0, len(ids)) + brokers + text("cluster") + struct.pack(">ii", 1, 0)


@contextmanager
def listener(*answers: bytes) -> Iterator[tuple[int, list[bytes]]]:
    """Answers the requests of one connection with these answers, then closes it."""
    asked: list[bytes] = []

    def serve() -> None:
        connection, _ = server.accept()
        with connection, connection.makefile("rb") as incoming:
            for answer in answers:
                asked.append(incoming.read(struct.unpack(">i", incoming.read(4))[0]))
                for byte in struct.pack(">ii", len(answer) + 4, 1) + answer:  # one byte at a time
                    connection.sendall(bytes([byte]))

    with socket.create_server(("127.0.0.1", 0)) as server:
        thread = threading.Thread(target=serve)
        thread.start()
        yield server.getsockname()[1], asked
        thread.join(10)
    assert not thread.is_alive()


def test_the_probe_returns_the_broker_ids_of_the_metadata() -> None:
    with listener(metadata(1, 2, 3)) as (port, asked):
        assert broker_ids("127.0.0.1", port, None, 5) == {1, 2, 3}
    assert asked[0][:4] == struct.pack(">hh", 3, 4)


def test_the_probe_returns_nothing_for_a_broker_that_knows_no_broker_yet() -> None:
    with listener(metadata()) as (port, _):
        assert broker_ids("127.0.0.1", port, None, 5) == frozenset()


def test_the_probe_logs_in_before_it_asks_for_metadata() -> None:
    handshake = struct.pack(">hi", 0, 1) + text("PLAIN")
    logged_in = struct.pack(">hhiq", 0, -1, 0, 0)
    with listener(handshake, logged_in, metadata(7)) as (port, asked):
        assert broker_ids("127.0.0.1", port, ("alice", "secret"), 5) == {7}
    assert asked[1].endswith(b"\0alice\0secret")


def test_the_error_of_a_refused_login_hides_the_password() -> None:
    handshake = struct.pack(">hi", 0, 1) + text("PLAIN")
    refused = struct.pack(">h", 58) + text("no") + struct.pack(">iq", 0, 0)
    with (
        listener(handshake, refused) as (port, _),
        pytest.raises(PermissionError, match=r"login of 'alice' was refused \(Kafka's error 58\)") as caught,
    ):
        broker_ids("127.0.0.1", port, ("alice", "secret"), 5)
    assert "secret" not in str(caught.value)


def test_a_connection_that_closes_early_is_an_error() -> None:
    with listener() as (port, _), pytest.raises(OSError, match=r"closed|reset|Broken pipe"):
        broker_ids("127.0.0.1", port, None, 5)
