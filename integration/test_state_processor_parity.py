"""A processor gives the same results as in Spark's own `transformWithState`, batch by batch.

This covers what Spark's `TwsTester` cannot (see `tests/state/processor/test_parity.py`): watermarks, late
rows, timers in the past, and times to live.
"""

from __future__ import annotations

import datetime as dt
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from pyspark import cloudpickle
from pyspark.sql import DataFrame, SparkSession

from tests.state.processor import scripted_processor
from tests.state.processor.processor_shard import Shard
from tests.state.processor.scripted_processor import INPUT, OUTPUT, Scripted, ops, scripted

pytest.importorskip(
    "google.protobuf", reason="Spark's Python workers talk to their state server with protobuf"
)

Batch = list[tuple[Any, ...]]


def _at(seconds: float) -> dt.datetime:
    return dt.datetime.fromtimestamp(seconds, dt.timezone.utc)


class _Query:
    """A Spark query that is fed one file for each batch."""

    def __init__(self, spark: SparkSession, processor: Scripted, time_mode: str, folder: Path) -> None:
        self._folder = folder / "input"
        self._folder.mkdir()
        self._batches = 0
        self._results: list[Batch] = []
        frame = spark.readStream.schema(INPUT).option("maxFilesPerTrigger", 1).json(str(self._folder))
        if time_mode == "EventTime":
            frame = frame.withWatermark("at", "10 seconds")
        out = frame.groupBy("key").transformWithState(processor, OUTPUT, "update", time_mode)
        writer = out.writeStream.outputMode("update").option("checkpointLocation", str(folder / "checkpoint"))
        self.query = writer.foreachBatch(self._keep).start()

    def _keep(self, frame: DataFrame, batch_id: int) -> None:
        self._results.append([tuple(row) for row in frame.collect()])

    def batch(self, rows: Batch) -> Batch:
        names = ("key", "op", "a", "b", "at")
        lines = [
            json.dumps(dict(zip(names, row, strict=True)), default=dt.datetime.isoformat) for row in rows
        ]
        unseen = self._folder.parent / "next"
        unseen.write_text("\n".join(lines))
        unseen.rename(self._folder / f"{self._batches}.json")
        self._batches += 1
        self.query.processAllAvailable()
        assert len(self._results) == self._batches
        return self._results[-1]


@pytest.fixture
def query(spark: SparkSession, tmp_path: Path) -> Iterator[Callable[..., _Query]]:
    started: list[_Query] = []
    settings = {
        "spark.sql.streaming.stateStore.providerClass": (
            "org.apache.spark.sql.execution.streaming.state.RocksDBStateStoreProvider"
        ),
        "spark.sql.shuffle.partitions": "1",
        # one file per batch, so that both queries run the same batches
        "spark.sql.streaming.noDataMicroBatches.enabled": "false",
    }
    before = {name: spark.conf.get(name, None) for name in settings}
    for name, value in settings.items():
        spark.conf.set(name, value)
    cloudpickle.register_pickle_by_value(scripted_processor)

    def start(processor: Scripted, time_mode: str) -> _Query:
        started.append(_Query(spark, processor, time_mode, tmp_path))
        return started[-1]

    yield start
    for each in started:
        each.query.stop()
    cloudpickle.unregister_pickle_by_value(scripted_processor)
    for name, value in before.items():
        spark.conf.unset(name) if value is None else spark.conf.set(name, value)


def test_watermarks_late_rows_and_event_timers_equal_those_of_spark(query: Callable[..., _Query]) -> None:
    theirs = query(Scripted(clock="getCurrentWatermarkInMs"), "EventTime")
    ours = Shard(scripted("EventTime", event_time="at", delay_ms=10_000), INPUT)
    batches = [
        ops("a", "t.set 5000", "v.update 1", at=_at(100)),
        ops("a", "t.list", "t.set 5000", at=_at(101)) + ops("b", "v.get", at=_at(50)),
        ops("b", "v.get", at=_at(200))
        + ops("c", "l.put 1 2", at=_at(90))
        + ops("d", "v.get", at=_at(90.001)),
        ops("e", "v.get", at=_at(1)) + ops("f", "v.get", at=_at(300)) + ops("n", "v.get"),
        ops("f", "t.set -5", "t.list", at=_at(310)),
        ops("f", "t.list", at=_at(311)),
    ]
    for number, rows in enumerate(batches):
        assert sorted(ours.batch(rows, number)) == sorted(theirs.batch(rows)), f"batch {number}"


def test_state_timers_and_times_to_live_in_processing_time_equal_those_of_spark(
    query: Callable[..., _Query],
) -> None:
    ttl_ms = 1_500
    theirs = query(Scripted(ttl_ms), "ProcessingTime")
    ours = Shard(scripted(ttl_ms=ttl_ms), INPUT)
    reads = ("v.get", "l.get", "m.items", "v.exists", "l.exists", "m.exists")
    batches = [
        ops(
            "a",
            "v.update 1",
            "l.put 1 2",
            "l.append 9",
            "m.put 1 2",
            "m.exists",
            "m.remove 1",
            "m.exists",
            *reads,
        ),
        ops("b", "v.update 2", "v.clear", "m.put 3 4", "m.has 3", *reads),
    ]
    for rows in batches:
        assert sorted(ours.batch(rows, 0)) == sorted(theirs.batch(rows))
    ours.batch(ops("c", "v.update 1", "l.append 1"), 0)
    theirs.batch(ops("c", "v.update 1", "l.append 1"))
    while (found := theirs.batch(ops("c", *reads)))[0][
        2
    ] != "None":  # until Spark's clock has passed the time to live
        assert sorted(found) == sorted(ours.batch(ops("c", *reads), ttl_ms - 1))
    assert sorted(found) == sorted(ours.batch(ops("c", *reads), ttl_ms))
    rows = ops("d", "t.set -5", "t.set 100000")
    (fired,) = (row for row in theirs.batch(rows) if row[1] == "fired")
    past_ms = int(fired[2].split()[0])
    assert fired[2] == f"{past_ms} (None, [{past_ms}, {past_ms + 100_005}])"
    assert fired in ours.batch(rows, past_ms + 5)
