"""``python -m benchmarks.registry_formats``: decodes Protobuf and JSON values with several libraries in turn.

The contenders are this package's decoders, the deserializers of confluent-kafka (row by row, without the cost
of a registry or of making columns), and Spark's own ``from_protobuf`` and ``from_json`` with one task on one
core. From Spark's times, those of the same query without decoding are subtracted. The program prints medians
of microseconds of wall time and, where all work happens in this process, of CPU time per row.
"""

from __future__ import annotations

import json
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click
import pyarrow as pa
import pyarrow.parquet

from kafka_eos_source.registry import json_schema, protobuf
from kafka_eos_source.registry.codec import Schema
from kafka_eos_source.registry.protobuf.files import compile_schema, message_at

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
_SPARK_JSON = (
    "struct<id: bigint, customer: string, state: string, at: timestamp, items: array<struct<sku: string, "
    "count: bigint, price: double>>, note: string, scores: array<bigint>, gift: boolean, total: double>"
)


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


class SparkContender:
    """Spark with one core, and orders in its memory."""

    def __init__(self, folder: Path, payloads: dict[str, list[bytes]]) -> None:
        import pyspark
        from google.protobuf import descriptor_pb2
        from pyspark.sql import SparkSession

        self._spark = (
            SparkSession.builder.master("local[1]")
            .appName("benchmarks.registry_formats")
            .config("spark.jars.packages", f"org.apache.spark:spark-protobuf_2.13:{pyspark.__version__}")
            .config("spark.ui.enabled", "false")
            .config("spark.sql.session.timeZone", "UTC")
            .config("spark.driver.memory", "3g")
            .getOrCreate()
        )
        self._descriptors = folder / "order.bin"
        files = descriptor_pb2.FileDescriptorSet()
        _add_files(compile_schema(Schema("PROTOBUF", ORDER_PROTO)), files)
        self._descriptors.write_bytes(files.SerializeToString())
        self._frames = {}
        for name, values in payloads.items():
            path = str(folder / name)
            pa.parquet.write_table(pa.table({"value": pa.array(values, pa.binary())}), path)
            self._frames[name] = self._spark.read.parquet(path).cache()
            self._frames[name].count()

    def run(self, name: str) -> Callable[[], object]:
        """Returns the work of decoding the values of a format; "copy" is the query without decoding."""
        from pyspark.sql import functions
        from pyspark.sql.protobuf.functions import from_protobuf

        kind, _, what = name.partition(" ")
        value = functions.expr(
            f"substring(value, {1 + len(FRAME_PROTOBUF if kind == 'protobuf' else FRAME)})"
        )
        if what == "copy":
            column = value
        elif kind == "protobuf":
            column = from_protobuf(value, "bench.Order", descFilePath=str(self._descriptors))
        else:
            column = functions.from_json(value.cast("string"), _SPARK_JSON)
        frame = self._frames[kind].select(column.alias("value"))
        return lambda: frame.write.format("noop").mode("overwrite").save()

    def stop(self) -> None:
        """Stops Spark."""
        self._spark.stop()


def _add_files(file: Any, files: Any) -> None:
    for each in file.dependencies:
        _add_files(each, files)
    if file.name not in {each.name for each in files.file}:
        file.CopyToProto(files.file.add())


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
@click.option(
    "--spark/--no-spark", default=True, show_default=True, help="Whether Spark's functions take part."
)
def main(rows: int, repeat: int, spark: bool) -> None:
    """Compares decoders of Protobuf and JSON values."""
    payloads = {"protobuf": protobuf_values(Schema("PROTOBUF", ORDER_PROTO), rows), "json": json_values(rows)}
    work = contenders(payloads)
    with tempfile.TemporaryDirectory() as folder:
        session = SparkContender(Path(folder), payloads) if spark else None
        if session is not None:
            for kind in payloads:
                work |= {
                    f"{kind}, Spark {what}": session.run(f"{kind} {what}") for what in ("copy", "decodes")
                }
        found: dict[str, list[tuple[float, float]]] = {name: [] for name in work}
        for number in range(repeat + 1):
            for name, each in work.items():
                result = timed(each)
                if number:  # the first round warms up
                    found[name].append(result)
        if session is not None:
            session.stop()
    click.echo("| format, contender | wall, µs/row | CPU, µs/row |")
    click.echo("|---|---|---|")
    for name, results in found.items():
        wall, cpu = (statistics.median(each[index] for each in results) / rows * 1e6 for index in (0, 1))
        click.echo(f"| {name} | {wall:.2f} | {'' if 'Spark' in name else f'{cpu:.2f}'} |")
    for kind in payloads if spark else ():
        copy, decodes = (
            statistics.median(each[0] for each in found[f"{kind}, Spark {what}"])
            for what in ("copy", "decodes")
        )
        click.echo(f"| {kind}, Spark, without the copy | {(decodes - copy) / rows * 1e6:.2f} | |")


if __name__ == "__main__":
    main()
