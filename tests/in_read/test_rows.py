"""Steps in the read that make plain rows: they nest, name bad records, and other steps take their rows."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import pytest
from pyspark.sql.types import BinaryType, LongType, StringType, StructField, StructType

from kafka_eos_source.errors import InvalidRecordError
from kafka_eos_source.in_read import rows as rows_in_read
from kafka_eos_source.in_read.bad_records import Records
from kafka_eos_source.in_read.rows import RowsInRead, Traced, joined
from kafka_eos_source.in_read.step import MapInRead, ReadColumn, ReadColumns, packed_batches_of, unpack
from kafka_eos_source.options.parse import parse_read
from kafka_eos_source.read.settings import schema_of, task_read
from kafka_eos_source.state import aggregates as agg
from kafka_eos_source.state import shard_rows
from kafka_eos_source.state.shard_rows import PACKED_BATCH
from kafka_eos_source.state.vector.in_read import AggregateInRead

READ = {"subscribe": "t", "kafka.bootstrap.servers": "h:1"}
NUMBERS = StructType([StructField("key", BinaryType()), StructField("n", LongType())])

ODD = StructType([StructField("text", StringType()), StructField("key", BinaryType())])


@dataclass(frozen=True)
class Digits:
    """Decodes digits in column ``value`` and keeps column ``key``; two rows in a slice."""

    rows: StructType = NUMBERS

    def slices(self, batch: pa.RecordBatch) -> Iterator[tuple[pa.RecordBatch, Mapping[int, str]]]:
        for at in range(0, batch.num_rows, 2):
            part = batch.slice(at, 2)
            texts = [each or b"0" for each in part["value"].to_pylist()]
            errors = {row: "no digits" for row, each in enumerate(texts) if not each.isdigit()}
            numbers = [int(each) if each.isdigit() else None for each in texts]
            yield pa.record_batch({"key": part["key"], "n": pa.array(numbers, pa.int64())}), errors


@dataclass(frozen=True)
class Odd:
    """Passes odd numbers as text; 13 is bad."""

    rows: StructType = ODD

    def __call__(
        self, batch: pa.RecordBatch, *, only_first: bool = False
    ) -> tuple[pa.RecordBatch, Mapping[int, str]]:
        bad = {row: "unlucky" for row, each in enumerate(batch["n"].to_pylist()) if each == 13}
        odd = batch.filter(pc.equal(pc.bit_wise_and(batch["n"], 1), 1))
        return pa.record_batch({"text": odd["n"].cast(pa.string()), "key": odd["k"]}), bad


def decoded() -> RowsInRead:
    columns = ReadColumns((ReadColumn("key", "key"), ReadColumn("value", "value")))
    return RowsInRead.of(Digits(), columns, "digits", {"key": "key"})


def odd() -> RowsInRead:
    columns = ReadColumns((ReadColumn("k", "key"), ReadColumn("n", "n")), decoded())
    return RowsInRead.of(Odd(), columns, "SQL", {"key": "k"})


def source(*values: bytes | None, start: int = 0) -> pa.RecordBatch:
    count = len(values)
    return pa.record_batch(
        {
            "key": pa.array([b"k%d" % row for row in range(count)], pa.binary()),
            "value": pa.array(values, pa.binary()),
            "topic": pa.array(["t"] * count, pa.string()),
            "partition": pa.array([3] * count, pa.int32()),
            "offset": pa.array(range(start, start + count), pa.int64()),
        }
    )


def travelled(step: Any) -> Any:
    """Returns the step as it arrives in the tasks, and checks what is read and what Spark gets."""
    options = parse_read({**READ, "step.in.read": step.to_option()}, streaming=True)
    found = task_read(options)
    assert schema_of(options) == step.schema
    assert set(found.settings.columns or ()) == {"key", "value", "topic", "partition", "offset"}
    return found.step


def test_steps_nest_and_make_plain_rows() -> None:
    step = travelled(odd())
    found = list(step(iter([source(b"1", b"2", b"3"), source(b"5")])))
    assert [row for each in found for row in each.to_pylist()] == [
        {"text": "1", "key": b"k0"},
        {"text": "3", "key": b"k2"},
        {"text": "5", "key": b"k0"},
    ]


def test_the_column_of_the_source_is_known_through_all_steps() -> None:
    columns = ReadColumns((ReadColumn("id", "key"), ReadColumn("text", "text")), odd())
    assert columns.column_of_source("id") == "key"
    assert columns.column_of_source("text") is None
    assert columns.column_of_source("other") is None


@pytest.mark.parametrize(
    ("step", "bad", "said"),
    [
        (decoded, b"x", "the record of topic t, partition 3, offset 12 .* no digits .the read digits.*'x'"),
        (odd, b"13", "the record of topic t, partition 3, offset 12 .* unlucky .the read SQL.*'13'"),
        (odd, b"x", "the record .* offset 12 .* digits"),
    ],
)
def test_a_bad_record_is_named(step: Any, bad: bytes, said: str) -> None:
    with pytest.raises(InvalidRecordError, match=said):
        list(travelled(step())(iter([source(b"1", b"2", bad, start=10)])))


def test_a_row_of_unknown_origin_is_shown_with_the_range_of_its_records() -> None:
    columns = ReadColumns((ReadColumn("k", "key"), ReadColumn("n", "n")), again())
    step = RowsInRead.of(Odd(), columns, "SQL")
    with pytest.raises(InvalidRecordError, match=r"between .* offset 0 and .* offset 1: unlucky.*'n': 13"):
        list(travelled(step)(iter([source(b"1", b"13")])))


def again() -> RowsInRead:
    return RowsInRead.of(Same(), ReadColumns((ReadColumn("key", "key"), ReadColumn("n", "n")), decoded()), "")


@dataclass(frozen=True)
class Same:
    rows: StructType = NUMBERS

    def __call__(
        self, batch: pa.RecordBatch, *, only_first: bool = False
    ) -> tuple[pa.RecordBatch, Mapping[int, str]]:
        return batch, {}


def test_map_in_read_takes_the_rows_of_a_step() -> None:
    columns = ReadColumns((ReadColumn("value", "text"), ReadColumn("key", "key")), odd())
    rows = StructType([StructField("value", StringType()), StructField("key", BinaryType())])
    step = travelled(MapInRead(columns, rows, None))
    (found,) = unpack(packed_batches_of(step([source(b"7", None, b"8")])), rows)
    assert found.to_pylist() == [{"value": "7", "key": b"k0"}]


def test_an_aggregation_combines_the_rows_of_a_step() -> None:
    columns = ReadColumns((ReadColumn("k", "key"), ReadColumn("n", "n")), decoded())
    step = travelled(AggregateInRead(columns, ("k",), {"total": agg.sum("n")}, None, 2))
    packed = list(step(iter([source(b"1", b"2"), source(b"5")])))
    column = pa.concat_arrays([each.column(PACKED_BATCH) for each in packed])
    rows = [row for each in shard_rows.unpack(column, step.partial_schema) for row in each.to_pylist()]
    assert sorted((row["k"], *list(row.values())[1:2]) for row in rows) == [(b"k0", 6), (b"k1", 2)], rows


def test_an_engine_gets_rows_joined_up_to_a_number_of_rows_or_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    def sizes() -> list[int]:
        given = (Traced(each, Records.of([each]), aligned=True) for each in batches)
        return [each.rows.num_rows for each in joined(given)]

    monkeypatch.setattr(rows_in_read, "MOST_ROWS", 5)
    batches = [source(*[b"1"] * count) for count in (2, 2, 0, 2, 7, 1)]
    assert sizes() == [4, 2, 7, 1]
    monkeypatch.setattr(rows_in_read, "ENOUGH_BYTES", 1)
    assert sizes() == [2, 2, 2, 7, 1]
    batches = [source(), source()]
    assert sizes() == [0]


def test_a_bad_row_of_joined_batches_is_traced_to_its_record() -> None:
    """Two slices of the decoder, of which one lost a bad record, and another batch of the source."""
    aside: list[pa.RecordBatch] = []
    batches = [source(b"1", b"x", b"4", start=10), source(b"5", b"13", start=20)]
    (found,) = odd().traced(iter(batches), aside.append)
    assert found.rows["text"].to_pylist() == ["1", "5", "13"]
    assert [(each["offset"].to_pylist(), each["message"].to_pylist()) for each in aside] == [
        ([11], ["no digits (the read digits)"]),
        ([21], ["unlucky (the read SQL)"]),
    ]


def test_a_bad_record_of_sql_on_columns_of_the_source_has_advice_that_applies() -> None:
    columns = ReadColumns((ReadColumn("k", "key"), ReadColumn("n", "offset")))
    step = RowsInRead.of(Odd(), columns, "SQL")
    batch = source(b"1", start=13).select([*step.of_source])
    said = r"offset 13 cannot be decoded: unlucky \(the read SQL\)\. Fix"
    with pytest.raises(InvalidRecordError, match=said) as found:
        list(step([batch]))
    assert "TRY_CAST" in (found.value.fix or "")
    assert "on_bad='null'" not in (found.value.fix or "")
