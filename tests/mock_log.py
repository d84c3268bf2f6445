"""The log of a mock cluster's partition as it lies there: records *and* markers, read without librdkafka.

A consumer cannot tell on the mock what was committed: its Fetch knows no isolation level. The markers are in
the log, though, so one Fetch (v4) by hand and a reader of record batches (KIP-98's format 2) tell it. It is a
second implementation besides the one that wrote the records.
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
    """The end of a transaction, as control records say it."""

    ABORT = 0
    COMMIT = 1


@dataclass(frozen=True)
class Entry:
    """One record, or the end of a transaction.

    Attributes:
        offset: in the partition.
        producer_id: of the writer; the mock gives a new one with every ``init_transactions``.
        value: of a record.
        marker: None = it is a record.
    """

    offset: int
    producer_id: int
    value: bytes | None = None
    marker: Marker | None = None


def read(bootstrap_servers: str, topic: str, partition: int) -> list[Entry]:
    """All that is in the partition now, whoever leads it."""
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
                # the mock's offsets have no gaps: nothing is compacted or deleted there
                if len(entries) == end:
                    return entries
    raise AssertionError(f"no broker of {bootstrap_servers} leads {topic}-{partition}")


def committed(entries: list[Entry]) -> list[bytes | None]:
    """What a reader with ``isolation.level=read_committed`` sees: values, in their order."""
    ends = [(each.producer_id, each.offset, each.marker) for each in entries if each.marker is not None]

    def end_of(record: Entry) -> Marker | None:
        later = (
            marker for pid, offset, marker in ends if pid == record.producer_id and offset > record.offset
        )
        return next(later, None)

    return [each.value for each in entries if each.marker is None and end_of(each) is Marker.COMMIT]


def commits(entries: list[Entry]) -> int:
    """Transactions that were committed in this partition."""
    return sum(each.marker is Marker.COMMIT for each in entries)


def _fetch(connection: socket.socket, topic: str, partition: int, offset: int) -> tuple[int, int, bytes]:
    """Error code, end of the log, and record batches from ``offset`` on."""
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
    assert aborted <= 0, "the mock has learnt of aborted transactions: use its answer"
    at += struct.calcsize(">hqqi")
    (length,) = struct.unpack_from(">i", answer, at)
    return error, end, answer[at + 4 : at + 4 + max(0, length)]


def _entries(records: bytes) -> Iterator[Entry]:
    """Of whole record batches (format 2), uncompressed."""
    at = 0
    while at + _HEADER_BYTES <= len(records):
        first, length = struct.unpack_from(">qi", records, at)
        (attributes,) = struct.unpack_from(">h", records, at + 21)
        producer_id, _epoch, _sequence, count = struct.unpack_from(">qhii", records, at + 43)
        assert attributes & 0x07 == 0, "compressed batches are not read"
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
    """Offset (relative to the batch), key and value."""
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
