"""The column of a staged part that holds sealed record batches (`stage.sealing`)."""

from __future__ import annotations

import pyarrow as pa

from kafka_eos_source.spark.schema import SEALED

#: Where the header of a record batch, version 2, has its number of records.
_RECORDS = slice(57, 61)


def is_sealed(batch: pa.RecordBatch) -> bool:
    """Returns whether an Arrow batch of a part contains sealed batches instead of rows."""
    return SEALED in batch.schema.names and batch.column(SEALED).null_count < batch.num_rows


def records_in(batch: pa.RecordBatch) -> int:
    """Returns the number of records in an Arrow batch of a part, which contains rows or sealed batches."""
    if not is_sealed(batch):
        return int(batch.num_rows)
    return sum(int.from_bytes(memoryview(each.as_buffer())[_RECORDS], "big") for each in batch.column(SEALED))
