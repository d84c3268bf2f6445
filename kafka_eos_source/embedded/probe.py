"""Asks a listener which brokers it knows, in Kafka's protocol over a plain socket.

A broker logs that it has started, and accepts connections, shortly before its metadata contains all brokers,
including itself. A client that connects in between finds no broker, or too few replicas.
"""

from __future__ import annotations

import socket
import struct

from kafka_eos_source.runtime.sockets import receive

_SASL_HANDSHAKE, _SASL_AUTHENTICATE, _METADATA = 17, 36, 3


def broker_ids(host: str, port: int, login: tuple[str, str] | None, timeout_seconds: float) -> frozenset[int]:
    """Returns the node ids in the metadata of the broker at ``host:port``.

    Args:
        host: host of the listener.
        port: port of the listener.
        login: name and password if the listener requires SASL/PLAIN.
        timeout_seconds: limits the connection, and each answer.

    Raises:
        OSError: if there is no connection or no answer, or the login is refused.
    """
    with socket.create_connection((host, port), timeout_seconds) as connection:
        if login is not None:
            _log_in(connection, *login)
        # Metadata version 4: an empty array of topics, and no topic is created.
        answer = _Answer(_ask(connection, _METADATA, 4, struct.pack(">i?", 0, False)))
        answer.int32()  # throttle time
        found = []
        for _ in range(answer.int32()):
            found.append(answer.int32())
            answer.text()  # host
            answer.int32()  # port
            answer.text()  # rack
        return frozenset(found)


def _log_in(connection: socket.socket, name: str, password: str) -> None:
    mechanism = _Answer(_ask(connection, _SASL_HANDSHAKE, 1, _text("PLAIN")))
    token = f"\0{name}\0{password}".encode()
    code = mechanism.int16()
    if code == 0:
        code = _Answer(_ask(connection, _SASL_AUTHENTICATE, 1, struct.pack(">i", len(token)) + token)).int16()
    if code:
        raise PermissionError(f"the login of {name!r} was refused (Kafka's error {code})")


def _ask(connection: socket.socket, api: int, version: int, body: bytes) -> bytes:
    request = struct.pack(">hhi", api, version, 1) + _text("kafka-eos") + body
    connection.sendall(struct.pack(">i", len(request)) + request)
    (size,) = struct.unpack(">i", receive(connection, 4))
    return receive(connection, size)[4:]  # without the correlation id


def _text(value: str) -> bytes:
    return struct.pack(">h", len(value)) + value.encode()


class _Answer:
    """Reads the fields of a response one after another."""

    def __init__(self, data: bytes) -> None:
        self._data = data
        self._at = 0

    def _take(self, size: int) -> bytes:
        self._at += size
        return self._data[self._at - size : self._at]

    def int16(self) -> int:
        return int.from_bytes(self._take(2), "big", signed=True)

    def int32(self) -> int:
        return int.from_bytes(self._take(4), "big", signed=True)

    def text(self) -> str | None:
        size = self.int16()
        return None if size < 0 else self._take(size).decode()
