"""Reads a mock cluster's partition without librdkafka: records and control records.

A consumer cannot see on the mock what was committed, because the mock's Fetch ignores the isolation level.
But the log holds the control records. This module sends a Fetch (v4) itself and parses the record batches
(format 2 of KIP-98), independently of the code that wrote them.
"""

from __future__ import annotations

import socket
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from enum import Enum

from kafka_eos_source.testing.markers import varint

_FETCH, _VERSION = 1, 4
_NOT_LEADER = 6
_CONTROL = 0x20
_HEADER_BYTES = 61
_SECONDS = 20.0


class Marker(Enum):
    """The type of a control record, which ends a transaction."""

    ABORT = 0
    COMMIT = 1


@dataclass(frozen=True)
class Entry:
    """One record, or the end of a transaction.

    Attributes:
        offset: the offset in the partition.
        producer_id: the writer's id; the mock assigns a new one at every ``init_transactions``.
        value: the value of a record.
        marker: the type of a control record; None for an ordinary record.
    """

    offset: int
    producer_id: int
    value: bytes | None = None
    marker: Marker | None = None


def read(bootstrap_servers: str, topic: str, partition: int) -> list[Entry]:
    """Returns everything in the partition now, from whichever broker leads it."""
    for address in bootstrap_servers.split(","):
        host, port = address.rsplit(":", 1)
        with socket.create_connection((host, int(port)), _SECONDS) as connection:
            entries: list[Entry] = []
            while True:
                error, end, records = _fetch(connection, topic, partition, len(entries))
                if error == _NOT_LEADER:
                    break
                assert error == 0, f"fetching {topic}-{partition}: error {error}"
                entries += _entries(records)
                # the mock compacts and deletes nothing, so offsets have no gaps
                if len(entries) == end:
                    return entries
    raise AssertionError(f"no broker of {bootstrap_servers} leads {topic}-{partition}")


def committed(entries: list[Entry]) -> list[bytes | None]:
    """Returns the values that a ``read_committed`` reader sees, in order."""
    ends = [(each.producer_id, each.offset, each.marker) for each in entries if each.marker is not None]

    def end_of(record: Entry) -> Marker | None:
        later = (
            marker for pid, offset, marker in ends if pid == record.producer_id and offset > record.offset
        )
        return next(later, None)

    return [each.value for each in entries if each.marker is None and end_of(each) is Marker.COMMIT]


def commits(entries: list[Entry]) -> int:
    """Returns the number of transactions that were committed in this partition."""
    return sum(each.marker is Marker.COMMIT for each in entries)


def _fetch(connection: socket.socket, topic: str, partition: int, offset: int) -> tuple[int, int, bytes]:
    """Returns error code, end of the log, and the record batches from ``offset`` on."""
    name = _string(topic)
    body = struct.pack(">hhi", _FETCH, _VERSION, 0) + _string("mock-log")
    body += struct.pack(">iiiib", -1, 0, 0, 1 << 24, 0)  # replica, wait, min, max bytes, isolation
    body += struct.pack(">i", 1) + name
    body += struct.pack(">iiqi", 1, partition, offset, 1 << 24)
    connection.sendall(struct.pack(">i", len(body)) + body)
    (size,) = struct.unpack(">i", _receive(connection, 4))
    answer = _receive(connection, size)
    # correlation id, throttle time, one topic, one partition
    at = 4 + 4 + 4 + len(name) + 4 + 4
    error, end, _stable, aborted = struct.unpack_from(">hqqi", answer, at)
    assert aborted <= 0, "the mock now reports aborted transactions: use its answer"
    at += struct.calcsize(">hqqi")
    (length,) = struct.unpack_from(">i", answer, at)
    return error, end, answer[at + 4 : at + 4 + max(0, length)]


def _entries(records: bytes) -> Iterator[Entry]:
    """Parses whole, uncompressed record batches (format 2)."""
    at = 0
    while at + _HEADER_BYTES <= len(records):
        first, length = struct.unpack_from(">qi", records, at)
        (attributes,) = struct.unpack_from(">h", records, at + 21)
        producer_id, _epoch, _sequence, count = struct.unpack_from(">qhii", records, at + 43)
        assert attributes & 0x07 == 0, "compressed batches are not supported"
        position = at + _HEADER_BYTES
        for _ in range(count):
            size, position = varint(records, position)
            end = position + size
            offset, key, value = _record(records, position)
            if attributes & _CONTROL:
                assert key is not None
                yield Entry(first + offset, producer_id, marker=Marker(struct.unpack(">hh", key)[1]))
            else:
                yield Entry(first + offset, producer_id, value)
            position = end
        at += 12 + length


def _record(records: bytes, position: int) -> tuple[int, bytes | None, bytes | None]:
    """Parses a record: its offset relative to the batch, its key and its value."""
    position += 1  # attributes
    _, position = varint(records, position)  # timestamp
    offset, position = varint(records, position)
    key, position = _bytes(records, position)
    value, _ = _bytes(records, position)
    return offset, key, value


def _bytes(records: bytes, position: int) -> tuple[bytes | None, int]:
    size, position = varint(records, position)
    return (None, position) if size < 0 else (records[position : position + size], position + size)


def _string(text: str) -> bytes:
    return struct.pack(">h", len(text)) + text.encode()


def _receive(connection: socket.socket, count: int) -> bytes:
    received = b""
    while len(received) < count:
        chunk = connection.recv(count - len(received))
        assert chunk, "the broker closed the connection"
        received += chunk
    return received
