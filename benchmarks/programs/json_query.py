"""The everyday job: parses JSON documents, keeps some, chooses fields, and writes a topic.

Argument: a JSON object as that of ``spark_copy.py``, and ``form`` (``sql``: Spark's ``from_json`` and
``to_json`` on the connector ``format``; ``msgspec``: `map_in_read` with ``write`` and a function that parses
row by row; ``app-sql`` and ``app-where``: `App`, with SQL in the read or with a step of Spark), ``schema``
(the declared fields), ``columns`` (those of the output), ``late`` (the delay above which a flight stays) and
``bad`` (some documents do not fit, and are left out).
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from pyspark.sql import DataFrame, SparkSession
from pyspark.sql.functions import col, from_json, struct, to_json
from pyspark.sql.streaming.readwriter import DataStreamWriter

from running import session, wait


def main(job: dict[str, Any]) -> None:
    more = {**job["conf"], **({"spark.jars": job["jars"]} if job["jars"] else {})}
    spark = session(job["folder"], str(job["cores"]), more)
    spark.sparkContext.setLogLevel("ERROR")
    writer = (_by_app if job["form"].startswith("app") else _by_options)(spark, job)
    trigger: dict[str, Any] = {"processingTime": job["trigger"]} if job["trigger"] else {"availableNow": True}
    wait(writer.trigger(**trigger).start())
    spark.stop()


def _by_options(spark: SparkSession, job: dict[str, Any]) -> DataStreamWriter:
    kafka = {"kafka.bootstrap.servers": job["bootstrap"]}
    read = {**kafka, "subscribe": job["topic_in"], "startingOffsets": "earliest", **job["source"]}
    if job["batch"]:
        read["maxOffsetsPerTrigger"] = str(job["batch"])
    rows = spark.readStream.format(job["format"]).options(**read).load()
    write = {**kafka, "topic": job["topic_out"], "kafka.compression.type": job["compression"], **job["sink"]}
    write["checkpointLocation"] = f"{job['folder']}/checkpoint"
    if job["format"] == "kafka-eos":
        write["application.id"] = job["name"]
    if job["form"] == "msgspec":
        from kafka_eos_source import map_in_read

        step = _msgspec(job["schema"], job["columns"], job["late"])
        rows = map_in_read(rows.select("key", "value"), step, "key BINARY, value BINARY", write=write)
    else:
        rows = _sql(rows, job)
    return rows.writeStream.format(job["format"]).options(**write)


def _sql(rows: DataFrame, job: dict[str, Any]) -> DataFrame:
    parsed = rows.select("key", from_json(col("value").cast("string"), job["schema"]).alias("flight"))
    late = parsed.where(col("flight.dep_delay") > job["late"])
    return late.select("key", to_json(struct(*(f"flight.{name}" for name in job["columns"]))).alias("value"))


def _msgspec(schema: str, columns: list[str], late: int) -> Callable[[Iterable[Any]], Iterator[Any]]:
    """Returns the function of a user who knows Arrow and msgspec."""
    types = {"STRING": str, "INT": int, "DOUBLE": float, "BOOLEAN": bool, "TIMESTAMP": str}
    fields = {name: types[kind] for name, kind in (each.split() for each in schema.split(", "))}
    declared = [*dict.fromkeys(["dep_delay", *columns])]

    def step(batches: Iterable[Any]) -> Iterator[Any]:
        import msgspec
        import pyarrow as pa

        flight: Any = msgspec.defstruct(
            "Flight", [(name, fields[name] | None, None) for name in declared], omit_defaults=True
        )
        decode, encode = msgspec.json.Decoder(flight).decode, msgspec.json.Encoder().encode
        for batch in batches:
            keys, values = [], []
            for key, value in zip(batch["key"].to_pylist(), batch["value"].to_pylist(), strict=True):
                try:
                    found: Any = decode(value)
                except msgspec.MsgspecError:
                    continue
                if found.dep_delay is not None and found.dep_delay > late:
                    keys.append(key)
                    values.append(encode(found))
            yield pa.record_batch(
                {"key": pa.array(keys, pa.binary()), "value": pa.array(values, pa.binary())}
            )

    return step


def _by_app(spark: SparkSession, job: dict[str, Any]) -> DataStreamWriter:
    from kafka_eos_source import App

    app = App(job["name"], job["bootstrap"], checkpoint=f"{job['folder']}/checkpoint", spark=spark)
    source = {**job["source"], **({"maxOffsetsPerTrigger": job["batch"]} if job["batch"] else {})}
    on_bad = {"on_bad": "null"} if job["bad"] else {}
    arguments = {"keep": "key", "options": source, **on_bad, **job["app"]}
    flights = app.read(job["topic_in"], schema=job["schema"], **arguments)
    if job["form"] == "app-sql":
        text = f"SELECT key, {', '.join(job['columns'])} FROM {{flights}} WHERE dep_delay > {job['late']}"
        rows = app.sql(text, flights=flights)
    else:
        rows = flights.where(col("dep_delay") > job["late"]).select("key", *job["columns"])
    sink = {"kafka.compression.type": job["compression"], **job["sink"]}
    return app.write(rows, job["topic_out"], key="key", options=sink)


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
