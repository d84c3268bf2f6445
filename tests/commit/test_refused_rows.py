"""What becomes of the rows of a batch that a sink outside Kafka refuses when it prepares the batch."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from kafka_eos_source.commit import open_sinks, two_phase
from kafka_eos_source.commit.refused_rows import BatchRows
from kafka_eos_source.commit.two_phase import Refusal
from kafka_eos_source.errors import InvalidRecordError, SinkFailedError
from kafka_eos_source.observe.trace import Trace
from kafka_eos_source.options.parse import parse_write
from kafka_eos_source.sinks.contract import RowRefusal
from kafka_eos_source.stage import files
from kafka_eos_source.stage.files import StagingFolder
from kafka_eos_source.stage.parts import StagedRows
from kafka_eos_source.stage.task import StagedTask
from tests.support.staged_task import Task, frame


@pytest.fixture
def task(tmp_path: Path) -> Task:
    return Task(StagingFolder.at(str(tmp_path / "staging")))


def batch_of(task: Task, tasks: Sequence[StagedTask], monkeypatch: pytest.MonkeyPatch) -> BatchRows:
    """Returns the rows of a batch, whose sinks are memories."""
    monkeypatch.setattr(open_sinks, "cluster_id", lambda _options: "cluster")
    sinks = {"sinks": "table,files", "sink.table.type": "memory", "sink.files.type": "memory"}
    given = {"kafka.bootstrap.servers": "b:9092", "topic": "out", "checkpointLocation": task.folder.location}
    options = parse_write({**given, **sinks}, streaming=True)
    staged = StagedRows(task.folder, "7", [part for each in tasks for part in each.parts])
    found = BatchRows(options, task.folder, "app", 7, tasks, staged, Trace())
    plan = task.staging.plan
    assert plan is not None
    found.for_sinks(plan, lambda: task.staging)
    return found


def ids(sinks: two_phase.Sinks, name: str) -> list[int]:
    return [each for batch in sinks.staged[name].batches() for each in batch["id"].to_pylist()]


REFUSED = {1: RowRefusal("duplicate key.", "id"), 2: RowRefusal("no"), 3: RowRefusal("no")}


def test_only_tasks_whose_rows_are_refused_stage_them_again(
    task: Task, monkeypatch: pytest.MonkeyPatch
) -> None:
    task.inline = 0
    tasks = [task.staging.batches([frame([{"id": first}, {"id": first + 1}])]) for first in (0, 2, 4)]
    batch = batch_of(task, tasks, monkeypatch)
    read: list[str] = []
    usual = files.StagingFolder.read

    def counted(self: StagingFolder, name: str, part: Any, *more: Any) -> Any:
        read.append(part.name)
        return usual(self, name, part, *more)

    monkeypatch.setattr(files.StagingFolder, "read", counted)
    staged, sinks = batch.without(Refusal("table", {3: RowRefusal("no")}, 6))
    untouched = [name for each in (tasks[0], tasks[2]) for name in each.files]
    assert not set(untouched) & set(read), "parts that were verified are not read again"
    assert batch.tasks[0] is tasks[0]
    assert batch.tasks[1] is not tasks[1]
    assert ids(sinks, "table") == ids(sinks, "files") == [0, 1, 2, 4, 5]
    assert staged.rows == 6, "and one dead letter"
    again, sinks = batch.without(Refusal("files", {0: RowRefusal("no"), 4: RowRefusal("no")}, 5))
    assert ids(sinks, "table") == [1, 2, 4]
    assert again.rows == 6


def test_a_sink_whose_rows_are_all_refused_has_none(task: Task, monkeypatch: pytest.MonkeyPatch) -> None:
    batch = batch_of(task, [task.staging.batches([frame([{"id": 1}])])], monkeypatch)
    staged, sinks = batch.without(Refusal("table", {0: RowRefusal("no")}, 1))
    assert (staged.rows, dict(sinks.staged)) == (1, {})


def test_a_refused_row_that_fails_the_batch_is_named_with_its_origin(
    task: Task, monkeypatch: pytest.MonkeyPatch
) -> None:
    task.sets_aside = False
    tasks = [task.staging.batches([frame([{"id": 0}, {"id": 1}])]) for _ in range(2)]
    batch = batch_of(task, tasks, monkeypatch)
    with pytest.raises(InvalidRecordError) as refused:
        batch.without(Refusal("table", {**REFUSED, 0: RowRefusal("first")}, 4))
    assert refused.value.message == (
        "sink 'table' refuses 4 of 4 rows of batch 7: "
        "first (made from the record of topic in, partition 0, offset 0); "
        "column 'id': duplicate key (made from the record of topic in, partition 0, offset 10); "
        "no (made from the record of topic in, partition 0, offset 0); "
        "and 1 more. Nothing of the batch was committed."
    )
    assert "onInvalidRecord" in refused.value.fix


def test_without_setting_aside_only_rows_of_sinks_that_may_refuse_some_are_kept(
    task: Task, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another sink counts its rows otherwise, so the error names no origin instead of a wrong one."""
    task.sets_aside = False
    rows = [{"id": 0, "sink": "files"}, {"id": 1, "sink": "table"}, {"id": 2, "sink": "files"}]
    batch = batch_of(task, [task.staging.batches([frame(rows)])], monkeypatch)
    with pytest.raises(
        InvalidRecordError, match=r"'files' refuses at least 1 of 2 rows of batch 7: no\. Nothing"
    ):
        batch.without(Refusal("files", {1: RowRefusal("no")}, 2))


@pytest.mark.parametrize("sets_aside", [True, False])
def test_rows_that_were_not_kept_stop_the_query(
    task: Task, monkeypatch: pytest.MonkeyPatch, sets_aside: bool
) -> None:
    """Somebody added a constraint while the query runs: the next start asks the sink again."""
    task.refusing, task.sets_aside = (), sets_aside
    batch = batch_of(task, [task.staging.batches([frame([{"id": each} for each in range(4)])])], monkeypatch)
    wanted = SinkFailedError if sets_aside else InvalidRecordError
    with pytest.raises(
        wanted, match=r"refuses (at least )?3 of 4 rows of batch 7: column 'id': duplicate key; no; no\."
    ) as found:
        batch.without(Refusal("table", REFUSED, 4))
    assert ("restart the query" in found.value.fix) is sets_aside
    assert ("at least 3" in found.value.message) is not sets_aside
