"""What a program prints on a real JVM: each error once, and warnings that need action, but nothing else."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from integration.support.kafka import produce

_PROGRAM = """
import sys
from pyspark import SparkContext
from pyspark.sql import SparkSession
from kafka_eos_source import quiet_logs

if sys.argv[1] == "before":
    quiet_logs()
builder = SparkSession.builder.master("local[1]").config("spark.ui.enabled", "false")
spark = builder.config("spark.driver.host", "127.0.0.1").getOrCreate()
if sys.argv[1] == "after":
    print("-- started", file=sys.stderr, flush=True)
    quiet_logs()
logger = SparkContext._jvm.org.apache.logging.log4j.LogManager.getLogger
logger("org.apache.spark.sql.execution.streaming.X").warn("a warning that nobody needs")
logger("org.apache.spark.sql.execution.streaming.X").error("an error")
logger("org.apache.spark.scheduler.TaskSchedulerImpl").warn("no executor accepts tasks")


def task(batches):
    import logging

    logger = logging.getLogger("kafka_eos_source.read")
    logger.warning("a warning of this package")
    yield from batches


spark.range(1).mapInArrow(task, "id LONG").collect()
spark.stop()
"""


@pytest.mark.parametrize("moment", ["before", pytest.param("after", marks=pytest.mark.long)])
def test_only_lines_that_need_action_are_printed(moment: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("SPARK_SUBMIT_OPTS", raising=False)
    done = subprocess.run(
        [sys.executable, "-c", _PROGRAM, moment], capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, done.stderr
    printed = done.stderr if moment == "before" else done.stderr.split("-- started\n")[1]
    assert "an error" in printed
    assert "no executor accepts tasks" in printed
    assert "a warning of this package" in printed
    assert "nobody needs" not in printed
    if moment == "before":  # nor does Spark print anything while it starts
        warnings = [line for line in printed.splitlines() if " WARN " in line]
        assert len(warnings) == 1, printed
        assert "default log" not in printed
        assert "incubator modules" not in printed


#: Stops a query in the middle of a batch, then runs one that meets a bad record, without `quiet_logs`.
_FAILS = """
import sys
from kafka_eos_source import App

servers, orders, bad, revenue, folder = sys.argv[1:]
app = App("quiet-" + revenue, servers, checkpoint=folder)


def start(app, topic):
    frame = app.read(topic, schema="id INT", options={"maxOffsetsPerTrigger": "1"})
    return app.write(frame, revenue).start()


query = start(app.query("stopped"), orders)
while not query.recentProgress or not query.status["isTriggerActive"]:
    assert query.isActive
print("-- stopping", file=sys.stderr, flush=True)
query.stop()
print("-- stopped", file=sys.stderr, flush=True)
start(app.query("failing"), bad).awaitTermination()
"""


@pytest.mark.parametrize("shows_all", [False, pytest.param(True, marks=pytest.mark.long)])
def test_a_query_that_is_stopped_prints_nothing_and_one_that_fails_its_error_once(
    broker: str, topic: Callable[..., str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, shows_all: bool
) -> None:
    monkeypatch.delenv("SPARK_SUBMIT_OPTS", raising=False)
    monkeypatch.setenv("KAFKA_EOS_QUIET_LOGS", str(not shows_all))
    orders, bad, revenue = topic(), topic(), topic()
    produce(broker, orders, [f'{{"id": {number}}}' for number in range(300)])
    produce(broker, bad, ['{"id": "x"}'])
    program = tmp_path / "job.py"
    program.write_text(_FAILS)
    done = subprocess.run(
        [sys.executable, str(program), broker, orders, bad, revenue, str(tmp_path / "checkpoint")],
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
    )
    assert (done.returncode, done.stdout) == (1, ""), done.stderr
    if shows_all:
        assert "\tat org.apache.spark" in done.stderr
        assert "=== Streaming Query ===" in done.stderr
        return
    before, rest = done.stderr.split("-- stopping\n")
    while_stopping, failed = rest.split("-- stopped\n")
    assert while_stopping == ""
    # Spark warns while a busy machine lets no task begin for 15 s
    hint, *more = [
        line for line in before.splitlines() if "Initial job has not accepted any resources" not in line
    ]
    assert more == []
    assert "KAFKA_EOS_QUIET_LOGS=false shows everything" in hint
    lines = failed.splitlines()
    assert len(lines) <= 7, failed
    (error,) = [line for line in lines if "[KAFKA_EOS.INVALID_RECORD]" in line]
    assert error.startswith("kafka_eos_source.errors.InvalidRecordError: ")
    assert "Fix: " in error
    assert f"Query quiet-{revenue}-failing" in failed
    assert "start(app.query" in failed, "the line of the user"
    assert lines[-1].endswith("ended with InvalidRecordError, which the log above shows.")
