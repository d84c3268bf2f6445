"""A stateful query moves between the oldest supported PySpark and the newest, over one checkpoint.

The older PySpark is in a virtual environment of its own, whose Python runs the current code of this package.
"""

from __future__ import annotations

import os
import shutil
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import asdict
from pathlib import Path

import pytest

from integration.chaos.loop import Checkpoint
from integration.support.driver import ROOT, Driver
from integration.support.faults import MEASURES, Measures
from integration.support.kafka import produce, read_back
from integration.support.stateful import check_running_counts

#: The virtual environment with the oldest PySpark, which ``./dev test`` and ``./dev soak`` create.
OLDEST = Path(os.environ.get("KAFKA_EOS_OLDEST_VENV", ROOT / ".venv-4.0.0"))
KEYS = 17
#: A run of the older version takes 20 s on an idle machine, and 134 s where it gets 15 % of a core.
_SECONDS = 600.0
_UPGRADED = pytest.mark.fault(
    "T136", "PySpark is upgraded from 4.0.0 over a checkpoint, and both versions are killed", "commit"
)
_ROLLED_BACK = pytest.mark.fault(
    "T137", "PySpark is rolled back to 4.0.0 over a checkpoint, and both versions are killed", "commit"
)


class Moving:
    """A query that counts rows by key; each of its runs may use another PySpark.

    Attributes:
        starts: number of drivers started.
    """

    def __init__(
        self, broker: str, topic: Callable[..., str], folder: Path, start: Callable[..., Driver]
    ) -> None:
        self.broker = broker
        self.source, self.sink = topic(2), topic(2)
        self.starts = 0
        self._folder = folder
        self._wanted: Counter[str] = Counter()
        self._start = start

    @property
    def log(self) -> Checkpoint:
        """Spark's logs, as the newest version left them."""
        return Checkpoint(self._folder / "checkpoint")

    def feed(self, rows: int) -> None:
        keys = [f"k{row % KEYS:02d}" for row in range(rows)]
        produce(self.broker, self.source, keys, keys=keys)
        self._wanted += Counter(keys)

    def start(self, python: Path, failpoints: str = "") -> Driver:
        self.starts += 1
        kafka = {"kafka.bootstrap.servers": self.broker, "application.id": f"app-{self.sink}"}
        reads = {"subscribe": self.source, "startingOffsets": "earliest"}
        writes = {"topic": self.sink, "checkpointLocation": str(self._folder / "checkpoint")}
        return self._start(
            {
                "sources": [{"format": "kafka-eos", "options": kafka | reads}],
                "sink": {"format": "kafka-eos", "options": kafka | writes},
                "state": {"options": kafka | {"state.dir": str(self._folder / "state")}},
            },
            failpoints,
            python=python,
        )

    def killed(self, python: Path, step: str) -> None:
        """Runs the query until it is killed, driver and JVM, in a batch that Spark has not logged as done."""
        once = self._folder / f"once-{self.starts}"
        driver = self.start(python, f"{step}=kill@{once}")
        assert driver.wait(_SECONDS) != 0, driver.tail()
        assert once.exists(), driver.tail()
        assert self.log.newest("commits") == self.log.newest("offsets") - 1

    def run(self, python: Path) -> None:
        """Runs the query until it has read everything, and checks every count in its output.

        PySpark 4.0 reads everything in one batch, and ends a run with a replayed batch after that batch.
        """
        replays = self.log.newest("commits") < self.log.newest("offsets")
        for _ in range(2 if replays and python == oldest_python() else 1):
            driver = self.start(python)
            assert driver.wait(_SECONDS) == 0, driver.tail()
        check_running_counts(self._wanted, read_back(self.broker, self.sink))

    def measures(self) -> Measures:
        """Returns the measures of a query whose output `run` has found complete."""
        batches, rows = self.log.newest("commits") + 1, len(read_back(self.broker, self.sink))
        return Measures(self.starts, batches, rows, lost=0, doubled=0)

    def lose_state(self) -> None:
        """Deletes all local state, which the next run restores from the changelog."""
        shutil.rmtree(self._folder / "state")


def oldest_python() -> Path:
    return OLDEST / "bin" / "python"


@pytest.fixture
def moving(
    request: pytest.FixtureRequest,
    broker: str,
    topic: Callable[..., str],
    tmp_path: Path,
    driver: Callable[..., Driver],
) -> Iterator[Moving]:
    if not oldest_python().exists():
        pytest.skip(f"{OLDEST} does not exist: ./dev test and ./dev soak create it, with PySpark 4.0.0")
    made = Moving(broker, topic, tmp_path, driver)
    yield made
    request.node.user_properties.append((MEASURES, asdict(made.measures())))


@pytest.mark.long
@pytest.mark.timeout(3600)
@pytest.mark.parametrize(
    "begins_with_the_oldest",
    [
        pytest.param(True, marks=[_UPGRADED, _ROLLED_BACK], id="upgraded"),
        pytest.param(False, marks=[_ROLLED_BACK, _UPGRADED], id="rolled_back"),
    ],
)
def test_a_query_moves_to_another_pyspark_and_back(moving: Moving, begins_with_the_oldest: bool) -> None:
    """Each version is killed where Kafka holds a batch that Spark's log lacks, and the other one goes on."""
    newest, oldest = Path(sys.executable), oldest_python()
    before, after = (oldest, newest) if begins_with_the_oldest else (newest, oldest)
    moving.feed(200)
    moving.killed(before, "commit.after_commit")
    moving.feed(200)
    moving.run(after)
    moving.feed(200)
    moving.killed(after, "commit.before_commit")
    moving.feed(100)
    moving.run(before)
    moving.feed(100)
    moving.killed(before, "commit.within_changelog")
    moving.lose_state()
    moving.run(after)
