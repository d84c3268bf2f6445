"""Which shard a task of an operator works on, and how often it checks the changelog topic."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pyarrow as pa
import pytest

from kafka_eos_source.errors import StateError, UnavailableError
from kafka_eos_source.model import ShardReport, TopicPartition
from kafka_eos_source.protocol import packing
from kafka_eos_source.protocol.packing import CHANGELOG
from kafka_eos_source.spark.packet_senders import record_sender, recorded_senders
from kafka_eos_source.spark.worker import StreamingTask
from kafka_eos_source.state.changelog.topic import ChangelogTopic
from kafka_eos_source.state.model import BatchContext, ShardsBy, StateAccess
from kafka_eos_source.state.operator import task as operator_task
from kafka_eos_source.state.operator.shard import ShardTask
from kafka_eos_source.state.operator.task import Operator
from kafka_eos_source.state.options import parse_state
from kafka_eos_source.state.shard_rows import BATCH_TIME, SHARD


class EmptyProcessor:
    """A processor without output."""

    output = pa.schema([pa.field("n", pa.int64())])

    def process(
        self, batches: Iterator[pa.RecordBatch], state: StateAccess, context: BatchContext
    ) -> Iterator[pa.RecordBatch]:
        return iter(())


@pytest.fixture
def operator() -> Operator:
    return Operator(EmptyProcessor(), "s", 2, parse_state({"kafka.bootstrap.servers": "b:9092"}))


@pytest.fixture
def checked_topics(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Names of the checked changelog topics; each check finds a topic that was recreated."""
    checked: list[str] = []

    def check(_options: object, name: str, shards: int, _shards_by: ShardsBy) -> ChangelogTopic:
        checked.append(name)
        return ChangelogTopic(name, f"id-{len(checked)}", shards, 0)

    monkeypatch.setattr(operator_task, "ensure_changelog", check)
    monkeypatch.setattr(operator_task, "_changelogs", {})
    return checked


@pytest.fixture(autouse=True)
def temp_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    return tmp_path


@contextmanager
def nothing_to_do(task: ShardTask) -> Iterator[ShardReport]:
    """Takes the place of `open_shard` for a batch that the changelog already holds."""
    yield ShardReport(TopicPartition("t", task.identity.shard), "a", 2, "q", "4", 0, 0, skipped=True)


def run(monkeypatch: pytest.MonkeyPatch, task: StreamingTask | None) -> None:
    monkeypatch.setattr(operator_task, "running_task", lambda: task)


def test_a_worker_that_outlives_a_run_checks_the_changelog_again(
    operator: Operator, checked_topics: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Between two runs the topic may be recreated with as many shards: the local state is then invalid."""
    found = []
    for run_id, batch_id, shard in [("r1", 0, 0), ("r1", 1, 1), ("r2", 1, 0), ("r2", 2, 0), ("r3", 2, 1)]:
        task = StreamingTask("q", str(batch_id), run_id, shard)
        found.append(operator._shard_task(task, shard).identity.topic_id)
    assert found == ["id-1", "id-1", "id-2", "id-2", "id-3"]
    assert checked_topics == ["kafka-eos-q-s-changelog"] * 3
    assert len(operator_task._changelogs) == 1, "a process keeps the topics of one run only"


def test_a_worker_checks_the_changelog_again_after_some_minutes(
    operator: Operator, checked_topics: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """If somebody lowers its delete.retention.ms during a run, old databases may have missed deletes."""
    now = [0.0]
    monkeypatch.setattr("time.monotonic", lambda: now[0])
    for now[0], checks in [(1000.0, 1), (1599.0, 1), (1600.0, 2), (1601.0, 2)]:
        operator._shard_task(StreamingTask("q", "0", "r", 0), 0)
        assert len(checked_topics) == checks


@pytest.mark.parametrize(
    ("task", "said", "in_read"),
    [
        (None, "outside a Spark task", False),
        (None, "outside a Spark task", True),
        (StreamingTask("", "", "r"), "outside a streaming query", False),
        (StreamingTask("", "", "r"), "outside a streaming query", True),
        (StreamingTask("q", "0", "r", 2), "there are 2 shards", False),
    ],
)
def test_a_task_outside_a_streaming_query_or_without_a_shard_is_refused(
    operator: Operator,
    checked_topics: list[str],
    monkeypatch: pytest.MonkeyPatch,
    task: StreamingTask | None,
    said: str,
    in_read: bool,
) -> None:
    run(monkeypatch, task)
    with pytest.raises(StateError, match=said):
        operator.in_read(0, iter(())) if in_read else operator(iter(()))
    assert checked_topics == []


def test_a_task_that_reads_runs_a_shard_of_any_number(
    operator: Operator, checked_topics: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The number of the Spark task says nothing about the shard. A skipped batch is not even read."""
    opened: list[ShardTask] = []

    @contextmanager
    def skipped(task: ShardTask) -> Iterator[ShardReport]:
        opened.append(task)
        with nothing_to_do(task) as report:
            yield report

    def unreadable() -> Iterator[pa.RecordBatch]:
        raise AssertionError("the rows are read")
        yield

    run(monkeypatch, StreamingTask("q", "4", "r", 9))
    monkeypatch.setattr(operator_task, "open_shard", skipped)
    assert [each.num_rows for each in operator.in_read(1, unreadable())] == [1]
    assert opened[0].identity.shard == 1
    assert recorded_senders(StreamingTask("q", "4", "r")) == ("kafka-eos-q-s-changelog",)


class Passing(EmptyProcessor):
    """A processor that passes its rows, and then fails if it is told to."""

    def __init__(self, failure: Exception | None = None) -> None:
        self.failure = failure

    def process(
        self, batches: Iterator[pa.RecordBatch], state: StateAccess, context: BatchContext
    ) -> Iterator[pa.RecordBatch]:
        yield from batches
        if self.failure is not None:
            raise self.failure


@pytest.mark.parametrize("fails", ["read", "processor"])
def test_only_errors_of_the_processor_are_reported_as_such(
    operator: Operator, checked_topics: list[str], monkeypatch: pytest.MonkeyPatch, fails: str
) -> None:
    """The commit ignores a failure of the processor if Kafka holds the batch. Spark retries a failed read."""

    @contextmanager
    def opened(task: ShardTask) -> Iterator[SimpleNamespace]:
        yield SimpleNamespace(
            store=None,
            context=BatchContext(0, 1, 2, False, 5),
            may_be_in_kafka=lambda: True,
            failure_report=lambda reason: ShardReport(
                TopicPartition("t", 1), "a", 2, "q", "4", 0, 0, failure=reason
            ),
        )

    def rows() -> Iterator[pa.RecordBatch]:
        if fails == "read":
            raise UnavailableError("no broker answers")
        yield from ()

    run(monkeypatch, StreamingTask("q", "4", "r"))
    monkeypatch.setattr(operator_task, "open_shard", opened)
    monkeypatch.setattr(operator_task, "StateHandle", lambda store: store)
    passing = replace(operator, processor=Passing(ValueError("a bad row")))
    if fails == "read":
        with pytest.raises(UnavailableError):
            list(passing.in_read(1, rows()))
        return
    (packets,) = passing.in_read(1, rows())
    report = packing.unpack_packet(packets.column(CHANGELOG)[0].as_py()).report
    assert report is not None
    assert report.failure == "ValueError: a bad row"


def test_a_task_records_on_its_host_that_its_operator_runs(
    operator: Operator, checked_topics: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    now = StreamingTask("q", "4", "r", 1)
    assert recorded_senders(now) == ()
    run(monkeypatch, now)
    monkeypatch.setattr(operator_task, "open_shard", nothing_to_do)
    for _ in range(2):  # an attempt, and another
        list(operator(iter(())))
    record_sender(now, "another")
    assert recorded_senders(replace(now, partition=7)) == ("another", "kafka-eos-q-s-changelog")
    for other in (
        replace(now, batch_id="5"),
        replace(now, run_id="r2"),
        replace(now, query_id="q2"),
        replace(now, query_id=""),
    ):
        assert recorded_senders(other) == ()
    record_sender(replace(now, batch_id="5"), "another")
    assert recorded_senders(now) == ("kafka-eos-q-s-changelog",), "the other operator runs a later batch"


def test_a_host_that_cannot_write_the_record_only_delays_the_detection_of_a_loss(
    operator: Operator, checked_topics: list[str], monkeypatch: pytest.MonkeyPatch, temp_folder: Path
) -> None:
    (temp_folder / f"kafka-eos-senders-{os.getuid()}").write_text("a file is in the way")
    now = StreamingTask("q", "4", "r", 1)
    run(monkeypatch, now)
    monkeypatch.setattr(operator_task, "open_shard", nothing_to_do)
    assert len(list(operator(iter(())))) == 1
    assert recorded_senders(now) == ()


def test_the_time_of_the_batch_limits_event_times_before_the_first_row_is_read(operator: Operator) -> None:
    """The time comes from Spark and not from a clock, so a batch that runs again makes the same choice."""
    context = BatchContext(0, 0, 2, True, 5)
    batch = pa.record_batch(
        {
            "n": pa.array([1, 2]),
            SHARD: pa.array([0, 0], pa.int32()),
            BATCH_TIME: pa.array([1_700_000_000_123_456] * 2, pa.timestamp("us", "UTC")),
        }
    )
    (rows,) = operator._rows([batch], 0, [], context)
    assert context.event_time_limit_ms == 1_700_000_000_123 + 24 * 3_600_000
    assert rows.schema.names == ["n"]


@pytest.mark.parametrize(("changes", "released"), [(operator_task._MANY_CHANGES, [0]), (10, [])])
def test_a_worker_returns_memory_after_a_task_with_many_changes(
    operator: Operator,
    checked_topics: list[str],
    monkeypatch: pytest.MonkeyPatch,
    changes: int,
    released: list[int],
) -> None:
    """Spark keeps the worker, and the next task would begin with the memory of this one."""
    now, open_shards, found = StreamingTask("q", "4", "r", 1), list[ShardTask](), list[int]()

    @contextmanager
    def opened(task: ShardTask) -> Iterator[SimpleNamespace]:
        report = ShardReport(TopicPartition("t", 1), "a", 2, "q", "4", 0, 0)  # without `records`
        rows = pa.record_batch({"key": pa.array([b"k"] * changes), "value": pa.array([b"v"] * changes)})
        open_shards.append(task)
        yield SimpleNamespace(
            store=None, context=BatchContext(0, 0, 2, True, 5), persist_pending=lambda: (report, [rows])
        )
        open_shards.pop()

    run(monkeypatch, now)
    monkeypatch.setattr(operator_task, "open_shard", opened)
    monkeypatch.setattr(operator_task, "StateHandle", lambda store: store)
    monkeypatch.setattr(operator_task, "release_unused_memory", lambda: found.append(len(open_shards)))
    assert [each.num_rows for each in operator(iter(()))] == [1, 1]
    assert found == released, "after the shard was closed, and after no small task"


def test_a_shard_tells_once_in_a_process_that_rows_are_late(
    operator: Operator,
    checked_topics: list[str],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Otherwise a result that lacks rows, because the query read a backlog without a grace, is a mystery."""
    monkeypatch.setattr(operator_task, "_with_late_rows", set())
    for batch_id, shard, late in [(0, 0, 0), (1, 0, 7), (2, 0, 9), (2, 1, 3)]:
        task = operator._shard_task(StreamingTask("q", str(batch_id), "r", shard), shard)
        context = SimpleNamespace(batch_id=batch_id, metrics={"late_rows": late} if late else {})
        operator_task._warn_of_late_rows(task, context)  # type: ignore[arg-type]
    told = [record.getMessage() for record in caplog.records if "late" in record.getMessage()]
    assert [each.partition(" rows were late")[0].rpartition(" ")[2] for each in told] == ["7", "3"]
    assert all("grace=" in each for each in told)


@pytest.mark.parametrize("how", ["skipped", "fails", "succeeds"])
def test_packets_of_the_read_reach_the_sink_complete_in_any_case(
    operator: Operator, checked_topics: list[str], monkeypatch: pytest.MonkeyPatch, how: str
) -> None:
    """The commit checks them before it looks whether Kafka holds the batch already."""

    @contextmanager
    def opened(task: ShardTask) -> Iterator[Any]:
        if how == "skipped":
            with nothing_to_do(task) as skipped:
                yield skipped
            return
        of = ShardReport(TopicPartition("t", 1), "a", 2, "q", "4", 0, 0)
        yield SimpleNamespace(
            store=None,
            context=BatchContext(0, 1, 2, False, 5),
            may_be_in_kafka=lambda: True,
            failure_report=lambda reason: replace(of, failure=reason),
            persist_pending=lambda: (of, ()),
        )

    packets, reported = packing.WaitingPackets(), []

    def finish() -> None:
        if not reported:
            reported.append(True)
            packets.append(pa.array([b"report"]))

    def rows() -> Iterator[pa.RecordBatch]:
        for number in range(3):
            packets.append(pa.array([b"packet %d" % number]))
            yield pa.record_batch({"n": pa.array([number])})
        finish()

    run(monkeypatch, StreamingTask("q", "4", "r"))
    monkeypatch.setattr(operator_task, "open_shard", opened)
    monkeypatch.setattr(operator_task, "StateHandle", lambda store: store)
    processor = EarlyFailure() if how == "fails" else Passing()
    found = list(replace(operator, processor=processor).in_read(1, rows(), packets, finish))
    passed = [each.column(CHANGELOG)[0].as_py() for each in found if each.column(CHANGELOG)[0].is_valid]
    assert passed[-2] == b"report"
    assert packing.unpack_packet(passed[-1]).task_attempt_id == "a"
    assert passed[:-2] == ([] if how == "skipped" else [b"packet 0", b"packet 1", b"packet 2"])


class EarlyFailure(EmptyProcessor):
    """A processor that fails on its first row."""

    def process(
        self, batches: Iterator[pa.RecordBatch], state: StateAccess, context: BatchContext
    ) -> Iterator[pa.RecordBatch]:
        next(batches)
        raise ValueError("a bad row")
        yield
