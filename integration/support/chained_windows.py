"""Runs two stateful steps in one Spark query: ``… integration.support.chained_windows SPEC.json``.

The query counts events per user and window, and then how many windows have which count. At the end, a plain
batch query of Spark over the same topic computes the same histogram. A spec is ``{"source": options,
"operator": options, "sink": options, "batch_result": file, "counts": file}``.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

from pyspark.sql import DataFrame
from pyspark.sql import functions as sf

from integration.support.driver import end_with_parent
from integration.support.session import builder
from kafka_eos_source.state import StateQuery, aggregate, tumbling
from kafka_eos_source.state import aggregates as agg

WINDOW = "5 seconds"


def events(records: DataFrame) -> DataFrame:
    """Returns the user (the key) and the event time (the value, in ms) of each record."""
    return records.selectExpr(
        "CAST(key AS STRING) AS user", "timestamp_millis(CAST(CAST(value AS STRING) AS BIGINT)) AS time"
    )


def main(path: str) -> None:
    end_with_parent()
    spec = json.loads(Path(path).read_text())
    spark = builder().getOrCreate()
    spark.sparkContext.setLogLevel("ERROR")
    counts = aggregate(
        events(spark.readStream.format("kafka-eos").options(**spec["source"]).load()).groupBy("user"),
        {"events": agg.count()},
        window=tumbling(WINDOW, on="time", grace="1 hour"),
        emit="changes",
        store="windows",
        shards=2,
        options=spec["operator"],
    )
    histogram = aggregate(
        counts.groupBy("events"),
        {"windows": agg.count()},
        removed="removed",
        store="histogram",
        shards=2,
        options=spec["operator"],
    )
    query = (
        histogram.selectExpr("CAST(events AS STRING) AS key", "CAST(windows AS STRING) AS value")
        .writeStream.format("kafka-eos")
        .options(**spec["sink"])
        .trigger(availableNow=True)
        .start()
    )
    query.awaitTermination()
    records = spark.read.format("kafka-eos").options(
        **{name: value for name, value in spec["source"].items() if name != "maxOffsetsPerTrigger"}
    )
    windows = events(records.load()).groupBy("user", sf.window("time", WINDOW)).agg(sf.count("*").alias("n"))
    result = {str(row["n"]): str(row["count"]) for row in windows.groupBy("n").count().collect()}
    Path(spec["batch_result"]).write_text(json.dumps(result))
    operator = spec["operator"]
    kafka = {"kafka.bootstrap.servers": operator["kafka.bootstrap.servers"]}
    with StateQuery(operator["application.id"], "windows", kafka=kafka) as state:
        Path(spec["counts"]).write_text(json.dumps(state.counts))
    spark.stop()


if __name__ == "__main__":
    main(sys.argv[1])
