"""A reader schema other than the writer's: Avro's resolution rules, with fastavro as the oracle."""

from __future__ import annotations

import copy
import io
from typing import Any

import fastavro
import pyarrow as pa
import pytest
from hypothesis import event, given, settings
from hypothesis import strategies as st

from kafka_eos_source.errors import InvalidSchemaError
from kafka_eos_source.registry.avro import decoder
from kafka_eos_source.registry.codec import Schema
from tests.registry.avro_kit import decode, error, one, record
from tests.registry.avro_model import (
    EXAMPLES,
    arrow_value,
    encode,
    kind_of,
    schema_of,
    schemas,
    tagged,
    values,
)

_PROMOTED = {"int": ["long", "float", "double"], "long": ["float", "double"], "float": ["double"]}
_ADDED: list[tuple[Any, Any]] = [
    ("long", -5),
    ("string", "grüße"),
    (["null", "string"], None),
    (["double", "null"], 1.5),
    ("boolean", True),
    ({"type": "array", "items": "int"}, [1, 2, 300]),
    ({"type": "map", "values": ["null", "long"]}, {"a": None}),
    ({"type": "enum", "name": "Added", "symbols": ["X", "Y"]}, "Y"),
    (
        {"type": "record", "name": "AddedRecord", "fields": [{"name": "z", "type": "int", "default": 9}]},
        {},
    ),
]


class _Evolution:
    """Changes a schema at random; `is_compatible` says whether each record of it can still be read."""

    def __init__(self, draw: Any) -> None:
        self._draw = draw
        self._added = 0
        self.is_compatible = True

    def _chance(self, of: int) -> bool:
        return bool(self._draw(st.integers(0, of - 1)) == 0)

    def change(self, found: Any, in_union: bool = False) -> Any:
        kind = kind_of(found)
        if kind == "union":
            return self._union(found)
        made = copy.deepcopy(found)
        if kind == "record":
            made = self._record(found)
        elif kind in ("array", "map"):
            key = "items" if kind == "array" else "values"
            made = {**found, key: self.change(found[key])}
        elif kind == "enum":
            made = self._enum(found)
        elif kind in _PROMOTED and self._chance(2):
            made = self._draw(st.sampled_from(_PROMOTED[kind]))
        elif kind in ("string", "bytes") and not in_union and self._chance(3):
            self.is_compatible &= kind == "string"  # bytes may not be UTF-8
            made = {"string": "bytes", "bytes": "string"}[kind]
        elif not in_union and self._chance(15):
            self.is_compatible = False
            return self._draw(
                st.sampled_from(["boolean", "string", "int", {"type": "array", "items": "int"}])
            )
        return ["null", made] if not in_union and kind != "null" and self._chance(5) else made

    def _union(self, found: Any) -> Any:
        branches = [self.change(branch, in_union=True) for branch in found]
        if len(branches) > 1 and self._chance(6):
            self.is_compatible = False
            branches.pop()
        if self._chance(3):
            branches.reverse()
        return branches[0] if len(branches) == 1 and self._chance(2) else branches

    def _enum(self, found: Any) -> Any:
        symbols = list(found["symbols"])
        made = {**found, "symbols": symbols}
        if self._chance(2):
            symbols.insert(0, "NEW")
        if len(symbols) > 1 and self._chance(2):
            symbols.remove(found["symbols"][0])
            if symbols and self._chance(2):
                made["default"] = symbols[-1]
            else:
                self.is_compatible = False
        return made

    def _record(self, found: Any) -> Any:
        fields = []
        for field in found["fields"]:
            if self._chance(6):
                continue
            made = {**field, "type": self.change(field["type"])}
            if self._chance(5):
                made = {**made, "name": f"renamed_{field['name']}", "aliases": ["other", field["name"]]}
            fields.append(made)
        if self._added < len(_ADDED) and self._chance(3):
            kind, default = _ADDED[self._added]
            made = {"name": f"added{self._added}", "type": kind, "default": default}
            self._added += 1
            if self._chance(6):
                self.is_compatible = False
                del made["default"]
            fields.append(made)
        return {**found, "fields": self._draw(st.permutations(fields))}


@settings(max_examples=EXAMPLES, deadline=None)
@given(st.data())
def test_random_evolution(data: st.DataObject) -> None:
    writer = data.draw(schemas(logical=False))
    evolution = _Evolution(data.draw)
    reader = evolution.change(writer)
    rows = data.draw(st.lists(values(writer), min_size=1, max_size=5))
    payloads = [encode(writer, row) for row in rows]
    try:
        made = decode(schema_of(writer), payloads, schema_of(reader))
    except InvalidSchemaError:
        assert not evolution.is_compatible
        event("refused")
        return
    event("compatible" if evolution.is_compatible else "partly compatible")
    shown = made.values.to_pylist()
    parsed = fastavro.parse_schema(copy.deepcopy(writer)), fastavro.parse_schema(copy.deepcopy(reader))
    for row, payload in enumerate(payloads):
        try:
            found = fastavro.schemaless_reader(io.BytesIO(payload), *parsed)
        except (fastavro.read.SchemaResolutionError, UnicodeDecodeError):
            assert row in made.errors
            assert not evolution.is_compatible
        else:
            assert row not in made.errors
            assert shown[row] == _narrow(
                made.values.type, arrow_value(reader, tagged(reader, _filled(reader, found)))
            )


def _filled(found: Any, value: Any) -> Any:
    """Adds defaults inside defaults, which fastavro leaves out."""
    if kind_of(found) == "record" and isinstance(value, dict):
        return {
            each["name"]: _filled(
                each["type"], value[each["name"]] if each["name"] in value else each["default"]
            )
            for each in found["fields"]
        }
    if kind_of(found) == "array":
        return [_filled(found["items"], item) for item in value]
    return value


def _narrow(found: pa.DataType, value: Any) -> Any:
    """Rounds numbers that became floats of 32 bits: fastavro promotes to Python's floats."""
    if value is None:
        return None
    if pa.types.is_struct(found):
        return {each.name: _narrow(each.type, value[each.name]) for each in found}
    if pa.types.is_list(found):
        return [_narrow(found.value_type, item) for item in value]
    if pa.types.is_map(found):
        return [(key, _narrow(found.item_type, item)) for key, item in value]
    return pa.scalar(value, pa.float64()).cast(pa.float32()).as_py() if pa.types.is_float32(found) else value


def _timestamp(unit: str) -> dict[str, str]:
    return {"type": "long", "logicalType": f"timestamp-{unit}"}


def _decimal(precision: int, scale: int) -> dict[str, Any]:
    return {"type": "bytes", "logicalType": "decimal", "precision": precision, "scale": scale}


@pytest.mark.parametrize(
    ("writer", "reader", "value", "microseconds"),
    [
        (_timestamp("millis"), _timestamp("micros"), 1_500, 1_500_000),
        (_timestamp("micros"), _timestamp("millis"), 1_500, 1_500),
        (_timestamp("nanos"), _timestamp("micros"), -1_500, -2),
        (_timestamp("nanos"), _timestamp("millis"), 1_999, 1),
        (_timestamp("micros"), _timestamp("nanos"), 7, 7_000),
        ("long", _timestamp("millis"), -3, -3_000),
        ("int", _timestamp("millis"), 3, 3_000),
        (_timestamp("millis"), "long", 3, 3),
    ],
)
def test_units_of_timestamps(writer: Any, reader: Any, value: int, microseconds: int) -> None:
    made = decode(schema_of(writer), [encode(writer, value)], schema_of(reader))
    assert made.values.view(pa.int64()).to_pylist() == [microseconds]


def test_decimals() -> None:
    assert str(one(_decimal(4, 2), b"\2\7", _decimal(10, 2))) == "0.07"
    assert one(_decimal(4, 2), b"\2\7", "bytes") == b"\7"
    assert str(one("bytes", b"\2\7", _decimal(10, 1))) == "0.7"
    assert "more digits than its precision" in error(_decimal(10, 2), b"\4\3\xe8", _decimal(3, 2))
    with pytest.raises(InvalidSchemaError, match=r"writer's type is bytes \(decimal\(4, 2\)\)"):
        decoder(schema_of(_decimal(4, 2)), schema_of(_decimal(4, 1)))
    with pytest.raises(InvalidSchemaError, match="field d is a decimal of 39 digits"):
        decoder(schema_of(record({"name": "d", "type": _decimal(39, 2)})))


def test_a_union_takes_the_exact_branch_before_a_promotion() -> None:
    assert one("bytes", b"\2a", ["string", "bytes"]) == {"member0": None, "member1": b"a"}
    assert one(["int", "string"], b"\2\2a", ["double", "bytes", "string", "int"]) == {
        "member0": None,
        "member1": None,
        "member2": "a",
        "member3": None,
    }
    assert one("int", b"\6", ["null", "string", "double"]) == {"member0": None, "member1": 3.0}


def test_branches_that_a_reader_does_not_take() -> None:
    writer = record({"name": "u", "type": ["null", "int", "string"]})
    reader = record({"name": "u", "type": "long"})
    assert one(writer, b"\2\x08", reader) == {"u": 4}
    assert error(writer, b"\0", reader) == (
        "field u: the reader's schema does not accept this branch of the writer's union "
        "(the writer's type is null, the reader's is long)"
    )
    assert "(the writer's type is string, the reader's is long)" in error(writer, b"\4\0", reader)


def test_aliases() -> None:
    writer = {**record({"name": "old", "type": {"type": "fixed", "name": "a.F", "size": 1}}), "name": "a.Old"}
    fixed = {"type": "fixed", "name": "b.G", "aliases": ["a.F"], "size": 1}
    reader = {**record({"name": "new", "aliases": ["x", "old"], "type": ["null", fixed]}), "name": "b.New"}
    assert one(writer, b"!", reader) == {"new": b"!"}
    del fixed["aliases"]
    with pytest.raises(InvalidSchemaError, match=r"field old: the writer's type is fixed a\.F, the reader's"):
        decoder(schema_of(writer), schema_of(reader))
    in_union = {**record({"name": "x", "type": "int"}), "name": "Other", "aliases": ["R"]}
    assert one(record({"name": "x", "type": "int"}), b"\2", ["null", in_union]) == {"x": 1}


def test_enum_symbols() -> None:
    writer = {"type": "enum", "name": "E", "symbols": ["A", "B"]}
    assert one(writer, b"\2", {**writer, "symbols": ["C", "B"]}) == "B"
    assert error(writer, b"\0", {**writer, "symbols": ["C", "B"]}) == (
        "the reader's enum lacks symbol number 0 of the writer's, and has no default"
    )
    assert one(writer, b"\0", {**writer, "symbols": ["C", "B"], "default": "C"}) == "C"


def test_recursive_types() -> None:
    node = record({"name": "value", "type": "int"}, {"name": "next", "type": ["null", "R"]})
    tree = record({"name": "id", "type": "int"}, {"name": "root", "type": node}, name="Tree")
    with pytest.raises(InvalidSchemaError, match=r"field root\.next has the recursive type 'R'"):
        decoder(schema_of(tree))
    flat = record({"name": "id", "type": "int"}, name="Tree")
    assert one(tree, b"\2" + b"\4\2" * 98 + b"\4\0", flat) == {"id": 1}
    assert "nested more than 100 levels deep" in error(tree, b"\2" + b"\4\2" * 5000 + b"\4\0", flat)


@pytest.mark.parametrize(
    ("writer", "reader", "message"),
    [
        ("string", "int", "the writer's type is string, the reader's is int"),
        ("long", "int", "the writer's type is long, the reader's is int"),
        (
            record({"name": "a", "type": {"type": "array", "items": "string"}}),
            record({"name": "a", "type": {"type": "array", "items": "boolean"}}),
            r"field a\[\]: the writer's type is string, the reader's is boolean",
        ),
        (record(), record({"name": "b", "type": "int"}), "field b: the writer's schema has no such field"),
        (record(), record({"name": "b", "type": "int", "default": "x"}), "field b has default 'x'"),
        (
            {"type": "fixed", "name": "F", "size": 2},
            {"type": "fixed", "name": "F", "size": 3},
            "2 bytes in the writer's schema, 3 in the reader's",
        ),
        ("null", "int", "the writer's type is null"),
        ("boolean", ["null", "int"], r"the writer's type is boolean, the reader's is union \[null, int\]"),
    ],
)
def test_schemas_that_do_not_match(writer: Any, reader: Any, message: str) -> None:
    with pytest.raises(InvalidSchemaError, match=message):
        decoder(schema_of(writer), schema_of(reader))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "the schema cannot be read as JSON"),
        ('"strin"', "type 'strin' is not defined"),
        (
            '{"type": "record", "name": "R", "fields": [{"name": "a", "type": "X"}]}',
            "field a: type 'X' is not",
        ),
        ('{"type": "record", "name": "R", "fields": [{"name": "a"}]}', "a field without a name or type"),
        ('["int", "int"]', "has a type twice"),
        ('{"type": "fixed", "name": "F", "size": -1}', "has size -1"),
        ('{"type": "enum", "name": "E", "symbols": ["A", "A"]}', "expected different strings"),
        ('{"type": "record", "name": "R"}', "record 'R' has no list of fields"),
        ('{"type": "array"}', "None is not a type"),
        ("7", "7 is not a type"),
        ('{"type": "record", "name": "R", "aliases": 5, "fields": []}', "'R' has aliases 5: expected a list"),
        ("[" * 5000 + "]" * 5000, "nested more than"),
    ],
)
def test_schemas_that_are_not_valid(text: str, message: str) -> None:
    with pytest.raises(InvalidSchemaError, match=message):
        decoder(Schema("AVRO", text))


def test_a_schema_of_another_format() -> None:
    with pytest.raises(InvalidSchemaError, match="format PROTOBUF"):
        decoder(Schema("PROTOBUF", 'syntax = "proto3";'))
