"""One run of one contender, seen from outside."""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from benchmarks.kafka import Cluster, CountReader
from benchmarks.processes import Command, Processes
from benchmarks.progress import Ints, Output, Sample, counted, curve, wrong
from kafka_eos_source.deadline import Deadline

_LOOK_SECONDS = 0.05
#: Walking the tree of processes costs ten times a look.
_CPU_SECONDS = 0.5
#: So long the output must stand still before it is read: reading is not to take the contender's time.
_QUIET_SECONDS = 1.5
#: So long nothing may come at all.
_STALLED_SECONDS = 120.0
_FIRST_SECONDS = 30.0
#: `Run.sustained` leaves this share of the records out.
_WARM_SHARE = 0.25


@dataclass(frozen=True)
class Run:
    """What came of it. All rates in records a second, all times in seconds.

    Attributes:
        problem: why there are no figures; empty if there are.
        seconds: from the first record processed to all records counted and visible.
        with_start_seconds: the same from the start of the process.
        sustained: the rate from the first commit that makes a quarter visible to the end.
        cpu_seconds: of the contender's processes in ``seconds``, and with its start.
        commits: looks at which more was visible than before.
        written: records of output.
    """

    problem: str = ""
    seconds: float = 0.0
    with_start_seconds: float = 0.0
    sustained: float = 0.0
    cpu_seconds: float = 0.0
    with_start_cpu_seconds: float = 0.0
    commits: int = 0
    written: int = 0


@dataclass
class Watched:
    """What was seen of a run: the output's last stable offsets, and (time, CPU seconds used so far)."""

    samples: list[Sample] = field(default_factory=list)
    cpu: list[tuple[float, float]] = field(default_factory=list)
    first_seconds: float | None = None
    problem: str = ""


def measure(
    cluster: Cluster, commands: Sequence[Command], folder: Path, topic: str, truth: Ints, exactly_once: bool
) -> Run:
    """Runs a contender until its output counts every record, or it is clear that it never will.

    Args:
        cluster: where the topics are.
        commands: its processes.
        folder: for its logs.
        topic: its output, empty.
        truth: records of each key.
        exactly_once: what it promises.

    Raises:
        KafkaEosError: the cluster does not answer.
    """
    with CountReader(cluster.bootstrap, topic, cluster.partitions(topic)) as reader:
        began = time.time()
        with Processes(commands, folder) as processes:
            watched = _watch(cluster, processes, reader, topic, int(truth.sum()))
        reader.read()  # what came after the end is judged too
        problem = watched.problem or _wrong(reader, truth, exactly_once)
        return Run(problem) if problem else figures(reader.output, watched, began)


def figures(output: Sequence[Output], watched: Watched, began: float) -> Run:
    """The figures of a run whose output is right."""
    visible = curve(output, watched.samples)
    times = np.array([sample.seconds for sample in watched.samples])
    records = int(visible[-1])
    end = float(times[np.argmax(visible == records)])
    warm = int(np.argmax(visible >= _WARM_SHARE * records))
    rest = records - int(visible[warm])
    first = began if watched.first_seconds is None else watched.first_seconds
    cpu_at = np.interp([began, first, end], *np.transpose(watched.cpu))
    return Run(
        seconds=end - first,
        with_start_seconds=end - began,
        sustained=rest / (end - float(times[warm])) if rest else 0.0,
        cpu_seconds=float(cpu_at[2] - cpu_at[1]),
        with_start_cpu_seconds=float(cpu_at[2]),
        commits=int((np.diff(visible, prepend=0) > 0).sum()),
        written=sum(len(part.offsets) for part in output),
    )


def _watch(cluster: Cluster, processes: Processes, reader: CountReader, topic: str, records: int) -> Watched:
    seen = Watched()
    pause = threading.Event()
    partitions = len(reader.output)
    moved = time.time()
    read_up_to: tuple[int, ...] = ()
    cpu_due = 0.0
    while True:
        sample = Sample(time.time(), cluster.stable(topic, partitions))
        if seen.samples and sample.stable != seen.samples[-1].stable:
            moved = sample.seconds
        seen.samples.append(sample)
        if sample.seconds >= cpu_due:
            seen.cpu.append((sample.seconds, processes.cpu_seconds()))
            cpu_due = sample.seconds + _CPU_SECONDS
        ended = processes.ended()
        quiet = ended or sample.seconds - moved >= _QUIET_SECONDS
        if quiet and sample.stable != read_up_to:
            reader.read()
            read_up_to = sample.stable
            if counted(reader.output) >= records:
                break
        seen.problem = processes.failed()
        if not seen.problem and ended:
            seen.problem = f"ended by itself with {counted(reader.output)} of {records} records counted"
        if not seen.problem and sample.seconds - moved >= _STALLED_SECONDS:
            seen.problem = f"stands still with {counted(reader.output)} of {records} records counted"
        if seen.problem:
            return seen
        pause.wait(_LOOK_SECONDS)
    deadline = Deadline.after_seconds(_FIRST_SECONDS)
    while seen.first_seconds is None and not deadline.expired:
        seen.first_seconds = processes.first_seconds()
        pause.wait(_LOOK_SECONDS)
    if seen.first_seconds is None:
        seen.problem = "did not tell when it processed its first record"
    return seen


def _wrong(reader: CountReader, truth: Ints, exactly_once: bool) -> str:
    found = wrong(reader.output, truth, exactly_once)
    return f"WRONG: {found}" if found else ""
