"""Stages rows as sealed record batches where there are enough of them.

A sealed batch is encoded and compressed. The driver only adds the producer's id, epoch and sequence number to
it before it sends it. So the executors share the work of encoding, and the driver does not touch the records.

A task seals the rows of a partition when there are enough of them for a batch of a reasonable size. It stages
the others as rows with their partition, and the driver encodes those of all tasks together. Otherwise 200
tasks that write to 1,000 partitions would make 200,000 tiny batches.

The functions that need a Kafka client import it themselves: a task that stages few rows needs none.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from kafka_eos_source.errors import KafkaEosError
from kafka_eos_source.kafka.kernel import kernel
from kafka_eos_source.protocol.record_batch import records_of
from kafka_eos_source.runtime.deadline import Deadline
from kafka_eos_source.spark.arrow import CHANGES, SEALED
from kafka_eos_source.spark.schema import PARTITION

if TYPE_CHECKING:
    from kafka_eos_source.kafka.wire.batches import Encoder, SealedBatches
    from kafka_eos_source.kafka.wire.rows import Groups, Rows

#: Rows are encoded when they have this many bytes, so that each partition gets large batches.
_COLLECT_BYTES = 16 << 20
#: Rows that wait for more rows of their partition are staged when they have this many bytes.
_WAITING_BYTES = 32 << 20
#: Largest binary column.
_COLUMN_BYTES = (1 << 31) - 1
_log = logging.getLogger(__name__)
#: Plans are made again after this time, in seconds: topics grow.
_VALID_SECONDS = 60.0
#: A micro-batch does not wait longer for a plan, in ms; its tasks then stage rows.
_WAIT_MS = 3_000
_known: dict[str, tuple[float, SealingPlan | None]] = {}


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


def seal_rows(
    batches: list[pa.RecordBatch], plan: SealingPlan, schema: pa.Schema
) -> tuple[pa.RecordBatch, pa.RecordBatch] | None:
    """Seals the rows of partitions that have enough of them.

    Args:
        batches: the rows, in order.
        plan: how to encode them.
        schema: of the rows and of the result, `sealed_schema`.

    Returns:
        The sealed batches, and the other rows with the partitions that were chosen for them. None if the rows
        are too large.

    Raises:
        InvalidRecordError: if a record is larger than the client or the topic accepts.
    """
    from kafka_eos_source.kafka.wire.batches import Encoder
    from kafka_eos_source.kafka.wire.rows import Rows

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
    from kafka_eos_source.kafka.failure import record_too_large

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


def sealing_plan(kafka: Mapping[str, str], topic: str | None) -> SealingPlan | None:
    """Returns how the tasks of a micro-batch encode their rows; None if they stage rows.

    They stage rows if each row names its topic, or if the cluster does not say now what the topic accepts.
    The commit reports what is wrong with the topic.

    Args:
        kafka: librdkafka properties of the write.
        topic: option ``topic``; None = each row names its topic.
    """
    if topic is None:
        return None
    key = repr((topic, sorted(kafka.items())))
    at, known = _known.get(key, (0.0, None))
    if key not in _known or time.monotonic() - at > _VALID_SECONDS:
        known = _ask(kafka, topic)
        _known[key] = time.monotonic(), known
    return known


def _ask(kafka: Mapping[str, str], topic: str) -> SealingPlan | None:
    from kafka_eos_source.kafka.config import producer_config
    from kafka_eos_source.kafka.topic_admin import TopicAdmin

    deadline = Deadline.after_ms(_WAIT_MS)
    try:
        with TopicAdmin(kafka) as admin:
            shape = admin.shape(topic, deadline)
            if shape is None:
                return None
            limits = admin.config(topic, deadline)
            # a batch must also fit into a segment of the log
            topic_bytes = min(int(limits["max.message.bytes"]), int(limits["segment.bytes"]))
    except (KafkaEosError, KeyError, ValueError) as error:  # some Kafka-compatible brokers omit properties
        _log.info("tasks stage rows instead of record batches: %s", error)
        return None
    config = producer_config(kafka)
    compression = str(config.get("compression.type", "none"))
    level = config.get("compression.level")
    return SealingPlan(
        topic,
        shape.partitions,
        topic_bytes,
        max(1, min(int(config["batch.size"]), topic_bytes)),
        int(config.get("message.max.bytes", 1_000_000)),
        compression,
        None if level in (None, "-1", -1) else int(str(level)),
        str(config["partitioner"]),
    )
