"""A stateful query moves from the oldest supported PySpark to the newest over one checkpoint, and back."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from integration.support.driver import ROOT, Driver
from integration.support.kafka import produce, read_back
from integration.support.stateful import check_running_counts

#: The virtual environment with the oldest PySpark, which ``./dev test`` creates.
OLDEST = Path(os.environ.get("KAFKA_EOS_OLDEST_VENV", ROOT / ".venv-4.0.0"))
KEYS = 17
#: The older version starts slowly without the archive of Spark's classes.
_SECONDS = 400.0


class Moving:
    """A query that counts rows by key; each of its runs may use another PySpark."""

    def __init__(
        self, broker: str, topic: Callable[..., str], folder: Path, start: Callable[..., Driver]
    ) -> None:
        self.broker = broker
        self.source, self.sink = topic(2), topic(2)
        self.folder = folder
        self.wanted: Counter[str] = Counter()
        self._start = start

    def feed(self, rows: int) -> None:
        keys = [f"k{row % KEYS:02d}" for row in range(rows)]
        produce(self.broker, self.source, keys, keys=keys)
        self.wanted += Counter(keys)

    def start(self, failpoints: str = "", **program: Any) -> Driver:
        kafka = {"kafka.bootstrap.servers": self.broker, "application.id": f"app-{self.sink}"}
        reads = {"subscribe": self.source, "startingOffsets": "earliest"}
        writes = {"topic": self.sink, "checkpointLocation": str(self.folder / "checkpoint")}
        return self._start(
            {
                "sources": [{"format": "kafka-eos", "options": kafka | reads}],
                "sink": {"format": "kafka-eos", "options": kafka | writes},
                "state": {"options": kafka | {"state.dir": str(self.folder / "state")}},
            },
            failpoints,
            **program,
        )

    def killed(self, step: str, **program: Any) -> None:
        """Runs the query until it is killed, driver and JVM, at a failpoint."""
        once = self.folder / f"once-{len(list(self.folder.glob('once-*')))}"
        driver = self.start(f"{step}=kill@{once}", **program)
        assert driver.wait(_SECONDS) != 0, driver.tail()
        assert once.exists(), driver.tail()

    def run(self, **program: Any) -> None:
        """Runs the query to its end, and checks every count in its output."""
        driver = self.start(**program)
        assert driver.wait(_SECONDS) == 0, driver.tail()
        check_running_counts(self.wanted, read_back(self.broker, self.sink))


@pytest.fixture
def moving(broker: str, topic: Callable[..., str], tmp_path: Path, driver: Callable[..., Driver]) -> Moving:
    return Moving(broker, topic, tmp_path, driver)


@pytest.mark.fault("T136", "PySpark is upgraded over a checkpoint, and both versions are killed", "commit")
@pytest.mark.fault("T137", "PySpark is rolled back over a checkpoint, and both versions are killed", "commit")
@pytest.mark.long
@pytest.mark.timeout(1800)
def test_a_query_moves_to_a_newer_pyspark_and_back(moving: Moving) -> None:
    """Each version is killed where Kafka holds a batch that Spark's log lacks, and the other one goes on."""
    python = OLDEST / "bin" / "python"
    if not python.exists():
        pytest.skip(f"{OLDEST} does not exist: ./dev test creates it")
    moving.feed(200)
    moving.killed("commit.after_commit", python=python)
    moving.feed(200)
    moving.run()
    moving.feed(200)
    moving.killed("commit.before_commit")
    moving.run(python=python)
    moving.feed(200)
    moving.killed("commit.after_commit")
    moving.feed(100)
    moving.run(python=python)
    moving.feed(100)
    moving.run()
