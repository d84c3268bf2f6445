"""Protobuf decoders: the C decoder and Google's library agree on what messages mean."""

from __future__ import annotations

import datetime as dt
import os
import shutil
import subprocess
import sys
from decimal import Decimal
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from google.protobuf import message_factory
from hypothesis import given, settings
from hypothesis import strategies as st

from kafka_eos_source.errors import InvalidSchemaError
from kafka_eos_source.registry.codec import Decoder, Schema
from kafka_eos_source.registry.protobuf import MessageDecoder, decoder
from kafka_eos_source.registry.protobuf_program import kernel
from kafka_eos_source.registry.protobuf_schema import message_at
from kafka_eos_source.registry.protobuf_tree import Kind, build_tree, walk
from tests import ROOT
from tests.registry.protobuf_messages import Types, plain
from tests.registry.protobuf_oracle import Oracle

SOURCE = ROOT / "kafka_eos_source" / "native" / "protobuf.c"

ORDER = """
syntax = "proto3";
package shop;
import "google/protobuf/duration.proto";
import "google/protobuf/struct.proto";
import "google/protobuf/timestamp.proto";
import "google/protobuf/wrappers.proto";
message Order {
  enum State { NEW = 0; PAID = 1; }
  message Item { string name = 1; optional int32 count = 2; }
  int32 id = 1;
  optional string note = 2;
  State state = 3;
  repeated Item items = 4;
  map<string, double> prices = 5;
  oneof by { string person = 6; Item robot = 7; }
  google.protobuf.Timestamp at = 8;
  google.protobuf.Duration took = 9;
  google.protobuf.Struct more = 10;
  google.protobuf.Int64Value maybe = 11;
  uint32 u32 = 12;
  uint64 u64 = 13;
  repeated google.protobuf.StringValue tags = 14;
  bytes raw = 15;
  Nothing nothing = 16;
}
message Nothing {}
"""


def schema(text: str) -> Schema:
    return Schema("PROTOBUF", text)


def message(of: Schema, path: tuple[int, ...] = (0,), **fields: Any) -> Any:
    return message_factory.GetMessageClass(message_at(of, path))(**fields)


def rows(made: Decoder, payloads: list[bytes | None], start: int = 0) -> tuple[list[Any], dict[int, str]]:
    converted = made.decode(pa.array(payloads, pa.binary()), start)
    converted.values.validate(full=True)
    assert converted.values.type == made.arrow_type
    return converted.values.to_pylist(maps_as_pydicts="strict"), dict(converted.errors)


@given(seed=st.integers(0, 2**32), syntax=st.sampled_from(["proto2", "proto3", "editions"]))
@settings(max_examples=60, deadline=None)
def test_decoder_agrees_with_googles_library(seed: int, syntax: str) -> None:
    types = Types(seed, syntax)
    tree = build_tree(types.descriptor)
    payloads = [None if index % 9 == 8 else types.payload() for index in range(30)]
    found = MessageDecoder(tree, kernel()).decode(pa.array(payloads, pa.binary()).slice(1), 0)
    expected = Oracle(tree).decode(pa.array(payloads[1:], pa.binary()), 0)
    found.values.validate(full=True)
    tolerated = {row for row, text in found.errors.items() if syntax == "proto2" and _is_later_replaced(text)}
    if any(
        field.kind is Kind.RAW for field in walk(tree)
    ):  # ours are not parsed if a oneof replaces them later
        tolerated |= {row for row, text in expected.errors.items() if "not such a message" in text}
    assert found.errors.keys() - tolerated == expected.errors.keys() - tolerated
    pairs = zip(plain(found.values), plain(expected.values), strict=True)
    for index, (ours, theirs) in enumerate(pairs):
        if index not in tolerated:
            assert ours == theirs, payloads[index + 1]


def _is_later_replaced(text: str) -> bool:
    """Whether Google's library does not look at such a value if a later occurrence replaces it."""
    return "not UTF-8" in text or "required field" in text


def test_values_have_the_documented_types() -> None:
    of = schema(ORDER)
    order = message(of, id=1, state=1, prices={"a": 1.5}, u32=2**32 - 1, u64=2**64 - 1, raw=b"\xff")
    order.items.add(name="pen", count=0)
    order.items.add(name="ink")
    order.at.FromJsonString("2024-02-29T12:00:00.123456789Z")
    order.took.FromJsonString("-1.5s")
    order.more.update({"b": [1, None, "x"], "a": True})
    order.maybe.value = 0
    order.tags.add(value="t")
    order.nothing.SetInParent()
    order.robot.name = "r"
    found, errors = rows(decoder(of, (0,)), [order.SerializeToString(), b"", None])
    assert not errors
    assert found[0] == {
        "id": 1,
        "note": None,
        "state": "PAID",
        "items": [{"name": "pen", "count": 0}, {"name": "ink", "count": None}],
        "prices": {"a": 1.5},
        "person": None,
        "robot": {"name": "r", "count": None},
        "at": dt.datetime(2024, 2, 29, 12, 0, 0, 123456, tzinfo=dt.timezone.utc),
        "took": dt.timedelta(seconds=-1.5),
        "more": '{"a":true,"b":[1.0,null,"x"]}',
        "maybe": 0,
        "u32": 2**32 - 1,
        "u64": Decimal(2**64 - 1),
        "tags": ["t"],
        "raw": b"\xff",
        "nothing": {"__dummy_field_in_empty_struct": None},
    }
    nothing = {"id": 0, "state": "NEW", "u32": 0, "u64": Decimal(0), "raw": b""}
    assert found[1] == dict.fromkeys(found[0]) | {"items": [], "prices": {}, "tags": []} | nothing
    assert found[2] is None


def test_a_row_that_does_not_decode_is_null_and_has_an_error() -> None:
    of = schema(ORDER)
    good = message(of, id=7)
    good.items.add(name="pen")
    late = message(of)
    late.at.seconds = 253402300800
    bad_json = message(of)
    bad_json.more.fields["x"].number_value = float("nan")
    payloads = [
        good.SerializeToString(),
        good.SerializeToString()[:-1],
        late.SerializeToString(),
        bad_json.SerializeToString(),
        b"\x22\x03\x0a\x01\xff",
        good.SerializeToString(),
    ]
    found, errors = rows(decoder(of, (0,)), payloads)
    assert [row is None for row in found] == [False, True, True, True, True, False]
    assert found[0] == found[5]
    assert found[0]["items"] == [{"name": "pen", "count": None}]
    assert errors.keys() == {1, 2, 3, 4}
    assert all(text.startswith("message shop.Order: ") for text in errors.values())
    assert "field at: the Timestamp with 253402300800 seconds" in errors[2]
    assert "field more: the google.protobuf.Struct is not valid JSON" in errors[3]


def test_an_error_names_the_path_of_the_field() -> None:
    _, errors = rows(decoder(schema(ORDER), (0,)), [b"\x22\x03\x0a\x01\xff", b"\x22\x01\x0a"])
    assert errors[0] == "message shop.Order: field items.name: the string is not UTF-8"
    assert errors[1] == "message shop.Order: field items.name: the bytes end inside a value"


def test_the_frame_is_skipped() -> None:
    of = schema(ORDER)
    made = decoder(of, (0,))
    found, errors = rows(
        made, [b"frame" + message(of, id=3).SerializeToString(), b"frame", b"fr", None], start=5
    )
    assert [row and row["id"] for row in found] == [3, 0, None, None]
    assert list(errors) == [2]
    assert "2 bytes, fewer than its frame" in errors[2]


def test_the_last_member_of_a_oneof_wins_and_starts_afresh() -> None:
    text = """syntax = "proto3"; message M { oneof o { A a = 1; int32 b = 2; } }
    message A { int32 x = 1; repeated int32 l = 2; string s = 3; map<int32, int32> m = 4; }"""
    of = schema(text)
    first = message(of, a={"x": 1, "l": [1, 2], "s": "old", "m": {1: 1}}).SerializeToString()
    second = message(of, b=0).SerializeToString()
    third = message(of, a={"l": [3]}).SerializeToString()
    made = decoder(of, (0,))
    found, _ = rows(made, [first + second, first + second + third, first + third])
    assert found[0] == {"a": None, "b": 0}
    assert found[1] == {"a": {"x": 0, "l": [3], "s": "", "m": {}}, "b": None}
    assert found[2] == {"a": {"x": 1, "l": [1, 2, 3], "s": "old", "m": {1: 1}}, "b": None}


@pytest.mark.parametrize("entries", [2, 40, 1000])
def test_the_last_entry_of_a_key_wins(entries: int) -> None:
    of = schema("""
        syntax = "proto3";
        message M { map<string, int64> m = 1; repeated M2 l = 2; }
        message M2 { map<int32, M3> m = 1; }
        message M3 { int32 i = 1; }""")
    once = message(of, m={f"k{index}": index for index in range(entries)})
    once.l.add().m[1].i = 1
    twice = message(of, m={f"k{index}": -index for index in range(entries // 2)})
    nested = message(of)
    nested.l.add().m[5].i = 1
    found, errors = rows(
        decoder(of, (0,)),
        [once.SerializeToString() + twice.SerializeToString(), b"\x08", nested.SerializeToString() * 2],
    )
    assert found[0]["m"] == {
        f"k{index}": -index if index < entries // 2 else index for index in range(entries)
    }
    assert found[2]["l"] == [{"m": {5: {"i": 1}}}] * 2
    assert list(errors) == [1]


def test_proto2_groups_defaults_and_required_fields() -> None:
    of = schema("""
        syntax = "proto2";
        message M {
          required string must = 1;
          optional int32 seven = 2 [default = 7];
          optional string text = 3 [default = "d"];
          optional bool unset = 4;
          optional group G = 5 { optional int32 a = 6; }
          enum E { A = 1; B = 2; }
          optional E e = 8;
          repeated E list = 9;
        }""")
    full = message(of, must="x", seven=1, unset=False, g={"a": 3})
    unknown_enum = full.SerializeToString() + b"\x40\x63" + b"\x48\x63\x48\x02"
    found, errors = rows(decoder(of, (0,)), [full.SerializeToString(), b"\x0a\x00", b"", unknown_enum])
    assert found[0] == {
        "must": "x",
        "seven": 1,
        "text": "d",
        "unset": False,
        "g": {"a": 3},
        "e": None,
        "list": [],
    }
    assert found[1] == {"must": "", "seven": 7, "text": "d", "unset": None, "g": None, "e": None, "list": []}
    assert found[3] == found[0] | {"list": ["B"]}
    assert errors == {2: "message M: field must: the required field is missing"}


def test_a_number_that_an_open_enum_does_not_have_becomes_its_digits() -> None:
    of = schema("""
        syntax = "proto3";
        enum E { A = 0; B = 5; C = 5; option allow_alias = true; }
        message M { E e = 1; repeated E l = 2; }""")
    found, _ = rows(decoder(of, (0,)), [b"\x08\x05", b"\x08\x09\x12\x02\x00\x63"])
    assert found == [{"e": "B", "l": []}, {"e": "9", "l": ["A", "99"]}]


def test_editions() -> None:
    of = schema("""
        edition = "2023";
        message M { int32 explicit = 1; int32 implicit = 2 [features.field_presence = IMPLICIT];
                    M2 delimited = 3 [features.message_encoding = DELIMITED]; }
        message M2 { string s = 1; }""")
    found, errors = rows(decoder(of, (0,)), [b"", b"\x1b\x0a\x01a\x1c"])
    assert not errors
    assert found[0] == {"explicit": None, "implicit": 0, "delimited": None}
    assert found[1] == {"explicit": None, "implicit": 0, "delimited": {"s": "a"}}


@pytest.mark.parametrize("kind", [pa.binary(), pa.large_binary()])
def test_slices_and_empty_columns(kind: pa.DataType) -> None:
    of = schema(ORDER)
    made = decoder(of, (0,))
    column = pa.array([message(of, id=index).SerializeToString() for index in range(20)] + [None], kind)
    assert made.decode(column.slice(3, 4), 0).values.field("id").to_pylist() == [3, 4, 5, 6]
    assert made.decode(column.slice(20), 0).values.to_pylist() == [None]
    assert made.decode(column.slice(0, 0), 0).values.to_pylist() == []
    assert made.decode(pa.array([], kind), 0).values.type == made.arrow_type


def test_a_call_that_reuses_memory_finds_nothing_of_the_call_before() -> None:
    types = Types(7, "proto2")
    made = MessageDecoder(build_tree(types.descriptor), kernel())
    batches = [pa.array([types.payload() for _ in range(rows)], pa.binary()) for rows in (1, 70, 3, 40, 2)]
    expected = [Oracle(build_tree(types.descriptor)).decode(batch, 0).values for batch in batches]
    for batch, values in zip(batches, expected, strict=True):
        assert plain(made.decode(batch, 0).values) == plain(values)
    kept = [made.decode(batch, 0).values for batch in batches]
    assert [plain(each) for each in kept] == [plain(each) for each in expected]


def test_arrays_keep_their_memory() -> None:
    of = schema(ORDER)
    made = decoder(of, (0,))
    payloads = pa.array([message(of, id=index, note="n" * 50).SerializeToString() for index in range(5000)])
    kept = [made.decode(payloads, 0).values.field("note") for _ in range(5)]
    del made
    assert all(each.to_pylist() == ["n" * 50] * 5000 for each in kept)


def test_a_reader_schema_decides_the_type() -> None:
    writer = schema(
        'syntax = "proto3"; package p; message A {} message M { int32 a = 1; string b = 2; float gone = 3; }'
    )
    reader = schema(
        'syntax = "proto3"; package p; message M { int64 renamed = 1; bytes b = 2; optional int32 new = 9; }'
    )
    payload = message(writer, (1,), a=-1, b="x", gone=1.0).SerializeToString()
    made = decoder(writer, (1,), reader)
    assert rows(made, [payload])[0] == [{"renamed": -1, "b": b"x", "new": None}]
    moved = schema('syntax = "proto3"; package q; message M { int32 a = 1; } message N { int32 a = 1; }')
    assert rows(decoder(writer, (1,), moved, "q.M"), [payload])[0] == [{"a": -1}]
    with pytest.raises(InvalidSchemaError, match=r"type p\.M, but q\.N is expected"):
        decoder(writer, (1,), moved, "q.N")
    with pytest.raises(InvalidSchemaError, match=r"type p\.M, but 'p\.A' is expected"):
        decoder(writer, (1,), None, "p.A")


@pytest.mark.parametrize(
    ("written", "read"),
    [
        ("int32 a = 1;", "sint32 a = 1;"),
        ("string a = 1;", "int32 a = 1;"),
        ("repeated int32 a = 1;", "int32 a = 1;"),
        ("map<int32, int32> a = 1;", "repeated I a = 1;"),
        ("I a = 1;", "J a = 1;"),
    ],
)
def test_a_reader_that_would_change_values_is_refused(written: str, read: str) -> None:
    others = "message I { int32 x = 1; } message J { double x = 1; }"
    writer, reader = (
        schema(f'syntax = "proto3"; message M {{ {each} }} {others}') for each in (written, read)
    )
    with pytest.raises(InvalidSchemaError, match=r"field 'a(\.x)?' \(number 1\): the writer has"):
        decoder(writer, (0,), reader, "M")


def test_a_message_that_contains_itself_is_refused() -> None:
    of = schema("""
        syntax = "proto3";
        package t;
        message Node { int32 v = 1; Edge edge = 2; }
        message Edge { repeated Node to = 1; }""")
    with pytest.raises(InvalidSchemaError, match=r"field 'edge.to' of message t.Node.*contains itself"):
        decoder(of, (0,))


def test_too_many_fields_are_refused() -> None:
    levels = [f"message L{n} {{ L{n + 1} a = 1; L{n + 1} b = 2; int32 c = 3; }}" for n in range(14)]
    of = schema('syntax = "proto3"; ' + " ".join(levels) + " message L14 { int32 x = 1; }")
    with pytest.raises(InvalidSchemaError, match="more than 20,000 fields"):
        decoder(of, (0,))


@pytest.mark.skipif(shutil.which("gcc") is None, reason="needs gcc")
def test_random_bytes_with_sanitizers(tmp_path: Path) -> None:
    library = tmp_path / "protobuf.so"
    flags = ["-std=c11", "-g", "-O1", "-fsanitize=address,undefined", "-fno-sanitize-recover=undefined"]
    build = ["gcc", *flags, "-shared", "-fPIC", "-o", str(library), str(SOURCE)]
    if subprocess.run(build, capture_output=True, check=False).returncode:
        pytest.skip("gcc has no sanitizers")
    runtime = subprocess.run(
        ["gcc", "-print-file-name=libasan.so"], capture_output=True, check=True, text=True
    ).stdout.strip()
    environment = os.environ | {
        "LD_PRELOAD": runtime,
        "ASAN_OPTIONS": "detect_leaks=0",
        "PYTHONPATH": str(ROOT),
    }
    script = Path(__file__).with_name("fuzz_protobuf.py")
    done = subprocess.run(
        [sys.executable, str(script), str(library), "0", "60"],
        capture_output=True,
        check=False,
        text=True,
        env=environment,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    assert done.stdout.startswith("60 types")
