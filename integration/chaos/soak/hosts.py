"""Keeps driver processes running: a process that ends is started again, as a job scheduler does."""

from __future__ import annotations

import os
import random
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil

from integration.chaos.soak.folder import RunFolder
from integration.support.driver import Driver
from kafka_eos_source.runtime.deadline import Deadline

#: Failpoints with which a driver may start, and what each may do.
POINTS = (
    "commit.after_check",
    "commit.after_init",
    "commit.after_token",
    "commit.before_begin",
    "commit.within_produce",
    "commit.after_flush",
    "commit.before_commit",
    "commit.after_commit",
    "commit.before_cleanup",
    "stage.after_close",
)
_SINK_POINTS = (
    "commit.after_prepare",
    "commit.within_finish",
    "commit.after_finish",
    "sink.filesystem.before_manifest",
    "sink.filesystem.before_rename",
    "sink.sql.before_commit",
    "sink.sql.within_commit",
)
_STATE_POINTS = (
    "commit.within_changelog",
    "state.after_process",
    "state.after_pending",
    "state.after_promote",
)
POINTS_OF = {
    "spark": POINTS + _SINK_POINTS + _STATE_POINTS,
    "fast": POINTS,
    "fastarchive": POINTS + _SINK_POINTS,
}
_ACTIONS = ("kill", "kill-worker", "stop")
#: How many of the processes start with a failpoint.
_ARMED = 0.35


class Host:
    """One driver process, started again whenever it ends.

    Args:
        name: name of the host, as in `workload.Query.host`.
        run: the run's folder; starts are recorded there.
        start: starts a process with these failpoints.
        chance: chooses failpoints.

    Attributes:
        starts: how many processes were started.
        armed: whether processes start with a failpoint.
    """

    def __init__(
        self, name: str, run: RunFolder, start: Callable[[str], Driver], chance: random.Random
    ) -> None:
        self.name = name
        self.starts = 0
        self.armed = False
        self._run = run
        self._start = start
        self._chance = chance
        self._lock = threading.RLock()
        self._driver: Driver | None = None
        self._zombie: Driver | None = None
        self._zombie_until = Deadline.after_seconds(0)
        self._fired: tuple[str, Path] | None = None

    @property
    def driver(self) -> Driver | None:
        """The running process; None if there is none at the moment."""
        with self._lock:
            running = self._driver is not None and self._driver.process.poll() is None
            return self._driver if running else None

    def keep(self) -> None:
        """Starts the process if none runs, and ends a process that was overtaken when its time is up."""
        with self._lock:
            if self._zombie is not None and self._zombie_until.expired:
                self._zombie.kill()
                self._zombie = None
            if self.driver is None:
                if self._driver is not None:
                    self._driver.kill()  # what it left behind: its JVM and Python workers
                self._launch()

    def overtaken(self, seconds: float) -> Callable[[], None] | None:
        """Pauses the process and starts another one beside it.

        Returns:
            A function that resumes the paused process, which then lives for ``seconds`` at most; None if no
            process was running.
        """
        with self._lock:
            paused = self.driver
            if paused is None or self._zombie is not None:
                return None
            signal_all(paused, signal.SIGSTOP)
            self._zombie, self._zombie_until = paused, Deadline.after_seconds(seconds + 60)
            self._launch()

        def resume() -> None:
            with self._lock:
                if self._zombie is paused:
                    signal_all(paused, signal.SIGCONT)
                    self._zombie_until = Deadline.after_seconds(seconds)

        return resume

    def kill(self) -> None:
        """Kills the process with all that it started."""
        with self._lock:
            if self._driver is not None:
                self._driver.kill()

    def end_zombie(self) -> None:
        """Kills the process that was overtaken, if there is one."""
        with self._lock:
            if self._zombie is not None:
                self._zombie.kill()
                self._zombie = None

    def close(self) -> None:
        """Kills everything."""
        self.end_zombie()
        self.kill()

    def resume(self) -> None:
        """Resumes all processes that are paused."""
        with self._lock:
            if self.driver is not None:
                signal_all(self._driver, signal.SIGCONT)

    def take_fired(self) -> str | None:
        """Returns the failpoint of the process if it has fired since the last call."""
        with self._lock:
            if self._fired is None or not self._fired[1].exists():
                return None
            fired, self._fired = self._fired[0], None
            return fired

    @contextmanager
    def without_process(self) -> Iterator[None]:
        """Kills the process, and starts it again after the block."""
        with self._lock:
            self.kill()
            self.end_zombie()
            yield

    def processes(self) -> dict[int, str]:
        """Returns the role of each process, by process id: the script, its JVM, its Python processes."""
        driver = self.driver
        if driver is None:
            return {}
        found = {driver.process.pid: self.name}
        try:
            for each in psutil.Process(driver.process.pid).children(recursive=True):
                java = each.name() == "java"
                found[each.pid] = f"{self.name} JVM" if java else f"{self.name} Python"
        except psutil.NoSuchProcess:
            pass  # it ended while we looked
        return found

    def _launch(self) -> None:
        self.starts += 1
        failpoints = self._choose_failpoint() if self.armed and self._chance.random() < _ARMED else ""
        self._driver = self._start(failpoints)
        self._run.events.append(
            kind="start", host=self.name, log=self._driver.log.name, failpoints=failpoints.partition("@")[0]
        )

    def _choose_failpoint(self) -> str:
        point, action = self._chance.choice(POINTS_OF[self.name]), self._chance.choice(_ACTIONS)
        armed = f"{point}={action}*{self._chance.choice([1, 3, 20, 100])}"
        once = self._run.path / "once" / f"{self.name}-{self.starts}-{os.getpid()}"
        once.parent.mkdir(exist_ok=True)
        once.unlink(missing_ok=True)
        self._fired = armed, once
        return f"{armed}@{once}"


def signal_all(driver: Driver | None, number: int) -> None:
    """Sends a signal to a driver and all its descendants."""
    if driver is None or driver.process.poll() is not None:
        return
    try:
        script = psutil.Process(driver.process.pid)
        everything = [script, *script.children(recursive=True)]
    except psutil.NoSuchProcess:
        return
    for each in everything:
        try:
            each.send_signal(number)
        except psutil.NoSuchProcess:
            continue
