"""Watches a run from outside until its output counts every record, or clearly never will."""

from __future__ import annotations

import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

from benchmarks.kafka import Cluster, OutputReader
from benchmarks.processes import Processes, others_cpu_seconds
from benchmarks.progress import Sample, counted
from kafka_eos_source.runtime.deadline import Deadline

_LOOK_SECONDS = 0.05
#: Interval of CPU samples; walking the process tree costs ten times as much as reading offsets.
_CPU_SECONDS = 0.5
#: How long the output of an endless contender must be unchanged before it is read. Reading takes a core for
#: seconds, and must not slow the contender down.
_QUIET_SECONDS = 3.0
#: How long there may be no output at all.
_STALLED_SECONDS = 300.0
_FIRST_SECONDS = 30.0
#: A commit is answered before its control records are written (KIP-98), so output may become visible after
#: the contender has ended.
_MARKERS_SECONDS = 10.0


class CpuSample(NamedTuple):
    """CPU seconds used up to a time, by the contender and by unrelated processes of the machine.

    ``kinds`` has those of the contender and the broker by kind of process.
    """

    seconds: float
    contender: float
    others: float
    kinds: Mapping[str, float] = {}


@dataclass
class Watched:
    """The observations of one run.

    Attributes:
        samples: samples of the output's last stable offsets.
        cpu: samples of CPU usage.
        first_seconds: when the contender reported its first processed record.
        problem: why the run cannot finish; empty if it did.
    """

    samples: list[Sample] = field(default_factory=list)
    cpu: list[CpuSample] = field(default_factory=list)
    first_seconds: float | None = None
    problem: str = ""


class Watcher:
    """Watches one run.

    Args:
        cluster: the cluster with the output.
        processes: the contender's processes.
        reader: reads the output.
        topic: name of the output topic.
        ends: whether the contender ends by itself; then the output is read only afterwards.
    """

    def __init__(
        self, cluster: Cluster, processes: Processes, reader: OutputReader, topic: str, *, ends: bool
    ) -> None:
        self.watched = Watched()
        self._cluster = cluster
        self._processes = processes
        self._reader = reader
        self._topic = topic
        self._quiet_seconds = float("inf") if ends else _QUIET_SECONDS
        self._moved = self._ended = time.time()
        self._read_up_to: tuple[int, ...] = ()
        self._pause = threading.Event()

    def to_the_end(self, records: int) -> Watched:
        """Waits until the output counts this many records, or there is a problem.

        Raises:
            KafkaException: if the cluster does not answer.
        """
        counted_so_far = 0
        while True:
            ended = self._processes.ended()
            if not ended:
                self._ended = time.time()
            sample = self._look()
            quiet = ended or sample.seconds - self._moved >= self._quiet_seconds
            if quiet and sample.stable != self._read_up_to:
                self._reader.read()
                self._read_up_to = sample.stable
                counted_so_far = counted(self._reader.output)
            if counted_so_far >= records:
                self._look()  # the read may have seen more than the last sample
                self._await_first()
                return self.watched
            self.watched.problem = self._problem(
                ended, sample, f"{counted_so_far} of {records} records counted"
            )
            if self.watched.problem:
                return self.watched
            self._pause.wait(_LOOK_SECONDS)

    def _look(self) -> Sample:
        samples, cpu = self.watched.samples, self.watched.cpu
        sample = Sample(time.time(), self._cluster.stable(self._topic, len(self._reader.output)))
        if samples and sample.stable != samples[-1].stable:
            self._moved = sample.seconds
        samples.append(sample)
        if not cpu or sample.seconds - cpu[-1].seconds >= _CPU_SECONDS:
            used = max(
                self._processes.cpu_seconds(), cpu[-1].contender if cpu else 0.0
            )  # 0 after they have ended
            kinds = self._processes.cpu_by_process()
            cpu.append(CpuSample(sample.seconds, used, others_cpu_seconds(), kinds))
        return sample

    def _problem(self, ended: bool, sample: Sample, so_far: str) -> str:
        failed = self._processes.failed()
        if failed:
            return failed
        if ended and sample.seconds - self._ended >= _MARKERS_SECONDS:
            return f"ended by itself with {so_far}"
        if sample.seconds - self._moved >= _STALLED_SECONDS:
            return f"stands still with {so_far}"
        return ""

    def _await_first(self) -> None:
        """Waits until the first record is reported, which Spark does only after its micro-batch."""
        deadline = Deadline.after_seconds(_FIRST_SECONDS)
        while self.watched.first_seconds is None and not deadline.expired:
            self.watched.first_seconds = self._processes.first_seconds()
            self._pause.wait(_LOOK_SECONDS)
        if self.watched.first_seconds is None:
            self.watched.problem = "did not tell when it processed its first record"
