"""Measures one run of one contender."""

from __future__ import annotations

import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
from confluent_kafka import KafkaException
from numpy.typing import NDArray

from benchmarks.contenders.base import Contender, Job
from benchmarks.kafka import Cluster, OutputReader
from benchmarks.processes import Processes, others_cpu_seconds
from benchmarks.progress import Ints, Output, curve, wrong
from benchmarks.tasks import Judge
from benchmarks.watch import CpuSample, Watched, Watcher
from benchmarks.workload import Workload
from kafka_eos_source.errors import UnavailableError

#: `Run.sustained` leaves this share of the records out.
_WARM_SHARE = 0.25
#: Interval between two samples of the CPU that a query without output uses.
_TOLD_SECONDS = 0.25


@dataclass(frozen=True)
class Run:
    """Result of one run. All times are in seconds.

    Attributes:
        problem: why there are no figures; empty if there are.
        seconds: from the first record processed until all records are counted and visible.
        with_start_seconds: the same, from the start of the process.
        first_visible_seconds: from the start of the process until the first records are visible.
        sustained: records per second from the first sample that sees a quarter of them until the end; 0 if
            that sample sees all.
        sustained_cpu: CPU seconds per record in that part.
        cpu_seconds: CPU seconds of the contender's processes during ``seconds``.
        with_start_cpu_seconds: the same, during ``with_start_seconds``.
        others_cores: number of cores used by processes other than contender and broker, which is noise.
        commits: number of samples that saw more records than the sample before.
        written: number of output records.
        sustained_cpu_by_process: `sustained_cpu` by kind of process, and that of the broker.
        batches_ms: duration of each micro-batch, in ms; empty without Spark.
    """

    problem: str = ""
    seconds: float = 0.0
    with_start_seconds: float = 0.0
    first_visible_seconds: float = 0.0
    sustained: float = 0.0
    sustained_cpu: float = 0.0
    cpu_seconds: float = 0.0
    with_start_cpu_seconds: float = 0.0
    others_cores: float = 0.0
    commits: int = 0
    written: int = 0
    sustained_cpu_by_process: Mapping[str, float] = field(default_factory=dict)
    batches_ms: Sequence[int] = ()


def measure(cluster: Cluster, contender: Contender, job: Job, workload: Workload, judge: Judge) -> Run:
    """Runs a contender and checks its output; a failure is returned as the run's problem.

    Args:
        cluster: the cluster with the topics.
        contender: the contender, already prepared.
        job: its work.
        workload: the records that it reads.
        judge: how the output is checked.
    """
    try:
        if judge is Judge.PROGRESS:
            return _measure_told(contender, job, workload.records)
        return _measure(cluster, contender, job, workload, copies=judge is Judge.COPIES)
    except (KafkaException, UnavailableError, ValueError) as error:
        return Run(f"the output cannot be judged: {error}")


def _measure(cluster: Cluster, contender: Contender, job: Job, workload: Workload, *, copies: bool) -> Run:
    truth = workload.truth()
    with OutputReader(cluster.bootstrap, job.topic_out, job.partitions, copies=copies) as reader:
        began = time.time()
        with Processes(contender.commands(job), job.folder) as processes:
            watcher = Watcher(cluster, processes, reader, job.topic_out, ends=contender.ends)
            watched = watcher.to_the_end(int(truth.sum()))
            batches_ms = [batch.trigger_ms for batch in processes.batches()]
        if watched.problem:
            return Run(watched.problem)
        reader.read()  # records written after the end are checked too
        found = wrong(reader.output, truth, contender.exactly_once)
        found = found or next(filter(None, (workload.wrong_record(*each) for each in reader.sample)), "")
        if found:
            return Run(f"WRONG: {found}")
        read = workload.records / int(truth.sum())
        return replace(figures(reader.output, watched, began, read), batches_ms=batches_ms)


def _measure_told(contender: Contender, job: Job, records: int) -> Run:
    """Measures a query without output, by the micro-batches that its program reports."""
    began = time.time()
    cpu: list[CpuSample] = []
    with Processes(contender.commands(job), job.folder) as processes:
        pause = threading.Event()
        while not processes.ended():
            kinds = processes.cpu_by_process()
            cpu.append(CpuSample(time.time(), processes.cpu_seconds(), others_cpu_seconds(), kinds))
            pause.wait(_TOLD_SECONDS)
        failed = processes.failed()
        batches = processes.batches()
    if failed:
        return Run(failed)
    rows = sum(batch.rows for batch in batches)
    if rows != records:
        return Run(f"WRONG: {rows} of {records} records read")
    visible = np.cumsum([0, *(batch.rows for batch in batches)])
    times = np.array([batches[0].began, *(batch.ended for batch in batches)])
    return _figures(visible, times, began, batches[0].began, cpu, commits=len(batches), written=0)


def figures(output: Sequence[Output], watched: Watched, began: float, read: float = 1.0) -> Run:
    """Computes the figures of a run with correct output.

    Args:
        output: the output.
        watched: what was observed.
        began: start of the run, on the samples' clock.
        read: input records for each record that the output counts; more than 1 if some are left out.
    """
    visible = np.rint(curve(output, watched.samples) * read).astype(np.int64)
    times = np.array([sample.seconds for sample in watched.samples])
    return _figures(
        visible,
        times,
        began,
        began if watched.first_seconds is None else watched.first_seconds,
        watched.cpu,
        commits=int((np.diff(visible, prepend=0) > 0).sum()),
        written=sum(len(part.offsets) for part in output),
    )


def _figures(
    visible: Ints,
    times: NDArray[np.float64],
    began: float,
    first: float,
    cpu: Sequence[CpuSample],
    *,
    commits: int,
    written: int,
) -> Run:
    """Computes the figures from how many records were done at which times."""
    records = int(visible[-1])
    end = float(times[np.argmax(visible == records)])
    warm = int(np.argmax(visible >= _WARM_SHARE * records))
    rest = records - int(visible[warm])
    cpu_times, contender, others = np.transpose([sample[:3] for sample in cpu])
    warm_at = float(times[warm])
    cpu_at, others_at = (np.interp([first, end, warm_at], cpu_times, used) for used in (contender, others))
    return Run(
        seconds=end - first,
        with_start_seconds=end - began,
        first_visible_seconds=float(times[np.argmax(visible > 0)]) - began,
        sustained=rest / (end - warm_at) if rest else 0.0,
        sustained_cpu=float(cpu_at[1] - cpu_at[2]) / rest if rest else 0.0,
        sustained_cpu_by_process=_by_process(cpu, warm_at, end, rest) if rest else {},
        cpu_seconds=float(cpu_at[1] - cpu_at[0]),
        with_start_cpu_seconds=float(cpu_at[1]),
        others_cores=float(others_at[1] - others_at[0]) / (end - first),
        commits=commits,
        written=written,
    )


def _by_process(cpu: Sequence[CpuSample], began: float, end: float, records: int) -> dict[str, float]:
    """Returns the CPU seconds for a record between two times, by kind of process."""
    times = [sample.seconds for sample in cpu]
    found = {}
    for kind in sorted({kind for sample in cpu for kind in sample.kinds}):
        used = [sample.kinds.get(kind, 0.0) for sample in cpu]
        before, after = np.interp([began, end], times, used)
        found[kind] = float(after - before) / records
    return found
