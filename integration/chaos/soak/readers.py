"""Reads what a chunk wrote: topics with two consumers, external sinks, and state."""

from __future__ import annotations

import re
import shutil
import signal
import sqlite3
import subprocess
import sys
import uuid
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing
from pathlib import Path

import pyarrow.parquet as pq
from confluent_kafka import Consumer, KafkaException, TopicPartition

from integration.chaos.soak.judge import Printed
from integration.chaos.soak.workload import PARTITIONS, STORE, Totals
from integration.support.history import Record
from integration.support.kafka import TIMEOUT_SECONDS, Admin
from kafka_eos_source.embedded import java, supervisor
from kafka_eos_source.runtime.deadline import Deadline, Pauses, retry
from kafka_eos_source.sinks.filesystem import committed_files
from kafka_eos_source.state import StateQuery

_LINE = re.compile(r"Partition:(\d+)\tOffset:(\d+)\t([^\t]*)\t(.*)")
_CLASS = "org.apache.kafka.tools.consumer.ConsoleConsumer"
_JVM = ("-Xmx128m", "-XX:+UseSerialGC", "-XX:TieredStopAtLevel=1", "-XX:-UsePerfData")

Offsets = dict[tuple[str, int], int]


class JavaConsumer:
    """Kafka's own console consumer, which reads the output topics with read_committed all the time.

    Args:
        bootstrap: bootstrap servers.
        topics: topics that it reads, from their beginning.
        folder: folder for what it prints.
    """

    def __init__(self, bootstrap: str, topics: Sequence[str], folder: Path) -> None:
        self._topics = topics
        self._admin = Admin(bootstrap, log_level=0)
        self._command = [
            *(java.find(), *_JVM, "-Dorg.slf4j.simpleLogger.defaultLogLevel=error"),
            *("-cp", f"{java.jars(java.TOOLS)}/*", _CLASS, "--bootstrap-server", bootstrap),
            *("--include", "|".join(topics), "--from-beginning", "--isolation-level", "read_committed"),
            *("--command-property", "auto.commit.interval.ms=500"),
            *(part for name in ("partition", "offset", "key") for part in _printed(name)),
        ]
        self.output = folder / "java-consumer.txt"
        self._process: subprocess.Popen[str] | None = None
        self._group = ""
        self.pid = 0

    def keep(self) -> None:
        """Starts the consumer unless it runs. It then reads everything that was not deleted."""
        if self._process is not None and self._process.poll() is None:
            return
        self._group = f"java-consumer-{uuid.uuid4().hex[:8]}"
        self.output.unlink(missing_ok=True)
        self._process = subprocess.Popen(
            [
                *(sys.executable, "-I", supervisor.__file__, str(self.output), ""),
                *(*self._command, "--group", self._group),
            ],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
        assert self._process.stdout is not None
        self.pid = int(self._process.stdout.readline())

    def printed(self) -> list[Printed]:
        """Returns everything that it has printed."""
        lines = self.output.read_text(errors="replace").splitlines()
        found = (_LINE.fullmatch(line) for line in lines)
        return [Printed(int(each[1]), int(each[2]), each[3], each[4]) for each in found if each]

    def forget(self) -> None:
        """Deletes what it has printed. It appends to the file, so that it goes on at the beginning."""
        with open(self.output, "r+b") as file:
            file.truncate(0)

    def close(self) -> None:
        """Ends the process."""
        if self._process is not None and self._process.poll() is None:
            self._process.send_signal(signal.SIGTERM)
            self._process.wait(30)


def _printed(name: str) -> tuple[str, str]:
    return "--formatter-property", f"print.{name}=true"


def ends_of(bootstrap: str, topics: Sequence[str], isolation: str = "read_uncommitted") -> Offsets:
    """Returns the end offsets of all partitions; with read_committed, the last stable offsets."""
    consumer = Consumer(
        {
            "bootstrap.servers": bootstrap,
            "group.id": "soak-ends",
            "isolation.level": isolation,
            "log_level": 0,
        }
    )
    partitions = [(topic, number) for topic in topics for number in range(PARTITIONS)]

    def look_up() -> Offsets:
        return {
            each: consumer.get_watermark_offsets(TopicPartition(*each), timeout=TIMEOUT_SECONDS)[1]
            for each in partitions
        }

    try:
        return retry(look_up, KafkaException, Pauses(Deadline.after_seconds(TIMEOUT_SECONDS), 0.2))
    finally:
        consumer.close()


def read(bootstrap: str, starts: Mapping[tuple[str, int], int]) -> list[Record]:
    """Reads committed records with librdkafka, from these offsets up to the last stable offset."""
    consumer = Consumer(
        {
            "bootstrap.servers": bootstrap,
            "group.id": "soak-read",
            "isolation.level": "read_committed",
            "enable.auto.commit": False,
            "enable.partition.eof": True,
            "auto.offset.reset": "error",
            "fetch.wait.max.ms": 20,
            "log_level": 0,
        }
    )
    found: list[Record] = []
    try:
        unread = set(starts)
        consumer.assign([TopicPartition(topic, number, at) for (topic, number), at in starts.items()])
        while unread:
            for message in consumer.consume(10_000, 0.5):
                error = message.error()
                if error is None:
                    found.append(
                        Record(
                            message.topic(),
                            message.partition(),
                            message.offset(),
                            message.key().decode(),
                            message.value().decode(),
                        )
                    )
                elif error.name() == "_PARTITION_EOF":
                    unread.discard((message.topic(), message.partition()))
                elif not error.retriable() and error.name() not in ("_TRANSPORT", "_ALL_BROKERS_DOWN"):
                    raise AssertionError(f"reading {message.topic()}-{message.partition()}: {error}")
    finally:
        consumer.close()
    return sorted(found)


class Sinks:
    """The external sinks of one query: a folder with Parquet files, and a table in SQLite.

    Args:
        folder: folder for both.
    """

    def __init__(self, folder: Path) -> None:
        self._files = folder / "files"
        self.database = folder / "rows.db"

    def options(self) -> dict[str, str]:
        """Returns the options of the query's writer."""
        return {
            "sinks": "files,table",
            "sink.files.type": "filesystem",
            "sink.files.path": str(self._files),
            "sink.files.format": "parquet",
            "sink.table.type": "sql",
            "sink.table.url": f"sqlite:///{self.database}",
            "sink.table.table": "output",
            "sink.table.create": "true",
        }

    def values(self) -> dict[str, list[str]]:
        """Returns the values of all rows, by the type of the sink."""
        return {
            "filesystem": [value for file in self._committed() for value in _values(file)],
            "sql": [_text(value) for (value,) in self._run("SELECT value FROM output")],
        }

    def forget(self, last: str) -> None:
        """Deletes rows whose value is at most ``last``. No query must be writing."""
        if self._files.exists():
            for folder in self._files.glob("batch=*"):
                if all(value <= last for file in folder.glob("*.parquet") for value in _values(file)):
                    shutil.rmtree(folder)
        self._run("DELETE FROM output WHERE CAST(value AS TEXT) <= ?", last)

    def _committed(self) -> list[Path]:
        found = committed_files(str(self._files)) if self._files.exists() else []
        return [Path(each.removeprefix("file://")) for each in found]

    def _run(self, statement: str, *arguments: str) -> list[tuple[object, ...]]:
        if not self.database.exists():
            return []
        with closing(sqlite3.connect(self.database, timeout=60)) as connection, connection:
            if not connection.execute("SELECT 1 FROM sqlite_master WHERE name = 'output'").fetchall():
                return []
            return list(connection.execute(statement, arguments))


def _values(file: Path) -> Iterator[str]:
    for value in pq.ParquetFile(file).read(columns=["value"]).column("value").to_pylist():
        yield _text(value)


def _text(value: object) -> str:
    return value.decode() if isinstance(value, bytes) else str(value)


def states(application_id: str, state_dir: Path, bootstrap: str) -> dict[str, dict[str, Totals]]:
    """Reads the state of `workload.Counts` twice: from the changelog, and from the local databases."""
    kafka = {"kafka.bootstrap.servers": bootstrap}
    found = {}
    for reader, folder in (("changelog", None), ("databases", state_dir)):
        with StateQuery(application_id, STORE, kafka=kafka, state_dir=folder) as state:
            found[reader] = {
                row["key"]["key"]: (row["value"]["rows"], row["value"]["total"]) for row in state.all()
            }
    return found
