"""Counts records by key with kafka-eos: source, state and sink in one transaction for each micro-batch.

Arguments: bootstrap servers, topic to read, topic to write, folder, cores, records of a micro-batch,
application id, ``columns``, ``rows`` or ``in-read``; optionally a trigger (``0 seconds``, …; by default the
query ends with the records there are) and settings of the session as JSON.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from typing import Any

from pyspark.sql import DataFrame, Row, functions
from pyspark.sql.streaming.stateful_processor import StatefulProcessor, StatefulProcessorHandle

from kafka_eos_source.state import aggregate, transform
from kafka_eos_source.state import aggregates as agg

from running import session, wait


class Count(StatefulProcessor):
    """The same class as the one that Spark's own ``transformWithState`` runs."""

    def init(self, handle: StatefulProcessorHandle) -> None:
        self._count = handle.getValueState("count", "count long")

    def handleInputRows(self, key: Any, rows: Iterator[Row], timerValues: Any) -> Iterator[Row]:
        known = self._count.get()
        counted = (known[0] if known is not None else 0) + sum(1 for _ in rows)
        self._count.update((counted,))
        yield Row(key=key[0], count=counted)

    def close(self) -> None:
        pass


def counts(keys: DataFrame, form: str, shards: int, options: dict[str, str]) -> DataFrame:
    if form == "in-read":
        return aggregate(keys.groupBy("key"), {"count": agg.count()}, options=options, shards="partitions")
    if form == "columns":
        return aggregate(keys.groupBy("key"), {"count": agg.count()}, options=options, shards=shards)
    return transform(keys.groupBy("key"), Count(), "key binary, count long", options=options, shards=shards)


def main(
    bootstrap: str,
    topic_in: str,
    topic_out: str,
    folder: str,
    cores: str,
    batch: str,
    name: str,
    form: str,
    trigger: str = "",
    conf: str = "{}",
) -> None:
    spark = session(folder, cores, json.loads(conf))
    options = {"kafka.bootstrap.servers": bootstrap, "application.id": name}
    keys = (
        spark.readStream.format("kafka-eos")
        .option("kafka.bootstrap.servers", bootstrap)
        .option("subscribe", topic_in)
        .option("startingOffsets", "earliest")
        .option("maxOffsetsPerTrigger", batch)
        .load()
        .select("key")
    )
    state = {**options, "state.dir": f"{folder}/state"}
    output = (
        counts(keys, form, int(cores), state)
        .withColumn("value", functions.col("count").cast("string"))
        .drop("count")
    )
    writer = (
        output.writeStream.format("kafka-eos")
        .options(**options)
        .option("topic", topic_out)
        .option("checkpointLocation", f"{folder}/checkpoint")
    )
    when: dict[str, Any] = {"processingTime": trigger} if trigger else {"availableNow": True}
    wait(writer.trigger(**when).start())
    spark.stop()


if __name__ == "__main__":
    main(*sys.argv[1:])
