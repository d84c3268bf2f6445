"""Spark's reader interfaces, streaming and batch: `plan` on the driver, `read` in the tasks.

Of a stream there is one reader in one Python process of the driver, for the whole run. Spark pickles it to
the tasks, so it holds no client: those are made where they are used. Nor do tasks import what only a driver
uses: each executor's Python processes import what is here, before their first batch.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

import pyarrow as pa
from pyspark.sql.datasource import DataSourceReader, DataSourceStreamReader, InputPartition

from kafka_eos_source.spark.worker import task_begins

if TYPE_CHECKING:
    from pyspark.sql.datasource import Filter
    from pyspark.sql.types import StructType

    from kafka_eos_source.options.checked import ReadOptions
    from kafka_eos_source.plan.driver import Planning
    from kafka_eos_source.plan.split import Task

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
        """Older PySpark has no such trigger for Python sources: it reads all there is in one batch."""


#: The largest number of rows that Spark's limit can have.
_NO_LIMIT = 2**63 - 1


def rows_of(options: ReadOptions) -> StructType:
    """The schema of what is read. Raises: InvalidOptionError: of an aggregate that is none."""
    from kafka_eos_source.read.settings import schema_of

    return schema_of(options)


def stream_reader(options: ReadOptions) -> DataSourceStreamReader:
    """The source of a streaming query. No broker is asked yet."""
    return _StreamReader(options) if ReadLimit is not None else _UnlimitedStreamReader(options)


def batch_reader(options: ReadOptions) -> DataSourceReader:
    """The source of ``spark.read``. No broker is asked yet."""
    return _FilteringBatchReader(options) if options.push_filters else _BatchReader(options)


class _Task(InputPartition):
    """Ranges of one task."""

    def __init__(self, ranges: Task) -> None:
        super().__init__(None)
        self.ranges = ranges


class _Reading:
    """What stream and batch readers share."""

    def __init__(self, options: ReadOptions) -> None:
        from kafka_eos_source.read.settings import task_read

        self._options = options
        self._task_read = task_read(options)

    def __getstate__(self) -> dict[str, Any]:
        """What tasks need; a client cannot be pickled."""
        return {"_task_read": self._task_read}

    def __setstate__(self, state: dict[str, Any]) -> None:
        """In a task, before its ranges have come."""
        task_begins()
        self.__dict__.update(state)


class _StreamReaderBase(_Reading, DataSourceStreamReader):
    def __init__(self, options: ReadOptions) -> None:
        super().__init__(options)
        self._made: Planning | None = None

    def initialOffset(self) -> dict[str, Any]:
        return self._planning().initial()

    def partitions(self, start: dict[str, Any], end: dict[str, Any]) -> Sequence[InputPartition]:
        return [_Task(task) for task in self._planning().tasks(start, end)]

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        assert isinstance(partition, _Task)
        return self._task_read(partition.ranges)

    def stop(self) -> None:
        if self._made is not None:
            self._made.close()

    def _planning(self) -> Planning:
        if self._made is None:
            self._made = _plan(self._options)
        return self._made


class _StreamReader(SupportsTriggerAvailableNow, _StreamReaderBase):
    """For PySpark 4.2 and newer, where Spark tells start and limit."""

    def latestOffset(self, start: dict[str, Any], limit: Any) -> dict[str, Any]:
        return self._planning().latest(start, once=isinstance(limit, ReadAllAvailable))

    def getDefaultReadLimit(self) -> Any:
        """What Spark passes to `latestOffset`, which applies the limits of the options itself.

        It is never `ReadAllAvailable`: so Spark passes that with Trigger.Once only.
        """
        return ReadMaxRows(self._options.max_offsets_per_trigger or _NO_LIMIT)

    def reportLatestOffset(self) -> dict[str, Any] | None:
        return self._planning().available()

    def prepareForTriggerAvailableNow(self) -> None:
        self._planning().stop_at_latest()


class _UnlimitedStreamReader(_StreamReaderBase):
    """For PySpark 4.0 and 4.1, where Spark asks for the latest offset and does not say since when.

    Seen on 4.0: a new query is asked ``latestOffset``, then ``initialOffset``; a restarted one is first told
    the end of its last batch by ``partitions(end, end)``. So the first call tells which it is, and where a
    new one begins is fixed before its end is looked up. A replay of batch 0 asks ``initialOffset`` between.

    Spark does not tell the trigger either. With Trigger.Once and Trigger.AvailableNow it asks only once, so a
    jump would end the run before it read anything. The source never jumps here.
    """

    def __init__(self, options: ReadOptions) -> None:
        super().__init__(options)
        self._initial: dict[str, Any] | None = None
        self._position: dict[str, Any] | None = None

    def initialOffset(self) -> dict[str, Any]:
        return self._begin()

    def latestOffset(self) -> dict[str, Any]:  # type: ignore[override]
        return self._planning().latest(self._position or self._begin(), may_jump=False)

    def _begin(self) -> dict[str, Any]:
        if self._initial is None:
            self._initial = self._planning().initial()
        return self._initial

    def partitions(self, start: dict[str, Any], end: dict[str, Any]) -> Sequence[InputPartition]:
        planned = super().partitions(start, end)
        self._position = end
        return planned


class _BatchReader(_Reading, DataSourceReader):
    def partitions(self) -> Sequence[InputPartition]:
        planning = _plan(self._options)
        try:
            return [_Task(task) for task in planning.batch(self._pushed())]
        finally:
            planning.close()

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        # a read of nothing gets no task of ours, but one from Spark
        return self._task_read(partition.ranges if isinstance(partition, _Task) else ())

    def _pushed(self) -> Sequence[Filter]:
        return ()


class _FilteringBatchReader(_BatchReader):
    """Only with ``pushFilters``: Spark refuses any reader that has `pushFilters` while its conf is off."""

    def __init__(self, options: ReadOptions) -> None:
        super().__init__(options)
        self._filters: list[Filter] = []

    def pushFilters(self, filters: list[Filter]) -> Iterator[Filter]:
        """Narrows what is fetched; Spark still applies every filter, so nothing here can lose a row."""
        self._filters = filters
        yield from filters

    def _pushed(self) -> Sequence[Filter]:
        return self._filters


def _plan(options: ReadOptions) -> Planning:
    from kafka_eos_source.plan.driver import Planning

    return Planning.of(options)
