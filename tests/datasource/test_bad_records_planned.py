"""A source whose tasks set bad records aside says in each task which task of the batch it is."""

from __future__ import annotations

import pickle
from collections.abc import Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any, cast

import pytest
from pyspark.sql.types import BinaryType, StructField, StructType

from kafka_eos_source.datasource.reader import stream_reader
from kafka_eos_source.in_read.bad_records import DEAD_LETTER, FAIL, OnBad
from kafka_eos_source.in_read.rows import RowsInRead
from kafka_eos_source.in_read.step import ReadColumn, ReadColumns
from kafka_eos_source.model import OffsetRange, ReadTask, TopicPartition
from kafka_eos_source.options.parse import parse_read


@dataclass(frozen=True)
class Unchanged:
    rows: StructType


def tasks_of(on_bad: OnBad, planned: Sequence[Sequence[OffsetRange]]) -> list[Any]:
    """Returns the tasks of a batch of a source, as they arrive in the executors."""
    columns = ReadColumns((ReadColumn("value", "value"),))
    rows = StructType([StructField("value", BinaryType())])
    step = RowsInRead.of(cast(Any, Unchanged(rows)), columns, "does nothing", on_bad=on_bad)
    options = {"subscribe": "t", "kafka.bootstrap.servers": "h:1", "step.in.read": step.to_option()}
    reader = stream_reader(parse_read(options, streaming=True))
    cast(Any, reader)._opened = SimpleNamespace(tasks=lambda start, end: planned)
    return list(pickle.loads(pickle.dumps(reader.partitions({}, {}))))


RANGES = [(OffsetRange(TopicPartition("t", number), 0, 10),) for number in range(3)]


def test_tasks_know_their_number_and_how_many_there_are() -> None:
    first, second = tasks_of(DEAD_LETTER, RANGES), tasks_of(DEAD_LETTER, RANGES[:2])
    plan = first[0].task.plan
    assert [each.ranges for each in first] == RANGES
    assert [each.task for each in first] == [ReadTask(first[0].task.frame, plan, n, 3) for n in range(3)]
    assert second[0].task.plan != plan


@pytest.mark.parametrize(("on_bad", "tasks"), [(DEAD_LETTER, 1), (FAIL, 0)])
def test_a_batch_without_records_has_a_task_that_only_reports(on_bad: OnBad, tasks: int) -> None:
    found = tasks_of(on_bad, [])
    assert [(each.ranges, each.task.tasks) for each in found] == [((), 1)] * tasks


def test_tasks_of_other_sources_are_as_before() -> None:
    assert [each.task for each in tasks_of(FAIL, RANGES)] == [None] * 3
