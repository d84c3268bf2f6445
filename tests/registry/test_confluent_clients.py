"""Confluent's own serializers and deserializers name schemas as this package does: in front, in headers."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from typing import Any
from uuid import UUID

import pyarrow as pa
import pytest
from confluent_kafka.schema_registry import Schema as ClientSchema
from confluent_kafka.schema_registry import (
    SchemaRegistryClient,
    dual_schema_id_deserializer,
    header_schema_id_serializer,
    prefix_schema_id_serializer,
    topic_subject_name_strategy,
)
from confluent_kafka.schema_registry.avro import AvroDeserializer, AvroSerializer
from confluent_kafka.schema_registry.json_schema import JSONDeserializer, JSONSerializer
from confluent_kafka.schema_registry.protobuf import ProtobufDeserializer, ProtobufSerializer
from confluent_kafka.serialization import MessageField, SerializationContext
from google.protobuf import descriptor_pb2, descriptor_pool, message_factory

from kafka_eos_source.registry import catalog as catalogs
from kafka_eos_source.registry import records
from kafka_eos_source.registry.columns import RegistrySchema, registry_schema
from kafka_eos_source.registry.frames import KEY_HEADER, VALUE_HEADER, headers_naming
from kafka_eos_source.spark.arrow import HEADERS_ARROW
from tests.support import registry_server
from tests.support.registry_server import Server

AVRO = json.dumps(
    {
        "type": "record",
        "name": "Delay",
        "fields": [{"name": "carrier", "type": "string"}, {"name": "minutes", "type": "long"}],
    }
)
JSON = json.dumps(
    {
        "title": "Delay",
        "type": "object",
        "properties": {"carrier": {"type": "string"}, "minutes": {"type": "integer"}},
        "required": ["carrier", "minutes"],
    }
)
#: Two records. The first is long enough for confluent-kafka, which refuses values of up to 5 bytes.
ROWS = [{"carrier": "Atlantic", "minutes": 5}, {"carrier": "Ünited", "minutes": -(2**40)}]


def _delay() -> Any:
    """Returns the class of the second message of a file, so that its path is not [0]."""
    file = descriptor_pb2.FileDescriptorProto(name="delay.proto", syntax="proto3")
    file.message_type.add(name="Unused").field.add(name="x", number=1, type=8, label=1)
    delay = file.message_type.add(name="Delay")
    delay.field.add(name="carrier", number=1, type=9, label=1)
    delay.field.add(name="minutes", number=2, type=3, label=1)
    pool = descriptor_pool.DescriptorPool()
    pool.Add(file)
    return message_factory.GetMessageClass(pool.FindMessageTypeByName("Delay"))


DELAY = _delay()
BY_TOPIC = {"subject.name.strategy": topic_subject_name_strategy}
KINDS = pytest.mark.parametrize("kind", ["AVRO", "JSON", "PROTOBUF"])
FIELDS = pytest.mark.parametrize("field", [MessageField.VALUE, MessageField.KEY])
PLACES = pytest.mark.parametrize("place", [header_schema_id_serializer, prefix_schema_id_serializer])


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[Server]:
    monkeypatch.setattr(catalogs, "_KNOWN_AFTER_SECONDS", 0.2)
    monkeypatch.setattr(catalogs, "_catalogs", {})
    monkeypatch.setattr(records, "_decoders", {})
    with registry_server.running() as running:
        yield running


def serialized(server: Server, kind: str, field: str, place: Callable[..., Any]) -> tuple[pa.Array, pa.Array]:
    """Returns keys or values that Confluent's serializer made of `ROWS`, and the headers of their records."""
    client = SchemaRegistryClient({"url": server.url})
    conf = {**BY_TOPIC, "schema.id.serializer": place}
    write: Any
    if kind == "AVRO":
        write = AvroSerializer(client, AVRO, conf=conf)
    elif kind == "JSON":
        write = JSONSerializer(JSON, client, conf=conf)
    else:
        write = ProtobufSerializer(DELAY, client, conf)
    column: list[bytes] = []
    headers: list[list[dict[str, Any]]] = []
    for row in ROWS:
        own: list[tuple[str, bytes]] = [("trace", b"t")]
        context = SerializationContext("flights", field, own)
        column.append(write(DELAY(**row) if kind == "PROTOBUF" else row, context))
        headers.append([{"key": name, "value": value} for name, value in own])
    return pa.array(column), pa.array(headers, HEADERS_ARROW)


def chosen(server: Server, kind: str, field: str, **options: str) -> RegistrySchema:
    message = "Delay" if kind == "PROTOBUF" else None
    is_key = field == MessageField.KEY
    return registry_schema({"url": server.url, **options}, topic="flights", is_key=is_key, message=message)


@KINDS
@FIELDS
@PLACES
def test_what_confluents_serializers_write_is_read(
    server: Server, kind: str, field: str, place: Callable[..., Any]
) -> None:
    column, headers = serialized(server, kind, field, place)
    named = {name["key"] for each in headers.to_pylist() for name in each}
    own = KEY_HEADER if field == MessageField.KEY else VALUE_HEADER
    assert named == ({"trace", own} if place is header_schema_id_serializer else {"trace"})
    found = chosen(server, kind, field).decoding().decode(column, headers)
    assert not found.errors
    assert found.values.to_pylist() == ROWS


@KINDS
@FIELDS
@pytest.mark.parametrize("location", ["header", "payload"])
def test_what_is_written_confluents_deserializers_read(
    server: Server, kind: str, field: str, location: str
) -> None:
    """Behind a header of another schema, as a record has that passes through."""
    serialized(server, kind, field, prefix_schema_id_serializer)  # registers the schema
    encoding = chosen(server, kind, field, **{"schema.id.location": location}).encoding()
    column = encoding.encode(pa.array([*ROWS, None])).values
    name = KEY_HEADER if field == MessageField.KEY else VALUE_HEADER
    old = [[{"key": "a", "value": b"1"}, {"key": name, "value": b"\1" + bytes(16)}]] * 3
    headers = headers_naming(
        name,
        encoding.name if location == "header" else None,
        column.is_valid().to_numpy(zero_copy_only=False),
        pa.array(old, HEADERS_ARROW),
    )
    client = SchemaRegistryClient({"url": server.url})
    conf = {**BY_TOPIC, "schema.id.deserializer": dual_schema_id_deserializer}
    read: Any
    if kind == "AVRO":
        read = AvroDeserializer(client, conf=conf)
    elif kind == "JSON":
        read = JSONDeserializer(None, schema_registry_client=client, conf=conf)
    else:
        read = ProtobufDeserializer(DELAY, conf, client)
    found = []
    for message, own in zip(column.to_pylist(), headers.to_pylist(), strict=True):
        pairs = [(each["key"], each["value"]) for each in own]
        assert [key for key, _ in pairs].count(name) == (location == "header" and message is not None)
        found.append(read(message, SerializationContext("flights", field, pairs)))
    if kind == "PROTOBUF":
        found = [
            None if each is None else {"carrier": each.carrier, "minutes": each.minutes} for each in found
        ]
    assert found == [*ROWS, None]


def test_a_guid_is_asked_for_once_per_process(server: Server) -> None:
    column, headers = serialized(server, "AVRO", MessageField.VALUE, header_schema_id_serializer)
    newer = AVRO.replace("]}", ', {"name": "origin", "type": "string", "default": "?"}]}')
    client = SchemaRegistryClient({"url": server.url})
    client.register_schema("flights-value", ClientSchema(newer, "AVRO"))
    decoding = chosen(server, "AVRO", MessageField.VALUE).decoding()
    server.requests.clear()
    for _ in range(3):
        found = decoding.decode(column, headers).values.to_pylist()
        assert found == [{**each, "origin": "?"} for each in ROWS]
    assert [path for _, path, _ in server.requests] == [f"/schemas/guids/{server.guid(1)}"]


def test_the_guid_of_the_reader_schema_needs_no_registry_in_the_tasks(
    server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    column, headers = serialized(server, "AVRO", MessageField.VALUE, header_schema_id_serializer)
    decoding = chosen(server, "AVRO", MessageField.VALUE).decoding()
    monkeypatch.setattr(catalogs, "_catalogs", {})  # as in another process
    server.fault = (503, "{}")
    assert decoding.decode(column, headers).values.to_pylist() == ROWS


def test_a_schema_is_chosen_by_its_guid(server: Server) -> None:
    serialized(server, "AVRO", MessageField.VALUE, header_schema_id_serializer)
    guid: UUID = server.guid(1)
    by_guid = registry_schema({"url": server.url, "schema.id.location": "header"}, schema_id=guid)
    assert by_guid.encoding().name == b"\1" + guid.bytes
    by_id = registry_schema({"url": server.url, "schema.id.location": "header"}, schema_id=1)
    assert by_id.encoding().name == by_guid.encoding().name
