"""Stages rows in the tasks that read them (``write=`` of `map_in_read`), and passes reports to the sink.

The driver's planning process makes the sink and pickles it to the reading tasks, as Spark does with the
writer of other queries. Each reading task stages its rows with it and yields one row: its *report*, which
contains the commit message that a task of the sink would otherwise send. The tasks of the sink only collect
these reports (`StagedSink.collect`), and the commit checks that none is missing or doubled
(`commit.staged_reads`).
"""

from __future__ import annotations

import uuid
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import pyarrow as pa
from pyspark.sql.datasource import InputPartition
from pyspark.sql.types import StructType

from kafka_eos_source.datasource.sink import StagedSink, report_of, sink_columns
from kafka_eos_source.errors import InvalidOptionError, RestartQueryError
from kafka_eos_source.in_read.staged import STAGED, StagedRun
from kafka_eos_source.model import OffsetRange, StagedRead
from kafka_eos_source.options.checked import ReadOptions, WriteOptions
from kafka_eos_source.protocol import offset_log
from kafka_eos_source.protocol.source_position import SourcePosition
from kafka_eos_source.spark.worker import StreamingTask, running_task

_SCHEMA = pa.schema([pa.field(STAGED, pa.binary())])


class StagingTask(InputPartition):
    """One reading task of a batch that stages its rows.

    Args:
        read: what it covers; its attempts differ in `StagedRead.task_attempt_id`.
        sink: the sink, as the driver made it for this batch.
        query_id: id of the query whose checkpoint the sink's options name.
    """

    def __init__(self, read: StagedRead, sink: StagedSink, query_id: str) -> None:
        super().__init__(None)
        self.ranges = read.ranges
        self._read = read
        self._sink = sink
        self._query_id = query_id

    def run(self, rows: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        """Stages the rows of this task attempt, and yields its report as the only row of the frame.

        Raises:
            InvalidOptionError: if another query reads the frame than the one for which it is staged.
            RestartQueryError: if another driver has planned a batch in the same checkpoint.
            KafkaEosError: as `StagedSink.write_frame`.
        """
        task = running_task()
        if task is None:
            raise RuntimeError("the source's read method was called outside a Spark task")
        self._check_query(task)
        message = self._sink.write_frame(rows)
        message = replace(message, read=replace(self._read, task_attempt_id=uuid.uuid4().hex))
        report = pa.array([report_of(message, self._sink.options, task)], pa.binary())
        yield pa.RecordBatch.from_arrays([report], schema=_SCHEMA)

    def _check_query(self, task: StreamingTask) -> None:
        checkpoint = self._sink.options.checkpoint_location
        if task.query_id != self._query_id:
            raise InvalidOptionError(
                f"write= of map_in_read has checkpointLocation={checkpoint!r}, the checkpoint of query "
                f"{self._query_id}, but query {task.query_id or '(none)'} reads the frame.",
                fix="call map_in_read for each query with the options of its own sink, and write the frame "
                "only with them.",
            )
        planned = self._sink.planned
        if planned is None or str(planned.batch_id) != task.batch_id:
            newest = "empty" if planned is None else f"at batch {planned.batch_id}"
            raise RestartQueryError(
                f"a task reads for batch {task.batch_id}, but the offset log in checkpointLocation="
                f"{checkpoint!r} is {newest}: another driver uses the same checkpoint, somebody edited it, "
                "or the query tracks its progress asynchronously (asyncProgressTrackingEnabled), which "
                "writes the log later. Nothing of the batch was committed.",
                fix="do nothing if another driver should continue; otherwise stop it, remove the option "
                "asyncProgressTrackingEnabled if it is set, and start this query again.",
            )


class StagingPlan:
    """Turns the planned ranges of each batch into tasks that stage their rows; lives on the driver.

    Args:
        frame: id of the frame.
        rows: schema of the rows that its function returns.
        options: options of the sink.
        lossy: whether the source accepts lost records.
    """

    def __init__(self, frame: str, rows: StructType, options: WriteOptions, *, lossy: bool) -> None:
        self._frame = frame
        self._rows = rows
        self._options = options
        self._lossy = lossy
        self._run: StagedRun | None = None

    def close(self) -> None:
        """Says that the run has ended."""
        if self._run is not None:
            self._run.end()

    @classmethod
    def of(cls, options: ReadOptions) -> StagingPlan:
        """Returns the plan for a source whose options include those of a sink.

        Raises:
            InvalidOptionError: if the option that `map_in_read` sets is malformed.
        """
        from kafka_eos_source.read.steps import map_step

        assert options.sink is not None
        assert options.step_in_read is not None
        step = map_step(options.step_in_read[1])
        return cls(step.frame, step.rows, options.sink, lossy=not options.fail_on_data_loss)

    def check(self) -> None:
        """Checks that the sink accepts such rows.

        Raises:
            InvalidSchemaError, InvalidOptionError: if it does not.
        """
        sink_columns(self._options, self._rows)

    def tasks(
        self, start: dict[str, Any], end: dict[str, Any], planned: Sequence[tuple[OffsetRange, ...]]
    ) -> list[InputPartition]:
        """Returns the tasks of one batch. Called after Spark has written the batch to the offset log.

        A batch of which nothing is left to read has one task, so that its report shows that. The commit
        expects it of each source that `staged_reads` finds in the offset log. So whether there is one must
        depend on the end position as well: if Spark repeats batch 0, ``start`` is a new initial offset.

        Args:
            start, end: positions of the source, as Spark passes them.
            planned: the ranges of each task.

        Raises:
            InvalidOptionError: if there is no checkpoint at ``checkpointLocation``.
            UnavailableError: if the staging folder is not writable.
            KafkaEosError: as `StagedSink.prepare`.
        """
        if self._run is None:
            self._run = StagedRun(str(self._options.checkpoint_location))
        position = SourcePosition.from_dict(end)
        if not planned:
            if not position.has_records or position == SourcePosition.from_dict(start):
                return []
            planned = [()]
        sink = StagedSink.of_stream(self._options, *sink_columns(self._options, self._rows), in_read=True)
        # PySpark pickles the tasks after it has sent Spark their number, so Spark would take the text of an
        # error there for the length of a task
        sink.prepare()
        query_id = offset_log.query_id(str(self._options.checkpoint_location))
        plan, of_position = uuid.uuid4().hex, position.digest
        return [
            StagingTask(
                StagedRead(
                    frame=self._frame,
                    plan=plan,
                    position=of_position,
                    task=number,
                    tasks=len(planned),
                    task_attempt_id="",
                    ranges=ranges,
                    lossy=self._lossy,
                ),
                sink,
                query_id,
            )
            for number, ranges in enumerate(planned)
        ]
