"""A query that counts rows by value, with its topics, its state and the check of its output."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

from pyspark import TaskContext

from integration.chaos.stateful import StatefulRun
from integration.support.kafka import produce, read_back
from integration.support.stateful import check_running_counts
from kafka_eos_source.commit import micro_batch
from kafka_eos_source.kafka.reader import POOL

ROWS, PER_BATCH, KEYS = 800, 200, 17


class Case:
    """A query that counts rows by value, from one topic to another."""

    def __init__(self, broker: str, topic: Callable[..., str], folder: Path) -> None:
        self.broker = broker
        self.source, self.sink = topic(2), topic(2)
        self.application = f"app-{self.sink}"
        self.checkpoint = folder / "checkpoint"
        self.state = folder / "state"
        self.wanted: Counter[str] = Counter()
        self.feed(ROWS)

    def feed(self, rows: int) -> None:
        """Sends ``rows`` new rows to the source topic."""
        words = [f"k{row % KEYS:02d}" for row in range(rows)]
        produce(self.broker, self.source, words)
        self.wanted += Counter(words)

    def spec(
        self, sink: dict[str, str] | None = None, operator: dict[str, str] | None = None, **more: Any
    ) -> dict[str, Any]:
        servers = {"kafka.bootstrap.servers": self.broker}
        reading = {"startingOffsets": "earliest", "maxOffsetsPerTrigger": str(PER_BATCH)}
        ours = {**servers, "application.id": self.application}
        writing = {"topic": self.sink, "checkpointLocation": str(self.checkpoint)}
        return {
            "source": {**servers, **reading, "subscribe": self.source},
            "sink": {**ours, **writing, **(sink or {})},
            "state": {**ours, "state.dir": str(self.state), **(operator or {})},
            "checkpoint": str(self.checkpoint),
            **more,
        }

    def run(self, **spec: Any) -> None:
        """Runs the query in the test's own process."""
        try:
            StatefulRun(self.spec(**spec), threading.Event()).to_the_end()
        finally:
            clear_process_caches()

    def check(self) -> None:
        check_running_counts(self.wanted, read_back(self.broker, self.sink))


class WindowedCase(Case):
    """A query that counts rows by value in windows, and emits each window when it closes."""

    def __init__(self, broker: str, topic: Callable[..., str], folder: Path) -> None:
        self._fed = 0
        super().__init__(broker, topic, folder)

    def feed(self, rows: int) -> None:
        """Sends rows, 20 for each second of event time; each value occurs twice."""
        numbers = range(self._fed, self._fed + rows)
        words = [f"k{row % 10:02d}@{row // 20 * 1000}" for row in numbers]
        self._fed += rows
        # Spread evenly. If a partition got all early rows, the other one would make them late.
        produce(self.broker, self.source, words, config={"sticky.partitioning.linger.ms": 0})
        self.wanted += Counter(words)

    def end(self) -> None:
        """Sends rows of a later day to all shards, which close all windows."""
        produce(self.broker, self.source, [f"end{row}@{86_400_000}" for row in range(20)])

    def spec(
        self, sink: dict[str, str] | None = None, operator: dict[str, str] | None = None, **more: Any
    ) -> dict[str, Any]:
        return super().spec(sink, operator, windows=True, **more)

    def check(self) -> None:
        found = [
            (str(record.key, "utf-8"), int(record.value or b""))
            for record in read_back(self.broker, self.sink)
        ]
        counted = Counter(found)
        wanted = Counter(self.wanted.items())
        assert counted == wanted, f"too few: {wanted - counted}; too many: {counted - wanted}"


def clear_process_caches() -> None:
    """Drops everything that the process caches, as if it had ended."""
    TaskContext._taskContext = None
    while micro_batch._sessions:
        micro_batch._sessions.popitem()[1].drop()
    POOL.close()
