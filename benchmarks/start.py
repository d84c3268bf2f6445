"""``python -m benchmarks.start``: where the seconds go between the start of a query and its first commit.

A query copies 1,000 records. With kafka-eos, its Python processes record when they start, what they import
and how long their first calls take (`benchmarks.start_events`); the program prints that as a table. Then it
prints the medians of the starts of kafka-eos, kafka-eos with `recommended_settings`, and Spark's own
connector, which take turns. The recommended settings include the class archive if this host has one; Spark's
connector is measured without one. Recording costs about 0.1 s, so the medians come from runs without it.
"""

from __future__ import annotations

import json
import statistics
import sys
import tempfile
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import click

from benchmarks.contenders.base import PROGRAMS, Job
from benchmarks.contenders.spark_query import EosQuery, SparkQuery, Tuning
from benchmarks.kafka import Cluster
from benchmarks.processes import Command, Processes
from benchmarks.start_events import FILE
from benchmarks.workload import Workload
from kafka_eos_source import recommended_settings
from kafka_eos_source.embedded import EmbeddedKafka

_RECORDS = 1_000
_PARTITIONS = 4
_POLL_SECONDS = 0.05

#: Names of the processes, by a part of their command line; the first that matches counts.
_NAMES = {
    "spark_copy.py": "driver",
    "sys.version_info": "Spark asks for the version of Python",
    "lookup_data_sources": "finds data sources",
    "create_data_source": "creates the source: schema",
    "python_streaming_source_runner": "the source: offsets, tasks",
    "plan_data_source_read": "plans the read",
    "write_into_data_source": "plans the write",
    "pyspark.worker": "a worker: tasks",
    "python_streaming_sink_runner": "commits",
}


@dataclass
class Traced:
    """What one process did.

    Attributes:
        name: what the process is for.
        at: when it was created, in seconds since the start of the driver.
        started: CPU seconds until Python runs its first line.
        theirs, ours: CPU seconds for imports of other packages, and of this one.
        called: seconds for the calls of this package, less their imports.
        until: when its last recorded event ended, as ``at``.
    """

    name: str
    at: float
    started: float = 0.0
    theirs: float = 0.0
    ours: float = 0.0
    called: float = 0.0
    until: float = 0.0
    _imports: list[tuple[float, float]] = field(default_factory=list, compare=False, repr=False)

    def add(self, event: Mapping[str, Any]) -> None:
        """Adds an event; those of a process come in the order in which they ended."""
        seconds = event["ended"] - event["began"]
        if event["kind"] in ("process", "fork"):
            self.started += event["cpu"]
        elif event["kind"] == "import":
            if event["name"].startswith(("kafka_eos_source", "pyspark_kafka_eos")):
                self.ours += event["cpu"]
            else:
                self.theirs += event["cpu"]
            self._imports.append((event["began"], seconds))
        elif self.name != "driver":
            inside = sum(taken for began, taken in self._imports if began >= event["began"])
            self.called += seconds - inside


def processes_of(events: Iterable[Mapping[str, Any]], began: float) -> list[Traced]:
    """Returns the processes of a query in the order in which they were created."""
    found: dict[int, Traced] = {}
    for event in events:
        if event["kind"] in ("process", "fork"):
            command = " ".join(event["command"])
            name = next((name for sign, name in _NAMES.items() if sign in command), command[-60:])
            if event["kind"] == "process" and "daemon" in command:
                name += ", Spark's daemon"
            found.setdefault(event["pid"], Traced(name, event["began"] - began))
        traced = found.get(event["pid"])
        if traced is not None:
            traced.add(event)
            traced.until = max(traced.until, event["ended"] - began)
    return sorted(found.values(), key=lambda each: each.at)


def table(processes: Sequence[Traced]) -> str:
    """Returns the processes as Markdown: CPU seconds for imports, which other work disturbs least."""
    rows = [
        [
            "at, s",
            "process",
            "starts, CPU s",
            "imports of others, CPU s",
            "our imports, CPU s",
            "our calls, s",
            "until, s",
        ],
        ["--:", "---", "--:", "--:", "--:", "--:", "--:"],
    ]
    for each in processes:
        figures = [each.started, each.theirs, each.ours, each.called]
        rows.append(
            [f"{each.at:.2f}", each.name, *(f"{figure:.2f}" for figure in figures), f"{each.until:.2f}"]
        )
    return "\n".join("| " + " | ".join(row) + " |" for row in rows)


def run(cluster: Cluster, query: EosQuery | SparkQuery, folder: Path, events: Path | None) -> float:
    """Runs a query until it has copied the records; returns the seconds until they were committed."""
    folder.mkdir()
    job = Job(folder.name, cluster.bootstrap, "start.in", f"{folder.name}.out", _PARTITIONS, 2, 0, folder)
    cluster.create(job.topic_out, _PARTITIONS)
    (command,) = query.commands(job)
    environment = dict(command.environment)
    if events is not None:
        environment[FILE] = str(events)
        environment["PYTHONPATH"] = f"{PROGRAMS / 'traced'}:{environment['PYTHONPATH']}"
    began = time.time()
    with Processes([Command(command.arguments, environment)], folder) as processes:
        while not processes.ended():
            time.sleep(_POLL_SECONDS)
        if processes.failed():
            raise click.ClickException(processes.failed())
        (batch,) = processes.batches()
    return batch.ended - began


@click.command(context_settings={"help_option_names": ["-h", "--help"]})
@click.option("--rounds", default=5, show_default=True, type=click.IntRange(0), help="Starts of each.")
def main(rounds: int) -> None:
    """Prints where the seconds of a start go, and how long starts take."""
    recommended = Tuning("recommended_settings()", recommended_settings())
    queries: list[EosQuery | SparkQuery] = [
        EosQuery("kafka-eos"),
        EosQuery("recommended", tuning=recommended),
        SparkQuery("spark"),
    ]
    for query in queries:
        query.prepare()
    taken: dict[str, list[float]] = {query.title: [] for query in queries}
    with EmbeddedKafka() as kafka, tempfile.TemporaryDirectory() as scratch:
        cluster = Cluster(kafka.bootstrap_servers)
        cluster.warm_up()
        cluster.create("start.in", _PARTITIONS)
        cluster.preload(Workload(records=_RECORDS), "start.in")
        events = Path(scratch) / "events"
        began = time.time()
        run(cluster, queries[0], Path(scratch) / "traced", events)
        click.echo(table(processes_of(map(json.loads, events.read_text().splitlines()), began)) + "\n")
        for number in range(rounds):
            for query in queries:
                name = f"{query.name}-{number}"
                taken[query.title].append(run(cluster, query, Path(scratch) / name, None))
                print(f"{query.title}: {taken[query.title][-1]:.2f} s", file=sys.stderr)
    for title, seconds in taken.items():
        if seconds:
            click.echo(
                f"- {title}: {statistics.median(seconds):.1f} s from the start of the process to the first "
                f"commit, median of {len(seconds)} ({min(seconds):.1f} to {max(seconds):.1f})"
            )


if __name__ == "__main__":
    main()
