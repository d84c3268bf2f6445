"""Avro payloads become Arrow columns with the values that fastavro reads."""

from __future__ import annotations

import copy
import io
from collections.abc import Callable
from itertools import product
from typing import Any

import fastavro
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kafka_eos_source.documents.converted import Converted, slices
from kafka_eos_source.registry.avro import AvroDecoder, arrow_type, kernel
from kafka_eos_source.registry.avro_decode import compile_program
from kafka_eos_source.registry.avro_schema import parse
from kafka_eos_source.registry.codec import Reference, Schema, zigzag
from tests.registry.avro_kit import decode, error, one, record
from tests.registry.avro_model import (
    EXAMPLES,
    arrow_value,
    encode,
    is_struct_of_members,
    kind_of,
    schema_of,
    schemas,
    tagged,
    values,
)

FRAME = b"\0\0\0\0\7"


@settings(max_examples=EXAMPLES, deadline=None)
@given(st.data())
def test_random_records(data: st.DataObject) -> None:
    schema = data.draw(schemas())
    rows = data.draw(st.lists(values(schema), max_size=6))
    payloads = [encode(schema, row) for row in rows]
    made = decode(schema_of(schema), [*(FRAME + payload for payload in payloads), None], start=len(FRAME))
    assert not made.errors
    assert made.values.type == arrow_type(schema_of(schema))
    assert made.values.to_pylist() == [*(arrow_value(schema, row) for row in rows), None]


@settings(max_examples=EXAMPLES, deadline=None)
@given(st.data())
def test_damaged_records_do_not_disturb_others(data: st.DataObject) -> None:
    schema = data.draw(schemas())
    rows = data.draw(st.lists(values(schema), min_size=1, max_size=3))
    messages = []
    expected: list[Any] = []
    damaged = set()
    for row in rows:
        payload = encode(schema, row)
        messages.append(payload)
        expected.append(arrow_value(schema, row))
        for kind in data.draw(st.lists(st.sampled_from(["cut", "changed", "longer", "random"]), max_size=3)):
            damaged.add(len(messages))
            expected.append(None)
            messages.append(_damaged(data.draw, kind, payload))
    made = decode(schema_of(schema), messages)
    assert set(made.errors) <= damaged
    for row, wanted in enumerate(expected):
        if row not in damaged:
            assert made.values[row].as_py() == wanted
    for row in made.errors:
        assert not made.values[row].is_valid


@settings(max_examples=EXAMPLES, deadline=None)
@given(st.data())
def test_a_damaged_record_that_decodes_means_what_fastavro_reads(data: st.DataObject) -> None:
    """fastavro also reads what is no valid Avro, such as a byte 2 as a boolean; that is no value here."""
    schema = data.draw(schemas(logical=False))
    payload = encode(schema, data.draw(values(schema)))
    messages = [
        _damaged(data.draw, data.draw(st.sampled_from(["changed", "random"])), payload) for _ in range(20)
    ]
    made = decode(schema_of(schema), messages)
    parsed = fastavro.parse_schema(copy.deepcopy(schema))
    for row, message in enumerate(messages):
        if row not in made.errors:
            rest = io.BytesIO(message)
            expected = tagged(schema, fastavro.schemaless_reader(rest, parsed))
            assert not rest.read()
            found = _with_dicts(schema, made.values[row].as_py())
            assert repr(found) == repr(_with_dicts(schema, arrow_value(schema, expected)))


def _with_dicts(found: Any, value: Any) -> Any:
    """Returns a decoded value with maps as dictionaries, which keep the last of several equal keys."""
    kind = kind_of(found)
    if value is None:
        return None
    if kind == "record":
        return {one["name"]: _with_dicts(one["type"], value[one["name"]]) for one in found["fields"]}
    if kind == "array":
        return [_with_dicts(found["items"], item) for item in value]
    if kind == "map":
        return {key: _with_dicts(found["values"], item) for key, item in value}
    if kind == "union":
        branches = [one for one in found if one != "null"]
        if is_struct_of_members(found):
            members = zip(branches, value.items(), strict=True)
            return {name: _with_dicts(one, member) for one, (name, member) in members}
        return _with_dicts(branches[0], value)
    return value


def _damaged(draw: Callable[[Any], Any], kind: str, payload: bytes) -> bytes:
    if kind == "random":
        return draw(st.binary(max_size=40))
    if kind == "longer":
        return payload + draw(st.binary(min_size=1, max_size=5))
    if not payload:
        return payload
    place = draw(st.integers(0, len(payload) - 1))
    if kind == "cut":
        return payload[:place]
    return payload[:place] + bytes([draw(st.integers(0, 255))]) + payload[place + 1 :]


NULLS: Any = {"type": "array", "items": "null"}
INTS: Any = {"type": "array", "items": "int"}
EMPTY = "a block has 65537 items of no bytes; at most 65536 are accepted in one row"
FAR = "the timestamp 9223372036854775807 is too far from 1970 for the unit of the type"


def decimal_of(precision: int) -> dict[str, Any]:
    return {"type": "bytes", "logicalType": "decimal", "precision": precision, "scale": 0}


def early(wanted: int, left: int) -> str:
    return f"the payload ends too early: {wanted} bytes or items are announced, {left} bytes left"


def digits(size: int) -> str:
    return f"a decimal of {size} bytes is empty, or has more digits than its precision"


@pytest.mark.parametrize(
    ("schema", "payload", "message"),
    [
        ("long", b"", early(1, 0)),
        ("long", b"\x80" * 3, early(1, 0)),
        ("long", b"\xff" * 9 + b"\x02", "a number takes more than 64 bits"),
        ("int", b"\x80\x80\x80\x80\x10", "2147483648 does not fit into an int"),
        ("boolean", b"\2", "byte 2 is not a boolean"),
        ("string", b"\4\xc3\x28", "a string is not valid UTF-8"),
        ("string", b"\x01", "the length -1 is negative"),
        ("bytes", b"\xfe\xff\xff\xff\x0fab", early(2147483647, 2)),
        ("double", b"1234", early(8, 4)),
        ({"type": "fixed", "name": "F", "size": 3}, b"12", early(3, 2)),
        (["null", "int"], b"\4", "the union has 2 branches, but the payload selects number 2"),
        (["null", "int"], b"\1", "the union has 2 branches, but the payload selects number -1"),
        (
            {"type": "enum", "name": "E", "symbols": ["A"]},
            b"\2",
            "the enum has 1 symbols, but the payload selects number 1",
        ),
        (decimal_of(2), b"\0", digits(0)),
        (decimal_of(2), b"\2\x64", digits(1)),
        (decimal_of(38), b"\x22\0" + b"\x80" + b"\0" * 15, digits(17)),
        (decimal_of(38), b"\x20\x80" + b"\0" * 15, digits(16)),
        ({"type": "long", "logicalType": "timestamp-millis"}, b"\xfe" + b"\xff" * 8 + b"\x01", FAR),
        (NULLS, b"\x80\x80\x08\0", None),
        (NULLS, b"\x82\x80\x08\0", EMPTY),
        (NULLS, b"\xff" * 9 + b"\x01\2", "the length -9223372036854775808 is negative"),
        (INTS, b"\xfe" + b"\xff" * 8 + b"\x01", early(9223372036854775807, 0)),
        (INTS, b"\1\x08\2\0", "a block announces 4 bytes, 2 are left"),
        ({"type": "map", "values": "null"}, b"\2\2\xff\0", "a string is not valid UTF-8"),
        ("int", b"\2\2", "1 bytes follow the value"),
    ],
)
def test_messages_of_invalid_payloads(schema: Any, payload: bytes, message: str | None) -> None:
    if message is None:
        assert one(schema, payload) == [None] * 65536
        return
    assert error(schema, payload) == message
    inside = record({"name": "before", "type": "string"}, {"name": "it", "type": schema})
    if "follow" not in message:
        assert error(inside, b"\2x" + payload) == f"field it: {message}"


def test_a_message_names_nested_fields() -> None:
    street = record({"name": "street", "type": "string"}, name="Address")
    people = record({"name": "people", "type": {"type": "map", "values": {"type": "array", "items": street}}})
    assert error(people, b"\2\2k\2\2\xff\0\0") == "field people{}[].street: a string is not valid UTF-8"


def test_a_message_shorter_than_its_frame() -> None:
    made = decode(schema_of("int"), [b"\0\0", FRAME + b"\2"], start=5)
    assert made.errors == {0: "the message has 2 bytes, fewer than the 5 of its frame"}
    assert made.values.to_pylist() == [None, 1]


def test_a_row_that_fails_late_takes_back_all_columns() -> None:
    schema = record(
        {"name": "flags", "type": {"type": "array", "items": ["null", "boolean"]}},
        {"name": "texts", "type": {"type": "map", "values": ["null", "string", "double"]}},
        {"name": "last", "type": "boolean"},
    )
    rows = [
        {
            "flags": [("boolean", True)] * 9,
            "texts": {"a": ("string", "x" * 40), "b": ("null", None)},
            "last": True,
        },
        {"flags": [("null", None)] * 7, "texts": {}, "last": False},
    ]
    payloads = [encode(schema, row) for row in rows]
    messages = [payloads[0], payloads[0][:-1], payloads[1], payloads[1] + b"!", payloads[0]]
    made = decode(schema_of(schema), messages)
    assert sorted(made.errors) == [1, 3]
    shown = [arrow_value(schema, row) for row in rows]
    assert made.values.to_pylist() == [shown[0], None, shown[1], None, shown[0]]


def test_a_block_with_its_size_in_bytes() -> None:
    assert one(INTS, b"\3\4\2\4\2\6\0") == [1, 2, 3]


def test_slices_and_large_binary_and_chunks() -> None:
    program = compile_program(parse(schema_of("int")), parse(schema_of("int")))
    messages = pa.array([b"?", b"\2", None, b"\4", b"?"])
    for column in (messages, messages.cast(pa.large_binary()), pa.chunked_array([messages])):
        made = AvroDecoder(program, kernel()).decode(column.slice(1, 3), 0)
        assert made == Converted(pa.array([1, None, 2], pa.int32()), {})
    assert len(AvroDecoder(program, kernel()).decode(pa.array([], pa.binary()), 5).values) == 0


def test_a_small_payload_that_wants_much_memory() -> None:
    """A kilobyte per item that takes one byte, from the reader's default."""
    item = record({"name": "x", "type": "int"}, name="Item")
    wide = record(
        {"name": "x", "type": "int"}, {"name": "y", "type": "string", "default": "y" * 1024}, name="Item"
    )
    program = compile_program(
        parse(schema_of({"type": "array", "items": item})), parse(schema_of({"type": "array", "items": wide}))
    )
    payload = b"\x80\x80\x20" + b"\2" * (1 << 18) + b"\0"
    decode = AvroDecoder(program, kernel()).decode
    first, second, last = slices(
        lambda column: decode(column, 0), pa.array([b"\2\2\0", payload, b"\2\4\0"]), "decoded"
    )
    assert first.values.to_pylist() == [[{"x": 1, "y": "y" * 1024}]]
    assert second.values.to_pylist() == [None]
    assert second.errors == {0: "the record takes more than 256 MiB when it is decoded"}
    assert last.values.to_pylist() == [[{"x": 2, "y": "y" * 1024}]]
    assert not first.errors
    assert not last.errors
    assert first.values.nbytes < 10_000


def test_references() -> None:
    city = Schema(
        "AVRO", '{"type":"record","name":"City","namespace":"geo","fields":[{"name":"name","type":"string"}]}'
    )
    street = Schema(
        "AVRO",
        '{"type":"record","name":"Street","namespace":"geo","fields":[{"name":"city","type":"City"}]}',
        (Reference("geo.City", city),),
    )
    home = Schema(
        "AVRO",
        '{"type":"record","name":"Home","fields":[{"name":"street","type":"geo.Street"},{"name":"city","type":"geo.City"}]}',
        (Reference("geo.Street", street), Reference("geo.City", city)),
    )
    made = decode(home, [b"\2a\2b"])
    assert made.values.to_pylist() == [{"street": {"city": {"name": "a"}}, "city": {"name": "b"}}]


def test_arrow_types_become_sparks_types() -> None:
    from pyspark.sql.pandas.types import from_arrow_type

    schema = record(
        {"name": "e", "type": {"type": "enum", "name": "E", "symbols": ["A"]}},
        {"name": "f", "type": {"type": "fixed", "name": "F", "size": 2}},
        {"name": "n", "type": ["null", "long"]},
        {"name": "il", "type": ["int", "long"]},
        {"name": "fd", "type": ["null", "double", "float"]},
        {"name": "u", "type": ["int", "null", "string"]},
        {"name": "s", "type": ["string"]},
        {"name": "m", "type": {"type": "map", "values": INTS}},
        {"name": "d", "type": {"type": "bytes", "logicalType": "decimal", "precision": 9, "scale": 2}},
        {"name": "big", "type": {"type": "bytes", "logicalType": "big-decimal"}},
        {"name": "day", "type": {"type": "int", "logicalType": "date"}},
        {"name": "tm", "type": {"type": "int", "logicalType": "time-millis"}},
        {"name": "ts", "type": {"type": "long", "logicalType": "timestamp-millis"}},
        {"name": "ns", "type": {"type": "long", "logicalType": "timestamp-nanos"}},
        {"name": "local", "type": {"type": "long", "logicalType": "local-timestamp-micros"}},
        {"name": "id", "type": {"type": "string", "logicalType": "uuid"}},
        {"name": "took", "type": {"type": "fixed", "name": "D", "size": 12, "logicalType": "duration"}},
    )
    assert from_arrow_type(arrow_type(schema_of(schema))).simpleString() == (
        "struct<e:string,f:binary,n:bigint,il:bigint,fd:double,u:struct<member0:int,member1:string>,s:string,"
        "m:map<string,array<int>>,d:decimal(9,2),big:binary,day:date,tm:int,ts:timestamp,ns:bigint,"
        "local:timestamp_ntz,id:string,took:binary>"
    )


def test_strings_are_utf8_as_python_defines_it() -> None:
    firsts = b"\x41\x7f\x80\xbf\xc0\xc1\xc2\xdf\xe0\xe1\xec\xed\xee\xef\xf0\xf1\xf3\xf4\xf5\xff"
    others = b"\x41\x7f\x80\x8f\x90\x9f\xa0\xbf\xc0"
    texts = [
        b"x" * (number % 11) + bytes(one)[: 1 + number % 4] + b"y" * (number % 3)
        for number, one in enumerate(product(firsts, others, others, others))
    ]
    made = decode(schema_of("string"), [zigzag(len(text)) + text for text in texts])
    for row, text in enumerate(texts):
        assert (row in made.errors) == (text.decode(errors="ignore").encode() != text)


def test_decimals_of_more_than_16_bytes() -> None:
    schema = decimal_of(38)
    assert one(schema, b"\x22" + b"\0" * 16 + b"\5") == 5
    assert one(schema, b"\x22" + b"\xff" * 17) == -1
    for first in (b"\1" + b"\0" * 16, b"\0" + b"\xff" * 16, b"\xff" + b"\0" * 16, b"\xfe" + b"\xff" * 16):
        assert error(schema, b"\x22" + first) == digits(17)


def test_blocks_of_items_without_bytes_are_counted_together() -> None:
    assert error(NULLS, 2 * zigzag(40_000) + b"\0") == (
        "a block has 40000 items of no bytes; at most 65536 are accepted in one row"
    )
    assert "items of no bytes" in error(
        record({"name": "x", "type": NULLS}), 2 * zigzag(40_000) + b"\0", record()
    )
