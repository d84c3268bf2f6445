"""One run of the demo: the driver is started, killed, started again until it has read everything."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import psutil

from kafka_eos_source.demo.flights import STATUSES
from kafka_eos_source.demo.query import Spec
from kafka_eos_source.errors import OperatorError, UnavailableError
from kafka_eos_source.kafka.playground import Watch
from kafka_eos_source.runtime import failpoints
from kafka_eos_source.runtime.deadline import Deadline

SOURCE_PARTITIONS = 4
OUTPUT_PARTITIONS = 2
EXACTLY_ONCE, AT_LEAST_ONCE = "exactly_once", "at_least_once"

_LOOK_SECONDS = 0.25
#: Longest a driver may go without any progress.
_STALLED_SECONDS = 180.0


@dataclass(frozen=True)
class Kill:
    """When the driver dies next.

    Attributes:
        at_share: once this share of the input is committed; None = at the failpoint.
        after_seconds: so long after that, which makes the moment random.
        failpoint: name of a failpoint that kills it.
    """

    at_share: float | None
    after_seconds: float = 0.0
    failpoint: str = ""

    @property
    def what(self) -> str:
        return self.failpoint or "random"


def schedule(seed: int, random_kills: int = 3, compare: bool = True) -> list[Kill]:
    """The exact kills, while there certainly is something to do; then random ones, one in each equal part.

    ``commit.after_commit`` lies exactly between the two commits: the batch is in Kafka, and Spark does not
    know. ``direct.after_flush`` is the same moment of the at-least-once query: a task's records are in Kafka.
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
    """What was seen from outside while it ran.

    Attributes:
        seconds: when, since the start.
        committed: input offsets committed by the exactly-once query.
        written: records in the output topics of the at-least-once query; 0 without one.
        kills: when a driver died, and of what.
        starts: drivers started.
    """

    seconds: list[float] = field(default_factory=list)
    committed: list[int] = field(default_factory=list)
    written: list[int] = field(default_factory=list)
    kills: list[tuple[float, str]] = field(default_factory=list)
    starts: int = 0


def output_topics(prefix: str) -> dict[str, int]:
    """The output topics of one query, and their partitions."""
    return {f"{prefix}.{status}": OUTPUT_PARTITIONS for status in STATUSES}


class Run:
    """Drives one run. `history` fills while `to_the_end` runs.

    Args:
        spec: what the drivers run.
        total: events in the input.
        kills: one driver each; the one after them may end.
        folder: for the spec and the drivers' logs.
        tell: called with the history whenever it grew.
        program: what Python is told to run as a driver; the path of the spec follows.
    """

    def __init__(
        self,
        spec: Spec,
        total: int,
        kills: list[Kill],
        folder: Path,
        tell: Callable[[History], None],
        program: Sequence[str] = ("-m", "kafka_eos_source.demo.query"),
    ) -> None:
        self.history = History()
        self._spec = spec
        self._total = total
        self._kills = list(kills)
        self._folder = folder
        self._tell = tell
        self._program = program
        self._began = time.monotonic()
        self._pause = threading.Event()
        self._outside = Watch(
            spec.bootstrap_servers,
            spec.application_id,
            {spec.source: SOURCE_PARTITIONS},
            output_topics(spec.outputs[AT_LEAST_ONCE]) if AT_LEAST_ONCE in spec.outputs else {},
        )

    def to_the_end(self) -> History:
        """Starts drivers until one ends well.

        Raises:
            OperatorError: a driver failed by itself; its log is named.
            UnavailableError: nothing moved for minutes.
        """
        spec_path = self._folder / "spec.json"
        self._spec.write(spec_path)
        try:
            while not self._one_driver(spec_path, self._kills.pop(0) if self._kills else None):
                pass
        finally:
            self._outside.close()
        return self.history

    def _one_driver(self, spec_path: Path, kill: Kill | None) -> bool:
        """Whether it ended well, rather than being killed."""
        self.history.starts += 1
        number = self.history.starts
        log = self._folder / f"driver-{number}.log"
        environment = dict(os.environ)
        environment.pop(failpoints.ENVIRONMENT_VARIABLE, None)
        if kill is not None and kill.failpoint:
            environment[failpoints.ENVIRONMENT_VARIABLE] = f"{kill.failpoint}=kill@{_fired(log)}"
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
        while driver.poll() is None:
            seen = self._look()
            if seen != last:
                last, stalled = seen, Deadline.after_seconds(_STALLED_SECONDS)
            if stalled.expired:
                raise UnavailableError(f"the driver does nothing; its log is {log}.")
            if kill is not None and kill.at_share is not None:
                if due is None and self.history.committed[-1] >= kill.at_share * self._total:
                    due = time.monotonic() + kill.after_seconds
                if due is not None and time.monotonic() >= due:
                    self._died(kill)
                    return False
            self._pause.wait(_LOOK_SECONDS)
        if driver.returncode == 0:
            self._look()
            return True
        if kill is None or not _fired(log).exists():
            tail = "\n".join(log.read_text(errors="replace").splitlines()[-15:])
            raise OperatorError(f"the driver failed by itself; the end of {log}:\n{tail}")
        self._died(kill)
        return False

    def _died(self, kill: Kill) -> None:
        self.history.kills.append((time.monotonic() - self._began, kill.what))

    def _look(self) -> int:
        """Adds to the history; returns a number that moves when anything does."""
        committed, written = self._outside.committed(), self._outside.written()
        self.history.seconds.append(time.monotonic() - self._began)
        self.history.committed.append(committed)
        self.history.written.append(written)
        self._tell(self.history)
        return committed + written


def _fired(log: Path) -> Path:
    """The file that a driver's failpoint makes when it fires."""
    return log.with_suffix(".fired")


def _kill_tree(driver: subprocess.Popen[bytes]) -> None:
    """SIGKILL to the script, its JVM and its Python workers: the plug is pulled."""
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
