"""The callable that each read task runs: it reads the ranges and applies the step of the query, if any."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, cast

import pyarrow as pa

from kafka_eos_source.model import OffsetRange, ReadTask, ShardRanges
from kafka_eos_source.read.fetch import ReadSettings, read_ranges

if TYPE_CHECKING:
    from kafka_eos_source.in_read.rows import RowsInRead
    from kafka_eos_source.in_read.step import MapInRead, StepInRead
    from kafka_eos_source.state.operator.in_read import OperatorInRead
    from kafka_eos_source.state.options import StateOptions
    from kafka_eos_source.state.vector.in_read import AggregateInRead


@dataclass(frozen=True)
class TaskRead:
    """Reads the ranges of one task; Spark pickles it to the tasks.

    Attributes:
        settings: settings of the read.
        step: what the tasks run on what they read; None leaves the rows unchanged.
        operator: options of the stateful operator; None if the step is no operator.
    """

    settings: ReadSettings
    step: StepInRead | None = None
    operator: StateOptions | None = None

    def __call__(
        self, ranges: Sequence[OffsetRange], task: ReadTask | None = None
    ) -> Iterator[pa.RecordBatch]:
        """Returns Arrow batches for Spark; raises the errors of `read_ranges`.

        Args:
            ranges: the ranges to read.
            task: which task of the batch this is; needed if the step sets bad records aside.
        """
        task, rows = self._read(ranges, task)
        if self.step is None:
            return rows
        return cast("MapInRead | AggregateInRead | RowsInRead", self.step)(rows, task)

    def shards(self, shards: Sequence[ShardRanges], task: ReadTask | None = None) -> Iterator[pa.RecordBatch]:
        """Runs the stateful operator for shards, one after the other; returns Arrow batches for Spark.

        Args:
            shards: the shards, and the ranges of their records.
            task: the task that reads shard 0, if the step sets bad records aside; others differ by the shard.

        Each batch begins with another shard: a process uploads one snapshot at a time, so that a later shard
        may find it busy.
        """
        from kafka_eos_source.spark.worker import running_task

        assert self.operator is not None
        step = cast("OperatorInRead", self.step)
        running = running_task()
        first = int(running.batch_id or 0) % len(shards) if running is not None else 0
        for shard, ranges in (*shards[first:], *shards[:first]):
            of_shard = None if task is None else replace(task, task=shard)
            of_shard, rows = self._read(ranges, of_shard)
            yield from step.run(shard, rows, self.operator, of_shard)

    def mapped(self, ranges: Sequence[OffsetRange], task: ReadTask | None = None) -> Iterator[pa.RecordBatch]:
        """Returns the rows of the function of `map_in_read`, for a task that stages them itself.

        A task without ranges, which only reports that nothing is left to read, does not call the function:
        without ``write=`` there would be no such task.
        """
        if not ranges:
            return iter(())
        task, rows = self._read(ranges, task)
        return cast("MapInRead", self.step).mapped(rows, task)

    def _read(
        self, ranges: Sequence[OffsetRange], task: ReadTask | None
    ) -> tuple[ReadTask | None, Iterator[pa.RecordBatch]]:
        """Returns the task with counts of records, and the records, which are counted as they are read."""
        if task is None:
            return None, read_ranges(self.settings, ranges)
        counts: dict[str, int] = {}
        return replace(task, records=counts), read_ranges(self.settings, ranges, counts)
