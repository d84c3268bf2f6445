"""``python -m benchmarks.metrics``: what the metrics cost, in throughput and in small micro-batches.

One query runs on one embedded broker. Its micro-batches take turns: two with all metrics (`metrics.port`,
scraped every 5 seconds) and two with none, in blocks of four whose order is random. So both kinds run in the
same warm processes, on the same machine within the same second, and each block gives one difference. The
program prints the medians, and the 95 % confidence interval of the median difference (bootstrap).
"""

from __future__ import annotations

import contextlib
import json
import signal
import sys
import tempfile
import threading
import time
import urllib.request
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import click
import numpy as np
from numpy.typing import NDArray

from benchmarks.contenders.base import PROGRAMS
from benchmarks.kafka import Cluster
from benchmarks.metrics_switch import BLOCK, FOLDER, Switch
from benchmarks.processes import Command, Processes, others_cpu_seconds
from benchmarks.workload import Workload
from kafka_eos_source import local_checkpoints
from kafka_eos_source.embedded import EmbeddedKafka

_ROOT = Path(__file__).resolve().parents[1]
_PORT = 19308
_SCRAPE_SECONDS = 5.0
_POLL_SECONDS = 0.1
_TICK_SECONDS = 0.02
_RESAMPLES = 10_000
_PARTITIONS = 4

Floats = NDArray[np.float64]


@dataclass(frozen=True)
class Shape:
    """One measurement.

    Attributes:
        title: what is measured.
        records: number of records in a micro-batch.
        warm: number of blocks that are not counted.
        blocks: number of blocks that are.
    """

    title: str
    records: int
    warm: int
    blocks: int


@dataclass(frozen=True)
class Paired:
    """What a cost is without metrics, and how much more it is with them.

    Attributes:
        without: median over the blocks.
        more: median of the differences.
        low, high: 95 % confidence interval of ``more``.
    """

    without: float
    more: float
    low: float
    high: float


@dataclass(frozen=True)
class Result:
    """Result of one measurement.

    Attributes:
        shape: what was measured.
        cpu: CPU seconds of a micro-batch, of all processes of the query.
        wall: seconds from one commit to the next.
        own_cpu: mean CPU seconds that the measurements take themselves in a micro-batch, of all threads.
        own_wall: mean seconds that the query's own threads spend in them.
        blocks: number of blocks without a process that came or went.
        others_cores: number of cores used by other programs, the broker not included.
    """

    shape: Shape
    cpu: Paired
    wall: Paired
    own_cpu: float
    own_wall: float
    blocks: int
    others_cores: float


def measure(cluster: Cluster, shape: Shape, topic: str, folder: Path, cores: int) -> Result:
    """Runs the query until it has committed all micro-batches of the measurement."""
    folder.mkdir()
    switch = Switch.create(folder)
    cluster.create(f"{topic}.out", _PARTITIONS)
    job = {
        "format": "kafka-eos",
        "bootstrap": cluster.bootstrap,
        "topic_in": topic,
        "topic_out": f"{topic}.out",
        "folder": str(folder),
        "cores": cores,
        "batch": shape.records,
        "name": f"{topic}.query",
        "guarantee": "exactly_once",
        "compression": "none",
        "jars": "",
        "trigger": "0 seconds",
        "source": {"metrics.port": str(_PORT), "application.id": f"{topic}.query"},
        "sink": {},
        "in_read": False,
        "stages_in_read": False,
        "conf": dict(local_checkpoints()),
    }
    environment = {
        "PYTHONPATH": f"{PROGRAMS / 'switched'}:{_ROOT}",
        "PYSPARK_PYTHON": sys.executable,
        "PYSPARK_DRIVER_PYTHON": sys.executable,
        "TMPDIR": str(folder),  # for figures of this query alone
        FOLDER: str(folder),
    }
    command = Command([sys.executable, str(PROGRAMS / "spark_copy.py"), json.dumps(job)], environment)
    wanted = BLOCK * (shape.warm + shape.blocks) + 1
    samples = folder / "samples"
    ended = threading.Event()
    scraping = threading.Thread(target=_scrape, args=(switch, ended), daemon=True)
    with Processes([command], folder) as processes:
        scraping.start()
        began, others = time.monotonic(), others_cpu_seconds()
        while not samples.exists() or len(samples.read_text().splitlines()) < wanted:
            failed = processes.failed()
            if failed:
                raise click.ClickException(failed)
            ended.wait(_POLL_SECONDS)
        cores_of_others = (others_cpu_seconds() - others) / (time.monotonic() - began)
        ended.set()
    scraping.join()
    cluster.delete([f"{topic}.out"])
    return _result(shape, samples.read_text(), cores_of_others)


def _scrape(switch: Switch, ended: threading.Event) -> None:
    """Scrapes as Prometheus would, but only while metrics are on, so half as often by the clock."""
    on_since_last = 0.0
    before = time.monotonic()
    while not ended.wait(_TICK_SECONDS):
        now = time.monotonic()
        on_since_last += (now - before) * switch.is_on
        before = now
        if on_since_last >= _SCRAPE_SECONDS:
            on_since_last = 0.0
            with contextlib.suppress(OSError):  # the query is not running yet
                urllib.request.urlopen(f"http://127.0.0.1:{_PORT}/metrics", timeout=60).read()


def _result(shape: Shape, text: str, others_cores: float) -> Result:
    rows = np.array([line.split() for line in text.splitlines()], np.float64)
    numbers, on, times, cpu_ends, cpu_starts, own_cpu, own_wall = rows.T
    # a micro-batch lasts from the commit before it to its own
    costs = np.stack([np.diff(times), cpu_ends[1:] - cpu_starts[:-1], np.diff(own_cpu), np.diff(own_wall)])
    numbers, on = numbers[1:], on[1:]
    found = {}
    for block in np.unique(numbers // BLOCK):
        of_block = numbers // BLOCK == block
        own = costs[:, of_block]
        if of_block.sum() == BLOCK and not np.isnan(own).any():
            found[int(block)] = own[:, on[of_block] == 0].mean(axis=1), own[:, on[of_block] == 1].mean(axis=1)
    counted = [found[block] for block in sorted(found) if block >= shape.warm]
    without, with_metrics = (np.array(each) for each in zip(*counted, strict=True))
    wall, spent = (paired(without[:, each], with_metrics[:, each]) for each in (0, 1))
    # a mean, because the endpoint and the threads work once per second or less often
    own = with_metrics[:, 2:].mean(axis=0).tolist()
    return Result(shape, spent, wall, own[0], own[1], len(counted), others_cores)


def paired(without: Floats, with_metrics: Floats) -> Paired:
    """Returns the median of the differences of pairs, with its confidence interval."""
    more = with_metrics - without
    drawn = np.random.default_rng(5).choice(more, (_RESAMPLES, len(more)))
    low, high = np.percentile(np.median(drawn, axis=1), [2.5, 97.5]).tolist()
    return Paired(float(np.median(without)), float(np.median(more)), low, high)


def table(results: Sequence[Result]) -> str:
    """Returns the results as a Markdown table."""
    rows = [
        "| micro-batches of | | without metrics | metrics add, median | 95 % confidence |",
        "|--:|---|--:|--:|--:|",
    ]
    for each in results:
        million = each.shape.records / 1e6
        for title, found, scale, unit in (
            ("CPU s per million records", each.cpu, 1 / million, ""),
            ("CPU of a micro-batch", each.cpu, 1000, " ms"),
            ("time from commit to commit", each.wall, 1000, " ms"),
        ):
            more, low, high = (scale * value for value in (found.more, found.low, found.high))
            share = 100 / found.without
            rows.append(
                f"| {each.shape.records:,} | {title} | {scale * found.without:.2f}{unit} | "
                f"{more:+.2f}{unit} ({share * found.more:+.2f} %) | "
                f"{low:+.2f} to {high:+.2f}{unit} ({share * found.low:+.2f} to {share * found.high:+.2f} %) |"
            )
        for title, spent, share in (
            ("CPU of the measurements themselves", each.own_cpu, each.own_cpu / each.cpu.without),
            ("… time of the query's own threads in them", each.own_wall, each.own_wall / each.wall.without),
        ):
            rows.append(f"| {each.shape.records:,} | {title} | | {1000 * spent:.2f} ms ({share:.2%}) | |")
    told = "; ".join(
        f"{each.shape.title}: {each.blocks} blocks, other programs used {each.others_cores:.1f} cores"
        for each in results
    )
    return "\n".join([*rows, "", told])


@click.command()
@click.option("--large", default=200_000, show_default=True, help="Records of a large micro-batch.")
@click.option("--small", default=1_000, show_default=True, help="Records of a small one.")
@click.option("--large-blocks", default=20, show_default=True, help="Blocks of four large micro-batches.")
@click.option("--small-blocks", default=150, show_default=True, help="Blocks of four small ones.")
@click.option("--cores", default=2, show_default=True, help="Spark's parallelism.")
def main(large: int, small: int, large_blocks: int, small_blocks: int, cores: int) -> None:
    """Measures what metrics cost a query that copies a topic."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # which ends the processes that were started
    shapes = [
        Shape("small", small, small_blocks // 2, small_blocks),
        Shape("large", large, large_blocks // 3, large_blocks),
    ]
    folder = Path(tempfile.mkdtemp(prefix="kafka-eos-bench-"))
    results = []
    with EmbeddedKafka() as kafka:
        cluster = Cluster(kafka.bootstrap_servers)
        cluster.warm_up()
        for shape in (each for each in shapes if each.blocks):
            topic = f"bench.metrics.{shape.title}"
            cluster.create(topic, _PARTITIONS)
            batches = BLOCK * (shape.warm + shape.blocks + 2)
            cluster.preload(Workload(records=batches * shape.records, partitions=_PARTITIONS), topic)
            results.append(measure(cluster, shape, topic, folder / shape.title, cores))
            cluster.delete([topic])
            click.echo(table(results[-1:]), err=True)
    click.echo(table(results))


if __name__ == "__main__":
    main()
