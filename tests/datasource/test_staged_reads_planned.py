"""The source plans the tasks whose reports the commit expects, also if Spark repeats a batch later.

Both decide on their own which sources report: the source from the positions that Spark passes to it, the
commit from Spark's offset log.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from pyspark.sql.types import BinaryType, StructField, StructType

from kafka_eos_source.commit.report_checks import check_staged_reads
from kafka_eos_source.datasource.sink import StagingPlan, StagingTask
from kafka_eos_source.errors import DataLossError, StagedPartError
from kafka_eos_source.in_read.step import MapInRead, ReadColumn, ReadColumns
from kafka_eos_source.model import StagedRead
from kafka_eos_source.options.parse import parse_sink_in_read
from kafka_eos_source.options.table import SINK_IN_READ
from kafka_eos_source.plan.source import SourcePlan
from kafka_eos_source.protocol.offset_log import LoggedOffsets, SourcePosition
from tests.plan.source_cluster import A0, B0, Cluster, over_the_wire, plan, read_options

ROWS = StructType([StructField("value", BinaryType())])

Reports = Callable[..., list[StagedRead]]


@pytest.fixture
def reports(tmp_path: Path) -> Reports:
    """Returns a function that returns the reports of one source for a batch without faults."""
    (tmp_path / "metadata").write_text('{"id":"query"}')
    (tmp_path / "offsets").mkdir()
    sink = {
        "kafka.bootstrap.servers": "b:9092",
        "topic": "out",
        "checkpointLocation": str(tmp_path),
    }

    def of_batch(
        source: SourcePlan, start: SourcePosition, end: SourcePosition, frame: str = "f"
    ) -> list[StagedRead]:
        lossy = not source._options.fail_on_data_loss
        staging = StagingPlan(frame, ROWS, parse_sink_in_read(sink), lossy=lossy)
        tasks = staging.tasks(start.to_dict(), end.to_dict(), source.tasks(start, end))
        found = [each._read for each in tasks if isinstance(each, StagingTask)]
        return [replace(each, task_attempt_id=f"{frame}-{each.task}") for each in found]

    return of_batch


def logged(*positions: SourcePosition) -> LoggedOffsets:
    return LoggedOffsets({str(at): each.to_json() for at, each in enumerate(positions)}, "digest")


def test_batch_0_without_records_is_repeated_when_there_are_some(reports: Reports) -> None:
    """Spark asks a new run for the initial offset again, and *latest* has moved by then."""
    cluster = Cluster({A0: (0, 10)})
    end = over_the_wire(plan(cluster).initial())  # Spark logs the first batch even if it is empty
    cluster.logs[A0] = (0, 11)
    again = plan(cluster)
    start = over_the_wire(again.initial())
    assert (start.end, end.end) == ({A0: 11}, {A0: 10})
    check_staged_reads(reports(again, start, end), 0, logged(end), None)


def test_batch_0_of_a_union_is_repeated_if_only_one_source_had_records(reports: Reports) -> None:
    cluster = Cluster({A0: (0, 10), B0: (0, 20)})
    a, b = plan(cluster), plan(cluster, subscribe="b")
    start_of_a, end_of_b = over_the_wire(a.initial()), over_the_wire(b.initial())
    cluster.logs[A0] = (0, 15)
    end_of_a = over_the_wire(a.latest(start_of_a))
    cluster.logs = {A0: (0, 16), B0: (0, 21)}
    a, b = plan(cluster), plan(cluster, subscribe="b")
    found = [
        *reports(a, over_the_wire(a.initial()), end_of_a, "f"),
        *reports(b, over_the_wire(b.initial()), end_of_b, "g"),
    ]
    assert {each.frame for each in found} == {"f"}
    check_staged_reads(found, 0, logged(end_of_a, end_of_b), None)


def test_batch_0_with_records_is_repeated_after_more_have_arrived(reports: Reports) -> None:
    cluster = Cluster({A0: (0, 10)})
    source = plan(cluster)
    start = over_the_wire(source.initial())
    cluster.logs[A0] = (0, 15)
    end = over_the_wire(source.latest(start))
    cluster.logs[A0] = (0, 30)
    again = plan(cluster)
    found = reports(again, over_the_wire(again.initial()), end)
    assert [(each.start, each.end) for read in found for each in read.ranges] == [(10, 15)]
    check_staged_reads(found, 0, logged(end), None)


def test_a_batch_of_topics_that_were_created_again_and_are_empty_needs_no_report(reports: Reports) -> None:
    cluster = Cluster({A0: (0, 10)})
    source = plan(cluster, startingOffsets="earliest", failOnDataLoss="false")
    before = over_the_wire(source.latest(over_the_wire(source.initial())))
    cluster.recreate("a", {A0: (0, 0)})
    end = over_the_wire(source.latest(before))
    assert end != before
    check_staged_reads(reports(source, before, end), 1, logged(end), logged(before))


def test_a_restart_that_accepts_losses_commits_a_batch_that_was_planned_without(reports: Reports) -> None:
    """The error about the deleted topic tells the user to restart with failOnDataLoss=false."""
    cluster = Cluster({A0: (0, 10), B0: (0, 20)})
    source = plan(cluster, subscribe="a,b", startingOffsets="earliest")
    start = over_the_wire(source.initial())
    end = over_the_wire(source.latest(start))
    del cluster.logs[B0]
    again = plan(cluster, subscribe="a,b", startingOffsets="earliest")
    with pytest.raises(DataLossError, match=r"PARTITIONS_GONE.*failOnDataLoss"):
        again.tasks(start, end)
    again = plan(cluster, subscribe="a,b", startingOffsets="earliest", failOnDataLoss="false")
    found = reports(again, start, end)
    assert {each.tp for read in found for each in read.ranges} == {A0}
    check_staged_reads(found, 0, logged(end), None)
    strict = [replace(each, lossy=False) for each in found]
    with pytest.raises(StagedPartError, match="b-0"):
        check_staged_reads(strict, 0, logged(end), None)


def test_the_plan_of_a_source_knows_whether_the_source_accepts_losses(tmp_path: Path) -> None:
    step = MapInRead(ReadColumns((ReadColumn("value", "value"),)), ROWS, None, "frame").to_option()
    sink = {"kafka.bootstrap.servers": "b:9092", "topic": "out", "checkpointLocation": str(tmp_path)}
    stated = {f"{SINK_IN_READ}{name}": value for name, value in sink.items()} | {"step.in.read": step}
    for text, lossy in (("false", True), ("true", False)):
        options = read_options(failOnDataLoss=text, **stated)
        assert StagingPlan.of(options)._lossy is lossy
