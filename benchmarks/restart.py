"""Measures an outage: all processes are killed and restarted; it ends with the first new result."""

from __future__ import annotations

import threading
import time
from dataclasses import dataclass
from typing import Any

from confluent_kafka import Consumer, KafkaException, TopicPartition

from benchmarks.contenders.base import Contender, Job
from benchmarks.kafka import Cluster, OutputReader
from benchmarks.processes import Processes, others_cpu_seconds
from benchmarks.progress import Ints, counted, wrong
from benchmarks.watch import Watcher
from kafka_eos_source.errors import UnavailableError
from kafka_eos_source.runtime.deadline import Deadline

#: Killed once this share of the records is counted and visible.
_KILL_SHARE = 0.25
_LOOK_SECONDS = 0.5
_STALLED_SECONDS = 300.0


@dataclass(frozen=True)
class RestartRun:
    """Result of one run.

    Attributes:
        problem: why there are no figures; empty if there are.
        seconds: from the start of the new processes until a ``read_committed`` reader gets their first
            record.
        again: number of records that the kill duplicated; must be 0 if the contender promises exactly-once.
        others_cores: number of cores that other processes used at the same time, which is noise.
        cold_seconds: the same as ``seconds`` for the first start of all, with nothing to restore.
    """

    problem: str = ""
    seconds: float = 0.0
    again: int = 0
    others_cores: float = 0.0
    cold_seconds: float = 0.0


def measure_restart(
    cluster: Cluster, contender: Contender, job: Job, truth: Ints, *, copies: bool
) -> RestartRun:
    """Runs a contender, kills all of its processes, runs it again, and checks the whole output.

    Args:
        cluster: the cluster with the topics.
        contender: the contender, already prepared.
        job: its work.
        truth: number of records of each key.
        copies: whether the output is copies of the input; otherwise counts.
    """
    try:
        with OutputReader(cluster.bootstrap, job.topic_out, job.partitions, copies=copies) as reader:
            return _Restart(cluster, contender, job, truth, reader).run()
    except (KafkaException, UnavailableError, ValueError) as error:
        return RestartRun(f"the output cannot be judged: {error}")


class _Restart:
    def __init__(
        self, cluster: Cluster, contender: Contender, job: Job, truth: Ints, reader: OutputReader
    ) -> None:
        self._cluster = cluster
        self._contender = contender
        self._job = job
        self._truth = truth
        self._reader = reader
        self._pause = threading.Event()

    def run(self) -> RestartRun:
        records = int(self._truth.sum())
        began = time.time()
        with Processes(self._contender.commands(self._job), self._job.folder) as processes:
            self._first_behind((0,) * self._job.partitions, processes)
            cold = time.time() - began
            problem = self._until_killed(processes, records)
        if problem:
            return RestartRun(problem)
        ends = self._ends()
        self._reader.read()
        if counted(self._reader.output) >= records:
            return RestartRun("everything was done when it was killed; more records are needed")
        others, began = others_cpu_seconds(), time.time()
        with Processes(self._contender.commands(self._job), self._job.folder) as processes:
            came = self._first_behind(ends, processes)
            seconds = time.time() - began
            others_cores = (others_cpu_seconds() - others) / seconds
            if not came:
                return RestartRun(processes.failed() or "nothing came after the restart")
            problem = self._to_the_end(processes, records)
        if problem:
            return RestartRun(problem)
        self._reader.read()
        if self._contender.exactly_once:
            found = wrong(self._reader.output, self._truth, exactly_once=True)
            return RestartRun(f"WRONG: {found}" if found else "", seconds, 0, others_cores, cold)
        again = counted(self._reader.output) - records
        return RestartRun("" if again >= 0 else f"WRONG: {-again} lost", seconds, again, others_cores, cold)

    def _until_killed(self, processes: Processes, records: int) -> str:
        """Waits for the moment to kill the processes and kills them; returns a problem, if any."""
        deadline = Deadline.after_seconds(_STALLED_SECONDS)
        while counted(self._reader.output) < _KILL_SHARE * records:
            if processes.failed() or processes.ended() or deadline.expired:
                return processes.failed() or "was done, or stood still, before it was to be killed"
            self._pause.wait(_LOOK_SECONDS)
            self._reader.read()
        processes.kill()
        return ""

    def _ends(self) -> tuple[int, ...]:
        """Returns the output's end offsets once they no longer change."""
        ends = self._cluster.ends(self._job.topic_out, self._job.partitions)
        while True:
            self._pause.wait(_LOOK_SECONDS)
            again = self._cluster.ends(self._job.topic_out, self._job.partitions)
            if again == ends:
                return ends
            ends = again

    def _first_behind(self, ends: tuple[int, ...], processes: Processes) -> bool:
        """Waits for the first committed record after these end offsets; returns whether one came."""
        reader: Any = Consumer(
            {
                "bootstrap.servers": self._cluster.bootstrap,
                "group.id": f"{self._job.topic_out}-first",
                "isolation.level": "read_committed",
                "enable.auto.commit": False,
                "fetch.wait.max.ms": 20,
            }
        )
        try:
            reader.assign([TopicPartition(self._job.topic_out, *at) for at in enumerate(ends)])
            deadline = Deadline.after_seconds(_STALLED_SECONDS)
            while not deadline.expired and not processes.failed():
                message = reader.poll(0.05)
                if message is not None and message.error() is not None:
                    raise KafkaException(message.error())
                if message is not None:
                    return True
            return False
        finally:
            reader.close()

    def _to_the_end(self, processes: Processes, records: int) -> str:
        """Waits for the end: of the process if it may repeat records, else until all records are there."""
        if self._contender.exactly_once:
            watcher = Watcher(
                self._cluster, processes, self._reader, self._job.topic_out, ends=self._contender.ends
            )
            return watcher.to_the_end(records).problem
        deadline = Deadline.after_seconds(_STALLED_SECONDS)
        while not processes.ended() and not deadline.expired:
            self._pause.wait(_LOOK_SECONDS)
        return processes.failed() or ("" if processes.ended() else "does not end")
