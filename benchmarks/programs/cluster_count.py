"""Keeps the count and the largest value of each key, in phases, with kafka-eos or with Spark's own state.

Argument: a JSON object with ``format`` (``kafka`` or ``kafka-eos``), ``bootstrap``, ``topic_in``,
``topic_out``, ``folder``, ``master``, ``shards``, ``name``, ``conf`` (settings of the session), ``state``
(options of the operator) and ``phases``: for each, the records of a micro-batch and a file whose existence
starts it. A phase ends with the records there are; the program then prints ``PHASE <number>``. The
executors stay.
"""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path
from typing import Any

import pyspark
from pyspark.sql import DataFrame, functions

from running import session, tell

_POLL_SECONDS = 0.2


def own_home(folder: Path) -> None:
    """Gives the run its own ``SPARK_HOME``, because ``local-cluster`` creates executors' folders in it."""
    home = folder / "spark"
    home.mkdir()
    for each in Path(pyspark.__file__).parent.iterdir():
        if each.name != "work":
            (home / each.name).symlink_to(each)
    os.environ["SPARK_HOME"] = str(home)


def counted(rows: DataFrame, job: dict[str, Any]) -> DataFrame:
    """Returns the key and, as text, the count of each key."""
    keyed = rows.select("key", "value").groupBy("key")
    text = functions.col("count").cast("string")
    if job["format"] == "kafka":
        result = keyed.agg(
            functions.count(functions.lit(1)).alias("count"), functions.max("value").alias("largest")
        )
        # without this use of the largest value, Spark would not keep it
        return result.where(functions.length("largest") > 0).select("key", text.alias("value"))
    from kafka_eos_source.state import aggregate
    from kafka_eos_source.state import aggregates as agg

    result = aggregate(
        keyed, {"count": agg.count(), "largest": agg.max("value")}, options=job["state"], shards=job["shards"]
    )
    return result.withColumn("value", text).drop("count", "largest")


def main(job: dict[str, Any]) -> None:
    own_home(Path(job["folder"]))
    spark = session(job["folder"], str(job["shards"]), {**job["conf"], "spark.master": job["master"]})
    spark.sparkContext.setLogLevel("ERROR")
    kafka = {"kafka.bootstrap.servers": job["bootstrap"]}
    read = {**kafka, "subscribe": job["topic_in"], "startingOffsets": "earliest"}
    write = {**kafka, "topic": job["topic_out"], "checkpointLocation": f"{job['folder']}/checkpoint"}
    if job["format"] == "kafka-eos":
        read["application.id"] = write["application.id"] = job["name"]
    told = -1
    for number, (records, file) in enumerate(job["phases"]):
        while not Path(file).exists():
            time.sleep(_POLL_SECONDS)
        rows = spark.readStream.format(job["format"]).options(**read, maxOffsetsPerTrigger=records).load()
        writer = counted(rows, job).writeStream.format(job["format"]).options(**write)
        if job["format"] == "kafka":
            writer = writer.outputMode("update")
        query = writer.trigger(availableNow=True).start()
        while query.isActive:
            time.sleep(_POLL_SECONDS)
            told = tell(query, told)
        query.awaitTermination()  # raises the error of a failed query
        told = tell(query, told)
        print(f"PHASE {number}", flush=True)
    spark.stop()


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
