"""A batch's changes, kept in the database without being applied: the column family ``pending``.

::

    h <batch> <attempt>             JSON: record, base, position, deleted ranges, size
    b <batch> <attempt> 0x00 <n>    Arrow stream of rows: key, value (null = delete)

``batch`` is 8 bytes, big endian, sign flipped; ``attempt`` is text. Whether they are applied or dropped is
the token's to say, when the store is next opened.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Iterable
from dataclasses import asdict, dataclass, replace
from typing import Any

import pyarrow as pa

from kafka_eos_source.errors import StateCorruptedError
from kafka_eos_source.protocol.ipc import to_stream
from kafka_eos_source.state.model import BatchRecord, PendingBatch
from kafka_eos_source.state.store.overlay import Ranges
from kafka_eos_source.state.store.records import Offsets, decode_position, encode_position, record

_BATCH = struct.Struct(">Q")
_NUMBER = struct.Struct(">I")
_HEADER = b"h"
_BLOB = b"b"


@dataclass(frozen=True)
class Header:
    """What is known of a pending batch without reading its rows."""

    batch: PendingBatch
    position: Offsets
    ranges: Ranges
    blobs: int = 0

    @property
    def id(self) -> bytes:
        return key_id(self.batch.record)

    def blob_keys(self) -> list[bytes]:
        return [_BLOB + self.id + b"\x00" + _NUMBER.pack(number) for number in range(self.blobs)]


def key_id(record: BatchRecord) -> bytes:
    return _BATCH.pack(record.batch_id + (1 << 63)) + record.attempt.encode()


def encode(header: Header, changes: Iterable[pa.RecordBatch]) -> list[tuple[bytes, bytes]]:
    """The pairs to put."""
    blobs = [to_stream(rows).to_pybytes() for rows in changes]
    header = replace(header, blobs=len(blobs))
    batch = header.batch
    text = {
        "record": asdict(batch.record),
        "base": None if batch.base is None else asdict(batch.base),
        "size_bytes": batch.size_bytes,
        "position": encode_position(header.position).hex(),
        "ranges": [[low.hex(), None if high is None else high.hex()] for low, high in header.ranges.spans],
        "blobs": header.blobs,
    }
    return [
        (header_key(header.id), json.dumps(text).encode()),
        *zip(header.blob_keys(), blobs, strict=True),
    ]


def headers(pairs: Iterable[tuple[bytes, bytes]]) -> list[Header]:
    """From the pairs of `header_span`."""
    return [_header(value) for _, value in pairs]


def header_span() -> tuple[bytes, bytes]:
    """Where the headers are: start included, end excluded."""
    return _HEADER, bytes([_HEADER[0] + 1])


def header_key(id_: bytes) -> bytes:
    return _HEADER + id_


def decode(blob: bytes | None) -> pa.Table:
    """The rows of one blob.

    Raises:
        StateCorruptedError: it is not readable.
    """
    if blob is None:
        raise StateCorruptedError("pending rows are missing")
    try:
        return pa.ipc.open_stream(blob).read_all()
    except pa.ArrowInvalid as error:
        raise StateCorruptedError(f"pending rows are not readable: {error}") from error


def _header(value: bytes) -> Header:
    try:
        text: dict[str, Any] = json.loads(value)
        base = text["base"]
        spans = tuple(
            (bytes.fromhex(low), None if high is None else bytes.fromhex(high))
            for low, high in text["ranges"]
        )
        return Header(
            PendingBatch(
                record(BatchRecord, text["record"]),
                None if base is None else record(BatchRecord, base),
                text["size_bytes"],
            ),
            decode_position(bytes.fromhex(text["position"])),
            Ranges(spans),
            text["blobs"],
        )
    except (ValueError, TypeError, KeyError) as error:
        raise StateCorruptedError(f"the header of a pending batch is not readable: {error}") from error
