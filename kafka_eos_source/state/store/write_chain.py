"""Numbers of writes, which show after a crash whether the write-ahead log lost one between two others.

A log that ends exactly where a record ends looks complete. RocksDB then continues with the next log, as if
the lost writes had never been made: after a power failure, or on a bad disk, a database could miss one commit
and hold the next. So each write adds a key with its own number, and deletes the key of the write before:

::

    write/<number>             number in 8 bytes, big endian

Without a loss there is exactly one such key. If writes are lost, nobody deletes the key of the last write
before them. The keys are in the column family ``offsets``. Releases before this module ignore them and leave
them as they are.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable
from pathlib import Path

from kafka_eos_source.errors import StateCorruptedError
from kafka_eos_source.state.store.records import RESTORE_FIX
from kafka_eos_source.state.store.rocksdb import WriteBatch

#: Column family and range of the keys.
FAMILY, LOW, HIGH = "offsets", b"write/", b"write0"

_NUMBER = struct.Struct(">Q")
_VALUE = b"\x01"


class WriteChain:
    """Numbers the writes of one open database.

    Args:
        path: folder of the database, for errors.
        keys: keys of the database from `LOW` to `HIGH`.

    Raises:
        StateCorruptedError: if writes were lost.
    """

    def __init__(self, path: Path, keys: Iterable[bytes]) -> None:
        numbers = [_number(path, key) for key in keys]
        if len(numbers) > 1:
            raise StateCorruptedError(
                f"the database {path} lost writes after number {numbers[0]}, although it holds number "
                f"{numbers[-1]}: a log ends too early.",
                fix=RESTORE_FIX,
            )
        self._last = numbers[0] if numbers else 0

    def add_to(self, batch: WriteBatch) -> None:
        """Numbers a batch. Call `written` once it is written."""
        batch.put(FAMILY, _key(self._last + 1), _VALUE)
        if self._last:
            batch.delete(FAMILY, _key(self._last))

    def written(self) -> None:
        """Counts the batch that `add_to` numbered last."""
        self._last += 1


def _key(number: int) -> bytes:
    return LOW + _NUMBER.pack(number)


def _number(path: Path, key: bytes) -> int:
    try:
        (number,) = _NUMBER.unpack(key.removeprefix(LOW))
    except struct.error as error:
        raise StateCorruptedError(
            f"the database {path} has a damaged number of a write: {key!r}.", fix=RESTORE_FIX
        ) from error
    return int(number)
