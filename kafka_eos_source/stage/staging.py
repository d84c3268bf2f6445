"""Stages the rows of one task attempt as one part: in its commit message if they are few, else in a file.

Where there are enough rows for a partition, the task *seals* them: it encodes and compresses them as a
record batch. The driver only adds the producer's id, epoch and sequence number before it sends the batch.
So the executors share the work of encoding, and the driver does not touch the records. The other rows are
staged with their partition, and the driver encodes those of all tasks together. Otherwise 200 tasks that
write to 1,000 partitions would make 200,000 tiny batches.

The functions that need a Kafka client import it themselves: a task that stages few rows needs none.
"""

from __future__ import annotations

import logging
import re
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from kafka_eos_source.errors import KafkaEosError
from kafka_eos_source.kafka.kernel import kernel
from kafka_eos_source.model import (
    ReadPart,
    ReadTask,
    ShardPart,
    ShardReport,
    StagedPart,
    TaskFigures,
    TopicPartition,
    TopicRecords,
)
from kafka_eos_source.protocol.packing import BadRecords, packets
from kafka_eos_source.protocol.records import records_of
from kafka_eos_source.runtime import failpoints
from kafka_eos_source.spark.arrow import CHANGES, SEALED
from kafka_eos_source.spark.schema import HEADERS, KEY, PARTITION, TOPIC, VALUE
from kafka_eos_source.stage.files import PartStage, StagingFolder

if TYPE_CHECKING:
    from kafka_eos_source.kafka.batches import Encoder, SealedBatches
    from kafka_eos_source.kafka.kernel import Groups, Rows

_log = logging.getLogger(__name__)

_TRACEPARENT = re.compile(r"[0-9a-f]{2}-[0-9a-f]{32}-[0-9a-f]{16}-[0-9a-f]{2}")

#: Rows are encoded when they have this many bytes, so that each partition gets large batches.
_COLLECT_BYTES = 16 << 20
#: Rows that wait for more rows of their partition are staged when they have this many bytes.
_WAITING_BYTES = 32 << 20
#: Largest binary column.
_COLUMN_BYTES = (1 << 31) - 1
#: A micro-batch does not wait longer for a plan, in ms; its tasks then stage rows.
_WAIT_MS = 3_000


def stage(
    batches: Iterable[pa.RecordBatch],
    schema: pa.Schema,
    *,
    folder: StagingFolder | None,
    batch: str,
    inline_bytes: int,
    run_id: str = "",
    topic: str | None = None,
    sealing: SealingPlan | None = None,
) -> StagedPart:
    """Stages the batches of one task attempt.

    Args:
        batches: batches with the staged columns, from `stage.rows`.
        schema: schema of the staged columns.
        folder: folder for a file; None = the rows always stay in the commit message.
        batch: name of the micro-batch in the folder.
        inline_bytes: maximum size of a part that stays in the commit message.
        run_id: id of this run of the query.
        topic: option ``topic``; None if the rows have a topic.
        sealing: how to encode rows as record batches; None = they are staged as rows.

    Returns:
        The part, for the commit message.

    Raises:
        InvalidRecordError: if ``batches`` raises it for a row, or a record is too large to be sealed.
        StateError: if the column of packets contains anything else.
        UnavailableError: if the folder cannot be written, for example because the disk is full.
        InvalidOptionError: if the folder is not shared with the driver.
    """
    sealer = None
    if sealing is not None:
        schema = sealed_schema(schema)
        sealer = Sealer(sealing, schema)
    part = PartStage(schema, folder, batch, inline_bytes)
    meter = TaskMeter(topic)
    shards: list[ShardPart] | None = [] if CHANGES in schema.names else None
    reads: list[ReadPart] = []
    taken = 0
    try:
        for each in batches:
            if not each.num_rows:
                continue
            taken += each.num_rows
            if shards is not None and each.column(CHANGES).null_count == 0:
                of_shards, of_reads = carried(each)
                shards += of_shards
                reads += of_reads
                with meter.staging():
                    part.write(each if sealer is None else filled(each, schema))
                continue
            meter.add(each)
            with meter.staging():
                for ready in (each,) if sealer is None else sealer.add(each):
                    part.write(ready, records_in(ready))
        with meter.staging():
            for ready in () if sealer is None else sealer.finish():
                part.write(ready, records_in(ready))
        failpoints.reach("stage.before_close")
        with meter.staging():
            staged = part.finish()
        _check_count(staged, taken)
    except BaseException:
        part.discard()
        raise
    failpoints.reach("stage.after_close")
    return replace(
        staged,
        topics=tuple(sorted(meter.highest.items())),
        run_id=run_id,
        shards=None if shards is None else tuple(shards),
        reads=tuple(reads),
        measured=meter.figures(),
        sealed_partitions=0 if sealing is None else sealing.partitions,
    )


def _check_count(staged: StagedPart, taken: int) -> None:
    """Checks that sealing has neither lost nor doubled a row."""
    if staged.rows != taken:
        raise AssertionError(f"the task received {taken} rows, but staged {staged.rows}")


def carried(batch: pa.RecordBatch) -> tuple[list[ShardPart], list[ReadPart]]:
    """Returns what the packets in a staged batch say: by shard and by reading task, and by their attempts."""
    numbers: dict[tuple[TopicPartition, str], list[int]] = {}
    reports: dict[tuple[TopicPartition, str], ShardReport] = {}
    of_reads: dict[tuple[ReadTask, str], list[int]] = {}
    totals: dict[tuple[ReadTask, str], tuple[int, tuple[TopicRecords, ...]]] = {}
    for packet in packets(batch.column(CHANGES)):
        if isinstance(packet, BadRecords):
            attempt = packet.task, packet.task_attempt_id
            of_reads.setdefault(attempt, []).append(packet.number)
            if packet.total is not None:
                totals[attempt] = packet.total, packet.topics
            continue
        numbers.setdefault((packet.tp, packet.task_attempt_id), []).append(packet.number)
        if packet.report is not None:
            reports[packet.tp, packet.task_attempt_id] = packet.report
    shards = [
        ShardPart(tp, task_attempt_id, tuple(found), reports.get((tp, task_attempt_id)))
        for (tp, task_attempt_id), found in numbers.items()
    ]
    reads = [
        ReadPart(task, task_attempt_id, tuple(found), *totals.get((task, task_attempt_id), ()))
        for (task, task_attempt_id), found in of_reads.items()
    ]
    return shards, reads


# -- Figures of a writing task ---------------------------------------------------------------------


class TaskMeter:
    """The figures of one writing task while it runs.

    Attributes:
        highest: each topic with the highest partition that a row names; -1 if no row names one. The commit
            checks these before it begins the transaction.

    Args:
        topic: option ``topic``; None if the rows have a topic.
        clock: returns seconds.
    """

    def __init__(self, topic: str | None, clock: Callable[[], float] = time.perf_counter) -> None:
        self.highest: dict[str, int] = {}
        self._topic = topic
        self._clock = clock
        self._began = clock()
        self._staging = 0.0
        self._topics: dict[str, tuple[int, int]] = {}
        self._traceparent: str | None = None

    @contextmanager
    def staging(self) -> Iterator[None]:
        """Encloses the work of staging or sending rows, as opposed to waiting for them."""
        began = self._clock()
        try:
            yield
        finally:
            self._staging += self._clock() - began

    def add(self, batch: pa.RecordBatch) -> dict[str, int]:
        """Counts the rows of a staged batch.

        Returns:
            Each topic of the batch with the highest partition in its rows; -1 if no row has one.
        """
        if self._traceparent is None and batch.num_rows:
            self._traceparent = _traceparent(batch)
        found = _by_topic(batch, self._topic)
        for name, (partition, records, size) in found.items():
            self.highest[name] = max(partition, self.highest.get(name, partition))
            before = self._topics.get(name, (0, 0))
            self._topics[name] = before[0] + records, before[1] + size
        return {name: partition for name, (partition, _, _) in found.items()}

    def figures(self) -> TaskFigures:
        """Returns the figures of the task up to now."""
        return TaskFigures(
            self._clock() - self._began, self._staging, dict(self._topics), self._traceparent or ""
        )


def _by_topic(batch: pa.RecordBatch, topic: str | None) -> dict[str, tuple[int, int, int]]:
    """Returns the highest partition, the number of rows, and the size of keys and values, per topic."""
    partition = (
        batch.column(PARTITION) if PARTITION in batch.schema.names else pa.nulls(batch.num_rows, pa.int32())
    )
    lengths = [pc.binary_length(batch.column(name)) for name in (KEY, VALUE) if name in batch.schema.names]
    if topic is not None:
        highest = pc.max(partition).as_py()
        size = sum(pc.sum(each).as_py() or 0 for each in lengths)
        return {topic: (-1 if highest is None else highest, batch.num_rows, size)}
    lengths = [pc.fill_null(each, 0) for each in lengths]
    sizes = lengths[0] if len(lengths) == 1 else pc.add(*lengths)
    table = pa.table({TOPIC: batch.column(TOPIC), "partition": pc.fill_null(partition, -1), "size": sizes})
    found = table.group_by(TOPIC).aggregate([("partition", "max"), ("size", "count"), ("size", "sum")])
    columns = (found[name].to_pylist() for name in ("partition_max", "size_count", "size_sum"))
    return dict(zip(found[TOPIC].to_pylist(), zip(*columns, strict=True), strict=True))


def _traceparent(batch: pa.RecordBatch) -> str:
    """Returns the header of the first record that names its trace (W3C Trace Context); "" if it has none."""
    headers = batch.column(HEADERS).slice(0, 1).flatten() if HEADERS in batch.schema.names else None
    if headers is None or not len(headers):
        return ""
    names = headers.field(0).cast(pa.binary()).to_pylist()  # which need not be UTF-8
    for name, value in zip(names, headers.field(1).to_pylist(), strict=True):
        if name == b"traceparent" and value is not None:
            text = value.decode("ascii", "replace")
            return text if _TRACEPARENT.fullmatch(text) else ""
    return ""


# -- Sealed record batches -------------------------------------------------------------------------


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
        partitioner: chooses the partition of a row that has none (`kafka.kernel.PARTITIONERS`).
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
    from kafka_eos_source.kafka.batches import Encoder
    from kafka_eos_source.kafka.kernel import Rows

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
    from kafka_eos_source.kafka.config import producer_config
    from kafka_eos_source.stage.row_rules import topic_settings

    try:
        found = topic_settings(kafka, topic, _WAIT_MS)
        if found.config is None:
            return None
        # a batch must also fit into a segment of the log
        topic_bytes = min(int(found.config["max.message.bytes"]), int(found.config["segment.bytes"]))
    except (KafkaEosError, KeyError, ValueError) as error:  # some Kafka-compatible brokers omit properties
        _log.info("tasks stage rows instead of record batches: %s", error)
        return None
    config = producer_config(kafka)
    compression = str(config.get("compression.type", "none"))
    level = config.get("compression.level")
    return SealingPlan(
        topic,
        found.partitions,
        topic_bytes,
        max(1, min(int(config["batch.size"]), topic_bytes)),
        int(config.get("message.max.bytes", 1_000_000)),
        compression,
        None if level in (None, "-1", -1) else int(str(level)),
        str(config["partitioner"]),
    )
