"""Switches metrics off and on in the processes of a running query, and takes what each micro-batch cost.

`benchmarks.metrics` uses it. No option of the product switches these measurements off, so `install` replaces
them by functions that do nothing while the switch is off. All processes of the query share the switch, a file
of one byte in memory. The process that commits turns it after each micro-batch, so neighbouring micro-batches
of the same warm processes are compared.

The functions that it replaces also count the time that they take themselves, which is far less noisy than a
difference between two micro-batches, and does not see what they cost indirectly.
"""

from __future__ import annotations

import functools
import math
import mmap
import os
import random
import struct
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import psutil
import pyarrow as pa
import pyarrow.compute as pc

#: Folder with the switch and the samples. Without the variable, `install` does nothing.
FOLDER = "KAFKA_EOS_BENCH_METRICS"
#: Micro-batches of one block: two with metrics and two without, in one of two orders.
BLOCK = 4
_ORDERS = ((True, False, False, True), (False, True, True, False))
#: Every so many micro-batches, the processes are listed again. It is coprime to `BLOCK`.
_LISTED_EVERY = 25


class Switch:
    """One byte that all processes see."""

    def __init__(self, folder: Path) -> None:
        with open(folder / "switch", "r+b") as file:
            self._byte = mmap.mmap(file.fileno(), 1)

    @classmethod
    def create(cls, folder: Path) -> Switch:
        """Creates the file, with metrics on."""
        (folder / "switch").write_bytes(b"\x01")
        return cls(folder)

    @property
    def is_on(self) -> bool:
        return self._byte[0] == 1

    def turn(self, on: bool) -> None:
        self._byte[0] = int(on)


class Spent:
    """Sums the time that the measurements of this process take, in a file that others can read.

    Nested calls count once. Wall-clock time counts in the main thread only: nobody waits for the others.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._pid = 0
        self._open()

    def _open(self) -> None:
        """Opens a file for this process. A fork gets its own."""
        self._pid, self._totals = os.getpid(), [0.0, 0.0]
        self._lock, self._of_thread = threading.Lock(), threading.local()
        path = self._folder / f"spent-{self._pid}"
        path.write_bytes(_TOTALS.pack(0.0, 0.0))
        with open(path, "r+b") as file:
            self._bytes = mmap.mmap(file.fileno(), _TOTALS.size)

    @contextmanager
    def counted(self) -> Iterator[None]:
        if os.getpid() != self._pid:
            self._open()
        if getattr(self._of_thread, "is_inside", False):
            yield
            return
        self._of_thread.is_inside = True
        cpu, wall = time.thread_time(), time.perf_counter()
        try:
            yield
        finally:
            cpu, wall = time.thread_time() - cpu, time.perf_counter() - wall
            self._of_thread.is_inside = False
            with self._lock:
                self._totals[0] += cpu
                self._totals[1] += wall * (threading.current_thread() is threading.main_thread())
                self._bytes[:] = _TOTALS.pack(*self._totals)

    @staticmethod
    def of_all(folder: Path) -> tuple[float, float]:
        """Returns the CPU and wall-clock seconds of all processes so far."""
        found = [_TOTALS.unpack(each.read_bytes()) for each in folder.glob("spent-*")]
        return sum(each[0] for each in found), sum(each[1] for each in found)


_TOTALS = struct.Struct("dd")
#: The methods of `observe.trace.Trace`.
TRACE_METHODS = (
    "begin",
    "planned",
    "enter",
    "count",
    "gauge",
    "tasks",
    "sink",
    "committed",
    "state",
    "happened",
    "waiting",
    "explained_by",
    "finish",
    "report_if_slow",
)


def install() -> None:
    """Makes the measurements of this process obey the switch, and count their own time."""
    named = os.environ.get(FOLDER)
    if not named:
        return
    from kafka_eos_source.commit import micro_batch
    from kafka_eos_source.observe import prometheus
    from kafka_eos_source.observe.background import Call
    from kafka_eos_source.observe.source import SourceObserver
    from kafka_eos_source.observe.trace import SinkCounts, Trace
    from kafka_eos_source.plan.open_transactions import OpenTransactions

    folder = Path(named)
    switch, spent = Switch(folder), Spent(folder)
    for name in TRACE_METHODS:
        _obey(switch, spent, Trace, name, SinkCounts if name == "sink" else lambda: None)
    _measure_tasks(switch, spent)
    _obey(switch, spent, micro_batch, "describe", lambda: None)
    _obey(switch, spent, micro_batch, "finish", lambda: None)
    for name in ("planned", "write", "newest_batch", "look_up_newest_batch"):
        _obey(switch, spent, SourceObserver, name, lambda: None)
    _obey(switch, spent, SourceObserver, "asking", nullcontext)
    _obey(switch, spent, OpenTransactions, "hidden", dict)
    for owner, name in ((Call, "run"), (prometheus, "queries_of_source"), (prometheus, "exposition")):
        _obey(None, spent, owner, name, lambda: None)
    _take_samples(micro_batch, switch, folder)


def _measure_tasks(switch: Switch, spent: Spent) -> None:
    """Switches what writing tasks measure, except for the highest partition, which the commit needs."""
    from kafka_eos_source.spark.schema import PARTITION
    from kafka_eos_source.stage import meter

    measured = meter._by_topic

    def by_topic(batch: pa.RecordBatch, topic: str | None) -> dict[str, tuple[int, int, int]]:
        if switch.is_on or topic is None:
            with spent.counted():
                return measured(batch, topic)
        highest = pc.max(batch.column(PARTITION)).as_py() if PARTITION in batch.schema.names else None
        return {topic: (-1 if highest is None else highest, 0, 0)}

    meter._by_topic = by_topic
    _obey(switch, spent, meter, "_traceparent", str)


def _obey(switch: Switch | None, spent: Spent, owner: Any, name: str, instead: Callable[[], Any]) -> None:
    """Replaces a function by one that counts its time, and does nothing while the switch is off."""
    original = getattr(owner, name)

    @functools.wraps(original)
    def switched(*arguments: Any, **more: Any) -> Any:
        if switch is not None and not switch.is_on:
            return instead()
        with spent.counted():
            return original(*arguments, **more)

    setattr(owner, name, switched)


def _take_samples(micro_batch: Any, switch: Switch, folder: Path) -> None:
    commit = micro_batch.commit_micro_batch
    costs = _Costs()

    @functools.wraps(commit)
    def sampled(*arguments: Any, **more: Any) -> Any:
        result = commit(*arguments, **more)
        number = next(each for each in arguments if type(each) is int)
        found = (
            number,
            int(switch.is_on),
            time.monotonic(),
            *costs.cpu_seconds(number),
            *Spent.of_all(folder),
        )
        with (folder / "samples").open("a") as out:
            out.write(f"{' '.join(map(repr, found))}\n")
        switch.turn(on_in(number + 1))
        return result

    micro_batch.commit_micro_batch = sampled


def on_in(number: int) -> bool:
    """Returns whether metrics are on in a micro-batch. Each block has an order of its own."""
    order = random.Random(number // BLOCK).choice(_ORDERS)
    return order[number % BLOCK]


class _Costs:
    """Reads the CPU time of all processes of the query, with the resolution of the kernel's scheduler."""

    def __init__(self) -> None:
        self._clocks: list[int] = []

    def cpu_seconds(self, number: int) -> tuple[float, float]:
        """Returns the CPU seconds at the end of this micro-batch, and at the beginning of the next one.

        They differ if the processes were listed in between. NaN if a process has ended.
        """
        end = self._now()
        if not self._clocks or number % _LISTED_EVERY == 0:
            driver = next(each for each in psutil.Process().parents() if each.name().startswith("java"))
            processes = [driver, *driver.children(recursive=True)]
            # the number of a process's CPU clock, as clock_getcpuclockid(3) computes it
            self._clocks = [(~each.pid << 3) | 2 for each in processes]
        return end, self._now()

    def _now(self) -> float:
        try:
            return sum(map(time.clock_gettime, self._clocks)) if self._clocks else math.nan
        except OSError:
            self._clocks = []
            return math.nan
