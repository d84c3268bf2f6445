"""Protobuf encoders: the C encoder writes the bytes of Google's library."""

from __future__ import annotations

import datetime as dt
from decimal import Decimal
from typing import Any

import pyarrow as pa
import pytest
from google.protobuf import message_factory
from hypothesis import given, settings
from hypothesis import strategies as st

from kafka_eos_source.errors import InvalidSchemaError
from kafka_eos_source.registry.codec import Schema
from kafka_eos_source.registry.protobuf import MessageDecoder, arrow_type, decoder, encoder, schema_for
from kafka_eos_source.registry.protobuf_encode import MessageEncoder
from kafka_eos_source.registry.protobuf_program import kernel
from kafka_eos_source.registry.protobuf_schema import message_at
from kafka_eos_source.registry.protobuf_tree import build_tree
from tests.registry.protobuf_messages import Types, plain
from tests.registry.protobuf_oracle import Oracle


def schema(body: str, syntax: str = "proto3") -> Schema:
    imports = "".join(
        f'import "google/protobuf/{name}.proto";' for name in ("timestamp", "duration", "struct", "wrappers")
    )
    return Schema("PROTOBUF", f'syntax = "{syntax}"; {imports} {body}')


def parse(of: Schema, payload: bytes) -> Any:
    return message_factory.GetMessageClass(message_at(of, (0,))).FromString(payload)


@given(seed=st.integers(0, 2**32), syntax=st.sampled_from(["proto2", "proto3", "editions"]))
@settings(max_examples=50, deadline=None)
def test_values_come_back_as_they_were(seed: int, syntax: str) -> None:
    types = Types(seed, syntax)
    tree = build_tree(types.descriptor)
    payloads: list[bytes | None] = [types.message().SerializePartialToString() for _ in range(30)]
    payloads[8] = None
    decoded = MessageDecoder(tree, kernel())
    values = decoded.decode(pa.array(payloads, pa.binary()), 0).values.slice(1)
    found = MessageEncoder(tree, values.type, kernel()).encode(values, b"prefix")
    found.values.validate(full=True)
    assert not found.errors
    again = decoded.decode(found.values, len(b"prefix"))
    assert not again.errors
    assert plain(again.values) == plain(values)
    assert plain(Oracle(tree).decode(found.values, len(b"prefix")).values) == plain(values)
    for payload in found.values.drop_null().to_pylist():
        written = payload[len(b"prefix") :]
        assert len(written) == types.message_class.FromString(written).ByteSize(), "nothing is written twice"


def test_bytes_are_those_of_googles_library() -> None:
    of = schema("""
        message M {
          int32 a = 1; optional int32 b = 2; repeated sint32 c = 3; repeated string d = 4;
          map<string, I> e = 5; I f = 6; double g = 7;
          google.protobuf.Timestamp h = 8; google.protobuf.Int32Value i = 9;
          repeated bool j = 10; E k = 11; uint64 l = 12; fixed32 m = 13; google.protobuf.Struct n = 14;
          oneof o { string p = 15; bool q = 16; } google.protobuf.Duration r = 17;
        }
        message I { int64 x = 1; }
        enum E { ZERO = 0; ONE = 1; }""")
    row = {
        "a": -1,
        "b": 0,
        "c": [1, -1, -(2**31)],
        "d": ["x", ""],
        "e": [("k", {"x": 5})],
        "f": {"x": 0},
        "g": -0.0,
        "h": dt.datetime(1969, 12, 31, 23, 59, 59, 500000, tzinfo=dt.timezone.utc),
        "i": 0,
        "j": [True, False],
        "k": "ONE",
        "l": Decimal(2**64 - 1),
        "m": 2**32 - 1,
        "n": '{"a": [1, null]}',
        "p": None,
        "q": False,
        "r": dt.timedelta(seconds=-1.5),
    }
    kind = arrow_type(of, "M")
    converted = encoder(of, kind, "M").encode(pa.array([row, None, dict.fromkeys(row)], kind), b"\0id")
    first, second, third = converted.values.to_pylist()
    assert not converted.errors
    assert (second, third) == (None, b"\0id")
    message = parse(of, first[3:])
    assert (message.a, message.b, message.HasField("b"), list(message.c)) == (-1, 0, True, [1, -1, -(2**31)])
    assert (message.h.seconds, message.h.nanos) == (-1, 500000000)
    assert (message.r.seconds, message.r.nanos) == (-1, -500000000)
    assert (message.HasField("i"), message.WhichOneof("o"), message.l) == (True, "q", 2**64 - 1)
    assert first[3:] == message.SerializeToString(deterministic=True)


@pytest.mark.parametrize(
    ("field", "kind", "value", "reason"),
    [
        ("uint32 a = 1;", pa.int64(), -1, "-1 is negative or too large for uint32"),
        ("uint32 a = 1;", pa.int64(), 2**32, "4294967296 is negative or too large for uint32"),
        ("fixed64 a = 1;", pa.decimal128(20, 0), Decimal(2**64), "18446744073709551616 is negative"),
        ("E a = 1;", pa.string(), "GREEN", "'GREEN' is not a value of the enum E"),
        ("repeated E a = 1;", pa.list_(pa.string()), ["RED", "x"], "'x' is not a value of"),
        ("repeated int32 a = 1;", pa.list_(pa.int32()), [1, None], "no nulls inside arrays"),
        ("map<string, int32> a = 1;", pa.map_(pa.string(), pa.int32()), [("x", None)], "no nulls inside"),
        ("google.protobuf.Struct a = 1;", pa.string(), "[1]", r"'\[1\]' is not JSON"),
        (
            "google.protobuf.Timestamp a = 1;",
            pa.timestamp("s", "UTC"),
            253402300800,
            "253402300800000000 microseconds are outside of what a Timestamp can hold",
        ),
    ],
)  # fmt: skip
def test_a_row_that_does_not_fit_has_an_error(field: str, kind: pa.DataType, value: Any, reason: str) -> None:
    of = schema(f"message M {{ {field} }} enum E {{ RED = 0; BLUE = 1; }}")
    values = pa.array([None, {"a": None}, {"a": value}, {"a": None}], pa.struct([("a", kind)]))
    converted = encoder(of, values.type, "M").encode(values, b"")
    assert converted.values.to_pylist() == [None, b"", None, b""]
    assert list(converted.errors) == [2]
    with pytest.raises(AssertionError, match=rf"^message M: field a(\.value)?: .*{reason}"):
        raise AssertionError(converted.errors[2])


def test_required_fields_and_oneofs() -> None:
    of = schema("message M { required int32 a = 1; oneof o { int32 b = 2; string c = 3; } }", "proto2")
    kind = arrow_type(of)
    rows = [{"a": None}, {"a": 1, "b": 1, "c": ""}, {"a": 1, "b": 1}]
    converted = encoder(of, kind).encode(pa.array(rows, kind), b"")
    assert converted.errors == {
        0: "message M: field a: the field is required, and the column is null",
        1: "message M: field b: c is set, too, and only one member of the oneof o can be",
    }
    assert converted.values.to_pylist() == [None, None, b"\x08\x01\x10\x01"]
    with pytest.raises(InvalidSchemaError, match="requires the field 'a', and there is no such column"):
        encoder(of, pa.struct([("b", pa.int32())]))


@pytest.mark.parametrize(
    ("field", "kind", "expected"),
    [
        ("int32 a = 1;", pa.int64(), r"int64, which cannot be encoded as int32.*cast the column to int32"),
        ("string a = 1;", pa.int32(), r"cast the column to string"),
        ("float a = 1;", pa.float64(), r"cast the column to float"),
        ("bytes a = 1;", pa.string(), r"cast the column to binary"),
        (
            "google.protobuf.Timestamp a = 1;",
            pa.timestamp("us"),
            r"cast the column to timestamp\[us, tz=UTC\]",
        ),
        ("repeated int32 a = 1;", pa.int32(), r"repeated int32.*cast the column to list<item: int32>"),
        ("int32 b = 1;", pa.int32(), r"column 'a': message M has no field 'a'; its fields are: b"),
        ("I a = 1;", pa.struct([("y", pa.int32())]), r"column 'a\.y': message I has no field 'y'"),
        ("map<int32, I> a = 1;", pa.map_(pa.int32(), pa.struct([("x", pa.bool_())])), r"'a\.value\.x'.*bool"),
    ],
)
def test_a_column_that_does_not_fit_is_refused_at_once(field: str, kind: pa.DataType, expected: str) -> None:
    with pytest.raises(InvalidSchemaError, match=expected):
        encoder(
            schema(f"message M {{ {field} }} message I {{ int32 x = 1; }}"), pa.struct([("a", kind)]), "M"
        )


def test_related_types_are_accepted() -> None:
    of = schema(
        "message M { int64 a = 1; string b = 2; E c = 3; repeated int32 d = 4; bytes e = 5; } "
        "enum E { X = 0; Y = 1; }"
    )
    values = pa.StructArray.from_arrays(
        [
            pa.array([1, 2], pa.int8()),
            pa.array(["x", "y"]).dictionary_encode(),
            pa.array([1, 0], pa.int32()),
            pa.array([[1, 2], [3, 4]], pa.list_(pa.int16(), 2)),
            pa.array([b"1", None], pa.large_binary()),
        ],
        names=list("abcde"),
    )
    converted = encoder(of, values.type, "M").encode(values, b"")
    made = decoder(of, (0,)).decode(converted.values, 0).values.to_pylist()
    assert made[0] == {"a": 1, "b": "x", "c": "Y", "d": [1, 2], "e": b"1"}
    assert made[1] == {"a": 2, "b": "y", "c": "X", "d": [3, 4], "e": b""}


def test_a_schema_for_a_type_holds_its_values() -> None:
    kind = pa.struct(
        [
            ("id", pa.int64()),
            ("name", pa.string()),
            ("at", pa.timestamp("us", "UTC")),
            ("took", pa.duration("us")),
            ("items", pa.list_(pa.struct([("price", pa.float64()), ("tags", pa.list_(pa.string()))]))),
            ("by_name", pa.map_(pa.string(), pa.struct([("x", pa.int32())]))),
            ("Items", pa.bool_()),
            ("empty", pa.struct([("__dummy_field_in_empty_struct", pa.string())])),
            ("big", pa.decimal128(20, 0)),
        ]
    )
    of = schema_for(kind, "shop.Order")
    assert arrow_type(of) == kind
    row = {
        "id": None,
        "name": "",
        "at": dt.datetime(2024, 1, 1, tzinfo=dt.timezone.utc),
        "took": None,
        "items": [{"price": None, "tags": ["a"]}],
        "by_name": [("k", {"x": 0})],
        "Items": False,
        "empty": {"__dummy_field_in_empty_struct": None},
        "big": Decimal(5),
    }
    values = pa.array([row], kind)
    payloads = encoder(of, kind).encode(values, b"").values
    assert decoder(of, (0,)).decode(payloads, 0).values.equals(values)


@pytest.mark.parametrize(
    ("kind", "name", "expected"),
    [
        (pa.struct([("a", pa.date32())]), "M", "column 'a' has the type date32.*cast the column to string"),
        (pa.struct([("a", pa.list_(pa.list_(pa.int32())))]), "M", "put the inner array or map into a struct"),
        (pa.struct([("a", pa.map_(pa.float64(), pa.int32()))]), "M", "'a.key' has the type double"),
        (pa.struct([("a-b", pa.int32())]), "M", "column 'a-b': a Protobuf field cannot have this name"),
        (pa.struct([("a", pa.timestamp("us"))]), "M", "timestamp with time zone"),
        (pa.int32(), "M", "needs a struct"),
        (pa.struct([]), "a b", "not a name of a Protobuf message"),
    ],
)
def test_a_type_that_protobuf_does_not_have_is_refused(kind: pa.DataType, name: str, expected: str) -> None:
    with pytest.raises(InvalidSchemaError, match=expected):
        schema_for(kind, name)
