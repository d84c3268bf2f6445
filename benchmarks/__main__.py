"""``python -m benchmarks``: every contender in turn, then the tables."""

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
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import click
import psutil

from benchmarks import report
from benchmarks.contenders import ALL, ON_REQUEST, OURS, TARGETS, Contender, Job
from benchmarks.kafka import Cluster
from benchmarks.measure import Run, measure
from benchmarks.workload import RECORD_BYTES, Workload
from kafka_eos_source.embedded import EmbeddedKafka
from kafka_eos_source.errors import KafkaEosError

QUICK_RECORDS = 200_000
_TOPIC_IN = "bench.in"
_ONLY = (
    f"Of {', '.join(each.name for each in ALL)}; with commas between. Else all but {', '.join(ON_REQUEST)}."
)


@click.command(context_settings={"help_option_names": ["-h", "--help"]})
@click.option("--records", default=2_000_000, show_default=True, type=click.IntRange(1))
@click.option("--keys", default=100_000, show_default=True, type=click.IntRange(1))
@click.option("--quick", is_flag=True, help=f"{QUICK_RECORDS:,} records: whether it works, not how fast.")
@click.option("--only", default="", help=_ONLY)
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
    records: int,
    keys: int,
    quick: bool,
    only: str,
    repeat: int,
    batch: int,
    cores: int,
    bootstrap: str,
    keep: bool,
    out: Path,
) -> None:
    """Keyed count by kafka-eos and its peers: a topic of 110-byte records, counted by key, with state."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that nothing is left running
    workload = Workload(QUICK_RECORDS if quick else records, keys)
    chosen = _chosen(only)
    folder = Path(tempfile.mkdtemp(prefix="kafka-eos-bench-"))
    try:
        for contender in chosen:
            contender.prepare()
        with _cluster(bootstrap) as address:
            runs = _run_all(Cluster(address), workload, chosen, repeat, batch, cores, folder)
    except KafkaEosError as error:
        raise click.ClickException(str(error)) from error
    results = [
        report.Result(each.name, each.title, each.guarantee, each.settings, workload.records, runs[each.name])
        for each in chosen
    ]
    if not keep and not any(result.problem for result in results):
        shutil.rmtree(folder, ignore_errors=True)
    _write(results, _about(workload, repeat, batch, cores), out)
    for result in results:
        if result.problem:
            click.echo(f"{result.title}: {result.problem}", err=True)
    if any(result.problem for result in results):
        sys.exit(1)


def _chosen(only: str) -> list[Contender]:
    by_name = {contender.name: contender for contender in ALL}
    names = [name.strip() for name in only.split(",") if name.strip()]
    unknown = [name for name in names if name not in by_name]
    if unknown:
        raise click.BadParameter(f"no such contender: {', '.join(unknown)}; there are {', '.join(by_name)}")
    return [by_name[name] for name in names] or [each for each in ALL if each.name not in ON_REQUEST]


@contextlib.contextmanager
def _cluster(bootstrap: str) -> Iterator[str]:
    if bootstrap:
        yield bootstrap
        return
    with EmbeddedKafka() as kafka:
        yield kafka.bootstrap_servers


def _run_all(
    cluster: Cluster,
    workload: Workload,
    chosen: Sequence[Contender],
    repeat: int,
    batch: int,
    cores: int,
    folder: Path,
) -> dict[str, list[Run]]:
    """Every contender in turn, and that as often as asked: noise of the machine meets all of them."""
    truth = workload.truth()
    stamp = f"{time.time():.0f}"
    topic_in = f"{_TOPIC_IN}.{stamp}"
    click.echo(f"sending {workload.records:,} records; logs and state are in {folder}", err=True)
    cluster.create(topic_in, workload.partitions)
    runs: dict[str, list[Run]] = {contender.name: [] for contender in chosen}
    try:
        cluster.preload(workload, topic_in)
        for turn in range(repeat):
            for contender in chosen:
                before = set(cluster.topics())
                name = f"bench.{stamp}.{turn}.{contender.name}"
                own = folder / f"{contender.name}-{turn}"
                own.mkdir()
                cluster.create(f"{name}.out", workload.partitions)
                job = Job(
                    name, cluster.bootstrap, topic_in, f"{name}.out", workload.partitions, cores, batch, own
                )
                run = measure(cluster, contender, job, truth)
                runs[contender.name].append(run)
                told = run.problem or f"{workload.records / run.seconds:,.0f} records/s"
                click.echo(f"{contender.title}: {told}", err=True)
                cluster.delete(sorted({job.topic_out, *cluster.topics()} - before))
    finally:
        cluster.delete([topic_in])
    return runs


def _about(workload: Workload, repeat: int, batch: int, cores: int) -> dict[str, Any]:
    return {
        "workload": "keyed count",
        "when": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
        "command": " ".join(["./dev bench", *sys.argv[1:]]),
        "records": workload.records,
        "record_bytes": RECORD_BYTES,
        "keys": workload.keys,
        "partitions": workload.partitions,
        "batch_records": batch,
        "runs": repeat,
        "cores": cores,
        "machine": f"{os.cpu_count()} cores ({platform.machine()}), "
        f"{psutil.virtual_memory().total >> 30} GiB, {platform.system()}",
    }


def _write(results: Sequence[report.Result], about: dict[str, Any], out: Path) -> None:
    parts = [
        f"`{about['command']}`: {about['records']:,} records of {about['record_bytes']} bytes, "
        f"{about['keys']:,} keys, {about['partitions']} partitions; {about['machine']}; {about['when']}.",
        report.contenders_table(results),
        report.ratios_table(results, OURS),
        "\n".join(f"- {line}" for line in report.targets_lines(results, TARGETS)),
        "\n".join(f"- {result.title}: {result.settings}" for result in results),
    ]
    text = "\n\n".join(part for part in parts if part) + "\n"
    out.mkdir(parents=True, exist_ok=True)
    (out / "keyed-count.md").write_text(text)
    (out / "keyed-count.json").write_text(json.dumps(report.as_json(results, about), indent=1) + "\n")
    click.echo(text)
    click.echo(f"written to {out}", err=True)


if __name__ == "__main__":
    main()
