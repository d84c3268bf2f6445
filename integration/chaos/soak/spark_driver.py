"""The program of the soak's Spark driver: ``python -m integration.chaos.soak.spark_driver SPEC.json``.

It runs the queries of host ``spark`` in one session until its parent ends or kills it. A query that fails is
started again, as a supervisor would. A spec is::

    {"folder": …, "source": {options}, "sinks": {query: {options}}, "state": {options}}
"""

from __future__ import annotations

import json
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql.streaming import DataStreamWriter, StreamingQuery

from integration.chaos.soak.workload import QUERIES, SPARK, STORE, Query
from integration.support.driver import end_with_parent
from integration.support.session import builder
from kafka_eos_source import local_checkpoints, map_in_read
from kafka_eos_source.runtime.deadline import Deadline
from kafka_eos_source.state import aggregate
from kafka_eos_source.state import aggregates as agg

_STARTS_SECONDS = 120.0
_LOOK_SECONDS = 1.0


def copied(frame: DataFrame, query: Query, _spec: Mapping[str, Any]) -> DataFrame:
    return frame.selectExpr(
        "CAST(key AS STRING) AS key", f"concat('{query.name}:', CAST(value AS STRING)) AS value"
    )


def counted(frame: DataFrame, query: Query, spec: Mapping[str, Any]) -> DataFrame:
    rows = frame.selectExpr("CAST(key AS STRING) AS key", "CAST(CAST(value AS STRING) AS BIGINT) AS number")
    totals = aggregate(
        rows.groupBy("key"),
        {"rows": agg.count(), "total": agg.sum("number")},
        store=STORE,
        shards=2,
        options=spec["state"],
    )
    return totals.selectExpr("key", f"concat('{query.name}:', rows, ':', total) AS value")


def routed(frame: DataFrame, query: Query, spec: Mapping[str, Any]) -> DataFrame:
    prefix, (even, odd) = f"{query.name}:", query.topics

    def route(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        for batch in batches:
            number = batch["number"].cast(pa.int64())
            batch = batch.filter(pc.not_equal(pc.subtract(number, pc.multiply(pc.divide(number, 5), 5)), 0))
            is_odd = pc.equal(pc.bit_wise_and(batch["number"].cast(pa.int64()), 1), 1)
            value = pc.binary_join_element_wise(prefix, batch["number"], "")
            yield pa.record_batch(
                {"topic": pc.if_else(is_odd, odd, even), "key": batch["key"], "value": value}
            )

    rows = frame.selectExpr("key", "CAST(value AS STRING) AS number")
    schema = "topic STRING, key BINARY, value STRING"
    return map_in_read(rows, route, schema, write=spec["sinks"][query.name])


STEPS: Mapping[str, Callable[[DataFrame, Query, Mapping[str, Any]], DataFrame]] = {
    "copy": copied,
    "archive": copied,
    "counts": counted,
    "routed": routed,
}


def writer(spark: SparkSession, query: Query, spec: Mapping[str, Any]) -> DataStreamWriter:
    frame = spark.readStream.format("kafka-eos").options(**spec["source"]).load()
    rows = STEPS[query.name](frame, query, spec)
    return rows.writeStream.format("kafka-eos").options(**spec["sinks"][query.name])


class Supervised:
    """One query, started again whenever it has ended."""

    def __init__(self, spark: SparkSession, query: Query, spec: Mapping[str, Any]) -> None:
        self._query = query
        self._writer = writer(spark, query, spec)
        self._running: StreamingQuery | None = None

    @property
    def is_initializing(self) -> bool:
        """Whether the query has begun to start. Spark can fail if two queries start at the same instant."""
        running = self._running
        return running is not None and running.isActive and running.status["message"].startswith("Initializ")

    def start_if_ended(self) -> bool:
        """Starts the query unless it runs; returns whether it did."""
        if self._running is not None:
            if self._running.isActive:
                return False
            print("QUERY FAILED", self._query.name, _first_line(self._running.exception()), flush=True)
        self._running = self._writer.start()
        print("QUERY STARTED", self._query.name, self._running.runId, flush=True)
        return True


def _first_line(error: Exception | None) -> str:
    return str(error).partition("\n")[0][:500]


def main(path: str) -> None:
    end_with_parent()
    spec = json.loads(Path(path).read_text())
    settings = {
        **local_checkpoints(),
        "spark.local.dir": f"{spec['folder']}/spark-local",
        "spark.ui.showConsoleProgress": "false",
        "spark.sql.streaming.numRecentProgressUpdates": "3",
    }
    session = builder().master("local[4]")
    for name, value in settings.items():
        session = session.config(name, value)
    spark = session.getOrCreate()
    spark.sparkContext.setLogLevel("ERROR")
    supervised = [Supervised(spark, query, spec) for query in QUERIES if query.host == SPARK]
    pause = threading.Event()
    while True:
        for each in supervised:
            if each.start_if_ended():
                starting = Deadline.after_seconds(_STARTS_SECONDS)
                while each.is_initializing and not starting.expired:
                    pause.wait(0.1)
        pause.wait(_LOOK_SECONDS)


if __name__ == "__main__":
    main(sys.argv[1])
