"""Schemas that somebody else registered: well-formed, damaged, and made to do harm.

A record can name any of them. `decoded` decodes records as a query does, and `ATTACKS` and the strategies
make schemas for it. Tests and fuzzers share this module.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Callable
from functools import lru_cache, partial
from typing import Any

import pyarrow as pa
from hypothesis import strategies as st

from kafka_eos_source.documents.converted import Converted
from kafka_eos_source.registry import catalog, codec, records
from kafka_eos_source.registry.codec import Reference, Schema, SchemaFormat
from kafka_eos_source.registry.frames import frame_prefix
from tests.registry import avro_model

READERS: dict[str, Schema] = {
    "AVRO": Schema(
        "AVRO",
        json.dumps(
            {
                "type": "record",
                "name": "R",
                "fields": [
                    {"name": "a", "type": ["null", "int"], "default": None},
                    {
                        "name": "e",
                        "type": {"type": "enum", "name": "E", "symbols": ["x"], "default": "x"},
                        "default": "x",
                    },
                    {
                        "name": "r",
                        "type": [
                            "null",
                            {
                                "type": "record",
                                "name": "S",
                                "fields": [
                                    {"name": "l", "type": {"type": "array", "items": "long"}, "default": []}
                                ],
                            },
                        ],
                        "default": None,
                    },
                ],
            }
        ),
    ),
    "PROTOBUF": Schema(
        "PROTOBUF",
        'syntax = "proto3"; '
        "message R { int32 a = 1; S r = 2; message S { repeated int64 l = 1; string t = 2; } }",
    ),
    "JSON": Schema(
        "JSON",
        json.dumps(
            {
                "type": "object",
                "properties": {"a": {"type": "integer"}, "l": {"type": "array", "items": {"type": "string"}}},
            }
        ),
    ),
}


@lru_cache
def _arrow_type(reader: Schema) -> pa.DataType:
    return codec.arrow_type(reader, None)


def decoded(writer: Schema, *payloads: bytes, reader: Schema | None = None) -> Converted:
    """Decodes payloads, with the frame of a schema that the process has read, as a task of a query does.

    Nothing is left behind: the next call compiles the schema again.
    """
    catalog._catalogs.clear()
    records._decoders.clear()
    options = {"url": "http://127.0.0.1:1", "retry.timeout.ms": "0"}
    catalog.catalog(options).add(7, writer)
    reader = reader or READERS[writer.format]
    column = pa.array([frame_prefix(7) + each for each in payloads], pa.binary())
    found = records.Decoding(options, reader, None, _arrow_type(reader)).decode(column)
    found.values.validate(full=True)
    return found


# -- schemas that are made to do harm ----------------------------------------------------------------


def record(name: str, *fields: tuple[str, Any]) -> dict[str, Any]:
    return {"type": "record", "name": name, "fields": [{"name": key, "type": kind} for key, kind in fields]}


def avro(*fields: tuple[str, Any], references: tuple[Reference, ...] = ()) -> Schema:
    return Schema("AVRO", json.dumps(record("R", *fields)), references)


def doubling(levels: int, leaf: Any = "int") -> dict[str, Any]:
    """Each record has the next one twice: a few bytes for each level, and twice the values."""
    found: Any = record("D0", ("v", leaf))
    for level in range(1, levels):
        found = record(f"D{level}", ("a", found), ("b", f"D{level - 1}"))
    return found


def nested(levels: int) -> Any:
    found: Any = "int"
    for level in range(levels):
        found = record(f"N{level}", ("r", found))
    return found


def chain(levels: int) -> tuple[tuple[str, Any], ...]:
    """Records that are nested by name, and not in the text."""
    return tuple((f"f{n}", record(f"C{n}", ("v", f"C{n - 1}" if n else "int"))) for n in range(levels))


def unions(levels: int, width: int) -> Any:
    """Records of one name in several namespaces: a reader's record of that name can read all of them."""
    found: Any = "int"
    for level in range(levels):
        first = record(f"n0.l{level}.S", ("r", found))
        others = [
            record(f"n{n}.l{level}.S", ("r", f"l{level - 1}.H" if level else "int")) for n in range(1, width)
        ]
        found = record(f"l{level}.H", ("r", [first, *others]))
    return found


def one_by_one(levels: int) -> Any:
    """A reader's schema for `unions`."""
    found: Any = "int"
    for level in range(levels):
        found = record(f"l{level}.H", ("r", record(f"l{level}.S", ("r", found))))
    return found


def proto(body: str = "", more: str = "", head: str = "", references: tuple[Reference, ...] = ()) -> Schema:
    text = f'syntax = "proto3"; {head} message R {{ int32 a = 1; {body} }} {more}'
    return Schema("PROTOBUF", text, references)


def imports(*names: str) -> tuple[Reference, ...]:
    return tuple(Reference(name, Schema("PROTOBUF", 'syntax = "proto3";')) for name in names)


def lattice(kind: SchemaFormat, files: int, text: Callable[[int], str]) -> Schema:
    """Schemas each of which imports all of those before it."""
    made: list[Reference] = []
    for number in range(files):
        made.append(Reference(f"f{number}.proto", Schema(kind, text(number), tuple(made))))
    return Schema(kind, text(files), tuple(made))


def ladder(levels: int) -> dict[str, Any]:
    """A JSON Schema in which each definition uses the next one twice."""
    steps = {
        f"d{n}": {"type": "object", "properties": {key: {"$ref": f"#/definitions/d{n + 1}"} for key in "ab"}}
        for n in range(levels)
    }
    return {"$ref": "#/definitions/d0", "definitions": {**steps, f"d{levels}": {"type": "integer"}}}


def combined(levels: int, keyword: str) -> dict[str, Any]:
    steps = {f"d{n}": {keyword: [{"$ref": f"#/definitions/d{n + 1}"}] * 2} for n in range(levels)}
    return {"$ref": "#/definitions/d0", "definitions": {**steps, f"d{levels}": {"type": "integer"}}}


def json_nested(levels: int) -> dict[str, Any]:
    found: dict[str, Any] = {"type": "integer"}
    for _ in range(levels):
        found = {"type": "object", "properties": {"a": found}}
    return found


def _importing(name: str) -> Schema:
    return proto(references=imports(name))


def _json_schema(make: Callable[[], Any]) -> Schema:
    return Schema("JSON", json.dumps(make()))


#: Name → a schema, and a part of the error of its records; None if they may be decoded.
ATTACKS: dict[str, tuple[Callable[[], Schema], str | None]] = {
    "avro: a fixed type of 10^30 bytes": (
        lambda: avro(("f", {"type": "fixed", "name": "F", "size": 10**30})),
        "expected a number of bytes up to",
    ),
    "avro: a fixed type of 2^31 bytes": (
        lambda: avro(("f", {"type": "fixed", "name": "F", "size": 2**31})),
        "expected a number of bytes up to",
    ),
    "avro: 23 records, each with the next one twice": (
        lambda: avro(("d", {"type": "array", "items": doubling(23)})),
        None,
    ),
    "avro: 60 records, each with the next one twice": (
        lambda: avro(("d", {"type": "array", "items": doubling(60)})),
        None,
    ),
    "avro: the same in place of the reader's record": (
        lambda: avro(("r", ["null", doubling(60)])),
        "does not accept this branch",
    ),
    "avro: the same with a fixed type of 2 GiB in the end": (
        lambda: avro(
            ("d", {"type": "array", "items": doubling(60, {"type": "fixed", "name": "F", "size": 2**31 - 1})})
        ),
        None,
    ),
    "avro: 150 records in each other": (lambda: avro(("d", nested(150))), "nested"),
    "avro: 2,000 records in each other by name": (lambda: avro(*chain(2000)), "nested"),
    "avro: 100,000 brackets": (lambda: Schema("AVRO", "[" * 100_000), "nested more than"),
    "avro: types of types": (
        lambda: Schema("AVRO", '{"type":' * 5000 + '"int"' + "}" * 5000),
        "nested more than",
    ),
    "avro: arrays of arrays": (
        lambda: Schema("AVRO", '{"type":"array","items":' * 90 + '"int"' + "}" * 90),
        "nested more than",
    ),
    "avro: 100,000 fields": (lambda: avro(*((f"f{n}", "int") for n in range(100_000))), None),
    "avro: an enum of 300,000 symbols": (
        lambda: avro(("e", {"type": "enum", "name": "E", "symbols": [f"s{n}" for n in range(300_000)]})),
        "steps",
    ),
    "avro: a long name around 10,000 fields": (
        lambda: avro(("x" * 100_000, record("N", *((f"f{n}", "int") for n in range(10_000))))),
        None,
    ),
    "avro: a long namespace around 10,000 types": (
        lambda: Schema(
            "AVRO",
            json.dumps(
                {
                    **record("R", *((f"f{n}", record(f"T{n}", ("v", "int"))) for n in range(10_000))),
                    "namespace": "n" * 1_000_000,
                }
            ),
        ),
        "more than 1000 characters",
    ),
    "avro: a decimal of 10^4000 digits": (
        lambda: avro(("a", {"type": "bytes", "logicalType": "decimal", "precision": 10**4000})),
        "does not fit",
    ),
    "avro: a number of 10,000 digits": (
        lambda: Schema("AVRO", '{"type":"fixed","name":"F","size":' + "9" * 10_000 + "}"),
        "read as JSON",
    ),
    "avro: defaults of the wrong type": (
        lambda: Schema(
            "AVRO",
            json.dumps({**record("R"), "fields": [{"name": "z", "type": "int", "default": {"x": [1]}}]}),
        ),
        None,
    ),
    "avro: names of half a character, with NUL and slashes": (
        lambda: avro(("\ud800", "int"), ("a\0b", "int"), ("../../x", "int")),
        None,
    ),
    "avro: names of numbers": (lambda: Schema("AVRO", '{"type":"record","name":5,"fields":7}'), "no name"),
    "avro: a type that is a number": (lambda: avro(("a", {"type": 5})), "is not a type"),
    "avro: infinitely many values": (lambda: avro(("z", "R")), None),
    "avro: recursive in place of the reader's record": (
        lambda: avro(("r", record("S", ("l", {"type": "array", "items": "S"})))),
        "does not fit",
    ),
    "avro: 2,000 records in each other by name, each before its definition": (
        lambda: avro(*chain(2000)[::-1]),
        "nested",
    ),
    "avro: 10,000 definitions of one type": (
        lambda: avro(*((f"f{n}", record("T", ("v", "int"), ("t", ["null", "T"]))) for n in range(10_000))),
        None,
    ),
    "avro: comments without an end": (lambda: Schema("AVRO", "/*" * 1_000_000), "read as JSON"),
    "avro: references that refer to each other": (
        lambda: lattice("AVRO", 22, lambda n: json.dumps({**record(f"f{n}.proto"), "name": f"f{n}.proto"})),
        None,
    ),
    "protobuf: references that are file and folder": (
        lambda: proto(references=imports("a", "a/b.proto")),
        None,
    ),
    "protobuf: a name of 300 characters": (
        lambda: proto(references=imports("n" * 300)),
        None,
    ),
    "protobuf: a name of 100 folders": (
        lambda: proto(references=imports("/".join(["n" * 200] * 100))),
        None,
    ),
    **{
        f"protobuf: the name {name!r}": (partial(_importing, name), None)
        for name in ("../x", "/etc/x", "a/../x", "a//b", "./a", "a\0b", "\ud800", "", ".", "a\nb", "C:x")
    },
    "protobuf: 10,000 fields with options that only Java's client reads": (
        lambda: proto(" ".join(f"int32 f{n} = {n + 2} [(x) = {{}}];" for n in range(10_000))),
        None,
    ),
    "protobuf: brackets without an end": (lambda: proto("[" * 100_000), "protoc refuses"),
    "protobuf: entries of maps that are none": (
        lambda: proto("repeated E r = 2;", "message E { option map_entry = true; E e = 1; double v = 2; }"),
        "do not fit together",
    ),
    "protobuf: entries of maps without fields": (
        lambda: proto("repeated E r = 2;", "message E { option map_entry = true; }"),
        None,
    ),
    "protobuf: 20 files that refer to each other": (
        lambda: lattice(
            "PROTOBUF",
            20,
            lambda n: 'syntax = "proto3"; ' + "message R { int32 a = 1; }" * (n == 20),
        ),
        None,
    ),
    "protobuf: a text of half a character": (lambda: proto("// \ud800"), "surrogate"),
    "protobuf: 40 messages, each with the next one twice": (
        lambda: proto(
            "M0 r = 2;",
            " ".join(f"message M{n} {{ M{n + 1} a = 1; M{n + 1} b = 2; }}" for n in range(40))
            + "message M40 {}",
        ),
        None,
    ),
    "protobuf: 1,000 messages in each other by name": (
        lambda: proto(
            "M0 r = 2;",
            " ".join(f"message M{n} {{ M{n + 1} l = 1; }}" for n in range(1000)) + "message M1000 {}",
        ),
        None,
    ),
    "protobuf: 100 messages in each other": (
        lambda: proto(more="message A {" * 100 + "}" * 100),
        "protoc refuses",
    ),
    "protobuf: 100,000 fields": (
        lambda: proto(" ".join(f"int32 f{n} = {n + 20_000};" for n in range(100_000))),
        "protoc refuses",
    ),
    "protobuf: a serialized file with imports that break out of the text": (
        lambda: Schema("PROTOBUF", _serialized(['x"; message Q {} import "y'])),
        "leads to no message",
    ),
    "protobuf: a serialized file that is damaged": (lambda: Schema("PROTOBUF", "////"), None),
    "protobuf: types of Google with other contents": (
        lambda: proto(
            "google.protobuf.StringValue r = 2;",
            'import "google/protobuf/wrappers.proto";',
            (
                Reference(
                    "google/protobuf/wrappers.proto",
                    Schema("PROTOBUF", 'syntax = "proto3"; package google.protobuf; message StringValue {}'),
                ),
            ),
        ),
        None,
    ),
    **{
        f"json: {name}": (partial(_json_schema, made), None)
        for name, made in {
            "definitions that use the next one twice": lambda: ladder(40),
            "allOf that doubles": lambda: combined(40, "allOf"),
            "anyOf that doubles": lambda: combined(40, "anyOf"),
            "a circle of references": lambda: {"$ref": "#"},
            "500 objects in each other": lambda: json_nested(300),
            "100,000 properties": lambda: {
                "type": "object",
                "properties": {f"p{n}": {"type": "integer"} for n in range(100_000)},
            },
            "a pattern that backtracks for ever": lambda: {"type": "string", "pattern": "^(a+)+$"},
            "multipleOf zero": lambda: {"type": "number", "multipleOf": 0},
            "keywords of the wrong type": lambda: {"allOf": 5, "properties": [], "type": {"a": []}},
        }.items()
    },
    "json: 100,000 brackets": (lambda: Schema("JSON", "[" * 100_000), None),
}


def _serialized(dependencies: list[str]) -> str:
    import base64

    from google.protobuf import descriptor_pb2

    made = descriptor_pb2.FileDescriptorProto(name="x.proto", dependency=dependencies)
    return base64.b64encode(made.SerializeToString()).decode()


# -- strategies --------------------------------------------------------------------------------------

_TEXTS = st.one_of(
    st.sampled_from(
        ["", "R", "S", "a", "int", "null", "record", "enum", "fixed", "union", "../x", "a\0b", "\ud800"]
    ),
    st.text(max_size=8),
)
_SCALARS = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(),
    st.sampled_from([-1, 0, 1 << 31, 1 << 63, 1 << 64, 10**30, 1e30, float("inf")]),
    st.floats(),
    _TEXTS,
)
#: Any JSON value.
JSON_VALUES = st.recursive(
    _SCALARS,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(_TEXTS, inner, max_size=4),
    max_leaves=12,
)


@st.composite
def damaged(draw: st.DrawFn, found: Any) -> Any:
    """Replaces, removes, doubles or moves some parts of a JSON value."""
    found = copy.deepcopy(found)
    for _ in range(draw(st.integers(1, 3))):
        places: list[tuple[Any, Any]] = []
        waiting = [found]
        while waiting:
            each = waiting.pop()
            inside = (
                list(each.items())
                if isinstance(each, dict)
                else list(enumerate(each))
                if isinstance(each, list)
                else []
            )
            places += [(each, key) for key, _ in inside]
            waiting += [value for _, value in inside]
        if not places:
            return draw(JSON_VALUES)
        owner, key = draw(st.sampled_from(places))
        what = draw(st.sampled_from(["replace", "remove", "move", "rename"]))
        if what == "replace":
            owner[key] = draw(JSON_VALUES)
        elif what == "remove":
            del owner[key]
        elif what == "move":
            other, there = draw(st.sampled_from(places))
            if there in other if isinstance(other, dict) else there < len(other):
                owner[key] = copy.deepcopy(other[there])
        elif isinstance(owner, dict) and key in owner:
            owner[draw(_TEXTS)] = owner.pop(key)
    return found


_JSON_SCHEMAS = st.recursive(
    st.sampled_from(
        [
            {"type": "integer"},
            {"type": ["string", "null"], "format": "date"},
            {"enum": ["x", 1, None]},
            {"$ref": "#"},
            {"$ref": "#/definitions/d"},
            {"$ref": "other"},
            True,
        ]
    ),
    lambda inner: st.one_of(
        st.builds(
            lambda properties, more: {"type": "object", "properties": properties, **more},
            st.dictionaries(_TEXTS, inner, max_size=3),
            st.sampled_from([{}, {"required": ["a"]}, {"additionalProperties": False}]),
        ),
        inner.map(lambda each: {"type": "array", "items": each}),
        inner.map(lambda each: {"type": "object", "additionalProperties": each}),
        st.builds(
            lambda keyword, branches: {keyword: branches},
            st.sampled_from(["allOf", "anyOf", "oneOf"]),
            st.lists(inner, min_size=1, max_size=3),
        ),
        st.builds(
            lambda each, d: {**(each if isinstance(each, dict) else {}), "definitions": {"d": d}},
            inner,
            inner,
        ),
    ),
    max_leaves=8,
)
#: Pieces of .proto files, from which texts are put together that protoc accepts, and others.
_PROTO_PIECES = st.sampled_from(
    [
        "message R { int32 a = 1; }",
        "message R { optional S r = 2; message S { repeated int64 l = 1; } }",
        "message A { R r = 1; map<string, A> m = 2; oneof o { int32 x = 3; string y = 4; } }",
        "enum E { X = 0; Y = -1; }",
        "enum E { option allow_alias = true; X = 0; Y = 0; }",
        'import "a.proto";',
        'import public "b.proto";',
        'import "google/protobuf/timestamp.proto";',
        "package p;",
        "service S { rpc F (R) returns (R); }",
        "option java_package = 'x';",
        "message",
        "{",
        "}",
        "// \n",
        "/*",
        "\0",
        "reserved 1 to max;",
    ]
)


def _json_text(found: Any) -> str:
    return json.dumps(found)


@st.composite
def schemas(draw: st.DrawFn, kind: SchemaFormat, imports: int = 2) -> Schema:
    """A schema of a format: well-formed, damaged, or any text, with imports that may not fit."""
    if kind == "PROTOBUF":
        syntax = draw(st.sampled_from(['syntax = "proto3";', 'syntax = "proto2";', ""]))
        text = syntax + " ".join(draw(st.lists(_PROTO_PIECES, max_size=5)))
        text = draw(st.sampled_from([text, text, text, draw(st.text(max_size=30))]))
    else:
        well_formed = draw(avro_model.schemas() if kind == "AVRO" else _JSON_SCHEMAS)
        if kind == "AVRO" and draw(st.booleans()):
            well_formed = {**record("R", ("a", "int"), ("r", well_formed))}
        text = draw(
            st.one_of(
                st.just(well_formed).map(_json_text),
                damaged(well_formed).map(_json_text),
                JSON_VALUES.map(_json_text),
                st.text(max_size=20),
            )
        )
    references: list[Reference] = []
    if imports:
        for _ in range(draw(st.sampled_from([0, 0, 0, 1, 2]))):
            name = draw(
                st.sampled_from(["a.proto", "b.proto", "a", "other", "S", "a/b.proto", "../x", "n" * 300])
            )
            references.append(Reference(name, draw(schemas(kind, imports - 1))))
    return Schema(kind, text, tuple(references))


#: Payloads of records of such schemas.
PAYLOADS = st.lists(
    st.one_of(st.binary(max_size=30), JSON_VALUES.map(lambda each: json.dumps(each).encode())),
    min_size=1,
    max_size=5,
)
