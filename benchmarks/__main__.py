"""``python -m benchmarks``: runs each task with every contender in turn, then prints the tables."""

from __future__ import annotations

import contextlib
import datetime
import json
import os
import platform
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

import click
import psutil

from benchmarks import report
from benchmarks.contenders.base import Contender, Job
from benchmarks.kafka import Cluster
from benchmarks.latency import LatencyRun, measure_latency
from benchmarks.measure import Run, measure
from benchmarks.plot import plot
from benchmarks.restart import RestartRun, measure_restart
from benchmarks.tasks import TASKS, Judge, Task
from benchmarks.workload import Workload
from kafka_eos_source.embedded import EmbeddedKafka
from kafka_eos_source.errors import KafkaEosError, UnavailableError

QUICK_RECORDS = 200_000
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


@click.command(context_settings={"help_option_names": ["-h", "--help"]})
@click.argument("tasks", nargs=-1, type=click.Choice(list(TASKS)))
@click.option("--records", type=click.IntRange(1), help="In place of each task's own number.")
@click.option("--keys", type=click.IntRange(1), help="Different keys.  [default: 100000]")
@click.option(
    "--quick", is_flag=True, help=f"{QUICK_RECORDS:,} records at most: whether it works, not how fast."
)
@click.option("--only", default="", help="Contenders, with commas between; else all but the slowest.")
@click.option(
    "--repeat", default=1, show_default=True, type=click.IntRange(1), help="Runs of each; the median counts."
)
@click.option(
    "--batch", default=500_000, show_default=True, help="Records of a micro-batch, for those that have such."
)
@click.option(
    "--cores", default=os.cpu_count() or 1, show_default=True, help="Parallelism of each contender."
)
@click.option("--bootstrap", default="", help="A cluster to use; else one is started.")
@click.option("--keep", is_flag=True, help="Logs and state of a good run too; those of a bad one are kept.")
@click.option("--out", default="benchmarks/results", show_default=True, type=click.Path(path_type=Path))
def main(
    tasks: Sequence[str],
    records: int | None,
    keys: int | None,
    quick: bool,
    only: str,
    repeat: int,
    batch: int,
    cores: int,
    bootstrap: str,
    keep: bool,
    out: Path,
) -> None:
    """Runs kafka-eos and its peers one after the other, on one broker and machine.

    TASKS names the tasks to run; by default all. The output of each run is checked.
    """
    signal.signal(
        signal.SIGTERM, lambda *_: sys.exit(143)
    )  # SIGTERM then ends all processes that were started
    names = [name.strip() for name in only.split(",") if name.strip()]
    chosen = [_sized(TASKS[name], records, keys, quick) for name in tasks or TASKS]
    known = {contender.name for task in chosen for contender in task.contenders}
    if not known.issuperset(names):
        raise click.BadParameter(f"--only has {only!r}; the tasks' contenders are {', '.join(sorted(known))}")
    folder = Path(tempfile.mkdtemp(prefix="kafka-eos-bench-"))
    settings = Settings(repeat, batch, cores, names, folder, out)
    click.echo(f"logs and state are in {folder}", err=True)
    try:
        with _cluster(bootstrap) as address:
            cluster = Cluster(address)
            cluster.warm_up()
            problems = [problem for task in chosen for problem in run_task(cluster, task, settings)]
    except KafkaEosError as error:
        raise click.ClickException(str(error)) from error
    for problem in problems:
        click.echo(problem, err=True)
    if problems:
        sys.exit(1)
    if not keep:
        shutil.rmtree(folder, ignore_errors=True)


def run_task(cluster: Cluster, task: Task, settings: Settings) -> list[str]:
    """Runs a task's contenders and writes its tables; returns the problems of contenders."""
    contenders = []
    missing = []
    for contender in task.contenders:
        if contender.name not in settings.only if settings.only else contender.name in task.on_request:
            continue
        try:
            contender.prepare()
            contenders.append(contender)
        except UnavailableError as error:
            missing.append(f"{contender.title} is left out, it cannot be had here: {error.message}")
            click.echo(missing[-1], err=True)
    if not contenders:
        return []
    click.echo(f"{task.title}: {task.workload.records:,} records", err=True)
    about = _about(task, settings)
    if task.judge is Judge.LATENCY:
        told = _latency(cluster, task, contenders, settings)
    else:
        topic_in = f"{_TOPIC_IN}.{task.name}.{time.time():.0f}"
        cluster.create(topic_in, task.workload.partitions)
        try:
            cluster.preload(task.workload, topic_in)
            run = _restarts if task.judge in _RESTARTS else _rates
            told = run(cluster, task, contenders, settings, topic_in)
        finally:
            cluster.delete([topic_in])
    _write(task, about, told, missing, settings.out)
    plot(settings.out / f"{task.name}.svg", task.title, told.unit, told.values)
    return [f"{task.name}: {each.title}: {each.problem}" for each in told.results if each.problem]


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


def _rates(
    cluster: Cluster, task: Task, contenders: Sequence[Contender], settings: Settings, topic_in: str
) -> Told:
    truth = task.workload.truth()
    results = _in_turn(
        cluster,
        task,
        contenders,
        settings,
        lambda _: topic_in,
        lambda contender, job: measure(cluster, contender, job, truth, task.judge),
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
        lambda contender, job: measure_latency(cluster, contender, job, task.workload, task.rate),
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


@contextlib.contextmanager
def _cluster(bootstrap: str) -> Iterator[str]:
    if bootstrap:
        yield bootstrap
        return
    with EmbeddedKafka() as kafka:
        yield kafka.bootstrap_servers


def _sized(task: Task, records: int | None, keys: int | None, quick: bool) -> Task:
    workload: Workload = task.workload
    count = records or workload.records
    if quick:
        count = min(count, QUICK_RECORDS)
    return replace(task, workload=replace(workload, records=count, keys=keys or workload.keys))


def _about(task: Task, settings: Settings) -> dict[str, Any]:
    return {
        "task": task.title,
        "when": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
        "command": " ".join(["./dev bench", *sys.argv[1:]]),
        **asdict(task.workload),
        "output_partitions": task.output_partitions,
        "batch_records": task.batch or settings.batch,
        "runs": settings.repeat,
        "cores": settings.cores,
        "machine": f"{os.cpu_count()} cores ({platform.machine()}), "
        f"{psutil.virtual_memory().total >> 30} GiB, {platform.system()}",
    }


def _write(task: Task, about: dict[str, Any], told: Told, missing: Sequence[str], out: Path) -> None:
    parts = [
        f"## {task.title}",
        f"`{about['command']}`: {about['records']:,} records of {about['record_bytes']} bytes, "
        f"{about['keys']:,} keys, {about['partitions']} partitions to {about['output_partitions']}; "
        f"{about['machine']}; {about['when']}; {about['runs']} run(s).",
        *told.tables,
        "\n".join(f"- {line}" for line in missing),
        "\n".join(f"- {result.title}: {result.settings}" for result in told.results),
    ]
    text = "\n\n".join(part for part in parts if part) + "\n"
    out.mkdir(parents=True, exist_ok=True)
    (out / f"{task.name}.md").write_text(text)
    (out / f"{task.name}.json").write_text(json.dumps(report.as_json(told.results, about), indent=1) + "\n")
    click.echo(text)


if __name__ == "__main__":
    main()
