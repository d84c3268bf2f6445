"""Collects the rows of a task, and stages them as sealed record batches where there are enough.

A sealed batch is encoded and compressed. The driver only adds the producer's id, epoch and sequence number to
it before it sends it. So the executors share the work of encoding, and the driver does not touch the records.

A task seals the rows of a partition when there are enough of them for a batch of a reasonable size. It stages
the others as rows with their partition, and the driver encodes those of all tasks together. Otherwise 200
tasks that write to 1,000 partitions would make 200,000 tiny batches.
"""

from __future__ import annotations

from collections.abc import Iterator

import pyarrow as pa

from kafka_eos_source.stage.sealed_column import SealingPlan, filled

#: Rows are encoded when they have this many bytes, so that each partition gets large batches.
_COLLECT_BYTES = 16 << 20
#: Rows that wait for more rows of their partition are staged when they have this many bytes.
_WAITING_BYTES = 32 << 20


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
        self._enough_bytes = _COLLECT_BYTES

    def add(self, batch: pa.RecordBatch) -> Iterator[pa.RecordBatch]:
        """Takes rows, and yields Arrow batches to stage.

        Raises:
            InvalidRecordError: if a record is larger than the client or the topic accepts.
        """
        pieces = max(1, batch.nbytes // _COLLECT_BYTES)
        rows = -(-batch.num_rows // pieces)
        for begin in range(0, batch.num_rows, rows):
            piece = filled(batch.slice(begin, rows), self._schema)
            self._collected.append(piece)
            self._collected_bytes += piece.nbytes
            if self._collected_bytes >= self._enough_bytes:
                yield from self._seal(is_last=False)

    def finish(self) -> Iterator[pa.RecordBatch]:
        """Yields what is left to stage."""
        if self._collected_bytes >= self._plan.least_bytes:
            yield from self._seal(is_last=True)
        else:
            yield from self._collected

    def _seal(self, *, is_last: bool) -> Iterator[pa.RecordBatch]:
        from kafka_eos_source.stage.seal_rows import seal_rows  # loads a Kafka client

        collected, self._collected, self._collected_bytes = self._collected, [], 0
        found = seal_rows(collected, self._plan, self._schema)
        if found is None:
            yield from collected
            return
        sealed, rest = found
        if sealed.num_rows:
            yield sealed
        waits = rest.num_rows and not is_last and rest.nbytes <= _WAITING_BYTES
        if rest.num_rows and not waits:
            yield rest
        if waits:
            self._collected, self._collected_bytes = [rest], rest.nbytes
        self._enough_bytes = self._collected_bytes + _COLLECT_BYTES
