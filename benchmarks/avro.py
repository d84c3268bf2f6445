"""``python -m benchmarks.avro``: compares the Avro codec with other libraries, on the same records.

Records have 10 fields: numbers, strings, an enum, a decimal, a timestamp, a record, nulls and an array.
All contenders run in turn in each round. The table has medians of CPU seconds per million records; on a busy
machine these are more reliable than rates.

Spark's lines are the CPU time of the driver's JVM and its Python workers, less that of the same job without
decoding. Spark downloads the jar of spark-avro. "in a Python worker" includes the way to Python and back.
"""

from __future__ import annotations

import contextlib
import decimal
import io
import json
import statistics
import time
from collections.abc import Callable, Iterator
from typing import Any, cast

import click
import psutil
import pyarrow as pa
import pyspark

from kafka_eos_source.embedded import java
from kafka_eos_source.errors import UnavailableError
from kafka_eos_source.registry.avro import arrow_type, decoder, encoder
from kafka_eos_source.registry.codec import Schema

FRAME = 5
_ROWS = 10_000
_FIELDS: list[dict[str, Any]] = [
    {"name": "id", "type": "long"},
    {"name": "customer", "type": "string"},
    {"name": "email", "type": ["null", "string"]},
    {"name": "price", "type": {"type": "bytes", "logicalType": "decimal", "precision": 18, "scale": 2}},
    {"name": "ordered_at", "type": {"type": "long", "logicalType": "timestamp-micros"}},
    {"name": "quantity", "type": "int"},
    {"name": "weight", "type": ["null", "double"]},
    {"name": "status", "type": {"type": "enum", "name": "Status", "symbols": ["NEW", "PAID", "SHIPPED"]}},
    {
        "name": "address",
        "type": {
            "type": "record",
            "name": "Address",
            "fields": [
                {"name": "street", "type": "string"},
                {"name": "city", "type": "string"},
                {"name": "zip", "type": ["null", "string"]},
            ],
        },
    },
    {"name": "tags", "type": {"type": "array", "items": "string"}},
]
_TEXT = json.dumps({"type": "record", "name": "Order", "fields": _FIELDS})
SCHEMA = Schema("AVRO", _TEXT)

#: Versions of spark-avro to try, the best first. The last works with PySpark 4.1 to 4.3.
_SPARK_AVRO = (pyspark.__version__, "4.1.1")

#: Does a contender's work on `_ROWS` records a number of times.
Work = Callable[[int], None]


def spark_avro() -> str:
    """Returns the path of Spark's own reader and writer of Avro, which PySpark does not contain.

    Raises:
        UnavailableError: if no version can be downloaded.
    """
    *better, last = _SPARK_AVRO
    for version in better:
        with contextlib.suppress(UnavailableError):
            return _spark_avro(version)
    return _spark_avro(last)


def _spark_avro(version: str) -> str:
    artifacts = (("org.apache.spark", "spark-avro_2.13", version),)
    wanted = java.JarSet("spark-avro", artifacts, 1, version=version, transitive=False)
    return ",".join(map(str, java.jars(wanted).glob("*.jar")))


def column() -> pa.Array:
    """Returns the records as an Arrow column."""
    numbers = range(_ROWS)
    fields: dict[str, list[Any]] = {
        "id": [number * 1_000_003 for number in numbers],
        "customer": [f"customer number {number}" for number in numbers],
        "email": [None if number % 3 == 0 else f"user{number}@example.com" for number in numbers],
        "price": [decimal.Decimal(number * 7).scaleb(-2) for number in numbers],
        "ordered_at": [1_700_000_000_000_000 + number * 1_000_001 for number in numbers],
        "quantity": [number % 100 for number in numbers],
        "weight": [None if number % 2 else number * 0.5 for number in numbers],
        "status": [("NEW", "PAID", "SHIPPED")[number % 3] for number in numbers],
        "address": [
            {"street": f"{number} Main Street", "city": "Springfield", "zip": None if number % 5 else "12345"}
            for number in numbers
        ],
        "tags": [["fragile", "gift"] if number % 2 else [] for number in numbers],
    }
    found = arrow_type(SCHEMA)
    arrays = [pa.array(values, found.field(name).type) for name, values in fields.items()]
    return pa.StructArray.from_arrays(arrays, fields=list(found))


def libraries(values: pa.Array, messages: pa.Array) -> dict[str, Work]:
    """Returns the contenders that run in this process."""
    import fastavro
    from confluent_kafka.schema_registry import Schema as Registered
    from confluent_kafka.schema_registry import SchemaRegistryClient
    from confluent_kafka.schema_registry.avro import AvroDeserializer, AvroSerializer
    from confluent_kafka.serialization import MessageField, SerializationContext

    reads, writes = decoder(SCHEMA), encoder(SCHEMA, values.type)
    client = SchemaRegistryClient.new_client({"url": "mock://"})
    client.register_schema("orders-value", Registered(_TEXT, "AVRO"))
    context = SerializationContext("orders", MessageField.VALUE)
    serialize = AvroSerializer(
        client, _TEXT, conf={"auto.register.schemas": False, "use.latest.version": True}
    )
    deserialize = AvroDeserializer(client)
    rows, parsed = values.to_pylist(), fastavro.parse_schema(json.loads(_TEXT))
    payloads = messages.to_pylist()
    framed = [serialize(row, context) for row in rows]

    def every(items: list[Any], one: Callable[[Any], Any]) -> Work:
        def work(times: int) -> None:
            for _ in range(times):
                for item in items:
                    one(item)

        return work

    def decode(times: int) -> None:
        for _ in range(times):
            if reads.decode(messages, FRAME).errors:
                raise ValueError("a record was not decoded")

    def encode(times: int) -> None:
        for _ in range(times):
            if writes.encode(values, b"\0\0\0\0\1").errors:
                raise ValueError("a record was not encoded")

    return {
        "decode: kafka-eos": decode,
        "decode: fastavro, row by row": every(
            payloads, lambda one: fastavro.schemaless_reader(io.BytesIO(one[FRAME:]), parsed)
        ),
        "decode: AvroDeserializer, row by row": every(framed, lambda one: deserialize(one, context)),
        "encode: kafka-eos": encode,
        "encode: AvroSerializer, row by row": every(rows, lambda one: serialize(one, context)),
    }


def spark_jobs(messages: pa.Array, million: float) -> dict[str, Callable[[], float]]:
    """Returns jobs in Spark, each of which returns its CPU seconds."""
    from pyspark.sql import SparkSession
    from pyspark.sql.avro.functions import from_avro
    from pyspark.sql.pandas.types import from_arrow_type
    from pyspark.sql.types import StructType

    spark = (
        SparkSession.builder.master("local[1]")
        .config("spark.jars", spark_avro())
        .config("spark.ui.enabled", "false")
        .config("spark.sql.session.timeZone", "UTC")
        .getOrCreate()
    )
    spark.sparkContext.setLogLevel("ERROR")
    one = spark.createDataFrame(pa.table({"value": messages})).repartition(1)
    copies = spark.range(1, int(million * 1e6 / _ROWS) + 1, 1, 1)
    payloads = one.crossJoin(copies).selectExpr("substring(value, 6) AS value").repartition(1).cache()
    payloads.count()
    made = decoder(SCHEMA)
    kind = cast(StructType, from_arrow_type(made.arrow_type))

    def in_worker(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        for batch in batches:
            values = decoder(SCHEMA).decode(batch.column(0), 0).values
            yield pa.RecordBatch.from_struct_array(values)

    frames = {
        "Spark: no decoding": payloads,
        "Spark: from_avro": payloads.select(from_avro("value", _TEXT, {"mode": "PERMISSIVE"}).alias("v")),
        "Spark: kafka-eos in a Python worker": payloads.mapInArrow(in_worker, kind),
    }

    def job(frame: Any) -> Callable[[], float]:
        def run() -> float:
            before = _cpu()
            frame.write.format("noop").mode("overwrite").save()
            return _cpu() - before

        return run

    return {name: job(frame) for name, frame in frames.items()}


def _cpu() -> float:
    """CPU seconds of the processes below this one: Spark's JVM and its Python workers."""
    used = 0.0
    for process in psutil.Process().children(recursive=True):
        times = process.cpu_times()
        used += times.user + times.system
    return used


def _measured(work: Work, seconds: float) -> float:
    """CPU seconds per million records, of a run of about so many seconds."""
    work(1)
    times, start = 0, time.process_time()
    while time.process_time() - start < seconds:
        work(1)
        times += 1
    return (time.process_time() - start) / (times * _ROWS / 1e6)


@click.command()
@click.option("--repeat", default=5, show_default=True, help="Rounds; the table has their medians.")
@click.option("--seconds", default=2.0, show_default=True, help="CPU time of a contender per round.")
@click.option("--spark/--no-spark", default=True, help="Also measures Spark's from_avro.")
@click.option("--million", default=1.0, show_default=True, help="Million records of a job in Spark.")
def main(repeat: int, seconds: float, spark: bool, million: float) -> None:
    """Compares the Avro codec with other libraries."""
    values = column()
    messages = encoder(SCHEMA, values.type).encode(values, b"\0\0\0\0\1").values
    click.echo(f"{messages.nbytes / _ROWS:.0f} bytes per record, with its offset")
    found: dict[str, list[float]] = {}
    inside = libraries(values, messages)
    jobs = spark_jobs(messages, million) if spark else {}
    for job in jobs.values():  # warms up the JVM
        job()
        job()
    for _ in range(repeat):
        for name, work in inside.items():
            found.setdefault(name, []).append(_measured(work, seconds))
        for name, job in jobs.items():
            found.setdefault(name, []).append(job() / million)
    click.echo("| | CPU s per million records | million records per CPU s |")
    click.echo("|---|---|---|")
    nothing = statistics.median(found.get("Spark: no decoding", [0.0]))
    for name, figures in found.items():
        figure = statistics.median(figures)
        if name.startswith("Spark: ") and name != "Spark: no decoding":
            figure -= nothing
        click.echo(f"| {name} | {figure:.2f} | {1 / figure:.2f} |")


if __name__ == "__main__":
    main()
