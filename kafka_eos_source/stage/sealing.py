"""Seals rows in a task: encodes and compresses them as the record batches that the driver sends.

The driver only adds the producer's id, epoch and sequence number to a sealed batch. So the executors share the
work of encoding, and the driver does not touch the records.

A task seals the rows of a partition when there are enough of them for a batch of a reasonable size. It stages
the others as rows with their partition, and the driver encodes those of all tasks together. Otherwise 200
tasks that write to 1,000 partitions would make 200,000 tiny batches.
"""

from __future__ import annotations

import random
from collections.abc import Iterator

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from kafka_eos_source.kafka.failure import record_too_large
from kafka_eos_source.kafka.kernel import choice
from kafka_eos_source.kafka.wire.batches import Encoder, SealedBatches, records_of
from kafka_eos_source.kafka.wire.rows import Groups, Rows
from kafka_eos_source.spark.schema import CHANGES, PARTITION, SEALED
from kafka_eos_source.stage.sealing_plan import SealingPlan

#: Rows are encoded when they have this many bytes, so that each partition gets large batches.
_COLLECT_BYTES = 16 << 20
#: Least bytes of a partition's rows that are worth a record batch of their own.
_LEAST_BYTES = 32 << 10
#: Rows that wait for more rows of their partition are staged when they have this many bytes.
_WAITING_BYTES = 32 << 20
#: Rows without a key go to the same partition in stripes of at least this length.
_STRIPE_ROWS = 500
#: Largest value of a binary column, together with all other values.
_COLUMN_BYTES = (1 << 31) - 1


def sealed_schema(schema: pa.Schema) -> pa.Schema:
    """Returns the schema of a part with sealed batches.

    Args:
        schema: columns of the staged rows.
    """
    for name, kind in ((PARTITION, pa.int32()), (SEALED, pa.binary())):
        if name not in schema.names:
            schema = schema.append(pa.field(name, kind))
    return schema


class Sealer:
    """Turns the staged rows of one task into sealed batches, and rows that are too few for one.

    The rows of a partition keep their order.

    Args:
        plan: how to encode.
        schema: columns of the rows, `sealed_schema`.
    """

    def __init__(self, plan: SealingPlan, schema: pa.Schema) -> None:
        self._plan = plan
        self._schema = schema
        self._collected: list[pa.RecordBatch] = []
        self._collected_bytes = 0
        self._waiting_bytes = 0

    def add(self, batch: pa.RecordBatch) -> Iterator[pa.RecordBatch]:
        """Takes rows, and yields Arrow batches to stage.

        Raises:
            InvalidRecordError: if a record is larger than the client or the topic accepts.
        """
        pieces = max(1, batch.nbytes // _COLLECT_BYTES)
        rows = -(-batch.num_rows // pieces)
        for begin in range(0, batch.num_rows, rows):
            piece = self.with_columns(batch.slice(begin, rows))
            self._collected.append(piece)
            self._collected_bytes += piece.nbytes
            if self._collected_bytes >= _COLLECT_BYTES + self._waiting_bytes:
                yield from self._seal(is_last=False)

    def finish(self) -> Iterator[pa.RecordBatch]:
        """Yields what is left to stage."""
        if self._collected_bytes >= _LEAST_BYTES and choice().kernel is not None:
            yield from self._seal(is_last=True)
        else:
            yield from self._collected

    def _seal(self, *, is_last: bool) -> Iterator[pa.RecordBatch]:
        kernel = choice().kernel
        if kernel is None:  # the executor's installation differs from the driver's
            yield from self._collected
            self._collect([])
            return
        table = pa.Table.from_batches(self._collected, self._schema).combine_chunks()
        (batch,) = table.to_batches()
        columns = {name: batch.column(name) for name in self._schema.names if name not in (SEALED, CHANGES)}
        rows = Rows(columns)
        largest = int(rows.sizes.max(initial=0))
        if largest > self._plan.record_bytes:
            raise record_too_large(largest, self._plan.topic)
        count = self._plan.partitions
        rows.place(kernel, count, random.randrange(count), _STRIPE_ROWS)
        groups = rows.by_partition()
        are_enough = groups.sums(rows.sizes) >= _LEAST_BYTES
        encoder = Encoder(kernel, self._plan.compression, self._plan.level)
        sealed = self._fitting(encoder, rows, groups.select(are_enough))
        if sealed.data.nbytes > _COLUMN_BYTES:
            sealed, are_enough = None, np.zeros_like(are_enough)
        if sealed:
            yield self._of(sealed)
        rest = self._rows(batch, rows, groups.select(~are_enough))
        if is_last or rest.nbytes > _WAITING_BYTES:
            if rest.num_rows:
                yield rest
            rest = rest.slice(0, 0)
        self._collect([rest] if rest.num_rows else [])

    def _fitting(self, encoder: Encoder, rows: Rows, groups: Groups) -> SealedBatches:
        """Seals rows as batches that the topic accepts."""
        limit = self._plan.batch_bytes
        while True:
            sealed = encoder.seal(rows, groups, limit)
            too_large = [each for _, each in sealed if len(each) > self._plan.topic_bytes]
            if not too_large:
                return sealed
            if records_of(too_large[0]) == 1:
                raise record_too_large(len(too_large[0]), self._plan.topic)
            limit //= 2

    def _of(self, sealed: SealedBatches) -> pa.RecordBatch:
        """Returns sealed batches as an Arrow batch, without copying them."""
        offsets: npt.NDArray[np.int32] = np.zeros(len(sealed) + 1, np.int32)
        offsets[1:] = sealed.ends
        buffers = [None, pa.py_buffer(offsets), pa.py_buffer(sealed.data)]
        columns = {
            PARTITION: pa.array(sealed.partitions),
            SEALED: pa.Array.from_buffers(pa.binary(), len(sealed), buffers),
        }
        return self._filled(columns, len(sealed))

    def _rows(self, batch: pa.RecordBatch, rows: Rows, groups: Groups) -> pa.RecordBatch:
        """Returns some rows, with the partitions that were chosen for them."""
        if len(groups.order) == 0:
            return batch.slice(0, 0)
        at = batch.schema.get_field_index(PARTITION)
        placed = batch.set_column(at, self._schema.field(PARTITION), pa.array(rows.partitions))
        return placed.take(pa.array(groups.order))

    def with_columns(self, batch: pa.RecordBatch) -> pa.RecordBatch:
        """Returns a batch with all columns of the part; those that it lacks are null."""
        found = {name: batch.column(name) for name in batch.schema.names}
        return self._filled(found, batch.num_rows)

    def _filled(self, found: dict[str, pa.Array], rows: int) -> pa.RecordBatch:
        """Returns columns as a batch of the part; columns that are missing are null."""
        columns = [
            found[field.name] if field.name in found else pa.nulls(rows, field.type) for field in self._schema
        ]
        return pa.RecordBatch.from_arrays(columns, schema=self._schema)

    def _collect(self, batches: list[pa.RecordBatch]) -> None:
        self._collected = batches
        self._collected_bytes = self._waiting_bytes = sum(each.nbytes for each in batches)
