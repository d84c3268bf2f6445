"""One run of the demo: starts the driver, kills it and starts it again until it has read all input."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import psutil

from kafka_eos_source.demo.flights import STATUSES
from kafka_eos_source.demo.query import Spec
from kafka_eos_source.errors import OperatorError, UnavailableError
from kafka_eos_source.kafka.playground import Watch
from kafka_eos_source.protocol.identity import group_of
from kafka_eos_source.runtime import failpoints
from kafka_eos_source.runtime.deadline import Deadline, Pauses

SOURCE_PARTITIONS = 4
OUTPUT_PARTITIONS = 2
EXACTLY_ONCE, AT_LEAST_ONCE = "exactly_once", "at_least_once"

_POLL_SECONDS = 0.25
#: How long a driver may make no progress before the demo fails.
_STALLED_SECONDS = 180.0


@dataclass(frozen=True)
class Kill:
    """When to kill the driver next.

    Attributes:
        at_share: share of the input that is committed first; None = kill at the failpoint.
        after_seconds: additional delay, which makes the time random.
        failpoint: name of the failpoint that kills the driver.
    """

    at_share: float | None
    after_seconds: float = 0.0
    failpoint: str = ""

    @property
    def what(self) -> str:
        """The failpoint, or "random"."""
        return self.failpoint or "random"


def schedule(seed: int, random_kills: int = 3, compare: bool = True) -> list[Kill]:
    """Returns the kills: first those at exact points, then random ones, one in each equal part of the input.

    ``commit.after_commit`` is exactly between the two commits: Kafka has the batch, and Spark does not know
    it yet. ``direct.after_flush`` is the same point of the at-least-once query: Kafka has the records of a
    task.
    """
    chance = random.Random(seed)
    part = 0.85 / max(1, random_kills)
    kills = [
        Kill(part * (index + chance.uniform(0.2, 0.8)), chance.uniform(0.0, 1.0))
        for index in range(random_kills)
    ]
    exact = ["commit.after_commit", *(["direct.after_flush"] if compare else [])]
    return [*(Kill(None, failpoint=name) for name in exact), *kills]


@dataclass
class History:
    """What the demo observed from outside during the run.

    Attributes:
        seconds: time of each observation, since the start.
        committed: number of input offsets that the exactly-once query has committed.
        written: number of records in the output topics of the at-least-once query; 0 without this query.
        kills: time and cause of each kill.
        starts: number of started drivers.
    """

    seconds: list[float] = field(default_factory=list)
    committed: list[int] = field(default_factory=list)
    written: list[int] = field(default_factory=list)
    kills: list[tuple[float, str]] = field(default_factory=list)
    starts: int = 0


def output_topics(prefix: str) -> dict[str, int]:
    """Returns the output topics of one query, with their numbers of partitions."""
    return {f"{prefix}.{status}": OUTPUT_PARTITIONS for status in STATUSES}


class Run:
    """Runs drivers and kills them. `history` grows while `to_the_end` runs.

    Args:
        spec: what the drivers run.
        total: number of events in the input.
        kills: one for each driver; the driver after them runs to its end.
        folder: folder for the spec and the drivers' logs.
        report: called with the history whenever it grows.
        program: arguments with which Python runs a driver; the path of the spec follows.
    """

    def __init__(
        self,
        spec: Spec,
        total: int,
        kills: list[Kill],
        folder: Path,
        report: Callable[[History], None],
        program: Sequence[str] = ("-m", "kafka_eos_source.demo.query"),
    ) -> None:
        self.history = History()
        self._spec = spec
        self._total = total
        self._kills = list(kills)
        self._folder = folder
        self._report = report
        self._program = program
        self._began = time.monotonic()
        self._topics = Watch(
            spec.bootstrap_servers,
            group_of(spec.application_id),
            {spec.source: SOURCE_PARTITIONS},
            output_topics(spec.outputs[AT_LEAST_ONCE]) if AT_LEAST_ONCE in spec.outputs else {},
        )

    def to_the_end(self) -> History:
        """Starts drivers until one has read all input.

        Raises:
            OperatorError: if a driver failed without being killed; names its log.
            UnavailableError: if a driver made no progress for minutes.
        """
        spec_path = self._folder / "spec.json"
        self._spec.write(spec_path)
        try:
            while not self._run_driver(spec_path, self._kills.pop(0) if self._kills else None):
                pass
        finally:
            self._topics.close()
        return self.history

    def _run_driver(self, spec_path: Path, kill: Kill | None) -> bool:
        """Runs one driver; returns whether it ended successfully instead of being killed."""
        self.history.starts += 1
        number = self.history.starts
        log = self._folder / f"driver-{number}.log"
        environment = dict(os.environ)
        environment.pop(failpoints.ENVIRONMENT_VARIABLE, None)
        if kill is not None and kill.failpoint:
            environment[failpoints.ENVIRONMENT_VARIABLE] = f"{kill.failpoint}=kill@{_fired_file(log)}"
        with open(log, "wb") as out:
            driver = subprocess.Popen(
                [sys.executable, *self._program, str(spec_path)],
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=out,
            )
        try:
            return self._watch(driver, kill, log)
        finally:
            _kill_tree(driver)

    def _watch(self, driver: subprocess.Popen[bytes], kill: Kill | None, log: Path) -> bool:
        due: float | None = None
        stalled = Deadline.after_seconds(_STALLED_SECONDS)
        last = -1
        pauses = Pauses(None, _POLL_SECONDS)
        while driver.poll() is None:
            progress = self._observe()
            if progress != last:
                last, stalled = progress, Deadline.after_seconds(_STALLED_SECONDS)
            if stalled.expired:
                raise UnavailableError(
                    f"the driver made no progress for {_STALLED_SECONDS:.0f} s; see its log {log}."
                )
            if kill is not None and kill.at_share is not None:
                if due is None and self.history.committed[-1] >= kill.at_share * self._total:
                    due = time.monotonic() + kill.after_seconds
                if due is not None and time.monotonic() >= due:
                    self._add_kill(kill)
                    return False
            pauses.wait()
        if driver.returncode == 0:
            self._observe()
            return True
        if kill is None or not _fired_file(log).exists():
            tail = "\n".join(log.read_text(errors="replace").splitlines()[-15:])
            raise OperatorError(f"the driver failed without being killed. The end of {log}:\n{tail}")
        self._add_kill(kill)
        return False

    def _add_kill(self, kill: Kill) -> None:
        self.history.kills.append((time.monotonic() - self._began, kill.what))

    def _observe(self) -> int:
        """Adds an observation to the history; returns a number that changes with any progress."""
        committed, written = self._topics.committed(), self._topics.written()
        self.history.seconds.append(time.monotonic() - self._began)
        self.history.committed.append(committed)
        self.history.written.append(written)
        self._report(self.history)
        return committed + written


def _fired_file(log: Path) -> Path:
    """Returns the file that a driver's failpoint creates when it fires."""
    return log.with_suffix(".fired")


def _kill_tree(driver: subprocess.Popen[bytes]) -> None:
    """Sends SIGKILL to the script, its JVM and its Python workers, as a power failure would end them."""
    try:
        script = psutil.Process(driver.pid)
        tree = [*script.children(recursive=True), script]
    except psutil.NoSuchProcess:
        tree = []
    for each in tree:
        try:
            each.send_signal(signal.SIGKILL)
        except psutil.NoSuchProcess:
            continue
    driver.wait()
