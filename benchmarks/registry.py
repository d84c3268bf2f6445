"""``python -m benchmarks.registry``: compares `from_registry` with Spark's `from_avro` in the same queries.

Batch queries read one topic with framed Avro records from an embedded broker, decode the value, and write all
fields to Spark's sink ``noop``. The contenders run in turn, in one Spark session, several rounds. The program
prints medians of the CPU seconds of all processes of the session per million records: Spark's JVM and its
Python workers. ``read`` does not decode.
"""

from __future__ import annotations

import http.server
import io
import json
import os
import statistics
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import click
import fastavro
import psutil
from confluent_kafka import Producer
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as f
from pyspark.sql.avro.functions import from_avro

from benchmarks.avro import spark_avro
from benchmarks.kafka import Cluster
from kafka_eos_source import from_registry
from kafka_eos_source.embedded import EmbeddedKafka

FLIGHT = json.dumps(
    {
        "type": "record",
        "name": "Flight",
        "fields": [
            {"name": "carrier", "type": "string"},
            {"name": "flight", "type": "int"},
            {"name": "origin", "type": "string"},
            {"name": "dest", "type": "string"},
            {"name": "tail", "type": ["null", "string"]},
            {"name": "dep_delay", "type": ["null", "int"]},
            {"name": "distance", "type": "double"},
            {"name": "at", "type": {"type": "long", "logicalType": "timestamp-millis"}},
        ],
    }
)
_TOPIC = "bench.registry"
_SCHEMA_ID = 1
_DIFFERENT = 10_000

Contender = Callable[[DataFrame], DataFrame]


@click.command()
@click.option("--records", default=1_000_000, show_default=True)
@click.option("--rounds", default=5, show_default=True)
def main(records: int, rounds: int) -> None:
    """Compares from_registry with Spark's from_avro."""
    jar = spark_avro()
    with EmbeddedKafka() as kafka, _registry() as url:
        _fill(kafka.bootstrap_servers, records)
        spark = _session(jar)
        read = spark.read.format("kafka-eos").option("kafka.bootstrap.servers", kafka.bootstrap_servers)
        frame = read.option("subscribe", _TOPIC).load()
        contenders: dict[str, Contender] = {
            "read": lambda rows: rows.select("value"),
            "from_registry": lambda rows: rows.select(
                from_registry("value", url, topic=_TOPIC).alias("v")
            ).select("v.*"),
            "from_registry, permissive": lambda rows: rows.select(
                from_registry("value", url, topic=_TOPIC, mode="permissive").alias("v")
            ).select("v.value.*", "v.error"),
            "Spark's from_avro": lambda rows: rows.select(
                from_avro(f.expr("substring(value, 6)"), FLIGHT, {"mode": "FAILFAST"}).alias("v")
            ).select("v.*"),
        }
        for name in list(contenders)[1:]:
            _check(contenders[name](frame), records)
        found: dict[str, list[tuple[float, float]]] = {name: [] for name in contenders}
        for _ in range(rounds + 1):
            for name, contender in contenders.items():
                found[name].append(_measured(contender(frame), records))
        spark.stop()
    print(f"{'':28} {'CPU s per million':>18} {'records/s':>12}")
    for name, results in found.items():
        warm = results[1:]
        cpu, speed = (statistics.median(each) for each in zip(*warm, strict=True))
        print(f"{name:28} {cpu:18.2f} {speed:12,.0f}")


@contextmanager
def _registry() -> Iterator[str]:
    """Runs what a registry with one schema answers; yields its URL. Each Python worker calls it once."""

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            found = {"subject": f"{_TOPIC}-value", "version": 1, "id": _SCHEMA_ID, "schema": FLIGHT}
            body = json.dumps(found).encode()
            self.send_response(200)
            self.send_header("Content-Type", "application/vnd.schemaregistry.v1+json")
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, format: str, *args: object) -> None:
            """Suppresses the request log."""

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_port}"
        finally:
            server.shutdown()
            thread.join()


def _session(jar: str) -> SparkSession:
    os.environ["PYSPARK_PYTHON"] = os.environ["PYSPARK_DRIVER_PYTHON"] = sys.executable
    return (
        SparkSession.builder.master("local[2]")
        .config("spark.ui.enabled", "false")
        .config("spark.sql.session.timeZone", "UTC")
        .config("spark.jars", jar)
        .config("spark.driver.host", "127.0.0.1")
        .getOrCreate()
    )


def _fill(bootstrap: str, records: int) -> None:
    Cluster(bootstrap).create(_TOPIC, 4)
    schema = fastavro.parse_schema(json.loads(FLIGHT))
    messages = []
    for number in range(_DIFFERENT):
        body = io.BytesIO(b"\0" + _SCHEMA_ID.to_bytes(4, "big"))
        body.seek(0, io.SEEK_END)
        fastavro.schemaless_writer(body, schema, _flight(number))
        messages.append(body.getvalue())
    producer = Producer({"bootstrap.servers": bootstrap, "linger.ms": 50, "compression.type": "lz4"})
    for number in range(records):
        while True:
            try:
                producer.produce(_TOPIC, messages[number % _DIFFERENT], partition=number % 4)
                break
            except BufferError:
                producer.poll(0.1)
    assert producer.flush(120) == 0
    producer.close()


def _flight(number: int) -> dict[str, Any]:
    return {
        "carrier": ("AA", "UA", "DL")[number % 3],
        "flight": number,
        "origin": "JFK",
        "dest": "LAX",
        "tail": None if number % 10 == 0 else f"N{number:05d}",
        "dep_delay": None if number % 7 == 0 else number % 200 - 30,
        "distance": 100.0 + number,
        "at": 1_700_000_000_000 + number,
    }


def _check(rows: DataFrame, records: int) -> None:
    """Fails unless the rows are those that were written."""
    sums = rows.selectExpr("count(*)", "sum(flight)", "sum(dep_delay)", "count(tail)").first()
    per = [_flight(number % _DIFFERENT) for number in range(records)]
    wanted = (
        records,
        sum(each["flight"] for each in per),
        sum(each["dep_delay"] or 0 for each in per),
        sum(each["tail"] is not None for each in per),
    )
    assert sums is not None
    assert tuple(sums) == wanted, f"{tuple(sums)}; expected {wanted}"


def _measured(rows: DataFrame, records: int) -> tuple[float, float]:
    """Returns CPU seconds per million records, and records per second."""
    began, cpu = time.monotonic(), _cpu_seconds()
    rows.write.format("noop").mode("overwrite").save()
    seconds = time.monotonic() - began
    return (_cpu_seconds() - cpu) / records * 1e6, records / seconds


def _cpu_seconds() -> float:
    """Returns the CPU time of this session's JVM and its Python processes, ended ones included."""
    total = 0.0
    for child in psutil.Process().children():
        if child.name() != "java" or "org.apache.spark" not in " ".join(child.cmdline()):
            continue
        for each in [child, *child.children(recursive=True)]:
            times = each.cpu_times()
            total += times.user + times.system + times.children_user + times.children_system
    return total


if __name__ == "__main__":
    main()
