"""Timers fire exactly once on an idle stream, when the driver is killed around the batch that fires them.

The tests run the operator in the chaos loop, without Spark. Nothing is read after the first batch of a round,
so each batch after it is empty: the source causes it because a timer is due.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from integration.chaos.loop import Checkpoint
from integration.chaos.stateful import SHARDS
from integration.support.driver import Driver
from integration.support.kafka import produce, read_back
from integration.support.processes import await_condition

KEYS, SECONDS, ALARM_MS = 5, 120, 500


class Case:
    """A query that emits each value of a topic once, by a timer.

    Args:
        broker: address of the broker.
        topic: creates a topic.
        folder: folder for the files of the query.
        start: starts a driver.
        environment: sets an environment variable of the drivers that are started next.

    Attributes:
        shards: number of shards of the operator. Set it before the first driver starts.
        source: topic that the query reads.
        sink: topic that the query writes.
        checkpoint: folder of the query's checkpoint.
        fed: the values sent so far.
    """

    def __init__(
        self,
        broker: str,
        topic: Callable[..., str],
        folder: Path,
        start: Callable[..., Driver],
        environment: Callable[[str, str], None],
    ) -> None:
        self._broker, self._folder, self._start = broker, folder, start
        self._set = environment
        self.source, self.sink = topic(2), topic(2)
        self.checkpoint = folder / "checkpoint"
        self.fed: list[str] = []
        self.shards = SHARDS
        self._host = 0
        self.move_to_new_host()

    def move_to_new_host(self) -> None:
        """Starts the next drivers on another host: without local state and temporary files."""
        self._host += 1
        self._set("TMPDIR", str(self._here("temporary")))
        self._here("temporary").mkdir(parents=True)

    def _here(self, name: str) -> Path:
        return self._folder / f"host-{self._host}" / name

    def feed(self) -> None:
        """Sends some new values."""
        values = [f"v{len(self.fed) + number:03d}" for number in range(KEYS)]
        produce(self._broker, self.source, values)
        self.fed += values

    def start(self, armed: str = "", mutations: Sequence[str] = (), **spec: Any) -> Driver:
        """Starts a driver, with failpoints armed in it and rules of the product switched off.

        ``spec`` replaces parts of the spec of the chaos loop.
        """
        own = {"kafka.bootstrap.servers": self._broker, "application.id": f"app-{self.sink}"}
        reading = {"startingOffsets": "earliest", "token.renewal.interval.ms": "0", "subscribe": self.source}
        writing = {"topic": self.sink, "checkpointLocation": str(self.checkpoint)}
        whole: dict[str, Any] = {
            "source": {**own, **reading},
            "sink": {**own, **writing},
            "state": {**own, "state.dir": str(self._here("state"))},
            "checkpoint": str(self.checkpoint),
            "shards": self.shards,
            "alarm_ms": ALARM_MS,
            "available_now": False,
            "mutations": list(mutations),
            **spec,
        }
        return self._start(whole, armed, module="integration.chaos.loop")

    def run_until_all_fired(self) -> None:
        driver = self.start()
        await_condition(
            lambda: driver.process.poll() is not None or len(self.written()) >= len(self.fed),
            SECONDS,
            "the timers fire",
        )
        self.stop(driver)

    def stop(self, driver: Driver) -> None:
        """Stops the driver when it is idle."""
        driver.tell("stop")
        driver.finish()

    def kill_within_tick(self, step: str, once: Path) -> None:
        """Feeds values, and kills the driver at this step of the batch that fires their timers."""
        self.feed()
        per_batch = self.shards if step.startswith("state.") else 1
        killed = self.start(f"{step}=kill*{per_batch + 1}@{once}")
        assert killed.wait() != 0
        assert once.exists(), f"{step} was not reached:\n{killed.tail()}"
        log = Checkpoint(self.checkpoint)
        newest = log.newest("offsets")
        assert newest == log.newest("commits") + 1, "Spark will repeat the batch"
        assert log.offsets(newest)["@"]["tick"], "the batch is a tick"

    def written(self) -> list[tuple[str, str]]:
        return [((each.key or b"").decode(), (each.value or b"").decode()) for each in self.records()]

    def records(self) -> list[Any]:
        return list(read_back(self._broker, self.sink))

    def check(self) -> None:
        assert sorted(self.written()) == [(value, "1") for value in self.fed]


@pytest.fixture
def case(
    broker: str,
    topic: Callable[..., str],
    tmp_path: Path,
    driver: Callable[..., Driver],
    monkeypatch: pytest.MonkeyPatch,
) -> Case:
    return Case(broker, topic, tmp_path, driver, monkeypatch.setenv)


@pytest.mark.fault(
    "T170", "the driver dies in an empty batch that fires timers", "before, within and after the commit"
)
def test_t170_timers_on_an_idle_stream_fire_once_although_the_driver_is_killed(
    case: Case, tmp_path: Path
) -> None:
    for step in ("state.after_pending", "commit.before_commit", "commit.after_commit"):
        case.kill_within_tick(step, tmp_path / f"once-{step}")
        case.run_until_all_fired()
        case.check()


@pytest.mark.fault("T54", "a rule is switched off; the others' tests must then fail", "its own")
def test_t54_timers_are_lost_if_pending_state_counts_without_the_token(case: Case, tmp_path: Path) -> None:
    """Proves that the test above can fail: the aborted batch has deleted the timers that it fired.

    Each shard starts the time of its timers when its own task begins. With one shard, the batch that is
    killed fires all timers.
    """
    case.shards = 1
    case.kill_within_tick("commit.before_commit", tmp_path / "once")
    driver = case.start(mutations=["pending state"])
    driver.await_text("BATCH 1")
    case.stop(driver)
    assert case.written() == []


@pytest.mark.fault("T171", "a query with timers moves to another host while it is idle", "between two runs")
def test_t171_timers_fire_on_another_host_without_new_records(case: Case) -> None:
    """The new host has neither local state nor the file with the due time. It finds both in Kafka."""
    case.feed()
    # however slow the machine is, this driver reads what is there and runs no batch for timers
    case.start(available_now=True).finish()
    assert Checkpoint(case.checkpoint).newest("offsets") == 0, "the timers have not fired yet"
    case.move_to_new_host()
    case.run_until_all_fired()
    case.check()
