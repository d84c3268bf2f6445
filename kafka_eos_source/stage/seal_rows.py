"""Encodes staged rows as sealed record batches, with the C kernel."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from kafka_eos_source.kafka.failure import record_too_large
from kafka_eos_source.kafka.kernel import kernel
from kafka_eos_source.kafka.wire.batches import Encoder, SealedBatches
from kafka_eos_source.kafka.wire.rows import Groups, Rows
from kafka_eos_source.protocol.record_batch import records_of
from kafka_eos_source.spark.schema import CHANGES, PARTITION, SEALED
from kafka_eos_source.stage.sealed_column import SealingPlan, filled

#: Largest binary column.
_COLUMN_BYTES = (1 << 31) - 1


def seal_rows(
    batches: list[pa.RecordBatch], plan: SealingPlan, schema: pa.Schema
) -> tuple[pa.RecordBatch, pa.RecordBatch] | None:
    """Seals the rows of partitions that have enough of them.

    Args:
        batches: the rows, in order.
        plan: how to encode them.
        schema: of the rows and of the result, `sealing.sealed_schema`.

    Returns:
        The sealed batches, and the other rows with the partitions that were chosen for them. None if the rows
        are too large.

    Raises:
        InvalidRecordError: if a record is larger than the client or the topic accepts.
    """
    if sum(each.nbytes for each in batches) > _COLUMN_BYTES:
        return None
    names = [name for name in schema.names if name not in (SEALED, CHANGES)]
    rows = Rows([{name: each.column(name) for name in names} for each in batches])
    groups = rows.grouped(kernel(), plan.topic, plan.partitions, plan.record_bytes, plan.partitioner)
    is_enough = groups.bytes >= plan.least_bytes
    sealed = _fitting(Encoder(kernel(), plan.compression, plan.level), rows, groups.select(is_enough), plan)
    if sealed.data.nbytes > _COLUMN_BYTES:
        return None
    return _of_sealed(sealed, schema), _rest(batches, schema, rows, groups.select(~is_enough))


def _fitting(encoder: Encoder, rows: Rows, groups: Groups, plan: SealingPlan) -> SealedBatches:
    """Seals rows as batches that the topic accepts."""
    limit = plan.batch_bytes
    while True:
        sealed = encoder.seal(rows, groups, limit)
        too_large = next((each for _, each in sealed if len(each) > plan.topic_bytes), None)
        if too_large is None:
            return sealed
        if records_of(too_large) == 1:
            raise record_too_large(len(too_large), plan.topic)
        limit //= 2


def _of_sealed(sealed: SealedBatches, schema: pa.Schema) -> pa.RecordBatch:
    """Returns sealed batches as rows of a part, without copying them."""
    offsets: npt.NDArray[np.int32] = np.zeros(len(sealed) + 1, np.int32)
    offsets[1:] = sealed.ends
    buffers = [None, pa.py_buffer(offsets), pa.py_buffer(sealed.data)]
    column = pa.Array.from_buffers(pa.binary(), len(sealed), buffers)
    partitions = pa.array(sealed.partitions, pa.int32())
    return filled(pa.RecordBatch.from_arrays([partitions, column], [PARTITION, SEALED]), schema)


def _rest(batches: list[pa.RecordBatch], schema: pa.Schema, rows: Rows, groups: Groups) -> pa.RecordBatch:
    """Returns some rows with their partitions."""
    if not len(groups.order):
        return pa.RecordBatch.from_pylist([], schema)
    (batch,) = pa.Table.from_batches(batches, schema).combine_chunks().to_batches()
    at = batch.schema.get_field_index(PARTITION)
    placed = batch.set_column(at, batch.schema.field(PARTITION), pa.array(rows.partitions))
    return placed.take(pa.array(rows.numbers(groups.order)))
