"""``python -m benchmarks.cluster_state``: state on executors that come and go, beside Spark's RocksDB.

A query keeps a count and the largest value of each key. It builds up its state, takes micro-batches of
changed keys, and then loses an executor together with its disk. On ``local-cluster`` each executor has its
own working directory, and kafka-eos keeps its state below it, so that a new executor begins without state,
as a new host does. All executors still share the machine's cores and disk. The output is checked each time.
"""

from __future__ import annotations

import json
import re
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import click
import numpy as np
import psutil
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from benchmarks import versions
from benchmarks.arrow_records import ROWS, binary_column, send
from benchmarks.contenders.base import PROGRAMS
from benchmarks.environments import compile_package, python_with
from benchmarks.kafka import Cluster, OutputReader
from benchmarks.processes import Batch, Command, Processes, others_cpu_seconds
from benchmarks.progress import wrong
from benchmarks.workload import KEY_BYTES
from kafka_eos_source.embedded import EmbeddedKafka, java
from kafka_eos_source.runtime.deadline import Deadline

EOS, SNAPSHOTS, SPARK = "kafka-eos", "kafka-eos-snapshots", "spark"
_EXECUTOR = "org.apache.spark.executor.CoarseGrainedExecutorBackend"
_ROCKSDB = {
    "spark.sql.streaming.stateStore.providerClass": "org.apache.spark.sql.execution.streaming.state."
    "RocksDBStateStoreProvider",
    "spark.sql.streaming.stateStore.rocksdb.changelogCheckpointing.enabled": "true",
}
_PARTITIONS = 4
_BUILD_RECORDS = 500_000
_WARM_BATCHES, _AFTER_BATCHES, _FIRST_AFTER = 3, 6, 5
_PATIENCE_SECONDS = 1800.0
_PAUSE_SECONDS = 0.1
_SENT = re.compile(r"snapshot of shard .*?\(([\d.]+) MB sent in")

Ints = NDArray[np.int64]


@dataclass(frozen=True)
class Size:
    """How much each run does.

    Attributes:
        megabytes: size of the state: keys of 10 bytes and their values.
        value_bytes: size of a value.
        changed: keys that change in each micro-batch after the build-up.
        batches: number of measured micro-batches before an executor is killed.
        snapshot_seconds: interval between two snapshots of a shard.
    """

    megabytes: int
    value_bytes: int
    changed: int
    batches: int
    snapshot_seconds: int

    @property
    def keys(self) -> int:
        return self.megabytes * 1_000_000 // (KEY_BYTES + self.value_bytes)

    def build_up(self) -> Ints:
        return np.random.default_rng(1).permutation(self.keys)

    def changes(self) -> Ints:
        """Returns the changed keys; none occurs twice in ``changed`` records that follow each other."""
        random, number = np.random.default_rng(2), _WARM_BATCHES + self.batches + _AFTER_BATCHES
        chosen = [
            random.choice(self.keys, min(self.changed, self.keys), replace=False) for _ in range(number)
        ]
        return np.concatenate(chosen)

    def records(self, keys: Ints, seed: int) -> Iterator[pa.RecordBatch]:
        random = np.random.default_rng(seed)
        for first in range(0, len(keys), ROWS):
            numbers = pa.array(keys[first : first + ROWS]).cast(pa.string())
            names = pc.utf8_lpad(numbers, KEY_BYTES, "0").cast(pa.binary())
            values = random.integers(0, 256, (len(names), self.value_bytes), np.uint8)
            yield pa.record_batch({"key": names, "value": binary_column(values)})


@dataclass
class Result:
    """Figures of one run; times in seconds, ``moved`` and ``after_moved`` for each micro-batch.

    Attributes:
        build, steady, after: the micro-batches of the three phases.
        cpu: CPU seconds of a steady micro-batch, without the broker.
        others: cores that other processes used meanwhile, the broker not included.
        uploaded: bytes that went to shared storage for each steady micro-batch.
        moved: number of shards that read their changelog, the records read, and the milliseconds it took.
        snapshot_mb: size of all uploaded snapshots.
        killed: when an executor was killed, in seconds since the epoch.
        repeated: output records that repeat a count.
    """

    name: str
    master: str
    build: Sequence[Batch] = ()
    steady: Sequence[Batch] = ()
    after: Sequence[Batch] = ()
    cpu: float = 0.0
    others: float = 0.0
    uploaded: float = 0.0
    moved: list[tuple[int, int, int]] = field(default_factory=list)
    after_moved: list[tuple[int, int, int]] = field(default_factory=list)
    snapshot_mb: float = 0.0
    killed: float = 0.0
    repeated: int = 0

    def row(self) -> str:
        times = [each.trigger_ms / 1000 for each in self.steady]
        moves, read, ms = (sum(each[i] for each in self.moved) for i in range(3))
        cells = [self.master, self.name, f"{self.build[-1].ended - self.build[0].began:.0f} s"]
        cells += [f"{statistics.median(times):.2f} s", f"{max(times):.2f} s", f"{self.cpu:.2f}"]
        own = self.name != SPARK
        cells += [f"{moves / len(times):.1f}" if own else ""]
        cells += [f"{ms / moves:.0f} ms, {read / moves:,.0f} records" if moves else ""]
        cells += [f"{self.snapshot_mb:.0f} in all" if own else f"{self.uploaded / 1e6:.1f} a batch"]
        if self.killed:
            later = [each.ended - self.killed for each in self.after[:_FIRST_AFTER]]
            whole = sum(each[1] for each in self.after_moved)
            cells += [f"{later[0]:.1f} s", f"{later[-1]:.1f} s", f"{whole:,}" if own else ""]
        else:
            cells += ["", "", ""]
        return "| " + " | ".join([*cells, f"{self.repeated:,}", f"{self.others:.1f}"]) + " |"


HEAD = (
    "| master | | build-up | micro-batch, median | slowest | CPU s | moves a batch | a move | MB uploaded "
    "| kill to next commit | to fifth commit | records read for it | repeated output | others' cores |\n"
    "|---|---|--:|--:|--:|--:|--:|--:|--:|--:|--:|--:|--:|--:|"
)


class Run:
    """One query on one master; a folder and two topics of its own."""

    def __init__(self, cluster: Cluster, name: str, master: str, size: Size, folder: Path) -> None:
        folder.mkdir()
        self._cluster, self._size, self._folder = cluster, size, folder
        self._in, self._out = f"{folder.name}.in", f"{folder.name}.out"
        self._log, self._checkpoint = folder / "process-0.log", folder / "checkpoint" / "state"
        self._result = Result(name, master)

    def _command(self) -> Command:
        folder, own = self._folder, self._result.name != SPARK
        python = sys.executable if own else str(python_with("spark", versions.SPARK))
        root = str(Path(__file__).resolve().parents[1])
        if own:
            conf = {"spark.executorEnv.PYTHONPATH": root, "spark.executorEnv.KAFKA_EOS_LOG_FORMAT": "json"}
        else:
            connector = sorted(java.jars(versions.SPARK_KAFKA).glob("*.jar"))
            conf = {**_ROCKSDB, "spark.jars": ",".join(map(str, connector))}
        state = {
            "kafka.bootstrap.servers": self._cluster.bootstrap,
            "application.id": folder.name,
            "state.dir": "state",  # below the executor's working directory
        }
        if self._result.name == SNAPSHOTS:
            state["state.snapshot.location"] = str(folder / "snapshots")
            state["state.snapshot.interval.ms"] = str(1000 * self._size.snapshot_seconds)
        job = {
            "format": "kafka-eos" if own else "kafka",
            "bootstrap": self._cluster.bootstrap,
            "topic_in": self._in,
            "topic_out": self._out,
            "folder": str(folder),
            "master": self._result.master,
            "shards": _PARTITIONS,
            "name": folder.name,
            "conf": conf,
            "state": state,
            "phases": [(_BUILD_RECORDS, str(folder)), (self._size.changed, str(folder / "go"))],
        }
        environment = {"PYSPARK_PYTHON": python, "PYSPARK_DRIVER_PYTHON": python}
        if own:
            environment |= {"PYTHONPATH": root, "KAFKA_EOS_LOG_FORMAT": "json"}
        return Command([python, str(PROGRAMS / "cluster_count.py"), json.dumps(job)], environment)

    def run(self) -> Result:
        """Runs all phases and checks the output.

        Raises:
            click.ClickException: if a process fails, or the output is wrong.
        """
        for topic in (self._in, self._out):
            self._cluster.create(topic, _PARTITIONS)
        first, changes = self._size.build_up(), self._size.changes()
        send(self._cluster.bootstrap, self._in, self._size.records(first, 3))
        with Processes([self._command()], self._folder) as processes:
            self._await(processes, lambda: "PHASE 0" in self._log.read_text(errors="replace"))
            send(self._cluster.bootstrap, self._in, self._size.records(changes, 4))
            self._measure(processes)
        truth = np.bincount(np.concatenate([first, changes]), minlength=self._size.keys)
        with OutputReader(self._cluster.bootstrap, self._out, _PARTITIONS) as reader:
            reader.read()
        problem = wrong(reader.output, truth, exactly_once=self._result.name != SPARK)
        if problem:
            raise click.ClickException(f"WRONG, {self._result.name} on {self._result.master}: {problem}")
        self._result.repeated = sum(int((part.gains() <= 0).sum()) for part in reader.output)
        self._cluster.delete([self._in, self._out])
        return self._result

    def _measure(self, processes: Processes) -> None:
        result = self._result
        built = len(processes.batches())
        begin, end = built + _WARM_BATCHES, built + _WARM_BATCHES + self._size.batches
        (self._folder / "go").touch()
        self._await(processes, lambda: len(processes.batches()) >= begin)
        cpu, others, began = processes.cpu_seconds(), others_cpu_seconds(), time.monotonic()
        stored = _bytes_below(self._checkpoint)
        seen = len(processes.batches())
        self._await(processes, lambda: len(processes.batches()) >= end)
        number = len(processes.batches()) - seen
        result.cpu = (processes.cpu_seconds() - cpu) / number
        result.others = (others_cpu_seconds() - others) / (time.monotonic() - began) - result.cpu * number / (
            time.monotonic() - began
        )
        result.others = max(0.0, result.others)
        result.uploaded = (_bytes_below(self._checkpoint) - stored) / number
        if not result.master.startswith("local["):
            executors = [each for each in psutil.Process().children(recursive=True) if _is_executor(each)]
            executors[0].kill()
            result.killed = time.time()
        self._await(processes, lambda: "PHASE 1" in self._log.read_text(errors="replace"))
        batches = processes.batches()
        moved = _moves(self._log)
        result.build, result.steady = batches[:built], batches[begin:end]
        result.moved = moved[begin:end]
        after = [n for n, each in enumerate(batches) if result.killed and each.ended > result.killed]
        result.after = [batches[n] for n in after]
        result.after_moved = [moved[n] for n in after] if moved else []
        logs = [self._log, *self._folder.glob("spark/work/*/*/stderr")]
        sent = [_SENT.findall(each.read_text(errors="replace")) for each in logs]
        result.snapshot_mb = sum(float(each) for found in sent for each in found)

    def _await(self, processes: Processes, done: Callable[[], bool]) -> None:
        deadline = Deadline.after_seconds(_PATIENCE_SECONDS)
        while not done():
            if processes.failed():
                raise click.ClickException(processes.failed())
            if deadline.expired:
                raise click.ClickException(f"the query did not go on within {_PATIENCE_SECONDS:.0f} s")
            time.sleep(_PAUSE_SECONDS)


def _moves(log: Path) -> list[tuple[int, int, int]]:
    """Returns what shards read of their changelogs in each committed micro-batch of kafka-eos."""
    found: dict[int, tuple[int, int, int]] = {}
    for line in log.read_text(errors="replace").splitlines():
        told: Any = json.loads(line).get("batch") if line.startswith('{"time"') else None
        if told and told["outcome"] == "committed":
            counts = told["counts"]
            figures = (counts.get(name, 0) for name in ("restores", "restored_records", "restore_ms"))
            found[told["batch"]] = tuple(figures)
    return [found[number] for number in sorted(found)]


def _bytes_below(folder: Path) -> int:
    """Returns the size of all files; those of the newest micro-batches are never removed meanwhile."""
    return sum(each.stat().st_size for each in folder.rglob("*") if each.is_file())


def _is_executor(process: psutil.Process) -> bool:
    try:
        return _EXECUTOR in process.cmdline() and process.name() == "java"
    except psutil.NoSuchProcess:
        return False


@click.command(context_settings={"help_option_names": ["-h", "--help"]})
@click.option("--only", multiple=True, type=click.Choice([EOS, SNAPSHOTS, SPARK]), help="Default: all.")
@click.option("--executors", multiple=True, default=(0, 2, 4), show_default=True, help="0 = local[2].")
@click.option("--megabytes", default=1000, show_default=True, help="State in all.")
@click.option("--value-bytes", default=100, show_default=True)
@click.option("--changed", default=100_000, show_default=True, help="Changed keys in a micro-batch.")
@click.option("--batches", default=10, show_default=True, help="Measured micro-batches before the kill.")
@click.option("--snapshot-seconds", default=20, show_default=True, help="Between snapshots of a shard.")
def main(only: Sequence[str], executors: Sequence[int], **size: int) -> None:
    """Prints what state costs on executors, how often shards move, and what a killed executor costs."""
    compile_package()
    sizes = Size(**size)
    click.echo(f"{sizes.keys:,} keys, {sizes.megabytes} MB, {sizes.changed:,} keys a micro-batch\n\n{HEAD}")
    with EmbeddedKafka() as kafka, tempfile.TemporaryDirectory(prefix="kafka-eos-cluster-state-") as scratch:
        cluster = Cluster(kafka.bootstrap_servers)
        cluster.warm_up()
        for number in executors:
            master = f"local-cluster[{number},1,1024]" if number else "local[2]"
            for name in only or (EOS, SNAPSHOTS, SPARK):
                folder = Path(scratch) / f"{name}-{number}"
                click.echo(Run(cluster, name, master, sizes, folder).run().row())
                shutil.rmtree(folder)


if __name__ == "__main__":
    main()
