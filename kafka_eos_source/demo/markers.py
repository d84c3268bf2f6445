"""Counts transaction markers in a broker's own log files, independently of any client.

A transaction that ends leaves a control batch in every partition it wrote to, commit or abort, with the
producer's id and epoch (KIP-98). Layout of a batch, message format 2::

    baseOffset 8 | length 4 | leaderEpoch 4 | magic 1 | crc 4 | attributes 2 | lastOffsetDelta 4 |
    baseTimestamp 8 | maxTimestamp 8 | producerId 8 | producerEpoch 2 | baseSequence 4 | count 4 | records

Bit 5 of the attributes marks a control batch; the key of its one record is version 2 | type 2.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

_HEADER = struct.Struct(">qiibIhiqqqhii")
_LENGTH_ENDS_AT = 12
_CONTROL = 0x20
_ABORT, _COMMIT = 0, 1


@dataclass(frozen=True)
class Marker:
    """One control record of a transaction."""

    partition: str
    offset: int
    committed: bool
    producer_id: int
    producer_epoch: int


def markers(log_dirs: Path) -> Iterator[Marker]:
    """Yields every marker in the log segments under a broker's ``log.dirs``."""
    for segment in sorted(log_dirs.glob("*/*.log")):
        yield from _markers(segment.parent.name, segment.read_bytes())


def _markers(partition: str, segment: bytes) -> Iterator[Marker]:
    at = 0
    while at + _HEADER.size <= len(segment):
        base, length, _, magic, _, attributes, *_, producer_id, epoch, _, count = _HEADER.unpack_from(
            segment, at
        )
        end = at + _LENGTH_ENDS_AT + length
        if length <= 0 or end > len(segment):
            return  # the rest is preallocated, or the broker is writing it
        if magic == 2 and attributes & _CONTROL and count:
            kind = _control_type(segment, at + _HEADER.size)
            if kind in (_ABORT, _COMMIT):
                yield Marker(partition, base, kind == _COMMIT, producer_id, epoch)
        at = end


def _control_type(segment: bytes, at: int) -> int:
    _, at = varint(segment, at)  # length
    at += 1  # attributes
    _, at = varint(segment, at)  # timestamp delta
    _, at = varint(segment, at)  # offset delta
    _, at = varint(segment, at)  # key length
    return int(struct.unpack_from(">h", segment, at + 2)[0])


def varint(segment: bytes, at: int) -> tuple[int, int]:
    """Decodes a zigzag number of Kafka's record format; returns it and the position after it."""
    value = shift = 0
    while True:
        byte = segment[at]
        at += 1
        value |= (byte & 0x7F) << shift
        shift += 7
        if not byte & 0x80:
            return (value >> 1) ^ -(value & 1), at
