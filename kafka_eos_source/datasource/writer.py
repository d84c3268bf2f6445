"""Spark's writer interfaces for streams and batch writes.

The tasks stage rows (package `stage`) and the driver commits them (package `commit`). For every micro-batch,
Spark creates a writer on the driver, pickles it to the tasks, which call ``write``, and creates another
writer to commit or abort. If the tasks that read have staged the rows (`stage_in_read`), ``write`` only
collects their reports. The tasks of an exactly-once write contact no broker, so code that only
the driver needs is imported inside the functions that use it.
"""

from __future__ import annotations

import uuid
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import TYPE_CHECKING, Any, cast

import pyarrow as pa
from pyspark.sql import datasource as spark_datasource
from pyspark.sql.datasource import (
    DataSourceArrowWriter,
    DataSourceStreamWriter,
    DataSourceWriter,
    WriterCommitMessage,
)

from kafka_eos_source.datasource.read_reports import messages_in
from kafka_eos_source.datasource.short_errors import short_errors
from kafka_eos_source.datasource.staged_runs import is_staged_in_read
from kafka_eos_source.errors import InvalidOptionError, InvalidSchemaError, RestartQueryError
from kafka_eos_source.in_read.packed_frame import packed_batches_of, schema_of_packed_rows, unpack
from kafka_eos_source.in_read.staged_frame import staged_frame
from kafka_eos_source.model import StagedPart, StagedRead, WrittenPart
from kafka_eos_source.options.checked import WriteOptions
from kafka_eos_source.protocol import dead_letters, offset_log
from kafka_eos_source.protocol.identity import derived_application_id
from kafka_eos_source.protocol.offset_log import PlannedBatch
from kafka_eos_source.protocol.packet import CHANGELOG
from kafka_eos_source.spark.schema import SinkColumns, check_frame, only_changelog, takes_records
from kafka_eos_source.spark.task import StreamingTask, running_task
from kafka_eos_source.spark.worker import task_begins
from kafka_eos_source.stage.files import StagingFolder
from kafka_eos_source.stage.invalid_rows import InvalidRows
from kafka_eos_source.stage.paths import location_of_batch_writes, location_of_query
from kafka_eos_source.stage.row_rules import with_small_batches
from kafka_eos_source.stage.rows import from_batches, from_rows, staged_schema
from kafka_eos_source.stage.spool import PartStage
from kafka_eos_source.stage.writer import stage
from kafka_eos_source.state.operator.running_operators import recorded_operators

if TYPE_CHECKING:
    from pyspark.sql import Row
    from pyspark.sql.types import StructType

    from kafka_eos_source.stage.fanout import Plan, SinkPart
    from kafka_eos_source.stage.row_rules import RecordLimits
    from kafka_eos_source.stage.sealed_column import SealingPlan

#: Since PySpark 4.1, a stream writer can receive Arrow batches. Before, it receives rows.
_StreamArrowWriter: Any = getattr(spark_datasource, "DataSourceStreamArrowWriter", None)


def stream_writer(options: WriteOptions, schema: StructType) -> DataSourceStreamWriter:
    """Returns the sink of a streaming query.

    Args:
        options: of the sink.
        schema: schema of the frame to write.

    Raises:
        InvalidSchemaError: if the frame lacks a column that the sink needs, or a column has the wrong type.
        InvalidOptionError: if ``checkpointLocation`` is not set, or the frame was staged for another sink.
        UnavailableError: if the brokers or the topic cannot be reached, or the staging folder is not
            writable.
    """
    task_begins()
    from kafka_eos_source.commit import direct

    packed, staged = schema_of_packed_rows(schema), staged_frame(schema)
    if staged is not None:
        staged.check_sink(options)
        schema = staged.rows
    elif options.checkpoint_location is not None and is_staged_in_read(options.checkpoint_location):
        raise _reports_as_records()
    schema = packed or schema
    columns, plan = sink_columns(options, schema)
    if columns.changelog is not None and options.guarantee == "at_least_once":
        raise _cannot_commit_state("processing.guarantee=at_least_once")
    direct.check_target(options)
    if options.guarantee == "at_least_once":
        sink: _Sink = _DirectSink(options, columns)
    else:
        folder = StagingFolder.at(_staging_of_stream(options))
        sink = _StagedSink(options, columns, folder, "", plan, in_read=staged is not None)
        if plan is not None:
            from kafka_eos_source.commit import sink_session

            sink_session.check(options, plan)
    writer = _RowStreamWriter if _StreamArrowWriter is None else _ArrowStreamWriter
    return cast(DataSourceStreamWriter, writer(sink, packed))


def staged_sink(options: WriteOptions, rows: StructType) -> _StagedSink:
    """Returns the sink of an exactly-once stream, for tasks that stage such rows themselves.

    Raises:
        UnavailableError: if the staging folder is not writable.
        InvalidSchemaError, InvalidOptionError: as `sink_columns`.
    """
    columns, plan = sink_columns(options, rows)
    return _StagedSink(
        options, columns, StagingFolder.at(_staging_of_stream(options)), "", plan, in_read=True
    )


def sink_columns(options: WriteOptions, schema: StructType) -> tuple[SinkColumns, Plan | None]:
    """Returns the columns of a stream's sink, and what goes to sinks outside Kafka; None if there are none.

    Raises:
        InvalidSchemaError: if the frame lacks a column that the sink needs, or a column has the wrong type.
        InvalidOptionError: if the frame lacks a column that a sink outside Kafka needs.
    """
    kafka = not options.sinks or takes_records(schema, topic_option=options.topic)
    columns = (
        check_frame(schema, topic_option=options.topic, include_timestamp=options.include_timestamp)
        if kafka
        else only_changelog(schema)
    )
    if not options.sinks:
        return columns, None
    from kafka_eos_source.stage.fanout import Plan

    return columns, Plan.of(options.sinks, schema, kafka=kafka)


def batch_writer(options: WriteOptions, schema: StructType) -> DataSourceWriter:
    """Returns the sink of a batch write (``df.write``). Raises the errors of `stream_writer`."""
    from kafka_eos_source.commit import direct

    if staged_frame(schema) is not None:
        raise InvalidSchemaError(
            "the tasks that read stage the rows of this frame for a streaming query (write= of map_in_read), "
            "but a batch write (df.write, foreachBatch) writes it.",
            fix="leave out write= of map_in_read, or write the frame with writeStream.format('kafka-eos').",
        )
    packed = schema_of_packed_rows(schema)
    columns = check_frame(
        packed or schema, topic_option=options.topic, include_timestamp=options.include_timestamp
    )
    if columns.changelog is not None:
        raise _cannot_commit_state("a batch write (df.write, foreachBatch)")
    direct.check_target(options)
    if options.guarantee == "at_least_once":
        return _BatchWriter(_DirectSink(options, columns), packed)
    folder = StagingFolder.at(_staging_of_batch(options))
    return _BatchWriter(_StagedSink(options, columns, folder, f"write-{uuid.uuid4().hex}"), packed)


@dataclass
class _Message(WriterCommitMessage):
    """Commit message that one task attempt sends to the driver.

    Attributes:
        part: the staged rows for Kafka; None if the task wrote them itself.
        dead_letters: the staged dead letters; None if there are none.
        sinks: the staged rows for sinks outside Kafka.
        planned: `_StagedSink.planned` of the writer that the task received.
        written: what the task wrote itself; None if it staged its rows.
        record_bytes: size of the largest record that the topics accept; None if the task does not know it.
        read: the offsets that the staged rows cover, if the task that read them staged them.
        reports: messages of such tasks, which this task received as rows of the frame.
    """

    part: StagedPart | None
    dead_letters: StagedPart | None = None
    sinks: tuple[SinkPart, ...] = ()
    planned: PlannedBatch | None = None
    written: WrittenPart | None = None
    record_bytes: int | None = None
    read: StagedRead | None = None
    reports: tuple[_Message, ...] = ()


@dataclass(frozen=True)
class _StagedSink:
    """Exactly-once sink: tasks stage rows, the driver commits them.

    Attributes:
        options: options of the sink.
        columns: positions of the columns in the frame.
        folder: staging folder.
        name: name of a batch write in the staging folder; "" for a stream, which uses the batch id.
        plan: columns and rows that go to sinks outside Kafka; None if there are none.
        in_read: whether the tasks that read stage the rows.
    """

    options: WriteOptions
    columns: SinkColumns
    folder: StagingFolder
    name: str
    plan: Plan | None = None
    in_read: bool = False

    def __getstate__(self) -> dict[str, Any]:
        """Adds what the tasks receive from the driver. Spark never pickles the writer that commits."""
        self.prepare()
        return dict(self.__dict__)

    def prepare(self) -> None:
        """Asks for what the tasks receive from the driver, and keeps the answers. Called on the driver.

        Raises:
            KafkaEosError: if the offset log cannot be read, or the brokers do not say which records the topic
                accepts.
        """
        _ = self.planned, self.limits, self.sealing

    @cached_property
    def limits(self) -> RecordLimits | None:
        """Which records the topic accepts; None if no task asks, because an invalid row fails the batch."""
        options = self.options
        if options.on_invalid_record == "fail":
            return None
        from kafka_eos_source.stage.record_limits import record_limits

        return record_limits(options.kafka, options.topic, options.dead_letter_topic)

    @cached_property
    def sealing(self) -> SealingPlan | None:
        """How the tasks encode rows as record batches; None if they stage rows."""
        from kafka_eos_source.stage.sealing_plan import sealing_plan

        options = self.options
        return sealing_plan(options.kafka, options.topic, options.transaction_client)

    @cached_property
    def planned(self) -> PlannedBatch | None:
        """The newest entry of the offset log; None if the log is empty, and in a batch write.

        Spark pickles a new writer for each micro-batch, between the entry of the batch in the offset log and
        its first task. The tasks report this entry to the driver, where another writer commits.
        """
        return None if self.name else offset_log.newest(str(self.options.checkpoint_location))

    def write_frame(self, batches: Iterable[pa.RecordBatch]) -> _Message:
        """Stages Arrow batches with all columns of the frame, for Kafka and for sinks outside Kafka."""
        if self.plan is None:
            return self._write(lambda invalid: from_batches(batches, self.columns, invalid))
        from kafka_eos_source.stage.fanout import Fanout

        task = _task()
        fanout = Fanout(
            self.plan,
            self.options.application_id or derived_application_id(task.query_id),
            task.batch_id,
            self.folder,
            self.options.staging_inline_bytes,
        )
        try:
            message = self._write(lambda invalid: from_batches(fanout.rows(batches), self.columns, invalid))
        except BaseException:
            fanout.discard()
            raise
        return replace(message, sinks=fanout.finish())

    def write_rows(self, rows: Iterable[Row]) -> _Message:
        """Stages Spark's rows with all columns of the frame, for Kafka only."""
        return self._write(lambda invalid: from_rows(rows, self.columns, invalid))

    def collect(self, reports: Iterable[memoryview]) -> _Message:
        """Returns a message with those in the reports of tasks that staged what they read.

        Raises:
            StagedReadError: as `messages_in`.
        """
        found = messages_in(reports, self.options, _task())
        if not found:  # the batch reads nothing, as one that only renews the token
            return self.write_frame(())
        return _Message(None, planned=self.planned, reports=found)

    def _write(self, staged: Callable[[InvalidRows | None], Iterable[pa.RecordBatch]]) -> _Message:
        """Stages the batches that a function makes, for Kafka only.

        Args:
            staged: returns batches with the staged columns; passes invalid rows to its argument.
        """
        task = _task()
        if not self.name:
            # fails at the start of the query, not when a batch is first too large for the commit messages
            self.folder.check_shared()
        invalid = self._invalid_rows(task)
        try:
            part = stage(
                staged(invalid),
                staged_schema(self.columns),
                folder=self.folder,
                batch=self.name or task.batch_id,
                inline_bytes=self.options.staging_inline_bytes,
                run_id=task.run_id,
                topic=self.options.topic,
                sealing=self.sealing,
            )
            dead = None if invalid is None else invalid.finish()
        except BaseException:
            if invalid is not None:
                invalid.discard()
            raise
        # only now: an operator in this task starts when `stage` reads its first row
        part = replace(
            part, operators=recorded_operators(task), dropped=0 if invalid is None else invalid.dropped
        )
        if dead is not None:
            dead = replace(dead, run_id=task.run_id)
        limits = self.limits
        record_bytes = None if limits is None else limits.record_bytes
        return _Message(part, dead, (), self.planned, record_bytes=record_bytes)

    def _invalid_rows(self, task: StreamingTask) -> InvalidRows | None:
        """Returns what takes the invalid rows of this task; None if they fail the batch."""
        limits, options = self.limits, self.options
        if limits is None:
            return None
        batch = self.name or task.batch_id
        origin = {dead_letters.APPLICATION: options.application_id or derived_application_id(task.query_id)}
        if not self.name:
            origin[dead_letters.BATCH] = batch
        stage_of = partial(
            PartStage, folder=self.folder, batch=batch, inline_bytes=options.staging_inline_bytes
        )
        return InvalidRows(options.dead_letter_topic, limits, origin, options.topic, stage_of)

    def commit_micro_batch(self, messages: Sequence[_Message], batch_id: int) -> None:
        from kafka_eos_source.commit import session

        messages = _with_reported(messages)
        sink_parts = [part for each in messages for part in each.sinks]
        session.commit_micro_batch(
            self.options_of_commit(messages),
            self.folder,
            _parts(messages),
            batch_id,
            self.plan,
            sink_parts,
            {each.planned for each in messages},
            [each.read for each in messages if each.read is not None] if self.in_read else None,
        )

    def options_of_commit(self, messages: Sequence[_Message]) -> WriteOptions:
        """Returns the options with which the driver commits what these tasks staged."""
        sizes = [each.record_bytes for each in messages if each.record_bytes is not None]
        if not sizes:
            return self.options
        return replace(self.options, kafka=with_small_batches(self.options.kafka, min(sizes)))

    def discard(self, name: str, messages: Sequence[_Message]) -> None:
        """Deletes the staged files that these messages name.

        Spark also calls this after a failed commit, so it must not delete anything else. What sinks outside
        Kafka have prepared stays: the commit token decides whether they commit or abort it.
        """
        from kafka_eos_source.stage.fanout import part_names

        messages = _with_reported(messages)
        files = [part.name for part in _parts(messages) if part.name]
        self.folder.remove_parts(name, files + part_names(part for each in messages for part in each.sinks))


@dataclass(frozen=True)
class _DirectSink:
    """At-least-once sink: tasks write to Kafka, and there is nothing to commit."""

    options: WriteOptions
    columns: SinkColumns

    def write_rows(self, rows: Iterable[Row]) -> _Message:
        return self._write(from_rows(rows, self.columns))

    def write_frame(self, batches: Iterable[pa.RecordBatch]) -> _Message:
        return self._write(from_batches(batches, self.columns))

    def _write(self, batches: Iterable[pa.RecordBatch]) -> _Message:
        from kafka_eos_source.commit import direct

        return _Message(None, written=direct.produce(self.options, batches))

    def commit_micro_batch(self, messages: Sequence[_Message], batch_id: int) -> None:
        """Reports the figures of the batch. Its tasks have flushed their producers."""
        from kafka_eos_source.commit import direct

        written = [each.written for each in messages if each.written is not None]
        direct.report(self.options, batch_id, written)

    def discard(self, name: str, messages: Sequence[_Message]) -> None:
        """Does nothing, because records that were written cannot be taken back."""


_Sink = _StagedSink | _DirectSink


class _StreamWriter(DataSourceStreamWriter):
    """Base of the stream writers.

    Args:
        sink: what writes and commits.
        packed: schema of the rows in the packed batches of the frame (`in_read.packed_frame`), else None.
    """

    def __init__(self, sink: _Sink, packed: StructType | None) -> None:
        self._sink = sink
        self._packed = packed

    @short_errors
    def commit(self, messages: list[WriterCommitMessage | None], batchId: int) -> None:
        self._sink.commit_micro_batch(_of_every_task(messages), batchId)

    @short_errors
    def abort(self, messages: list[WriterCommitMessage | None], batchId: int) -> None:
        self._sink.discard(str(batchId), _of_successful_tasks(messages))


class _RowStreamWriter(_StreamWriter):
    @short_errors
    def write(self, iterator: Iterator[Row]) -> WriterCommitMessage:
        task_begins()
        if isinstance(self._sink, _StagedSink) and self._sink.in_read:
            return self._sink.collect(memoryview(row[0]) for row in iterator if row[0] is not None)
        if self._packed is None:
            return self._sink.write_rows(iterator)
        packed_batches = (pa.py_buffer(row[0]) for row in iterator if row[0] is not None)
        return self._sink.write_frame(unpack(packed_batches, self._packed))


class _ArrowStreamWriter(_StreamWriter, *(() if _StreamArrowWriter is None else (_StreamArrowWriter,))):  # type: ignore[misc]
    @short_errors
    def write(self, iterator: Iterator[pa.RecordBatch]) -> WriterCommitMessage:
        task_begins()
        if isinstance(self._sink, _StagedSink) and self._sink.in_read:
            return self._sink.collect(map(memoryview, packed_batches_of(iterator)))
        return self._sink.write_frame(_rows(iterator, self._packed))


class _BatchWriter(DataSourceArrowWriter):
    def __init__(self, sink: _Sink, packed: StructType | None) -> None:
        self._sink = sink
        self._packed = packed

    @short_errors
    def write(self, iterator: Iterator[pa.RecordBatch]) -> WriterCommitMessage:
        task_begins()
        return self._sink.write_frame(_rows(iterator, self._packed))

    @short_errors
    def commit(self, messages: list[WriterCommitMessage | None]) -> None:
        from kafka_eos_source.commit import session

        found = _of_every_task(messages)
        if isinstance(self._sink, _StagedSink):
            sink, options = self._sink, self._sink.options_of_commit(found)
            session.commit_batch_write(options, sink.folder, sink.name, _parts(found))

    @short_errors
    def abort(self, messages: list[WriterCommitMessage | None]) -> None:
        if isinstance(self._sink, _StagedSink):
            self._sink.discard(self._sink.name, _of_successful_tasks(messages))


def _rows(batches: Iterable[pa.RecordBatch], packed: StructType | None) -> Iterable[pa.RecordBatch]:
    return batches if packed is None else unpack(packed_batches_of(batches), packed)


def _of_every_task(messages: Iterable[WriterCommitMessage | None]) -> list[_Message]:
    """Returns the messages of a batch in which every task succeeded.

    Raises:
        RestartQueryError: if the message of a task is missing, because its rows would be missing too.
    """
    found = list(messages)
    missing = [number for number, each in enumerate(found) if not isinstance(each, _Message)]
    if missing:
        raise RestartQueryError(
            f"Spark asks to commit a batch, but {len(missing)} of its {len(found)} tasks (the first is task "
            f"{missing[0]}) sent no commit message: Spark passed {found[missing[0]]!r}. The rows of these "
            "tasks would be lost.",
            fix="start the query or the write again, which repeats the batch. Readers see nothing of it yet.",
        )
    return _of_successful_tasks(found)


def _of_successful_tasks(messages: Iterable[WriterCommitMessage | None]) -> list[_Message]:
    """Returns the messages of the tasks that succeeded. Spark passes None for the others."""
    return [each for each in messages if isinstance(each, _Message)]


def _with_reported(messages: Iterable[_Message]) -> list[_Message]:
    """Returns the messages, and after them those in their reports, in the order of the tasks that read."""
    messages = list(messages)
    reported = [(each.read, each) for message in messages for each in message.reports]
    in_order = sorted(reported, key=lambda found: (found[0].frame, found[0].task) if found[0] else ("", 0))
    return [*messages, *(each for _, each in in_order)]


def _parts(messages: Iterable[_Message]) -> list[StagedPart]:
    return [part for each in messages for part in (each.part, each.dead_letters) if part is not None]


def _task() -> StreamingTask:
    task = running_task()
    if task is None:
        raise RuntimeError("the sink's write method was called outside a Spark task")
    return task


def _cannot_commit_state(what: str) -> InvalidSchemaError:
    return InvalidSchemaError(
        f"the frame has the column {CHANGELOG!r} with the state changes of an operator, but {what} cannot "
        "commit them together with the batch.",
        fix="write the frame with writeStream.format('kafka-eos') and processing.guarantee=exactly_once.",
    )


def _reports_as_records() -> InvalidSchemaError:
    return InvalidSchemaError(
        "the tasks that read stage the rows of this query (write= of map_in_read), but the frame does not "
        "have their reports any more: a step of the query computed other columns from them, for example with "
        "a cast. The sink would write these as records, and nobody would commit the rows.",
        fix="write the frame that map_in_read returned without changes, and do all processing in its "
        "function; or leave out write= of map_in_read.",
    )


def _staging_of_stream(options: WriteOptions) -> str:
    if options.checkpoint_location is None:
        raise InvalidOptionError(
            "option 'checkpointLocation' is not set on the sink. The sink reads from the checkpoint which "
            "offsets belong to a batch, and Spark does not pass on the session's "
            "spark.sql.streaming.checkpointLocation.",
            fix="add .option('checkpointLocation', …) to writeStream.",
        )
    return location_of_query(options.checkpoint_location, options.staging_location)


def _staging_of_batch(options: WriteOptions) -> str:
    """Returns where a batch write stages rows: by default in a local folder, because it has no checkpoint.

    On a cluster, `StagingFolder.check_shared` refuses the local folder.
    """
    return options.staging_location or location_of_batch_writes()
