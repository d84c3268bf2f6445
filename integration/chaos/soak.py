"""T53: random faults, one every few seconds; the seed replays their schedule.

``python -m integration.chaos.soak [MINUTES] [--seed N] [--keep FOLDER]``. A query copies a topic while its
driver is killed and paused, its broker is killed and restarted, the network is cut, and commit requests are
lost, held back and delivered late. The soak records everything sent, committed and read, and checks it at
the end: the multiset of records, the order per key, and the history with a checker in the style of Jepsen.
"""

from __future__ import annotations

import os
import random
import signal
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import ClassVar

import click
from confluent_kafka import Consumer, TopicPartition

from integration.chaos.conftest import Proxied, behind_a_proxy
from integration.chaos.oracle import Outcome
from integration.chaos.proxy import END_TXN, PRODUCE, TXN_OFFSET_COMMIT, Action, Rule
from integration.chaos.scenario import Scenario
from integration.support.driver import Driver
from integration.support.faults import Measures
from kafka_eos_source.runtime.deadline import Deadline
from kafka_eos_source.testing.checker import Findings, check
from kafka_eos_source.testing.history import Record, Recorder, read_history

#: Short enough that some of the pauses and network cuts below outlast it.
_TRANSACTION_TIMEOUT_MS = 5000
_PARTITIONS = 3
_FEED_ROWS, _FEED_EVERY_SECONDS = 40, 0.2
_COMES_TO_REST_SECONDS = 180.0

#: A broker logs this when it finishes a transaction without writing its control records (KAFKA-20734). A
#: committed batch then stays invisible in some partitions, whatever a client does.
_SKIPPED_MARKERS = b"these partitions are likely deleted already and hence can be skipped"


class BrokenBrokerError(Exception):
    """The broker broke its own promise, so the run says nothing about the product."""


@dataclass
class Report:
    """Result of one soak.

    Attributes:
        seed, minutes: the parameters of the run.
        faults: how often each fault was injected.
        starts: number of driver processes started.
        outcome: the verdict on the records and their order.
        findings: the verdict of the history checker.
    """

    seed: int
    minutes: float
    faults: Counter[str] = field(default_factory=Counter)
    starts: int = 0
    outcome: Outcome | None = None
    findings: Findings | None = None

    def measures(self) -> Measures:
        """Returns the numbers for the table in `docs/faults.md`."""
        assert self.outcome is not None
        assert self.findings is not None
        rows = self.outcome.rows
        return Measures(
            self.starts, self.findings.took_place, rows.expected, rows.missing, rows.doubled + rows.foreign
        )

    @property
    def good(self) -> bool:
        return (
            self.outcome is not None
            and self.findings is not None
            and self.outcome.exactly_once
            and self.findings.ok
        )


class Soak:
    """One run: a query under load, and a thread that injects faults.

    Args:
        proxied: the broker behind its proxy.
        scenario: the query; its driver is restarted whenever it ends.
        folder: folder for the histories.
        seed: seed of the fault schedule.
        tell: called with one line for each fault.
    """

    def __init__(
        self, proxied: Proxied, scenario: Scenario, folder: Path, seed: int, tell: Callable[[str], None]
    ) -> None:
        self._proxied = proxied
        self._scenario = scenario
        self._folder = folder
        self._chance = random.Random(seed)
        self._tell = tell
        self._driver: Driver | None = None
        self._lock = threading.Lock()
        self._late: list[Rule] = []
        self._over = threading.Event()
        self._done = threading.Event()
        self._faults = Recorder(folder / "faults.jsonl", "soak")
        self.report = Report(seed, 0.0)

    def run(self, minutes: float) -> Report:
        """Injects faults for ``minutes``, then lets the query finish and checks the result.

        Raises:
            AssertionError: if the query or a helper thread does not end.
        """
        self.report.minutes = minutes
        feeder, keeper, reader = (
            threading.Thread(target=each, daemon=True)
            for each in (self._feed, self._keep_running, self._read)
        )
        for each in (feeder, keeper, reader):
            each.start()
        until = Deadline.after_seconds(60 * minutes)
        while not until.expired:
            self._over.wait(self._chance.uniform(2.0, 6.0))
            self._check_broker()
            self._inject(self._chance.choice(list(self._FAULTS)))
        self._over.set()
        self._proxied.proxy.catch_nothing()
        for each in (feeder, keeper):  # the last driver must run alone, on input that is complete
            _join(each)
        self._check_broker()
        self._come_to_rest()
        self._done.set()
        _join(reader)
        self.report.outcome = self._scenario.outcome()
        self.report.findings = check(read_history(sorted(self._folder.glob("*.jsonl"))))
        return self.report

    # -- the faults

    def _inject(self, name: str) -> None:
        self._tell(name)
        self._faults.fault(name)
        self.report.faults[name] += 1
        self._FAULTS[name](self)

    def _check_broker(self) -> None:
        """Raises BrokenBrokerError if the broker has left a transaction unfinished."""
        log = self._proxied.kafka.directory / "node-1" / "broker.log"
        if _SKIPPED_MARKERS in log.read_bytes():
            raise BrokenBrokerError(
                f"after {self.report.faults.total()} faults, the broker finished a transaction without "
                "writing its control records (KAFKA-20734, see 'A committed transaction that hangs' in "
                "docs/runbooks.md). Run the soak again, with another seed."
            )

    def _kill_driver(self) -> None:
        with self._lock:
            if self._driver is not None:
                self._driver.kill()

    def _pause_driver(self) -> None:
        """Pauses the driver: for a long garbage collection, or longer than the transaction timeout."""
        with self._lock:
            driver = self._driver
        if driver is None or driver.process.poll() is not None:
            return
        os.kill(driver.process.pid, signal.SIGSTOP)
        time.sleep(self._chance.choice([0.5, 7.0]))  # the fault itself
        if driver.process.poll() is None:
            os.kill(driver.process.pid, signal.SIGCONT)

    def _overtake(self) -> None:
        """Starts a second driver on the checkpoint while the first is paused, then resumes the first."""
        with self._lock:
            driver = self._driver
            if driver is None or driver.process.poll() is not None:
                return
            os.kill(driver.process.pid, signal.SIGSTOP)
            self._driver = self._start()
        time.sleep(self._chance.uniform(1.0, 4.0))  # the fault itself
        if driver.process.poll() is None:
            os.kill(driver.process.pid, signal.SIGCONT)

    def _kill_broker(self) -> None:
        self._proxied.kafka.kill_node(1)
        self._proxied.kafka.start_node(1)

    def _cut(self) -> None:
        self._proxied.proxy.cut_for(self._chance.choice([0.2, 2.0, 6.0]))

    def _lose_answer(self) -> None:
        api_key = self._chance.choice([END_TXN, END_TXN, PRODUCE, TXN_OFFSET_COMMIT])
        self._proxied.proxy.catch(api_key, Action.DROP_ANSWER)

    def _hold_commit(self) -> None:
        """Holds back an EndTxn, which the client sends again; the held one arrives at some later time."""
        self._late.append(self._proxied.proxy.catch(END_TXN, Action.HOLD, times=self._chance.choice([1, 3])))

    def _deliver_late(self) -> None:
        held = [caught for rule in self._late for caught in rule.caught]
        for rule in self._late:
            rule.caught.clear()
        for caught in held:
            try:
                caught.deliver(self._chance.choice([None, False]))
            except OSError as error:
                self._tell(f"  not delivered: {error}")

    _FAULTS: ClassVar[dict[str, Callable[[Soak], None]]] = {
        "kill driver": _kill_driver,
        "pause driver": _pause_driver,
        "overtake driver": _overtake,
        "kill broker": _kill_broker,
        "cut network": _cut,
        "lose answer": _lose_answer,
        "hold commit": _hold_commit,
        "deliver late": _deliver_late,
    }

    # -- what runs in the background

    def _start(self, **spec: object) -> Driver:
        self.report.starts += 1
        return self._scenario.start(
            sink={
                "kafka.transaction.timeout.ms": str(_TRANSACTION_TIMEOUT_MS),
                "kafka.socket.timeout.ms": "2000",
                "commitTimeoutMs": "20000",
            },
            history=str(self._folder / f"loop-{self.report.starts}.jsonl"),
            **{"available_now": False, **spec},
        )

    def _feed(self) -> None:
        while not self._over.wait(_FEED_EVERY_SECONDS):
            self._scenario.feed(_FEED_ROWS)

    def _keep_running(self) -> None:
        """Restarts the driver whenever it has ended, as a job scheduler does."""
        while not self._over.is_set():
            with self._lock:
                if self._driver is None or self._driver.process.poll() is not None:
                    self._driver = self._start()
            self._over.wait(0.2)

    def _read(self) -> None:
        """Reads the output with a read_committed consumer, from the first record to the last."""
        with (
            _consumer(self._scenario.bootstrap, self._scenario.sink) as consumer,
            Recorder(self._folder / "reader.jsonl", "reader") as recorder,
        ):
            idle_since_done = 0
            while idle_since_done < 10:
                messages = consumer.consume(1000, 0.2)
                found = [each for each in messages if each.error() is None]
                if found:
                    recorder.polled(
                        Record(
                            each.topic(),
                            each.partition(),
                            each.offset(),
                            each.key().decode(),
                            each.value().decode(),
                        )
                        for each in found
                    )
                idle_since_done = 0 if found or not self._done.is_set() else idle_since_done + 1

    def _come_to_rest(self) -> None:
        """Ends the faults and lets one last driver process everything that is left."""
        self._deliver_late()
        with self._lock:
            if self._driver is not None:
                self._driver.kill()
            last = self._start(available_now=True, restarts=5)
        last.finish()


def _join(thread: threading.Thread) -> None:
    thread.join(_COMES_TO_REST_SECONDS)
    assert not thread.is_alive(), "a thread of the soak did not end"


@contextmanager
def _consumer(bootstrap: str, topic: str) -> Iterator[Consumer]:
    consumer = Consumer(
        {
            "bootstrap.servers": bootstrap,
            "group.id": "soak",
            "isolation.level": "read_committed",
            "enable.auto.commit": False,
            "auto.offset.reset": "earliest",
        }
    )
    try:
        consumer.assign([TopicPartition(topic, number, 0) for number in range(_PARTITIONS)])
        yield consumer
    finally:
        consumer.close()


def soak(minutes: float, seed: int, folder: Path, tell: Callable[[str], None]) -> Report:
    """Starts a cluster, runs one soak on it, and returns the report."""
    with ExitStack() as running:

        def start(*arguments: object, **more: object) -> Driver:
            driver = Driver(arguments[0], folder / "drivers", *arguments[1:], **more)  # type: ignore[arg-type]
            running.callback(driver.kill)
            return driver

        proxied = running.enter_context(behind_a_proxy())
        scenario = Scenario(proxied.bootstrap, folder, start, partitions=_PARTITIONS, batch=100)
        return Soak(proxied, scenario, folder, seed, tell).run(minutes)


@click.command()
@click.argument("minutes", type=float, default=10.0)
@click.option("--seed", type=int, default=None, help="Replays the schedule of an earlier run.")
@click.option("--keep", type=click.Path(path_type=Path), default=None, help="Where histories and logs stay.")
def main(minutes: float, seed: int | None, keep: Path | None) -> None:
    """Injects random faults for MINUTES; exits with 1 if any record is lost, duplicated or out of order."""
    seed = random.SystemRandom().randrange(100_000) if seed is None else seed
    folder = keep or Path(tempfile.mkdtemp(prefix="kafka-eos-soak-"))
    folder.mkdir(parents=True, exist_ok=True)
    if any(folder.glob("*.jsonl")):
        raise click.UsageError(f"{folder} holds the histories of another run.")
    began = time.monotonic()
    click.echo(f"seed {seed}, {minutes:g} minutes, histories in {folder}")
    try:
        report = soak(
            minutes, seed, folder, lambda line: click.echo(f"{time.monotonic() - began:7.1f} s  {line}")
        )
    except BrokenBrokerError as error:
        click.echo(f"STOPPED {error}")
        sys.exit(2)
    click.echo(f"faults: {dict(report.faults)}; drivers started: {report.starts}")
    click.echo(str(report.findings))
    assert report.outcome is not None
    click.echo(str(report.outcome.rows))
    click.echo("every record exactly once, in order" if report.good else f"WRONG, see {folder}")
    sys.exit(0 if report.good else 1)


if __name__ == "__main__":
    main()
