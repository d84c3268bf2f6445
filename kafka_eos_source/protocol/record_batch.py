"""The layout of Kafka's record batches, version 2 (KIP-98), as far as Python reads it."""

from __future__ import annotations

#: Bytes before the first record.
HEADER_BYTES = 61
#: The option of a source that becomes a property of its consumers: the most memory that the records of one
#: compressed batch may need. Beyond the largest value, the offsets of Arrow's columns could become too small.
#: Brokers accept batches of 1 MiB unless they are set up for more, and data rarely compresses to a fiftieth.
MOST_DECOMPRESSED = "max.decompressed.batch.bytes"
MOST_DECOMPRESSED_BYTES, LARGEST_MOST_DECOMPRESSED_BYTES = 256 << 20, 1 << 30

_RECORDS = slice(57, 61)


def records_of(batch: memoryview) -> int:
    """Returns the number of records in a record batch, as its header says."""
    return int.from_bytes(batch[_RECORDS], "big")
