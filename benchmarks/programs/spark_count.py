"""Counts records by key with Spark's own Kafka connector and its Python transformWithState.

Arguments: bootstrap servers, topic to read, topic to write, folder, cores, records of a micro-batch, jars of
the connector, ``row`` or ``pandas``.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import Any

import pandas as pd
from pyspark.sql import Row
from pyspark.sql.streaming.stateful_processor import StatefulProcessor, StatefulProcessorHandle

from running import session, wait

_OUTPUT = "key binary, value string"
_STATE = {
    "spark.sql.streaming.stateStore.providerClass": "org.apache.spark.sql.execution.streaming.state."
    "RocksDBStateStoreProvider",
    "spark.sql.streaming.stateStore.rocksdb.changelogCheckpointing.enabled": "true",
}


class CountRows(StatefulProcessor):
    """One row in, one row out."""

    def init(self, handle: StatefulProcessorHandle) -> None:
        self._count = handle.getValueState("count", "count long")

    def handleInputRows(self, key: Any, rows: Iterator[Row], timerValues: Any) -> Iterator[Row]:
        known = self._count.get()
        counted = (known[0] if known is not None else 0) + sum(1 for _ in rows)
        self._count.update((counted,))
        yield Row(key=key[0], value=str(counted))

    def close(self) -> None:
        pass


class CountPandas(CountRows):
    """The same over pandas."""

    def handleInputRows(
        self,
        key: Any,
        rows: Iterator[pd.DataFrame],
        timerValues: Any,
    ) -> Iterator[pd.DataFrame]:
        known = self._count.get()
        counted = (known[0] if known is not None else 0) + sum(map(len, rows))
        self._count.update((counted,))
        yield pd.DataFrame({"key": [key[0]], "value": [str(counted)]})


def main(
    bootstrap: str, topic_in: str, topic_out: str, folder: str, cores: str, batch: str, jars: str, form: str
) -> None:
    spark = session(folder, cores, {"spark.jars": jars, **_STATE})
    spark.sparkContext.setLogLevel("ERROR")  # it warns of each new key
    source = (
        spark.readStream.format("kafka")
        .option("kafka.bootstrap.servers", bootstrap)
        .option("subscribe", topic_in)
        .option("startingOffsets", "earliest")
        .option("maxOffsetsPerTrigger", batch)
        .load()
        .select("key")
        .groupBy("key")
    )
    if form == "pandas":
        counts = source.transformWithStateInPandas(CountPandas(), _OUTPUT, "Update", "None")
    else:
        counts = source.transformWithState(CountRows(), _OUTPUT, "Update", "None")
    query = (
        counts.writeStream.format("kafka")
        .outputMode("update")
        .option("kafka.bootstrap.servers", bootstrap)
        .option("topic", topic_out)
        .option("checkpointLocation", f"{folder}/checkpoint")
        .trigger(availableNow=True)
        .start()
    )
    wait(query)
    spark.stop()


if __name__ == "__main__":
    main(*sys.argv[1:])
