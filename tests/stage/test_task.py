"""A task checks its rows for all outputs; the driver stages them again without those that a sink refused."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from pyspark.sql.types import StructType

from kafka_eos_source.errors import InvalidRecordError, StagedPartError
from kafka_eos_source.model import ReadTask
from kafka_eos_source.protocol.packing import BadRecordsOfTask
from kafka_eos_source.protocol.records import DeadLetter
from kafka_eos_source.sinks.contract import RowRefusal, StageContext
from kafka_eos_source.sinks.memory import MemorySink
from kafka_eos_source.sinks.row_checks import NotNull
from kafka_eos_source.sinks.specs import SinkSpec
from kafka_eos_source.spark.schema import ORIGIN
from kafka_eos_source.stage.fanout import Plan, SinkPart
from kafka_eos_source.stage.files import StagingFolder
from kafka_eos_source.stage.staging import SealingPlan
from kafka_eos_source.stage.task import KeptRows, StagedTask
from tests.support.staged_task import FRAME, Task, frame


@pytest.fixture
def task(tmp_path: Path) -> Task:
    return Task(StagingFolder.at(str(tmp_path / "staging")))


# -- rules of all outputs --------------------------------------------------------------------------


def test_a_row_that_one_output_cannot_hold_leaves_all_and_becomes_one_letter(task: Task) -> None:
    rows = [{"id": 1}, {"id": 2, "value": "too long"}, {"id": 3}]
    staged = task.staging.batches([frame(rows)])
    assert task.records(staged) == ["v1", "v3"]
    assert task.of_sink("table", staged) == task.of_sink("files", staged) == [1, 3]
    (letter,) = task.letters(staged)
    assert (letter.key, letter.value) == (b"k", b"too long")
    about = letter.about
    assert (about.error, about.sink, about.holds) == ("InvalidRecord", "table", "output")
    assert about.message == ("column 'value' (text) is longer than 5 characters (varchar(5) of table 't').")
    assert (about.origin_topic, about.origin_offset, about.target_topic) == ("in", 20, "out")


def test_a_row_that_kafka_cannot_hold_reaches_no_other_system(task: Task) -> None:
    task.rules = {}
    task.refusing = ()
    staged = task.staging.batches([frame([{"id": 1, "value": "x" * 20_000}, {"id": 2}])])
    assert task.of_sink("table", staged) == task.of_sink("files", staged) == [2]
    (letter,) = task.letters(staged)
    assert (letter.about.error, letter.about.sink) == ("RecordTooLarge", None)


def test_rows_are_checked_by_the_rules_of_their_destination_only(task: Task) -> None:
    long = {"value": "too long"}
    rows = [
        {"id": 1, "sink": "files", **long},
        {"id": 2, "sink": "kafka", **long},
        {"id": 3, "sink": "table", **long},
        {"id": 4, "sink": "files", "value": "x" * 20_000},
        {"id": 5, "sink": None, **long},
    ]
    staged = task.staging.batches([frame(rows)])
    assert task.records(staged) == ["too long"]
    assert task.of_sink("files", staged) == [1, 4]
    assert task.of_sink("table", staged) == []
    first, second = task.letters(staged)
    assert (second.key, second.value, second.about.target_topic) == (b"k", b"too long", "out")
    assert (first.key, first.about.target_topic, first.about.holds) == (None, None, "output")
    assert json.loads(first.value or b"") == {"key": "k", "value": "too long", "id": 3}


def test_a_letter_of_a_row_without_a_record_has_its_columns(task: Task) -> None:
    """A query that writes only to sinks outside Kafka has no key and no value of a record."""
    task.kafka = False
    staged = task.staging.batches([frame([{"id": 1, "value": "too long"}, {"id": 2}])])
    assert staged.part.rows == 0
    assert task.of_sink("table", staged) == [2]
    (letter,) = task.letters(staged)
    assert letter.key is None
    assert json.loads(letter.value or b"") == {"key": "k", "value": "too long", "id": 1}
    assert (letter.about.origin_offset, letter.about.target_topic, letter.about.value_bytes) == (
        10,
        None,
        None,
    )


def test_text_that_is_not_utf8_makes_the_letter_of_a_row_incomplete(task: Task) -> None:
    """A replay refuses such a letter: its JSON does not have the bytes of the row."""
    task.kafka = False
    batch = frame([{"id": 1}])
    bad = pa.array([b"too long \xff"]).view(pa.string())
    batch = batch.set_column(1, batch.schema.field(1), bad)
    (letter,) = task.letters(task.staging.batches([batch]))
    assert json.loads(letter.value or b"")["value"] == "too long \ufffd"
    assert letter.about.value_bytes == len(letter.value or b"")


def test_without_the_option_the_error_names_sink_column_rule_and_origin(task: Task) -> None:
    task.sets_aside = False
    task.rules = {"table": (NotNull(column="value", of="NOT NULL of table 't'"),)}
    with pytest.raises(InvalidRecordError) as refused:
        task.staging.batches([frame([{"id": 1}, {"id": 2, "value": None}])])
    assert refused.value.message == (
        "sink 'table' cannot hold row 1 of the Arrow batch, made from the record of topic in, partition 0, "
        "offset 20: column 'value' (text) is null (NOT NULL of table 't')."
    )
    assert "onInvalidRecord" in refused.value.fix


def test_dropped_rows_are_counted_for_all_outputs(task: Task) -> None:
    staging = replace(task.staging, dead_letter_topic=None)
    staged = staging.batches([frame([{"id": 1, "value": "too long"}, {"id": 2}])])
    assert (staged.part.dropped, staged.dead_letters) == (1, ())
    assert task.of_sink("files", staged) == [2]


# -- kept rows -------------------------------------------------------------------------------------


def test_rows_are_kept_only_if_a_sink_may_refuse_them(task: Task) -> None:
    rows = [{"id": each} for each in range(3)]
    kept = task.staging.batches([frame(rows)])
    assert kept.kept is not None
    assert kept.kept.rows == 3
    assert len(kept.files) == 0, "few rows travel in the message"
    task.refusing = ()
    plain = task.staging.batches([frame(rows)])
    assert plain.kept is None
    for staged in (kept, plain):
        assert task.of_sink("table", staged) == task.of_sink("files", staged) == [0, 1, 2]
        assert task.records(staged) == ["v0", "v1", "v2"]


def test_no_row_is_staged_more_often_than_without_kept_rows(task: Task) -> None:
    """Sinks that stage nothing elsewhere read their columns from the kept rows."""
    task.inline = 0
    staged = task.staging.batches([frame([{"id": each} for each in range(3)])])
    assert len(staged.files) == 2
    assert {part.receipt.part for part in staged.sinks} == {staged.kept}
    assert staged.kept not in staged.parts, "the kept rows count in no figure"


def test_without_setting_aside_only_what_refusing_sinks_need_is_kept(task: Task) -> None:
    task.sets_aside = False
    rows = [{"id": 1, "sink": "kafka"}, {"id": 2, "sink": "table"}, {"id": 3}, {"id": 4, "sink": "files"}]
    staged = task.staging.batches([frame(rows)])
    assert staged.kept is not None
    assert staged.kept.rows == 2
    found = pa.ipc.open_stream(staged.kept.inline).read_all()
    assert found.schema.names == ["value", "id", "sink", ORIGIN]
    assert (task.of_sink("table", staged), task.of_sink("files", staged)) == ([2, 3], [3, 4])
    kept = task.kept(staged)
    assert kept.numbers("table", [1]) == {0: {1: 1}}
    assert kept.origins(0, [1]) == {1: "made from the record of topic in, partition 0, offset 30"}


def test_a_task_that_fails_leaves_no_kept_rows(task: Task) -> None:
    task.inline = 0

    def failing() -> Iterator[pa.RecordBatch]:
        yield frame([{"id": 1}])
        raise RuntimeError

    with pytest.raises(RuntimeError):
        task.staging.batches(failing())
    assert not list(Path(task.folder.location).rglob("*.arrow"))


def test_kept_rows_that_somebody_changed_are_refused(task: Task) -> None:
    task.inline = 0
    staged = task.staging.batches([frame([{"id": 1}])])
    assert staged.kept is not None
    path = Path(task.folder.location) / "7" / staged.kept.name
    path.write_bytes(path.read_bytes().replace(b"v1", b"v2"))
    with pytest.raises(StagedPartError, match="damaged"):
        task.of_sink("table", staged)
    with pytest.raises(StagedPartError, match="damaged"):
        task.staging.again(staged, {0: ("table", RowRefusal("no"))})


# -- staging again ---------------------------------------------------------------------------------


def test_rows_are_numbered_in_the_order_of_the_sink_over_all_tasks(task: Task) -> None:
    rows = [{"id": 0}, {"id": 1, "sink": "files"}, {"id": 2, "sink": "table"}, {"id": 3, "sink": "kafka"}]
    tasks = [
        task.staging.batches([frame(rows), frame(rows[2:])]),
        task.staging.batches([frame([{"id": 5, "sink": "kafka"}])]),
        task.staging.batches([frame(rows)]),
    ]
    assert task.of_sink("table", *tasks) == [0, 2, 2, 0, 2]
    assert task.kept(*tasks).numbers("table", range(5)) == {0: {0: 0, 2: 1, 4: 2}, 2: {0: 3, 2: 4}}
    assert task.kept(*tasks).numbers("files", [3]) == {2: {1: 3}}


def test_the_driver_stages_a_task_again_without_refused_rows(task: Task) -> None:
    rows = [{"id": 0}, {"id": 1, "value": "too long"}, {"id": 2}, {"id": 3}, {"id": 4}]
    before = task.staging.batches([frame(rows[:3]), frame(rows[3:])])
    assert task.records(before) == ["v0", "v2", "v3", "v4"]
    refusal = RowRefusal("duplicate key", "id")
    staged = task.staging.again(before, {1: ("table", refusal), 3: ("table", RowRefusal("no"))})
    assert task.records(staged) == ["v0", "v3"], "in their order"
    assert task.of_sink("table", staged) == task.of_sink("files", staged) == [0, 3]
    first, second, third = task.letters(staged)
    assert first.value == b"too long", "the letters of the task stay"
    assert (second.key, second.value) == (b"k", b"v2")
    assert second.about == replace(
        DeadLetter.parse([]),
        error="RefusedBySink",
        message="sink 'table' refuses the row: column 'id': duplicate key",
        origin_topic="in",
        origin_partition=0,
        origin_offset=20,
        origin_timestamp_ms=0,
        application_id="app",
        holds="output",
        target_topic="out",
        sink="table",
    )
    assert third.about.message == "sink 'table' refuses the row: no"
    assert [part.dead_letters for part in staged.dead_letters] == [1, 2]
    assert {part.run_id for part in staged.parts} == {"run"}


def test_rows_can_be_refused_again_until_none_is_left(task: Task) -> None:
    staged = task.staging.batches([frame([{"id": each} for each in range(4)])])
    for left in ([0, 2, 3], [0, 3], [0], []):
        staged = task.staging.again(staged, {min(1, len(left)): ("table", RowRefusal("no"))})
        assert task.of_sink("table", staged) == left
        assert task.records(staged) == [f"v{each}" for each in left]
    assert sum(part.dead_letters for part in staged.dead_letters) == 4
    assert (staged.part.rows, staged.sinks) == (0, ())


def test_dropped_rows_add_up(task: Task) -> None:
    staging = replace(task.staging, dead_letter_topic=None)
    before = staging.batches([frame([{"id": 1, "value": "too long"}, {"id": 2}, {"id": 3}])])
    staged = staging.again(before, {0: ("table", RowRefusal("no"))})
    assert (staged.part.dropped, staged.dead_letters) == (2, ())


@pytest.mark.parametrize("kafka", [True, False])
def test_packets_stay(task: Task, kafka: bool) -> None:
    """Otherwise, the commit would find that a report is missing."""
    task.kafka = kafka
    packets = [BadRecordsOfTask(ReadTask(name, "p", 0, 1)).report().to_pybytes() for name in ("a", "b")]
    before = task.staging.batches([frame([{"id": 1}, {"id": 2}], packets)])
    staged = task.staging.again(before, {0: ("table", RowRefusal("no"))})
    assert staged.part.reads == before.part.reads
    assert len(staged.part.reads) == 2
    assert task.records(staged) == (["v2"] if kafka else [])
    again = task.staging.again(staged, {0: ("table", RowRefusal("no"))})
    assert again.part.reads == before.part.reads


def test_rows_are_sealed_again(task: Task) -> None:
    plan = SealingPlan("out", 3, 1 << 20, 1 << 20, 1 << 20, least_bytes=1)
    task.sealing = plan
    before = task.staging.batches([frame([{"id": each, "key": str(each)} for each in range(100)])])
    staged = task.staging.again(before, {5: ("table", RowRefusal("no"))})
    assert task.records(staged) == task.records(before) == ["sealed 0", "sealed 1", "sealed 2"]
    assert (before.part.rows, staged.part.rows, staged.part.sealed_partitions) == (100, 99, 3)


def test_rows_that_a_sink_staged_itself_are_staged_again(task: Task) -> None:
    """A sink that may refuse rows can stage them elsewhere; the kept rows are there all the same."""
    own = SinkSpec("table", f"{__name__}:StagesItself", columns=("id", "value"))
    plan = replace(Plan.of([own], FRAME, kafka=True), refusing=frozenset({"table"}), sets_aside=True)
    staging = replace(task.staging, plan=plan)
    before = staging.batches([frame([{"id": each} for each in range(3)])])
    assert before.sinks == (SinkPart("table", 3, [0, 1, 2]),)
    numbers = KeptRows(task.folder, "7", [before]).numbers("table", [1])
    assert numbers == {0: {1: 1}}
    assert staging.again(before, {1: ("table", RowRefusal("no"))}).sinks == (SinkPart("table", 2, [0, 2]),)


# -- destinations ----------------------------------------------------------------------------------


def going_to(names: list[bytes | None]) -> pa.RecordBatch:
    """Returns rows with bytes in the column `sink`, which need not be UTF-8."""
    rows = frame([{"id": number} for number in range(len(names))])
    to = pa.Array.from_buffers(pa.string(), len(names), pa.array(names, pa.binary()).buffers())
    at = rows.schema.names.index("sink")
    return rows.set_column(at, rows.schema.field(at), to)


@pytest.mark.parametrize("kafka", [True, False])
def test_a_row_for_an_unknown_destination_is_invalid(task: Task, kafka: bool) -> None:
    task.kafka = kafka
    names = [b"table", b"nowhere", b"\xff", None, b"files", b"" if kafka else b"kafka"]
    staged = task.staging.batches([going_to(names)])
    assert (task.of_sink("table", staged), task.of_sink("files", staged)) == ([0, 3], [3, 4])
    assert task.records(staged) == (["v3"] if kafka else [])
    letters = task.letters(staged)
    outputs = "'kafka', 'table', 'files'" if kafka else "'table', 'files'"
    assert [each.about.message for each in letters] == [
        f"column 'sink', the destination of the row, is '{shown}'; expected {outputs}, or null for all of "
        "them."
        for shown in ("nowhere", "\ufffd", "" if kafka else "kafka")
    ]
    assert [json.loads(each.value or b"")["id"] for each in letters] == [1, 2, 5]
    assert {(each.key, each.about.sink, each.about.target_topic) for each in letters} == {(None, None, None)}


@pytest.mark.parametrize(
    ("name", "shown"), [(b"nowhere", "nowhere"), (b"\xff", "\ufffd"), (b"kafka", "kafka")]
)
def test_an_unknown_destination_that_fails_the_batch_is_named(task: Task, name: bytes, shown: str) -> None:
    task.kafka = task.sets_aside = False
    with pytest.raises(
        InvalidRecordError, match=rf"is '{shown}'; expected .* in row 1 of the Arrow batch, made from"
    ) as found:
        task.staging.batches([going_to([None, name])])
    assert "for 'kafka', set the option 'topic'" in found.value.fix


# -- tasks of other frames, and of other times ------------------------------------------------------


@pytest.fixture
def turned(task: Task) -> Task:
    """Returns a task of another frame of the same query: its columns are in another order."""
    return replace(task, frame=StructType(list(reversed(FRAME.fields))))


def of_frame(task: Task, rows: list[dict[str, Any]]) -> StagedTask:
    return task.staging.batches([frame(rows).select(task.frame.names)])


@pytest.mark.parametrize("kept", [(), ("table",)])
def test_frames_of_a_union_have_their_columns_in_different_orders(
    task: Task, turned: Task, kept: tuple[str, ...]
) -> None:
    task.refusing = turned.refusing = kept
    tasks = of_frame(task, [{"id": 1}, {"id": 2, "sink": "files"}]), of_frame(turned, [{"id": 3}])
    for ordered in (tasks, tuple(reversed(tasks))):
        assert sorted(task.of_sink("table", *ordered)) == [1, 3]
        assert sorted(task.of_sink("files", *ordered)) == [1, 2, 3]


def test_the_driver_stages_rows_with_the_columns_of_their_own_frame(task: Task, turned: Task) -> None:
    """The driver knows the frame that the sink writes, which may be another one of the union."""
    before = of_frame(turned, [{"id": 1}, {"id": 2, "sink": "files"}, {"id": 3}])
    kept = task.kept(before)
    assert kept.numbers("table", [1]) == {0: {2: 1}}
    assert kept.origins(0, [2]) == {2: "made from the record of topic in, partition 0, offset 30"}
    staged = task.staging.again(before, {2: ("table", RowRefusal("no"))})
    assert task.of_sink("table", staged) == [1]
    assert task.of_sink("files", staged) == [1, 2]
    assert task.records(staged) == ["v1"]
    (letter,) = task.letters(staged)
    assert (letter.key, letter.value, letter.about.origin_offset) == (b"k", b"v3", 30)
    assert task.of_sink("table", task.staging.again(staged, {0: ("table", RowRefusal("no"))})) == []


def test_tasks_differ_in_whether_they_keep_rows(task: Task) -> None:
    """Two sources plan a batch, and somebody adds a constraint between the moments when they ask the sink."""
    early = of_frame(replace(task, refusing=()), [{"id": 1}, {"id": 2, "sink": "files"}])
    late = of_frame(task, [{"id": 3}, {"id": 4, "sink": "files"}, {"id": 5}])
    for tasks in ((early, late), (late, early)):
        assert sorted(task.of_sink("table", *tasks)) == [1, 3, 5]
        assert sorted(task.of_sink("files", *tasks)) == [1, 2, 3, 4, 5]
    assert task.kept(early, late).numbers("table", [0, 2]) == {1: {2: 2}}, "the early task kept no rows"
    assert task.of_sink("table", early, task.staging.again(late, {2: ("table", RowRefusal("no"))})) == [1, 3]


class StagesItself(MemorySink):
    """A sink whose tasks do not stage in the checkpoint. Its receipt has the ids of the rows."""

    def __init__(self) -> None:
        super().__init__("own")

    def stage(self, context: StageContext) -> Any:
        class Ids(list[int]):
            def write(self, batch: pa.RecordBatch) -> None:
                self.extend(batch["id"].to_pylist())

            def finish(self) -> list[int]:
                return list(self)

            def discard(self) -> None: ...

        return Ids()
