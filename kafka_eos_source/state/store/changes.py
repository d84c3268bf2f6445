"""Changes of state as Arrow batches: columns ``key`` and ``value``, null = deleted."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from itertools import islice

import pyarrow as pa

#: Of a changelog's records, and of pending changes.
CHANGES = pa.schema([("key", pa.binary()), ("value", pa.binary())])

#: Rows and bytes of one batch.
_CHANGE_ROWS, _CHANGE_BYTES = 65_536, 4 << 20


def key_batches(keys: Iterator[bytes]) -> Iterator[pa.RecordBatch]:
    """Deletes of keys."""
    while some := list(islice(keys, _CHANGE_ROWS)):
        yield from row_batches(dict.fromkeys(some))


def row_batches(rows: Mapping[bytes, bytes | None]) -> Iterator[pa.RecordBatch]:
    return _sized(list(rows), list(rows.values()))


def _sized(keys: list[bytes], values: list[bytes | None]) -> Iterator[pa.RecordBatch]:
    """Halved until small enough."""
    if not keys:
        return
    size = sum(map(len, keys)) + sum(map(len, filter(None, values)))
    if len(keys) > 1 and (len(keys) > _CHANGE_ROWS or size > _CHANGE_BYTES):
        half = len(keys) // 2
        yield from _sized(keys[:half], values[:half])
        yield from _sized(keys[half:], values[half:])
    else:
        columns = [pa.array(keys, pa.binary()), pa.array(values, pa.binary())]
        yield pa.record_batch(columns, schema=CHANGES)
