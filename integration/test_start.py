"""`recommended_settings` on a real session: the class archive of its JVM, and the daemon of its workers."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from integration.support.kafka import produce, read_back, values
from kafka_eos_source.spark import class_archive

_SESSION = """
import json
import sys
from pyspark.sql import SparkSession
from pyspark.sql import functions as f
from kafka_eos_source import local_checkpoints, recommended_settings

builder = SparkSession.builder.master("local[2]").config("spark.ui.enabled", "false")
builder = builder.config("spark.driver.host", "127.0.0.1").config("spark.sql.shuffle.partitions", "2")
spark = builder.config(map={**local_checkpoints(), **recommended_settings()}).getOrCreate()
spark.sparkContext.setLogLevel("ERROR")
jvm = spark.sparkContext._gateway.jvm.java.lang.ProcessHandle.current().pid()
options = open(f"/proc/{jvm}/cmdline").read().split("\\0")
assert "-XX:CompileThresholdScaling=5" in options, options
mapped = {line.split()[-1] for line in open(f"/proc/{jvm}/maps")}
print(json.dumps(sorted(path for path in mapped if path.endswith(".jsa"))))
"""
_QUERY = """
broker, source, sink, checkpoint = sys.argv[1:]


@f.udf("string")
def worker(_):
    import sys
    from kafka_eos_source.spark.worker_daemon import MODULES

    # the daemon is the main module of the processes that it forks
    daemon = sys.modules["__main__"].__spec__.name
    return json.dumps([daemon, sorted(set(MODULES) - set(sys.modules))])


@f.pandas_udf("long")
def doubled(numbers):
    return numbers * 2


# this session has run no query of kafka-eos yet, so only the daemon can have imported its modules
found = spark.range(2).select(worker("id")).collect()
print(json.dumps([json.loads(row[0]) for row in found]))
print(json.dumps([row[0] for row in spark.range(3).select(doubled("id")).collect()]))

rows = spark.readStream.format("kafka-eos").option("kafka.bootstrap.servers", broker)
rows = rows.option("subscribe", source).option("startingOffsets", "earliest").load()
rows = rows.withColumn("value", f.udf(lambda value: value.decode().upper())("value"))
query = rows.select("key", "value").writeStream.format("kafka-eos")
query = query.option("kafka.bootstrap.servers", broker).option("topic", sink)
query.option("checkpointLocation", checkpoint).trigger(availableNow=True).start().awaitTermination()
spark.stop()
"""


@pytest.fixture
def archive(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The class archive in the cache folder of a user: the one of ``./dev`` if there is one, or a new one."""
    options = os.environ.get("PYSPARK_SUBMIT_ARGS", "")
    monkeypatch.delenv("PYSPARK_SUBMIT_ARGS", raising=False)
    monkeypatch.setenv("KAFKA_EOS_CACHE", str(tmp_path / "cache"))
    existing = re.search(r"-XX:SharedArchiveFile=(\S+)", options)
    path = class_archive.archive_path()
    assert path is not None
    if existing is None or not Path(existing[1]).with_suffix(".size").exists():
        return class_archive.write()
    path.parent.mkdir()
    for suffix in (".jsa", ".size"):
        shutil.copyfile(Path(existing[1]).with_suffix(suffix), path.with_suffix(suffix))
    return path


def run(program: str, *arguments: str) -> list[str]:
    """Runs a program, and returns the lines that it and its JVM print."""
    done = subprocess.run(
        [sys.executable, "-c", program, *arguments],
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert "archive" not in done.stderr
    return done.stdout.splitlines()


def test_the_jvm_maps_the_archive_and_workers_are_forked_from_a_daemon_that_has_imported_kafka_eos(
    archive: Path, broker: str, topic: Callable[..., str], checkpoint: str
) -> None:
    source, sink = topic(2), topic(2)
    produce(broker, source, [f"row-{number}" for number in range(200)])
    mapped, workers, doubled = map(json.loads, run(_SESSION + _QUERY, broker, source, sink, checkpoint))
    assert str(archive) in mapped
    assert workers == [["kafka_eos_source.spark.worker_daemon", []]] * 2
    assert doubled == [0, 2, 4]  # other Python functions run in such workers too, and may import pandas
    assert values(read_back(broker, sink)) == sorted(f"ROW-{number}" for number in range(200))


@pytest.mark.parametrize("damage", [pytest.param("cut", marks=pytest.mark.long), "header"])
def test_a_session_starts_without_an_archive_that_is_damaged(damage: str, archive: Path) -> None:
    content = archive.read_bytes()
    archive.write_bytes(content[: len(content) // 2] if damage == "cut" else bytes(4096) + content[4096:])
    (mapped,) = map(json.loads, run(_SESSION))
    assert str(archive) not in mapped
