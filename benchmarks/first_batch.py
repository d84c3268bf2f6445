"""``python -m benchmarks.first_batch``: the memory that a first micro-batch of new keys takes through Spark.

A query without state meets a topic full of keys that it has never seen, and takes all of them in one
micro-batch, as the first one does without ``maxOffsetsPerTrigger``. It keeps a count and the largest value
of each key. The table has the largest resident memory of any process of each kind: in all, and without the
pages of files, which the kernel takes back when memory is short. The output is checked: each key once, with
the count 1.
"""

from __future__ import annotations

import json
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from types import TracebackType

import click
import numpy as np
import psutil
import pyarrow as pa
import pyarrow.compute as pc
from confluent_kafka import Consumer, KafkaError, KafkaException, TopicPartition

from benchmarks.arrow_records import ROWS, binary_column, send
from benchmarks.contenders.base import PROGRAMS
from benchmarks.environments import compile_package
from benchmarks.kafka import Cluster
from benchmarks.processes import BROKER, Command, Processes, kind_of
from benchmarks.workload import KEY_BYTES
from kafka_eos_source.embedded import EmbeddedKafka
from kafka_eos_source.runtime.deadline import Deadline

_TOPIC_IN, _TOPIC_OUT = "new-keys", "counts"
_VALUE_BYTES = 8
_PARTITIONS = 4
_SAMPLE_SECONDS = 0.25
_PATIENCE_SECONDS = 3 * 3600.0
_SILENCE_SECONDS = 60.0
_AT_ONCE = 10_000
_KIB_PER_MIB = 1024


class Peaks:
    """Samples the memory of all processes below this one, while the context is entered.

    Attributes:
        mib: the largest resident memory of any process of a kind in MiB; then the same without the pages of
            files.
    """

    def __init__(self) -> None:
        self.mib: dict[str, tuple[int, int]] = {}
        self._end = threading.Event()
        self._thread = threading.Thread(target=self._sample, daemon=True)

    def __enter__(self) -> Peaks:
        self._thread.start()
        return self

    def __exit__(
        self, _type: type[BaseException] | None, _value: BaseException | None, _trace: TracebackType | None
    ) -> None:
        self._end.set()
        self._thread.join()

    def _sample(self) -> None:
        this = psutil.Process()
        while not self._end.wait(_SAMPLE_SECONDS):
            for each in this.children(recursive=True):
                try:
                    kind, status = kind_of(each.cmdline()), _status(each.pid)
                except (psutil.NoSuchProcess, FileNotFoundError, ProcessLookupError):
                    continue
                if kind == BROKER:
                    continue
                before = self.mib.get(kind, (0, 0))
                # the kernel keeps the peak of the former only
                self.mib[kind] = (
                    max(before[0], status.get("VmHWM", 0)),
                    max(before[1], status.get("RssAnon", 0)),
                )


def _status(pid: int) -> dict[str, int]:
    """Returns the sizes in the status of a process in MiB; none if it has ended."""
    fields = (line.split() for line in Path(f"/proc/{pid}/status").read_text().splitlines())
    return {each[0].rstrip(":"): int(each[1]) // _KIB_PER_MIB for each in fields if each[-1] == "kB"}


def records(keys: int) -> Iterator[pa.RecordBatch]:
    """Yields each key once, in random order, with a random value."""
    random = np.random.default_rng(1)
    order = random.permutation(keys)
    for first in range(0, keys, ROWS):
        numbers = pa.array(order[first : first + ROWS]).cast(pa.string())
        names = pc.utf8_lpad(numbers, KEY_BYTES, "0").cast(pa.binary())
        values = random.integers(0, 256, (len(names), _VALUE_BYTES), np.uint8)
        yield pa.record_batch({"key": names, "value": binary_column(values)})


def check(bootstrap: str, keys: int) -> None:
    """Reads the committed output.

    Raises:
        click.ClickException: if a key is missing or occurs twice, or a count is not 1.
    """
    config = {
        "bootstrap.servers": bootstrap,
        "group.id": "check",
        "isolation.level": "read_committed",
        "auto.offset.reset": "earliest",
        "enable.auto.commit": False,
        "enable.partition.eof": True,
    }
    eof: int = KafkaError._PARTITION_EOF
    seen, ended = np.zeros(keys, np.int64), set[int]()
    consumer = Consumer(config)
    try:
        consumer.subscribe([_TOPIC_OUT])
        silence = Deadline.after_seconds(_SILENCE_SECONDS)
        while len(ended) < _PARTITIONS:
            messages = consumer.consume(_AT_ONCE, 1.0)
            for each in messages:
                error = each.error()
                if error is None:
                    continue
                if error.code() != eof:
                    if error.retriable() or (error.code() < 0 and not error.fatal()):
                        continue  # librdkafka tries again
                    raise KafkaException(error)
                partition, offset = each.partition(), each.offset()
                assert partition is not None
                assert offset is not None
                tp = TopicPartition(_TOPIC_OUT, partition)
                _, end = consumer.get_watermark_offsets(tp, cached=True)
                if offset >= end:  # else an open transaction hides records, committed or not
                    ended.add(partition)
            found = [each for each in messages if each.error() is None]
            if {each.value() for each in found} - {b"1"}:
                raise click.ClickException("WRONG: a count is not 1")
            numbers = np.array([each.key() for each in found], f"S{KEY_BYTES}").astype(np.int64)
            np.add.at(seen, numbers, 1)
            if found:
                silence = Deadline.after_seconds(_SILENCE_SECONDS)
            elif silence.expired:
                raise click.ClickException("the output cannot be read to its end")
    finally:
        consumer.close()
    if (seen != 1).any():
        lost, doubled = int((seen == 0).sum()), int((seen > 1).sum())
        raise click.ClickException(f"WRONG: {lost:,} keys are missing, and {doubled:,} occur more than once")


def run(bootstrap: str, folder: Path, keys: int, shards: int, limit_mib: int | None) -> None:
    """Runs the query, and prints how long it took and what memory its processes used.

    Raises:
        click.ClickException: if the query fails.
    """
    state = {
        "kafka.bootstrap.servers": bootstrap,
        "application.id": "first-batch",
        "state.dir": str(folder / "state"),
    }
    if limit_mib is not None:
        state["statestore.uncommitted.max.bytes"] = str(limit_mib << 20)
    job = {
        "format": "kafka-eos",
        "bootstrap": bootstrap,
        "topic_in": _TOPIC_IN,
        "topic_out": _TOPIC_OUT,
        "folder": str(folder),
        "master": "local[2]",
        "shards": shards,
        "name": "first-batch",
        "conf": {},
        "state": state,
        "phases": [(keys, str(folder))],
    }
    environment = {
        "PYSPARK_PYTHON": sys.executable,
        "PYSPARK_DRIVER_PYTHON": sys.executable,
        "PYTHONPATH": str(Path(__file__).resolve().parents[1]),
    }
    command = Command([sys.executable, str(PROGRAMS / "cluster_count.py"), json.dumps(job)], environment)
    deadline = Deadline.after_seconds(_PATIENCE_SECONDS)
    cpu = 0.0
    with Processes([command], folder) as processes, Peaks() as peaks:
        while not processes.ended():
            if deadline.expired:
                raise click.ClickException("the query did not end")
            cpu = max(cpu, processes.cpu_seconds())  # less than before while the processes end
            time.sleep(_SAMPLE_SECONDS)
        if processes.failed():
            raise click.ClickException(processes.failed())
        batches = processes.batches()
    (batch,) = batches
    click.echo(f"one micro-batch of {keys:,} records: {batch.trigger_ms / 1000:.0f} s, {cpu:.0f} CPU s")
    click.echo("\n| process | peak MiB | without files |\n|---|--:|--:|")
    for kind, (resident, without_files) in sorted(peaks.mib.items()):
        click.echo(f"| {kind} | {resident:,} | {without_files:,} |")


@click.command(context_settings={"help_option_names": ["-h", "--help"]})
@click.option("--keys", default=50_000_000, show_default=True, help="New keys of the micro-batch.")
@click.option("--shards", default=4, show_default=True, help="Shards of the state.")
@click.option("--limit-mib", type=int, help="statestore.uncommitted.max.bytes in MiB.  [default: its own]")
def main(keys: int, shards: int, limit_mib: int | None) -> None:
    """Prints the memory that a first micro-batch of new keys takes."""
    compile_package()
    with EmbeddedKafka() as kafka, tempfile.TemporaryDirectory(prefix="kafka-eos-first-batch-") as scratch:
        cluster = Cluster(kafka.bootstrap_servers)
        cluster.warm_up()
        for topic in (_TOPIC_IN, _TOPIC_OUT):
            cluster.create(topic, _PARTITIONS)
        send(kafka.bootstrap_servers, _TOPIC_IN, records(keys))
        run(kafka.bootstrap_servers, Path(scratch), keys, shards, limit_mib)
        check(kafka.bootstrap_servers, keys)
        click.echo("\nThe output has each key once, with the count 1.")


if __name__ == "__main__":
    main()
