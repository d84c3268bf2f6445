"""``python -m benchmarks.targets``: measures the table of targets, and prints it as Markdown.

Peers run in their tuned form. Each contender is one process tree with all cores; contenders take turns in
``--rounds``, and medians count. Rates are those after the first quarter of the records, in a warm JVM, unless
the row says *start included*. ``--size`` scales the numbers of records; small sizes show whether the
program works, and nothing else.
"""

from __future__ import annotations

import datetime
import json
import os
import platform
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import click
import psutil

from benchmarks import report
from benchmarks.contenders.kafka_eos import KafkaEos
from benchmarks.contenders.kafka_streams import KafkaStreams, KafkaStreamsCopy
from benchmarks.contenders.quix import Quix, QuixCopy
from benchmarks.contenders.spark_query import (
    AT_ONCE,
    EOS_TUNED,
    LOCAL_CHECKPOINTS,
    SPARK_TUNED,
    EosQuery,
    SparkQuery,
)
from benchmarks.kafka import Cluster
from benchmarks.processes import BROKER, COMMITTING
from benchmarks.rounds import Inputs, Settings, available, run_contenders, running_cluster
from benchmarks.tasks import Judge, Task
from benchmarks.workload import Workload
from kafka_eos_source.errors import KafkaEosError

_EOS = EosQuery("kafka-eos", tuning=EOS_TUNED)
_STAGES_IN_READ = EosQuery("kafka-eos-stages-in-read", in_read=True, stages_in_read=True, tuning=EOS_TUNED)
_AT_LEAST_ONCE = EosQuery("kafka-eos-at-least-once", guarantee="at least once", tuning=EOS_TUNED)
_SPARK = SparkQuery("spark", tuning=SPARK_TUNED)
_STREAMS = KafkaStreamsCopy("kafka-streams", exactly_once=True, tuned=True)
_QUIX = QuixCopy("quix", tuned=True)
_COUNT = KafkaEos("kafka-eos", form="columns", tuning=EOS_TUNED)
_COUNTS_IN_READ = KafkaEos("kafka-eos-in-read", form="in-read", tuning=EOS_TUNED)
_STREAMS_COUNT = KafkaStreams("kafka-streams", commit_interval_ms=1_000, tuned=True)
_STREAMS_TRANSACTIONAL = replace(_STREAMS_COUNT, name="kafka-streams-transactional", transactional=True)
_QUIX_COUNT = Quix("quix", every_core=True, tuned=True)

#: The fewest records of a task; fewer make no second micro-batch.
_FEWEST = 20_000


def target_tasks(size: float) -> list[Task]:
    """Returns the tasks in the order in which they run; those with the same records follow each other."""

    def records(count: int) -> int:
        return max(_FEWEST, round(count * size))

    def copy(name: str, title: str, workload: Workload, contenders: tuple[Any, ...], **more: Any) -> Task:
        return Task(name, title, Judge.COPIES, workload, contenders, **more)

    def batch(count: int) -> int:
        return max(_FEWEST // 4, round(count * min(size, 1.0)))

    long = Workload(records=records(16_000_000))
    four = Workload(records=records(4_000_000))
    kib = Workload(records=records(3_000_000), record_bytes=1024)
    lz4, zstd = replace(kib, compression="lz4"), replace(kib, compression="zstd")
    ours_and_spark = (_EOS, _SPARK)
    rows_write_spark = (_EOS, _STAGES_IN_READ, _SPARK)
    return [
        copy(
            "copy",
            "Topic to topic, 110 bytes",
            long,
            (_EOS, _STAGES_IN_READ, _AT_LEAST_ONCE, _SPARK, _STREAMS),
            batch=batch(1_000_000),
        ),
        Task(
            "read",
            "Read to nothing",
            Judge.PROGRESS,
            long,
            (replace(_EOS, to_nothing=True), replace(_SPARK, to_nothing=True)),
            batch=batch(1_000_000),
        ),
        copy("cold", "4,000,000 records in a cold JVM", four, ours_and_spark, batch=batch(500_000)),
        *(
            copy(
                f"to-{partitions}",
                f"To {partitions:,} partitions",
                four,
                (_EOS,),
                batch=batch(500_000),
                output_partitions=partitions,
            )
            for partitions in (1, 1000)
        ),
        copy("quix", "Topic to topic, 110 bytes: Quix", Workload(records=records(500_000)), (_QUIX,)),
        Task(
            "count",
            "Keyed count, with state",
            Judge.COUNTS,
            long,
            (_COUNT, _COUNTS_IN_READ, _STREAMS_COUNT, _STREAMS_TRANSACTIONAL),
            batch=batch(500_000),
        ),
        Task(
            "count-quix",
            "Keyed count, with state: Quix",
            Judge.COUNTS,
            Workload(records=records(2_000_000)),
            (_QUIX_COUNT,),
        ),
        copy("lz4", "Topic to topic, 1 KiB, lz4", lz4, rows_write_spark, batch=batch(250_000)),
        copy("zstd", "Topic to topic, 1 KiB, zstd", zstd, rows_write_spark, batch=batch(250_000)),
        Task(
            "latency",
            "1,000 records a second, micro-batches as fast as they come",
            Judge.LATENCY,
            Workload(records=max(2_000, round(15_000 * min(size, 1.0)))),
            (replace(_EOS, trigger=AT_ONCE), SparkQuery("spark", trigger=AT_ONCE, tuning=LOCAL_CHECKPOINTS)),
            rate=1_000,
            warm_seconds=30 * min(size, 1.0),
        ),
        Task(
            "restart",
            "Cold start, and killed and started again",
            Judge.RESTART_COPIES,
            Workload(records=records(1_000_000)),
            ours_and_spark,
            batch=batch(50_000),
        ),
    ]


#: How often a task runs in one round. Starts vary most and take little time.
_RUNS = {"restart": 3}


@dataclass(frozen=True)
class Line:
    """One line of the table of targets.

    Attributes:
        workload: what was measured.
        target: the target, as text.
        reached: what was reached, as text.
        is_met: whether that meets the target; None if it was not measured.
    """

    workload: str
    target: str
    reached: str
    is_met: bool | None

    @property
    def cells(self) -> list[str]:
        verdict = "" if self.is_met is None else (", reached" if self.is_met else ", **missed**")
        return [self.workload, self.target, self.reached + verdict]


class Found:
    """The results of all tasks, and the lines computed from them."""

    def __init__(self, results: Mapping[str, Sequence[report.Runs[Any]]]) -> None:
        self._results = results

    def get(self, task: str, name: str) -> Any:
        """Returns the result of a contender; None without figures."""
        found = next((each for each in self._results.get(task, ()) if each.name == name), None)
        return None if found is None or found.problem else found

    def at_least(self, workload: str, target: float, ours: float | None, peer: float | None) -> Line:
        """Returns the line of a ratio that must not be smaller than the target."""
        return self._ratio(workload, f"≥ {target:g} ×", ours, peer, lambda ratio: ratio >= target)

    def at_most(self, workload: str, target: float, ours: float | None, peer: float | None) -> Line:
        """Returns the line of a ratio that must not be larger than the target."""
        return self._ratio(workload, f"≤ {target:g} ×", ours, peer, lambda ratio: ratio <= target)

    def value(self, workload: str, target: float, unit: str, value: float | None) -> Line:
        """Returns the line of a figure that must not be larger than the target."""
        if value is None:
            return Line(workload, f"≤ {target:g}{unit}", "not measured", None)
        return Line(workload, f"≤ {target:g}{unit}", f"{value:.2f}{unit}", value <= target)

    @staticmethod
    def _ratio(
        workload: str, target: str, ours: float | None, peer: float | None, meets: Callable[[float], bool]
    ) -> Line:
        if not ours or not peer:
            return Line(workload, target, "not measured", None)
        ratio = ours / peer
        return Line(workload, target, f"{ratio:.2f} × ({_short(ours)} against {_short(peer)})", meets(ratio))


def _short(value: float) -> str:
    return f"{round(value, -3):,.0f}" if value >= 10_000 else f"{value:,.1f}"


def lines(found: Found) -> list[Line]:
    """Returns the table of targets."""

    def of(task: str, name: str, figure: str) -> float | None:
        result = found.get(task, name)
        return None if result is None else getattr(result, figure)

    def cpu(name: str, kind: str | None = None) -> float | None:
        """CPU s per million after the first quarter: of one kind of process, or all with the broker."""
        result = found.get("copy", name)
        if result is None or not result.sustained:
            return None
        used = result.sustained_cpu_by_process
        if kind is not None:
            return float(used.get(kind, 0.0))
        return float(result.sustained_cpu_per_million + used.get(BROKER, 0.0))

    def trigger(name: str) -> float | None:
        result = found.get("latency", name)
        return None if result is None or result.trigger_ms is None else result.trigger_ms[0]

    rows, in_read = "kafka-eos", "kafka-eos-stages-in-read"
    in_read_title = "topic to topic, `map_in_read` with `write=`"
    return [
        found.at_least(
            "topic to topic, rows, exactly once / Spark tuned, at least once",
            1.7,
            of("copy", rows, "warm"),
            of("copy", "spark", "warm"),
        ),
        *(
            found.at_least(f"{in_read_title} / {title}", target, of("copy", in_read, "warm"), peer)
            for title, target, peer in (
                ("Spark tuned", 3, of("copy", "spark", "warm")),
                ("Kafka Streams exactly_once_v2 tuned", 3, of("copy", "kafka-streams", "warm")),
                ("Quix tuned", 15, of("quix", "quix", "warm")),
            )
        ),
        found.value("CPU s per million, broker included: rows", 1.6, " s", cpu(rows)),
        found.value("CPU s per million, broker included: `map_in_read`", 0.9, " s", cpu(in_read)),
        found.value("CPU s per million of the committing process: rows", 0.1, " s", cpu(rows, COMMITTING)),
        found.value(
            "CPU s per million of the committing process: `map_in_read`", 0.1, " s", cpu(in_read, COMMITTING)
        ),
        *(
            found.at_least(
                f"1 KiB records, {codec}, rows / Spark tuned",
                1.3,
                of(codec, rows, "warm"),
                of(codec, "spark", "warm"),
            )
            for codec in ("lz4", "zstd")
        ),
        found.at_least(
            "1,000 output partitions / 1: overall",
            0.9,
            of("to-1000", rows, "rate"),
            of("to-1", rows, "rate"),
        ),
        found.at_most(
            "1,000 output partitions / 1: warm micro-batch",
            1.1,
            of("to-1000", rows, "warm_batch_ms"),
            of("to-1", rows, "warm_batch_ms"),
        ),
        found.at_least(
            "read to nothing / Spark tuned", 2, of("read", rows, "warm"), of("read", "spark", "warm")
        ),
        found.at_least(
            "4,000,000 records in a cold JVM, start included / Spark tuned",
            1.1,
            of("cold", rows, "with_start_rate"),
            of("cold", "spark", "with_start_rate"),
        ),
        *(
            found.at_least(
                f"keyed count, {title}",
                target,
                of("count", "kafka-eos-in-read", "warm"),
                of(task, peer, "warm"),
            )
            for title, target, task, peer in (
                ("shards='partitions' / Kafka Streams tuned", 6, "count", "kafka-streams"),
                (
                    "shards='partitions' / Kafka Streams tuned, transactional stores",
                    6,
                    "count",
                    "kafka-streams-transactional",
                ),
                ("shards='partitions' / Quix tuned, a process per core", 30, "count-quix", "quix"),
            )
        ),
        found.at_most("small micro-batch, p50 in ms / Spark", 0.9, trigger(rows), trigger("spark")),
        found.value(
            "transaction of a small micro-batch, p50", 5, " ms", of("latency", rows, "transaction_ms")
        ),
        found.at_most(
            "cold start, in s / Spark",
            1.1,
            of("restart", rows, "cold_seconds"),
            of("restart", "spark", "cold_seconds"),
        ),
        found.at_most(
            "restart after SIGKILL, in s / Spark",
            1.1,
            of("restart", rows, "seconds"),
            of("restart", "spark", "seconds"),
        ),
        found.at_least(
            "exactly_once / our own at_least_once",
            1,
            of("copy", rows, "warm"),
            of("copy", "kafka-eos-at-least-once", "warm"),
        ),
    ]


def better_peers(results: Mapping[str, Sequence[report.Runs[Any]]]) -> list[str]:
    """Returns a sentence for each peer that is better than all contenders of kafka-eos in a task."""
    found = []
    for task, of_task in results.items():
        good = [each for each in of_task if not each.problem]
        ours = [each for each in good if each.name.startswith("kafka-eos")]
        for peer in (each for each in good if each not in ours):
            for what, unit, figure, larger_is_better in _COMPARED:
                mine = [value for value in (figure(each) for each in ours) if value]
                theirs = figure(peer)
                if not mine or not theirs:
                    continue
                best = max(mine) if larger_is_better else min(mine)
                if (theirs > best) == larger_is_better and theirs != best:
                    found.append(
                        f"{task}, {what}: {peer.title} is better, {_short(theirs)}{unit} against "
                        f"{_short(best)}{unit}."
                    )
    return found


def _of(kind: type, name: str) -> Callable[[Any], float]:
    return lambda result: float(getattr(result, name)) if isinstance(result, kind) else 0.0


_COMPARED: tuple[tuple[str, str, Callable[[Any], float], bool], ...] = (
    ("after the first quarter", " records/s", _of(report.Result, "warm"), True),
    ("start included", " records/s", _of(report.Result, "with_start_rate"), True),
    ("CPU per million", " s", _of(report.Result, "sustained_cpu_per_million"), False),
    (
        "sent to visible, p50",
        " ms",
        lambda result: result.end_to_end_ms[0] if isinstance(result, report.LatencyResult) else 0.0,
        False,
    ),
    ("cold start", " s", _of(report.RestartResult, "cold_seconds"), False),
    ("restart after SIGKILL", " s", _of(report.RestartResult, "seconds"), False),
)


@click.command(context_settings={"help_option_names": ["-h", "--help"]})
@click.option(
    "--size", default=1.0, show_default=True, type=click.FloatRange(0.001), help="Scales the records."
)
@click.option(
    "--rounds", default=1, show_default=True, type=click.IntRange(1), help="Medians of so many runs."
)
@click.option("--only", default="", help="Tasks, with commas between: copy, read, cold, to-1, to-1000, …")
@click.option("--cores", default=os.cpu_count() or 1, show_default=True)
@click.option("--bootstrap", default="", help="A cluster to use; else one is started.")
@click.option("--out", default="benchmarks/results", show_default=True, type=click.Path(path_type=Path))
def main(size: float, rounds: int, only: str, cores: int, bootstrap: str, out: Path) -> None:
    """Measures the table of targets against tuned peers, and prints it as Markdown."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # ends all processes that were started
    wanted = {name.strip() for name in only.split(",") if name.strip()}
    tasks = target_tasks(size)
    if not wanted <= {task.name for task in tasks}:
        raise click.BadParameter(f"--only has {only!r}; tasks are {', '.join(task.name for task in tasks)}")
    tasks = [task for task in tasks if not wanted or task.name in wanted]
    folder = Path(tempfile.mkdtemp(prefix="kafka-eos-targets-"))
    click.echo(f"logs and state are in {folder}", err=True)
    began = time.time()
    results: dict[str, Sequence[report.Runs[Any]]] = {}
    tables: list[str] = []
    missing: list[str] = []
    try:
        with running_cluster(bootstrap) as address:
            cluster = Cluster(address)
            cluster.warm_up()
            with Inputs(cluster) as inputs:
                for number, task in enumerate(tasks):
                    contenders, cannot = available(task, ())
                    missing += cannot
                    settings = Settings(rounds * _RUNS.get(task.name, 1), 500_000, cores, (), folder, out)
                    told = run_contenders(cluster, task, contenders, settings, inputs)
                    results[task.name] = told.results
                    tables.append(f"### {task.title}\n\n" + "\n\n".join(filter(None, told.tables)))
                    if all(later.workload != task.workload for later in tasks[number + 1 :]):
                        inputs.drop(task.workload)
    except KafkaEosError as error:
        raise click.ClickException(str(error)) from error
    problems = [f"{each.title}: {each.problem}" for of in results.values() for each in of if each.problem]
    text = _text(results, tables, missing, problems, size, rounds, time.time() - began)
    out.mkdir(parents=True, exist_ok=True)
    (out / "targets.md").write_text(text)
    everything = {name: report.as_json(of, {"size": size})["contenders"] for name, of in results.items()}
    (out / "targets.json").write_text(json.dumps(everything, indent=1) + "\n")
    click.echo(text)
    if problems:
        sys.exit(1)
    shutil.rmtree(folder, ignore_errors=True)


def _text(
    results: Mapping[str, Sequence[report.Runs[Any]]],
    tables: Sequence[str],
    missing: Sequence[str],
    problems: Sequence[str],
    size: float,
    rounds: int,
    seconds: float,
) -> str:
    when = datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds")
    machine = f"{os.cpu_count()} cores ({platform.machine()}), {psutil.virtual_memory().total >> 30} GiB"
    cells = [line.cells for line in lines(Found(results))]
    table = [["workload", "target", "reached"], ["---", "---", "---"], *cells]
    told = {each.title: each.settings for of in results.values() for each in of}
    parts = [
        "## Targets",
        f"`python -m benchmarks.targets {' '.join(sys.argv[1:])}`".replace(" `", "`")
        + f", size {size:g}, {rounds} round(s), {machine}, {when}, {seconds / 60:.0f} minutes.",
        "Where a peer is better:\n\n"
        + ("\n".join(f"- {each}" for each in better_peers(results)) or "- nowhere"),
        "\n".join("| " + " | ".join(row) + " |" for row in table),
        "\n".join(f"- {each}" for each in [*missing, *problems]),
        *tables,
        "Settings:\n\n" + "\n".join(f"- {title}: {settings}" for title, settings in told.items()),
    ]
    return "\n\n".join(part for part in parts if part) + "\n"


if __name__ == "__main__":
    main()
