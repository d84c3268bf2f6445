"""`map_in_read` on a real broker: it runs inside the read if possible, else after it.

`test_sink_kills` kills the driver of a query with `map_in_read`.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator

import pyarrow as pa
import pyarrow.compute as pc
import pytest
from pyspark.errors import PySparkException
from pyspark.sql import DataFrame, SparkSession

from integration.support.kafka import produce, read_back, values
from kafka_eos_source import map_in_read

ROWS = 300


class Pipeline:
    """A topic with rows, and two topics to which a function routes them."""

    def __init__(self, spark: SparkSession, broker: str, topic: Callable[..., str], checkpoint: str) -> None:
        self.spark, self.broker, self.checkpoint = spark, broker, checkpoint
        self.source, self.even, self.odd = topic(2), topic(2), topic(1)
        self.wanted = [f"{row:05d}" for row in range(ROWS)]
        produce(broker, self.source, self.wanted, keys=self.wanted)

    def read(self) -> DataFrame:
        reader = self.spark.readStream.format("kafka-eos").option("kafka.bootstrap.servers", self.broker)
        reader = reader.option("subscribe", self.source).option("startingOffsets", "earliest")
        return reader.load()

    def write(self, frame: DataFrame, **options: str) -> list[int]:
        """Runs the query until all is read; returns Spark's number of input rows for each batch."""
        writer = frame.writeStream.format("kafka-eos").option("kafka.bootstrap.servers", self.broker)
        writer = writer.option("checkpointLocation", self.checkpoint).options(**options)
        query = writer.trigger(availableNow=True).start()
        assert query.awaitTermination(120), "the query did not end"
        return [json.loads(each.json)["numInputRows"] for each in query.recentProgress]

    def routed(self) -> Callable[[Iterator[pa.RecordBatch]], Iterator[pa.RecordBatch]]:
        """Returns a function that drops every fifth row and routes the others to the even or odd topic."""
        even, odd = self.even, self.odd

        def route(rows: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
            for batch in rows:
                number = batch["word"].cast(pa.int64())
                left = pc.subtract(number, pc.multiply(pc.divide(number, 5), 5))
                batch = batch.filter(pc.not_equal(left, 0))
                last = pc.bit_wise_and(batch["word"].cast(pa.int64()), 1)
                topic = pc.if_else(pc.equal(last, 0), even, odd)
                yield pa.record_batch({"topic": topic, "key": batch["k"], "value": batch["word"]})

        return route

    def check_routed(self) -> None:
        kept = [each for each in self.wanted if int(each) % 5]
        assert values(read_back(self.broker, self.even)) == [each for each in kept if int(each) % 2 == 0]
        assert values(read_back(self.broker, self.odd)) == [each for each in kept if int(each) % 2]


@pytest.fixture
def pipeline(spark: SparkSession, broker: str, topic: Callable[..., str], checkpoint: str) -> Pipeline:
    return Pipeline(spark, broker, topic, checkpoint)


ROUTED = "topic STRING, key BINARY, value STRING"


@pytest.mark.core
def test_a_function_in_the_read_may_drop_and_route_rows(pipeline: Pipeline) -> None:
    frame = pipeline.read().selectExpr("CAST(value AS STRING) AS word", "key AS k")
    rows = pipeline.write(map_in_read(frame, pipeline.routed(), ROUTED))
    pipeline.check_routed()
    assert 0 < sum(rows) < ROWS / 10, "Spark counts packed batches, not rows"


def test_after_other_steps_the_function_runs_behind_them(pipeline: Pipeline) -> None:
    frame = pipeline.read().selectExpr("CAST(value AS STRING) AS word", "key AS k").where("word >= '00000'")
    rows = pipeline.write(map_in_read(frame, pipeline.routed(), ROUTED))
    pipeline.check_routed()
    assert sum(rows) == ROWS


@pytest.mark.core
def test_a_query_may_switch_to_packed_batches_without_a_function(pipeline: Pipeline) -> None:
    frame = pipeline.read().select("value", "key")
    sink = {"topic": pipeline.even}
    assert sum(pipeline.write(frame, **sink)) == ROWS
    more = [f"{row:05d}" for row in range(ROWS, 2 * ROWS)]
    produce(pipeline.broker, pipeline.source, more, keys=more)
    assert sum(pipeline.write(map_in_read(frame), **sink)) < ROWS / 10
    assert values(read_back(pipeline.broker, pipeline.even)) == pipeline.wanted + more


def test_at_least_once_and_foreach_batch_unpack_batches(pipeline: Pipeline) -> None:
    frame = map_in_read(pipeline.read().select("value", "key"))
    pipeline.write(frame, topic=pipeline.even, **{"processing.guarantee": "at_least_once"})
    assert values(read_back(pipeline.broker, pipeline.even)) == pipeline.wanted

    def write(batch: DataFrame, number: int) -> None:
        writer = batch.write.format("kafka-eos").option("kafka.bootstrap.servers", pipeline.broker)
        writer = writer.options(topic=pipeline.odd, txnAppId=pipeline.odd, txnVersion=str(number))
        writer.mode("append").save()

    each = frame.writeStream.foreachBatch(write).option("checkpointLocation", f"{pipeline.checkpoint}-2")
    assert each.trigger(availableNow=True).start().awaitTermination(120)
    assert values(read_back(pipeline.broker, pipeline.odd)) == pipeline.wanted


def test_a_function_that_returns_wrong_columns_fails_the_batch_and_nothing_is_written(
    pipeline: Pipeline,
) -> None:
    frame = pipeline.read().select("value", "key")

    def wrong(rows: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        for batch in rows:
            yield batch.rename_columns(["value", "name"])

    with pytest.raises(
        PySparkException, match="with the columns value, name; expected the columns of its schema, value, key"
    ):
        pipeline.write(map_in_read(frame, wrong, "value BINARY, key BINARY"), topic=pipeline.even)
    assert read_back(pipeline.broker, pipeline.even) == []


def test_unsupported_uses_are_refused_before_the_query_starts(pipeline: Pipeline) -> None:
    frame = pipeline.read()
    for schema, said in (("value NOTYPE", "is malformed"), ("string", "without column names")):
        with pytest.raises(Exception, match=f"INVALID_SCHEMA.*{said}"):
            map_in_read(frame, lambda rows: rows, schema)
    with pytest.raises(Exception, match="has a schema but no function"):
        map_in_read(frame, None, "value STRING")
    with pytest.raises(Exception, match="to a frame that map_in_read returned"):
        map_in_read(map_in_read(frame))
    mapped = map_in_read(frame.select("value"))
    with pytest.raises(PySparkException, match="in addition to '__kafka_eos_rows'"):
        pipeline.write(mapped.selectExpr("*", "'t' AS topic"), topic=pipeline.even)
    with pytest.raises(PySparkException, match="the frame has no column 'value'"):
        pipeline.write(map_in_read(frame.select("key")), topic=pipeline.even)
