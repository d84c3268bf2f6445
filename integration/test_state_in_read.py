"""Stateful operators in the tasks that read Kafka, with one shard for each partition of the input."""

from __future__ import annotations

import uuid
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from pyspark.errors import StreamingQueryException
from pyspark.sql import DataFrame, SparkSession, functions
from pyspark.sql.streaming import StreamingQuery

from integration.support.alarm import Alarm
from integration.support.kafka import Admin, produce, read_back
from integration.support.processes import await_condition
from integration.support.stateful import check_running_counts
from kafka_eos_source.errors import InvalidOptionError, InvalidSchemaError, StateMismatchError
from kafka_eos_source.protocol.packing import CHANGELOG
from kafka_eos_source.spark.operator_frame import spark_frame
from kafka_eos_source.state import (
    KeyedBatch,
    aggregate,
    apply,
    transform,
)
from kafka_eos_source.state import aggregates as agg
from kafka_eos_source.state.operator.frame import Shards
from kafka_eos_source.state.reading.query import StateQuery

PARTITIONS, ROWS, KEYS, SECONDS = 3, 300, 7, 120


class Counted:
    """A query that counts rows by the key of their records, with one source, one operator and one sink."""

    def __init__(self, spark: SparkSession, broker: str, topic: Callable[..., str], folder: Path) -> None:
        self.spark, self.broker, self.folder = spark, broker, folder
        self.source, self.sink = topic(PARTITIONS), topic(2)
        self.application = f"app-{uuid.uuid4().hex[:8]}"
        self.wanted: Counter[str] = Counter()

    def feed(self, rows: int, keys: int = KEYS) -> None:
        named = [f"k{row % keys}" for row in range(rows)]
        produce(self.broker, self.source, [f"v{row}" for row in range(rows)], keys=named)
        self.wanted.update(named)

    def options(self) -> dict[str, str]:
        return {
            "kafka.bootstrap.servers": self.broker,
            "application.id": self.application,
            "state.dir": str(self.folder / "state"),
        }

    def rows(self, *, extra: str = "value AS v", **more: str) -> DataFrame:
        read = {
            "kafka.bootstrap.servers": self.broker,
            "application.id": self.application,
            "subscribe": self.source,
            "startingOffsets": "earliest",
            **more,
        }
        frame = self.spark.readStream.format("kafka-eos").options(**read).load()
        return frame.selectExpr("CAST(key AS STRING) AS k", extra)

    def counts(self, shards: Shards = "partitions", **more: str) -> DataFrame:
        frame = aggregate(
            self.rows(**more).groupBy("k"), {"n": agg.count()}, options=self.options(), shards=shards
        )
        return frame.selectExpr("k AS key", "CAST(n AS STRING) AS value")

    def start(self, frame: DataFrame, **trigger: Any) -> StreamingQuery:
        write = {
            "kafka.bootstrap.servers": self.broker,
            "topic": self.sink,
            "application.id": self.application,
            "checkpointLocation": str(self.folder / "checkpoint"),
        }
        trigger = trigger or {"availableNow": True}
        return frame.writeStream.format("kafka-eos").options(**write).trigger(**trigger).start()

    def run(self, frame: DataFrame) -> None:
        assert self.start(frame).awaitTermination(SECONDS), "the query did not end"

    def written(self) -> dict[str, str]:
        """Returns the newest value of each key in the output."""
        return {
            (record.key or b"").decode(): (record.value or b"").decode()
            for record in read_back(self.broker, self.sink)
        }


@pytest.fixture
def counted(spark: SparkSession, broker: str, topic: Callable[..., str], tmp_path: Path) -> Counted:
    return Counted(spark, broker, topic, tmp_path)


@pytest.mark.core
def test_counts_continue_without_a_shuffle_and_each_key_is_found(counted: Counted) -> None:
    counted.feed(ROWS)
    frame = counted.counts()
    plan = frame._jdf.queryExecution().toString()  # type: ignore[operator]
    assert "Repartition" not in plan
    assert "MapInArrow" not in plan
    counted.run(frame)
    counted.feed(50)
    counted.run(counted.counts())
    assert counted.written() == {key: str(rows) for key, rows in counted.wanted.items()}
    kafka = {"kafka.bootstrap.servers": counted.broker}
    with StateQuery(counted.application, "aggregates", kafka=kafka) as query:
        assert query.shards == PARTITIONS
        assert {key: (query.get(key) or {}).get("n") for key in counted.wanted} == dict(counted.wanted)
        assert query.get("unknown") is None
        shards = {row["partition_id"] for row in query.all()}
    assert len(shards) > 1, "the keys are in several shards"


def test_state_of_one_kind_of_shards_is_refused_by_the_other(counted: Counted) -> None:
    counted.feed(ROWS)
    counted.run(counted.counts())
    counted.feed(50)
    with pytest.raises(StreamingQueryException, match="was written by an operator with shards='partitions'"):
        counted.run(counted.counts(shards=PARTITIONS))
    counted.run(counted.counts())
    assert counted.written() == {key: str(rows) for key, rows in counted.wanted.items()}


@pytest.mark.long
def test_added_partitions_are_refused_before_a_key_meets_another_shard(
    counted: Counted, admin: Admin
) -> None:
    counted.feed(ROWS)
    counted.run(counted.counts())
    admin.grow(counted.source, PARTITIONS + 1)
    with pytest.raises(
        StateMismatchError, match=r"has 3 partitions; the operator has 4 shards.*had another number before"
    ):
        counted.counts()


@pytest.mark.long
def test_partitions_that_are_added_during_a_run_stop_it(counted: Counted, admin: Admin) -> None:
    counted.feed(ROWS)
    query = counted.start(counted.counts(), processingTime="100 milliseconds")
    try:
        await_condition(lambda: len(counted.written()) == KEYS, SECONDS, "the first batch is committed")
        admin.grow(counted.source, PARTITIONS + 1)
        await_condition(lambda: counted.feed(10) is None and not query.isActive, SECONDS, "the query stops")
    finally:
        query.stop()
    assert f"has {PARTITIONS + 1} partitions, but the operator has {PARTITIONS} shards" in str(
        query.exception()
    )


def test_timers_of_all_shards_fire_while_nothing_is_read(counted: Counted) -> None:
    """An empty micro-batch runs every shard, also one whose partition never had a record."""
    counted.feed(2, keys=1)
    frame = transform(
        counted.rows().groupBy("k"),
        Alarm(1000),
        "key string, value string",
        options=counted.options(),
        shards="partitions",
        time_mode="ProcessingTime",
    )
    query = counted.start(frame, processingTime="200 milliseconds")
    try:
        await_condition(
            lambda: not query.isActive or counted.written() == {"k0": "2"}, SECONDS, "the timer fires"
        )
    finally:
        query.stop()
    assert counted.written() == {"k0": "2"}, query.exception()


def test_a_query_with_two_sources_is_refused_before_it_commits(counted: Counted, topic: Any) -> None:
    """Spark would leave out the source without new records, and with it the operator."""
    counted.feed(ROWS)
    other = counted.spark.readStream.format("kafka-eos").options(
        **{"kafka.bootstrap.servers": counted.broker, "subscribe": topic(1), "startingOffsets": "earliest"}
    )
    plain = other.load().selectExpr("CAST(key AS STRING) AS key", "CAST(value AS STRING) AS value")
    frame = counted.counts().unionByName(plain, allowMissingColumns=True)
    with pytest.raises(StreamingQueryException, match="the query has 2 sources; expected one"):
        counted.run(frame)
    assert counted.written() == {}


@pytest.mark.long
def test_a_batch_that_spark_runs_for_its_own_state_is_refused_and_loses_nothing(counted: Counted) -> None:
    """The batch has no new records, so Spark leaves out the source, and with it the operator."""
    counted.feed(ROWS)
    timed = (
        counted.counts().withColumn("now", functions.current_timestamp()).withWatermark("now", "0 seconds")
    )
    frame = spark_frame(timed).dropDuplicates(["key", CHANGELOG, "now"]).drop("now")
    query = counted.start(frame, processingTime="100 milliseconds")
    try:
        await_condition(lambda: not query.isActive, SECONDS, "the query is refused")
    finally:
        query.stop()
    assert "batch 1 are lost: no shard of the operator sent a report" in str(query.exception())
    assert "remove stateful steps of Spark such as dropDuplicates" in str(query.exception())
    assert counted.written() == {key: str(rows) for key, rows in counted.wanted.items()}


def test_times_are_those_of_the_session_for_processors_and_instants_for_spark(counted: Counted) -> None:
    begin = 1_700_000_000_000
    produce(counted.broker, counted.source, ["x"], keys=["a"], timestamps_ms=[begin])
    setting = "spark.sql.session.timeZone"
    before = counted.spark.conf.get(setting)
    counted.spark.conf.set(setting, "America/New_York")
    try:
        frame = apply(
            counted.rows(columns="key,timestamp", extra="timestamp AS at").selectExpr("k", "at").groupBy("k"),
            _zone_and_time,
            "key string, zone string, at timestamp, past array<timestamp>",
            "n long",
            options=counted.options(),
            shards="partitions",
        )
        value = "concat_ws(' ', zone, unix_millis(at), unix_millis(past[0])) AS value"
        counted.run(frame.selectExpr("key", value))
    finally:
        counted.spark.conf.set(setting, str(before))
    assert counted.written() == {"a": f"America/New_York {begin} {begin}"}


def _zone_and_time(batch: KeyedBatch) -> tuple[pa.RecordBatch, pa.StructArray]:
    at = batch.rows.column("at")
    zones = pa.array([at.type.tz] * len(at))
    past = pa.array([[each] for each in at.cast(pa.int64()).to_pylist()], pa.list_(pa.int64()))
    output = pa.record_batch(
        {"key": batch.rows.column("k"), "zone": zones, "at": at, "past": past.cast(pa.list_(at.type))}
    )
    return output, pa.StructArray.from_arrays([pa.array([1] * len(batch.keys))], names=["n"])


@pytest.mark.long
def test_a_topic_that_is_created_again_with_fewer_partitions_stops_the_query(
    counted: Counted, admin: Admin
) -> None:
    counted.feed(ROWS)
    query = counted.start(counted.counts(failOnDataLoss="false"), processingTime="100 milliseconds")
    try:
        await_condition(lambda: len(counted.written()) == KEYS, SECONDS, "the first batch is committed")
        admin.delete(counted.source)
        admin.create(counted.source, PARTITIONS - 1)
        await_condition(lambda: counted.feed(10) is None and not query.isActive, SECONDS, "the query stops")
    finally:
        query.stop()
    assert f"has {PARTITIONS - 1} partitions, but the operator has {PARTITIONS} shards" in str(
        query.exception()
    )


@pytest.mark.timeout(300)
@pytest.mark.fault(
    "T212",
    "the Python process of a task that reads and counts is killed, and the committing process",
    "after one shard of the task is done, and within the transaction",
)
def test_t212_counts_stay_exact_although_processes_are_killed_between_shards(
    counted: Counted, driver: Any, tmp_path: Path
) -> None:
    """Two shards run in one task. When it is killed in the second one, the first one is pending."""
    counted.feed(ROWS, keys=17)
    steps = {
        "state.after_pending": 2,
        "state.after_emit": 1,
        "commit.before_commit": 2,
        "commit.after_commit": 1,
    }
    spec = {
        "sources": [
            {
                "format": "kafka-eos",
                "options": {
                    "kafka.bootstrap.servers": counted.broker,
                    "subscribe": counted.source,
                    "startingOffsets": "earliest",
                    "maxOffsetsPerTrigger": "100",
                },
            }
        ],
        "state": {"options": counted.options(), "shards": "partitions"},
        "sink": {
            "format": "kafka-eos",
            "options": {
                "kafka.bootstrap.servers": counted.broker,
                "application.id": counted.application,
                "topic": counted.sink,
                "checkpointLocation": str(tmp_path / "checkpoint"),
            },
        },
        "restarts": len(steps),
    }
    armed = ",".join(f"{step}=kill-worker*{n}@{tmp_path}/once-{step}" for step, n in steps.items())
    driver(spec, armed).finish()
    assert {path.name.removeprefix("once-") for path in tmp_path.glob("once-*")} == set(steps)
    check_running_counts(counted.wanted, read_back(counted.broker, counted.sink))


def test_arguments_that_cannot_work_are_refused_on_the_driver(counted: Counted, topic: Any) -> None:
    def refused(error: type[Exception], match: str, frame: DataFrame, key: str, **more: Any) -> None:
        with pytest.raises(error, match=match):
            aggregate(
                frame, {"n": agg.count()}, options=counted.options(), key=key, shards="partitions", **more
            )

    refused(InvalidSchemaError, "groups by v; expected the column 'key'", counted.rows(), "v")
    derived = counted.rows().selectExpr("upper(k) AS k")
    refused(InvalidSchemaError, "there can be no other step between", derived, "k")
    refused(InvalidOptionError, r"'minPartitions' \(value 8\)", counted.rows(minPartitions="8"), "k")
    both = counted.rows(subscribe=f"{counted.source},{topic(2)}")
    refused(InvalidOptionError, "different numbers of partitions", both, "k")
    initial = counted.spark.createDataFrame([("k0", 1)], "k string, n long")
    with pytest.raises(InvalidOptionError, match="initial_state is set and shards is 'partitions'"):
        transform(
            counted.rows().groupBy("k"),
            Alarm(1000),
            "key string, value string",
            options=counted.options(),
            shards="partitions",
            initial_state=initial,
        )
    with pytest.raises(InvalidOptionError, match="shards is 'partition'; expected a whole number"):
        counted.counts(shards="partition")  # type: ignore[arg-type]


def test_a_record_without_a_key_stops_the_query_and_names_its_partition(counted: Counted) -> None:
    produce(counted.broker, counted.source, ["v"])
    with pytest.raises(StreamingQueryException, match=r"1 of 1 records in partition \d of the input have no"):
        counted.run(counted.counts())
    assert counted.written() == {}
