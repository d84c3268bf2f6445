"""Steps of a user between a stateful operator and the sink, which know nothing of its state changes."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import uuid
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import pytest
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as f

from integration.support.kafka import produce, read_back
from kafka_eos_source import map_in_read
from kafka_eos_source.errors import InvalidSchemaError
from kafka_eos_source.spark.changelog_check import check_changelog
from kafka_eos_source.spark.operator_frame import spark_frame
from kafka_eos_source.state import aggregate, deduplicate

ROWS, KEYS = 300, 7


class Counts:
    """A query that counts the rows of each key of a topic."""

    def __init__(self, spark: SparkSession, broker: str, topic: Callable[..., str], folder: Path) -> None:
        self.spark, self.broker, self.folder = spark, broker, folder
        self.source, self.sink = topic(2), topic(2)
        self.application = f"app-{uuid.uuid4().hex[:8]}"
        self.wanted: Counter[str] = Counter()

    def feed(self, rows: int = ROWS) -> None:
        keys = [f"k{row % KEYS}" for row in range(rows)]
        produce(self.broker, self.source, ["x"] * rows, keys=keys)
        self.wanted.update(keys)

    def rows(self, source: str = "") -> DataFrame:
        options = {"kafka.bootstrap.servers": self.broker, "startingOffsets": "earliest"}
        frame = self.spark.readStream.format("kafka-eos").options(**options)
        return frame.option("subscribe", source or self.source).load().selectExpr("CAST(key AS STRING) AS k")

    def counts(self, store: str = "counts", shards: Any = 2, source: str = "") -> DataFrame:
        options = {
            "kafka.bootstrap.servers": self.broker,
            "application.id": self.application,
            "state.dir": str(self.folder / "state"),
        }
        rows = self.rows(source).groupBy("k")
        return aggregate(rows, {"n": "count"}, options=options, shards=shards, store=store)

    def run(self, frame: DataFrame) -> None:
        options = {
            "kafka.bootstrap.servers": self.broker,
            "application.id": self.application,
            "checkpointLocation": str(self.folder / "checkpoint"),
            "topic": self.sink,
        }
        query = frame.writeStream.format("kafka-eos").options(**options).trigger(availableNow=True).start()
        query.awaitTermination()

    def written(self) -> dict[str, int]:
        """Returns the newest count of each key in the output."""
        return {
            (record.key or b"").decode(): int(record.value or b"0")
            for record in read_back(self.broker, self.sink)
        }


@pytest.fixture
def counts(spark: SparkSession, broker: str, topic: Callable[..., str], tmp_path: Path) -> Counts:
    return Counts(spark, broker, topic, tmp_path)


def upper_keys(batches: Iterator[pa.RecordBatch]) -> Iterable[pa.RecordBatch]:
    """Fails for a row without a count, as functions of users do."""
    for batch in batches:
        assert batch.schema.names == ["key", "value"]
        assert not batch.column("value").null_count
        yield pa.record_batch([pc.utf8_upper(batch.column("key")), batch.column("value")], ["key", "value"])


def steps(frame: DataFrame, names: DataFrame) -> DataFrame:
    """Joins, filters, renames and selects; none of it names the column with state changes."""
    joined = frame.join(names, "k", "left").where("name IS NOT NULL AND assert_true(n > 0) IS NULL")
    renamed = joined.withColumnRenamed("k", "key").withColumns({"m": f.col("n") + 1, "gone": f.lit("x")})
    chosen = renamed.drop("gone").select("key", (f.col("m") - 1).alias("n"), f.expr("coalesce(n, 7) AS c"))
    filled = chosen.filter(f.col("c") == f.col("n")).na.drop().fillna(0).alias("a").select("a.key", "n")
    return (
        filled.toDF("key", "count")
        .transform(lambda each: each.where("key <> 'k0'"))
        .selectExpr("key", "CAST(count AS STRING) AS value")
    )


@pytest.mark.core
@pytest.mark.parametrize("shards", [2, "partitions"])
def test_state_survives_what_users_do_with_the_result(counts: Counts, shards: Any) -> None:
    """Two runs: the second one needs the state that the first one committed, and counts on.

    If `where` did not keep rows with state changes, the first batch would fail with STATE_LOST: see
    `test_t436_with_the_where_of_spark_the_same_query_loses_its_state`.
    """
    names = counts.spark.createDataFrame(
        [(f"k{each}", "name") for each in range(KEYS)], "k string, name string"
    )
    for _ in range(2):
        counts.feed()
        counts.run(steps(counts.counts(shards=shards), names))
    assert counts.written() == {key: rows for key, rows in counts.wanted.items() if key != "k0"}


def test_two_operators_a_union_and_functions_on_arrow_data_keep_all_state(
    counts: Counts, topic: Callable[..., str]
) -> None:
    """The second operator of the union would run in tasks of other numbers than its shards have."""
    other = topic(1)
    again = Counter({f"o{each}": each + 1 for each in range(KEYS)})
    keys = [key for key, rows in again.items() for _ in range(rows)]
    for _ in range(2):
        counts.feed()
        produce(counts.broker, other, ["x"] * len(keys), keys=keys)
        first, second = counts.counts("first"), counts.counts("second", source=other, shards=3)
        options = {
            "kafka.bootstrap.servers": counts.broker,
            "application.id": counts.application,
            "state.dir": str(counts.folder / "state"),
        }
        plain = counts.rows(other).where("k = 'never'").selectExpr("k", "0L AS n")
        both = first.union(second.select("k", "n")).unionByName(plain)
        newest = deduplicate(both.selectExpr("k", "concat(k, n) AS id", "n").groupBy("id"), options=options)
        shown = newest.where("n > 0").selectExpr("k AS key", "CAST(n AS STRING) AS value")
        frame = map_in_read(shown.mapInArrow(upper_keys, "key string, value string"), upper_keys)
        check_changelog(frame)
        counts.run(frame)
    wanted = counts.wanted + again + again
    assert counts.written() == {key.upper(): rows for key, rows in wanted.items()}


def in_sql(frame: DataFrame, text: str) -> DataFrame:
    """Returns the result of a query on a temporary view of a frame."""
    frame.createOrReplaceTempView("counted")
    return frame.sparkSession.sql(text)


REFUSED: dict[str, tuple[Callable[[DataFrame], Any], str]] = {
    "limit": (
        lambda each: each.limit(1),
        r"^\[KAFKA_EOS.INVALID_SCHEMA\] limit\(\) after a stateful operator drops",
    ),
    "distinct": (lambda each: each.distinct(), r"distinct\(\).*use deduplicate\(…\)"),
    "agg": (lambda each: each.groupBy("k").agg(f.sum("n")), r"groupBy\(\)\.agg\(\).*use aggregate\(…\)"),
    "count": (lambda each: each.groupBy("k").count(), r"groupBy\(\)\.count\(\)"),
    "join": (lambda each: each.join(each, "k"), r"join\(how='inner'\) with a streaming frame"),
    "coalesce": (lambda each: each.coalesce(1), r"coalesce\(\).*use repartition\(n\)"),
    "explode": (lambda each: each.select(f.explode(f.array("n"))), r"select\(\).*use explode_outer\(\)"),
    "drop": (lambda each: each.drop("__kafka_eos_changelog"), r"drop\(\) names the column"),
    "rename": (
        lambda each: each.withColumnRenamed("__kafka_eos_changelog", "x"),
        r"Renamed\(\) names the column",
    ),
    "mapInPandas": (
        lambda each: each.mapInPandas(lambda x: x, "k string"),
        r"mapInPandas\(\).*use mapInArrow",
    ),
    "view": (
        lambda each: in_sql(each, "SELECT k FROM counted"),
        r"select\(\) or withColumn\(\) after a stateful operator drops the column '__kafka_eos_changelog'",
    ),
    "condition": (
        lambda each: in_sql(each, "SELECT * FROM counted WHERE n > 1"),
        r"where\(\) after a stateful operator drops rows with state changes",
    ),
    "join of Spark": (
        lambda each: each.sparkSession.createDataFrame([("a",)], "k string").join(spark_frame(each), "k"),
        r"join\(\) after a stateful operator drops or repeats rows",
    ),
    "union of Spark": (
        lambda each: (
            each.sparkSession.readStream.format("rate")
            .load()
            .selectExpr(
                "CAST(value AS STRING) AS k", "value AS n", "CAST(NULL AS BINARY) AS __kafka_eos_changelog"
            )
            .union(spark_frame(each))
        ),
        r"union\(\) after a stateful operator moves the shards",
    ),
}


@pytest.mark.core
def test_what_would_lose_state_is_refused_when_the_query_is_built(counts: Counts) -> None:
    """No query starts: without the checks, the loss would be found in the first micro-batch."""
    frame = counts.counts()
    check_changelog(frame)
    for name, (step, message) in REFUSED.items():
        with pytest.raises(InvalidSchemaError) as refused:
            check_changelog(step(frame))
        assert re.search(message, str(refused.value)), name
    kept = "SELECT k AS key, n AS value, __kafka_eos_changelog FROM counted"
    check_changelog(in_sql(frame, f"{kept} WHERE n > 1 OR __kafka_eos_changelog IS NOT NULL"))
    lossy = in_sql(frame, "SELECT * FROM counted WHERE n > 1")
    with pytest.raises(InvalidSchemaError, match=r"where\(\) after a stateful operator"):
        counts.run(frame.unionByName(lossy))
    assert counts.written() == {}


#: A client of Spark Connect, which also shows that a lossy step is refused there.
CONNECT = """
import json, sys
from pyspark.sql import SparkSession, functions as f
from kafka_eos_source.errors import InvalidSchemaError
from kafka_eos_source.spark.operator_frame import spark_frame
from kafka_eos_source.state import aggregate
from integration.test_operator_frames import steps, upper_keys

broker, source, sink, folder = sys.argv[1:]
spark = SparkSession.builder.remote("local[2]").config("spark.sql.shuffle.partitions", "2").getOrCreate()
kafka = {"kafka.bootstrap.servers": broker}
read = {**kafka, "subscribe": source, "startingOffsets": "earliest"}
ours = {**kafka, "application.id": "connect-" + sink}
rows = spark.readStream.format("kafka-eos").options(**read).load().selectExpr("CAST(key AS STRING) AS k")
state = {**ours, "state.dir": folder + "/state"}
counted = aggregate(rows.groupBy("k"), {"n": "count"}, options=state, shards=2)
names = spark.createDataFrame([(f"k{each}", "name") for each in range(7)], "k string, name string")
write = {**ours, "topic": sink, "checkpointLocation": folder + "/checkpoint"}
for step in (
    lambda: counted.limit(1),
    lambda: counted.groupBy("k").count(),
    lambda: counted.select(f.explode(f.array("n"))).writeStream.start(),
    lambda: counted.unionByName(spark_frame(counted).where("n > 1")).writeStream.start(),
):
    try:
        step()
    except InvalidSchemaError as error:
        print("REFUSED", error)
    else:
        raise SystemExit("not refused")
result = steps(counted, names).mapInArrow(upper_keys, "key string, value string")
query = result.writeStream.format("kafka-eos").options(**write).trigger(availableNow=True).start()
assert query.awaitTermination(180)
spark.stop()
"""


@pytest.mark.long
def test_state_survives_the_same_steps_over_spark_connect(counts: Counts) -> None:
    pytest.importorskip("grpc")
    environment = {name: value for name, value in os.environ.items() if name != "PYSPARK_SUBMIT_ARGS"}
    arguments = [counts.broker, counts.source, counts.sink, str(counts.folder)]
    for _ in range(2):
        counts.feed()
        finished = subprocess.run(
            [sys.executable, "-c", CONNECT, *arguments],
            capture_output=True,
            text=True,
            timeout=240,
            check=False,
            env=environment,
        )
        assert finished.returncode == 0, finished.stderr[-3000:]
        assert finished.stdout.count("REFUSED") == 4, finished.stdout
    assert counts.written() == {key.upper(): rows for key, rows in counts.wanted.items() if key != "k0"}
