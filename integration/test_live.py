"""The live figures of real queries, as ``kafka-eos top`` and ``lastProgress`` show them."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from pyspark.sql import SparkSession

from integration.support import broker as brokers
from integration.support.driver import Driver
from integration.support.kafka import Admin, end_offsets, produce, read_back, values
from integration.support.processes import await_condition
from integration.support.query import Query
from integration.support.sink_stream import LOOP, rows, spec, without_spark
from kafka_eos_source.cli import main
from kafka_eos_source.embedded import EmbeddedKafka
from kafka_eos_source.observe.source import figures_in

SECONDS = 120


def top(*arguments: str) -> dict[str, Any]:
    """Returns what ``kafka-eos top --json`` shows of one query; {} if it shows an error."""
    result = CliRunner().invoke(main, ["top", "--once", "--json", *arguments])
    assert result.exception is None or isinstance(result.exception, SystemExit), result.exception
    return dict(json.loads(result.stdout)) if result.exit_code == 0 else {}


def await_shown(arguments: list[str], wanted: Callable[[dict[str, Any]], bool], what: str) -> dict[str, Any]:
    """Waits until ``kafka-eos top`` shows something, and returns it."""
    shown: dict[str, Any] = {}

    def is_shown() -> bool:
        shown.clear()
        shown.update(top(*arguments))
        return bool(shown) and wanted(shown)

    await_condition(is_shown, SECONDS, what)
    return shown


def test_figures_are_those_of_the_query(
    spark: SparkSession, broker: str, topic: Callable[..., str], checkpoint: str, tmp_path: Path
) -> None:
    """The source does not know the query's name: its figures are found by the positions that it planned."""
    query = Query(spark, broker, topic(2), topic(2), checkpoint)
    produce(broker, query.source, rows(0, 300))
    options = {
        "sinks": "files",
        "sink__files__type": "filesystem",
        "sink__files__path": str(tmp_path / "files"),
    }
    query.run(query.frame(maxOffsetsPerTrigger="100"), **options)
    # Spark kills the source's process a moment after the query
    shown = await_shown(
        ["--checkpoint", checkpoint], lambda found: found["status"] == "stopped", "the end of the query"
    )
    totals = shown["totals"]
    offsets = sum(end_offsets(broker, query.source).values())
    assert (totals["records"], totals["offsets_read"]) == (300, offsets)
    assert totals["committed"] == totals["transactions"] == totals["batches"] + 1, "and the genesis token"
    assert shown["sinks"]["files"]["rows"] == 300
    assert shown["sinks"]["files"]["prepared"] == shown["sinks"]["files"]["committed"] == totals["batches"]
    assert [each["outcome"] for each in shown["batches"]] == ["committed"] * totals["batches"]
    assert all({"tasks", "write", "commit", "sinks"} <= set(each["seconds"]) for each in shown["batches"])
    assert shown["sequence"] == totals["committed"] - 1

    query.forget_commit(shown["batches"][-1]["batch_id"])
    query.run(query.frame(), **options)
    again = top(query.application_id)
    assert (again["totals"]["skipped"], again["totals"].get("records", 0)) == (1, 0)
    assert again["run_id"] != shown["run_id"]


def test_figures_of_a_running_query_reach_last_progress(
    spark: SparkSession, broker: str, topic: Callable[..., str], checkpoint: str
) -> None:
    """What Spark Connect passes on: the offsets are where they were, and there is one more key."""
    pytest.importorskip("pyspark.sql.streaming.datasource")
    query = Query(spark, broker, topic(1), topic(1), checkpoint)
    named = [f"app-{query.sink}"]
    running = (
        query.frame()
        .selectExpr("key", "value")
        .writeStream.format("kafka-eos")
        .options(**{"kafka.bootstrap.servers": broker, "topic": query.sink, "application.id": named[0]})
        .option("checkpointLocation", checkpoint)
        .start()
    )
    try:
        for first in (0, 20, 40):
            produce(broker, query.source, rows(first, first + 20))
            running.processAllAvailable()
        shown = await_shown(named, lambda each: each["status"] == "waiting for data", "the query is idle")
        assert shown["totals"]["records"] == 60
        assert shown["lag"][query.source] == {
            "offsets": 0,
            "seconds": 0.0,
            "at_least": False,
            "partitions": {"0": 0},
        }
        (source,) = json.loads(running.lastProgress.json)["sources"]  # type: ignore[union-attr]
        latest = source["latestOffset"]
        latest = json.loads(latest) if isinstance(latest, str) else latest
        assert latest[query.source] == {"0": 60}
        figures = figures_in(latest)
        assert figures is not None
        assert figures.query_id == str(running.id)
        assert figures.totals["records"] in (40, 60), "as of the batch before, or this one"
        assert len(json.dumps(latest)) < 3000
    finally:
        running.stop()
    await_shown(named, lambda each: each["status"] == "stopped", "the query has stopped")


#: A client of Spark Connect that cannot read the files of the driver. It prints the view as JSON.
CONNECT = """
import json, sys, tempfile
from pyspark.sql import SparkSession
from integration.support.kafka import produce
from kafka_eos_source.datasource.checks_on_server import check_on_server
from kafka_eos_source.observe.notebook import view_of

broker, source, sink, folder = sys.argv[1:]
spark = SparkSession.builder.remote("local[2]").getOrCreate()
tempfile.tempdir = folder
kafka = {"kafka.bootstrap.servers": broker}
read = {"subscribe": source, "startingOffsets": "earliest"}
frame = spark.readStream.format("kafka-eos").options(**kafka, **read).load().selectExpr("key", "value")
write = {"topic": sink, "checkpointLocation": folder + "/checkpoint"}
parts = [{**kafka, **read}], {}, {**kafka, **write}
checked = check_on_server(spark, *parts, frame.schema)
try:
    check_on_server(spark, *parts[:2], {**parts[2], "topic": sink[:-1]}, frame.schema)
except Exception as error:
    refused = str(error)
query = frame.writeStream.format("kafka-eos").options(**kafka, **write).start()
for number in range(4):
    produce(broker, source, [str(number)] * 10)
    query.processAllAvailable()
found, runs = view_of(query)
query.stop()
ended, _ = view_of(query)
print("VIEW", json.dumps({**found.to_json(), "runs": runs, "ended": ended.status.value, "refused": refused,
    "checked": checked}), flush=True)
spark.stop()
"""


@pytest.mark.long
def test_the_figures_arrive_over_spark_connect(
    broker: str, topic: Callable[..., str], tmp_path: Path
) -> None:
    pytest.importorskip("grpc")
    environment = {name: value for name, value in os.environ.items() if name != "PYSPARK_SUBMIT_ARGS"}
    finished = subprocess.run(
        [sys.executable, "-c", CONNECT, broker, topic(), topic(), str(tmp_path)],
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
        env=environment,
    )
    (line,) = [line for line in finished.stdout.splitlines() if line.startswith("VIEW ")] or [finished.stderr]
    shown = json.loads(line.removeprefix("VIEW "))
    assert shown["runs"]
    assert shown["ended"] == "stopped"
    assert shown["totals"]["records"] in (30, 40), "as of the batch before, or the last one"
    assert shown["totals"]["committed"] == shown["totals"]["batches"] + 1
    assert {"tasks", "write", "commit"} <= set(shown["batches"][-1]["seconds"])
    assert sum(each["offsets"] for each in shown["lag"].values()) == 0
    # the server, which reaches the brokers, checked the query before its start
    assert shown["checked"] == []
    assert "does not exist" in shown["refused"]


@pytest.mark.long
@pytest.mark.fault("T110", "the broker is gone in the middle of a commit", "commit")
@pytest.mark.fault("T111", "the driver is killed while a commit waits", "commit")
def test_a_commit_that_waits_says_for_what_and_recovers(
    driver: Callable[..., Driver], checkpoint: str, tmp_path: Path
) -> None:
    with EmbeddedKafka(java_options=brokers.JAVA_OPTIONS) as kafka:
        admin = Admin(kafka.bootstrap_servers)
        source, sink = admin.create("in", 1), admin.create("out", 1)
        produce(kafka.bootstrap_servers, source, rows(0, 300))
        once = tmp_path / "once"
        plan = without_spark(spec(kafka.bootstrap_servers, source, sink, checkpoint, 100))
        name = [f"live-{os.getpid()}-{tmp_path.name}"]
        plan["sink"]["application.id"] = name[0]
        running = driver(plan, f"commit.before_commit=stop@{once}", module=LOOP)
        await_condition(once.exists, SECONDS, "the driver is inside its transaction")
        kafka.kill_node(1)
        running.resume()

        def waits(shown: dict[str, Any]) -> bool:
            return shown["status"] in ("waiting", "retrying")

        shown = await_shown(name, waits, "the commit waits")
        assert shown["status_text"].startswith("batch 0: ")
        shown = await_shown(name, lambda each: "refused" in each["status_text"], "the reason")
        running.kill()
        shown = await_shown(name, lambda each: not waits(each), "a dead commit does not wait")
        assert shown["status"] == "stopped"
        kafka.start_node(1)
        driver(plan, module=LOOP).finish()
        shown = top(*name)
        assert shown["totals"]["records"] + shown["totals"].get("skipped", 0) * 100 == 300
        assert values(read_back(kafka.bootstrap_servers, sink)) == rows(0, 300)
