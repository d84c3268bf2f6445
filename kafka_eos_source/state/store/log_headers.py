"""Checks RocksDB's write-ahead logs for damage at which RocksDB itself would hang.

A log consists of blocks of 32 KiB. Each fragment of a record has a header: checksum (4 bytes), length (2,
little endian) and type (1). Types 5 to 8 belong to logs that are used again, which no store does. If one
changed bit makes such a type of another one, RocksDB (10.4) reads the same header again without end, in
``log::Reader::ReadRecord``, and the thread that opens the database holds Python's global lock meanwhile.
"""

from __future__ import annotations

import struct
from contextlib import suppress
from pathlib import Path

from kafka_eos_source.errors import StateCorruptedError
from kafka_eos_source.state.store.files import RESTORE_FIX

_BLOCK_BYTES = 32 << 10
_HEADER = struct.Struct("<IHB")
#: Fragments of logs that are used again, and two other records in them.
_RECYCLED = frozenset({5, 6, 7, 8, 11, 13})


def check_logs(database: Path) -> None:
    """Checks the types of all fragments. RocksDB checks everything else when it opens the database.

    Args:
        database: folder of the database; it need not exist.

    Raises:
        StateCorruptedError: if a log has a fragment that RocksDB cannot pass.
    """
    for log in sorted(database.glob("*.log")):
        with suppress(FileNotFoundError):  # an owner that has the database open deletes logs
            _check(log)


def _check(log: Path) -> None:
    content, at = log.read_bytes(), 0
    while at + _HEADER.size <= len(content):
        left_in_block = _BLOCK_BYTES - at % _BLOCK_BYTES
        if left_in_block < _HEADER.size:
            at += left_in_block
            continue
        _checksum, length, kind = _HEADER.unpack_from(content, at)
        if kind in _RECYCLED:
            raise StateCorruptedError(
                f"the log {log} is damaged: the record at byte {at} has the type {kind}.", fix=RESTORE_FIX
            )
        if not kind and not length:  # space that RocksDB reserved in advance
            return
        at += _HEADER.size + length
