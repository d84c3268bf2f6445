"""Pending changes of task attempts, kept on disk until the commit token decides.

They are in the column family ``pending`` of the store's database::

    h <batch> <attempt>             header, JSON: batch record, base, deleted ranges, size
    b <batch> <attempt> 0x00 <n>    n-th Arrow stream of rows with the columns key and value (null = delete)

The rows of a large attempt are in a folder of their own (`spill`), which its header names in place of the
number of Arrow streams.

``batch`` is the batch id in 8 bytes, big endian, with the sign bit flipped; ``attempt`` is text. When the
store is next opened, the token says whether the changes are applied or dropped.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pyarrow as pa

from kafka_eos_source.errors import InvalidRecordError, StateCorruptedError
from kafka_eos_source.protocol.packing import pack_stream, unpack_stream
from kafka_eos_source.runtime.json_input import SHAPE_ERRORS, parse_json
from kafka_eos_source.state.model import BatchRecord, PendingBatch
from kafka_eos_source.state.store.config import StoreConfig
from kafka_eos_source.state.store.database import Database
from kafka_eos_source.state.store.overlay import Overlay, Ranges
from kafka_eos_source.state.store.records import (
    RESTORE_FIX,
    batch_fields,
    record,
)
from kafka_eos_source.state.store.rocksdb import WriteBatch
from kafka_eos_source.state.store.spill import SpilledRows

_FAMILY = "pending"
_BATCH = struct.Struct(">Q")
_NUMBER = struct.Struct(">I")
_HEADER = b"h"
_BLOB = b"b"


@dataclass(frozen=True)
class PendingHeader:
    """What is known about a pending attempt without reading its rows.

    Attributes:
        batch: the attempt and the state that it was computed on.
        ranges: key ranges that the changes delete, before any row is written.
        blobs: number of Arrow streams with rows.
        spill_id: name of the rows on disk; "" = they are in Arrow streams.
    """

    batch: PendingBatch
    ranges: Ranges
    blobs: int = 0
    spill_id: str = ""

    @property
    def id(self) -> bytes:
        batch = self.batch.record
        return _BATCH.pack(batch.batch_id + (1 << 63)) + batch.task_attempt_id.encode()

    def blob_keys(self) -> list[bytes]:
        """Returns the keys of the Arrow streams."""
        return [_BLOB + self.id + b"\x00" + _NUMBER.pack(number) for number in range(self.blobs)]


def read_headers(database: Database) -> list[PendingHeader]:
    """Returns the headers of all pending attempts, in the order of batches.

    Raises:
        StateCorruptedError: if a header cannot be decoded.
    """
    low, high = _HEADER, bytes([_HEADER[0] + 1])
    return [decode_header(value) for _, value in database.scan(low, high, family=_FAMILY)]


def read_rows(database: Database, header: PendingHeader) -> dict[bytes, bytes | None]:
    """Returns the rows that an attempt writes; None deletes the key.

    Raises:
        StateCorruptedError: if rows are missing or cannot be decoded.
    """
    rows: dict[bytes, bytes | None] = {}
    for key in header.blob_keys():
        table = decode_rows(database.get_from(_FAMILY, key))
        rows.update(zip(table["key"].to_pylist(), table["value"].to_pylist(), strict=True))
    return rows


@contextmanager
def read_overlay(
    database: Database,
    header: PendingHeader,
    store: Path,
    config: StoreConfig,
    log_folder: Path | None = None,
) -> Iterator[Overlay]:
    """Gives the changes of an attempt as they were staged.

    Args:
        database: database of the store.
        header: the attempt.
        store: folder of the store.
        config: of the store.
        log_folder: folder for RocksDB's own log files, for a reader of another process.

    Raises:
        StateCorruptedError: if rows are missing or cannot be decoded.
    """
    overlay = Overlay()
    overlay.ranges = header.ranges
    if not header.spill_id:
        rows = read_rows(database, header)
        overlay.put_many(list(rows), list(rows.values()))
        yield overlay
        return
    spilled = SpilledRows.open(store, header.spill_id, config, log_folder)
    try:
        overlay.spilled = spilled
        yield overlay
    finally:
        spilled.close()


def add_attempt(writes: WriteBatch, header: PendingHeader, changes: Iterable[pa.RecordBatch]) -> None:
    """Adds an attempt and its rows to a write."""
    for key, value in encode(header, changes):
        writes.put(_FAMILY, key, value)


def remove_attempt(writes: WriteBatch, header: PendingHeader) -> None:
    """Adds the removal of an attempt to a write."""
    writes.delete(_FAMILY, _HEADER + header.id)
    for key in header.blob_keys():
        writes.delete(_FAMILY, key)


def encode(header: PendingHeader, changes: Iterable[pa.RecordBatch]) -> list[tuple[bytes, bytes]]:
    """Returns the pairs that hold an attempt: the header first, then its rows."""
    blobs = [pack_stream(rows).to_pybytes() for rows in changes]
    header = replace(header, blobs=len(blobs))
    batch = header.batch
    text = {
        "record": batch_fields(batch.record),
        "base": None if batch.base is None else batch_fields(batch.base),
        "size_bytes": batch.size_bytes,
        "ranges": [[low.hex(), None if high is None else high.hex()] for low, high in header.ranges.spans],
        **({"spill": header.spill_id} if header.spill_id else {"blobs": header.blobs}),
    }
    return [
        (_HEADER + header.id, json.dumps(text).encode()),
        *zip(header.blob_keys(), blobs, strict=True),
    ]


def decode_header(value: bytes) -> PendingHeader:
    """Returns the header that `encode` encoded.

    Raises:
        StateCorruptedError: if it cannot be decoded.
    """
    try:
        text: dict[str, Any] = parse_json(value)
        base = text["base"]
        spans = tuple(
            (bytes.fromhex(low), None if high is None else bytes.fromhex(high))
            for low, high in text["ranges"]
        )
        return PendingHeader(
            PendingBatch(
                record(BatchRecord, text["record"]),
                None if base is None else record(BatchRecord, base),
                text["size_bytes"],
            ),
            Ranges(spans),
            0 if "spill" in text else text["blobs"],
            text.get("spill", ""),
        )
    except SHAPE_ERRORS as error:
        raise StateCorruptedError(
            f"the header of a pending batch cannot be decoded: {error!r}.", fix=RESTORE_FIX
        ) from error


def decode_rows(blob: bytes | None) -> pa.Table:
    """Returns the rows of one Arrow stream.

    Raises:
        StateCorruptedError: if it is missing or cannot be decoded.
    """
    if blob is None:
        raise StateCorruptedError("rows of a pending batch are missing.", fix=RESTORE_FIX)
    try:
        return pa.Table.from_batches(unpack_stream(blob, "the column family 'pending'"))
    except (InvalidRecordError, pa.ArrowInvalid) as error:
        raise StateCorruptedError(
            f"rows of a pending batch cannot be decoded: {error}.", fix=RESTORE_FIX
        ) from error
