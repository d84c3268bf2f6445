"""Copies a topic, or reads it to nothing, with Spark: its own Kafka connector, or kafka-eos.

Argument: a JSON object with ``format`` (``kafka`` or ``kafka-eos``), ``bootstrap``, ``topic_in``,
``topic_out`` (empty = to nothing), ``folder``, ``cores``, ``batch`` (records of a micro-batch, 0 = no limit),
``name``, ``guarantee``, ``compression``, ``jars``, ``source`` (more options of the source), ``trigger``
(``0 seconds``, …; empty = it ends with the records there are), ``sink`` (more options of the sink),
``in_read`` (rows go through `map_in_read`), ``stages_in_read`` (with its argument ``write``), and ``conf``
(settings of the session).
"""

from __future__ import annotations

import json
import sys
from typing import Any

from running import session, wait


def main(job: dict[str, Any]) -> None:
    more = {**job["conf"], **({"spark.jars": job["jars"]} if job["jars"] else {})}
    spark = session(job["folder"], str(job["cores"]), more)
    spark.sparkContext.setLogLevel("ERROR")
    kafka = {"kafka.bootstrap.servers": job["bootstrap"]}
    read = {**kafka, "subscribe": job["topic_in"], "startingOffsets": "earliest"}
    if job["batch"]:
        read["maxOffsetsPerTrigger"] = str(job["batch"])
    read.update(job.get("source", {}))
    rows = spark.readStream.format(job["format"]).options(**read).load()
    if not job["topic_out"]:
        writer = rows.writeStream.format("noop")
    else:
        write = {**kafka, "topic": job["topic_out"], "kafka.compression.type": job["compression"]}
        if job["format"] == "kafka-eos":
            write["processing.guarantee"] = job["guarantee"]
            write["application.id"] = job["name"]
        write.update(job["sink"])
        rows = rows.select("key", "value")
        if job["in_read"]:
            from kafka_eos_source import map_in_read

            # Where the tasks that read also stage, they need the options of the sink.
            staging: dict[str, Any] = {}
            if job["stages_in_read"]:
                staging["write"] = {**write, "checkpointLocation": f"{job['folder']}/checkpoint"}
            rows = map_in_read(rows, **staging)
        writer = rows.writeStream.format(job["format"]).options(**write)
    trigger: dict[str, Any] = {"processingTime": job["trigger"]} if job["trigger"] else {"availableNow": True}
    wait(writer.option("checkpointLocation", f"{job['folder']}/checkpoint").trigger(**trigger).start())
    spark.stop()


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
