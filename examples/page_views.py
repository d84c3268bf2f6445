"""Counts page views per category in windows of 5 seconds, although views arrive out of order.

The application of Fig. 2 in "Consistency and Completeness: Rethinking Distributed Stream Processing in Apache
Kafka" (SIGMOD 2021), on Spark: it reads ``pageview-events``, drops views shorter than 30 seconds, counts the
others by category and window, and writes each revised count to ``pageview-windowed-counts``. A second query
writes each window's final count once to ``pageview-final-counts``, when the window's grace period is over.

    python examples/page_views.py                                      # starts a broker
    python examples/page_views.py --bootstrap-servers 127.0.0.1:9092

The program sends some views, lets both queries process them, prints the results, and repeats this.
"""

from __future__ import annotations

import argparse
import contextlib
import datetime as dt
import json
import tempfile
import uuid
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import pyarrow as pa
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F
from pyspark.sql.streaming.query import StreamingQuery

from kafka_eos_source.demo.query import session
from kafka_eos_source.embedded import EmbeddedKafka
from kafka_eos_source.kafka.playground import create_topics, read_back
from kafka_eos_source.state import aggregate, tumbling
from kafka_eos_source.state.reading.query import StateQuery

SHORTEST_MS, WINDOW_MS, GRACE_MS = 30_000, 5_000, 10_000
#: As in the paper: partitions of the source; partitions of the output, which is also the number of shards.
PARTITIONS, SHARDS = 2, 3
STORE = "counts"


def windowed_counts(events: DataFrame, emit: str, options: Mapping[str, str]) -> DataFrame:
    """Returns the query. The event time of a view is its record's timestamp.

    Args:
        events: the records of ``pageview-events``.
        emit: ``on_update`` or ``on_close``.
        options: the operator's options, with the same Kafka connection as the sink's.
    """
    views = (
        events.select(
            F.from_json(F.col("value").cast("string"), "category STRING, period_ms BIGINT").alias("view"),
            "timestamp",
        )
        .select("view.*", "timestamp")
        .where(F.col("period_ms") >= SHORTEST_MS)
    )
    counts = aggregate(
        views.groupBy("category"),
        {"views": F.count("*")},
        window=tumbling(f"{WINDOW_MS}ms", on="timestamp", grace=f"{GRACE_MS}ms"),
        emit=emit,
        store=STORE,
        shards=SHARDS,
        options=options,
    )
    return counts.selectExpr(
        "concat(category, '@', unix_millis(window_start)) AS key",
        "to_json(struct(category, unix_millis(window_start) AS window_start_ms, views)) AS value",
    )


@dataclass(frozen=True)
class Application:
    """One of the two queries.

    Attributes:
        servers: bootstrap servers of the cluster.
        events: the topic that the query reads.
        output: the topic that the query writes; also its ``application.id``.
        emit: ``on_update`` or ``on_close``.
        folder: folder for its checkpoint and its state.
    """

    servers: str
    events: str
    output: str
    emit: str
    folder: Path

    @property
    def options(self) -> dict[str, str]:
        """Returns the operator's options."""
        return {
            "kafka.bootstrap.servers": self.servers,
            "application.id": self.output,
            "state.dir": str(self.folder / self.output / "state"),
        }

    @property
    def checkpoint(self) -> Path:
        return self.folder / self.output / "checkpoint"

    def start(
        self, spark: SparkSession, *, reading: Mapping[str, str] | None = None, **trigger: Any
    ) -> StreamingQuery:
        """Starts the query; ``reading`` holds more options of the source."""
        events = (
            spark.readStream.format("kafka-eos")
            .option("kafka.bootstrap.servers", self.servers)
            .option("subscribe", self.events)
            .option("startingOffsets", "earliest")
            .options(**(reading or {}))
            .load()
        )
        writer = (
            windowed_counts(events, self.emit, self.options)
            .writeStream.format("kafka-eos")
            .option("kafka.bootstrap.servers", self.servers)
            .option("application.id", self.output)
            .option("topic", self.output)
            .option("checkpointLocation", str(self.checkpoint))
        )
        return (writer.trigger(**trigger) if trigger else writer).start()

    def late_views(self) -> int:
        """Returns how many views were dropped because their window was closed, read from the state."""
        kafka = {"kafka.bootstrap.servers": self.servers}
        with StateQuery(self.output, STORE, kafka=kafka) as state:
            return state.counts.get("late_rows", 0)


class View(NamedTuple):
    """Somebody looked at a page of ``category`` for ``period_ms``."""

    second: int
    category: str
    period_ms: int = 45_000


#: Views that are sent together, with the reason.
STEPS: Sequence[tuple[str, list[View]]] = [
    ("three views, one of them too short", [View(1, "books"), View(2, "music"), View(3, "books", 10_000)]),
    ("time goes on", [View(6, "books"), View(8, "music")]),
    ("out of order: a view of the first window", [View(4, "books")]),
    ("time goes on", [View(12, "books"), View(13, "music")]),
    ("out of order by more than a window, and in time still", [View(3, "music")]),
    ("the grace of the first window ends at 12:00:15", [View(16, "books"), View(17, "music")]),
    ("a view of the first window: too late", [View(2, "books")]),
    ("time goes on: all that is older is complete", [View(40, "books"), View(41, "music")]),
]


def main(servers: str, suffix: str, folder: Path) -> None:
    """Runs both queries through all `STEPS`."""
    events = f"pageview-events{suffix}"
    updates, final = (
        Application(servers, events, f"{output}{suffix}", emit, folder)
        for output, emit in (
            ("pageview-windowed-counts", "on_update"),
            ("pageview-final-counts", "on_close"),
        )
    )
    create_topics(servers, {events: PARTITIONS, updates.output: SHARDS, final.output: SHARDS})
    spark = session("page views")
    queries = []
    for application in (updates, final):
        queries.append(application.start(spark, processingTime="100 milliseconds"))
        queries[-1].processAllAvailable()  # waits until the query runs
    revised: dict[str, int] = {}
    seen: Counter[tuple[str, str]] = Counter()
    late = 0
    for why, views in STEPS:
        print(f"\n{why}")
        for view in views:
            print(f"    {_time(view.second)}  {view.category}, looked at for {view.period_ms // 1000} s")
        send(spark, servers, events, views)
        for query in queries:
            query.processAllAvailable()
        for topic, value in new_results(servers, (updates.output, final.output), seen):
            result = json.loads(value)
            start = result["window_start_ms"]
            window = f"{_clock(start)} to {_clock(start + WINDOW_MS)}  {result['category']}"
            was = revised.get(window)
            if topic == updates.output:
                revised[window] = result["views"]
            said = "complete" if topic == final.output else "new" if was is None else f"revised, was {was}"
            print(f"  → {window}  {result['views']}  {said}")
        before, late = late, updates.late_views()
        if late > before:
            print(f"  → dropped and counted: {late - before} view")
    for query in queries:
        query.stop()
    spark.stop()
    print(f"\n{seen.total()} results, {late} late view dropped")


#: 12:00:00 of yesterday, because a broker refuses records from the future and soon deletes old ones.
NOON = dt.datetime.combine(
    dt.datetime.now(dt.timezone.utc).date() - dt.timedelta(days=1), dt.time(12), dt.timezone.utc
)


def send(spark: SparkSession, servers: str, topic: str, views: Sequence[View]) -> None:
    """Sends views in one transaction; returns when queries can read them."""
    table = pa.table(
        {
            "key": [f"user-{view.second}" for view in views],
            "value": [json.dumps({"category": v.category, "period_ms": v.period_ms}) for v in views],
            "timestamp": [NOON + dt.timedelta(seconds=view.second) for view in views],
        }
    )
    (
        spark.createDataFrame(table)
        .write.format("kafka-eos")
        .mode("append")
        .option("kafka.bootstrap.servers", servers)
        .option("topic", topic)
        .option("includeTimestamp", "true")
        .save()
    )
    # Kafka answers a commit a moment before the records can be read, for which this waits
    list(read_back(servers, {topic: PARTITIONS}))


def new_results(servers: str, topics: Sequence[str], seen: Counter[tuple[str, str]]) -> list[tuple[str, str]]:
    """Returns topic and value of records that are not yet in ``seen``, and adds them to it."""
    now = Counter(
        (topic, value.decode()) for topic, value in read_back(servers, dict.fromkeys(topics, SHARDS))
    )
    new = now - seen
    seen.update(new)
    return sorted(new.elements(), key=lambda each: (topics.index(each[0]), each[1]))


def _clock(ms: int) -> str:
    return f"{dt.datetime.fromtimestamp(ms / 1000, dt.timezone.utc):%H:%M:%S}"


def _time(second: int) -> str:
    return f"{NOON + dt.timedelta(seconds=second):%H:%M:%S}"


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--bootstrap-servers", help="a Kafka of your own; topics get new names there")
    given = parser.parse_args().bootstrap_servers
    with contextlib.ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="page-views-")))
        if given:
            main(given, f"-{uuid.uuid4().hex[:6]}", folder)
        else:
            main(stack.enter_context(EmbeddedKafka()).bootstrap_servers, "", folder)
