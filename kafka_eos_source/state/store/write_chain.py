"""Numbers of writes, which show after a crash whether the write-ahead log lost one that others depend on.

A log that ends exactly where a record ends looks complete. RocksDB then continues with the next log, as if
the lost writes had never been made: after a power failure, or on a bad disk, a database could miss one commit
and hold the next. So each write adds a key with its own number, and deletes the key of the write before:

::

    write/<number><session>    number in 8 bytes, big endian, and 8 random bytes of the open database
    write/first                written with the first number, and never deleted

Without a loss there is exactly one number. If writes are lost, nobody deletes the key of the last write
before them; if the first log is lost as a whole, ``write/first`` is missing. The random bytes tell numbers
apart that were given again after the end of a log was lost. The keys are in the column family ``offsets``.

Some tables hold data before the metadata that belongs to it is in a table too: sorted files of a large batch,
and those that `Database.close` writes for one family after the other. If the log lost that metadata, the data
would be ahead of it. So before such a table is written, the owner syncs the log, and the file ``least-write``
in the database's folder gets the number of the last write. A database that holds only earlier writes is
damaged.
"""

from __future__ import annotations

import os
import struct
from collections.abc import Iterable
from pathlib import Path

from kafka_eos_source.errors import StateCorruptedError
from kafka_eos_source.state.store.files import RESTORE_FIX, replace_text
from kafka_eos_source.state.store.rocksdb import WriteBatch

#: Column family and range of the keys.
FAMILY, LOW, HIGH = "offsets", b"write/", b"write0"

_FIRST = LOW + b"first"
_NUMBER = struct.Struct(">Q8s")
_VALUE = b"\x01"
_LEAST = "least-write"


class WriteChain:
    """Numbers the writes of one open database.

    Args:
        path: folder of the database.
        keys: keys of the database from `LOW` to `HIGH`.
        least: what `least_write` returned, for a reader before it read the keys.

    Raises:
        StateCorruptedError: if writes were lost.
    """

    def __init__(self, path: Path, keys: Iterable[bytes], least: int) -> None:
        found = set(keys)
        has_first = _FIRST in found
        found.discard(_FIRST)
        numbers = sorted(_number(path, key) for key in found)
        if len(numbers) > 1:
            raise _lost(path, f"writes after number {numbers[0]}, although it holds number {numbers[-1]}")
        if len(numbers) != has_first:
            raise _lost(path, "its first writes" if numbers else "all numbers of its writes")
        self._last = numbers[0] if numbers else 0
        self._last_key = found.pop() if found else b""
        if self._last < least:
            raise _lost(
                path, f"writes after number {self._last}, although tables hold data of number {least}"
            )
        self._path = path
        self._least = least
        self._session = os.urandom(8)

    def add_to(self, batch: WriteBatch) -> None:
        """Numbers a batch. Call `written` once it is written."""
        batch.put(FAMILY, self._next_key(), _VALUE)
        batch.delete(FAMILY, self._last_key) if self._last else batch.put(FAMILY, _FIRST, _VALUE)

    def written(self) -> None:
        """Counts the batch that `add_to` numbered last."""
        self._last_key = self._next_key()
        self._last += 1

    @property
    def has_unrequired_writes(self) -> bool:
        """Whether there were writes since `require` was called last."""
        return self._least < self._last

    def require(self) -> None:
        """Makes the loss of any write so far damage from now on. The requirement survives a power failure.

        All writes must be on disk already. Otherwise a power failure that cuts some of them off would look
        like damage, although no table depends on them yet.

        Raises:
            OSError: if the disk is full or fails.
        """
        replace_text(self._path / _LEAST, f"{self._last}\n", durable=True)
        self._least = self._last

    def _next_key(self) -> bytes:
        return LOW + _NUMBER.pack(self._last + 1, self._session)


def least_write(path: Path) -> int:
    """Returns the number of a write that the database in a folder must hold; 0 = none.

    A reader calls this before it reads the database's files, because the owner may require more meanwhile.

    Raises:
        StateCorruptedError: if the file has no number.
    """
    try:
        text = (path / _LEAST).read_bytes()
    except FileNotFoundError:
        return 0
    if not text.strip().isdigit():
        raise StateCorruptedError(
            f"the file {path / _LEAST} contains {text[:40]!r}; expected a number.", fix=RESTORE_FIX
        )
    return int(text)


def _lost(path: Path, what: str) -> StateCorruptedError:
    return StateCorruptedError(
        f"the database {path} lost {what}: a log is missing or ends too early.", fix=RESTORE_FIX
    )


def _number(path: Path, key: bytes) -> int:
    try:
        number, _session = _NUMBER.unpack(key.removeprefix(LOW))
    except struct.error as error:
        raise StateCorruptedError(
            f"the database {path} has a damaged number of a write: {key!r}.", fix=RESTORE_FIX
        ) from error
    return int(number)
