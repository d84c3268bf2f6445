"""Invalid rows fail the batch, are dropped, or become dead letters, and valid rows are not touched."""

from __future__ import annotations

from dataclasses import replace
from datetime import datetime, timedelta, timezone
from functools import partial
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from pyspark.sql import Row
from pyspark.sql.types import LongType, StringType, StructField, StructType

from kafka_eos_source.errors import InvalidOptionError, InvalidRecordError, InvalidSchemaError
from kafka_eos_source.options.parse import parse_write
from kafka_eos_source.protocol import records
from kafka_eos_source.protocol.records import DeadLetter
from kafka_eos_source.spark.arrow import HEADERS_ARROW
from kafka_eos_source.spark.schema import INVALID, SinkColumns, check_frame, only_changelog
from kafka_eos_source.stage.files import PartStage, StagingFolder
from kafka_eos_source.stage.invalid_rows import InvalidRows, RowChecks
from kafka_eos_source.stage.parts import StagedRows
from kafka_eos_source.stage.row_rules import RecordLimits
from kafka_eos_source.stage.rows import from_batches, from_rows

MARK = pa.struct(
    [
        ("error", pa.string()),
        ("message", pa.string()),
        ("topic", pa.string()),
        ("partition", pa.int32()),
        ("offset", pa.int64()),
        ("timestamp", pa.timestamp("us", "UTC")),
    ]
)
COLUMNS = SinkColumns(
    key=0, value=1, topic=2, partition=3, headers=4, timestamp=None, changelog=None, invalid=5
)
LIMITS = RecordLimits(20_000)


def frame(*rows: dict[str, Any]) -> pa.RecordBatch:
    """Returns rows as Spark passes them; what a row does not name is valid."""
    usual = {"key": b"k", "value": b"v", "topic": "out", "partition": None, "headers": None, "mark": None}
    full = [{**usual, **row} for row in rows]
    types = [pa.binary(), pa.binary(), pa.string(), pa.int32(), HEADERS_ARROW, MARK]
    return pa.record_batch(
        [pa.array([row[name] for row in full], type_) for name, type_ in zip(usual, types, strict=True)],
        names=[*list(usual)[:5], "kafka_eos_invalid"],
    )


def staged(
    batch: pa.RecordBatch,
    folder: Path,
    limits: RecordLimits = LIMITS,
    *,
    drop: bool = False,
    columns: SinkColumns = COLUMNS,
) -> tuple[list[Any], list[dict[str, Any]], InvalidRows]:
    """Returns the values of the valid rows, and the dead letters with their headers as a dict."""
    place = StagingFolder.at(str(folder))
    stage = partial(PartStage, folder=place, batch="0", inline_bytes=1 << 20)
    origin = {records.APPLICATION: "app", records.BATCH: "7"}
    invalid = InvalidRows(None if drop else "dead", limits, origin, None, stage)
    good = [each for made in from_batches([batch], columns, invalid) for each in made["value"].to_pylist()]
    part = invalid.finish()
    found = [] if part is None else StagedRows(place, "0", [part]).batches()
    letters = [row for each in found for row in each.to_pylist()]
    for row in letters:
        row["headers"] = [(each["key"], each["value"]) for each in row["headers"]]
    return good, letters, invalid


def test_valid_rows_pass_unchanged(tmp_path: Path) -> None:
    good, letters, invalid = staged(frame({"value": b"1"}, {"value": None}, {"key": None}), tmp_path)
    assert (good, letters, invalid.count) == ([b"1", None, b"v"], [], 0)


def test_letters_of_large_arrow_types_are_like_the_others(tmp_path: Path) -> None:
    """Spark passes them with ``spark.sql.execution.arrow.useLargeVarTypes``."""
    mark = {"error": "NotJson", "message": "bad", "topic": "in", "partition": 3, "offset": 1}
    long = {"value": b"x" * 30_000}
    usual = frame(
        {"value": b"1"}, {"mark": mark, "headers": [{"key": "h", "value": b"1"}]}, {"topic": ""}, long
    )

    def large(type_: pa.DataType) -> pa.DataType:
        if pa.types.is_list(type_):
            return pa.list_(large(type_.value_type))
        if pa.types.is_struct(type_):
            return pa.struct([(each.name, large(each.type)) for each in type_])
        return {pa.string(): pa.large_string(), pa.binary(): pa.large_binary()}.get(type_, type_)

    schema = pa.schema([(each.name, large(each.type)) for each in usual.schema])
    found = staged(pa.RecordBatch.from_pylist(usual.to_pylist(), schema), tmp_path / "large")
    assert found[:2] == staged(usual, tmp_path / "usual")[:2]
    assert (found[0], len(found[1])) == ([b"1"], 3)


def test_a_marked_row_becomes_a_dead_letter_that_names_its_origin(tmp_path: Path) -> None:
    mark = {"error": "NotJson", "message": "bad ü", "topic": "in", "partition": 3, "offset": 1 << 40}
    mark["timestamp"] = 1_700_000_000_123_456
    headers = [
        {"key": "trace", "value": b"1"},
        {"key": records.MESSAGE, "value": b"of an earlier letter"},
        {"key": "empty", "value": None},
    ]
    good, letters, invalid = staged(
        frame({"value": b"1"}, {"value": b"2", "mark": mark, "headers": headers}, {"value": b"3"}), tmp_path
    )
    assert good == [b"1", b"3"]
    (letter,) = letters
    assert (letter["key"], letter["value"], letter["topic"]) == (b"k", b"2", "dead")
    assert letter["headers"] == [
        ("trace", b"1"),
        ("empty", None),
        (records.ERROR, b"NotJson"),
        (records.MESSAGE, "bad ü".encode()),
        (records.ORIGIN_TOPIC, b"in"),
        (records.ORIGIN_PARTITION, b"3"),
        (records.ORIGIN_OFFSET, b"1099511627776"),
        (records.ORIGIN_TIMESTAMP, b"1700000000123"),
        (records.HOLDS, b"input"),
        (records.APPLICATION, b"app"),
        (records.BATCH, b"7"),
        (records.TARGET_TOPIC, b"out"),
    ]
    assert invalid.count == 1


@pytest.mark.parametrize(
    ("row", "error", "text"),
    [
        ({"topic": None}, "InvalidRecord", "column 'topic' is null."),
        ({"topic": ""}, "InvalidRecord", "column 'topic' is empty."),
        ({"topic": "a b"}, "InvalidRecord", "is not a legal name of a topic"),
        ({"topic": ".."}, "InvalidRecord", "is not a legal name of a topic"),
        ({"topic": "x" * 250}, "InvalidRecord", "is not a legal name of a topic"),
        ({"partition": -1}, "InvalidRecord", "column 'partition' is negative."),
        ({"partition": 4}, "InvalidRecord", "names a partition that the topic does not have; it has 4"),
        ({"headers": [None]}, "InvalidRecord", "has a null entry"),
        ({"headers": [{"key": None, "value": b""}]}, "InvalidRecord", "has an entry with a null key"),
        ({"value": b"x" * 20_000}, "RecordTooLarge", "bytes; the largest allowed has 20000."),
        ({"key": b"x" * 20_000}, "RecordTooLarge", "the record has"),
        ({"mark": {}}, "MarkedAsInvalid", "marked the record as invalid"),
    ],
)
def test_each_rule_makes_a_dead_letter(tmp_path: Path, row: dict[str, Any], error: str, text: str) -> None:
    limits = RecordLimits(20_000, partitions=4)
    good, (letter,), _ = staged(frame({"value": b"1"}, row, {"value": b"3"}), tmp_path, limits)
    assert good == [b"1", b"3"]
    headers = dict(letter["headers"])
    assert headers[records.ERROR] == error.encode()
    assert text in headers[records.MESSAGE].decode()
    assert headers[records.HOLDS] == (b"input" if "mark" in row else b"output")


def test_an_unmarked_row_has_the_origin_that_its_column_names(tmp_path: Path) -> None:
    """A mark that names an origin counts more than the column."""
    origin = {"topic": "in", "partition": 1, "offset": 5, "timestamp": 1_700_000_000_000_000}
    mark = {"topic": "other", "offset": 9}
    batch = frame({"topic": None}, {"value": b"good"}, {"mark": mark}, {"partition": -1})
    type_ = pa.struct([field for field in MARK if field.name not in ("error", "message")])
    batch = batch.append_column("kafka_eos_origin", pa.array([origin, origin, origin, None], type_))
    good, letters, _ = staged(batch, tmp_path, columns=replace(COLUMNS, origin=6))
    found = [DeadLetter.parse(each["headers"]) for each in letters]
    assert good == [b"good"]
    assert [(each.origin_topic, each.origin_partition, each.origin_offset) for each in found] == [
        ("in", 1, 5),
        ("other", 1, 9),
        (None, None, None),
    ]
    assert [each.origin_timestamp_ms for each in found] == [1_700_000_000_000, 1_700_000_000_000, None]


def test_a_mark_says_that_the_row_is_output_and_incomplete(tmp_path: Path) -> None:
    """A replay refuses letters with the size of a value: it must not send a tombstone."""
    type_ = pa.struct([*MARK, pa.field("holds", pa.string())])
    marks = [{"message": "m", "holds": each} for each in ("incomplete", "output", "input", None)]
    rows = frame({"value": None}, {}, {}, {}).set_column(5, "kafka_eos_invalid", pa.array(marks, type_))
    _, letters, _ = staged(rows, tmp_path)
    found = [DeadLetter.parse(each["headers"]) for each in letters]
    assert [each.holds for each in found] == ["output", "output", "input", "input"]
    assert [each.value_bytes for each in found] == [0, None, None, None]


def test_a_mark_may_have_the_headers_of_a_row_without_a_column_for_them(tmp_path: Path) -> None:
    """They may name the schema of the record, which a replay sends again."""
    type_ = pa.struct([*MARK, pa.field("headers", HEADERS_ARROW)])
    own = [{"key": "__value_schema_id", "value": b"\1"}]
    marks = [{"message": "m", "headers": each} for each in (own, None)]
    batch = frame({}, {}).drop_columns(["headers"]).set_column(4, INVALID, pa.array(marks, type_))
    columns = replace(COLUMNS, headers=None, invalid=4)
    _, letters, _ = staged(batch, tmp_path, columns=columns)
    named = [[each for each in letter["headers"] if each[0].startswith("__value")] for letter in letters]
    assert named == [[("__value_schema_id", b"\1")], []]


def test_text_that_is_not_utf8_is_repaired_in_letters_and_names_its_rule() -> None:
    """Spark passes such text on unchecked, and Arrow refuses it with a bare error."""

    def text(*rows: bytes | None) -> pa.Array:
        return pa.array(rows, pa.binary()).view(pa.string())

    written: list[dict[str, Any]] = []

    class Stage:
        def write(self, batch: pa.RecordBatch) -> None:
            for row in batch.to_pylist():
                written.append({each["key"]: each["value"] for each in row["headers"]})

    value = pa.array([b"a", b"b"])
    entries = pa.StructArray.from_arrays([text(b"h\xff", b"g"), pa.array([b"1", b"2"])], ["key", "value"])
    headers = pa.ListArray.from_arrays(pa.array([0, 1, 2], pa.int32()), entries).cast(HEADERS_ARROW)
    struct = pa.StructArray.from_arrays([text(b"E\xff", b"E"), text(b"\xfe", b"x")], ["error", "message"])
    for columns, marks, left, reason in (
        ({}, text(b"bad \xff", None), [b"b"], "bad \ufffd"),
        ({}, struct, [], "\ufffd"),
        ({"topic": text(b"t\xff", b"ok")}, None, [b"b"], "column 'topic' is not valid UTF-8."),
        ({"headers": headers}, None, [b"b"], "column 'headers' has an entry whose key is not valid UTF-8."),
    ):
        written.clear()
        invalid = InvalidRows("dead", LIMITS, {}, "out", lambda schema: Stage())  # type: ignore[arg-type,return-value]
        marked = {} if marks is None else {"mark": marks}
        batch = pa.record_batch({"value": value, **columns, **marked})
        at = {name: batch.schema.get_field_index(name) for name in batch.schema.names}
        found = SinkColumns(None, None, None, None, None, None)
        named = replace(found, **{"invalid" if name == "mark" else name: each for name, each in at.items()})
        reasons = RowChecks(named, LIMITS).reasons(batch)
        assert reasons is not None
        assert invalid.take(batch, reasons, named)["value"].to_pylist() == left
        assert written[0][records.MESSAGE].decode() == reason


def test_rows_of_pyspark_4_0_name_the_same_origin(tmp_path: Path) -> None:
    at = datetime(2026, 1, 31, 14, 0, 0, 123_000)  # in the local time zone, as Spark's rows have it
    place = Row(topic="in", partition=1, offset=5, timestamp=at)
    mark = Row(error="E", message="m", topic=None, partition=None, offset=None, timestamp=None)
    rows = [
        (b"k", b"1", "out", None, None, mark, place),
        (b"k", b"2", "out", None, None, None, place),
        (b"k", b"3", None, None, None, None, None),
    ]
    columns = replace(COLUMNS, origin=6)
    place_of = StagingFolder.at(str(tmp_path))
    stage = partial(PartStage, folder=place_of, batch="0", inline_bytes=1 << 20)
    invalid = InvalidRows("dead", LIMITS, {}, None, stage)
    (good,) = from_rows(rows, columns, invalid)
    assert good["value"].to_pylist() == [b"2"]
    part = invalid.finish()
    assert part is not None
    (batch,) = StagedRows(place_of, "0", [part]).batches()
    marked, broken = (
        DeadLetter.parse((each["key"], each["value"]) for each in row) for row in batch["headers"].to_pylist()
    )
    assert (marked.holds, marked.origin_offset, marked.error) == ("input", 5, "E")
    assert marked.origin_timestamp_ms == round(at.timestamp() * 1000)
    assert (broken.holds, broken.origin_offset) == ("output", None)


def test_an_origin_of_another_type_is_refused() -> None:
    schema = StructType([StructField("value", StringType()), StructField("kafka_eos_origin", StringType())])
    with pytest.raises(InvalidSchemaError, match=r"record_origin\(\)"):
        check_frame(schema, topic_option="out", include_timestamp=False)


@pytest.mark.parametrize(
    ("hours", "limits", "is_bad"),
    [
        (25, RecordLimits(20_000, after_ms=24 * 3_600_000), True),
        (23, RecordLimits(20_000, after_ms=24 * 3_600_000), False),
        (0, RecordLimits(20_000, after_ms=1000, before_ms=1000), False),
        (-25, RecordLimits(20_000, before_ms=24 * 3_600_000), True),
        (-23, RecordLimits(20_000, before_ms=24 * 3_600_000), False),
        (-900_000, RecordLimits(20_000), True),  # before 1970
        (900_000, RecordLimits(20_000), False),
    ],
)
def test_timestamps_that_the_broker_refuses_make_dead_letters(
    tmp_path: Path, hours: int, limits: RecordLimits, is_bad: bool
) -> None:
    at = datetime.now(timezone.utc) + timedelta(hours=hours)
    times = pa.array([at], pa.timestamp("us", "UTC"))
    batch = frame({}).append_column("timestamp", times)
    good, letters, _ = staged(batch, tmp_path, limits, columns=replace(COLUMNS, timestamp=6))
    assert (len(good), len(letters)) == ((0, 1) if is_bad else (1, 0))


def test_a_compacted_topic_needs_keys(tmp_path: Path) -> None:
    good, (letter,), _ = staged(
        frame({"key": None, "value": b"1"}, {"value": b"2"}), tmp_path, RecordLimits(20_000, needs_key=True)
    )
    assert good == [b"2"]
    assert (
        "column 'key' is null, and the topic is compacted"
        in dict(letter["headers"])[records.MESSAGE].decode()
    )


def test_a_row_that_breaks_two_rules_becomes_one_dead_letter(tmp_path: Path) -> None:
    good, letters, invalid = staged(frame({"topic": None, "partition": -1}), tmp_path)
    assert (good, len(letters), invalid.count) == ([], 1, 1)


@pytest.mark.parametrize("size", [19_800, 20_000, 500_000])
def test_a_dead_letter_is_never_larger_than_a_record_may_be(tmp_path: Path, size: int) -> None:
    mark = {"error": "E" * 50_000, "message": "ü" * 50_000, "topic": "t" * 9_000, "partition": 1, "offset": 1}
    headers = [{"key": "h", "value": b"x" * 8_000}]
    rows = frame(
        {"value": b"x" * size, "mark": mark, "headers": headers},
        {"key": b"x" * size, "value": None, "mark": mark, "headers": headers, "topic": "t" * size},
    )
    good, letters, _ = staged(rows, tmp_path)
    assert good == []
    for letter in letters:
        parts = [letter["key"], letter["value"], *(each for pair in letter["headers"] for each in pair)]
        assert sum(len(each or b"") for each in parts) + 300 < LIMITS.record_bytes
    assert dict(letters[0]["headers"])[records.VALUE_BYTES] == str(size).encode()
    assert dict(letters[1]["headers"])[records.VALUE_BYTES] == b"0", "its key and headers are missing"


def test_dropped_rows_are_counted(tmp_path: Path) -> None:
    good, letters, invalid = staged(frame({"topic": None}, {"value": b"2"}), tmp_path, drop=True)
    assert (good, letters, invalid.dropped) == ([b"2"], [], 1)


def test_without_the_option_an_invalid_row_is_an_error() -> None:
    mark = {"error": "NotJson", "message": "bad"}
    with pytest.raises(InvalidRecordError, match=r"marks row 1 .*NotJson.*onInvalidRecord"):
        list(from_batches([frame({}, {"mark": mark})], COLUMNS))


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"onInvalidRecord": "dead-letter"}, "'deadLetter.topic' is not set"),
        ({"deadLetter.topic": "dead"}, "expected 'dead-letter'"),
        ({"onInvalidRecord": "dead-letter", "deadLetter.topic": "out"}, "expected two"),
        ({"onInvalidRecord": "drop", "processing.guarantee": "at_least_once"}, "exactly_once"),
        ({"onInvalidRecord": "ignore"}, "expected fail or drop or dead-letter"),
    ],
)
def test_options_that_do_not_fit_are_refused(options: dict[str, str], text: str) -> None:
    with pytest.raises(InvalidOptionError, match=text):
        parse_write({"kafka.bootstrap.servers": "b:9092", "topic": "out", **options}, streaming=True)


@pytest.mark.parametrize("kind", [pa.string(), pa.large_string()])
def test_topics_of_each_string_type_are_checked(tmp_path: Path, kind: pa.DataType) -> None:
    batch = frame({"topic": ""}, {"value": b"2"})
    batch = batch.set_column(2, "topic", batch["topic"].cast(kind))
    good, letters, _ = staged(batch, tmp_path)
    assert (good, len(letters)) == ([b"2"], 1)


def test_marks_without_a_value_are_refused_if_rows_go_only_to_sinks_outside_kafka() -> None:
    with pytest.raises(InvalidSchemaError, match="no string or binary column 'value'"):
        only_changelog(StructType([StructField("n", LongType()), StructField(INVALID, StringType())]))
    found = only_changelog(
        StructType([StructField("value", StringType()), StructField(INVALID, StringType())])
    )
    assert (found.value, found.invalid) == (0, 1)
