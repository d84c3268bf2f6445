"""Changes bytes of a partition's log on a broker's disk, as a failing disk does."""

from __future__ import annotations

import struct
from dataclasses import dataclass
from pathlib import Path

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
