"""`quiet_logs` on a real JVM: errors and warnings that need action are printed, others are not."""

from __future__ import annotations

import subprocess
import sys

import pytest

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
