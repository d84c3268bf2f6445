"""What the programs of Spark queries share: they run in environments of their own, with this folder first.

A program prints ``FIRST <seconds>`` when its first micro-batch with records began, and ``BATCH <JSON>`` for
each that is done.
"""

from __future__ import annotations

import datetime
import json
import time
from collections.abc import Mapping
from typing import Any

from pyspark.sql import SparkSession
from pyspark.sql.streaming.query import StreamingQuery


def session(folder: str, cores: str, more: Mapping[str, str] | None = None) -> SparkSession:
    """One driver that is its own executor."""
    builder: Any = SparkSession.builder.master(f"local[{cores}]")
    settings = {
        "spark.ui.enabled": "false",
        "spark.ui.showConsoleProgress": "false",
        "spark.driver.host": "127.0.0.1",
        "spark.driver.bindAddress": "127.0.0.1",
        "spark.local.dir": f"{folder}/local",
        "spark.sql.warehouse.dir": f"{folder}/warehouse",
        "spark.sql.shuffle.partitions": cores,
        **(more or {}),
    }
    for name, value in settings.items():
        builder = builder.config(name, value)
    spark: SparkSession = builder.getOrCreate()
    return spark


def wait(query: StreamingQuery) -> None:
    """Until the query ends; tells of each micro-batch with records once it is done."""
    told = -1
    while not query.awaitTermination(1):
        told = tell(query, told)
    tell(query, told)


def tell(query: StreamingQuery, told: int) -> int:
    """Tells of the batches behind number ``told``; the number of the last one."""
    for progress in query.recentProgress:
        number = progress["batchId"]
        if number <= told or progress["numInputRows"] <= 0:
            continue
        began = datetime.datetime.fromisoformat(progress["timestamp"].replace("Z", "+00:00")).timestamp()
        if told < 0:
            print(f"FIRST {began:.3f}", flush=True)
        told = number
        ms = progress["durationMs"]
        batch = {
            "batch": number,
            "rows": progress["numInputRows"],
            "began": began,
            "trigger_ms": ms["triggerExecution"],
            "durations_ms": ms,
            "told": time.time(),
        }
        print(f"BATCH {json.dumps(batch)}", flush=True)
    return told
