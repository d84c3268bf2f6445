"""Runs a stateful operator in Spark's tasks: on one shard after a shuffle, or on shards that a task reads."""

from __future__ import annotations

import logging
import time
import uuid
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from itertools import chain

import pyarrow as pa
import pyarrow.compute as pc

from kafka_eos_source.errors import StateError, StateMismatchError
from kafka_eos_source.kafka.reader import ChangelogReader
from kafka_eos_source.model import OTHER_INPUT, ShardReport, TopicPartition
from kafka_eos_source.protocol import packing
from kafka_eos_source.protocol.packing import CHANGELOG, pack_packets, split_packets
from kafka_eos_source.runtime import failpoints
from kafka_eos_source.runtime.deadline import Deadline
from kafka_eos_source.spark.packet_senders import record_sender
from kafka_eos_source.spark.worker import StreamingTask, release_unused_memory, running_task, task_begins
from kafka_eos_source.state.changelog.topic import ChangelogTopic, changelog_client, changelog_name, ensure
from kafka_eos_source.state.model import BatchContext, ShardProcessor, ShardsBy, StoreIdentity
from kafka_eos_source.state.operator.shard import RequestedBatch, ShardTask, open_shard
from kafka_eos_source.state.options import StateOptions
from kafka_eos_source.state.shard_rows import BATCH_TIME, PACKED_BATCH, SHARD, unpack
from kafka_eos_source.state.store.transactional import StateHandle

_log = logging.getLogger(__name__)

#: Shards of which this process has reported late rows.
_with_late_rows: set[TopicPartition] = set()

#: After a task with this many changes, its worker returns freed memory to the operating system.
_MANY_CHANGES = 1 << 18
#: Changelog topics that this process has checked, each with the run of the query in which it did, and when,
#: on the monotonic clock. A Python worker outlives a run, and between two runs the topic may be recreated
#: with as many partitions.
_changelogs: dict[tuple[str, str, int], tuple[str, float, ChangelogTopic]] = {}
#: A run of a query may take months, and somebody may lower ``delete.retention.ms`` meanwhile, which says how
#: old a database may be.
_CHECKED_AGAIN_SECONDS = 600.0


@dataclass(frozen=True)
class Operator:
    """A stateful operator of a query.

    After a shuffle, the driver creates and pickles it, and each task calls it once. In the read, the task
    creates one for each of its shards (`operator.in_read`).

    Attributes:
        processor: processes the rows and the state of a shard.
        store: name of the store within the query.
        shards: number of shards.
        options: the checked options.
        packed_schema: schema of the rows in packed batches (`state.shard_rows`); None if the input
            consists of ordinary rows.
        shards_by: what decides the shard of a key.
    """

    processor: ShardProcessor
    store: str
    shards: int
    options: StateOptions
    packed_schema: pa.Schema | None = None
    shards_by: ShardsBy = ShardsBy.HASH

    @cached_property
    def output(self) -> pa.Schema:
        """Schema of the result: the processor's columns, all nullable, and the column `CHANGELOG`."""
        fields = [field.with_nullable(True) for field in self.processor.output]
        return pa.schema([*fields, pa.field(CHANGELOG, pa.binary())])

    def __call__(self, batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        """Runs the shard of this Spark task, whose rows a shuffle has brought together.

        Returns:
            Batches of the output rows, then the packets of operators before this one and of this shard.

        Raises:
            StateError: if the rows belong to another shard than the task, or there is no streaming query; or
                as `open_shard`.
        """
        task_begins()
        running = _streaming_task()
        if running.partition >= self.shards:
            raise _misplaced(running.partition, self.shards)
        self._record(running)
        packets = packing.WaitingPackets()

        def rows(context: BatchContext | None) -> Iterator[pa.RecordBatch]:
            return self._rows(batches, running.partition, packets, context)

        return self._run(self._shard_task(running, running.partition), rows, packets)

    def in_read(
        self,
        shard: int,
        rows: Iterator[pa.RecordBatch],
        packets: packing.WaitingPackets | None = None,
        finish: Callable[[], None] = lambda: None,
    ) -> Iterator[pa.RecordBatch]:
        """Runs a shard in the task that reads its rows; returns the output rows, then the packets.

        Args:
            shard: number of the shard.
            rows: all rows of the shard in this micro-batch.
            packets: packets of the read, which ``rows`` appends; None if it sends none.
            finish: completes the packets if not all of ``rows`` was read.

        Raises:
            StateError: if there is no streaming query; or as `open_shard`.
        """
        running = _streaming_task()
        self._record(running)

        def unless_skipped(context: BatchContext | None) -> Iterator[pa.RecordBatch]:
            return iter(()) if context is None else _RowsInRead(rows)

        return self._run(
            self._shard_task(running, shard), unless_skipped, packets or packing.WaitingPackets(), finish
        )

    def _run(
        self,
        task: ShardTask,
        rows_of: Callable[[BatchContext | None], Iterator[pa.RecordBatch]],
        packets_before: packing.WaitingPackets,
        finish: Callable[[], None] = lambda: None,
    ) -> Iterator[pa.RecordBatch]:
        """Processes all rows of a shard.

        Args:
            task: the shard.
            rows_of: yields the rows, given the context of the batch; None = Kafka already holds the batch.
            packets_before: packets of the steps before this one, which ``rows_of`` appends.
            finish: completes them if not all rows were taken.
        """
        with open_shard(task) as shard:
            if isinstance(shard, ShardReport):
                for _ in rows_of(None):  # a replay must detect a wrong partitioning too
                    continue
                finish()
                yield from self._packets(packets_before, shard, ())
                return
            rows = rows_of(shard.context)
            changes: Iterable[pa.RecordBatch] = ()
            try:
                for output in self.processor.process(rows, StateHandle(shard.store), shard.context):
                    yield self._with_packet(output)
            except Exception as error:
                if not shard.may_be_in_kafka() or (isinstance(rows, _RowsInRead) and error is rows.error):
                    raise
                _log.warning("shard %s failed on a batch that Kafka may hold: %s", task.tp, error)
                report = shard.failure_report(f"{type(error).__name__}: {error}")
                for _ in rows:  # the packets behind the row that failed
                    continue
            else:
                failpoints.reach("state.after_process")
                _warn_of_future_rows(task, shard.context)
                _warn_of_late_rows(task, shard.context)
                report, changes = shard.persist_pending()
            finish()
            number = yield from self._packets(packets_before, report, changes)
        failpoints.reach("state.after_emit")
        if number >= _MANY_CHANGES:
            changes = ()  # what is still referenced cannot be returned
            release_unused_memory()

    def _packets(
        self, before: packing.WaitingPackets, report: ShardReport, changes: Iterable[pa.RecordBatch]
    ) -> Generator[pa.RecordBatch, None, int]:
        """Yields the packets of the operators before this one, then its own, in batches of `output`.

        Returns:
            The number of changes. ``report`` does not have it: only its packed form does.
        """
        number = 0

        def counted() -> Iterator[pa.RecordBatch]:
            nonlocal number
            for each in changes:
                number += each.num_rows
                yield each

        own = (packing.column([packet]) for packet in pack_packets(report, counted()))
        for packets in chain(before.taken(), own):
            *fields, _ = self.output
            nulls = [pa.nulls(len(packets), field.type) for field in fields]
            yield pa.RecordBatch.from_arrays([*nulls, packets], schema=self.output)
        return number

    def _with_packet(self, output: pa.RecordBatch) -> pa.RecordBatch:
        *fields, _ = self.output
        columns = [output.column(field.name).cast(field.type) for field in fields]
        packets = pa.nulls(output.num_rows, pa.binary())
        return pa.RecordBatch.from_arrays([*columns, packets], schema=self.output)

    def _record(self, running: StreamingTask) -> None:
        """Records on this host that the operator runs."""
        record_sender(running, changelog_name(self.options.application(running.query_id), self.store))

    def _shard_task(self, running: StreamingTask, shard: int) -> ShardTask:
        """Returns what this Spark task does for a shard."""
        changelog = self._changelog(running)
        return ShardTask(
            requested=RequestedBatch(running.query_id, int(running.batch_id)),
            run_id=running.run_id,
            task_attempt_id=uuid.uuid4().hex,
            identity=StoreIdentity(
                application_id=self.options.application(running.query_id),
                store=self.store,
                shard=shard,
                shards=self.shards,
                changelog_topic=changelog.name,
                topic_id=changelog.topic_id,
                cluster_id=changelog.cluster_id,
            ),
            changelog=changelog,
            options=self.options,
            shards_by=self.shards_by,
        )

    def _rows(
        self,
        batches: Iterable[pa.RecordBatch],
        shard: int,
        packets: packing.WaitingPackets,
        context: BatchContext | None,
    ) -> Iterator[pa.RecordBatch]:
        """Yields the shard's rows without the operator's columns, and appends their packets to ``packets``.

        Spark's time of the micro-batch, if the rows carry it, sets the limit of event times in ``context``.
        A batch that Spark runs again has the same time, and so has every task of the batch.

        Raises:
            StateError: if a row belongs to another shard. Spark may merge or shift partitions (for a union
                between operator and sink, or in adaptive execution), and a key would then be processed with
                the state of another shard.
        """
        for batch in batches:
            if not batch.num_rows:
                continue
            lowest_and_highest = pc.min_max(batch.column(SHARD)).as_py()
            if lowest_and_highest != {"min": shard, "max": shard}:
                raise _misplaced(shard, None)
            if BATCH_TIME in batch.schema.names:
                if context is not None:
                    batch_ms = int(batch.column(BATCH_TIME).cast(pa.int64())[0].as_py()) // 1000
                    context.event_time_limit_ms = batch_ms + self.options.event_time_max_ahead_ms
                batch = batch.drop_columns([BATCH_TIME])
            rows, packets_in_batch = split_packets(batch)
            packets.append(packets_in_batch)
            if self.packed_schema is not None:
                yield from unpack(rows.column(PACKED_BATCH), self.packed_schema)
            elif rows.num_rows:
                yield rows.drop_columns([SHARD])

    def _changelog(self, running: StreamingTask) -> ChangelogTopic:
        """Returns the changelog topic. Each process checks it in each run, and again every ten minutes.

        If the topic is recreated during a run, the sink detects it.
        """
        name = changelog_name(self.options.application(running.query_id), self.store)
        key = (self.options.kafka.get("bootstrap.servers", ""), name, self.shards)
        run_id, checked_at, changelog = _changelogs.get(key, ("", 0.0, None))
        now = time.monotonic()
        if changelog is None or run_id != running.run_id or now - checked_at >= _CHECKED_AGAIN_SECONDS:
            changelog = ensure_changelog(self.options, name, self.shards, self.shards_by)
            _changelogs[key] = (running.run_id, now, changelog)
        return changelog


class _RowsInRead(Iterator[pa.RecordBatch]):
    """Rows that the task reads from Kafka while the processor takes them.

    Attributes:
        error: error of the read, which is no failure of the processor; None if there was none.
    """

    def __init__(self, rows: Iterator[pa.RecordBatch]) -> None:
        self.error: Exception | None = None
        self._rows = rows

    def __next__(self) -> pa.RecordBatch:
        try:
            return next(self._rows)
        except StopIteration:
            raise
        except Exception as error:
            self.error = error
            raise


def _streaming_task() -> StreamingTask:
    """Returns the running task of a streaming query.

    Raises:
        StateError: if this process runs none.
    """
    running = running_task()
    if running is None:
        raise StateError("a stateful operator was called outside a Spark task.")
    if not running.query_id or not running.batch_id:
        raise StateError(
            "a stateful operator ran outside a streaming query: no micro-batch can commit its state.",
            fix="use it on a streaming DataFrame, and start it with writeStream.format('kafka-eos').",
        )
    return running


def ensure_changelog(
    options: StateOptions, name: str, shards: int, shards_by: ShardsBy = ShardsBy.HASH
) -> ChangelogTopic:
    """Creates the changelog topic, or checks the existing one. Raises: as `changelog.topic.ensure`."""
    try:
        return ensure(
            options.kafka,
            name,
            shards,
            replication_factor=options.replication_factor,
            min_insync=options.min_insync_replicas,
            delete_retention_ms=options.delete_retention_ms,
            deadline=Deadline.after_ms(options.timeout_ms),
        )
    except StateMismatchError as error:
        if shards_by is ShardsBy.HASH:
            raise
        raise StateMismatchError(
            f"{error.message} The operator has shards='partitions', so the input topic has {shards} "
            "partitions. If it had another number before, keys may now be in other partitions than their "
            "state.",
            fix=OTHER_INPUT,
        ) from error


def _warn_of_future_rows(task: ShardTask, context: BatchContext) -> None:
    rows = context.metrics.get("future_rows")
    if rows:
        _log.warning(
            "shard %s, batch %d: the watermark ignores %d rows whose event time is more than "
            "state.event.time.max.ahead=%d ms ahead of the batch",
            task.tp,
            context.batch_id,
            rows,
            task.options.event_time_max_ahead_ms,
        )


def _warn_of_late_rows(task: ShardTask, context: BatchContext) -> None:
    """Logs a warning if the batch dropped late rows, at the first such batch of each shard in a process."""
    rows = context.metrics.get("late_rows")
    if rows and task.tp not in _with_late_rows:
        _with_late_rows.add(task.tp)
        _log.warning(
            "shard %s, batch %d: %d rows were late and were dropped, because the operator had passed their "
            "time; a longer grace= accepts them. This process reports the shard only once; the metric "
            "late_rows counts all.",
            task.tp,
            context.batch_id,
            rows,
        )


def _misplaced(task: int, shards: int | None) -> StateError:
    return StateError(
        f"task {task} of a stateful operator received rows that do not belong to shard {task}"
        + ("." if shards is None else f": there are {shards} shards."),
        fix="apply union() to the frame that the operator returned, and do not use coalesce(); if the "
        "session enables adaptive execution for streams (spark.sql.adaptive.streaming.stateless.enabled), "
        "remove that setting.",
    )


# -- initial state (`frame.publish`)

#: Approximate size of a record, which holds many rows; the default limit of brokers is 1 MiB.
_RECORD_BYTES = 256 << 10
#: Fix if the topic was deleted too early.
_IF_GONE = (
    "start the query with a new application.id and a new checkpoint; keep the topic until the first batch is "
    "committed."
)


@dataclass(frozen=True)
class InitialTopic:
    """Reads the rows of a shard's initial state in its first batch. Picklable.

    Attributes:
        kafka: librdkafka properties; not printed, because they may contain passwords.
        topic: the topic that `publish` wrote.
        timeout_ms: how long reading may take.
    """

    kafka: Mapping[str, str] = field(repr=False)
    topic: str
    timeout_ms: int

    def __call__(self, context: BatchContext) -> Iterator[pa.RecordBatch]:
        """Yields the rows of the shard's initial state.

        Raises:
            UnavailableError: if the topic is gone, or Kafka does not answer in time.
            DataLossError: if records of the topic were deleted.
            InvalidRecordError: if a record of the topic is damaged.
        """
        with changelog_client(self.kafka) as consumer:
            reader = ChangelogReader(consumer, TopicPartition(self.topic, context.shard))
            deadline = Deadline.after_ms(self.timeout_ms)
            _, end = reader.readable(deadline)
            for records in reader.read(0, end, deadline, if_gone=_IF_GONE, skips_deleted=False):
                for value in packing.values(records.values):
                    yield from packing.unpack_stream(value, f"topic {self.topic!r}")


def pack_initial(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    """Packs rows of an initial state, which have the column `SHARD`, into records of the topic."""
    for batch in batches:
        shards = batch.column(SHARD)
        for shard in shards.unique():
            rows = batch.filter(pc.equal(shards, shard)).drop_columns([SHARD])
            slices = packing.slices(rows, _RECORD_BYTES)
            values = packing.column([packing.pack_stream(each) for each in slices])
            partition = pa.repeat(shard.cast(pa.int32()), len(values))
            yield pa.record_batch([values, partition], ["value", "partition"])
