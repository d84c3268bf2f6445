"""Sealed record batches in staged parts: how tasks make them (`stage.sealing`), and their column."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import pyarrow as pa

from kafka_eos_source.protocol.record_batch import records_of
from kafka_eos_source.spark.schema import PARTITION, SEALED


@dataclass(frozen=True)
class SealingPlan:
    """How tasks encode the rows of one topic as record batches.

    Attributes:
        topic: name of the topic.
        partitions: number of its partitions.
        topic_bytes: largest record batch that it accepts (``max.message.bytes`` and ``segment.bytes``).
        batch_bytes: largest record batch to make, before compression.
        record_bytes: largest record, without compression (``message.max.bytes`` of the client).
        compression: ``none``, ``gzip``, ``snappy``, ``lz4`` or ``zstd``.
        level: level of the compression; None = the codec's default.
        partitioner: chooses the partition of a row that has none (`kafka.wire.rows.PARTITIONERS`).
        least_bytes: least bytes of a partition's rows that are worth a record batch of their own.
    """

    topic: str
    partitions: int
    topic_bytes: int
    batch_bytes: int
    record_bytes: int
    compression: str = "none"
    level: int | None = None
    partitioner: str = "murmur2_random"
    least_bytes: int = 32 << 10


def sealed_schema(schema: pa.Schema) -> pa.Schema:
    """Returns the schema of a part with sealed batches.

    Args:
        schema: columns of the staged rows.
    """
    for name, kind in ((PARTITION, pa.int32()), (SEALED, pa.binary())):
        if name not in schema.names:
            schema = schema.append(pa.field(name, kind))
    return schema


def is_sealed(batch: pa.RecordBatch) -> bool:
    """Returns whether an Arrow batch of a part contains sealed batches instead of rows."""
    return SEALED in batch.schema.names and batch.column(SEALED).null_count < batch.num_rows


def records_in(batch: pa.RecordBatch) -> int:
    """Returns the number of records in an Arrow batch of a part, which contains rows or sealed batches."""
    if not is_sealed(batch):
        return int(batch.num_rows)
    return sum(records_of(sealed) for _, sealed in sealed_batches(batch))


def sealed_batches(batch: pa.RecordBatch) -> Iterator[tuple[int, memoryview]]:
    """Yields the sealed batches in an Arrow batch, each with its partition, without copying them."""
    column = batch.column(SEALED)
    _, offsets, data = column.buffers()
    bounds = np.frombuffer(offsets, np.int32, len(column) + 1, column.offset * 4).tolist()
    view = memoryview(data)
    for index, partition in enumerate(batch.column(PARTITION).to_pylist()):
        yield partition, view[bounds[index] : bounds[index + 1]]


def filled(batch: pa.RecordBatch, schema: pa.Schema) -> pa.RecordBatch:
    """Returns a batch with all columns of a schema; those that it lacks are null."""
    columns = [
        batch.column(field.name) if field.name in batch.schema.names else pa.nulls(batch.num_rows, field.type)
        for field in schema
    ]
    return pa.RecordBatch.from_arrays(columns, schema=schema)
