"""The pending batches of a database: put, found, read and dropped. `pending` says how they are written."""

from __future__ import annotations

from collections.abc import Iterable

import pyarrow as pa

from kafka_eos_source.state.store import pending
from kafka_eos_source.state.store.database import Database, Writes
from kafka_eos_source.state.store.pending import Header

_FAMILY = "pending"


def headers(database: Database) -> list[Header]:
    """Of all attempts that are kept, by batch."""
    return pending.headers(database.scan(*pending.header_span(), family=_FAMILY))


def rows(database: Database, header: Header) -> dict[bytes, bytes | None]:
    """What the attempt changes; None deletes.

    Raises:
        StateCorruptedError: it is not readable.
    """
    found: dict[bytes, bytes | None] = {}
    for key in header.blob_keys():
        table = pending.decode(database.read(_FAMILY, key))
        found.update(zip(table["key"].to_pylist(), table["value"].to_pylist(), strict=True))
    return found


def keep(writes: Writes, header: Header, changes: Iterable[pa.RecordBatch]) -> None:
    """Puts an attempt and what it changes."""
    for key, value in pending.encode(header, changes):
        writes.put(_FAMILY, key, value)


def drop(writes: Writes, header: Header) -> None:
    """Deletes an attempt."""
    writes.delete(_FAMILY, pending.header_key(header.id))
    for key in header.blob_keys():
        writes.delete(_FAMILY, key)
