"""Spark's reader interfaces for streams and batch reads.

The driver plans (package `plan`) and the tasks read (package `read`). A stream has one reader, which lives in
a Python process of the driver for the whole run. Spark pickles it to the tasks, so it contains no Kafka
client. Every Python worker imports this module before its first task, so code that only the driver needs is
imported inside the functions that use it.
"""

from __future__ import annotations

import uuid
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, cast

import pyarrow as pa
from pyspark.sql.datasource import DataSourceReader, DataSourceStreamReader, InputPartition

from kafka_eos_source.datasource.short_errors import short_errors, with_short_errors
from kafka_eos_source.model import ReadTask
from kafka_eos_source.spark.worker import task_begins

if TYPE_CHECKING:
    from pyspark.sql.datasource import Filter

    from kafka_eos_source.datasource.sink import StagingPlan, StagingTask
    from kafka_eos_source.model import ShardRanges
    from kafka_eos_source.options.checked import ReadOptions
    from kafka_eos_source.plan.planner import Planning
    from kafka_eos_source.plan.split import Task
    from kafka_eos_source.spark.packet_senders import PlannedReads
    from kafka_eos_source.state.operator.in_read import OperatorInRead

try:  # PySpark 4.2
    from pyspark.sql.streaming.datasource import (
        ReadAllAvailable,
        ReadLimit,
        ReadMaxRows,
        SupportsTriggerAvailableNow,
    )
except ImportError:
    ReadLimit = ReadAllAvailable = ReadMaxRows = None  # type: ignore[misc,assignment]

    class SupportsTriggerAvailableNow:  # type: ignore[no-redef]
        """Stands in on older PySpark, where Trigger.AvailableNow reads everything in one batch."""


#: The largest number of rows that a `ReadLimit` of Spark can have.
_NO_LIMIT = 2**63 - 1


def stream_reader(options: ReadOptions) -> DataSourceStreamReader:
    """Returns the source of a streaming query, without contacting a broker."""
    return _StreamReader(options) if ReadLimit is not None else _UnlimitedStreamReader(options)


def batch_reader(options: ReadOptions) -> DataSourceReader:
    """Returns the source of a batch read, without contacting a broker."""
    return _FilteringBatchReader(options) if options.push_filters else _BatchReader(options)


class _Task(InputPartition):
    """Offset ranges that one task reads, and which task it is if its step sets bad records aside."""

    def __init__(self, ranges: Task, task: ReadTask | None = None) -> None:
        super().__init__(None)
        self.ranges = ranges
        self.task = task


class _ShardTask(InputPartition):
    """Shards of a stateful operator that one task runs, and the offset ranges of their records.

    If the step sets bad records aside, each shard counts as a task, and ``task`` is the first.
    """

    def __init__(self, shards: tuple[ShardRanges, ...], task: ReadTask | None = None) -> None:
        super().__init__(None)
        self.shards = shards
        self.task = task


class _Reader:
    """Base of all readers: what is pickled to the tasks."""

    def __init__(self, options: ReadOptions) -> None:
        from kafka_eos_source.read.settings import task_read

        self._options = options
        self._task_read = task_read(options)

    def __getstate__(self) -> dict[str, Any]:
        """Pickles only what tasks need; Kafka clients cannot be pickled."""
        return {"_task_read": self._task_read}

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Unpickles the reader in a task, before the task receives its ranges."""
        task_begins()
        self.__dict__.update(state)


class _StreamReaderBase(_Reader, DataSourceStreamReader):
    def __init__(self, options: ReadOptions) -> None:
        super().__init__(options)
        self._opened: Planning | None = None
        self._staging: StagingPlan | None = None
        self._operator: OperatorInRead | None = None
        self._planned_reads: PlannedReads | None = None
        if options.operator is not None:
            self._operator = cast("OperatorInRead", self._task_read.step)
        if options.sink is not None:  # most reads do not need the module
            from kafka_eos_source.datasource.sink import StagingPlan

            self._staging = StagingPlan.of(options)

    @short_errors
    def initialOffset(self) -> dict[str, Any]:
        return self._planning().initial()

    @short_errors
    def partitions(self, start: dict[str, Any], end: dict[str, Any]) -> Sequence[InputPartition]:
        operator = self._operator
        if operator is not None:
            tasks = self._planning().shard_tasks(start, end, operator.shards, operator.parallelism)
            task = self._first_task(operator.shards, end)
            return [_ShardTask(shards, task) for shards in tasks]
        planned = self._planning().tasks(start, end)
        if self._staging is not None:
            return self._staging.tasks(start, end, planned)
        first = self._first_task(len(planned) or 1, end)
        if first is None:
            return [_Task(ranges) for ranges in planned]
        # A batch without records has a task too, so that the sink gets a report of each batch.
        return [_Task(ranges, replace(first, task=number)) for number, ranges in enumerate(planned or [()])]

    def _first_task(self, tasks: int, end: dict[str, Any]) -> ReadTask | None:
        """Returns the first of some tasks of a new plan; None if the step sets no bad records aside.

        Args:
            tasks: number of tasks.
            end: position of the source at the end of the batch.
        """
        step = self._task_read.step
        if step is None or not step.sets_aside:
            return None
        frame, application_id = step.frame_of_bad_records, self._options.application_id
        if application_id is not None:
            from kafka_eos_source.protocol.offset_log import SourcePosition
            from kafka_eos_source.spark.packet_senders import PlannedReads

            if self._planned_reads is None:
                self._planned_reads = PlannedReads(application_id, frame)
            self._planned_reads.plan(SourcePosition.from_dict(end).digest)
        return ReadTask(frame, uuid.uuid4().hex, 0, tasks)

    @short_errors
    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        if isinstance(partition, _Task):
            return with_short_errors(self._task_read(partition.ranges, partition.task))
        if isinstance(partition, _ShardTask):
            return with_short_errors(self._task_read.shards(partition.shards, partition.task))
        staging = cast("StagingTask", partition)
        step = self._task_read.step
        task = None
        if step is not None and step.sets_aside:
            task = staging.read_task(step.frame_of_bad_records)
        return with_short_errors(staging.run(self._task_read.mapped(staging.ranges, task)))

    def stop(self) -> None:
        if self._planned_reads is not None:
            self._planned_reads.close()
        if self._staging is not None:
            self._staging.close()
        if self._opened is not None:
            self._opened.close()

    def _planning(self) -> Planning:
        if self._opened is None:
            self._opened = _open_planning(self._options, observed=True)
        return self._opened


class _StreamReader(SupportsTriggerAvailableNow, _StreamReaderBase):
    """Stream reader for PySpark 4.2 and newer, which passes the start and a limit to `latestOffset`."""

    @short_errors
    def latestOffset(self, start: dict[str, Any], limit: Any) -> dict[str, Any]:
        return self._planning().latest(start, once=isinstance(limit, ReadAllAvailable))

    def getDefaultReadLimit(self) -> Any:
        """Returns the limit that Spark passes to `latestOffset`, which applies the options itself.

        It is never `ReadAllAvailable`, so that `latestOffset` receives that only with Trigger.Once.
        """
        return ReadMaxRows(self._options.max_offsets_per_trigger or _NO_LIMIT)

    def reportLatestOffset(self) -> dict[str, Any] | None:
        return self._planning().available()

    @short_errors
    def prepareForTriggerAvailableNow(self) -> None:
        self._planning().stop_at_latest()


class _UnlimitedStreamReader(_StreamReaderBase):
    """Stream reader for PySpark 4.0 and 4.1, which call `latestOffset` without the start of the batch.

    PySpark 4.0 calls ``latestOffset`` and then ``initialOffset`` on a new query. On a restarted query it
    first calls ``partitions(end, end)`` with the end of the last batch. So the first call shows whether the
    query is new, and the reader fixes the start of a new query before it determines the end. If Spark repeats
    batch 0, it calls ``initialOffset`` in between.

    The reader does not know the trigger either. With Trigger.Once and Trigger.AvailableNow, Spark calls
    ``latestOffset`` only once, so a jump would end the run before it reads anything. Therefore it never
    jumps.
    """

    def __init__(self, options: ReadOptions) -> None:
        super().__init__(options)
        self._initial: dict[str, Any] | None = None
        self._position: dict[str, Any] | None = None

    @short_errors
    def initialOffset(self) -> dict[str, Any]:
        return self._start_of_query()

    @short_errors
    def latestOffset(self) -> dict[str, Any]:  # type: ignore[override]
        return self._planning().latest(self._position or self._start_of_query(), may_jump=False)

    def _start_of_query(self) -> dict[str, Any]:
        if self._initial is None:
            self._initial = self._planning().initial()
        return self._initial

    def partitions(self, start: dict[str, Any], end: dict[str, Any]) -> Sequence[InputPartition]:
        planned = super().partitions(start, end)
        self._position = end
        return planned


class _BatchReader(_Reader, DataSourceReader):
    @short_errors
    def partitions(self) -> Sequence[InputPartition]:
        planning = _open_planning(self._options)
        try:
            return [_Task(task) for task in planning.batch(self._pushed())]
        finally:
            planning.close()

    @short_errors
    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        # if `partitions` returns no task, Spark still runs one, with its own partition
        ranges = partition.ranges if isinstance(partition, _Task) else ()
        return with_short_errors(self._task_read(ranges))

    def _pushed(self) -> Sequence[Filter]:
        return ()


class _FilteringBatchReader(_BatchReader):
    """Batch reader for the option ``pushFilters``.

    It is a separate class, because Spark refuses a reader with the method `pushFilters` unless
    ``spark.sql.python.filterPushdown.enabled`` is set.
    """

    def __init__(self, options: ReadOptions) -> None:
        super().__init__(options)
        self._filters: list[Filter] = []

    def pushFilters(self, filters: list[Filter]) -> Iterator[Filter]:
        """Stores the filters to narrow the offset ranges. Spark still applies all of them to the rows."""
        self._filters = filters
        yield from filters

    def _pushed(self) -> Sequence[Filter]:
        return self._filters


def _open_planning(options: ReadOptions, *, observed: bool = False) -> Planning:
    from kafka_eos_source.plan.planner import Planning

    return Planning.of(options, observed=observed)
