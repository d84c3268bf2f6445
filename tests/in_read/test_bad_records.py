"""Records that the read cannot decode: they fail the task, become nulls, or go around all further steps."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import pyarrow as pa
import pyarrow.compute as pc
import pytest
from pyspark.sql.types import BinaryType, LongType, StringType, StructField, StructType

from kafka_eos_source.documents.converted import Converted
from kafka_eos_source.errors import InvalidOptionError, InvalidRecordError
from kafka_eos_source.in_read import rows as rows_in_read
from kafka_eos_source.in_read.bad_records import DEAD_LETTER, FAIL, NULL, OnBad, Records, check_on_bad
from kafka_eos_source.in_read.decode import decoded_values
from kafka_eos_source.in_read.rows import RowsInRead
from kafka_eos_source.in_read.step import (
    ORIGIN_FIELD,
    MapInRead,
    ReadColumn,
    ReadColumns,
    packed_batches_of,
    unpack,
    with_column_of_packets,
)
from kafka_eos_source.model import ReadTask
from kafka_eos_source.options.parse import parse_read
from kafka_eos_source.protocol.packing import CHANGELOG, BadRecords, packets, split_packets
from kafka_eos_source.read.settings import schema_of, task_read
from kafka_eos_source.spark.arrow import HEADERS_ARROW
from kafka_eos_source.spark.pickled import to_bytes
from kafka_eos_source.state import aggregates as agg
from kafka_eos_source.state import shard_rows
from kafka_eos_source.state.vector.in_read import AggregateInRead

READ = {"subscribe": "t", "kafka.bootstrap.servers": "h:1"}
HALF = StructType([StructField("half", LongType()), StructField("key", BinaryType())])
TASK = ReadTask("f", "p", 0, 1)
STRUCT = pa.struct([("n", pa.int64())])
NUMBER = StructType([StructField("n", LongType())])


@dataclass(frozen=True)
class Digits:
    """Decodes digits, three values in a slice, as `documents.decode.JsonDecoding` decodes JSON."""

    arrow_type: pa.DataType = STRUCT
    takes_headers: ClassVar[bool] = False

    def slices(self, column: pa.Array) -> Iterator[Converted]:
        for at in range(0, len(column), 3):
            texts = column.slice(at, 3).to_pylist()
            errors = {row: "no digits" for row, each in enumerate(texts) if not (each or b"0").isdigit()}
            numbers = [int(each) if each and each.isdigit() else None for each in texts]
            yield Converted(pa.array([{"n": each} for each in numbers], self.arrow_type), errors)


@dataclass(frozen=True)
class Halves:
    """As SQL: passes the half of even numbers; 13 is bad."""

    rows: StructType = HALF

    def __call__(
        self, batch: pa.RecordBatch, *, only_first: bool = False
    ) -> tuple[pa.RecordBatch, Mapping[int, str]]:
        bad = {row: "unlucky" for row, each in enumerate(batch["n"].to_pylist()) if each == 13}
        even = batch.filter(pc.equal(pc.bit_wise_and(batch["n"], 1), 0))
        return pa.record_batch({"half": pc.divide(even["n"], 2), "key": even["key"]}), bad


def decoded(on_bad: OnBad) -> RowsInRead:
    made = decoded_values(Digits(), NUMBER, ["key"], "decodes digits", on_bad=on_bad)
    return replace(made, frame="f")


def after(step: RowsInRead, *names: str) -> ReadColumns:
    return ReadColumns(tuple(ReadColumn(name, name) for name in names), step)


def halves(step: RowsInRead) -> RowsInRead:
    return RowsInRead.of(Halves(), after(step, "n", "key"), "runs SQL")


def source(*values: bytes | None, start: int = 0) -> pa.RecordBatch:
    count = len(values)
    return pa.record_batch(
        {
            "key": pa.array([b"k%d" % row for row in range(start, start + count)]),
            "value": pa.array(values, pa.binary()),
            "topic": pa.array(["t"] * count),
            "partition": pa.array([3] * count, pa.int32()),
            "offset": pa.array(range(start, start + count), pa.int64()),
            "timestamp": pa.array([1_000_000] * count, pa.timestamp("us", "UTC")),
            "headers": pa.array([[{"key": "h", "value": b"1"}]] * count, HEADERS_ARROW),
        }
    )


def travelled(step: Any) -> Any:
    """Returns the step as it arrives in the tasks, and checks what Spark gets."""
    options = parse_read({**READ, "step.in.read": step.to_option()}, streaming=True)
    assert schema_of(options) == step.schema
    found = task_read(options)
    assert found.step is not None
    assert set(found.settings.columns or ()) == set(step.of_source)
    return found.step


@dataclass
class Divided:
    """The result of a step, divided into rows and bad records."""

    rows: list[dict[str, Any]]
    bad: list[dict[str, Any]]
    totals: list[int | None]

    @classmethod
    def of(cls, batches: Sequence[pa.RecordBatch]) -> Divided:
        rows, bad, totals = [], [], []
        for each in batches:
            data, found = split_packets(each)
            rows += data.to_pylist()
            for packet in packets(found):
                assert isinstance(packet, BadRecords)
                assert packet.task == TASK
                bad += [row for part in packet.batches() for row in part.to_pylist()]
                totals.append(packet.total)
        return cls(rows, bad, totals)


def test_rows_know_their_origin_also_those_between_bad_records() -> None:
    """One record is bad, so the others of its slice are no longer consecutive."""
    given = [source(b"1", b"x", b"2", b"3", b"4", start=7), source(b"5", start=20)]
    of_source = ReadColumns((ReadColumn("key", "key"),))
    of_rows = after(decoded(DEAD_LETTER), "n", "key")
    for columns, good in ((of_source, [7, 8, 9, 10, 11, 20]), (of_rows, [7, 9, 10, 11, 20])):
        columns = replace(columns, with_origin=True)
        rows = StructType([StructField("key", BinaryType()), ORIGIN_FIELD])
        if columns.before is not None:
            rows = with_column_of_packets(StructType([StructField("n", LongType()), *rows.fields]))
        step = travelled(MapInRead(columns, rows, None))
        found = Divided.of(list(step.mapped(iter(given), TASK)))
        assert [row["key"] for row in found.rows] == [b"k%d" % offset for offset in good]
        origins = [row["kafka_eos_origin"] for row in found.rows]
        assert [each["offset"] for each in origins] == good
        assert {(each["topic"], each["partition"]) for each in origins} == {("t", 3)}
        assert {each["timestamp"].timestamp() for each in origins} == {1}


def test_a_bad_record_fails_the_task_which_names_it() -> None:
    step = travelled(decoded(FAIL))
    assert CHANGELOG not in step.schema.names
    with pytest.raises(
        InvalidRecordError,
        match=r"record of topic t, partition 3, offset 12 cannot be decoded: no digits "
        r"\(the read decodes digits\)\. The value is 'x'.*on_bad='dead-letter'",
    ):
        list(step(iter([source(b"1", b"2", b"x", b"y", start=10)]), TASK))


def test_bad_values_become_nulls() -> None:
    step = travelled(decoded(NULL))
    assert CHANGELOG not in step.schema.names
    found = Divided.of(list(step(iter([source(b"1", b"x", None)]), TASK)))
    assert [row["n"] for row in found.rows] == [1, None, None]


def test_a_record_that_fails_in_sql_still_fails_the_task_if_bad_values_become_nulls() -> None:
    with pytest.raises(InvalidRecordError, match=r"offset 1 cannot be decoded: unlucky \(the read runs SQL"):
        list(travelled(halves(decoded(NULL)))(iter([source(b"x", b"13")]), TASK))


def test_bad_records_are_set_aside_with_all_that_was_read() -> None:
    step = travelled(decoded(DEAD_LETTER))
    batches = [source(b"1", b"x", b"3", b"y"), source(b"5", start=4)]
    found = Divided.of(list(step(iter(batches), TASK)))
    assert [(row["key"], row["n"]) for row in found.rows] == [(b"k0", 1), (b"k2", 3), (b"k4", 5)]
    assert [row.pop("timestamp").timestamp() for row in found.bad] == [1, 1]
    assert found.bad[0] == {
        "key": b"k1",
        "value": b"x",
        "headers": [{"key": "h", "value": b"1"}],
        "error": "UndecodableRecord",
        "message": "no digits (the read decodes digits)",
        "topic": "t",
        "partition": 3,
        "offset": 1,
    }
    assert (found.bad[1]["value"], found.bad[1]["offset"]) == (b"y", 3)
    assert found.totals[-1] == len(found.totals)


@pytest.mark.parametrize("values", [[b"x", b"y"], []], ids=["all are bad", "nothing to read"])
def test_a_task_without_good_records_sends_its_packets(values: list[bytes]) -> None:
    step = travelled(halves(decoded(DEAD_LETTER)))
    batches = [source(*values)] if values else []
    found = Divided.of(list(step(iter(batches), TASK)))
    assert (found.rows, [row["value"] for row in found.bad]) == ([], values)
    assert found.totals[-1] == len(found.totals)


def test_records_that_fail_in_sql_are_set_aside_too(monkeypatch: pytest.MonkeyPatch) -> None:
    """Their origin is known although records before them were set aside, and batches were joined and cut."""
    monkeypatch.setattr(rows_in_read, "MOST_ROWS", 6)
    step = travelled(halves(decoded(DEAD_LETTER)))
    batches = [source(b"2", b"x", b"13"), source(b"y", b"4", b"13", start=3), source(b"13", b"6", start=6)]
    found = Divided.of(list(step(iter(batches), TASK)))
    assert [(row["half"], row["key"]) for row in found.rows] == [(1, b"k0"), (2, b"k4"), (3, b"k7")]
    assert sorted((row["offset"], row["value"], row["key"]) for row in found.bad) == [
        (1, b"x", b"k1"),
        (2, b"13", b"k2"),
        (3, b"y", b"k3"),
        (5, b"13", b"k5"),
        (6, b"13", b"k6"),
    ]
    assert {row["message"] for row in found.bad} == {
        "no digits (the read decodes digits)",
        "unlucky (the read runs SQL)",
    }


def test_a_row_whose_record_is_unknown_fails_the_task() -> None:
    columns = ReadColumns((ReadColumn("n", "half"), ReadColumn("key", "key")), halves(decoded(DEAD_LETTER)))
    step = travelled(RowsInRead.of(Halves(), columns, "runs SQL"))
    with pytest.raises(InvalidRecordError, match=r"a record between .* offset 0 and .* offset 2"):
        list(step(iter([source(b"2", b"x", b"26")]), TASK))


def twice(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    """Drops odd numbers and repeats the others, in the text of ``value``."""
    for batch in batches:
        even = batch.filter(pc.equal(pc.bit_wise_and(batch["n"], 1), 0))
        for _ in range(2):
            yield pa.record_batch({"value": even["n"].cast(pa.string())})


@pytest.mark.parametrize("is_staged", [False, True])
def test_bad_records_pass_the_function_of_map_in_read(is_staged: bool) -> None:
    own = StructType([StructField("value", StringType())])
    rows = with_column_of_packets(own)
    step = MapInRead(after(decoded(DEAD_LETTER), "n"), rows, to_bytes(twice, "", fix=""))
    step = travelled(step)
    batches = iter([source(b"1", b"x", b"2", b"y")])
    if is_staged:
        found = Divided.of(list(step.mapped(batches, TASK)))
    else:
        found = Divided.of(list(unpack(packed_batches_of(step(batches, TASK)), rows)))
    assert [row["value"] for row in found.rows] == ["2", "2"]
    assert [row["value"] for row in found.bad] == [b"x", b"y"]


def test_bad_records_pass_an_aggregation_in_the_read() -> None:
    columns = after(decoded(DEAD_LETTER), "key", "n")
    step = travelled(AggregateInRead(columns, ("key",), {"total": agg.sum("n")}, None, 2))
    batches = list(step(iter([source(b"1", b"x"), source(b"5")]), TASK))
    found = Divided.of(batches)
    assert [row["value"] for row in found.bad] == [b"x"]
    assert found.totals[-1] == len(found.totals)
    packed = [split_packets(each)[0].column(shard_rows.PACKED_BATCH) for each in batches]
    rows = [
        row
        for each in shard_rows.unpack(pa.concat_arrays(packed), step.partial_schema)
        for row in each.to_pylist()
    ]
    assert [(row["key"], *list(row.values())[1:2]) for row in rows] == [(b"k0", 6)]


def test_records_are_found_after_slices_and_removals() -> None:
    batches = [source(b"0", b"1"), source(b"2", b"3", b"4", start=2)]
    left = Records.of(batches).without([1]).slice(1, 3).without([2])
    assert len(left) == 2
    assert left.take([0, 1])["value"].to_pylist() == [b"2", b"3"]


def test_the_argument_is_checked() -> None:
    assert check_on_bad("null") == NULL
    with pytest.raises(InvalidOptionError, match=r"on_bad.*'drop'.*'fail' or 'null' or 'dead-letter'"):
        check_on_bad("drop")
