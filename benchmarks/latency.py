"""Measures how long each record of a steady stream takes until a reader sees it in the output."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from confluent_kafka import Consumer, KafkaException, Producer, TopicPartition

from benchmarks.contenders.base import Contender, Job
from benchmarks.kafka import Cluster
from benchmarks.processes import Batch, Processes, others_cpu_seconds
from benchmarks.workload import KEY_BYTES, Workload
from kafka_eos_source.observe.figures import Step
from kafka_eos_source.observe.journal import query_journal
from kafka_eos_source.runtime.deadline import Deadline

#: Warm-up after the first output record, before measuring starts. A JVM compiles for about a minute.
WARM_SECONDS = 60.0
_FIRST_SECONDS = 120.0
_LAST_SECONDS = 60.0
_TICK_SECONDS = 0.01
_AT_ONCE = 10_000

Percentiles = tuple[float, float, float]

#: What a transaction consists of. Steps before it, and the notes after it, do not count.
_TRANSACTION = (
    Step.BEGIN,
    Step.PRODUCE,
    Step.FLUSH,
    Step.OFFSETS,
    Step.COMMIT,
)


@dataclass(frozen=True)
class LatencyRun:
    """Result of one run.

    Attributes:
        problem: why there are no figures; empty if there are.
        end_to_end_ms: p50, p95, p99 from sending a record until a ``read_committed`` reader has it.
        trigger_ms: p50, p95, p99 of a micro-batch as Spark reports it; None without Spark.
        parts_ms: median of each part of a micro-batch, by Spark's names (``addBatch``, …).
        cores: number of cores that the contender used.
        transaction_ms: median of the transaction of a micro-batch as kafka-eos measured it: its records,
            offsets and end; None for others.
        others_cores: number of cores that other processes used at the same time, which is noise.
    """

    problem: str = ""
    end_to_end_ms: Percentiles = (0.0, 0.0, 0.0)
    trigger_ms: Percentiles | None = None
    parts_ms: Mapping[str, float] = field(default_factory=dict)
    cores: float = 0.0
    others_cores: float = 0.0
    transaction_ms: float | None = None


def measure_latency(
    cluster: Cluster,
    contender: Contender,
    job: Job,
    workload: Workload,
    rate: int,
    warm_seconds: float = WARM_SECONDS,
) -> LatencyRun:
    """Runs a contender on a steady stream, and checks that its output holds each record once.

    Args:
        cluster: the cluster with the topics.
        contender: the contender, already prepared.
        job: its work, with two empty topics.
        workload: the records that are measured.
        rate: records per second.
        warm_seconds: how long the contender runs before measuring starts.
    """
    try:
        with Processes(contender.commands(job), job.folder) as processes:
            return _Stream(cluster, processes, job, workload, rate, warm_seconds).run()
    except KafkaException as error:
        return LatencyRun(f"the output cannot be judged: {error}")


class _Stream:
    """Sends and reads records in one thread; each record carries its number and the time it was sent."""

    def __init__(
        self,
        cluster: Cluster,
        processes: Processes,
        job: Job,
        workload: Workload,
        rate: int,
        warm_seconds: float,
    ) -> None:
        self._processes = processes
        self._name = job.name
        self._warm_seconds = warm_seconds
        self._topic = job.topic_in
        self._rate = rate
        self._records = workload.records
        self._padding = b"." * (workload.record_bytes - KEY_BYTES - 30)
        self._producer = Producer(
            {
                "bootstrap.servers": cluster.bootstrap,
                "linger.ms": 0,
                "acks": "all",
                "enable.idempotence": True,
            }
        )
        self._reader: Any = Consumer(
            {
                "bootstrap.servers": cluster.bootstrap,
                "group.id": f"{job.topic_out}-reader",
                "isolation.level": "read_committed",
                "enable.auto.commit": False,
                "fetch.wait.max.ms": 5,
            }
        )
        self._reader.assign([TopicPartition(job.topic_out, number, 0) for number in range(job.partitions)])
        self._sent = 0
        self._began = 0.0
        self._numbers: list[int] = []
        self._late_ms: list[float] = []

    def run(self) -> LatencyRun:
        try:
            return self._run()
        finally:
            self._reader.close()

    def _run(self) -> LatencyRun:
        self._began = time.time()
        if not self._flow(lambda: bool(self._numbers), Deadline.after_seconds(_FIRST_SECONDS)):
            return LatencyRun(self._processes.failed() or f"nothing came within {_FIRST_SECONDS:.0f} s")
        warm = Deadline.after_seconds(self._warm_seconds)
        self._flow(lambda: warm.expired, None)
        first, since = self._sent, time.time()
        others, own = others_cpu_seconds(), self._processes.cpu_seconds()
        self._flow(lambda: self._sent >= first + self._records, None)
        until = time.time()
        cores = (self._processes.cpu_seconds() - own) / (until - since)
        others_cores = (others_cpu_seconds() - others) / (until - since)
        self._producer.flush(_LAST_SECONDS)
        deadline = Deadline.after_seconds(_LAST_SECONDS)
        while len(set(self._numbers)) < self._sent and not deadline.expired and not self._processes.failed():
            self._look()
        problem = self._processes.failed() or _wrong(self._numbers, self._sent)
        if problem:
            return LatencyRun(problem)
        counted = np.array(self._late_ms)[np.array(self._numbers) >= first]
        batches = [batch for batch in self._processes.batches() if since <= batch.began <= until]
        return LatencyRun(
            "",
            _percentiles(counted),
            _triggers(batches),
            _parts(batches),
            cores,
            others_cores,
            _transaction_ms(self._name, since, until),
        )

    def _flow(self, done: Callable[[], bool], deadline: Deadline | None) -> bool:
        """Sends at the rate and reads the output until all is seen; returns False at the deadline."""
        while not done():
            if (deadline is not None and deadline.expired) or self._processes.failed():
                return False
            due = int((time.time() - self._began) * self._rate)
            while self._sent < due:
                value = b"%010d %.6f " % (self._sent, time.time()) + self._padding
                self._producer.produce(self._topic, value, b"%010d" % (self._sent % 1000))
                self._sent += 1
            self._producer.poll(0)
            self._look()
        return True

    def _look(self) -> None:
        messages = self._reader.consume(_AT_ONCE, 0)
        if not messages:
            one = self._reader.poll(_TICK_SECONDS)
            messages = [] if one is None else [one]
        now = time.time()
        for message in messages:
            if message.error() is not None:
                raise KafkaException(message.error())
            number, sent, _ = message.value().split(b" ", 2)
            self._numbers.append(int(number))
            self._late_ms.append((now - float(sent)) * 1000)


def _wrong(numbers: Sequence[int], sent: int) -> str:
    different = len(set(numbers))
    if different < sent:
        return f"WRONG: {sent - different} of {sent} records never came out"
    return f"WRONG: {len(numbers) - different} records came out twice" if len(numbers) > different else ""


def _triggers(batches: Sequence[Batch]) -> Percentiles | None:
    return _percentiles(np.array([batch.trigger_ms for batch in batches])) if batches else None


def _parts(batches: Sequence[Batch]) -> dict[str, float]:
    names = {name for batch in batches for name in batch.durations_ms}
    medians = {
        name: statistics.median(batch.durations_ms.get(name, 0) for batch in batches) for name in names
    }
    return dict(sorted(medians.items(), key=lambda part: -part[1]))


def _transaction_ms(application_id: str, since: float, until: float) -> float | None:
    """Returns the median duration of the transactions between two times, from the journal of the query."""
    journal = query_journal(application_id)
    found = [
        sum(batch.seconds.get(step.value, 0.0) for step in _TRANSACTION) * 1000
        for batch in (() if journal is None else journal.batches)
        if since <= batch.ended_at <= until and batch.seconds.get(Step.COMMIT.value)
    ]
    return statistics.median(found) if found else None


def _percentiles(values: Any) -> Percentiles:
    p50, p95, p99 = np.percentile(values, [50, 95, 99]).tolist()
    return p50, p95, p99
