"""`map_in_read` on a real broker: it runs inside the read if possible, else after it.

`test_sink_kills` kills the driver of a query with `map_in_read`. `chaos.test_staged_reads` kills that of a
query whose reading tasks stage the rows, and switches rules off that these tests prove.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import pytest
from pyspark.errors import PySparkException
from pyspark.sql import DataFrame, SparkSession

from integration.support.driver import run_until_killed
from integration.support.kafka import Admin, end_offsets, produce, read_back, values
from kafka_eos_source import map_in_read
from kafka_eos_source.observe.journal import query_journal
from kafka_eos_source.protocol.identity import group_of

ROWS = 300


class Pipeline:
    """A topic with rows, and two topics to which a function routes them."""

    def __init__(self, spark: SparkSession, broker: str, topic: Callable[..., str], checkpoint: str) -> None:
        self.spark, self.broker, self.checkpoint = spark, broker, checkpoint
        self.source, self.even, self.odd = topic(2), topic(2), topic(1)
        self.wanted = [f"{row:05d}" for row in range(ROWS)]
        produce(broker, self.source, self.wanted, keys=self.wanted)

    def read(self, topic: str = "", **options: str) -> DataFrame:
        reader = self.spark.readStream.format("kafka-eos").option("kafka.bootstrap.servers", self.broker)
        reader = reader.option("subscribe", topic or self.source).option("startingOffsets", "earliest")
        return reader.options(**options).load()

    def sink(self, **options: str) -> dict[str, str]:
        """Returns options of the sink for `map_in_read` and for the query."""
        return {
            "kafka.bootstrap.servers": self.broker,
            "checkpointLocation": self.checkpoint,
            "application.id": f"app-{self.even}",
            **options,
        }

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


# -- rows that the tasks which read stage themselves (write=) ---------------------------------------


@pytest.mark.core
def test_with_write_the_tasks_that_read_stage_the_rows(pipeline: Pipeline) -> None:
    """Rows, routes and order are the same; only a report of each task passes through Spark."""
    sink = pipeline.sink(**{"staging.inline.bytes": "100"})  # files, not commit messages
    frame = pipeline.read(minPartitions="2")
    frame = frame.selectExpr("CAST(value AS STRING) AS word", "key AS k")
    reports = pipeline.write(map_in_read(frame, pipeline.routed(), ROUTED, write=sink), **sink)
    pipeline.check_routed()
    assert reports == [2], "Spark counts the reports of two tasks"
    found = query_journal(sink["application.id"])
    assert found is not None
    batches = found.batches
    # our own figures count records: those that were read, and those that were written
    assert sum(each.counts["offsets_read"] for each in batches) == ROWS
    assert sum(each.counts["records"] for each in batches) == ROWS * 4 // 5
    assert not list(Path(pipeline.checkpoint, "kafka-eos", "staging").rglob("*.arrow"))


@pytest.mark.core
def test_a_function_that_returns_nothing_commits_the_offsets(pipeline: Pipeline, admin: Admin) -> None:
    sink = pipeline.sink(topic=pipeline.even)
    frame = map_in_read(pipeline.read().select("value"), lambda rows: iter(()), "value BINARY", write=sink)
    assert pipeline.write(frame, **sink) == [1]
    assert read_back(pipeline.broker, pipeline.even) == []
    group, ends = admin.group(group_of(sink["application.id"])), end_offsets(pipeline.broker, pipeline.source)
    assert {number: group[(pipeline.source, number)][0] for number in ends} == ends


def test_staged_frames_may_be_united_and_shuffled(pipeline: Pipeline) -> None:
    """The commit finds out that no report is missing, whatever tasks of the sink they reach."""
    more = [f"{row:05d}" for row in range(ROWS, 2 * ROWS)]
    produce(pipeline.broker, pipeline.odd, more)
    sink = pipeline.sink(topic=pipeline.even)
    frames = [
        map_in_read(pipeline.read(topic, maxOffsetsPerTrigger="100").select("value"), write=sink)
        for topic in (pipeline.source, pipeline.odd)
    ]
    pipeline.write(frames[0].union(frames[1]).repartition(3), **sink)
    assert values(read_back(pipeline.broker, pipeline.even)) == [*pipeline.wanted, *more]


@pytest.mark.timeout(600)
@pytest.mark.long
def test_a_staged_frame_that_is_not_written_as_it_is_is_refused_and_nothing_is_written(
    pipeline: Pipeline, topic: Callable[..., str]
) -> None:
    sink = pipeline.sink(topic=pipeline.even)
    frame = map_in_read(pipeline.read().select("value", "key"), write=sink)
    changes: list[tuple[DataFrame, dict[str, str], str]] = [
        (frame.where("length(__kafka_eos_staged) < 0"), {}, "STAGED_READ.*rows of batch 0 are lost"),
        (frame, {"topic": pipeline.odd}, "INVALID_OPTION.*'topic' is"),
        (frame, {"processing.guarantee": "at_least_once"}, "INVALID_OPTION.*'processing.guarantee' is"),
        (frame.selectExpr("*", "1 AS one"), {}, "INVALID_SCHEMA.*in addition to"),
        (frame.selectExpr("CAST(__kafka_eos_staged AS STRING) AS value"), {}, "INVALID_SCHEMA.*with a cast"),
    ]
    for changed, options, said in changes:
        with pytest.raises(PySparkException, match=said):
            pipeline.write(changed, **{**sink, **options})
    for written in (pipeline.even, pipeline.odd):
        assert read_back(pipeline.broker, written) == []
    pipeline.write(frame, **sink)  # a refused batch is repeated as it was planned
    assert values(read_back(pipeline.broker, pipeline.even)) == pipeline.wanted

    twice = {**sink, "checkpointLocation": f"{pipeline.checkpoint}-3", "topic": pipeline.odd}
    frame_of_two = map_in_read(pipeline.read().select("value", "key"), write=twice)
    with pytest.raises(PySparkException, match=r"STAGED_READ.*rows of batch 0 are doubled"):
        pipeline.write(frame_of_two.union(frame_of_two), **twice)

    def write(batch: DataFrame, _number: int) -> None:
        writer = batch.write.format("kafka-eos").option("kafka.bootstrap.servers", pipeline.broker)
        writer.option("topic", pipeline.odd).mode("append").save()

    other = f"{pipeline.checkpoint}-2"
    for writer, said in (
        (frame.writeStream.foreachBatch(write), "INVALID_SCHEMA.*foreachBatch"),
        (frame.writeStream.format("noop"), "INVALID_OPTION.*reads the frame"),
    ):
        query = writer.option("checkpointLocation", other).trigger(availableNow=True).start()
        with pytest.raises(PySparkException, match=said):
            query.awaitTermination(120)
    assert read_back(pipeline.broker, pipeline.odd) == []


def test_write_is_refused_where_it_cannot_be_used(pipeline: Pipeline) -> None:
    sink = pipeline.sink(topic=pipeline.even)
    batch = pipeline.spark.read.format("kafka-eos").option("kafka.bootstrap.servers", pipeline.broker)
    with pytest.raises(Exception, match="the frame is a batch read"):
        map_in_read(batch.option("subscribe", pipeline.source).load(), write=sink)
    with pytest.raises(Exception, match="expected exactly_once"):
        map_in_read(pipeline.read(), write={**sink, "processing.guarantee": "at_least_once"})
    with pytest.raises(PySparkException, match="the frame has no column 'value'"):
        map_in_read(pipeline.read().select("key"), write=sink)
    with pytest.raises(Exception, match="to a frame that map_in_read returned"):
        map_in_read(map_in_read(pipeline.read(), write=sink))
    # behind other steps it has no effect, and the rows travel in packed batches
    behind = map_in_read(pipeline.read().select("value").where("value IS NOT NULL"), write=sink)
    pipeline.write(behind, **sink)
    assert values(read_back(pipeline.broker, pipeline.even)) == pipeline.wanted


@pytest.mark.fault("T156", "the driver is killed; reading tasks stage the rows", "after Kafka's commit")
@pytest.mark.fault("T157", "a worker of a reading task is killed; reading tasks stage the rows", "staged")
@pytest.mark.timeout(600)
def test_staged_rows_are_written_once_although_driver_and_task_workers_are_killed(
    broker: str, admin: Admin, topic: Callable[..., str], driver: Any, checkpoint: str, tmp_path: Path
) -> None:
    """The first killed worker has staged rows that nobody commits; the driver dies after Kafka's commit."""
    source, target = topic(2), topic(2)
    wanted = [f"{row:05d}" for row in range(ROWS)]
    produce(broker, source, wanted, keys=wanted)
    servers = {"kafka.bootstrap.servers": broker}
    limits = {"maxOffsetsPerTrigger": "100", "minPartitions": "2", "startingOffsets": "earliest"}
    query: dict[str, Any] = {
        "sources": [{"format": "kafka-eos", "options": {**servers, "subscribe": source, **limits}}],
        "sink": {
            "format": "kafka-eos",
            "options": {
                **servers,
                "topic": target,
                "checkpointLocation": checkpoint,
                "application.id": f"app-{target}",
                "staging.inline.bytes": "100",
            },
        },
        "in_read": "staged",
        "restarts": 1,
    }
    armed = {"stage.after_close": "kill-worker", "commit.after_commit": "kill"}
    killed = run_until_killed(driver, query, tmp_path, armed)
    assert "QUERY FAILED" in killed.log.read_text(), "the killed worker ended the first run of the query"
    driver(query).finish()
    assert values(read_back(broker, target)) == wanted
    group, ends = admin.group(group_of(f"app-{target}")), end_offsets(broker, source)
    assert {number: group[(source, number)][0] for number in ends} == ends
    assert not list(Path(checkpoint, "kafka-eos", "staging").rglob("*.arrow")), "orphans are deleted"
