"""`map_in_read` with a schema registry: undecodable rows go around the function and are marked."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pytest
from pyspark.sql.types import BinaryType, IntegerType, LongType, MapType, StringType, StructType

from kafka_eos_source.documents.converted import Converted, slices
from kafka_eos_source.errors import InvalidRecordError, InvalidSchemaError
from kafka_eos_source.in_read.converted_columns import HIDDEN_HEADERS, converted_columns
from kafka_eos_source.protocol.records import UNDECODABLE
from kafka_eos_source.registry.frames import VALUE_HEADER
from kafka_eos_source.spark.arrow import HEADERS_ARROW, arrow_schema, fit
from kafka_eos_source.spark.pickled import from_option, to_option
from kafka_eos_source.spark.schema import HEADERS_TYPE

TYPES = {
    "key": BinaryType(),
    "value": BinaryType(),
    "topic": StringType(),
    "partition": IntegerType(),
    "offset": LongType(),
}


def schema_of(*columns: str) -> StructType:
    schema = StructType()
    for each in columns:
        schema = schema.add(each, TYPES[each])
    return schema


FRAME = schema_of(*TYPES)


class Digits:
    """Decodes digits, as many rows at once as it is told."""

    takes_headers = False

    def __init__(self, rows: int) -> None:
        self.rows = rows

    def slices(self, column: pa.Array) -> Iterator[Converted]:
        return slices(self.decode, column, "decoded")

    def decode(self, column: pa.Array) -> Converted:
        column = column[: self.rows]
        texts = [each or b"0" for each in column.to_pylist()]
        bad = {row: "no digits" for row, each in enumerate(texts) if not each.isdigit()}
        numbers = pa.array([None if row in bad else int(each) for row, each in enumerate(texts)])
        return Converted(pc.if_else(column.is_valid(), numbers, None), bad)


class Number:
    """Encodes numbers below 100."""

    header = None

    def slices(self, column: pa.Array) -> Iterator[Converted]:
        return slices(self.encode, column, "encoded")

    def encode(self, column: pa.Array) -> Converted:
        column = column[:3]
        texts = column.cast(pa.string()).cast(pa.binary())
        large = pc.fill_null(pc.greater(column, 99), False)
        bad = dict.fromkeys(np.flatnonzero(large.to_numpy(zero_copy_only=False)).tolist(), "too large")
        return Converted(pc.if_else(large, None, texts), bad)


class Chosen:
    """Stands for what `registry_schema` returns."""

    def __init__(self, rows: int = 1000) -> None:
        self.rows = rows

    def decoding(self, **_: bool) -> Digits:
        return Digits(self.rows)

    def encoding(self, **_: bool) -> Number:
        return Number()


def batch(*values: bytes | None) -> pa.RecordBatch:
    rows = len(values)
    return pa.RecordBatch.from_pydict(
        {
            "key": pa.array([b"k%d" % row for row in range(rows)]),
            "value": pa.array(values, pa.binary()),
            "topic": pa.repeat(pa.scalar("t"), rows),
            "partition": pa.array([1] * rows, pa.int32()),
            "offset": pa.array(range(rows), pa.int64()),
        }
    )


def times_ten(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    for each in batches:
        yield pa.record_batch({"key": each["key"], "value": pc.multiply(each["value"], 10)})


def run(function: Any, rows: list[str], *batches: pa.RecordBatch, **named: Any) -> list[dict[str, Any]]:
    chosen = {name: {each: Chosen() for each in columns} for name, columns in named.items()}
    decoders: Any = {name: each.decoding() for name, each in chosen.get("decode", {}).items()}
    made = converted_columns(function, decoders, chosen.get("encode", {}), FRAME, schema_of(*rows))
    made = from_option(to_option(made, "it", fix=""))  # as it travels to the tasks
    schema = arrow_schema(made.marked)
    return [row for each in made(iter(batches)) for row in fit(each, schema, "it").to_pylist()]


def test_good_rows_pass_through_and_bad_ones_are_marked_with_their_bytes_and_origin() -> None:
    found = run(
        times_ten,
        ["key", "value"],
        batch(b"1", b"x", None),
        batch(b"y"),
        batch(b"3", b"20"),
        decode=["value"],
        encode=["value"],
    )
    marks = {each["value"]: each.pop("kafka_eos_invalid") for each in found}
    assert marks[b"x"] == {
        "error": UNDECODABLE,
        "message": "column 'value': no digits",
        "topic": "t",
        "partition": 1,
        "offset": 1,
        "timestamp": None,  # the batch has no such column
        "holds": None,  # the record that was read
        "headers": None,
    }
    assert marks[b"y"]["offset"] == 0
    good = [each for each in found if marks[each["value"]] is None]
    assert good == [{"key": b"k0", "value": b"10"}, {"key": b"k0", "value": b"30"}]
    assert len(found) == 6


def test_columns_that_end_at_different_rows_are_cut_where_the_first_ends() -> None:
    """As if the memory of one call was enough for three keys, and for two values."""
    made = converted_columns(
        lambda batches: batches,
        {"key": Digits(3), "value": Digits(2)},  # type: ignore[dict-item]
        {"key": Chosen(), "value": Chosen()},  # type: ignore[dict-item]
        FRAME,
        schema_of("key", "value"),
    )
    given = batch(*(b"x" if n == 4 else b"%d" % n for n in range(9)))
    given = given.set_column(0, "key", pa.array([b"%d" % (10 * n) for n in range(9)]))
    found = list(made(iter([given])))
    assert [each.num_rows for each in found] == [2, 2, 1, 1, 2, 1]
    rows = [row for each in found for row in each.to_pylist()]
    marks = {row["value"]: row.pop("kafka_eos_invalid") for row in rows}
    assert {value for value, mark in marks.items() if mark} == {b"x"}
    assert marks[b"x"]["offset"] == 4
    wanted = {b"x" if n == 4 else b"%d" % n: b"%d" % (10 * n) for n in range(9)}
    assert {row["value"]: row["key"] for row in rows} == wanted


def test_a_null_value_stays_null_and_a_value_that_does_not_fit_is_marked() -> None:
    found = run(times_ten, ["key", "value"], batch(None, b"50"), decode=["value"], encode=["value"])
    assert [each["value"] for each in found] == [None, None]
    assert found[0]["kafka_eos_invalid"] is None
    assert found[1]["kafka_eos_invalid"]["message"] == "column 'value': too large"


def test_without_a_function_rows_are_decoded_and_encoded_again() -> None:
    found = run(None, FRAME.names, batch(b"07", b"z"), decode=["value"], encode=["value"])
    assert {each["value"] for each in found} == {b"7", b"z"}


def test_marks_of_the_function_stay_and_a_text_becomes_the_message() -> None:
    def marking(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        for each in batches:
            yield each.append_column("kafka_eos_invalid", pa.array(["odd", None, None])).select(
                ["value", "kafka_eos_invalid"]
            )

    found = run(marking, ["value"], batch(b"1", b"2", b"300"), decode=["value"], encode=["value"])
    assert [each["kafka_eos_invalid"] and each["kafka_eos_invalid"]["message"] for each in found] == [
        "odd",
        None,
        "column 'value': too large",
    ]


def test_a_row_of_the_function_is_never_taken_for_the_record_that_was_read() -> None:
    """A replay would send a tombstone, or a value of the output, to the topic of the input."""

    def marking(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        for each in batches:
            mark = pa.array(
                [None, None, {"error": "Odd", "message": "m", "topic": "in", "offset": 7}, {"message": "n"}]
            )
            yield pa.record_batch({"value": each["value"], "topic": each["topic"], "kafka_eos_invalid": mark})

    found = run(
        marking,
        ["value", "topic"],
        batch(b"1", b"300", b"2", b"400"),
        decode=["value"],
        encode=["value"],
    )
    marks = [each["kafka_eos_invalid"] for each in found]
    assert marks[0] is None
    assert marks[1]["message"] == "column 'value': too large"
    assert [each["holds"] for each in marks[1:]] == ["incomplete", "output", "incomplete"]
    assert [each["topic"] for each in marks[1:]] == [None, "in", None], "not the column of the output"
    assert [marks[2][name] for name in ("error", "message", "offset")] == ["Odd", "m", 7]
    assert marks[3]["message"] == "n", "the function's reason counts more"


class Named(Number):
    """Encodes numbers below 100, whose schemas headers name."""

    header, name = VALUE_HEADER, b"\1" + bytes(16)


class Seeing(Digits):
    """Decodes digits of records without a header ``bad``."""

    takes_headers = True

    def slices(self, column: pa.Array, headers: pa.Array) -> Iterator[Converted]:  # type: ignore[override]
        names = [[each["key"] for each in own or []] for own in headers.to_pylist()]
        wrong = pa.array(["bad" in own for own in names])
        return super().slices(pc.if_else(wrong, pa.scalar(b"x", column.type), column))


HEADER = [{"key": VALUE_HEADER, "value": b"of the record"}]
OTHER = [{"key": "trace", "value": b"t"}]


def with_headers(*headers: list[dict[str, Any]] | None, column: str) -> pa.RecordBatch:
    numbers = (b"%d" % number for number in range(1, 1 + len(headers)))
    return batch(*numbers).append_column(column, pa.array(headers, HEADERS_ARROW))


@pytest.mark.parametrize("is_declared", [True, False])
@pytest.mark.parametrize("column", ["headers", HIDDEN_HEADERS])
def test_decoders_see_headers_and_encoders_set_their_own(is_declared: bool, column: str) -> None:
    seen: list[list[str]] = []

    def function(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        for each in batches:
            seen.append(each.schema.names)
            given = {"value": pc.multiply(each["value"], 60)}
            if is_declared:
                own = [[*HEADER, *OTHER]] * each.num_rows
                given["headers"] = pa.array(own, HEADERS_ARROW)
            yield pa.record_batch(given)

    rows = schema_of("value")
    if is_declared:
        rows = rows.add("headers", HEADERS_TYPE)
    bad = [{"key": "bad", "value": None}, *HEADER]
    given = with_headers(HEADER, bad, None, column=column)
    encode: Any = {"value": type("", (), {"encoding": lambda self, **_: Named()})()}
    made = converted_columns(function, {"value": Seeing(9)}, encode, FRAME, rows, headers=column)
    assert made.marked.names == ["value", "headers", "kafka_eos_invalid"]
    schema = arrow_schema(made.marked)
    found = [row for each in made(iter([given])) for row in fit(each, schema, "it").to_pylist()]
    assert (HIDDEN_HEADERS in seen[0], "headers" in seen[0]) == (False, column == "headers")
    own = [{"key": VALUE_HEADER, "value": Named.name}]
    others = OTHER if is_declared else []
    by_value = {row["value"]: row for row in found}
    assert by_value[b"60"]["headers"] == [*others, *own]
    assert by_value[b"2"]["headers"] == bad, "a dead letter names the schema of its value"
    assert by_value[b"2"]["kafka_eos_invalid"]["message"] == "column 'value': no digits"
    assert by_value[None]["headers"] == (others or None), "180 does not fit"


def test_the_mark_of_a_record_keeps_its_headers_if_the_result_has_no_column_for_them() -> None:
    bad = [{"key": "bad", "value": None}, *HEADER]
    given = with_headers(HEADER, bad, column=HIDDEN_HEADERS)
    encode: Any = {"value": Chosen()}
    rows = schema_of("key", "value")
    made = converted_columns(times_ten, {"value": Seeing(9)}, encode, FRAME, rows, headers=HIDDEN_HEADERS)
    assert made.marked.names == ["key", "value", "kafka_eos_invalid"]
    marked = [row for each in made(iter([given])) for row in each.to_pylist()]
    found = {row["value"]: row["kafka_eos_invalid"] for row in marked}
    assert found[b"10"] is None
    assert found[b"2"]["headers"] == bad


def test_a_value_with_an_id_in_front_loses_the_header_of_the_record_that_was_read() -> None:
    """A consumer would take it for the schema of the new value."""
    rows = schema_of("value").add("headers", HEADERS_TYPE)
    given = with_headers([*HEADER, *OTHER], HEADER, None, column="headers").select(["value", "headers"])
    given = given.set_column(0, "value", pa.array([1, 2, 3]))
    made = converted_columns(lambda batches: batches, {}, {"value": Chosen()}, FRAME, rows)  # type: ignore[dict-item]
    found = [row for each in made(iter([given])) for row in each.to_pylist()]
    assert [(row["value"], row["headers"]) for row in found] == [(b"1", OTHER), (b"2", None), (b"3", None)]
    wrong = schema_of("value").add("headers", MapType(StringType(), BinaryType()))
    with pytest.raises(InvalidSchemaError, match="'headers' of the result is map<string,binary>; expected"):
        converted_columns(None, {}, {"value": Chosen()}, FRAME, wrong)  # type: ignore[dict-item]


def test_columns_that_cannot_be_decoded_or_encoded_are_refused_early() -> None:
    with pytest.raises(InvalidSchemaError, match="decode names the column 'topic', which is string"):
        run(times_ten, ["value"], decode=["topic"])
    with pytest.raises(InvalidSchemaError, match="encode names the column 'key', which is missing"):
        run(times_ten, ["value"], encode=["key"])
    with pytest.raises(InvalidSchemaError, match="no function that takes the decoded values"):
        run(None, ["value"], decode=["value"])


def test_a_function_that_returns_something_else_is_named() -> None:
    with pytest.raises(InvalidRecordError, match="returned a batch without the column 'key'"):
        run(lambda rows: (each.select(["value"]) for each in rows), ["key"], batch(b"1"), encode=["key"])
    with pytest.raises(InvalidRecordError, match="returned a int; expected an iterable"):
        run(lambda rows: 5, ["value"], batch(b"1"), decode=["value"])
