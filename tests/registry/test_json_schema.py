"""JSON Schema codecs: types, errors per row, and the same values from both parsers."""

from __future__ import annotations

import datetime as dt
import json
import sys
from decimal import Decimal
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jsonschema import Draft7Validator

from kafka_eos_source.errors import InvalidSchemaError
from kafka_eos_source.registry.codec import Decoder, Encoder, Reference, Schema
from kafka_eos_source.registry.json_schema import arrow_type, decoder, encoder, schema_for
from kafka_eos_source.runtime.json_input import parse_json


def schema(contents: Any, **references: Any) -> Schema:
    found = tuple(Reference(name.replace("_", "."), schema(each)) for name, each in references.items())
    return Schema("JSON", json.dumps(contents), found)


def obj(**properties: Any) -> dict[str, Any]:
    return {"type": "object", "properties": properties}


ORDER = obj(
    id={"type": "integer"},
    name={"type": ["string", "null"]},
    price={"type": "number"},
    paid={"type": "boolean"},
    at={"type": "string", "format": "date-time"},
    day={"type": "string", "format": "date"},
    items={
        "type": "array",
        "items": obj(x={"type": "integer"}, at={"type": "string", "format": "date-time"}),
    },
)
ORDER["required"] = ["id"]


def decoded(made: Decoder, documents: list[bytes | None], start: int = 0) -> tuple[list[Any], dict[int, str]]:
    converted = made.decode(pa.array(documents, pa.binary()), start)
    converted.values.validate(full=True)
    assert converted.values.type == made.arrow_type
    return converted.values.to_pylist(), dict(converted.errors)


def encoded(made: Encoder, values: pa.Array, prefix: bytes = b"") -> tuple[list[Any], dict[int, str]]:
    converted = made.encode(values, prefix)
    converted.values.validate(full=True)
    assert converted.values.type == pa.binary()
    assert all(payload is None or payload.startswith(prefix) for payload in converted.values.to_pylist())
    texts = [payload and payload[len(prefix) :] for payload in converted.values.to_pylist()]
    return [text and json.loads(text) for text in texts], dict(converted.errors)


# -- types ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("contents", "expected"),
    [
        ({"type": "boolean"}, "bool"),
        ({"type": "integer"}, "int64"),
        ({"type": "number"}, "double"),
        ({"type": ["integer", "number"]}, "double"),
        ({"type": "string"}, "string"),
        ({"type": "string", "format": "uuid"}, "string"),
        ({"type": "string", "format": "date-time"}, "timestamp[us, tz=UTC]"),
        ({"type": ["null", "string"], "format": "date"}, "date32[day]"),
        ({"enum": ["a", "b", None]}, "string"),
        ({"const": 1}, "int64"),
        ({"enum": [1, "a"]}, "string"),
        ({"type": "array", "items": {"type": "integer"}}, "list<item: int64>"),
        ({"type": "array"}, "string"),
        ({"type": "array", "items": [{"type": "integer"}]}, "string"),
        ({"type": "array", "prefixItems": [{}], "items": {"type": "integer"}}, "string"),
        (obj(a={"type": "integer"}, b=obj(c={})), "struct<a: int64, b: struct<c: string>>"),
        ({"properties": {"a": {"type": "integer"}}}, "struct<a: int64>"),
        ({"type": "object"}, "string"),
        ({"type": "object", "additionalProperties": {"type": "number"}}, "map<string, double>"),
        ({"type": "object", "additionalProperties": False}, "string"),
        ({"oneOf": [{"type": "null"}, {"type": "integer"}]}, "int64"),
        ({"anyOf": [{"type": "integer"}, {"type": "number"}]}, "double"),
        ({"oneOf": [{"type": "string"}, {"type": "integer"}]}, "string"),
        ({"type": "string", "oneOf": [{"const": "a"}, {"const": "b"}]}, "string"),
        ({"allOf": [obj(a={"type": "integer"}), obj(b={"type": "string"})]}, "struct<a: int64, b: string>"),
        ({"allOf": [{"$ref": "#/$defs/a"}], "$defs": {"a": {"type": "integer"}}}, "int64"),
        ({"$ref": "#/definitions/a", "definitions": {"a": {"type": "boolean"}}}, "bool"),
        (True, "string"),
        ({}, "string"),
    ],
)
def test_types(contents: Any, expected: str) -> None:
    assert str(arrow_type(schema(contents))) == expected


@pytest.mark.parametrize(
    "draft",
    [
        "http://json-schema.org/draft-04/schema#",
        "http://json-schema.org/draft-06/schema#",
        "http://json-schema.org/draft-07/schema#",
        "https://json-schema.org/draft/2019-09/schema",
        "https://json-schema.org/draft/2020-12/schema",
    ],
)
def test_drafts_and_references(draft: str) -> None:
    money = {
        "$schema": draft,
        **obj(cents={"$ref": "#/definitions/cents"}),
        "definitions": {"cents": {"type": "integer"}},
    }
    contents = {
        "$schema": draft,
        **obj(a={"$ref": "money.json"}, b={"$ref": "money.json#/definitions/cents"}),
    }
    of = schema(contents, money_json=money)
    assert str(arrow_type(of)) == "struct<a: struct<cents: int64>, b: int64>"
    assert decoded(decoder(of), [b'{"a":{"cents":1},"b":"x"}'])[1] == {
        0: 'field b: expected integer, found "x"'
    }


def test_a_schema_inside_itself_is_json_text() -> None:
    of = schema({"$ref": "#/$defs/n", "$defs": {"n": obj(v={"type": "integer"}, next={"$ref": "#/$defs/n"})}})
    assert str(arrow_type(of)) == "struct<v: int64, next: string>"
    found, _ = decoded(decoder(of), [b'{"v":1,"next":{"v":2,"next":null}}', b'{"next":null}'])
    assert found == [{"v": 1, "next": '{"v":2,"next":null}'}, {"v": None, "next": None}]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("{", "is not JSON"),
        ("[]", "is not a JSON Schema"),
        ('{"$ref": "other.json"}', "refers to 'other.json', which is not among"),
        ('{"$ref": "#/definitions/x"}', "refers to '#/definitions/x'"),
        ('{"type": "money"}', "unknown type 'money'"),
        ('{"properties": {"a": 5}}', "properties/a of the JSON Schema is not a schema"),
    ],
)
def test_a_schema_that_is_not_usable_is_refused(text: str, expected: str) -> None:
    with pytest.raises(InvalidSchemaError, match=expected):
        arrow_type(Schema("JSON", text))


def test_a_schema_of_another_format_is_refused() -> None:
    with pytest.raises(InvalidSchemaError, match="format AVRO"):
        arrow_type(Schema("AVRO", '"int"'))


# -- decoding ------------------------------------------------------------------------------------


def test_values() -> None:
    document = {
        "id": 1,
        "name": 'ü\n"',
        "price": 1,
        "paid": True,
        "at": "2024-02-29T12:00:00.123456789+02:00",
        "day": "2024-02-29",
        "items": [{"x": -1, "at": "2024-01-01T00:00:00Z"}, None, {}],
        "more": {"ignored": [1]},
    }
    utc = dt.timezone.utc
    found, errors = decoded(decoder(schema(ORDER)), [json.dumps(document).encode(), None, b" {}\n"])
    assert not errors
    assert found[0] == {
        "id": 1,
        "name": 'ü\n"',
        "price": 1.0,
        "paid": True,
        "at": dt.datetime(2024, 2, 29, 10, 0, 0, 123456, tzinfo=utc),
        "day": dt.date(2024, 2, 29),
        "items": [{"x": -1, "at": dt.datetime(2024, 1, 1, tzinfo=utc)}, None, {"x": None, "at": None}],
    }
    assert found[1:] == [None, dict.fromkeys(found[0])]


@pytest.mark.parametrize(
    ("document", "reason"),
    [
        (b"", "not JSON"),
        (b"{", "not JSON"),
        (b"{}{}", "not JSON"),
        (b'{"more":NaN}', "not JSON"),
        (b'{"name":"\xff"}', "not JSON"),
        (b"[]", r"expected object, found \[\]"),
        (b'{"id":"1"}', 'field id: expected integer, found "1"'),
        (b'{"id":1.5}', "field id: expected integer, found 1.5"),
        (b'{"id":true}', "field id: expected integer, found true"),
        (b'{"id":9223372036854775808}', "field id: 9223372036854775808 does not fit into 64 bits"),
        (b'{"id":1e400}', "not JSON|does not fit|expected integer"),
        (b'{"items":[{"x":1},{"x":"2"}]}', r'field items\[1\]\.x: expected integer, found "2"'),
        (b'{"items":{}}', r"field items: expected array, found {}"),
        (
            b'{"at":"2024-01-01T00:00:00"}',
            "field at: '2024-01-01T00:00:00' is not a date with time and time zone",
        ),
        (b'{"items":[{"at":"x"}]}', r"field items\[\]\.at: 'x' is not a date with time"),
        (b'{"day":"2024-13-01"}', "field day: '2024-13-01' is not a date"),
    ],
)
def test_a_row_that_does_not_fit_is_null_and_has_an_error(document: bytes, reason: str) -> None:
    good = b'{"id":1,"items":[{"x":1,"at":"2024-01-01T00:00:00Z"}]}'
    documents = [good, None, *[good] * 100, document, *[good] * 100]
    found, errors = decoded(decoder(schema(ORDER)), documents)
    assert list(errors) == [102]
    with pytest.raises(AssertionError, match=reason):
        raise AssertionError(errors[102])
    assert [index for index, row in enumerate(found) if row is None] == [1, 102]
    assert all(row == found[0] for row in found if row is not None)


def test_integers_may_be_written_with_a_fraction_of_zero() -> None:
    assert decoded(decoder(schema(ORDER)), [b'{"id":2.0}', b'{"id":-0}'])[0][0]["id"] == 2


def test_the_last_of_equal_keys_wins() -> None:
    assert decoded(decoder(schema(ORDER)), [b'{"id":1,"id":2}'])[0][0]["id"] == 2


def test_the_frame_is_skipped() -> None:
    found, errors = decoded(decoder(schema(ORDER)), [b"frame" + b'{"id":1}', b"fra", b"frame{}"], 5)
    assert [row and row["id"] for row in found] == [1, None, None]
    assert errors == {1: "the value has 3 bytes, fewer than its frame"}


def test_maps_and_json_text() -> None:
    of = schema(
        obj(
            m={"type": "object", "additionalProperties": {"type": "string", "format": "date"}},
            t={"type": ["integer", "string"]},
        )
    )
    found, errors = decoded(
        decoder(of),
        [b'{"m":{"a":"2024-01-01","b":null},"t":"x"}', b'{"m":{"a":"x"},"t":[1]}', b'{"t":{"k":1.0}}'],
    )
    assert found == [
        {"m": [("a", dt.date(2024, 1, 1)), ("b", None)], "t": '"x"'},
        None,
        {"m": None, "t": '{"k":1.0}'},
    ]
    assert errors == {1: "field m.*: 'x' is not a date (RFC 3339)"}


@pytest.mark.parametrize("kind", [pa.binary(), pa.large_binary()])
def test_slices_and_empty_columns(kind: pa.DataType) -> None:
    made = decoder(schema(ORDER))
    column = pa.array([b'{"id":%d}' % index for index in range(20)] + [None], kind)
    assert made.decode(column.slice(3, 3), 0).values.field("id").to_pylist() == [3, 4, 5]
    assert made.decode(column.slice(20), 0).values.to_pylist() == [None]
    assert made.decode(column.slice(0, 0), 0).values.to_pylist() == []


def test_roots_that_are_not_objects() -> None:
    assert decoded(decoder(schema({"type": "integer"})), [b"5", b"null", b'"x"'])[0] == [5, None, None]
    of = schema({"type": "array", "items": {"type": "string", "format": "date-time"}})
    found, errors = decoded(decoder(of), [b"[]", b'["2024-01-01T00:00:00Z"]', b'["x"]', None])
    assert found[0] == []
    assert len(found[1]) == 1
    assert list(errors) == [2]


def test_a_reader_schema_decides_the_type() -> None:
    reader = schema(obj(price={"type": "number"}, new={"type": "string"}))
    assert decoded(decoder(schema(ORDER), reader), [b'{"id":1,"price":2}'])[0] == [
        {"price": 2.0, "new": None}
    ]


_json = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**65), 2**65) | st.floats() | st.text(max_size=4),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from("abc"), inner, max_size=3),
    max_leaves=6,
)
_order = st.fixed_dictionaries(
    {},
    optional={
        "a": st.integers(-(2**63), 2**63 - 1) | _json,
        "b": st.text() | _json,
        "c": st.lists(st.fixed_dictionaries({}, optional={"d": st.floats() | _json}), max_size=3) | _json,
        "x": _json,
    },
)
_ABC = obj(
    a={"type": "integer"}, b={"type": "string"}, c={"type": "array", "items": obj(d={"type": "number"})}
)


_BAD = object()
_KINDS: dict[str, tuple[type, ...]] = {"a": (int, float), "b": (str,), "d": (int, float), "c": (list,)}


def _as_python_reads_it(payload: bytes) -> Any:
    """The row of a document of `_ABC`; `_BAD` if it has an error."""
    try:
        return _row(parse_json(payload), "abc")
    except ValueError:
        return _BAD


def _row(value: Any, names: str) -> Any:
    if value is None:
        return None
    if not isinstance(value, dict):
        raise ValueError(value)  # noqa: TRY004 - as of a text that is not JSON
    return {name: _property(name, value.get(name)) for name in names}


def _property(name: str, value: Any) -> Any:
    if value is None:
        return None
    if not isinstance(value, _KINDS[name]) or isinstance(value, bool):
        raise ValueError(value)  # noqa: TRY004 - as of a text that is not JSON
    if name == "c":
        return [_row(each, "d") for each in value]
    if name == "d" and abs(value) > sys.float_info.max:
        raise ValueError(value)
    # "in range(…)" would count up to a float, without ever releasing Python's lock
    if name == "a" and not (-(2**63) <= value < 2**63 and value == int(value)):
        raise ValueError(value)
    if name == "a" and isinstance(value, float) and abs(value) > 2**53:
        raise ValueError(value)
    return {"a": int, "b": str, "d": float}[name](value)


@given(documents=st.lists(_order, max_size=12), data=st.data())
@settings(max_examples=80, deadline=None)
def test_documents_are_read_as_python_reads_them(documents: list[Any], data: st.DataObject) -> None:
    payloads = [json.dumps(each, indent=data.draw(st.sampled_from([None, 1]))).encode() for each in documents]
    for _ in range(data.draw(st.integers(0, 2))):
        if payloads:
            index = data.draw(st.integers(0, len(payloads) - 1))
            at = data.draw(st.integers(0, len(payloads[index])))
            noise = data.draw(
                st.sampled_from([b"}", b"{", b'"', b",", b"]", b"[", b"{}", b"\n", b"1", b"\xff", b":"])
            )
            payloads[index] = payloads[index][:at] + noise + payloads[index][at:]
    found, errors = decoded(decoder(schema(_ABC)), payloads)
    for row, payload in enumerate(payloads):
        expected = _as_python_reads_it(payload)
        assert (row in errors) == (expected is _BAD), (payload, errors.get(row))
        assert found[row] == (None if expected is _BAD else expected)


# -- encoding ------------------------------------------------------------------------------------


def test_encoded_documents() -> None:
    utc = dt.timezone.utc
    kind = arrow_type(schema(ORDER))
    rows = [
        {
            "id": 1,
            "name": 'q"\\\n\x01é',
            "price": 0.1,
            "paid": False,
            "at": dt.datetime(2024, 1, 1, tzinfo=utc),
        },
        None,
        {"id": 2, "day": dt.date(2024, 2, 29), "items": [{"x": 1}, None], "price": 1e300},
    ]
    found, errors = encoded(encoder(schema(ORDER), kind), pa.array(rows, kind), b"\0id")
    assert not errors
    assert found == [
        {"id": 1, "name": 'q"\\\n\x01é', "price": 0.1, "paid": False, "at": "2024-01-01T00:00:00.000000Z"},
        None,
        {"id": 2, "name": None, "price": 1e300, "day": "2024-02-29", "items": [{"x": 1}, None]},
    ]
    Draft7Validator(ORDER).validate(found[0])


def test_rows_that_json_cannot_hold_have_errors() -> None:
    of = schema(obj(x={"type": "number"}, t={}, n={"type": "integer"}) | {"required": ["n"]})
    rows = [(1.5, '{"a":1}', 1), (float("nan"), None, 1), (1.0, "{", 1), (None, None, None)]
    values = pa.array([dict(zip("xtn", row, strict=True)) for row in rows])
    found, errors = encoded(encoder(of, values.type), values)
    assert found == [{"x": 1.5, "t": {"a": 1}, "n": 1}, None, None, None]
    assert errors[1] == "field x: nan is not a number in JSON"
    assert errors[2].startswith("field t: the string must be JSON text")
    assert errors[3] == "field n: the schema requires it, and the column is null"


def test_columns_that_the_schema_does_not_mention_are_kept() -> None:
    values = pa.array([{"id": 1, "more": {"s": "text", "l": [1.5], "d": Decimal("1.50")}}])
    found, _ = encoded(encoder(schema(ORDER), values.type), values)
    assert found == [{"id": 1, "more": {"s": "text", "l": [1.5], "d": 1.5}}]


def test_maps_dictionaries_and_slices() -> None:
    kind = pa.struct([("m", pa.map_(pa.string(), pa.list_(pa.int8()))), ("f", pa.list_(pa.float32(), 2))])
    rows = [
        {"m": [("a", [1]), ('"', None)], "f": [1, 2]},
        None,
        {"m": [], "f": None},
        {"m": None, "f": [0, 0]},
    ]
    of = schema_for(kind, "t")
    whole, _ = encoded(encoder(of, kind), pa.array(rows, kind))
    assert whole == [
        {"m": {"a": [1], '"': None}, "f": [1, 2]},
        None,
        {"m": {}, "f": None},
        {"m": None, "f": [0, 0]},
    ]
    for first in range(4):
        assert encoded(encoder(of, kind), pa.array(rows, kind).slice(first))[0] == whole[first:]
    values = pa.StructArray.from_arrays([pa.array(["x", None]).dictionary_encode()], names=["name"])
    assert encoded(encoder(schema_for(values.type, "t"), values.type), values)[0] == [
        {"name": "x"},
        {"name": None},
    ]


@pytest.mark.parametrize(
    ("contents", "kind", "expected"),
    [
        (obj(a={"type": "integer"}), pa.struct([("a", pa.string())]), "'a' has the type string, .*int64"),
        (obj(a={"type": "string"}), pa.struct([("a", pa.binary())]), "'a' has the type binary"),
        (obj(a={"type": "string", "format": "date-time"}), pa.struct([("a", pa.timestamp("us"))]), "tz=UTC"),
        (ORDER, pa.struct([("name", pa.string())]), "requires 'id', and there is no such column"),
        (
            obj(a={}) | {"additionalProperties": False},
            pa.struct([("b", pa.string())]),
            "column 'b': the schema has no such property and forbids others; its properties are: a",
        ),
        (obj(a={}), pa.struct([("b", pa.struct([("c", pa.binary())]))]), r"'b\.c' has the type binary"),
        (obj(a={}), pa.struct([("b", pa.map_(pa.int32(), pa.int32()))]), "keys of type int32"),
        ({"type": "array", "items": {"type": "integer"}}, pa.list_(pa.bool_()), r"'\[\]' has the type bool"),
    ],
)  # fmt: skip
def test_a_column_that_does_not_fit_is_refused_at_once(
    contents: Any, kind: pa.DataType, expected: str
) -> None:
    with pytest.raises(InvalidSchemaError, match=expected):
        encoder(schema(contents), kind)


_VALUES = {
    "b": (pa.bool_(), st.booleans()),
    "i": (pa.int64(), st.integers(-(2**63), 2**63 - 1)),
    "f": (pa.float64(), st.floats(allow_nan=False, allow_infinity=False)),
    "s": (pa.string(), st.text()),
    "l": (pa.list_(pa.string()), st.lists(st.none() | st.text(max_size=3), max_size=3)),
    "t": (
        pa.timestamp("us", "UTC"),
        st.datetimes(dt.datetime(1000, 1, 1), timezones=st.just(dt.timezone.utc)),
    ),
    "d": (pa.date32(), st.dates(dt.date(1000, 1, 1))),
    "o": (pa.struct([("x", pa.int32())]), st.fixed_dictionaries({"x": st.none() | st.integers(-9, 9)})),
}


@given(
    rows=st.lists(
        st.none() | st.fixed_dictionaries({name: st.none() | each for name, (_, each) in _VALUES.items()}),
        max_size=6,
    ),
)
@settings(max_examples=60, deadline=None)
def test_values_come_back_as_they_were(rows: list[Any]) -> None:
    kind = pa.struct([(name, each) for name, (each, _) in _VALUES.items()])
    values = pa.array(rows, kind)
    of = schema_for(kind, "row")
    payloads = encoder(of, kind).encode(values, b"p")
    assert not payloads.errors
    for each in payloads.values.to_pylist():
        if each is not None:
            Draft7Validator(json.loads(of.text)).validate(json.loads(each[1:]))
    again = decoder(of).decode(payloads.values, 1)
    assert not again.errors
    assert again.values.to_pylist() == values.to_pylist()


@pytest.mark.parametrize(
    ("kind", "expected"),
    [
        (pa.struct([("a", pa.binary())]), "'a' has the type binary.*base64"),
        (pa.struct([("a", pa.list_(pa.timestamp("us")))]), r"'a\[\]' has the type timestamp"),
        (pa.struct([("a", pa.map_(pa.int32(), pa.int32()))]), "JSON keys are strings"),
    ],
)
def test_a_type_that_json_does_not_have_is_refused(kind: pa.DataType, expected: str) -> None:
    with pytest.raises(InvalidSchemaError, match=expected):
        schema_for(kind, "t")


def test_numbers_are_exact_or_errors_of_their_rows() -> None:
    typed = '"a": {"type": "integer"}, "n": {"type": "number"}'
    for text in ("", ', "t": {}'):  # with JSON text, documents are parsed in another way
        made = decoder(Schema("JSON", f'{{"type": "object", "properties": {{{typed}{text}}}}}'))
        numbers = [
            b"9223372036854775807", b"-9223372036854775808", b"9007199254740992.0", b"1.0",
            b"9223372036854775808", b"-9223372036854775809", b"9007199254740994.0", b"1" * 5000, b"1e400",
        ]  # fmt: skip
        found = made.decode(pa.array([b'{"a": %s}' % each for each in numbers]), 0)
        assert [each and each["a"] for each in found.values.to_pylist()] == [
            2**63 - 1, -(2**63), 2**53, 1, None, None, None, None, None,
        ]  # fmt: skip
        assert list(found.errors) == [4, 5, 6, 7, 8]
        assert "field a: 9223372036854775808 does not fit" in found.errors[4]
        assert list(made.decode(pa.array([b'{"n": 1e400}', b'{"n": 1e4}']), 0).errors) == [0]


def test_json_text_keeps_numbers_as_they_are_written() -> None:
    made = decoder(Schema("JSON", '{"type": "object", "properties": {"t": {}}}'))
    texts = ["123456789012345678901234567890", "0.12345678901234567890123", '[1.10,{"x":1.5e3}]', "-7"]
    found = made.decode(pa.array([f'{{"t": {each}}}'.encode() for each in texts]), 0)
    assert not found.errors
    assert [each["t"] for each in found.values.to_pylist()] == texts


# -- what other programs write


def test_a_null_object_has_null_times_whoever_parses_it() -> None:
    made = decoder(schema(ORDER))
    documents = [b'{"id":1,"items":[null]}', b"null", b'{"id":2}']
    expected = [{"id": 1, "items": [None]}, None, {"id": 2}]
    for bad in ([], [b"{"]):  # which sends all of them to the other parser
        values, errors = decoded(made, documents + bad)
        assert list(errors) == [3] * len(bad)
        found = [row and {name: each for name, each in row.items() if each is not None} for row in values]
        assert found[:3] == expected


@pytest.mark.parametrize(
    ("skipped", "is_row"),
    [
        (b"[" * 253 + b"]" * 253, True),
        (b"[" * 254 + b"]" * 254, False),
        (b"[" * 100_000 + b"]" * 100_000, False),
        (b"[" * 100_000, False),
        (b'"' + b'[{\\"' * 500 + b'"', True),
        (b'"' + b'\\"' * 100_000, False),
        (b"[" + b"{}," * 1_000 + b"[]]", True),
        (b"9" * 400, True),
        (b'"\xff"', False),
        (b"NaN", False),
    ],
)
def test_what_is_skipped_counts_alone_as_among_others(skipped: bytes, is_row: bool) -> None:
    made = decoder(schema(obj(id={"type": "integer"}, price={"type": "number"})))
    document = b'{"id":1,"other":' + skipped + b"}"
    for documents in ([document], [document, b'{"id":2}'], [document, b"{"]):
        values, errors = decoded(made, documents)
        assert (0 not in errors) == is_row
        assert values[0] == ({"id": 1, "price": None} if is_row else None)
    _, errors = decoded(made, [b'{"id":1,"price":' + skipped + b"}"])
    assert list(errors) == [0]


def test_names_of_properties_may_have_any_characters() -> None:
    names = ['a"b', "c\\d", "e\nf", "", "ü €", "class", "f0"]
    made = decoder(schema(obj(**{name: obj(**{name: {"type": "integer"}}) for name in names})))
    document = json.dumps({name: {name: number} for number, name in enumerate(names)}).encode()
    assert decoded(made, [document, b"{}"])[0] == [
        {name: {name: number} for number, name in enumerate(names)},
        dict.fromkeys(names),
    ]


def test_a_time_means_the_same_whatever_its_neighbours_are() -> None:
    made = decoder(schema(obj(at={"type": "string", "format": "date-time"})))
    texts = [
        "2024-02-29t10:00:00.123456789z",
        "0001-01-01t00:00:00+23:59",
        "2024-02-29T10Z",
        "20240229",
        "no",
    ]
    documents = [b'{"at":"%s"}' % text.encode() for text in texts]
    alone = [made.decode(pa.array([each], pa.binary()), 0) for each in documents]
    together = made.decode(pa.array(documents, pa.binary()), 0)
    assert [bool(each.errors) for each in alone] == [row in together.errors for row in range(len(texts))]
    assert pa.concat_arrays([each.values for each in alone]).equals(together.values)
    assert together.values[0].as_py() == {"at": dt.datetime(2024, 2, 29, 10, 0, 0, 123456, dt.timezone.utc)}
