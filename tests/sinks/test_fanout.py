"""Selection of the rows and columns that each sink receives."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar

import pyarrow as pa
import pytest
from pyspark.sql.types import (
    BinaryType,
    CalendarIntervalType,
    IntegerType,
    StringType,
    StructField,
    StructType,
    TimestampType,
)

from kafka_eos_source.errors import (
    InvalidOptionError,
    InvalidSchemaError,
    SinkFailedError,
)
from kafka_eos_source.model import ReadTask
from kafka_eos_source.protocol.packing import CHANGELOG, BadRecordsOfTask
from kafka_eos_source.sinks.contract import SinkContext, Stage, StageContext
from kafka_eos_source.sinks.memory import MemorySink
from kafka_eos_source.sinks.specs import SinkSpec
from kafka_eos_source.spark.schema import only_changelog
from kafka_eos_source.stage.fanout import Fanout, Plan, StagedForSink, part_names
from kafka_eos_source.stage.files import StagingFolder
from kafka_eos_source.stage.rows import from_batches

FRAME = StructType(
    [
        StructField("value", StringType()),
        StructField("id", IntegerType(), nullable=False),
        StructField("at", TimestampType()),
        StructField("sink", StringType()),
    ]
)
SINKS = (SinkSpec("files", "memory"), SinkSpec("table", "memory", columns=("id",)))


def rows(to: list[str | None]) -> pa.RecordBatch:
    return pa.record_batch(
        {
            "value": pa.array([f"v{n}" for n in range(len(to))], pa.large_string()),
            "id": pa.array(range(len(to)), pa.int32()),
            "at": pa.array([0] * len(to), pa.timestamp("us", "Europe/Prague")),
            "sink": pa.array(to, pa.string()),
        }
    )


def fan(tmp_path: Path, plan: Plan, batches: list[pa.RecordBatch], inline: int = 1 << 20) -> Any:
    folder = StagingFolder.at(str(tmp_path / "staging"))
    fanout = Fanout(plan, "app", "cluster", "7", folder, inline)
    taken = [fanout.take(batch) for batch in batches]
    kafka = [row for batch in taken if batch is not None for row in batch.to_pylist()]
    parts = fanout.finish()
    staged = {
        route.spec.name: StagedForSink(
            folder, "7", route.schema, [part for part in parts if part.sink == route.spec.name]
        )
        for route in plan.routes
    }
    return kafka, parts, staged


def ids(staged: StagedForSink) -> list[int]:
    return [each for batch in staged.batches() for each in batch["id"].to_pylist()]


def test_rows_go_to_the_sink_in_their_column_and_to_all_sinks_if_it_is_null(tmp_path: Path) -> None:
    plan = Plan.of(SINKS, FRAME, kafka=True)
    kafka, parts, staged = fan(tmp_path, plan, [rows([None, "kafka", "files"]), rows(["table"])])
    assert [row["value"] for row in kafka] == ["v0", "v1"]
    assert ids(staged["files"]) == [0, 2]
    assert ids(staged["table"]) == [0, 0]
    assert staged["files"].rows == 2
    assert staged["files"].schema.names == ["value", "id", "at"]
    assert staged["files"].schema.field("at").type == pa.timestamp("us", "UTC")
    assert staged["table"].schema == pa.schema([("id", pa.int32())])
    assert part_names(parts) == [], "few rows travel in the message"


def test_many_rows_are_staged_in_files_with_checksums(tmp_path: Path) -> None:
    plan = Plan.of(SINKS, FRAME, kafka=True)
    _, parts, staged = fan(tmp_path, plan, [rows([None] * 1000)], inline=100)
    assert len(part_names(parts)) == 2
    assert ids(staged["table"]) == list(range(1000))


def test_without_the_column_every_row_goes_everywhere(tmp_path: Path) -> None:
    frame = StructType(FRAME.fields[:3])
    plan = Plan.of(SINKS, frame, kafka=False)
    kafka, _, staged = fan(tmp_path, plan, [rows([None] * 3).select(["value", "id", "at"])])
    assert kafka == [], "no topic: nothing goes to Kafka"
    assert ids(staged["files"]) == ids(staged["table"]) == [0, 1, 2]


def test_a_sink_without_rows_stages_nothing(tmp_path: Path) -> None:
    _, parts, _ = fan(tmp_path, Plan.of(SINKS, FRAME, kafka=True), [rows(["kafka", "files"])])
    assert [part.sink for part in parts] == ["files"]


def test_state_changes_go_only_to_kafka(tmp_path: Path) -> None:
    frame = StructType([*FRAME.fields, StructField(CHANGELOG, BinaryType())])
    packets = [BadRecordsOfTask(ReadTask(name, "p", 0, 1)).report().to_pybytes() for name in ("a", "b")]
    batch = rows([None, None, "nowhere"]).append_column(
        CHANGELOG, pa.array([packets[0], None, packets[1]], pa.binary())
    )
    fanout = Fanout(
        Plan.of(SINKS, frame, kafka=False),
        "app",
        "cluster",
        "7",
        StagingFolder.at(str(tmp_path / "staging")),
        1 << 20,
    )
    (staged,) = from_batches([batch], only_changelog(frame), None, fanout)
    assert staged["changelog"].to_pylist() == packets
    assert [(part.sink, part.rows) for part in fanout.finish()] == [("files", 1), ("table", 1)]


class Breaking(MemorySink):
    """A sink whose library refuses what its rules let pass."""

    where: ClassVar[str] = ""

    def stage(self, context: StageContext) -> Stage:
        self._break("stage")
        inner = context.parts()
        sink = self

        class Inner:
            def write(self, batch: pa.RecordBatch) -> None:
                sink._break("write")
                inner.write(batch)

            def finish(self) -> Any:
                sink._break("finish")
                return inner.finish()

            def discard(self) -> None:
                inner.discard()

        return Inner()

    def _break(self, where: str) -> None:
        if where == Breaking.where:
            raise pa.ArrowInvalid("no such value\nand a second line")


@pytest.mark.parametrize("where", ["stage", "write", "finish"])
def test_an_error_of_a_library_names_the_sink(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, where: str
) -> None:
    monkeypatch.setattr(Breaking, "where", where)
    plan = Plan.of([SinkSpec("odd", f"{__name__}:Breaking")], FRAME, kafka=True)
    with pytest.raises(SinkFailedError, match="sink 'odd' cannot stage the rows of a task") as found:
        fan(tmp_path, plan, [rows([None])])
    assert found.value.message.endswith(": ArrowInvalid: no such value.")


def test_a_missing_column_is_named() -> None:
    with pytest.raises(
        InvalidOptionError, match=r"sink\.a\.columns' names 'x'; the frame has 'value', 'id', 'at'"
    ):
        Plan.of([SinkSpec("a", "memory", columns=("x", "id"))], FRAME, kafka=True)


def test_a_sink_column_that_is_not_a_string_is_refused() -> None:
    with pytest.raises(InvalidSchemaError, match="'sink', the destination of each row, has type int"):
        Plan.of(SINKS, StructType([StructField("sink", IntegerType())]), kafka=False)


class Unopened(MemorySink):
    """A sink that cannot be opened, and whose clean-up expects that it was."""

    def open(self, context: SinkContext) -> None:
        raise InvalidOptionError("option 'system' is wrong.")

    def close(self) -> None:
        raise AssertionError("a sink was closed that was never opened")


def test_a_sink_that_cannot_be_opened_is_not_closed(tmp_path: Path) -> None:
    plan = Plan.of([SinkSpec("bad", f"{__name__}:Unopened", options={"system": "s"})], FRAME, kafka=True)
    fanout = Fanout(plan, "app", "cluster", "7", StagingFolder.at(str(tmp_path / "staging")), 1 << 20)
    with pytest.raises(InvalidOptionError, match=r"'sink\.bad\.system' is wrong"):
        fanout.take(rows([None]))
    fanout.discard()  # the task attempt failed


def test_a_column_that_arrow_does_not_have_is_refused_only_if_rows_must_be_kept() -> None:
    """Otherwise refused rows could not be set aside, and nobody would know before the first one."""
    frame = StructType([*FRAME.fields, StructField("every", CalendarIntervalType())])
    sinks = [replace(each, columns=("id",)) for each in SINKS]
    plan = Plan.of(sinks, frame, kafka=True)
    refusing = replace(plan, refusing=frozenset({"table"}))
    for each in (plan, refusing, replace(plan, sets_aside=True)):
        each.check_kept()
    replace(Plan.of(sinks, FRAME, kafka=True), refusing=frozenset({"table"}), sets_aside=True).check_kept()
    with pytest.raises(
        InvalidSchemaError, match=r"sink 'table' may refuse .* column 'every' has type interval, which Arrow"
    ):
        replace(refusing, sets_aside=True).check_kept()
