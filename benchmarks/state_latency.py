"""``python -m benchmarks.state_latency``: where the milliseconds of a small micro-batch with state go.

A steady stream of few records runs through a query without state, and through a keyed count. Each takes
micro-batches as fast as it can. The program prints the medians of their durations, and, for the count, when
each step began and how long it took: from Spark's own event log, and from the calls that the Python processes
record (`benchmarks.start_events`). ``--against`` names another checkout of this repository; its queries take
turns with those of this one, and are not traced.
"""

from __future__ import annotations

import json
import statistics
import sys
import tempfile
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import click
from confluent_kafka import Consumer, KafkaException, Producer, TopicPartition

from benchmarks.contenders.base import PROGRAMS, Job
from benchmarks.contenders.kafka_eos import KafkaEos
from benchmarks.contenders.spark_query import AT_ONCE, EosQuery, Tuning
from benchmarks.kafka import Cluster
from benchmarks.processes import Batch, Command, Processes
from benchmarks.start_events import CALLS, FILE
from kafka_eos_source import local_checkpoints
from kafka_eos_source.embedded import EmbeddedKafka
from kafka_eos_source.runtime.deadline import Deadline

#: Forms of the query, and how the output names them.
_TITLES = {
    "copy": "copy",
    "columns": "keyed count",
    "in-read": "keyed count with shards='partitions'",
}
_PARTITIONS = 4
_PATIENCE_SECONDS = 300.0
_PAUSE_SECONDS = 0.05
_KEYS = 1000

_OPERATOR = "kafka_eos_source.state.operator"
_STORE = "kafka_eos_source.state.store"
#: Functions of a stateful task whose calls are recorded, by module.
_STATE_CALLS: Mapping[str, Sequence[str]] = {
    f"{_OPERATOR}.task": ("Operator._shard_task",),
    f"{_OPERATOR}.shard": ("_open_at_token", "bring_to_batch", "OpenShard.persist_pending"),
    "kafka_eos_source.state.changelog.topic": ("CommittedShard.offsets",),
    f"{_STORE}.folder": ("open_store", "mark_closed"),
    f"{_STORE}.opening": ("open_owned",),
    f"{_STORE}.database": ("Database.close", "Database.write"),
    f"{_STORE}.transactional": ("TransactionalStateStore.close",),
    "kafka_eos_source.stage.parts": ("stage",),
}


@dataclass
class Traced:
    """Calls and stages of the micro-batches of one query.

    Attributes:
        steps: by the name of a step, one pair for each micro-batch: milliseconds from the trigger to the
            beginning of the step, and its duration. Of parallel tasks the longest counts.
        tasks, same_worker: number of stateful tasks, and of those that ran in the same process as the
            previous task of their shard.
    """

    steps: dict[str, list[tuple[float, float]]] = field(default_factory=lambda: defaultdict(list))
    tasks: int = 0
    same_worker: int = 0

    def add(self, name: str, batches: Sequence[Batch], spans: Iterable[tuple[float, float]]) -> None:
        """Adds spans (begin, end in seconds since the epoch), each to the micro-batch in which it began."""
        found: dict[int, list[tuple[float, float]]] = defaultdict(list)
        for began, ended in spans:
            number = next((n for n, batch in enumerate(batches) if batch.began <= began < batch.ended), None)
            if number is not None:
                found[number].append((began - batches[number].began, ended - began))
        for spans_in_batch in found.values():
            began, seconds = max(spans_in_batch, key=lambda span: span[1])
            self.steps[name].append((1000 * began, 1000 * seconds))

    def table(self) -> str:
        """Returns the steps in the order in which they begin, as Markdown."""
        rows = [
            (statistics.median(at for at, _ in spans), statistics.median(ms for _, ms in spans), name)
            for name, spans in self.steps.items()
        ]
        lines = [f"| {at:.0f} | {ms:.1f} | {name} |" for at, ms, name in sorted(rows)]
        return "\n".join(["| since the trigger, ms | ms | step |", "|--:|--:|---|", *lines])


def spans_of_spark(events: Iterable[Mapping[str, Any]]) -> dict[str, list[tuple[float, float]]]:
    """Returns begin and end of stages and tasks from the events of Spark's event log.

    A stage that has a parent in its job counts as the second one.
    """
    found: dict[str, list[tuple[float, float]]] = defaultdict(list)
    second: set[int] = set()
    for event in events:
        kind = event["Event"]
        if kind == "SparkListenerStageCompleted":
            about = event["Stage Info"]
            number = "second" if about["Parent IDs"] else "first"
            if about["Parent IDs"]:
                second.add(about["Stage ID"])
            span = about["Submission Time"] / 1000, about["Completion Time"] / 1000
            found[f"Spark: {number} stage ({about['Number of Tasks']} tasks)"].append(span)
        elif kind == "SparkListenerStageSubmitted" and event["Stage Info"]["Parent IDs"]:
            second.add(event["Stage Info"]["Stage ID"])
        elif kind == "SparkListenerTaskEnd":
            number = "second" if event["Stage ID"] in second else "first"
            about = event["Task Info"]
            span = about["Launch Time"] / 1000, about["Finish Time"] / 1000
            found[f"Spark: a task of the {number} stage"].append(span)
        elif kind == "SparkListenerJobStart":
            job = event["Submission Time"] / 1000
            found["Spark: job submitted"].append((job, job))
    return found


class Feed:
    """Sends records at a steady rate from a thread of its own, until `stop`."""

    def __init__(self, cluster: Cluster, topic: str, rate: int) -> None:
        self.sent = 0
        self._producer = Producer(
            {"bootstrap.servers": cluster.bootstrap, "linger.ms": 0, "enable.idempotence": True}
        )
        self._topic, self._rate = topic, rate
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._send, daemon=True)
        self._began = time.monotonic()
        self._thread.start()

    def _send(self) -> None:
        while not self._stopped.wait(0.01):
            due = int((time.monotonic() - self._began) * self._rate)
            while self.sent < due:
                self._producer.produce(self._topic, b"%090d" % self.sent, b"%010d" % (self.sent % _KEYS))
                self.sent += 1
            self._producer.poll(0)

    def stop(self) -> None:
        self._stopped.set()
        self._thread.join()
        self._producer.flush(_PATIENCE_SECONDS)


@dataclass(frozen=True)
class Query:
    """A query with or without state, of one checkout.

    Attributes:
        root: the checkout.
        form: ``copy`` without state, or the form of a keyed count (`KafkaEos`).
        conf: settings of Spark.
    """

    root: Path
    form: str
    conf: Mapping[str, str]

    @property
    def title(self) -> str:
        own = {name: value for name, value in self.conf.items() if name not in local_checkpoints()}
        conf = "".join(f", {name}={value}" for name, value in own.items())
        return f"{_TITLES[self.form]} of {self.root}{conf}"

    def command(self, job: Job, more: Mapping[str, str], path: Sequence[Path]) -> Command:
        tuning = Tuning("", {**self.conf, **more})
        query = (
            EosQuery("copy", trigger=AT_ONCE, tuning=tuning)
            if self.form == "copy"
            else KafkaEos("count", self.form, batch=500_000, tuning=tuning, trigger=AT_ONCE)
        )
        (command,) = query.commands(job)
        paths = ":".join(map(str, [*path, self.root]))
        return Command(command.arguments, {**command.environment, "PYTHONPATH": paths})


class Measured(list[Batch]):
    """Micro-batches, and the CPU seconds of the query's processes while they ran."""

    cpu_seconds = 0.0

    def add(self, more: Measured) -> None:
        """Adds the micro-batches of another run."""
        self.extend(more)
        self.cpu_seconds += more.cpu_seconds


def run(
    cluster: Cluster, query: Query, folder: Path, rate: int, warm: float, seconds: float, *, trace: bool
) -> tuple[Measured, Traced]:
    """Runs a query for some seconds after its warm-up; checks that its output is complete.

    Raises:
        click.ClickException: if a process fails, or records are missing or doubled in the output.
    """
    folder.mkdir()
    job = Job(folder.name, cluster.bootstrap, f"{folder.name}.in", f"{folder.name}.out", 4, 2, 0, folder)
    for topic in (job.topic_in, job.topic_out):
        cluster.create(topic, _PARTITIONS)
    log, events = folder / "events", folder / "calls"
    more: dict[str, str] = {}
    environment: dict[str, str] = {}
    if trace:
        log.mkdir()
        more = {
            "spark.eventLog.enabled": "true",
            "spark.eventLog.dir": str(log),
            "spark.eventLog.compress": "false",
        }
        environment = {FILE: str(events), CALLS: json.dumps(_STATE_CALLS)}
    command = query.command(job, more, [PROGRAMS / "traced"] if trace else [])
    feed = Feed(cluster, job.topic_in, rate)
    with Processes([Command(command.arguments, {**command.environment, **environment})], folder) as processes:

        def wait(done: Callable[[], bool], patience: float, what: str) -> None:
            deadline = Deadline.after_seconds(patience)
            while not done():
                if processes.failed():
                    raise click.ClickException(processes.failed())
                if deadline.expired:
                    raise click.ClickException(f"{what} did not happen within {patience:.0f} s")
                time.sleep(_PAUSE_SECONDS)

        wait(lambda: bool(processes.batches()), _PATIENCE_SECONDS, "the first micro-batch")
        began = time.time() + warm
        wait(lambda: time.time() >= began, warm + 1, "the end of the warm-up")
        used = processes.cpu_seconds()
        wait(lambda: time.time() >= began + seconds, seconds + 1, "the end")
        ended, used = time.time(), processes.cpu_seconds() - used
        feed.stop()
        output = _Output(cluster, job, query.form != "copy")
        wait(lambda: output.read() >= feed.sent, _PATIENCE_SECONDS, f"output of {feed.sent} records")
        if output.total != feed.sent:
            raise click.ClickException(f"WRONG: {output.total} records came out; {feed.sent} went in")
        batches = Measured(b for b in processes.batches() if began <= b.began and b.ended <= ended)
        batches.cpu_seconds = used
    traced = Traced()
    if trace:
        _read_trace(traced, batches, log, events)
    return batches, traced


class _Output:
    """Counts the records in the output; of a keyed count, the sum of the newest counts of all keys."""

    def __init__(self, cluster: Cluster, job: Job, stateful: bool) -> None:
        self.total = 0
        self._counts: dict[bytes, int] = {}
        self._stateful = stateful
        self._reader: Any = Consumer(
            {
                "bootstrap.servers": cluster.bootstrap,
                "group.id": f"{job.topic_out}-reader",
                "isolation.level": "read_committed",
                "enable.auto.commit": False,
            }
        )
        self._reader.assign([TopicPartition(job.topic_out, number, 0) for number in range(_PARTITIONS)])

    def read(self) -> int:
        for message in self._reader.consume(10_000, 0.1):
            if message.error() is not None:
                raise KafkaException(message.error())
            if not self._stateful:
                self.total += 1
                continue
            count, key = int(message.value()), message.key()
            self.total += count - self._counts.get(key, 0)
            self._counts[key] = count
        return self.total


def _read_trace(traced: Traced, batches: Sequence[Batch], log: Path, events: Path) -> None:
    spark = [
        json.loads(line)
        for file in log.rglob("*")
        if file.is_file() and file.name[0] != "." and "status" not in file.name
        for line in file.read_text().splitlines()
    ]
    for name, spans in spans_of_spark(each for each in spark if "Event" in each).items():
        traced.add(name, batches, spans)
    calls: dict[str, list[tuple[float, float]]] = defaultdict(list)
    last: dict[int, int] = {}
    for event in map(json.loads, events.read_text().splitlines()):
        if event["kind"] == "call":
            if event["name"] == "Operator._shard_task":
                traced.tasks += 1
                traced.same_worker += last.get(event["shard"]) == event["pid"]
                last[event["shard"]] = event["pid"]
            calls[event["name"]].append((event["began"], event["ended"]))
    for name, spans in calls.items():
        traced.add(name, batches, spans)


def medians(batches: Measured) -> str:
    """Returns the median of a micro-batch and of its parts, by Spark's names, and its CPU time."""
    names = {name for batch in batches for name in batch.durations_ms}
    parts = {n: statistics.median(batch.durations_ms.get(n, 0) for batch in batches) for n in names}
    whole = parts.pop("triggerExecution")
    told = ", ".join(f"{name} {ms:.0f}" for name, ms in sorted(parts.items(), key=lambda part: -part[1]))
    cpu = f"{1000 * batches.cpu_seconds / len(batches):.0f} CPU ms each"
    return f"{whole:.0f} ms, {len(batches)} micro-batches, {cpu} ({told})"


@click.command(context_settings={"help_option_names": ["-h", "--help"]})
@click.option("--rate", default=1000, show_default=True, type=click.IntRange(1), help="Records a second.")
@click.option("--warm", default=20.0, show_default=True, help="Seconds before measuring.")
@click.option("--seconds", default=20.0, show_default=True, help="Seconds of measuring.")
@click.option(
    "--rounds", default=1, show_default=True, type=click.IntRange(0), help="Runs of each, untraced."
)
@click.option("--against", type=click.Path(exists=True, file_okay=False, path_type=Path), help="A checkout.")
@click.option("--trace/--no-trace", default=True, show_default=True, help="Trace one more run of each count.")
@click.option("--conf", multiple=True, help="A setting (name=value); counts run without and with it.")
@click.option("--only-count", is_flag=True, help="Leave out the copy.")
@click.option("--local/--no-local", default=True, show_default=True, help="Use local_checkpoints().")
def main(
    rate: int,
    warm: float,
    seconds: float,
    rounds: int,
    against: Path | None,
    trace: bool,
    conf: tuple[str, ...],
    only_count: bool,
    local: bool,
) -> None:
    """Prints how long small micro-batches take, with and without state, and where the time goes."""
    own = Path(__file__).resolve().parents[1]
    files: dict[str, str] = local_checkpoints() if local else {}
    roots = [own] if against is None else [own, against.resolve()]
    forms = [form for form in _TITLES if form != "copy" or not only_count]
    queries = [Query(root, form, files) for root in roots for form in forms]
    more = dict(pair.partition("=")[::2] for pair in conf)
    if more:
        queries += [Query(own, form, {**files, **more}) for form in forms if form != "copy"]
    found: dict[str, Measured] = defaultdict(Measured)
    with EmbeddedKafka() as kafka, tempfile.TemporaryDirectory(prefix="kafka-eos-state-latency-") as scratch:
        cluster = Cluster(kafka.bootstrap_servers)
        cluster.warm_up()
        if trace:
            for form in forms:
                if form == "copy":
                    continue
                count = Query(own, form, {**files, **more})
                folder = Path(scratch) / f"traced-{form}"
                batches, traced = run(cluster, count, folder, rate, warm, seconds, trace=True)
                click.echo(f"{_TITLES[form]}, traced: {medians(batches)}\n\n{traced.table()}\n")
                click.echo(
                    f"{traced.same_worker} of {traced.tasks} tasks ran where their shard's last task ran\n"
                )
        for number in range(rounds):
            for which, query in enumerate(queries):
                folder = Path(scratch) / f"run-{number}-{which}"
                batches, _ = run(cluster, query, folder, rate, warm, seconds, trace=False)
                found[query.title].add(batches)
                print(f"{query.title}: {medians(batches)}", file=sys.stderr)
    for title, batches in found.items():
        click.echo(f"- {title}: {medians(batches)}")


if __name__ == "__main__":
    main()
