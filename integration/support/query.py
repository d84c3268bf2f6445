"""A topic-to-topic query in the test session's Spark, for tests that run it several times."""

from __future__ import annotations

import json
from pathlib import Path

from pyspark.sql import DataFrame, SparkSession
from pyspark.sql.streaming import StreamingQuery

from kafka_eos_source.protocol.identity import group_of


class Query:
    """A topic-to-topic query with one checkpoint, which `run` starts and runs to its end."""

    def __init__(self, spark: SparkSession, broker: str, source: str, sink: str, checkpoint: str) -> None:
        self.spark, self.broker, self.source, self.sink, self.checkpoint = (
            spark,
            broker,
            source,
            sink,
            checkpoint,
        )

    def frame(self, topic: str | None = None, *, name: str | None = None, **options: str) -> DataFrame:
        """Returns a streaming DataFrame of one source; ``name`` is for source evolution (PySpark 4.2)."""
        reader = self.spark.readStream.format("kafka-eos").option("kafka.bootstrap.servers", self.broker)
        reader = reader.option("subscribe", topic or self.source).option("startingOffsets", "earliest")
        if name is not None:
            reader = reader.name(name)
        return reader.options(**options).load()

    def start(
        self, frame: DataFrame | None = None, *, sink: str = "kafka-eos", **options: str
    ) -> StreamingQuery:
        """Starts the query. ``sink`` is the sink's format, ``options`` its options with ``__`` for dots."""
        named = {name.replace("__", "."): value for name, value in options.items()}
        selected = (self.frame() if frame is None else frame).selectExpr("key", "value")
        writer = selected.writeStream.format(sink).option("kafka.bootstrap.servers", self.broker)
        writer = writer.option("topic", self.sink).option("checkpointLocation", self.checkpoint)
        return writer.options(**named).trigger(availableNow=True).start()

    def run(self, frame: DataFrame | None = None, **options: str) -> None:
        """Runs the query until it has read everything; ``options`` as in `start`."""
        assert self.start(frame, **options).awaitTermination(120), "the query did not end"

    def forget_commit(self, batch_id: int) -> None:
        """Deletes a commit log entry, as if the driver had died after Kafka's commit and before Spark's."""
        for name in (str(batch_id), f".{batch_id}.crc"):
            Path(self.checkpoint, "commits", name).unlink(missing_ok=True)

    @property
    def query_id(self) -> str:
        return str(json.loads(Path(self.checkpoint, "metadata").read_text())["id"])

    @property
    def application_id(self) -> str:
        return f"kafka-eos-{self.query_id}"

    @property
    def group(self) -> str:
        return group_of(self.application_id)
