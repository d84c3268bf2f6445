"""Every schema that another client of a registry accepts is read here, too, and its records mean the same.

The bytes are those of confluent-kafka's serializers, of fastavro and of Google's library. The texts in
`OF_JAVA` were written by a registry in Java, from descriptors.
"""

from __future__ import annotations

import base64
import io
import itertools
import json
from collections.abc import Iterator
from decimal import Decimal
from pathlib import Path
from typing import Any

import fastavro
import pyarrow as pa
import pytest
from confluent_kafka.schema_registry import Schema as TheirSchema
from confluent_kafka.schema_registry import SchemaReference, SchemaRegistryClient
from confluent_kafka.schema_registry.avro import AvroSerializer
from confluent_kafka.schema_registry.json_schema import JSONSerializer
from confluent_kafka.schema_registry.protobuf import ProtobufSerializer
from confluent_kafka.serialization import MessageField, SerializationContext
from google.protobuf import descriptor_pb2, message_factory
from google.protobuf.descriptor_pool import DescriptorPool

from kafka_eos_source.errors import InvalidSchemaError
from kafka_eos_source.registry import catalog as catalogs
from kafka_eos_source.registry import codec, json_schema, protobuf, protobuf_schema, records
from kafka_eos_source.registry.codec import Reference, Schema
from kafka_eos_source.registry.protobuf_program import compile_tree
from kafka_eos_source.registry.protobuf_schema import compile_schema, message_at, path_of
from kafka_eos_source.registry.protobuf_text import essence, imported_files
from kafka_eos_source.registry.protobuf_tree import build_tree
from kafka_eos_source.registry.records import Decoding, frame_prefix
from tests.registry.avro_kit import decode, error, one, record
from tests.registry.avro_model import schema_of
from tests.support import registry_server
from tests.support.registry_server import Server


@pytest.fixture
def server() -> Iterator[Server]:
    with registry_server.running() as running:
        catalogs._catalogs.clear()
        records._decoders.clear()
        yield running


def values(server: Server, message: bytes | None, schema_id: int) -> Any:
    """Decodes a record that another client wrote, with the schema that its frame names."""
    assert message is not None
    assert message[:5] == frame_prefix(schema_id)
    writer = catalogs.catalog({"url": server.url}).of_id(schema_id)
    name = "M" if writer.format == "PROTOBUF" else None
    reader_type = codec.arrow_type(writer, name)
    decoding = Decoding({"url": server.url}, writer, name, reader_type)
    made = decoding.decode(pa.array([message], pa.binary()))
    assert not made.errors
    return made.values.to_pylist()[0]


def context(topic: str) -> SerializationContext:
    return SerializationContext(topic, MessageField.VALUE)


# -- Avro: references --------------------------------------------------------------------------------

CITY = {"namespace": "geo", **record({"name": "name", "type": "string"}, name="City")}
ROAD = {"namespace": "geo", **record({"name": "city", "type": "City"}, name="Road")}
HOME = record({"name": "road", "type": "geo.Road"}, {"name": "city", "type": "geo.City"}, name="Home")
VALUE = {"road": {"city": {"name": "a"}}, "city": {"name": "b"}}


def written(value: Any, *documents: Any) -> bytes:
    """Encodes a value with the last of some schemas, which may use the types of those before it."""
    names: dict[str, Any] = {}
    for each in documents:
        parsed = fastavro.parse_schema(json.loads(json.dumps(each)), named_schemas=names)
    out = io.BytesIO()
    fastavro.schemaless_writer(out, parsed, value)
    return out.getvalue()


@pytest.mark.parametrize("names", [("geo.City", "geo.Road"), ("city", "Road.avsc"), ("x", "x"), ("", "é/✓")])
def test_the_name_of_a_reference_does_not_matter(names: tuple[str, str]) -> None:
    city, home = (schema_of(each) for each in (CITY, HOME))
    road = schema_of(ROAD, Reference(names[0], city))
    payload = written(VALUE, CITY, ROAD, HOME)
    for references in (
        (Reference(names[1], road), Reference(names[0], city)),
        (Reference(names[0], city), Reference(names[1], road)),
        (Reference(names[1], road),),
    ):
        made = decode(Schema("AVRO", home.text, references), [payload])
        assert made.values.to_pylist() == [VALUE]


def test_references_need_no_order_and_may_define_several_types() -> None:
    road, city = (Reference(name, schema_of(each)) for name, each in (("r", ROAD), ("c", [CITY, "string"])))
    assert one_of(schema_of(HOME, road, city), written(VALUE, CITY, ROAD, HOME)) == VALUE
    both = Reference("both", schema_of([ROAD, {"type": "array", "items": ["null", CITY]}]))
    assert one_of(schema_of(HOME, both), written(VALUE, CITY, ROAD, HOME)) == VALUE
    event = Reference("event", schema_of(HOME, road, city))
    assert one_of(schema_of(["null", "Home", "geo.City"], event), b"\4\2x") == {
        "member0": None,
        "member1": {"name": "x"},
    }


def one_of(schema: Schema, payload: bytes) -> Any:
    made = decode(schema, [payload])
    assert not made.errors
    return made.values.to_pylist()[0]


def test_a_type_that_is_defined_twice_in_the_same_way_is_one_type() -> None:
    money = {"type": "enum", "name": "money.Currency", "symbols": ["EUR", "USD"]}
    less = record({"name": "currency", "type": money}, name="Less")
    more = record(
        {"name": "currency", "type": {**money, "doc": "of the second"}},
        {"name": "again", "type": "money.Currency"},
        name="More",
    )
    text = {"type": "string", "avro.java.string": "String"}
    last = [record({"name": "t", "type": each}, name="Last") for each in ("string", text)]
    references = [
        Reference(name, schema_of(each)) for name, each in zip("abcd", (less, more, *last), strict=True)
    ]
    schema = schema_of(["Less", "More", "Last"], *references)
    assert one_of(schema, b"\2\2\0")["member1"] == {"currency": "USD", "again": "EUR"}
    assert one_of(schema, b"\4\2x")["member2"] == {"t": "x"}
    twice = record({"name": "a", "type": record(name="X")}, {"name": "b", "type": record(name="X")})
    assert one_of(schema_of(twice), b"") == {"a": {}, "b": {}}


def test_a_type_that_is_defined_differently_is_an_error_that_names_both() -> None:
    other = {**CITY, "fields": [{"name": "name", "type": "bytes"}, {"name": "zip", "type": "int"}]}
    origin = "subject 'geo', version 2"
    references = [
        Reference("first.avsc", schema_of(CITY)),
        Reference("second.avsc", schema_of(other), origin),
    ]
    with pytest.raises(
        InvalidSchemaError,
        match=r"field city: type 'geo\.City' is defined in the schema that is referenced as 'first\.avsc' "
        r"and, differently \(fields 'name', 'zip'\), in the schema that is referenced as 'second\.avsc' "
        r"\(subject 'geo', version 2\).*register a new version",
    ):
        codec.arrow_type(schema_of(record({"name": "city", "type": "geo.City"}), *references), None)
    for one_type, another in (
        ({"type": "fixed", "name": "T", "size": 2}, {"type": "fixed", "name": "T", "size": 3}),
        ({"type": "enum", "name": "T", "symbols": ["A"]}, {"type": "enum", "name": "T", "symbols": ["B"]}),
        (record(name="T"), {"type": "enum", "name": "T", "symbols": []}),
        (
            record({"name": "a", "type": "int", "default": 1}, name="T"),
            record({"name": "a", "type": "int", "default": 2}, name="T"),
        ),
    ):
        pair = [Reference(name, schema_of(each)) for name, each in (("a", one_type), ("b", another))]
        with pytest.raises(InvalidSchemaError, match=r"'T' is defined in .* 'a' and, differently"):
            codec.arrow_type(schema_of("T", *pair), None)
        assert one_of(schema_of("int", *pair), b"\2") == 1, "what nothing uses does no harm"


def test_avro_records_of_confluents_serializer_with_references(server: Server) -> None:
    client = SchemaRegistryClient({"url": server.url})
    client.register_schema("cities", TheirSchema(json.dumps(CITY), "AVRO"))
    roads = TheirSchema(json.dumps(ROAD), "AVRO", [SchemaReference("geo.City", "cities", 1)])
    client.register_schema("roads", roads)
    both = [SchemaReference("geo.Road", "roads", 1), SchemaReference("geo.City", "cities", 1)]
    homes = client.register_schema("homes-value", TheirSchema(json.dumps(HOME), "AVRO", both))
    serializer = AvroSerializer(client, conf={"auto.register.schemas": False, "use.latest.version": True})
    message = serializer(VALUE, context("homes"))
    assert values(server, message, homes) == VALUE
    others = [{**each, "name": f"any {at}"} for at, each in enumerate(server.schemas[homes]["references"])]
    server.schemas[homes] = {**server.schemas[homes], "references": others}
    catalogs._catalogs.clear()
    assert values(server, message, homes) == VALUE, "whatever the references are called"


# -- Avro: what Java's parser accepts, if it does not check names and defaults -------------------------


XY: dict[str, Any] = {"x": {}, "y": {}}


@pytest.mark.parametrize(
    ("text", "payload", "expected"),
    [
        ('/* made by hand */ {"type": "string" // a name, or "//" none\n}', b"\2a", "a"),
        ('{"type": "enum", "name": "E", "symbols": ["A-1", "2"], "default": "gone"}', b"\2", "2"),
        ('["null"]', b"\0", None),
        (record({"name": "a-b", "type": "int"}, name="my-record"), b"\2", {"a-b": 1}),
        (record({"name": "ä", "type": "int", "default": "x"}, name="é"), b"\2", {"ä": 1}),
        (record({"name": "a", "type": "int"}, {"name": "A", "type": "int"}), b"\2\4", {"a": 1, "A": 2}),
        (
            record({"name": "x", "type": "X"}, {"name": "y", "type": record(name="X")}),
            b"",
            XY,
        ),
        (
            {
                **record(
                    {"name": "x", "type": {**record(name="X"), "namespace": None}},
                    {"name": "y", "type": "a.X"},
                ),
                "namespace": "a",
            },
            b"",
            XY,
        ),
        (
            {
                **record(
                    {"name": "x", "type": {**record(name="X"), "namespace": ""}}, {"name": "y", "type": "X"}
                ),
                "namespace": "a",
            },
            b"",
            XY,
        ),
        (
            record({"name": "a", "type": "int", "order": "none", "doc": 5, "logicalType": "date"}),
            b"\2",
            {"a": 1},
        ),
        ({"type": "bytes", "logicalType": "decimal", "precision": 2, "scale": 4}, b"\2\5", b"\5"),
        ({"type": "bytes", "logicalType": "decimal"}, b"\2\5", b"\5"),
        ({"type": "fixed", "name": "F", "size": 2, "logicalType": "uuid"}, b"ab", b"ab"),
        ({"type": "long", "logicalType": "acme-time"}, b"\2", 1),
        ({"type": "error", "name": "Problem", "fields": []}, b"", {}),
    ],
)
def test_avro_schemas_that_no_registry_checks(text: Any, payload: bytes, expected: Any) -> None:
    schema = Schema("AVRO", text if isinstance(text, str) else json.dumps(text, ensure_ascii=False))
    assert one_of(schema, payload) == expected


@pytest.mark.parametrize(
    ("kind", "default", "expected"),
    [
        ("string", None, None),  # as in Confluent's Python client
        ({"type": "array", "items": "int"}, None, None),
        (["string", "int"], None, None),
        ("int", 3.0, 3),
        ("double", 3, 3.0),
        ("float", "Infinity", float("inf")),
        ("double", "-1.5e3", -1500.0),
        ("bytes", "\u00ff\u0000", b"\xff\0"),
        (["null", "int"], 5, 5),
        ({"type": "enum", "name": "E", "symbols": ["A"], "default": "gone"}, "A", "A"),
    ],
)
def test_defaults_that_no_registry_checks(kind: Any, default: Any, expected: Any) -> None:
    found = one(record(), b"", record({"name": "a", "type": kind, "default": default}))["a"]
    assert (found["member0"] if isinstance(found, dict) else found) == expected


def test_a_default_of_another_type_is_refused_only_where_it_is_needed() -> None:
    reader = record({"name": "a", "type": "int", "default": "x"})
    assert one(reader, b"\2", reader) == {"a": 1}
    with pytest.raises(InvalidSchemaError, match="field a has default 'x', which is not of type int"):
        one(record(), b"", reader)


def test_a_decimal_of_more_digits_behind_the_point_reads_one_of_fewer() -> None:
    def decimal(precision: int, scale: int) -> dict[str, Any]:
        return {"type": "bytes", "logicalType": "decimal", "precision": precision, "scale": scale}

    for value in ("12345.67", "-0.01", "0.00"):
        payload = written(Decimal(value), decimal(10, 2))
        assert f"{one(decimal(10, 2), payload, decimal(12, 4)):f}" == f"{value}00"
        assert f"{one(decimal(10, 2), payload, decimal(38, 30)):f}" == value + "0" * 28
    assert "more digits than its precision" in error(
        decimal(10, 2), written(Decimal(123), decimal(10, 2)), decimal(5, 3)
    )
    with pytest.raises(
        InvalidSchemaError, match=r"decimal\(12, 4\)\), the reader's is bytes \(decimal\(12, 2\)"
    ):
        one(decimal(12, 4), b"\2\5", decimal(12, 2))


# -- Protobuf: texts and descriptors -----------------------------------------------------------------

OF_JAVA = Path(__file__).with_name("of_java")
SHOP = 'syntax = "proto3"; package c; message X { int32 a = 1; }'


def proto(text: str, *references: tuple[str, Schema]) -> Schema:
    return Schema("PROTOBUF", text, tuple(Reference(name, each) for name, each in references))


def stored(text: str, name: str, *references: tuple[str, Schema]) -> Schema:
    """Returns a schema as clients register it that have descriptors: in base64."""
    found = descriptor_pb2.FileDescriptorProto()
    compile_schema(proto(text, *references)).CopyToProto(found)
    found.name = name
    return proto(base64.b64encode(found.SerializeToString()).decode(), *references)


def read(schema: Schema, payload: bytes, path: tuple[int, ...] = (0,)) -> Any:
    made = protobuf.decoder(schema, path).decode(pa.array([payload], pa.binary()), 0)
    assert not made.errors
    return made.values.to_pylist()[0]


X = proto(SHOP)
#: A message with a field 1 that is a `c.X` of 5.
FIVE = b"\x0a\x02\x08\x05"


@pytest.mark.parametrize(
    "name",
    ["common/x.proto", "./common/x.proto", "../x.proto", "/x.proto", "C:\\x.proto", "a//b", "n" * 300, " "],
)
@pytest.mark.parametrize("is_stored", [False, True])
def test_files_are_imported_under_any_path(name: str, is_stored: bool) -> None:
    imported = stored(SHOP, "x.proto") if is_stored else X
    written_path = name.replace("\\", "\\\\")
    of = proto(f'syntax = "proto3"; import "{written_path}"; message M {{ c.X x = 1; }}', (name, imported))
    assert read(of, FIVE) == {"x": {"a": 5}}


def test_a_descriptor_may_import_descriptors_and_texts_under_any_path() -> None:
    made = descriptor_pb2.FileDescriptorProto(name="m.proto", syntax="proto3")
    made.dependency.extend(["../x.proto", "not/registered.proto", "google/protobuf/any.proto"])
    made.public_dependency.extend([0, 1])
    message = made.message_type.add(name="M")
    message.field.add(name="x", number=1, type=11, label=1, type_name=".c.X")
    message.field.add(name="y", number=2, type=11, label=1, type_name=".google.protobuf.Any")
    text = base64.b64encode(made.SerializeToString()).decode()
    for imported in (X, stored(SHOP, "x.proto")):
        assert read(proto(text, ("../x.proto", imported)), FIVE) == {"x": {"a": 5}, "y": None}


def test_one_file_may_be_imported_under_several_paths() -> None:
    y = proto('syntax = "proto3"; import "common/x.proto"; message Y { c.X x = 1; }', ("common/x.proto", X))
    of = proto(
        'syntax = "proto3"; import "x.proto"; import "y.proto"; message M { c.X x = 1; Y y = 2; }',
        ("x.proto", X),
        ("y.proto", y),
    )
    assert read(of, FIVE + b"\x12\x04\x0a\x02\x08\x07") == {"x": {"a": 5}, "y": {"x": {"a": 7}}}


def test_the_first_of_two_versions_of_a_file_counts() -> None:
    one_version, another = (proto(f'syntax = "proto3"; message X {{ int32 {name} = 1; }}') for name in "ab")
    y = proto('syntax = "proto3"; import "x.proto"; message Y { X x = 1; }', ("x.proto", another))
    of = proto(
        'syntax = "proto3"; import "x.proto"; import "y.proto"; message M { X x = 1; Y y = 2; }',
        ("x.proto", one_version),
        ("y.proto", y),
    )
    assert read(of, FIVE) == {"x": {"a": 5}, "y": None}


UNREGISTERED = """
syntax = "proto3";
import "buf/validate/validate.proto";  // "; { [
import public 'google/api/http.proto';
option (acme.owner) = { name: "a; } b" tags: ["x", "y"] };
message M {
  option (buf.validate.message).cel = { id: "x", expression: "this.a[0] < {1}" };
  int32 foo_bar = 1 [(buf.validate.field).int32 = { gt: 0, in: [1, 2] }, deprecated = true];
  int32 fooBar = 2 [json_name = "x", (acme.tag) = "a, b"];
  repeated int32 packed = 3 [packed = false, (acme.tag) = "]"];
  /* } */ oneof o { option (acme.required) = true; string s = 4; E e = 5; }
  enum E { reserved 5 to 4; NONE = 0 [(acme.name) = "none"]; ONE = 1; }
}
service S {
  rpc Get (acme.Request) returns (stream M) { option (google.api.http) = { get: "/v1/{x}" body: "*" }; }
}
"""


def test_options_and_imports_that_nobody_registered_are_skipped() -> None:
    found = read(proto(UNREGISTERED), b"\x08\x05\x10\x06\x18\x07\x18\x08\x28\x01")
    assert found == {"foo_bar": 5, "fooBar": 6, "packed": [7, 8], "s": None, "e": "ONE"}
    with pytest.raises(
        InvalidSchemaError, match=r'(?s)gone\.proto: File not found.*"gone\.T" is not defined'
    ):
        compile_schema(proto('syntax = "proto3"; import "gone.proto"; message M { gone.T t = 1; }'))


def test_options_that_decide_how_values_are_encoded_are_kept() -> None:
    old = """
    import "gone.proto";
    message M {
      optional float f = 1 [default = -1.5e-3, (gone.x) = 1];
      optional string s = 2 [(gone.x) = 2, default = 'a//b{;]'];
      optional group G = 3 { optional int32 x = 1 [(gone.x) = 3]; }
      extensions 100 to max [declaration = { number: 100, full_name: ".x" }];
    }"""
    found = read(proto(old), b"\x1b\x08\x05\x1c")
    assert found == {"f": pytest.approx(-0.0015), "s": "a//b{;]", "g": {"x": 5}}
    new = """
    edition = "2023";
    import "gone.proto";
    option features.field_presence = IMPLICIT;
    option features.(gone.x).y = Z;
    message M {
      N n = 1 [features.message_encoding = DELIMITED, (gone.x) = 3];
      int32 i = 2;
      message N { int32 x = 1; }
    }
    """
    assert read(proto(new), b"\x0b\x08\x05\x0c") == {"n": {"x": 5}, "i": 0}


OLD = """
syntax = "proto2";
package old;
message M {
  required int32 a = 1 [default = -5];
  optional string s = 2 [default = "a\\"b\\n{;]"];
  optional bytes b = 3 [default = '\\001\\377'];
  optional E e = 4 [default = Y];
  optional double d = 5 [default = -1.5e-3, deprecated = true];
  optional float f = 6 [default = inf];
  repeated int32 p = 7 [packed = true];
  repeated int32 q = 8 [packed = false];
  optional group G = 9 { option deprecated = true; optional int32 x = 1; }
  reserved 20 to 30; reserved "gone";
  extensions 100 to 199, 1000 to max;
  enum E { option allow_alias = true; X = 0; Y = 2; Z = 2 [deprecated = true]; }
  map<string, E> me = 10;
  oneof o { int32 o1 = 11; string o2 = 12; }
}
extend M { optional int32 ext = 100; }
"""


@pytest.mark.parametrize("text", [OLD, (OF_JAVA / "shop.proto").read_text()])
def test_what_is_left_out_of_a_file_does_not_matter(text: str) -> None:
    paths = {path: path for path in imported_files(text)}
    whole, part = (
        compile_tree(build_tree(message_at(proto(each), (0,)))) for each in (text, essence(text, paths))
    )
    for name in ("fields", "messages", "frames", "members", "dense", "known", "constants"):
        assert getattr(whole, name).tolist() == getattr(part, name).tolist()
    assert part.slots[0].field.descriptor.GetOptions().ListFields() == []


def test_the_members_of_a_oneof_may_stand_apart_in_a_descriptor() -> None:
    found = descriptor_pb2.FileDescriptorProto()
    text = 'syntax = "proto3"; message M { oneof o { int32 a = 1; int32 b = 2; } int32 c = 3; }'
    compile_schema(proto(text)).CopyToProto(found)
    fields = found.message_type[0].field
    fields.sort(key=lambda field: {"a": 0, "c": 1, "b": 2}[field.name])
    stored_apart = proto(base64.b64encode(found.SerializeToString()).decode())
    assert read(stored_apart, b"\x10\x05\x18\x06") == {"a": None, "b": 5, "c": 6}


def test_a_file_that_only_imports_another_one_has_its_messages() -> None:
    of = proto('syntax = "proto3"; import public "x.proto";', ("x.proto", X))
    assert read(of, b"\x08\x05") == {"a": 5}
    assert protobuf.message_path(of, "c.X") == (0,)


def test_files_that_every_client_knows_need_no_reference() -> None:
    of = proto(
        'syntax = "proto3"; import "confluent/type/variant.proto"; import "google/type/money.proto";'
        "message M { confluent.type.Variant v = 1; google.type.Money m = 2; }"
    )
    assert read(of, b"\x0a\x03\x0a\x01x") == {"v": {"metadata": b"x", "value": b""}, "m": None}
    timestamp = "message Timestamp { int64 seconds = 1; int32 nanos = 2; }"
    given = proto(f'syntax = "proto3"; package google.protobuf; {timestamp}')
    path = "google/protobuf/timestamp.proto"
    message = "message M { google.protobuf.Timestamp t = 1; }"
    of = proto(f'syntax = "proto3"; import "{path}"; {message}', (path, given))
    assert str(protobuf.arrow_type(of)) == "struct<t: timestamp[us, tz=UTC]>"


def test_bytes_are_read_as_a_string_if_they_are_one() -> None:
    of, reader = (proto(f'syntax = "proto3"; message M {{ {kind} a = 1; }}') for kind in ("bytes", "string"))
    made = protobuf.decoder(of, (0,), reader=reader).decode(pa.array([b"\x0a\x01x", b"\x0a\x01\xff"]), 0)
    assert made.values.to_pylist() == [{"a": "x"}, None]
    assert made.errors == {1: "message M: field a: the string is not UTF-8"}


RANGES = {
    **dict.fromkeys(("int32", "sint32", "sfixed32", "E"), (-(1 << 31), (1 << 31) - 1)),
    **dict.fromkeys(("int64", "sint64", "sfixed64"), (-(1 << 63), (1 << 63) - 1)),
    **dict.fromkeys(("uint32", "fixed32"), (0, (1 << 32) - 1)),
    **dict.fromkeys(("uint64", "fixed64"), (0, (1 << 64) - 1)),
    "bool": (0, 1),
}
EDGES = sorted({edge + step for pair in RANGES.values() for edge in pair for step in (-1, 0, 1)} | {5})
VARINTS = ("int32", "int64", "uint32", "uint64", "bool", "E")
PAIRS = [
    pair
    for family in (VARINTS, ("sint32", "sint64"), ("fixed32", "sfixed32"), ("fixed64", "sfixed64"))
    for pair in itertools.permutations(family, 2)
]


def number_schema(kind: str) -> Schema:
    fields = f"{kind} a = 1; repeated {kind} r = 2;"
    return proto(f'syntax = "proto3"; enum E {{ ZERO = 0; }} message M {{ {fields} }}')


@pytest.mark.parametrize(("written_kind", "read_kind"), PAIRS)
def test_a_number_is_read_as_one_of_another_type_if_it_has_that_value(
    written_kind: str, read_kind: str
) -> None:
    """Registries let the types of one encoding replace each other, and clients cut off what does not fit."""
    writer, reader = number_schema(written_kind), number_schema(read_kind)
    if (written_kind, read_kind) in (("uint64", "int32"), ("uint64", "E")):
        with pytest.raises(InvalidSchemaError, match="without loss"):
            protobuf.decoder(writer, (0,), reader=reader)
        return
    (least, most), (low, high) = RANGES[written_kind], RANGES[read_kind]
    numbers = [each for each in EDGES if least <= each <= most]
    make = message_factory.GetMessageClass(message_at(writer, (0,)))
    payloads = [make(a=each).SerializeToString() for each in numbers]
    payloads += [make(r=[0, each]).SerializeToString() for each in numbers]
    made = protobuf.decoder(writer, (0,), reader=reader).decode(pa.array(payloads, pa.binary()), 0)
    rows = made.values.to_pylist()
    for row, number in enumerate(numbers * 2):
        name = "a" if row < len(numbers) else "r"
        if low <= number <= high:
            expected = ("ZERO" if number == 0 else str(number)) if read_kind == "E" else number
            assert (rows[row]["a"] if name == "a" else rows[row]["r"][1]) == expected
        else:
            text = f"field {name}: the number does not fit into the type of the reader's schema"
            assert made.errors.get(row) == f"message M: {text}", number


# -- Protobuf: the entries of maps -------------------------------------------------------------------

#: What `of_java/shop.proto` was made of.
ORDER = (OF_JAVA / "shop.proto").read_text()


@pytest.mark.parametrize("kind", ["text", "descriptor", "text of a descriptor"])
def test_entries_of_maps_may_be_written_as_messages(kind: str) -> None:
    """A registry in Java writes them so into the text that it makes of the descriptor of another client.

    Then, and in descriptors, they count in the path of a message.
    """
    text = proto(ORDER)
    made = message_factory.GetMessageClass(message_at(text, (0,)))
    order = made(id="o", m={3: 1})
    order.items["k"].sku = "s"
    order.items["k"].after.x = 7
    of = {
        "text": text,
        "descriptor": stored(ORDER, "shop.proto"),
        "text of a descriptor": proto((OF_JAVA / "shop.java.proto").read_text()),
    }[kind]
    found = read(of, order.SerializeToString())
    assert found["items"] == [("k", {"sku": "s", "deep": None, "attrs": [], "after": {"x": 7}})]
    assert found["m"] == [(3, "OLD")]
    paths = {"Order": (0,), "Item": (0, 0), "Item.After": (0, 0, 1)}
    counted = {"Order": (0,), "Item": (0, 2), "Item.After": (0, 2, 2)}
    for name, path in (paths if kind == "text" else counted).items():
        full = f"shop.v1.Order.{name}".replace("Order.Order", "Order")
        assert path_of(of, protobuf_schema.find_message(of, full)) == path
        assert message_at(of, path).full_name == full


def test_the_path_of_a_client_that_counts_entries_is_understood() -> None:
    """Confluent's Python client counts them also if the schema is a text, and its Java client does not."""
    of = proto(
        'syntax = "proto3"; message A { map<int32, int32> m = 1; message M { int32 x = 1; } message B {} }'
    )
    reader = proto('syntax = "proto3"; message M { int32 x = 1; }')
    assert read(of, b"\x08\x05", (0, 0)) == {"x": 5}
    for path in ((0, 0), (0, 1)):
        made = protobuf.decoder(of, path, reader=reader).decode(pa.array([b"\x08\x05"]), 0)
        assert made.values.to_pylist() == [{"x": 5}]
    assert message_at(of, (0, 2)).name == "B"
    with pytest.raises(InvalidSchemaError, match="leads to no message"):
        message_at(of, (0, 3))


def test_groups_do_not_count_in_the_path_of_a_text() -> None:
    of = proto("message A { optional group G = 1 { optional int32 x = 1; } message B {} }")
    assert path_of(of, protobuf_schema.find_message(of, "B")) == (0, 0)
    assert message_at(of, (0, 1)).name == "B"


def test_protobuf_records_of_confluents_serializer(server: Server) -> None:
    """It registers descriptors in base64, also those of imports, and counts the entries of maps."""
    pool = DescriptorPool()
    outer = """
    syntax = "proto3";
    import "common/x.proto";
    message Outer { map<string, c.X> by = 1; message M { map<string, c.X> by = 1; } M m = 2; }
    """
    for name, text, references in (
        ("common/x.proto", SHOP, ()),
        ("m.proto", outer, (("common/x.proto", X),)),
    ):
        found = descriptor_pb2.FileDescriptorProto()
        compile_schema(proto(text, *references)).CopyToProto(found)
        found.name = name
        pool.Add(found)
    kind = message_factory.GetMessageClass(pool.FindMessageTypeByName("Outer.M"))
    message = kind()
    message.by["k"].a = 5
    client = SchemaRegistryClient({"url": server.url})
    sent = ProtobufSerializer(kind, client, {"use.deprecated.format": False})(message, context("t"))
    assert sent is not None
    schema_id = int.from_bytes(sent[1:5], "big")
    assert [each["name"] for each in server.schemas[schema_id]["references"]] == ["common/x.proto"]
    assert values(server, sent, schema_id) == {"by": [("k", {"a": 5})]}


# -- JSON Schema -------------------------------------------------------------------------------------

MONEY = {
    "type": "object",
    "properties": {"cents": {"type": "integer"}},
    "definitions": {"c": {"type": "integer"}},
}


def described(found: Any, *references: tuple[str, Any]) -> Schema:
    return Schema("JSON", json.dumps(found), tuple(Reference(name, each) for name, each in references))


def having(**properties: Any) -> dict[str, Any]:
    return {"type": "object", "properties": properties}


MONEY = {**having(cents={"type": "integer"}), "definitions": {"c": {"type": "integer"}}}


def json_value(schema: Schema, document: bytes) -> Any:
    made = json_schema.decoder(schema).decode(pa.array([document]), 0)
    assert not made.errors
    return made.values.to_pylist()[0]


@pytest.mark.parametrize(
    "outer", [{}, {"$id": "https://acme.com/a/order.json"}, {"$id": "order.json"}, {"$id": "urn:o"}]
)
@pytest.mark.parametrize(
    ("reference", "own"),
    [
        ("money.json", {}),
        ("./money.json", {}),
        ("money.json", {"$id": "https://other.org/m"}),
        ("https://other.org/m", {"$id": "https://other.org/m"}),
        ("urn:money", {"$id": "urn:money"}),
    ],
)
@pytest.mark.parametrize("pointer", ["#/definitions/c", "#/$defs/c"])
def test_json_schemas_are_referenced_by_name_path_and_id(
    outer: Any, reference: str, own: Any, pointer: str
) -> None:
    of = described(
        {**outer, **having(a={"$ref": reference}, b={"$ref": f"{reference}{pointer}"})},
        ("money.json", described({**own, **MONEY})),
    )
    assert json_value(of, b'{"a": {"cents": 1}, "b": 2}') == {"a": {"cents": 1}, "b": 2}


def test_a_reference_may_refer_to_its_own_ones() -> None:
    item = described(having(price={"$ref": "money.json"}), ("money.json", described(MONEY)))
    of = described({"$id": "https://acme.com/o", **having(item={"$ref": "item.json"})}, ("item.json", item))
    assert json_value(of, b'{"item": {"price": {"cents": 1}}}') == {"item": {"price": {"cents": 1}}}


@pytest.mark.parametrize(
    ("found", "document", "expected"),
    [
        (
            {
                "$schema": "http://json-schema.org/draft/2020-12/schema",
                "$defs": {"i": {"$anchor": "i", "type": "integer"}},
                **having(a={"$ref": "#i"}),
            },
            b'{"a": 1}',
            {"a": 1},
        ),
        (
            {
                "$schema": "https://json-schema.org/draft/2019-09/schema",
                "$defs": {"b": having(a={"type": "integer"})},
                "$ref": "#/$defs/b",
                "properties": {"c": {"type": "string"}},
            },
            b'{"a": 1, "c": "x"}',
            {"a": 1, "c": "x"},
        ),
        (
            {
                "definitions": {"b": having(a={"type": "integer"})},
                "$ref": "#/definitions/b",
                "properties": {"ignored in draft 7": {}},
            },
            b'{"a": 1}',
            {"a": 1},
        ),
        (having(a={"$dynamicRef": "#node"}), b'{"a": [1]}', {"a": "[1]"}),
        (having(a={"$recursiveRef": "#"}), b'{"a": {"a": 1.50}}', {"a": '{"a":1.50}'}),
        (having(a={"$ref": "http://json-schema.org/draft-07/schema#"}), b'{"a": {}}', {"a": "{}"}),
        (having(a={"oneOf": [{"const": None}, {"type": "integer"}]}), b'{"a": 1}', {"a": 1}),
        (having(a={"type": "any"}), b'{"a": "x"}', {"a": '"x"'}),
        (having(a={"type": "integer", "connect.type": "int8", "connect.index": 0}), b'{"a": 1.0}', {"a": 1}),
        (
            having(**{"$id": {"type": "string"}, "$ref": {"type": "string"}}),
            b'{"$id": "x"}',
            {"$id": "x", "$ref": None},
        ),
        (having(a={"type": "integer"}), b'\xef\xbb\xbf{"a": 1}', {"a": 1}),
        (having(a={"type": "integer", "required": True}), b"{}", {"a": None}),
    ],
)
def test_json_schemas_that_other_clients_accept(found: Any, document: bytes, expected: Any) -> None:
    assert json_value(described(found), document) == expected


def test_json_documents_of_confluents_serializer_with_references(server: Server) -> None:
    client = SchemaRegistryClient({"url": server.url})
    client.register_schema("money", TheirSchema(json.dumps(MONEY), "JSON"))
    text = json.dumps({"title": "order", **having(price={"$ref": "money.json"})})
    order = TheirSchema(text, "JSON", [SchemaReference("money.json", "money", 1)])
    schema_id = client.register_schema("orders-value", order)
    serializer = JSONSerializer(
        order, client, conf={"auto.register.schemas": False, "use.latest.version": True}
    )
    message = serializer({"price": {"cents": 3}}, context("orders"))
    assert values(server, message, schema_id) == {"price": {"cents": 3}}
