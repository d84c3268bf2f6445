"""Runs the contenders of a task in turn, and collects their results."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import click

from benchmarks import report
from benchmarks.contenders.base import Contender, Job
from benchmarks.kafka import Cluster
from benchmarks.latency import LatencyRun, measure_latency
from benchmarks.measure import Run, measure
from benchmarks.restart import RestartRun, measure_restart
from benchmarks.tasks import Judge, Task
from benchmarks.workload import Workload
from kafka_eos_source.embedded import EmbeddedKafka
from kafka_eos_source.errors import UnavailableError

_TOPIC_IN = "bench.in"

R = TypeVar("R", Run, LatencyRun, RestartRun)
S = TypeVar("S", bound=report.Runs[Any])


@dataclass(frozen=True)
class Settings:
    """Settings of one call, for all of its tasks.

    Attributes:
        repeat: number of runs of each contender.
        batch: number of records in a micro-batch.
        cores: parallelism of each contender.
        only: names of contenders; empty means all except those that run on request.
        folder: folder for the contenders' files.
        out: folder for the results.
    """

    repeat: int
    batch: int
    cores: int
    only: Sequence[str]
    folder: Path
    out: Path


_RESTARTS = (Judge.RESTART_COUNTS, Judge.RESTART_COPIES)


@dataclass(frozen=True)
class Told:
    """The results of a task's runs.

    Attributes:
        results: the result of each contender.
        tables: tables and lists as Markdown.
        unit: unit of the plot's values.
        values: values of the plot, by title.
    """

    results: Sequence[report.Runs[Any]]
    tables: Sequence[str]
    unit: str
    values: Mapping[str, float]


class Inputs:
    """Topics with the records of workloads, which tasks with the same workload share; a context manager."""

    def __init__(self, cluster: Cluster) -> None:
        self._cluster = cluster
        self._topics: dict[Workload, str] = {}

    def topic(self, workload: Workload) -> str:
        """Returns the topic with these records, and fills it if this is the first call for them."""
        if workload not in self._topics:
            name = f"{_TOPIC_IN}.{time.time():.0f}.{len(self._topics)}"
            self._cluster.create(name, workload.partitions)
            self._topics[workload] = name
            self._cluster.preload(workload, name)
        return self._topics[workload]

    def drop(self, workload: Workload) -> None:
        """Deletes the topic with these records, if there is one."""
        name = self._topics.pop(workload, None)
        if name is not None:
            self._cluster.delete([name])

    def __enter__(self) -> Inputs:
        return self

    def __exit__(self, *_error: object) -> None:
        for workload in list(self._topics):
            self.drop(workload)


@contextlib.contextmanager
def running_cluster(bootstrap: str) -> Iterator[str]:
    """Yields the bootstrap servers of a cluster: this one, or else a new one for the time being."""
    if bootstrap:
        yield bootstrap
        return
    with EmbeddedKafka() as kafka:
        yield kafka.bootstrap_servers


def available(task: Task, only: Sequence[str]) -> tuple[list[Contender], list[str]]:
    """Returns the contenders of a task that can run here, and a line for each one that cannot.

    Args:
        task: the task.
        only: names of contenders; empty means all except those that run on request.
    """
    contenders: list[Contender] = []
    missing = []
    for contender in task.contenders:
        if contender.name not in only if only else contender.name in task.on_request:
            continue
        try:
            contender.prepare()
            contenders.append(contender)
        except UnavailableError as error:
            missing.append(f"{contender.title} is left out, it cannot be had here: {error.message}")
            click.echo(missing[-1], err=True)
    return contenders, missing


def run_contenders(
    cluster: Cluster, task: Task, contenders: Sequence[Contender], settings: Settings, inputs: Inputs
) -> Told:
    """Runs the contenders of a task in turn."""
    click.echo(f"{task.title}: {task.workload.records:,} records", err=True)
    if task.judge is Judge.LATENCY:
        return _latency(cluster, task, contenders, settings)
    run = _restarts if task.judge in _RESTARTS else _rates
    return run(cluster, task, contenders, settings, inputs.topic(task.workload))


def _rates(
    cluster: Cluster, task: Task, contenders: Sequence[Contender], settings: Settings, topic_in: str
) -> Told:
    results = _in_turn(
        cluster,
        task,
        contenders,
        settings,
        lambda _: topic_in,
        lambda contender, job: measure(cluster, contender, job, task.workload, task.judge),
        report.Result,
    )
    tables = [
        report.contenders_table(results),
        report.ratios_table(results, task.ours),
        "\n".join(f"- {line}" for line in report.targets_lines(results, task.targets)),
    ]
    values = {each.title: each.warm for each in results if not each.problem}
    return Told(results, tables, "records/s after the first quarter", values)


def _latency(cluster: Cluster, task: Task, contenders: Sequence[Contender], settings: Settings) -> Told:
    def fresh(name: str) -> str:
        cluster.create(f"{name}.in", task.workload.partitions)
        return f"{name}.in"

    results = _in_turn(
        cluster,
        task,
        contenders,
        settings,
        fresh,
        lambda contender, job: measure_latency(
            cluster, contender, job, task.workload, task.rate, task.warm_seconds
        ),
        report.LatencyResult,
    )
    values = {each.title: each.end_to_end_ms[0] for each in results if not each.problem}
    tables = [report.latency_table(results), report.parts_table(results)]
    return Told(results, tables, "ms from sent to visible, p50", values)


def _restarts(
    cluster: Cluster, task: Task, contenders: Sequence[Contender], settings: Settings, topic_in: str
) -> Told:
    truth, copies = task.workload.truth(), task.judge is Judge.RESTART_COPIES
    results = _in_turn(
        cluster,
        task,
        contenders,
        settings,
        lambda _: topic_in,
        lambda contender, job: measure_restart(cluster, contender, job, truth, copies=copies),
        report.RestartResult,
    )
    values = {each.title: each.seconds for each in results if not each.problem}
    return Told(results, [report.restart_table(results)], "s from the restart to the first record", values)


def _in_turn(
    cluster: Cluster,
    task: Task,
    contenders: Sequence[Contender],
    settings: Settings,
    topic_in: Callable[[str], str],
    run: Callable[[Contender, Job], R],
    result: Callable[[str, str, str, str, int, list[R]], S],
) -> list[S]:
    """Runs every contender in turn, ``repeat`` times, so that noise of the machine affects all of them."""
    runs: dict[str, list[R]] = {contender.name: [] for contender in contenders}
    for turn in range(settings.repeat):
        for contender in contenders:
            before = set(cluster.topics())
            name = f"bench.{task.name}.{time.time():.0f}.{turn}.{contender.name}"
            own = settings.folder / f"{task.name}-{contender.name}-{turn}"
            own.mkdir()
            cluster.create(f"{name}.out", task.output_partitions)
            cluster.write_once(f"{name}.out", task.output_partitions)
            job = Job(
                name=name,
                bootstrap=cluster.bootstrap,
                topic_in=topic_in(name),
                topic_out=f"{name}.out",
                partitions=task.output_partitions,
                cores=settings.cores,
                batch_records=task.batch or settings.batch,
                folder=own,
                compression=task.workload.compression,
                documents=task.workload.documents,
            )
            done = run(contender, job)
            runs[contender.name].append(done)
            click.echo(f"  {contender.title}: {report.in_short(done, task.workload.records)}", err=True)
            cluster.delete(sorted(set(cluster.topics()) - before))
    records = task.workload.records
    return [
        result(each.name, each.title, each.guarantee, each.settings, records, runs[each.name])
        for each in contenders
    ]
