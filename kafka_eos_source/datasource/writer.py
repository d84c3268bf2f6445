"""Spark's writer interfaces for streams and batch writes.

For every micro-batch, Spark creates a writer on the driver and pickles it to the tasks, which call ``write``.
Then it creates another writer on the driver to commit or abort. Each writer passes these calls to a sink: a
`StagedSink` writes exactly once, a `_DirectSink` at least once.
"""

from __future__ import annotations

import uuid
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, cast

import pyarrow as pa
from pyspark.sql import datasource as spark_datasource
from pyspark.sql.datasource import (
    DataSourceArrowWriter,
    DataSourceStreamWriter,
    DataSourceWriter,
    WriterCommitMessage,
)

from kafka_eos_source.datasource.short_errors import short_errors
from kafka_eos_source.datasource.sink import (
    CommitMessage,
    StagedSink,
    of_every_task,
    of_successful_tasks,
    require_checkpoint,
    sink_columns,
)
from kafka_eos_source.errors import InvalidSchemaError
from kafka_eos_source.in_read.staged import is_staged_in_read, staged_frame
from kafka_eos_source.in_read.step import packed_batches_of, schema_of_packed_rows, unpack
from kafka_eos_source.options.checked import WriteOptions
from kafka_eos_source.protocol.packing import CHANGELOG
from kafka_eos_source.spark.packet_senders import READ, recorded_senders
from kafka_eos_source.spark.schema import SinkColumns, check_frame
from kafka_eos_source.spark.worker import running_task, task_begins
from kafka_eos_source.stage.files import StagingFolder, location_of_batch_writes
from kafka_eos_source.stage.rows import from_batches, from_rows

if TYPE_CHECKING:
    from pyspark.sql import Row
    from pyspark.sql.types import StructType

    from kafka_eos_source.stage.fanout import Plan

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
        CheckpointMovedError, GuaranteeChangedError: see `commit.identity_file.IdentityFile`.
        UnavailableError: if the brokers or the topic cannot be reached, or the staging folder is not
            writable.
    """
    task_begins()
    from kafka_eos_source.commit import at_least_once
    from kafka_eos_source.commit.identity_file import check_identity

    if (
        staged_frame(schema) is None
        and options.checkpoint_location is not None
        and is_staged_in_read(options.checkpoint_location)
    ):
        raise _reports_as_records()
    frame = FrameToWrite.of(options, schema)
    if options.guarantee != "at_least_once":
        require_checkpoint(options)  # before anything asks a broker
    at_least_once.check_target(options)
    if options.guarantee == "at_least_once":
        at_least_once.leave_guarantee(options)
        sink: _Sink = _DirectSink(options, frame.columns)
    else:
        check_identity(options)
        sink = StagedSink.of_stream(options, frame.columns, frame.plan, in_read=frame.in_read)
        _ = sink.destinations  # makes the targets of sinks outside Kafka ready
    writer = _RowStreamWriter if _StreamArrowWriter is None else _ArrowStreamWriter
    return cast(DataSourceStreamWriter, writer(sink, frame.packed))


@dataclass(frozen=True)
class FrameToWrite:
    """The columns of a streaming frame, as the sink takes them.

    Attributes:
        columns: positions of the columns that become records.
        plan: what goes to sinks outside Kafka; None if there are none.
        packed: schema of the rows in packed batches; None if the frame consists of ordinary rows.
        in_read: whether the tasks that read stage the rows.
    """

    columns: SinkColumns
    plan: Plan | None
    packed: StructType | None
    in_read: bool

    @classmethod
    def of(cls, options: WriteOptions, schema: StructType) -> FrameToWrite:
        """Checks that a frame with this schema can be written with these options.

        Raises:
            InvalidSchemaError: if the frame lacks a column, or a column has the wrong type.
            InvalidOptionError: if the frame was staged for another sink, or lacks a column of a sink outside
                Kafka.
        """
        packed, staged = schema_of_packed_rows(schema), staged_frame(schema)
        if staged is not None:
            staged.check_sink(options)
            schema = staged.rows
        columns, plan = sink_columns(options, packed or schema)
        if columns.changelog is not None and options.guarantee == "at_least_once":
            raise _cannot_commit(
                "processing.guarantee=at_least_once", only_bad_records=columns.only_bad_records
            )
        return cls(columns, plan, packed, staged is not None)


def batch_writer(options: WriteOptions, schema: StructType) -> DataSourceWriter:
    """Returns the sink of a batch write (``df.write``). Raises the errors of `stream_writer`."""
    from kafka_eos_source.commit import at_least_once

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
        raise _cannot_commit(_BATCH_WRITE, only_bad_records=columns.only_bad_records)
    at_least_once.check_target(options)
    if options.guarantee == "at_least_once":
        return _BatchWriter(_DirectSink(options, columns), packed)
    folder = StagingFolder.at(_staging_of_batch(options))
    return _BatchWriter(StagedSink(options, columns, folder, f"write-{uuid.uuid4().hex}"), packed)


@dataclass(frozen=True)
class _DirectSink:
    """At-least-once sink: tasks write to Kafka, and there is nothing to commit."""

    options: WriteOptions
    columns: SinkColumns

    def write_rows(self, rows: Iterable[Row]) -> CommitMessage:
        return self._write(from_rows(rows, self.columns))

    def write_frame(self, batches: Iterable[pa.RecordBatch]) -> CommitMessage:
        return self._write(from_batches(batches, self.columns))

    def _write(self, batches: Iterable[pa.RecordBatch]) -> CommitMessage:
        from kafka_eos_source.commit import at_least_once

        return CommitMessage(None, written=at_least_once.produce(self.options, batches))

    def commit_micro_batch(self, messages: Sequence[CommitMessage], batch_id: int) -> None:
        """Reports the figures of the batch. Its tasks have flushed their producers."""
        from kafka_eos_source.commit import at_least_once

        written = [each.written for each in messages if each.written is not None]
        at_least_once.report(self.options, batch_id, written)

    def commit_batch_write(self, messages: Sequence[CommitMessage]) -> None:
        """Does nothing, because the tasks have flushed their producers."""

    def discard(self, messages: Sequence[CommitMessage], batch_id: int | None = None) -> None:
        """Does nothing, because records that were written cannot be taken back."""


_Sink = StagedSink | _DirectSink


class _StreamWriter(DataSourceStreamWriter):
    """Base of the stream writers.

    Args:
        sink: what writes and commits.
        packed: schema of the rows in the packed batches of the frame (`in_read.step`), else None.
    """

    def __init__(self, sink: _Sink, packed: StructType | None) -> None:
        self._sink = sink
        self._packed = packed

    @short_errors
    def commit(self, messages: list[WriterCommitMessage | None], batchId: int) -> None:
        self._sink.commit_micro_batch(of_every_task(messages), batchId)

    @short_errors
    def abort(self, messages: list[WriterCommitMessage | None], batchId: int) -> None:
        self._sink.discard(of_successful_tasks(messages), batchId)


class _RowStreamWriter(_StreamWriter):
    @short_errors
    def write(self, iterator: Iterator[Row]) -> WriterCommitMessage:
        task_begins()
        if isinstance(self._sink, StagedSink) and self._sink.in_read:
            return self._sink.collect(memoryview(row[0]) for row in iterator if row[0] is not None)
        if self._packed is None:
            return self._sink.write_rows(iterator)
        packed_batches = (pa.py_buffer(row[0]) for row in iterator if row[0] is not None)
        return self._sink.write_frame(unpack(packed_batches, self._packed))


class _ArrowStreamWriter(_StreamWriter, *(() if _StreamArrowWriter is None else (_StreamArrowWriter,))):  # type: ignore[misc]
    @short_errors
    def write(self, iterator: Iterator[pa.RecordBatch]) -> WriterCommitMessage:
        task_begins()
        if isinstance(self._sink, StagedSink) and self._sink.in_read:
            return self._sink.collect(map(memoryview, packed_batches_of(iterator)))
        return self._sink.write_frame(_rows(iterator, self._packed))


class _BatchWriter(DataSourceArrowWriter):
    def __init__(self, sink: _Sink, packed: StructType | None) -> None:
        self._sink = sink
        self._packed = packed

    @short_errors
    def write(self, iterator: Iterator[pa.RecordBatch]) -> WriterCommitMessage:
        task_begins()
        return self._sink.write_frame(_rows(_without_packets(iterator), self._packed))

    @short_errors
    def commit(self, messages: list[WriterCommitMessage | None]) -> None:
        self._sink.commit_batch_write(of_every_task(messages))

    @short_errors
    def abort(self, messages: list[WriterCommitMessage | None]) -> None:
        self._sink.discard(of_successful_tasks(messages))


def _rows(batches: Iterable[pa.RecordBatch], packed: StructType | None) -> Iterable[pa.RecordBatch]:
    return batches if packed is None else unpack(packed_batches_of(batches), packed)


def _without_packets(batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    """Yields the batches of a task of a batch write, such as one in ``foreachBatch``.

    Raises:
        InvalidSchemaError: if an operator ran in the micro-batch, or a read sets bad records aside. The
            function of ``foreachBatch`` gets a frame with Spark's own methods, which drop their packets.
    """

    def check() -> None:
        task = running_task()
        found = () if task is None else recorded_senders(task)
        if found:
            only_bad_records = all(each.startswith(READ) for each in found)
            raise _cannot_commit(_BATCH_WRITE, only_bad_records=only_bad_records)

    for number, each in enumerate(batches):
        if not number:  # the read has begun
            check()
        yield each
    check()


_BATCH_WRITE = "a batch write (df.write, foreachBatch)"


def _cannot_commit(what: str, *, only_bad_records: bool) -> InvalidSchemaError:
    if only_bad_records:
        return InvalidSchemaError(
            f"the frame was read with on_bad='dead-letter', but {what} cannot commit bad records together "
            "with the batch.",
            fix="write the frame with writeStream.format('kafka-eos') and processing.guarantee=exactly_once, "
            "or read with on_bad='fail' or 'null'.",
        )
    return InvalidSchemaError(
        f"the frame has the state changes of an operator, in the column {CHANGELOG!r}, but {what} cannot "
        "commit them together with the batch.",
        fix="write the frame with writeStream.format('kafka-eos') and processing.guarantee=exactly_once.",
    )


def _reports_as_records() -> InvalidSchemaError:
    return InvalidSchemaError(
        "the tasks that read stage the rows of this query (write= of map_in_read), but the frame no longer "
        "has their reports: a step of the query computed other columns from them, for example with a cast. "
        "The sink would write these as records, and nobody would commit the rows.",
        fix="write the frame that map_in_read returned without changes, and do all processing in its "
        "function; or leave out write= of map_in_read.",
    )


def _staging_of_batch(options: WriteOptions) -> str:
    """Returns where a batch write stages rows: by default in a local folder, because it has no checkpoint.

    On a cluster, `StagingFolder.check_shared` refuses the local folder.
    """
    return options.staging_location or location_of_batch_writes()
