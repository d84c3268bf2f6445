"""The layout of Kafka's record batches, version 2 (KIP-98), as far as Python reads it."""

from __future__ import annotations

#: Bytes before the first record.
HEADER_BYTES = 61

_RECORDS = slice(57, 61)


def records_of(batch: memoryview) -> int:
    """Returns the number of records in a record batch, as its header says."""
    return int.from_bytes(batch[_RECORDS], "big")
