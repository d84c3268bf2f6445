"""Asks a broker for its finalized features, which librdkafka does not report (ApiVersions, KIP-584).

A broker answers this request before a client has logged in, so a plain or TLS connection is enough.
"""

from __future__ import annotations

import socket
import struct
from collections.abc import Mapping

from kafka_eos_source.kafka.tls import context, uses_tls
from kafka_eos_source.runtime.sockets import receive

_API_VERSIONS, _VERSION = 18, 3
_FINALIZED_FEATURES = 2
_MAXIMUM_BYTES = 1 << 20


def finalized_features(
    host: str, port: int, kafka: Mapping[str, str], timeout_seconds: float
) -> dict[str, int] | None:
    """Returns the finalized level of each feature, such as ``{"transaction.version": 2}``.

    Args:
        host: host of a broker.
        port: port of the broker's listener.
        kafka: librdkafka properties of the connection; only those of TLS are used.
        timeout_seconds: limits the connection, and the answer.

    Returns:
        The levels; a feature at level 0 is absent. None = the broker is older than the request.

    Raises:
        OSError: if there is no connection or no answer (``ssl.SSLError`` is one).
        ValueError: if the answer is not one of Kafka's.
    """
    with socket.create_connection((host, port), timeout_seconds) as plain:
        if not uses_tls(kafka):
            return _ask(plain)
        with context(kafka).wrap_socket(plain, server_hostname=host) as encrypted:
            return _ask(encrypted)


def _ask(connection: socket.socket) -> dict[str, int] | None:
    client = b"kafka-eos"
    header = struct.pack(">hhih", _API_VERSIONS, _VERSION, 1, len(client)) + client + b"\0"
    compact = bytes([len(client) + 1]) + client
    request = header + compact + b"\x021" + b"\0"  # client software name, its version "1", no tags
    connection.sendall(struct.pack(">i", len(request)) + request)
    (size,) = struct.unpack(">i", receive(connection, 4))
    if not 6 <= size <= _MAXIMUM_BYTES:
        raise ValueError(f"an answer of {size} bytes is not one of a Kafka broker")
    return parse(receive(connection, size))


def parse(answer: bytes) -> dict[str, int] | None:
    """Returns the finalized features in an answer of version 3, including its correlation id."""
    reader = _Reader(answer)
    reader.number(4)  # correlation id
    if reader.number(2) != 0:  # a broker before Kafka 2.4 answers with an error, in version 0
        return None
    for _ in range(reader.varint() - 1):
        reader.take(6)  # key, lowest and highest version of an API
        reader.skip_tags()
    reader.number(4)  # throttle time
    for _ in range(reader.varint()):
        tag, size = reader.varint(), reader.varint()
        value = reader.take(size)
        if tag == _FINALIZED_FEATURES:
            return _features(_Reader(value))
    return {}


def _features(reader: _Reader) -> dict[str, int]:
    found = {}
    for _ in range(reader.varint() - 1):
        name = reader.take(reader.varint() - 1).decode()
        found[name] = reader.number(2)
        reader.number(2)  # the lowest level
        reader.skip_tags()
    return found


class _Reader:
    """Reads the fields of an answer one after another."""

    def __init__(self, data: bytes) -> None:
        self._data, self._at = data, 0

    def take(self, size: int) -> bytes:
        if not 0 <= size <= len(self._data) - self._at:
            raise ValueError("the answer of the broker is too short")
        self._at += size
        return self._data[self._at - size : self._at]

    def number(self, size: int) -> int:
        return int.from_bytes(self.take(size), "big", signed=True)

    def varint(self) -> int:
        value, shift = 0, 0
        while True:
            (byte,) = self.take(1)
            value |= (byte & 0x7F) << shift
            if byte < 0x80:
                return value
            shift += 7

    def skip_tags(self) -> None:
        for _ in range(self.varint()):
            self.varint()
            self.take(self.varint())
