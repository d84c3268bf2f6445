"""Changes bytes of files: of a partition's log as a failing disk does, of staged rows as an attacker does."""

from __future__ import annotations

import struct
from dataclasses import dataclass
from pathlib import Path

from kafka_eos_source.stage.files import crc32c

_HEADER = struct.Struct(">qi")
_LAST_OFFSET_DELTA = struct.Struct(">i")
#: Where the fields of a record batch begin.
OFFSET, LENGTH, FORMAT, CHECKSUM, ATTRIBUTES, LAST_DELTA, RECORDS = 0, 8, 16, 17, 21, 23, 61


@dataclass(frozen=True)
class StoredBatch:
    """A record batch in a log.

    Attributes:
        at: its position in the file.
        size: its bytes.
        first: its first offset.
        last: its last offset.
    """

    at: int
    size: int
    first: int
    last: int


class StoredLog:
    """The first segment of a partition's log on a broker.

    Args:
        broker: the broker's folder.
        topic, partition: the partition.
    """

    def __init__(self, broker: Path, topic: str, partition: int = 0) -> None:
        (self.path,) = broker.glob(f"**/{topic}-{partition}/{0:020d}.log")

    def batches(self) -> list[StoredBatch]:
        """Returns its record batches, if none of them is damaged."""
        data, at, found = self.path.read_bytes(), 0, []
        while at + RECORDS <= len(data) and data[at + FORMAT] == 2:
            first, length = _HEADER.unpack_from(data, at)
            (delta,) = _LAST_OFFSET_DELTA.unpack_from(data, at + LAST_DELTA)
            found.append(StoredBatch(at, length + 12, first, first + delta))
            at += length + 12
        return found

    def flip(self, at: int, bits: int = 1) -> None:
        """Changes bits of one byte. The broker may run: it reads the same page cache."""
        with self.path.open("r+b") as file:
            file.seek(at)
            (before,) = file.read(1)
            file.seek(at)
            file.write(bytes([before ^ bits]))


def forged(data: bytes, old: bytes, new: bytes, free: int) -> bytes:
    """Replaces bytes by others, and changes eight bytes elsewhere so that size and CRC-32C stay as before.

    Args:
        data: the whole file.
        old, new: what is replaced, and by what; of one size.
        free: where the eight bytes are that may become any others.
    """
    changed = bytearray(data.replace(old, new))
    before = crc32c(changed)
    #: Number of bits of a change of the CRC → the change, and the bits that cause it: an echelon form.
    basis: dict[int, tuple[int, int]] = {}
    for bit in range(64):
        changed[free + bit // 8] ^= 1 << bit % 8
        change, bits = crc32c(changed) ^ before, 1 << bit
        changed[free + bit // 8] ^= 1 << bit % 8
        while change and (known := basis.get(change.bit_length())):
            change, bits = change ^ known[0], bits ^ known[1]
        if change:
            basis[change.bit_length()] = change, bits
    missing, flipped = before ^ crc32c(data), 0
    while missing:
        change, bits = basis[missing.bit_length()]
        missing, flipped = missing ^ change, flipped ^ bits
    for bit in range(64):
        changed[free + bit // 8] ^= (flipped >> bit & 1) << bit % 8
    assert (len(changed), crc32c(changed)) == (len(data), crc32c(data))
    return bytes(changed)
