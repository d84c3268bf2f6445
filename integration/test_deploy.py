"""The programs of the deployment pages work as they are started there."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pyspark
import pytest

from integration.support.kafka import produce, read_back
from integration.support.processes import await_condition
from kafka_eos_source.embedded.cluster import free_ports
from tests.support.doc_pages import ROOT, blocks

VALUES = [f"{number:03d}" for number in range(100)]
SECONDS = 240.0

pytestmark = [pytest.mark.long, pytest.mark.timeout(600)]


def program(page: str, language: str = "python") -> str:
    """Returns the only block of a deployment page in a language."""
    (block,) = (each for each in blocks(ROOT / "docs" / f"{page}.md") if each.language == language)
    assert block.mark is not None
    assert block.mark.detail == f"integration/{Path(__file__).name}"
    return block.code


@pytest.fixture
def topics(broker: str, topic: Callable[..., str]) -> tuple[str, str]:
    """Returns a topic with records, and an empty one."""
    source, output = topic(2), topic(2)
    produce(broker, source, VALUES, keys=VALUES)
    return source, output


@contextmanager
def running(command: list[str], folder: Path, **environment: str) -> Iterator[Path]:
    """Runs a command in a process group of its own, and yields its log; ends the group."""
    log = folder / f"{Path(command[-1]).name or 'command'}.log"
    with log.open("wb") as out:
        process = subprocess.Popen(
            command,
            cwd=folder,
            env={**os.environ, "PYSPARK_PYTHON": sys.executable, "PYTHONPATH": str(ROOT), **environment},
            stdout=out,
            stderr=out,
            start_new_session=True,
        )
    try:
        yield log
    finally:
        os.killpg(process.pid, signal.SIGTERM)
        process.wait(60)


def adapted(code: str, broker: str, topics: tuple[str, str], folder: Path) -> str:
    for old, new in (
        ('"flights"', f'"{topics[0]}"'),
        ('"delays"', f'"{topics[1]}"'),
        ("127.0.0.1:9092", broker),
        ("/data", str(folder)),
    ):
        code = code.replace(old, new)
    return code


def await_values(broker: str, topic: str, log: Path) -> None:
    """Waits until a topic has the values, each once."""

    def arrived() -> bool:
        return len(read_back(broker, topic)) >= len(VALUES)

    try:
        await_condition(arrived, SECONDS, f"{topic} has the records")
    except AssertionError as error:
        raise AssertionError(log.read_text(errors="replace")[-6000:]) from error
    assert sorted((record.value or b"").decode() for record in read_back(broker, topic)) == VALUES


@pytest.mark.parametrize("master", ["local[2]", "local-cluster[2,1,1024]"])
@pytest.mark.usefixtures("own_spark_home")
def test_spark_submit(
    broker: str, topics: tuple[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, master: str
) -> None:
    monkeypatch.delenv("PYSPARK_DRIVER_PYTHON", raising=False)
    monkeypatch.delenv("PYSPARK_SUBMIT_ARGS", raising=False)
    job = tmp_path / "job.py"
    job.write_text(adapted(program("deploy-spark-submit"), broker, topics, tmp_path))
    submit = str(Path(pyspark.__file__).parent / "bin" / "spark-submit")
    checkpoint = str(tmp_path / "checkpoint")
    command = [submit, "--master", master, str(job), broker, checkpoint]
    with running(command, tmp_path) as log:
        await_values(broker, topics[1], log)


#: A program of a client that aggregates in Spark's words, and is refused a watermark; then with an App, which
#: lets the server check the query.
WORDS = """
from pyspark.sql import SparkSession, functions as F
from kafka_eos_source import App
from kafka_eos_source.errors import InvalidOptionError, KafkaEosError
from kafka_eos_source.state import aggregate

spark = SparkSession.builder.remote("sc://127.0.0.1:15002").getOrCreate()
kafka = {"kafka.bootstrap.servers": "127.0.0.1:9092"}
rows = (
    spark.readStream.format("kafka-eos")
    .options(**kafka, subscribe="flights", startingOffsets="earliest")
    .load()
    .selectExpr("'all' AS k", "CAST(CAST(value AS STRING) AS INT) AS n", "timestamp")
)
words = {"odd": F.count_if(rows["n"] % 2 == 1), "n": "count(*)", "twice": F.sum(F.col("n") * 2)}
own = {**kafka, "application.id": "words", "state.dir": "/data/state"}
try:
    aggregate(rows.withWatermark("timestamp", "1 minute").groupBy("k"), words, options=own)
except InvalidOptionError as error:
    assert "grace='1 minute'" in str(error), error
else:
    raise SystemExit("a watermark was accepted")
counted = aggregate(rows.groupBy("k"), words, options=own, shards=1)
query = (
    counted.selectExpr("k AS key", "to_json(struct(odd, n, twice)) AS value")
    .writeStream.format("kafka-eos").trigger(availableNow=True)
    .options(**kafka, **{"application.id": "words"}, topic="delays", checkpointLocation="/data/words")
    .start()
)
query.awaitTermination()
written = spark.read.format("kafka-eos").options(**kafka, subscribe="delays").load().orderBy("offset")
print("These are the totals:" + written.selectExpr("CAST(value AS STRING) AS v").collect()[-1].v, flush=True)

app = App("app", "127.0.0.1:9092", checkpoint="/data/app", options={"state.dir": "/data/state"}, spark=spark)
numbers = app.read("flights").selectExpr("'all' AS k", "CAST(CAST(value AS STRING) AS INT) AS n")
counts = app.aggregate(numbers.groupBy("k"), numbers=F.count("*"), shards=1)
try:
    app.write(counts, "delys", key="k")
except KafkaEosError as error:
    print("This is the mistake:" + str(error).splitlines()[0], flush=True)
query = app.write(counts.where("numbers > 0"), "delays", key="k").trigger(availableNow=True).start()
query.awaitTermination()
written = spark.read.format("kafka-eos").options(**kafka, subscribe="delays").load().orderBy("offset")
print("This is the App:" + written.selectExpr("CAST(value AS STRING) AS v").collect()[-1].v, flush=True)
"""


def test_spark_connect(
    broker: str,
    topics: tuple[str, str],
    topic: Callable[..., str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    pytest.importorskip("pyspark", minversion="4.1")
    pytest.importorskip("grpc")
    monkeypatch.delenv("PYSPARK_DRIVER_PYTHON", raising=False)
    monkeypatch.delenv("PYSPARK_SUBMIT_ARGS", raising=False)
    (port,) = free_ports([0])
    start = str(Path(pyspark.__file__).parent / "sbin" / "start-connect-server.sh")
    options = ["--master", "local[2]", "--conf", f"spark.connect.grpc.binding.port={port}"]
    code = adapted(program("deploy-spark-connect"), broker, topics, tmp_path).replace("15002", str(port))
    client = tmp_path / "client.py"
    client.write_text(f"{code}\nquery.awaitTermination()\n")
    with running([start, "--wait", *options], tmp_path) as server:
        await_condition(
            lambda: "Spark Connect server started" in server.read_text(errors="replace"),
            SECONDS,
            "it started",
        )
        with running([sys.executable, str(client)], tmp_path) as log:
            await_values(broker, topics[1], log)
        words = tmp_path / "words.py"
        words.write_text(adapted(WORDS, broker, (topics[0], topic()), tmp_path).replace("15002", str(port)))
        with running([sys.executable, str(words)], tmp_path) as log:
            done = "This is the App:"
            await_condition(lambda: done in log.read_text(errors="replace"), SECONDS, "the App has ended")

        def told(what: str) -> str:
            return log.read_text(errors="replace").partition(what)[2].splitlines()[0]

        assert json.loads(told("These are the totals:")) == {
            "odd": 50,
            "n": 100,
            "twice": 2 * sum(range(100)),
        }
        assert json.loads(told(done)) == {"numbers": 100}
        assert "topic 'delys' does not exist" in told("This is the mistake:")


@pytest.mark.fault("T460", "the driver of a declarative pipeline is killed", "after Kafka committed a batch")
def test_pipelines(
    broker: str, topics: tuple[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A flow reads Kafka and a sink writes it: killed once, run again, then run with new records."""
    pytest.importorskip("pyspark.pipelines")
    pytest.importorskip("grpc")
    pytest.importorskip("yaml")
    monkeypatch.delenv("PYSPARK_DRIVER_PYTHON", raising=False)
    monkeypatch.delenv("PYSPARK_SUBMIT_ARGS", raising=False)
    (tmp_path / "spark-pipeline.yml").write_text(
        adapted(program("deploy-pipelines", "yaml"), broker, topics, tmp_path)
    )
    (tmp_path / "transformations").mkdir()
    (tmp_path / "transformations" / "flights.py").write_text(
        adapted(program("deploy-pipelines"), broker, topics, tmp_path)
    )
    killed = tmp_path / "killed"
    with socket.socket() as probe:
        if probe.connect_ex(("127.0.0.1", 15002)) == 0:
            pytest.skip(
                "another Spark Connect server of this host has port 15002, which pipelines always use"
            )
    run = [str(Path(pyspark.__file__).parent / "bin" / "spark-pipelines"), "run"]

    with running(run, tmp_path, KAFKA_EOS_FAILPOINTS=f"commit.after_commit=kill@{killed}") as log:
        await_condition(killed.exists, SECONDS, "the driver is killed")
    assert len(read_back(broker, topics[1])) == len(VALUES), "Kafka holds the batch, Spark's log does not"
    with running(run, tmp_path) as log:
        await_condition(lambda: "Run is COMPLETED" in log.read_text(errors="replace"), SECONDS, "it has run")
    await_values(broker, topics[1], log)
    more = [f"{number:03d}" for number in range(len(VALUES), 150)]
    produce(broker, topics[0], more, keys=more)
    with running(run, tmp_path) as log:
        await_condition(lambda: "Run is COMPLETED" in log.read_text(errors="replace"), SECONDS, "it has run")
    found = [(record.value or b"").decode() for record in read_back(broker, topics[1])]
    assert sorted(found) == [*VALUES, *more]
