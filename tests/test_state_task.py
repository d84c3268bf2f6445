"""What a task of an operator is told, and what it finds out once and keeps."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pyarrow as pa
import pytest

from kafka_eos_source.errors import StateError
from kafka_eos_source.spark.task import StreamingTask
from kafka_eos_source.state.changelog.topic import ChangelogTopic
from kafka_eos_source.state.model import BatchContext, StateAccess
from kafka_eos_source.state.operator import task as operator_task
from kafka_eos_source.state.operator.announce import announce, announced
from kafka_eos_source.state.operator.task import Operator
from kafka_eos_source.state.options import parse_state


class Nothing:
    """A processor."""

    output = pa.schema([pa.field("n", pa.int64())])
    schema = "1"

    def process(
        self, batches: Iterator[pa.RecordBatch], state: StateAccess, context: BatchContext
    ) -> Iterator[pa.RecordBatch]:
        return iter(())


@pytest.fixture
def operator() -> Operator:
    return Operator(Nothing(), "s", 2, parse_state({"kafka.bootstrap.servers": "b:9092"}))


@pytest.fixture
def looked_at(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Each look finds the topic of that name made anew."""
    looks: list[str] = []

    def look(_options: object, name: str, shards: int) -> ChangelogTopic:
        looks.append(name)
        return ChangelogTopic(name, f"id-{len(looks)}", shards, 0)

    monkeypatch.setattr(operator_task, "look_at_changelog", look)
    monkeypatch.setattr(operator_task, "_changelogs", {})
    return looks


@pytest.fixture(autouse=True)
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    return tmp_path


def run(monkeypatch: pytest.MonkeyPatch, task: StreamingTask | None) -> None:
    monkeypatch.setattr(operator_task, "running_task", lambda: task)


def test_a_worker_that_outlives_a_run_looks_at_the_changelog_again(
    operator: Operator, looked_at: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Between two runs it may have been made anew, with as many shards: the local state is worth nothing."""
    found = []
    for run_id, batch_id, shard in [("r1", 0, 0), ("r1", 1, 1), ("r2", 1, 0), ("r2", 2, 0), ("r3", 2, 1)]:
        run(monkeypatch, StreamingTask("q", str(batch_id), run_id, shard))
        found.append(operator._task().identity.topic_id)
    assert found == ["id-1", "id-1", "id-2", "id-2", "id-3"]
    assert looked_at == ["kafka-eos-q-s-changelog"] * 3
    assert len(operator_task._changelogs) == 1, "a process keeps one run's"


@pytest.mark.parametrize(
    ("task", "said"),
    [
        (None, "outside a Spark task"),
        (StreamingTask("", "", "r"), "outside a streaming query"),
        (StreamingTask("q", "0", "r", 2), "there are 2 shards"),
    ],
)
def test_a_task_that_is_none_of_a_streaming_query_or_shard_is_refused(
    operator: Operator,
    looked_at: list[str],
    monkeypatch: pytest.MonkeyPatch,
    task: StreamingTask | None,
    said: str,
) -> None:
    run(monkeypatch, task)
    with pytest.raises(StateError, match=said):
        operator._task()
    assert looked_at == []


def test_a_task_says_on_its_machine_that_its_operator_runs(
    operator: Operator, looked_at: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    now = StreamingTask("q", "4", "r", 1)
    assert announced(now) == ()
    run(monkeypatch, now)
    for _ in range(2):  # an attempt, and another
        operator._task()
    announce(now, "another")
    assert announced(replace(now, partition=7)) == ("another", "kafka-eos-q-s-changelog")
    for other in (
        replace(now, batch_id="5"),
        replace(now, run_id="r2"),
        replace(now, query_id="q2"),
        replace(now, query_id=""),
    ):
        assert announced(other) == ()
    announce(replace(now, batch_id="5"), "another")
    assert announced(now) == ("kafka-eos-q-s-changelog",), "the other one has gone on"


def test_a_machine_without_room_only_makes_it_later_that_a_loss_is_noticed(
    operator: Operator, looked_at: list[str], monkeypatch: pytest.MonkeyPatch, machine: Path
) -> None:
    (machine / f"kafka-eos-operators-{os.getuid()}").write_text("a file is in the way")
    now = StreamingTask("q", "4", "r", 1)
    run(monkeypatch, now)
    assert operator._task().identity.shard == 1
    assert announced(now) == ()
