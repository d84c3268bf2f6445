"""What becomes of the rows of a batch that a sink outside Kafka refuses when it prepares the batch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from pyspark.sql.types import IntegerType, StructField, StructType

from kafka_eos_source.commit import open_sinks, two_phase
from kafka_eos_source.commit.refused_rows import BatchRows
from kafka_eos_source.commit.two_phase import Refusal
from kafka_eos_source.errors import InvalidRecordError, InvalidSchemaError, RestartQueryError
from kafka_eos_source.observe.trace import Trace
from kafka_eos_source.options.parse import parse_write
from kafka_eos_source.sinks.contract import RowRefusal
from kafka_eos_source.sinks.specs import SinkSpec
from kafka_eos_source.stage import files
from kafka_eos_source.stage.files import StagingFolder
from kafka_eos_source.stage.parts import StagedRows
from kafka_eos_source.stage.task import StagedTask
from tests.support.staged_task import FILES, FRAME, Task, frame


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
    wanted = RestartQueryError if sets_aside else InvalidRecordError
    with pytest.raises(
        wanted, match=r"refuses (at least )?3 of 4 rows of batch 7: column 'id': duplicate key; no; no\."
    ) as found:
        batch.without(Refusal("table", REFUSED, 4))
    assert ("start the query again" in found.value.fix) is sets_aside
    assert ("at least 3" in found.value.message) is not sets_aside


def test_rows_that_only_some_tasks_kept_stop_the_query(task: Task, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two sources plan the batch, and only the second one asked the sink after a constraint was added."""
    early = replace(task, refusing=()).staging.batches([frame([{"id": 0}, {"id": 1}])])
    late = task.staging.batches([frame([{"id": 2}, {"id": 3}])])
    batch = batch_of(task, [early, late], monkeypatch)
    with pytest.raises(RestartQueryError, match="refuses 3 of 4 rows of batch 7") as found:
        batch.without(Refusal("table", REFUSED, 4))
    assert "made from the record of topic in, partition 0, offset 20" in found.value.message
    assert batch.tasks == [early, late]
    _, sinks = batch.without(Refusal("table", {2: RowRefusal("no")}, 4))
    assert ids(sinks, "table") == [0, 1, 3], "rows of a task that kept its rows can be set aside"


@pytest.mark.parametrize(
    ("columns", "field", "wanted"),
    [
        (
            ("value", "id"),
            None,
            "column 'id' of type int64, another has column 'value' of type string",
        ),
        (("id",), None, "column 'value' of type string, another has no column"),
        (
            ("id", "value"),
            StructField("id", IntegerType()),
            "column 'id' of type int64, another has column 'id' of type int32",
        ),
    ],
)
def test_frames_of_a_union_that_differ_in_the_columns_of_a_sink_are_refused(
    task: Task,
    monkeypatch: pytest.MonkeyPatch,
    columns: tuple[str, ...],
    field: StructField | None,
    wanted: str,
) -> None:
    """The sink would get batches of another schema than the one that it knows."""
    fields = [field if field is not None and each.name == field.name else each for each in FRAME]
    sinks = (SinkSpec("table", "memory", columns=columns), FILES)
    other = replace(task, frame=StructType(fields), sinks=sinks, rules={})
    given = frame([{"id": 1}])
    if field is not None:
        given = given.set_column(2, "id", given["id"].cast("int32"))
    tasks = [task.staging.batches([frame([{"id": 0}])]), other.staging.batches([given])]
    with pytest.raises(InvalidSchemaError, match=f"sink 'table': where one has {wanted}") as found:
        batch_of(task, tasks, monkeypatch)
    assert "sink.table.columns" in found.value.fix
