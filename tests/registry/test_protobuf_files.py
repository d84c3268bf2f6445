"""Protobuf schemas: text and references become descriptors, and messages are found by path and by name."""

from __future__ import annotations

import base64

import pytest
from google.protobuf import descriptor_pb2

from kafka_eos_source.errors import InvalidSchemaError
from kafka_eos_source.registry.codec import Reference, Schema
from kafka_eos_source.registry.protobuf import arrow_type, message_path
from kafka_eos_source.registry.protobuf_schema import compile_schema, message_at


def schema(text: str, *references: tuple[str, Schema]) -> Schema:
    return Schema("PROTOBUF", text, tuple(Reference(name, each) for name, each in references))


NESTED = schema("""
    syntax = "proto3";
    package p;
    message A { message B { message C {} } message D { map<string, int32> m = 1; message E {} } }
    message F {}""")


@pytest.mark.parametrize(
    ("name", "path"),
    [("p.A", (0,)), ("A", (0,)), ("p.A.B", (0, 0)), ("C", (0, 0, 0)), ("p.A.D.E", (0, 1, 0)), ("p.F", (1,))],
)
def test_path_of_a_message(name: str, path: tuple[int, ...]) -> None:
    assert message_path(NESTED, name) == path
    assert message_at(NESTED, path).full_name.split(".")[-1] == name.split(".")[-1]


def test_entries_of_maps_do_not_count_in_a_path() -> None:
    of = schema('syntax = "proto3"; message A { map<string, int32> m = 1; message B {} }')
    assert message_path(of, "B") == (0, 0)
    assert message_at(of, (0, 0)).name == "B"


def test_without_a_name_the_only_message_is_meant() -> None:
    assert message_path(schema('syntax = "proto3"; message A { message B {} }')) == (0,)
    with pytest.raises(InvalidSchemaError, match=r"2 messages at its top level: .*p\.A\.B"):
        message_path(NESTED)


@pytest.mark.parametrize("path", [(2,), (0, 2), (-1,), ()])
def test_a_path_that_leads_nowhere_is_refused(path: tuple[int, ...]) -> None:
    with pytest.raises(InvalidSchemaError, match="message path"):
        message_at(NESTED, path)


def test_an_ambiguous_name_is_refused() -> None:
    of = schema('syntax = "proto3"; message A { message X {} } message B { message X {} }')
    with pytest.raises(InvalidSchemaError, match=r"several messages named 'X'.*A\.X, B, B\.X"):
        message_path(of, "X")


def test_references_and_common_files_are_imported() -> None:
    units = schema('syntax = "proto3"; package u; message Unit { string name = 1; }')
    money = schema(
        'syntax = "proto3"; import "u/units.proto"; message Money { int64 cents = 1; u.Unit unit = 2; }',
        ("u/units.proto", units),
    )
    of = schema(
        """
        syntax = "proto3";
        import "money.proto";
        import "confluent/meta.proto";
        import "confluent/type/decimal.proto";
        import "google/type/date.proto";
        import "google/protobuf/any.proto";
        message M {
          Money price = 1 [(confluent.field_meta).doc = "the price"];
          confluent.type.Decimal exact = 2;
          google.type.Date day = 3;
          google.protobuf.Any any = 4;
        }""",
        ("money.proto", money),
    )
    found = arrow_type(of)
    assert str(found.field("price").type) == "struct<cents: int64, unit: struct<name: string>>"
    assert str(found.field("exact").type) == "struct<value: binary, precision: int64, scale: int32>"
    assert str(found.field("day").type) == "struct<year: int32, month: int32, day: int32>"
    assert str(found.field("any").type) == "struct<type_url: string, value: binary>"


def test_a_descriptor_that_a_client_stored_is_used() -> None:
    text = 'syntax = "proto3"; import "google/protobuf/any.proto"; message M { google.protobuf.Any a = 1; }'
    proto = descriptor_pb2.FileDescriptorProto()
    compile_schema(schema(text)).CopyToProto(proto)
    stored = schema(base64.b64encode(proto.SerializeToString()).decode())
    assert arrow_type(stored) == arrow_type(schema(text))


def test_a_text_that_protoc_refuses_is_explained() -> None:
    with pytest.raises(InvalidSchemaError, match=r'schema\.proto:1:\d+: .*"Missing" is not defined'):
        compile_schema(schema('syntax = "proto3"; message M { Missing m = 1; }'))


def test_a_schema_of_another_format_is_refused() -> None:
    with pytest.raises(InvalidSchemaError, match="format AVRO"):
        compile_schema(Schema("AVRO", '"int"'))
