"""``python -m benchmarks.registry_formats``: compares codecs of Protobuf and JSON, each in turn.

The contenders are this package's codecs, which fill columns, and the deserializers of confluent-kafka, row by
row, without the cost of a registry or of making columns. The program prints medians of microseconds per row.
On a busy machine, CPU time is more reliable than wall time.
"""

from __future__ import annotations

import json
import statistics
import time
from collections.abc import Callable
from typing import Any

import click
import pyarrow as pa

from kafka_eos_source.registry import json_schema, protobuf
from kafka_eos_source.registry.codec import Schema
from kafka_eos_source.registry.protobuf_schema import message_at

FRAME = b"\0\0\0\0\1"
FRAME_PROTOBUF = FRAME + b"\0"  # the path of the first message in the file is one byte

ORDER_PROTO = """
syntax = "proto3";
package bench;
import "google/protobuf/timestamp.proto";
message Order {
  enum State { NEW = 0; PAID = 1; SENT = 2; }
  message Item { string sku = 1; int32 count = 2; double price = 3; }
  int64 id = 1;
  string customer = 2;
  State state = 3;
  google.protobuf.Timestamp at = 4;
  repeated Item items = 5;
  map<string, string> labels = 6;
  optional string note = 7;
  repeated int32 scores = 8;
  bool gift = 9;
  double total = 10;
}
"""

_ITEM_JSON = {
    "type": "object",
    "properties": {"sku": {"type": "string"}, "count": {"type": "integer"}, "price": {"type": "number"}},
}
ORDER_JSON = {
    "type": "object",
    "properties": {
        "id": {"type": "integer"},
        "customer": {"type": "string"},
        "state": {"type": "string"},
        "at": {"type": "string", "format": "date-time"},
        "items": {"type": "array", "items": _ITEM_JSON},
        "note": {"type": ["string", "null"]},
        "scores": {"type": "array", "items": {"type": "integer"}},
        "gift": {"type": "boolean"},
        "total": {"type": "number"},
    },
    "required": ["id"],
}


def order(number: int) -> dict[str, Any]:
    """Returns the fields of an order."""
    return {
        "id": number,
        "customer": f"customer-{number % 1000}",
        "state": "PAID",
        "items": [{"sku": f"sku-{number + n}", "count": n + 1, "price": 9.99 * (n + 1)} for n in range(3)],
        "note": f"note {number}" if number % 3 else None,
        "scores": [number % 7, number % 11, number % 1013],
        "gift": number % 2 == 0,
        "total": number * 1.5,
    }


def protobuf_values(schema: Schema, rows: int) -> list[bytes]:
    """Returns orders with Confluent's frame."""
    from google.protobuf import message_factory

    message_class = message_factory.GetMessageClass(message_at(schema, (0,)))
    values = []
    for number in range(rows):
        message = message_class(labels={"channel": "web", "country": "NL"}, **order(number))
        message.at.FromMilliseconds(1_700_000_000_000 + number)
        values.append(FRAME_PROTOBUF + message.SerializeToString())
    return values


def json_values(rows: int) -> list[bytes]:
    """Returns orders with Confluent's frame."""
    at = "2024-02-29T12:00:00.123456Z"
    return [FRAME + json.dumps({**order(number), "at": at}).encode() for number in range(rows)]


def timed(work: Callable[[], object]) -> tuple[float, float]:
    """Returns the seconds of wall time and of CPU time that some work takes."""
    wall, cpu = time.perf_counter(), time.process_time()
    work()
    return time.perf_counter() - wall, time.process_time() - cpu


def contenders(payloads: dict[str, list[bytes]]) -> dict[str, Callable[[], object]]:
    """Returns the work of each contender that runs in this process."""
    from confluent_kafka.schema_registry.json_schema import JSONDeserializer
    from confluent_kafka.schema_registry.protobuf import ProtobufDeserializer
    from confluent_kafka.serialization import MessageField, SerializationContext
    from google.protobuf import message_factory

    schema = Schema("PROTOBUF", ORDER_PROTO)
    ours = protobuf.decoder(schema, (0,))
    ours_json = json_schema.decoder(Schema("JSON", json.dumps(ORDER_JSON)))
    columns = {name: pa.array(values, pa.binary()) for name, values in payloads.items()}
    theirs = ProtobufDeserializer(message_factory.GetMessageClass(message_at(schema, (0,))))
    theirs_json = JSONDeserializer(json.dumps(ORDER_JSON))
    context = SerializationContext("topic", MessageField.VALUE)
    encode = protobuf.encoder(schema, ours.arrow_type)
    encode_json = json_schema.encoder(Schema("JSON", json.dumps(ORDER_JSON)), ours_json.arrow_type)
    values = ours.decode(columns["protobuf"], len(FRAME_PROTOBUF)).values
    values_json = ours_json.decode(columns["json"], len(FRAME)).values
    return {
        "protobuf, kafka-eos": lambda: ours.decode(columns["protobuf"], len(FRAME_PROTOBUF)),
        "protobuf, confluent-kafka": lambda: [theirs(each, context) for each in payloads["protobuf"]],
        "json, kafka-eos": lambda: ours_json.decode(columns["json"], len(FRAME)),
        "json, confluent-kafka": lambda: [theirs_json(each, context) for each in payloads["json"]],
        "protobuf, kafka-eos encodes": lambda: encode.encode(values, FRAME_PROTOBUF),
        "json, kafka-eos encodes": lambda: encode_json.encode(values_json, FRAME),
    }


@click.command()
@click.option("--rows", default=100_000, show_default=True, help="Values of each format.")
@click.option(
    "--repeat", default=5, show_default=True, help="Rounds, in each of which every contender runs once."
)
def main(rows: int, repeat: int) -> None:
    """Compares codecs of Protobuf and JSON values."""
    payloads = {"protobuf": protobuf_values(Schema("PROTOBUF", ORDER_PROTO), rows), "json": json_values(rows)}
    work = contenders(payloads)
    found: dict[str, list[tuple[float, float]]] = {name: [] for name in work}
    for number in range(repeat + 1):
        for name, each in work.items():
            result = timed(each)
            if number:  # the first round warms up
                found[name].append(result)
    click.echo("| format, contender | wall, µs/row | CPU, µs/row |")
    click.echo("|---|---|---|")
    for name, results in found.items():
        wall, cpu = (statistics.median(each[index] for each in results) / rows * 1e6 for index in (0, 1))
        click.echo(f"| {name} | {wall:.2f} | {cpu:.2f} |")


if __name__ == "__main__":
    main()
