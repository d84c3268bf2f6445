"""Arrow columns become Avro payloads, which fastavro reads."""

from __future__ import annotations

import copy
import datetime
import decimal
import io
import json
from collections.abc import Sequence
from typing import Any

import fastavro
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kafka_eos_source.documents.converted import Converted
from kafka_eos_source.errors import InvalidSchemaError
from kafka_eos_source.registry.avro import AvroEncoder, arrow_type, encoder, kernel, schema_for
from kafka_eos_source.registry.avro_encode import compile_encoder
from kafka_eos_source.registry.avro_schema import parse
from tests.registry.avro_kit import decode, numbers, record
from tests.registry.avro_model import EXAMPLES, is_struct_of_members, kind_of, schema_of, schemas, values
from tests.registry.avro_model import encode as fastavro_encode


def encode(schema: Any, column: pa.Array, prefix: bytes = b"") -> Converted:
    program = compile_encoder(parse(schema_of(schema)), column.type)
    made = AvroEncoder(program, kernel()).encode(column, prefix)
    made.values.validate(full=True)
    return made


def read(schema: Any, column: pa.Array) -> list[Any]:
    """Encodes a column of valid values, and reads the payloads with fastavro."""
    made = encode(schema, column)
    assert not made.errors
    parsed = fastavro.parse_schema(copy.deepcopy(schema))
    return [fastavro.schemaless_reader(io.BytesIO(payload), parsed) for payload in made.values.to_pylist()]


def error(schema: Any, found: pa.DataType, value: Any) -> str:
    """Encodes one value that is not valid between two nulls, and returns its message."""
    made = encode(schema, pa.array([None, value, None], found))
    assert made.values.null_count == 3
    assert not len(made.values.buffers()[2]), "what was written of the row is taken back"
    assert list(made.errors) == [1]
    return made.errors[1]


@settings(max_examples=EXAMPLES, deadline=None)
@given(st.data())
def test_random_values(data: st.DataObject) -> None:
    """What fastavro encoded is decoded, and encoded again to the same bytes."""
    schema = data.draw(schemas())
    rows = data.draw(st.lists(values(schema), max_size=5))
    payloads: list[bytes | None] = [fastavro_encode(schema, row) for row in rows]
    if data.draw(st.booleans()):
        payloads.insert(data.draw(st.integers(0, len(payloads))), None)
    column = decode(schema_of(schema), payloads).values
    first = data.draw(st.integers(0, len(column)))
    column, payloads = column.slice(first), payloads[first:]
    made = encode(schema, column, b"\0frame")
    again = decode(schema_of(schema), made.values.to_pylist(), start=6)
    assert not again.errors
    assert repr(numbers(again.values)) == repr(numbers(pa.concat_arrays([column, column[:0]])))
    if not _is_ambiguous(schema):
        # A null value of a union is a null row, and stays one.
        valid = column.is_valid().to_pylist()
        expected = [
            b"\0frame" + (payload or b"") if ok else None for payload, ok in zip(payloads, valid, strict=True)
        ]
        assert made.values.to_pylist() == expected


def _is_ambiguous(found: Any) -> bool:
    """Whether a value has several encodings: decimals, and unions of two types of numbers."""
    unions = _unions(found)
    return "decimal" in json.dumps(found) or any(
        len([one for one in union if one != "null"]) > 1 and not is_struct_of_members(union)
        for union in unions
    )


def _unions(found: Any) -> list[Any]:
    kind = kind_of(found)
    if kind == "union":
        return [found, *(union for one in found for union in _unions(one))]
    if kind == "record":
        return [union for one in found["fields"] for union in _unions(one["type"])]
    if kind in ("array", "map"):
        return _unions(found["items" if kind == "array" else "values"])
    return []


FIXED2 = {"type": "fixed", "name": "F", "size": 2}
INT_RECORD = record({"name": "x", "type": "int"}, name="In")


def decimal_of(precision: int, scale: int) -> dict[str, Any]:
    return {"type": "bytes", "logicalType": "decimal", "precision": precision, "scale": scale}


@pytest.mark.parametrize(
    ("schema", "found", "value", "message"),
    [
        ("int", pa.int64(), 1 << 31, "2147483648 does not fit into an int"),
        ({"type": "enum", "name": "E", "symbols": ["A"]}, pa.string(), "BÄ", "the enum has no symbol 'BÄ'"),
        (FIXED2, pa.binary(), b"123", "the value has 3 bytes, but the fixed type has 2"),
        (
            decimal_of(4, 2),
            pa.decimal128(10, 2),
            decimal.Decimal("100.00"),
            "the decimal has more digits than the precision of the type",
        ),
        (
            {"type": "long", "logicalType": "timestamp-nanos"},
            pa.timestamp("us", "UTC"),
            1 << 60,
            "the timestamp 1152921504606846976 is too far from 1970 for the unit of the type",
        ),
        (
            ["int", "string"],
            pa.struct({"member0": pa.int32(), "member1": pa.string()}),
            {"member0": 1, "member1": "x"},
            "2 members of the union are set; exactly one must be",
        ),
        (
            ["int", "string"],
            pa.struct({"member0": pa.int32(), "member1": pa.string()}),
            {"member0": None, "member1": None},
            "0 members of the union are set; exactly one must be",
        ),
    ],
)  # fmt: skip
def test_messages_of_invalid_values(schema: Any, found: pa.DataType, value: Any, message: str) -> None:
    assert error(schema, found, value) == message
    inside = record(
        {"name": "list", "type": {"type": "array", "items": record({"name": "x", "type": schema})}}
    )
    inside["name"] = "Outer"
    nested = pa.struct({"list": pa.list_(pa.struct({"x": found}))})
    assert error(inside, nested, {"list": [{"x": value}]}) == f"field list[].x: {message}"


def test_null_where_the_schema_does_not_allow_it() -> None:
    schema = record({"name": "a", "type": "string"}, {"name": "b", "type": {"type": "map", "values": "int"}})
    found = pa.struct({"a": pa.string(), "b": pa.map_(pa.string(), pa.int32())})
    null = "the value is null, but the schema does not allow null"
    assert error(schema, found, {"a": None, "b": []}) == f"field a: {null}"
    assert error(schema, found, {"a": "", "b": [("k", None)]}) == f"field b{{}}: {null}"


def test_a_string_that_is_not_utf8() -> None:
    broken = pa.Array.from_buffers(
        pa.string(), 1, [None, pa.py_buffer(b"\0\0\0\0\2\0\0\0"), pa.py_buffer(b"\xff\xff")]
    )
    assert encode("string", broken).errors == {0: "a string is not valid UTF-8"}


def test_arrow_types() -> None:
    """Types that `from_avro` does not give, but a column may have."""
    text = pa.array(["a", "b", "a"])
    assert read("string", text.dictionary_encode()) == ["a", "b", "a"]
    assert read("string", text.cast(pa.large_string())) == ["a", "b", "a"]
    assert read("string", text.cast(pa.string_view())) == ["a", "b", "a"]
    assert read("bytes", pa.array([b"xy"], pa.binary(2))) == [b"xy"]
    for kind in (pa.int8(), pa.int16(), pa.int32(), pa.int64()):
        assert read("long", pa.array([-5, 7], kind)) == [-5, 7]
    assert read("int", pa.array([200], pa.uint8())) == [200]
    assert read("double", pa.array([0.5], pa.float32())) == [0.5]
    numbers = {"type": "array", "items": "long"}
    for kind in (pa.list_(pa.int64()), pa.large_list(pa.int64()), pa.list_(pa.int64(), 2)):
        assert read(numbers, pa.array([[1, 2]], kind)) == [[1, 2]]


@pytest.mark.parametrize("unit", ["s", "ms", "us", "ns"])
@pytest.mark.parametrize("wanted", ["millis", "micros", "nanos"])
def test_units_of_timestamps(unit: str, wanted: str) -> None:
    per_second = {
        "s": 1,
        "ms": 10**3,
        "us": 10**6,
        "ns": 10**9,
        "millis": 10**3,
        "micros": 10**6,
        "nanos": 10**9,
    }
    number = -3 * per_second[unit] - 1
    schema = {"type": "long", "logicalType": f"timestamp-{wanted}"}
    made = encode(schema, pa.array([number], pa.timestamp(unit, "Europe/Berlin")))
    expected = number * per_second[wanted] // per_second[unit]
    assert fastavro.schemaless_reader(io.BytesIO(made.values[0].as_py()), "long") == expected


@pytest.mark.parametrize("scale", [0, 2, 5])
@pytest.mark.parametrize("size", [0, 16, 20])
def test_decimals(scale: int, size: int) -> None:
    kind: Any = {"type": "fixed", "name": "F", "size": size} if size else {"type": "bytes"}
    schema = {**kind, "logicalType": "decimal", "precision": 38, "scale": 5}
    texts = [
        "0",
        "1",
        "-1",
        "127",
        "128",
        "-128",
        "-129",
        "9" * 33,
        "-" + "9" * 33,
        str(1 << 64),
        str(-(1 << 80)),
    ]
    found = [decimal.Decimal(text) for text in texts]
    assert read(schema, pa.array(found, pa.decimal128(38 - 5 + scale, scale))) == found


def test_fields_that_the_column_lacks() -> None:
    schema = record(
        {"name": "a", "type": "int", "default": 5},
        {"name": "b", "type": ["string", "null"]},
        {"name": "c", "type": "string"},
    )
    assert read(schema, pa.array([{"c": "x"}])) == [{"a": 5, "b": None, "c": "x"}]


def test_a_union_chooses_the_branch_of_the_columns_type() -> None:
    schema = ["null", "double", "string", "long", {"type": "array", "items": "int"}]
    assert read(record({"name": "u", "type": schema}), pa.array([{"u": 7}, {"u": None}])) == [
        {"u": 7},
        {"u": None},
    ]
    assert encode(schema, pa.array([7])).values.to_pylist() == [b"\6\x0e"]
    assert encode(schema, pa.array(["x"])).values.to_pylist() == [b"\4\2x"]
    assert encode(schema, pa.array([[1]], pa.list_(pa.int32()))).values.to_pylist() == [b"\x08\2\2\0"]


@pytest.mark.parametrize(
    ("schema", "found", "message"),
    [
        ("int", pa.string(), "its Arrow type is string, the schema's type is int"),
        ("float", pa.float64(), "its Arrow type is double, the schema's type is float"),
        ("bytes", pa.string(), "its Arrow type is string, the schema's type is bytes"),
        (["null", "int"], pa.string(), "its Arrow type is string, the schema's type is int"),
        (["int", "boolean"], pa.string(), "its Arrow type is string, the schema's type is union"),
        ("long", pa.timestamp("us"), "the schema's type is long"),
        ({"type": "long", "logicalType": "timestamp-micros"}, pa.timestamp("us"), r"is timestamp\[us\],"),
        (decimal_of(9, 1), pa.decimal128(9, 2), "decimal128"),
        (record(), pa.struct({"x": pa.int32()}), r"field x: record R has no such field \(it has none\)"),
        (record({"name": "y", "type": "int"}), pa.struct({}), "field y: the column has no such field, and"),
        ({"type": "map", "values": "int"}, pa.map_(pa.int32(), pa.int32()), r"{} \(key\): its Arrow"),
        (
            record({"name": "a", "type": {"type": "array", "items": INT_RECORD}}),
            pa.struct({"a": pa.list_(pa.struct({"x": pa.binary()}))}),
            r"field a\[\]\.x: its Arrow type is binary, the schema's type is int.*cast the column to int32",
        ),
    ],
)  # fmt: skip
def test_types_that_do_not_match(schema: Any, found: pa.DataType, message: str) -> None:
    with pytest.raises(InvalidSchemaError, match=message):
        encoder(schema_of(schema), found)


def test_schema_for_a_row_of_spark() -> None:
    found = pa.struct(
        [
            pa.field("id", pa.int64(), nullable=False),
            pa.field("name", pa.string()),
            pa.field("price", pa.decimal128(10, 2)),
            pa.field("at", pa.timestamp("us", "UTC")),
            pa.field("local", pa.timestamp("us")),
            pa.field("day", pa.date32()),
            pa.field("tags", pa.list_(pa.string())),
            pa.field("parts", pa.map_(pa.string(), pa.struct({"n": pa.int16(), "d": pa.decimal128(38, 0)}))),
            pa.field("raw", pa.binary()),
            pa.field("ratio", pa.float32()),
            pa.field("ok", pa.bool_()),
        ]
    )
    made = schema_for(found)
    fastavro.parse_schema(json.loads(made.text))
    assert json.loads(made.text)["fields"][:3] == [
        {"name": "id", "type": "long"},
        {"name": "name", "type": ["null", "string"], "default": None},
        {
            "name": "price",
            "type": [
                "null",
                {
                    "type": "fixed",
                    "name": "topLevelRecord.price.fixed",
                    "size": 5,
                    "logicalType": "decimal",
                    "precision": 10,
                    "scale": 2,
                },
            ],
            "default": None,
        },
    ]
    rows: Sequence[Any] = [
        {
            "id": 1,
            "name": "x",
            "price": decimal.Decimal("-12.34"),
            "at": datetime.datetime(2024, 1, 1, tzinfo=datetime.timezone.utc),
            "local": datetime.datetime(2024, 1, 1),
            "day": datetime.date(2024, 1, 1),
            "tags": ["a", None],
            "parts": [("k", {"n": 3, "d": decimal.Decimal(-(10**37)) * 9})],
            "raw": b"\0",
            "ratio": 0.5,
            "ok": True,
        },
        {"id": 2},
        None,
    ]
    column = pa.array(rows, found)
    payloads = encode(json.loads(made.text), column).values
    assert decode(made, payloads.to_pylist()).values.to_pylist() == column.to_pylist()
    assert arrow_type(made).field("parts").type.item_type.field("n").type == pa.int32()


@pytest.mark.parametrize(
    ("found", "message"),
    [
        (pa.struct({"a b": pa.int32()}), "field a b: 'a b' is no name that Avro accepts"),
        (pa.struct({"t": pa.time64("us")}), r"field t has type time64\[us\]"),
        (pa.struct({"m": pa.map_(pa.int32(), pa.int32())}), "field m has type map"),
    ],
)
def test_types_that_avro_does_not_have(found: pa.DataType, message: str) -> None:
    with pytest.raises(InvalidSchemaError, match=message):
        schema_for(found)


def test_arrays_with_offsets_inside() -> None:
    """Slices of children, which `slice` of the whole array does not make."""
    schema = {"type": "map", "values": "long"}
    found = pa.map_(pa.string(), pa.int64())
    entries = pa.StructArray.from_arrays(
        [pa.array(["skipped", "a", "b"]), pa.array([0, 1, 2])], fields=[found.key_field, found.item_field]
    ).slice(1)
    offsets = pa.py_buffer(b"\0\0\0\0\1\0\0\0\2\0\0\0")
    column = pa.Array.from_buffers(found, 2, [None, offsets], children=[entries])
    assert encode(schema, column).values.to_pylist() == [b"\2\2a\2\0", b"\2\2b\4\0"]
    assert encode(schema, column.slice(1)).values.to_pylist() == [b"\2\2b\4\0"]


def test_each_row_quotes_its_own_symbol() -> None:
    schema = {"type": "enum", "name": "E", "symbols": ["A"]}
    made = encode(schema, pa.array(["LONGER", "X", "A", "Y" * 60]))
    assert made.errors == {
        0: "the enum has no symbol 'LONGER'",
        1: "the enum has no symbol 'X'",
        3: f"the enum has no symbol '{'Y' * 48}'",
    }


def test_a_decimal_with_more_digits_than_arrow_has_is_refused() -> None:
    """A value at the scale of the schema may need more bits than the encoder has."""
    schema = {"type": "record", "name": "R", "fields": [{"name": "d", "type": decimal_of(50, 20)}]}
    column = pa.array([{"d": decimal.Decimal(10) ** 25}], pa.struct([("d", pa.decimal128(38, 0))]))
    with pytest.raises(InvalidSchemaError, match=r"field d: .*decimal\(50, 20\)"):
        encode(schema, column)
