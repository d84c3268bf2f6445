"""The column of a staged part that holds sealed record batches (`stage.sealing`)."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pyarrow as pa

from kafka_eos_source.spark.schema import PARTITION, SEALED

#: Where the header of a record batch, version 2, has its number of records.
_RECORDS = slice(57, 61)


def is_sealed(batch: pa.RecordBatch) -> bool:
    """Returns whether an Arrow batch of a part contains sealed batches instead of rows."""
    return SEALED in batch.schema.names and batch.column(SEALED).null_count < batch.num_rows


def records_in(batch: pa.RecordBatch) -> int:
    """Returns the number of records in an Arrow batch of a part, which contains rows or sealed batches."""
    if not is_sealed(batch):
        return int(batch.num_rows)
    return sum(int.from_bytes(sealed[_RECORDS], "big") for _, sealed in sealed_batches(batch))


def sealed_batches(batch: pa.RecordBatch) -> Iterator[tuple[int, memoryview]]:
    """Yields the sealed batches in an Arrow batch, each with its partition, without copying them."""
    column = batch.column(SEALED)
    _, offsets, data = column.buffers()
    bounds = np.frombuffer(offsets, np.int32, len(column) + 1, column.offset * 4).tolist()
    view = memoryview(data)
    for index, partition in enumerate(batch.column(PARTITION).to_pylist()):
        yield partition, view[bounds[index] : bounds[index + 1]]
