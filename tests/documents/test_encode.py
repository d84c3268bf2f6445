"""Arrow columns become JSON documents and keys, as a model of Spark in Python writes them."""

from __future__ import annotations

import decimal
import json
import os
import pickle
import struct
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from pyspark.sql.types import (
    ArrayType,
    BinaryType,
    BooleanType,
    DataType,
    DayTimeIntervalType,
    DecimalType,
    DoubleType,
    FloatType,
    IntegerType,
    LongType,
    MapType,
    NullType,
    StringType,
    StructField,
    StructType,
    TimestampNTZType,
    TimestampType,
    VariantType,
    YearMonthIntervalType,
)

from kafka_eos_source.documents import encode as module
from kafka_eos_source.documents.encode import JsonEncoding, KeyEncoding
from kafka_eos_source.errors import InvalidRecordError, InvalidSchemaError
from tests.support import sanitized
from tests.support.spark_text import arrow_type, as_json, as_key, double, present, structs, types, values

EXAMPLES = int(os.environ.get("JSON_EXAMPLES", "100"))
ZONES = ("UTC", "Europe/Berlin", "America/New_York", "Africa/Monrovia", "Australia/Lord_Howe", "Asia/Kolkata")


def row(**fields: DataType) -> StructType:
    return StructType([StructField(name, type_) for name, type_ in fields.items()])


def documents(type_: DataType, column: pa.Array | list[Any], zone: str = "UTC") -> list[str | None]:
    """Writes values as documents."""
    if isinstance(column, list):
        column = pa.array(column, arrow_type(type_))
    return texts(JsonEncoding(type_, zone).encode(column))


def texts(made: pa.Array) -> list[str | None]:
    made.validate(full=True)
    assert made.type == pa.binary()
    return [None if each is None else each.decode() for each in made.to_pylist()]


# -- any type ------------------------------------------------------------------------------------


@settings(max_examples=EXAMPLES, deadline=None)
@given(st.data())
def test_documents_are_as_in_the_model(data: st.DataObject) -> None:
    type_ = data.draw(structs(types(floating=True)))
    rows = data.draw(st.lists(values(type_), max_size=4))
    zone = data.draw(st.sampled_from(ZONES))
    column = pa.array([None, *rows, None], arrow_type(type_)).slice(1, len(rows))
    expected = [None if each is None else as_json(type_, each, zone) for each in rows]
    assert documents(type_, column, zone) == expected


@settings(max_examples=EXAMPLES, deadline=None)
@given(st.data())
def test_keys_are_as_in_the_model(data: st.DataObject) -> None:
    type_ = data.draw(
        types(floating=False).filter(lambda each: not isinstance(each, StringType | BinaryType))
    )
    rows = data.draw(st.lists(values(type_), max_size=4))
    zone = data.draw(st.sampled_from(ZONES))
    made = texts(KeyEncoding(type_, zone).encode(pa.array(rows, arrow_type(type_))))
    assert made == [None if each is None else as_key(type_, each, zone) for each in rows]


@settings(max_examples=EXAMPLES, deadline=None)
@given(st.data())
def test_documents_are_json_with_the_same_values(data: st.DataObject) -> None:
    type_ = data.draw(structs(st.sampled_from([StringType(), LongType(), ArrayType(StringType())])))
    rows = data.draw(st.lists(present(type_), max_size=4))
    made = documents(type_, rows)
    expected = [{name: each for name, each in one.items() if each is not None} for one in rows]
    assert [json.loads(each or "") for each in made] == expected


@settings(max_examples=EXAMPLES, deadline=None)
@given(st.data())
def test_other_arrow_types_of_the_same_values(data: st.DataObject) -> None:
    """Engines return large and encoded columns."""
    type_ = row(a=StringType(), b=ArrayType(StringType()), c=BinaryType())
    rows = data.draw(st.lists(present(type_), max_size=4))
    usual = pa.array(rows, arrow_type(type_))
    large = pa.large_string()
    others = [pa.struct([("a", large), ("b", pa.large_list(large)), ("c", pa.large_binary())])]
    others.append(
        pa.struct([("a", pa.string_view()), ("b", pa.list_(pa.string_view())), ("c", pa.binary_view())])
    )
    for other in others:
        assert documents(type_, pa.array(rows, other)) == documents(type_, usual)
    codes = pa.StructArray.from_arrays(
        [usual.field("a").dictionary_encode(), usual.field("b"), usual.field("c")], names=["a", "b", "c"]
    )
    assert documents(type_, codes) == documents(type_, usual)


def test_a_batch_and_a_null_column() -> None:
    type_ = row(a=IntegerType(), b=StringType(), c=NullType())
    batch = pa.record_batch({"a": pa.array([1, None], pa.int32()), "b": pa.nulls(2), "c": pa.nulls(2)})
    assert texts(JsonEncoding(type_, "UTC").encode(batch)) == ['{"a":1}', "{}"]
    assert documents(ArrayType(NullType()), [[None, None], []]) == ["[null,null]", "[]"]
    assert texts(KeyEncoding(NullType(), "UTC").encode(pa.nulls(2))) == [None, None]


def test_arrays_with_offsets_of_their_own() -> None:
    """Slices of arrays inside structs, lists and maps, and of a batch."""
    words = pa.array(["-", "-", "a", None, "c", "d"]).slice(2)
    flags = pa.array([None, True, False, None, True]).slice(1)
    lists = pa.ListArray.from_arrays(pa.array([9, 9, 0, 1, 1, 3, 4], pa.int32()).slice(2), words)
    maps = pa.MapArray.from_arrays(
        pa.array([9, 0, 1, 1, 2, 3], pa.int32()).slice(1), words.fill_null("b"), flags
    )
    inner = pa.StructArray.from_arrays([words, flags], names=["w", "f"])
    batch = pa.record_batch({"l": lists, "m": maps, "s": inner}).slice(1)
    strings, booleans = StringType(), BooleanType()
    type_ = row(l=ArrayType(strings), m=MapType(strings, booleans), s=row(w=strings, f=booleans))
    assert texts(JsonEncoding(type_, "UTC").encode(batch)) == [
        '{"l":[],"m":{},"s":{"f":false}}',
        '{"l":[null,"c"],"m":{"b":false},"s":{"w":"c"}}',
        '{"l":["d"],"m":{"c":null},"s":{"w":"d","f":true}}',
    ]
    assert [len(each) for each in JsonEncoding(type_, "UTC").slices(batch)] == [3]


def test_fields_that_are_null_are_written_if_the_session_says_so() -> None:
    type_ = row(a=NullType(), b=row(c=LongType()), d=LongType())
    column = pa.array([{"b": {}, "d": None}, {"b": None, "d": 1}], arrow_type(type_))
    expected = ['{"a":null,"b":{"c":null},"d":null}', '{"a":null,"b":null,"d":1}']
    for made in (JsonEncoding(type_, "UTC", has_nulls=True), KeyEncoding(type_, "UTC", has_nulls=True)):
        assert texts(pickle.loads(pickle.dumps(made)).encode(column)) == expected


def test_what_is_below_a_null_is_not_written() -> None:
    items = pa.array([1, 2, 3], pa.int32())
    lists = pa.ListArray.from_arrays(pa.array([0, 2, 3], pa.int32()), items, mask=pa.array([True, False]))
    inner = pa.StructArray.from_arrays([lists], names=["b"], mask=pa.array([False, True]))
    column = pa.StructArray.from_arrays([inner], names=["a"])
    assert documents(row(a=row(b=ArrayType(IntegerType()))), column) == ['{"a":{}}', "{}"]


def test_encodings_are_pickled_and_compared() -> None:
    for made in (
        JsonEncoding(row(a=LongType()), "Europe/Berlin"),
        KeyEncoding(DecimalType(9, 8), "UTC", False),
    ):
        again = pickle.loads(pickle.dumps(made))
        assert again == made
    assert texts(again.encode(pa.array([decimal.Decimal("1E-8")], pa.decimal128(9, 8)))) == ["1E-8"]


# -- numbers -------------------------------------------------------------------------------------


def floating(bits: int, letter: str) -> float:
    return struct.unpack(f"<{letter}", bits.to_bytes(4 if letter == "f" else 8, "little"))[0]


@settings(max_examples=EXAMPLES, deadline=None)
@given(st.lists(st.integers(0, 2**64 - 1), min_size=20, max_size=20))
def test_doubles_of_any_bits(bits: list[int]) -> None:
    numbers = [floating(each, "d") for each in bits]
    numbers += [floating(each & 0x7FF0 << 48 | each & 3, "d") for each in bits]  # around powers of two
    made = [
        (each or "")[5:-1].strip('"') for each in documents(row(a=DoubleType()), [{"a": n} for n in numbers])
    ]
    assert made == [double(each) for each in numbers]


@settings(max_examples=EXAMPLES, deadline=None)
@given(st.lists(st.integers(0, 2**32 - 1), min_size=20, max_size=20))
def test_floats_of_any_bits(bits: list[int]) -> None:
    numbers = [floating(each, "f") for each in bits]
    numbers += [floating(each & 0x7F80 << 16 | each & 3, "f") for each in bits]
    made = [
        (each or "")[5:-1].strip('"') for each in documents(row(a=FloatType()), [{"a": n} for n in numbers])
    ]
    assert made == [double(each, is_float=True) for each in numbers]


@pytest.mark.parametrize(
    ("number", "text"),
    [
        (0.0, "0.0"),
        (-0.0, "-0.0"),
        (4.9e-324, "4.9E-324"),
        (2e-323, "2.0E-323"),
        (1e23, "1.0E23"),
        (2.2250738585072014e-308, "2.2250738585072014E-308"),
        (1.7976931348623157e308, "1.7976931348623157E308"),
        (9999999.0, "9999999.0"),
        (1e7, "1.0E7"),
        (0.001, "0.001"),
        (0.00099, "9.9E-4"),
        (float(2**53), "9.007199254740992E15"),
        (123456.0, "123456.0"),
        (float("nan"), '"NaN"'),
        (float("-inf"), '"-Infinity"'),
    ],
)
def test_doubles(number: float, text: str) -> None:
    assert documents(ArrayType(DoubleType()), [[number]]) == [f"[{text}]"]


# -- text ----------------------------------------------------------------------------------------


def binary_string(content: bytes) -> pa.Array:
    """Returns a string column with any bytes, which Arrow does not check."""
    made = pa.array([content], pa.binary())
    return pa.Array.from_buffers(pa.string(), 1, made.buffers())


@settings(max_examples=EXAMPLES, deadline=None)
@given(st.binary(max_size=40), st.integers(0, 12))
@example(b"\xed\xa0\x80", 0)
@example(b"\xf0\x9f\x98", 7)
def test_bytes_that_are_no_utf8_become_replacement_characters(content: bytes, before: int) -> None:
    """Whatever a string has, the document is valid, and Python replaces as much, surrogates apart."""
    column = pa.StructArray.from_arrays([binary_string(b"x" * before + content)], names=["a"])
    (made,) = documents(row(a=StringType()), column)
    found = json.loads(made or "")["a"]
    expected = "x" * before + content.decode(errors="replace")
    assert found.replace("\ufffd", "") == expected.replace("\ufffd", "")
    if b"\xed" not in content:
        assert found == expected


def test_keys_of_strings_and_bytes_stay_as_they_are() -> None:
    made = KeyEncoding(StringType(), "UTC").encode(binary_string(b'\xff"'))
    assert made.to_pylist() == [b'\xff"']
    assert KeyEncoding(BinaryType(), "UTC").encode(pa.array([b"\0", None])).to_pylist() == [b"\0", None]


# -- refusals and limits -------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("type_", "named"),
    [
        (row(a=VariantType()), "column 'a' of type variant is a type that only Spark can write"),
        (row(a=row(b=DayTimeIntervalType())), "column 'a.b' of type interval day to second"),
        (row(a=ArrayType(YearMonthIntervalType())), "column 'a[]'"),
        (row(a=MapType(BinaryType(), LongType())), "column 'a{} (key)' of type binary is the key of a map"),
        (row(a=MapType(ArrayType(LongType()), LongType())), "is the key of a map"),
        (row(**{"\ud800": LongType()}), "has a name that is no text"),
        (LongType(), "is no struct, array or map"),
    ],
)
def test_types_that_only_spark_writes(type_: DataType, named: str) -> None:
    with pytest.raises(InvalidSchemaError) as caught:
        JsonEncoding(type_, "UTC")
    assert named in str(caught.value)


def test_a_time_zone_that_only_spark_knows() -> None:
    with pytest.raises(InvalidSchemaError, match="time zone 'SystemV/EST5'"):
        JsonEncoding(row(a=TimestampType()), "SystemV/EST5")
    assert documents(row(a=LongType()), [{"a": 1}], "SystemV/EST5") == ['{"a":1}'], "there is no timestamp"


def test_a_type_that_is_nested_too_deeply() -> None:
    type_: DataType = LongType()
    for _ in range(70):
        type_ = ArrayType(type_)
    with pytest.raises(InvalidSchemaError, match="nested more than 64 levels"):
        JsonEncoding(type_, "UTC")


@pytest.mark.parametrize("type_", [DoubleType(), row(a=ArrayType(FloatType()))])
def test_keys_with_floating_point_numbers_are_left_to_spark(type_: DataType) -> None:
    with pytest.raises(InvalidSchemaError, match="depends on the version of Java"):
        KeyEncoding(type_, "UTC")


@pytest.mark.parametrize(
    ("type_", "found"),
    [
        (LongType(), pa.string()),
        (StringType(), pa.binary()),
        (TimestampType(), pa.timestamp("us")),
        (TimestampNTZType(), pa.timestamp("us", "UTC")),
        (ArrayType(LongType()), pa.int64()),
        (row(b=LongType()), pa.struct([])),
        (MapType(StringType(), LongType()), pa.list_(pa.int64())),
    ],
)
def test_columns_of_another_type(type_: DataType, found: pa.DataType) -> None:
    with pytest.raises(InvalidSchemaError, match="column 'a': Arrow type"):
        documents(row(a=type_), pa.array([{"a": None}], pa.struct([("a", found)])))


def test_values_that_do_not_fit() -> None:
    with pytest.raises(InvalidSchemaError, match="do not fit"):
        documents(row(a=IntegerType()), pa.array([{"a": 2**40}], pa.struct([("a", pa.int64())])))


def test_what_takes_too_much_memory_is_written_in_slices(monkeypatch: pytest.MonkeyPatch) -> None:
    encoding = JsonEncoding(row(a=StringType()), "UTC")
    rows = [{"a": "x" * 100}, None, {"a": "y" * 300}, {"a": "z"}, {"a": "w" * 900}]
    column = pa.array(rows, arrow_type(encoding.type_))
    assert len(encoding.encode(column, 512)) == 4
    assert len(encoding.encode(column, 100)) == 0
    whole = texts(encoding.encode(column))
    monkeypatch.setattr(module, "MOST_BYTES", 1024)
    slices = list(encoding.slices(column))
    assert len(slices) > 1
    assert [text for each in slices for text in texts(each)] == whole
    monkeypatch.setattr(module, "MOST_BYTES", 512)
    with pytest.raises(InvalidRecordError, match="row 4 of a batch takes more"):
        list(encoding.slices(column))
    assert [len(each) for each in encoding.slices(column.slice(0, 0))] == [0]


def test_items_that_take_no_memory_are_bounded() -> None:
    """A list of nulls has no bytes in Arrow, whatever its length."""
    items = pa.nulls(100_000_000)
    column = pa.ListArray.from_arrays(pa.array([0, len(items)], pa.int32()), items)
    assert len(JsonEncoding(ArrayType(NullType()), "UTC").encode(column)) == 0


# -- the library ---------------------------------------------------------------------------------


def test_the_library_reads_and_writes_within_its_memory(tmp_path: Path) -> None:
    sanitized.check(
        "json_text", tmp_path, ["documents/test_encode.py"], "not library", {"JSON_EXAMPLES": "15"}
    )
