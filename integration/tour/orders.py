"""The records of the tour: orders in Avro, and the invoices in Protobuf that the query makes of them.

Confluent's serializers write and read these records. They share no code with the product.
"""

from __future__ import annotations

import datetime as dt
import json
from collections.abc import Iterable
from decimal import Decimal
from typing import Any, NamedTuple

from confluent_kafka.schema_registry import Schema, SchemaRegistryClient
from confluent_kafka.schema_registry.avro import AvroSerializer
from confluent_kafka.serialization import MessageField, SerializationContext
from google.protobuf import descriptor_pb2, descriptor_pool, message_factory

#: The schema of orders. `VIP_ORDER` is its next version, which the tour registers too late.
ORDER = {
    "type": "record",
    "name": "Order",
    "namespace": "shop",
    "fields": [
        {"name": "number", "type": "long"},
        {"name": "customer", "type": "string"},
        {
            "name": "amount",
            "type": {"type": "bytes", "logicalType": "decimal", "precision": 10, "scale": 2},
        },
        {"name": "placed", "type": {"type": "long", "logicalType": "timestamp-millis"}},
        {"name": "note", "type": ["null", "string"], "default": None},
    ],
}
VIP_ORDER = {**ORDER, "fields": [*ORDER["fields"], {"name": "vip", "type": "boolean", "default": False}]}
INVOICE = """syntax = "proto3";
package shop;

message Invoice {
  int64 number = 1;
  string customer = 2;
  int64 cents = 3;
  string note = 4;
}
"""
_DAY = dt.datetime(2026, 1, 1, tzinfo=dt.timezone.utc)
_CUSTOMERS = ("Ada", "Bo", "Chloé", "Dīwān", "Émile")


class Invoice(NamedTuple):
    """What an order must become."""

    number: int
    customer: str
    cents: int
    note: str


def order(number: int) -> dict[str, Any]:
    """Returns the order with a number."""
    return {
        "number": number,
        "customer": _CUSTOMERS[number % len(_CUSTOMERS)],
        "amount": Decimal(number * 37 % 100_000) / 100,
        "placed": _DAY + dt.timedelta(seconds=number),
        "note": f"note {number}" if number % 3 == 0 else None,
    }


def invoice(number: int) -> Invoice:
    """Returns the invoice that the query must make of the order with a number."""
    made = order(number)
    return Invoice(number, made["customer"], int(made["amount"] * 100), made["note"] or "")


def client(url: str) -> SchemaRegistryClient:
    """Returns Confluent's client of the registry."""
    return SchemaRegistryClient({"url": url})


def register(url: str, subject: str, schema: Any, kind: str = "AVRO") -> int:
    """Registers a schema, and returns its id."""
    text = schema if isinstance(schema, str) else json.dumps(schema)
    return int(client(url).register_schema(subject, Schema(text, kind)))


def encoded(url: str, topic: str, numbers: Iterable[int]) -> list[bytes]:
    """Returns orders as Confluent's AvroSerializer writes them."""
    serializer = AvroSerializer(client(url), json.dumps(ORDER), conf={"auto.register.schemas": False})
    context = SerializationContext(topic, MessageField.VALUE)
    return [serializer(order(number), context) for number in numbers]


def reframed(value: bytes, schema_id: int, payload: bytes = b"") -> bytes:
    """Returns a record with another schema id, and more payload."""
    return value[:1] + schema_id.to_bytes(4, "big") + value[5:] + payload


def decoded(value: bytes) -> Invoice:
    """Returns the invoice of a record: a frame of six bytes, and a Protobuf message."""
    assert value[0] == 0, value
    assert value[5] == 0, f"not the first message of its file: {value!r}"
    found = _message().FromString(value[6:])
    return Invoice(found.number, found.customer, found.cents, found.note)


def _message() -> Any:
    """Returns the class of `INVOICE`, from a descriptor that is written by hand."""
    file = descriptor_pb2.FileDescriptorProto(name="invoice.proto", package="shop", syntax="proto3")
    message = file.message_type.add(name="Invoice")
    types = descriptor_pb2.FieldDescriptorProto
    fields = [
        ("number", types.TYPE_INT64),
        ("customer", types.TYPE_STRING),
        ("cents", types.TYPE_INT64),
        ("note", types.TYPE_STRING),
    ]
    for number, (name, kind) in enumerate(fields, 1):
        message.field.add(name=name, number=number, type=kind, label=types.LABEL_OPTIONAL)
    pool = descriptor_pool.DescriptorPool()
    pool.Add(file)
    return message_factory.GetMessageClass(pool.FindMessageTypeByName("shop.Invoice"))
