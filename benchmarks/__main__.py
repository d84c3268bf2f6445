"""``python -m benchmarks``: runs each task with every contender in turn, then prints the tables."""

from __future__ import annotations

import datetime
import json
import os
import platform
import shutil
import signal
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import click
import psutil

from benchmarks import report
from benchmarks.kafka import Cluster
from benchmarks.plot import plot
from benchmarks.rounds import Inputs, Settings, Told, available, run_contenders, running_cluster
from benchmarks.tasks import TASKS, Task
from benchmarks.workload import Documents, Workload
from kafka_eos_source.errors import KafkaEosError

QUICK_RECORDS = 200_000


@click.command(context_settings={"help_option_names": ["-h", "--help"]})
@click.argument("tasks", nargs=-1, type=click.Choice(list(TASKS)))
@click.option("--records", type=click.IntRange(1), help="In place of each task's own number.")
@click.option("--keys", type=click.IntRange(1), help="Different keys.  [default: 100000]")
@click.option(
    "--quick", is_flag=True, help=f"{QUICK_RECORDS:,} records at most: whether it works, not how fast."
)
@click.option("--fields", type=click.IntRange(3), help="Task json: declared fields.  [default: 3]")
@click.option(
    "--chosen",
    type=click.IntRange(0),
    help="Task json: fields of the output.  [default: all declared]",
)
@click.option("--document-bytes", type=click.IntRange(1), help="Task json: of a document.  [default: 120]")
@click.option("--bad", type=click.FloatRange(0, 1), help="Task json: share of bad documents.  [default: 0]")
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
    fields: int | None,
    chosen: int | None,
    document_bytes: int | None,
    bad: float | None,
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
    documents = {"fields": fields, "chosen": chosen, "document_bytes": document_bytes, "bad": bad}
    asked = [_sized(TASKS[name], records, keys, quick, documents) for name in tasks or TASKS]
    known = {contender.name for task in asked for contender in task.contenders}
    if not known.issuperset(names):
        raise click.BadParameter(f"--only has {only!r}; the tasks' contenders are {', '.join(sorted(known))}")
    folder = Path(tempfile.mkdtemp(prefix="kafka-eos-bench-"))
    settings = Settings(repeat, batch, cores, names, folder, out)
    click.echo(f"logs and state are in {folder}", err=True)
    try:
        with running_cluster(bootstrap) as address:
            cluster = Cluster(address)
            cluster.warm_up()
            problems = [problem for task in asked for problem in run_task(cluster, task, settings)]
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
    contenders, missing = available(task, settings.only)
    if not contenders:
        return []
    about = _about(task, settings)
    with Inputs(cluster) as inputs:
        told = run_contenders(cluster, task, contenders, settings, inputs)
    _write(task, about, told, missing, settings.out)
    plot(settings.out / f"{task.name}.svg", task.title, told.unit, told.values)
    return [f"{task.name}: {each.title}: {each.problem}" for each in told.results if each.problem]


def _sized(
    task: Task, records: int | None, keys: int | None, quick: bool, documents: Mapping[str, Any]
) -> Task:
    workload: Workload = task.workload
    if isinstance(workload, Documents):
        stated = {name: value for name, value in documents.items() if value is not None}
        workload = replace(workload, **stated)
        task = replace(task, title=f"{task.title}: {workload.title}")
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
