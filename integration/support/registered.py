"""A query that decodes Avro and encodes with a schema registry, and the messages that it reads and writes."""

from __future__ import annotations

import io
import json
import struct
from collections.abc import Mapping
from typing import Any

import fastavro
from pyspark.sql import DataFrame
from pyspark.sql import functions as f

from kafka_eos_source import from_registry, to_registry, undecodable_record

#: Three schemas of one subject, each compatible with the ones before, and what the query writes.
FLIGHT = json.dumps(
    {
        "type": "record",
        "name": "Flight",
        "namespace": "test",
        "fields": [{"name": "carrier", "type": "string"}, {"name": "delay", "type": ["null", "int"]}],
    }
)
WITH_ORIGIN = FLIGHT.replace(
    '"fields": [', '"fields": [{"name": "origin", "type": "string", "default": "unknown"}, '
)
WITHOUT_DELAY = json.dumps(
    {
        "type": "record",
        "name": "Flight",
        "namespace": "test",
        "fields": [{"name": "carrier", "type": "string"}],
    }
)
DELAY = json.dumps(
    {
        "type": "record",
        "name": "Delay",
        "namespace": "test",
        "fields": [{"name": "carrier", "type": "string"}, {"name": "minutes", "type": "long"}],
    }
)
DELAY_PROTO = """syntax = "proto3";
package test;
message Unused { bool unused = 1; }
message Delay { string carrier = 1; int64 minutes = 2; }
"""


def avro(schema_id: int, text: str, record: Any) -> bytes:
    """Returns a framed message, written without the product."""
    body = io.BytesIO()
    fastavro.schemaless_writer(body, fastavro.parse_schema(json.loads(text)), record)
    return struct.pack(">bI", 0, schema_id) + body.getvalue()


def avro_record(text: str, message: bytes) -> tuple[int, Any]:
    """Returns schema id and record of a framed message, read without the product."""
    magic, schema_id = struct.unpack(">bI", message[:5])
    assert magic == 0
    body = io.BytesIO(message[5:])
    record = fastavro.schemaless_reader(body, fastavro.parse_schema(json.loads(text)), None)
    assert not body.read(), "bytes are left behind the record"
    return schema_id, record


def delay_proto(schema_id: int, carrier: str, minutes: int) -> bytes:
    """Returns a framed message of the type Delay, the second of its file, for fewer than 128 minutes."""
    path = b"\x02\x02"  # one index, 1, as zigzag varints
    body = (
        b"\x0a" + bytes([len(carrier)]) + carrier.encode() + (b"\x10" + bytes([minutes]) if minutes else b"")
    )
    return struct.pack(">bI", 0, schema_id) + path + body


def delays(frame: DataFrame, spec: Mapping[str, Any]) -> DataFrame:
    """Returns a frame of delays for the sink, with marks on records that are not flights.

    Args:
        frame: the source's.
        spec: ``registry``: URL or options; ``read``, ``write``: arguments of `registry_schema`.
    """
    flight = from_registry("value", spec["registry"], mode="permissive", **spec["read"])
    decoded = frame.withColumn("flight", flight)
    minutes = f.coalesce(f.col("flight.value.delay"), f.lit(0)).cast("long").alias("minutes")
    out = f.struct(f.col("flight.value.carrier").alias("carrier"), minutes)
    encoded = to_registry(out, spec["registry"], **spec["write"])
    value = f.when(f.col("flight.error").isNull(), encoded).otherwise(f.col("value"))
    return decoded.select("key", value.alias("value"), undecodable_record("flight"))


#: Types that other schemas refer to, and what is written with them, by format.
CITY = '{"type":"record","name":"City","namespace":"geo","fields":[{"name":"name","type":"string"}]}'
HOME = '{"type":"record","name":"Home","fields":[{"name":"city","type":"geo.City"}]}'
MONEY_JSON = '{"properties":{"cents":{"type":"integer"}},"definitions":{"c":{"type":"integer"}}}'
ORDER_JSON = '{"properties":{"price":{"$ref":"./money.json"},"c":{"$ref":"money.json#/$defs/c"}}}'
X_PROTO = 'syntax = "proto3"; package c; message X { int32 a = 1; }'
OUTER_PROTO = """syntax = "proto3";
import "common/x.proto";
message Outer {
  map<string, c.X> by = 1;
  message M { map<string, c.X> by = 1; }
}
"""


def of_other_clients(url: str, topic: str) -> list[tuple[bytes, Any]]:
    """Registers schemas with references, and returns records that Confluent's serializers make with them.

    Args:
        url: the registry.
        topic: prefix of the subjects.

    Returns:
        Each record with its value.
    """
    from confluent_kafka.schema_registry import Schema, SchemaReference, SchemaRegistryClient
    from confluent_kafka.schema_registry.protobuf import ProtobufSerializer
    from confluent_kafka.serialization import MessageField, SerializationContext
    from google.protobuf import descriptor_pb2, message_factory
    from google.protobuf.descriptor_pool import DescriptorPool

    from kafka_eos_source.registry import codec, protobuf_schema

    client = SchemaRegistryClient({"url": url})

    def register(name: str, text: str, kind: str, *references: SchemaReference) -> bytes:
        """Registers a schema, and returns the frame of its records."""
        number = client.register_schema(f"{topic}-{name}", Schema(text, kind, list(references)))
        return struct.pack(">bI", 0, number)

    register("city", CITY, "AVRO")
    frame = register("home", HOME, "AVRO", SchemaReference("not geo.City", f"{topic}-city", 1))
    body = io.BytesIO()
    names: dict[str, Any] = {}
    _, home = (fastavro.parse_schema(json.loads(text), named_schemas=names) for text in (CITY, HOME))
    fastavro.schemaless_writer(body, home, {"city": {"name": "x"}})
    found: list[tuple[bytes, Any]] = [(frame + body.getvalue(), {"city": {"name": "x"}})]

    register("money", MONEY_JSON, "JSON")
    frame = register("order", ORDER_JSON, "JSON", SchemaReference("money.json", f"{topic}-money", 1))
    order = {"price": {"cents": 3}, "c": 4}
    found.append((frame + json.dumps(order).encode(), order))

    pool = DescriptorPool()
    x = codec.Schema("PROTOBUF", X_PROTO)
    outer = codec.Schema("PROTOBUF", OUTER_PROTO, (codec.Reference("common/x.proto", x),))
    for name, each in (("common/x.proto", x), (f"{topic}.proto", outer)):
        file = descriptor_pb2.FileDescriptorProto()
        protobuf_schema.compile_schema(each).CopyToProto(file)
        file.name = name
        pool.Add(file)
    message = message_factory.GetMessageClass(pool.FindMessageTypeByName("Outer.M"))()
    message.by["k"].a = 5
    context = SerializationContext(f"{topic}-outer", MessageField.VALUE)
    sent = ProtobufSerializer(type(message), client, {"use.deprecated.format": False})(message, context)
    assert sent is not None
    found.append((sent, {"by": [("k", {"a": 5})]}))
    return found
