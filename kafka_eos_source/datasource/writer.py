"""Spark's writer interfaces, streaming and batch: `stage` in the tasks, `commit` on the driver.

Spark makes a writer on the driver for every micro-batch, pickles it to the tasks (``write``), and makes
another one to commit or abort. What only a driver uses is imported where it is used: tasks, which stage and
talk to no broker, start without it.
"""

from __future__ import annotations

import uuid
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, cast

import pyarrow as pa
from pyspark.sql import datasource as spark_datasource
from pyspark.sql.datasource import (
    DataSourceArrowWriter,
    DataSourceStreamWriter,
    DataSourceWriter,
    WriterCommitMessage,
)

from kafka_eos_source.errors import InvalidOptionError, InvalidSchemaError, RestartQueryError
from kafka_eos_source.in_read.packed import packed_rows, parcels_of, unpack
from kafka_eos_source.model import StagedPart
from kafka_eos_source.options.checked import WriteOptions
from kafka_eos_source.protocol.identity import derived_application_id
from kafka_eos_source.protocol.packet import CHANGELOG
from kafka_eos_source.spark.schema import SinkColumns, check_frame, only_changelog, takes_records
from kafka_eos_source.spark.task import StreamingTask, running_task
from kafka_eos_source.spark.worker import task_begins
from kafka_eos_source.stage.files import StagingFolder
from kafka_eos_source.stage.paths import location_of_batch_writes, location_of_query
from kafka_eos_source.stage.rows import from_batches, from_rows, staged_schema
from kafka_eos_source.stage.writer import stage
from kafka_eos_source.state.operator.running_operators import recorded_operators

if TYPE_CHECKING:
    from pyspark.sql import Row
    from pyspark.sql.types import StructType

    from kafka_eos_source.stage.fanout import Plan, SinkPart

#: Arrow batches straight from Spark since PySpark 4.1; rows before.
_StreamArrowWriter: Any = getattr(spark_datasource, "DataSourceStreamArrowWriter", None)


def stream_writer(options: WriteOptions, schema: StructType) -> DataSourceStreamWriter:
    """The sink of a streaming query.

    Raises:
        InvalidSchemaError: the frame does not fit the row contract.
        InvalidOptionError: no ``checkpointLocation``.
        UnavailableError: the topic or the brokers are not there, or the staging folder is not writable.
    """
    task_begins()
    from kafka_eos_source.commit import direct, sink_session
    from kafka_eos_source.stage.fanout import Plan

    packed = packed_rows(schema)
    schema = packed or schema
    kafka = not options.sinks or takes_records(schema, topic_option=options.topic)
    columns = (
        check_frame(schema, topic_option=options.topic, include_timestamp=options.include_timestamp)
        if kafka
        else only_changelog(schema)
    )
    if columns.changelog is not None and options.guarantee == "at_least_once":
        raise _stateless("processing.guarantee=at_least_once")
    plan = Plan.of(options.sinks, schema, kafka=kafka) if options.sinks else None
    direct.check_target(options)
    if options.guarantee == "at_least_once":
        sink: _Sink = _DirectSink(options, columns)
    else:
        sink = _StagedSink(options, columns, StagingFolder.at(_staging_of_stream(options)), "", plan)
        if plan is not None:
            sink_session.check(options, plan)
    writer = _RowStreamWriter if _StreamArrowWriter is None else _ArrowStreamWriter
    return cast(DataSourceStreamWriter, writer(sink, packed))


def batch_writer(options: WriteOptions, schema: StructType) -> DataSourceWriter:
    """The sink of ``df.write``. Raises as `stream_writer`."""
    from kafka_eos_source.commit import direct

    packed = packed_rows(schema)
    columns = check_frame(
        packed or schema, topic_option=options.topic, include_timestamp=options.include_timestamp
    )
    if columns.changelog is not None:
        raise _stateless("a batch write (df.write, foreachBatch)")
    direct.check_target(options)
    if options.guarantee == "at_least_once":
        return _BatchWriter(_DirectSink(options, columns), packed)
    folder = StagingFolder.at(_staging_of_batch(options))
    return _BatchWriter(_StagedSink(options, columns, folder, f"write-{uuid.uuid4().hex}"), packed)


@dataclass
class _Message(WriterCommitMessage):
    """What one task attempt tells the driver."""

    part: StagedPart | None
    sinks: tuple[SinkPart, ...] = ()


@dataclass(frozen=True)
class _StagedSink:
    """Exactly once: tasks stage, the driver commits."""

    options: WriteOptions
    columns: SinkColumns
    folder: StagingFolder
    name: str  #: of a batch write in the folder; "" = the micro-batch's id
    plan: Plan | None = None  #: of the sinks outside Kafka

    def write_frame(self, batches: Iterable[pa.RecordBatch]) -> _Message:
        """Batches as Spark has them, with all columns of the frame."""
        if self.plan is None:
            return self.write(from_batches(batches, self.columns))
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
            message = self.write(from_batches(fanout.rows(batches), self.columns))
        except BaseException:
            fanout.discard()
            raise
        return replace(message, sinks=fanout.finish())

    def write(self, batches: Iterable[pa.RecordBatch]) -> _Message:
        """Batches as they are staged for Kafka."""
        task = _task()
        if not self.name:
            # at the start of a query, and not when a batch is first too large for its messages
            self.folder.check_shared()
        part = stage(
            batches,
            staged_schema(self.columns),
            folder=self.folder,
            batch=self.name or task.batch_id,
            inline_bytes=self.options.staging_inline_bytes,
            run_id=task.run_id,
            topic=self.options.topic,
        )
        # an operator in this very task begins when its first row is asked for
        return _Message(replace(part, operators=recorded_operators(task)))

    def commit_micro_batch(self, messages: Sequence[_Message], batch_id: int) -> None:
        from kafka_eos_source.commit import session

        sink_parts = [part for each in messages for part in each.sinks]
        session.commit_micro_batch(
            self.options, self.folder, _parts(messages), batch_id, self.plan, sink_parts
        )

    def discard(self, name: str, messages: Sequence[_Message]) -> None:
        """Spark calls this after a failed commit too: only what the messages name may go.

        What sinks outside Kafka have prepared stays as it is: the token tells what becomes of it.
        """
        from kafka_eos_source.stage.fanout import part_names

        files = [part.name for part in _parts(messages) if part.name]
        self.folder.remove_parts(name, files + part_names(part for each in messages for part in each.sinks))


@dataclass(frozen=True)
class _DirectSink:
    """At least once: tasks produce, and nothing is left to commit."""

    options: WriteOptions
    columns: SinkColumns

    def write(self, batches: Iterable[pa.RecordBatch]) -> _Message:
        from kafka_eos_source.commit import direct

        direct.produce(self.options, batches)
        return _Message(None)

    def write_frame(self, batches: Iterable[pa.RecordBatch]) -> _Message:
        return self.write(from_batches(batches, self.columns))

    def commit_micro_batch(self, messages: Sequence[_Message], batch_id: int) -> None:
        """Nothing to do: the tasks have flushed."""

    def discard(self, name: str, messages: Sequence[_Message]) -> None:
        """Nothing can be taken back."""


_Sink = _StagedSink | _DirectSink


class _StreamWriter(DataSourceStreamWriter):
    """``packed``: schema of the rows in the frame's parcels (`in_read.packed`); None = rows as they are."""

    def __init__(self, sink: _Sink, packed: StructType | None) -> None:
        self._sink = sink
        self._packed = packed

    def commit(self, messages: list[WriterCommitMessage | None], batchId: int) -> None:
        self._sink.commit_micro_batch(_of_every_task(messages), batchId)

    def abort(self, messages: list[WriterCommitMessage | None], batchId: int) -> None:
        self._sink.discard(str(batchId), _of_successful_tasks(messages))


class _RowStreamWriter(_StreamWriter):
    def write(self, iterator: Iterator[Row]) -> WriterCommitMessage:
        task_begins()
        if self._packed is None:
            return self._sink.write(from_rows(iterator, self._sink.columns))
        parcels = (pa.py_buffer(row[0]) for row in iterator if row[0] is not None)
        return self._sink.write_frame(unpack(parcels, self._packed))


class _ArrowStreamWriter(_StreamWriter, *(() if _StreamArrowWriter is None else (_StreamArrowWriter,))):  # type: ignore[misc]
    def write(self, iterator: Iterator[pa.RecordBatch]) -> WriterCommitMessage:
        task_begins()
        return self._sink.write_frame(_rows(iterator, self._packed))


class _BatchWriter(DataSourceArrowWriter):
    def __init__(self, sink: _Sink, packed: StructType | None) -> None:
        self._sink = sink
        self._packed = packed

    def write(self, iterator: Iterator[pa.RecordBatch]) -> WriterCommitMessage:
        task_begins()
        return self._sink.write_frame(_rows(iterator, self._packed))

    def commit(self, messages: list[WriterCommitMessage | None]) -> None:
        from kafka_eos_source.commit import session

        found = _of_every_task(messages)
        if isinstance(self._sink, _StagedSink):
            session.commit_batch_write(self._sink.options, self._sink.folder, self._sink.name, _parts(found))

    def abort(self, messages: list[WriterCommitMessage | None]) -> None:
        if isinstance(self._sink, _StagedSink):
            self._sink.discard(self._sink.name, _of_successful_tasks(messages))


def _rows(batches: Iterable[pa.RecordBatch], packed: StructType | None) -> Iterable[pa.RecordBatch]:
    return batches if packed is None else unpack(parcels_of(batches), packed)


def _of_every_task(messages: Iterable[WriterCommitMessage | None]) -> list[_Message]:
    """The messages of a batch whose tasks have all succeeded.

    Raises:
        RestartQueryError: a task's message is missing, and with it the rows that the task staged.
    """
    found = list(messages)
    missing = [number for number, each in enumerate(found) if not isinstance(each, _Message)]
    if missing:
        raise RestartQueryError(
            f"Spark asks to commit a batch without the messages of {len(missing)} of its {len(found)} tasks "
            f"(the first is task {missing[0]}): {found[missing[0]]!r}. Their rows would be lost.",
            fix="start the query, or this write, again: the batch is staged anew; nothing of it is visible "
            "to readers.",
        )
    return _of_successful_tasks(found)


def _of_successful_tasks(messages: Iterable[WriterCommitMessage | None]) -> list[_Message]:
    """The messages of a batch that is given up: Spark passes None for each task that failed."""
    return [each for each in messages if isinstance(each, _Message)]


def _parts(messages: Iterable[_Message]) -> list[StagedPart]:
    return [each.part for each in messages if each.part is not None]


def _task() -> StreamingTask:
    task = running_task()
    if task is None:
        raise RuntimeError("write was called outside a Spark task")
    return task


def _stateless(what: str) -> InvalidSchemaError:
    return InvalidSchemaError(
        f"the frame has the column {CHANGELOG!r}, the state changes of an operator, which {what} cannot "
        "commit with the batch they belong to.",
        fix="write it with writeStream.format('kafka-eos') and processing.guarantee=exactly_once.",
    )


def _staging_of_stream(options: WriteOptions) -> str:
    if options.checkpoint_location is None:
        raise InvalidOptionError(
            "the option 'checkpointLocation' is not set on the sink. Spark does not hand on the session's "
            "spark.sql.streaming.checkpointLocation, and exactly-once needs the checkpoint: it tells which "
            "offsets belong to a batch.",
            fix="add .option('checkpointLocation', …) to writeStream.",
        )
    return location_of_query(options.checkpoint_location, options.staging_location)


def _staging_of_batch(options: WriteOptions) -> str:
    """Batch writes have no checkpoint; their default is local, which the probe refuses on a real cluster."""
    return options.staging_location or location_of_batch_writes()
