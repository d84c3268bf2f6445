"""Starts, watches and ends the processes of a contender."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType

import psutil

#: A contender's program prints this, with its `time.time`, when it has processed its first record.
_FIRST = re.compile(r"^FIRST (\d+(?:\.\d+)?)$", re.MULTILINE)
#: A Spark program prints this for each micro-batch (`programs/running.py`).
_BATCH = re.compile(r"^BATCH (\{.*\})$", re.MULTILINE)
_END_SECONDS = 20.0
#: Kinds of processes, as tables name them.
JVM, WORKERS, COMMITTING, PLANNING, DRIVER, BROKER = (
    "JVM",
    "Python workers",
    "committing process",
    "planning processes",
    "driver's Python",
    "broker",
)
_TAIL_LINES = 15
#: Environment variables of the benchmark's own Spark, which must not reach another Spark.
_FOREIGN = ("PYSPARK_SUBMIT_ARGS", "PYTHONPATH", "SPARK_HOME", "JAVA_TOOL_OPTIONS")


@dataclass(frozen=True)
class Command:
    """One process of a contender.

    Attributes:
        arguments: program and arguments.
        environment: variables added to those of this process.
    """

    arguments: Sequence[str]
    environment: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Batch:
    """A micro-batch, as its program reported it.

    Attributes:
        rows: number of records read.
        began: its start, in seconds since the epoch.
        trigger_ms: duration of the whole micro-batch.
        durations_ms: durations of its parts, by Spark's names.
    """

    rows: int
    began: float
    trigger_ms: int
    durations_ms: Mapping[str, int]

    @property
    def ended(self) -> float:
        return self.began + self.trigger_ms / 1000


class Processes:
    """All processes of one run; a context manager that leaves none behind."""

    def __init__(self, commands: Sequence[Command], folder: Path) -> None:
        self._commands = commands
        self._logs = [folder / f"process-{number}.log" for number in range(len(commands))]
        self._folder = folder
        self._started: list[psutil.Popen] = []
        self._kinds: dict[tuple[int, float], str] = {}
        self._used: dict[tuple[int, float], float] = {}

    def __enter__(self) -> Processes:
        for command, log in zip(self._commands, self._logs, strict=True):
            environment = {name: value for name, value in os.environ.items() if name not in _FOREIGN}
            with open(log, "wb") as out:
                self._started.append(
                    psutil.Popen(
                        list(command.arguments),
                        env={**environment, **command.environment},
                        cwd=self._folder,
                        stdin=subprocess.DEVNULL,
                        stdout=out,
                        stderr=out,
                    )
                )
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Asks the processes to end, then kills what is left of their process trees."""
        trees = [each for process in self._started for each in _tree(process)]
        for process in self._started:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.send_signal(signal.SIGTERM)
        _, left = psutil.wait_procs(trees, timeout=_END_SECONDS)
        for each in left:
            with contextlib.suppress(psutil.NoSuchProcess):
                each.kill()
        psutil.wait_procs(left, timeout=_END_SECONDS)

    def kill(self) -> None:
        """Kills all process trees with SIGKILL, as a power failure would."""
        trees = [each for process in self._started for each in _tree(process)]
        for each in trees:
            with contextlib.suppress(psutil.NoSuchProcess):
                each.kill()
        psutil.wait_procs(trees, timeout=_END_SECONDS)

    def cpu_seconds(self) -> float:
        """Returns the CPU seconds of all processes, including children that have ended."""
        return sum(map(_cpu_seconds, self._started))

    def cpu_by_process(self) -> dict[str, float]:
        """Returns the CPU seconds up to now by kind of process, the broker that this bench started included.

        A process that has ended counts with what it had used when this method last saw it.
        """
        trees = [each for process in self._started for each in _tree(process)]
        for each in [*trees, *_brokers()]:
            with contextlib.suppress(psutil.NoSuchProcess):
                key = (each.pid, each.create_time())
                command = each.cmdline()
                if command:  # a process that has just ended has none
                    self._kinds[key] = kind_of(command)  # Python and a shell become a JVM by exec
                used = each.cpu_times()
                self._used[key] = used.user + used.system
        found: dict[str, float] = {}
        for key, seconds in self._used.items():
            kind = self._kinds.get(key, DRIVER)
            found[kind] = found.get(kind, 0.0) + seconds
        return found

    def failed(self) -> str:
        """Returns how a process failed, with the end of its log; empty if none has failed."""
        for process, log in zip(self._started, self._logs, strict=True):
            code = process.poll()
            if code:
                tail = "\n".join(log.read_text(errors="replace").splitlines()[-_TAIL_LINES:])
                return f"process ended with {code}; the end of {log}:\n{tail}"
        return ""

    def ended(self) -> bool:
        """Returns whether all processes have ended."""
        return all(process.poll() is not None for process in self._started)

    def first_seconds(self) -> float | None:
        """Returns when a program reported its first processed record; None if none has yet."""
        told = [found for log in self._logs for found in _FIRST.findall(log.read_text(errors="replace"))]
        return min(map(float, told), default=None)

    def batches(self) -> list[Batch]:
        """Returns the micro-batches that the programs reported, in order."""
        told = [found for log in self._logs for found in _BATCH.findall(log.read_text(errors="replace"))]
        batches = map(json.loads, told)
        return [
            Batch(each["rows"], each["began"], each["trigger_ms"], each["durations_ms"]) for each in batches
        ]


#: Kinds of processes by a part of their command line; the first that matches counts.
_SIGNS = (
    ("kafka.Kafka", BROKER),
    ("python_streaming_sink_runner", COMMITTING),
    ("commit_data_source_write", COMMITTING),
    ("python_streaming_source_runner", PLANNING),
    (" pyspark.sql.worker.", PLANNING),
    (" pyspark.worker", WORKERS),
    ("/quix_", WORKERS),
)


def kind_of(command: Sequence[str]) -> str:
    """Returns the kind of a process by its command line."""
    text = " ".join(command)
    found = next((name for sign, name in _SIGNS if sign in text), "")
    return found or (JVM if command and Path(command[0]).name == "java" else DRIVER)


def _brokers() -> list[psutil.Process]:
    """Returns the broker processes that this process started; none if ``--bootstrap`` names a cluster."""
    found = []
    for each in psutil.Process().children(recursive=True):
        with contextlib.suppress(psutil.NoSuchProcess):
            if kind_of(each.cmdline()) == BROKER:
                found.append(each)
    return found


def others_cpu_seconds() -> float:
    """Returns CPU seconds of other processes since the machine started, which disturb a measurement.

    Other means neither this process nor any that it started, such as the broker.
    """
    busy = sum(
        psutil.cpu_times()._asdict().get(name, 0.0) for name in ("user", "system", "nice", "softirq", "irq")
    )
    return float(busy) - _cpu_seconds(psutil.Process())


def _cpu_seconds(process: psutil.Process) -> float:
    """Returns the CPU seconds of a process and its children, including ended ones."""
    total = 0.0
    for each in _tree(process):
        with contextlib.suppress(psutil.NoSuchProcess):
            used = each.cpu_times()
            total += used.user + used.system + used.children_user + used.children_system
    return total


def _tree(process: psutil.Process) -> list[psutil.Process]:
    try:
        return [process, *process.children(recursive=True)]
    except psutil.NoSuchProcess:
        return []
