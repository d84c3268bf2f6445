"""``python -m benchmarks.kernel``: compares the C kernel with its Python twin, without Spark.

Both run in turn in separate processes, on one embedded broker. The program prints a table of medians:
millions of records per second, and CPU seconds per million records, including librdkafka's threads. On a busy
machine, the CPU seconds are more reliable.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Mapping

import click
import pyarrow as pa

from benchmarks.kafka import Cluster
from kafka_eos_source.embedded import EmbeddedKafka
from kafka_eos_source.kafka.config import producer_config
from kafka_eos_source.kafka.consumer import POOL
from kafka_eos_source.kafka.kernel import choice
from kafka_eos_source.kafka.producer import RecordProducer
from kafka_eos_source.kafka.transactional import TransactionalProducer
from kafka_eos_source.model import OffsetRange, TopicPartition
from kafka_eos_source.native.loader import VARIABLE
from kafka_eos_source.read.fetch import ReadSettings, read_ranges
from kafka_eos_source.runtime.deadline import Deadline
from kafka_eos_source.spark.schema import HEADERS_ARROW

PARTITIONS = 4
_BATCH = 10_000
_READ_OF_EACH_WRITTEN = 4
_SECONDS = 600.0
_PLAIN, _WITH_HEADERS, _OUT = "bench.kernel.plain", "bench.kernel.headers", "bench.kernel.out"

#: Rows of 110 bytes of key and value, as in the other benchmarks.
_KEY = pa.array([b"%010d" % number for number in range(_BATCH)], pa.binary())
_VALUE = pa.array([b"v" * 100] * _BATCH, pa.binary())
_TIMESTAMP = pa.array([1_700_000_000_000] * _BATCH, pa.int64())
_HEADERS = pa.array(
    [[{"key": "trace", "value": b"0123456789abcdef"}, {"key": "a", "value": b"1"}]] * _BATCH, HEADERS_ARROW
)
_ROWS: Mapping[str, pa.RecordBatch] = {
    "plain": pa.record_batch({"key": _KEY, "value": _VALUE}),
    "timestamp": pa.record_batch({"key": _KEY, "value": _VALUE, "timestamp": _TIMESTAMP}),
    "2 headers": pa.record_batch({"key": _KEY, "value": _VALUE, "headers": _HEADERS}),
}

#: For each kind of work: millions of records per second, and CPU seconds per million records.
Figures = dict[str, tuple[float, float]]


def figures(bootstrap: str, records: int) -> Figures:
    """Does all the work once in this process, with the implementation that `choice` selects."""
    found: Figures = {}

    def measured(name: str, count: int, work: Callable[[], None]) -> None:
        wall, cpu = time.perf_counter(), time.process_time()
        work()
        million = count / 1e6
        found[name] = (million / (time.perf_counter() - wall), (time.process_time() - cpu) / million)

    for name, topic, columns in (
        ("read", _PLAIN, None),
        ("read, column value alone", _PLAIN, ("value",)),
        ("read with 2 headers", _WITH_HEADERS, None),
    ):
        settings = ReadSettings(
            {"bootstrap.servers": bootstrap, "isolation.level": "read_committed"},
            include_headers=topic == _WITH_HEADERS,
            columns=columns,
        )
        _read(settings, topic, PARTITIONS)  # connects
        measured(name, records, lambda s=settings, t=topic: _read(s, t, records))  # type: ignore[misc]
    POOL.close()
    deadline = Deadline.after_seconds(_SECONDS)
    written = records // _READ_OF_EACH_WRITTEN
    config = {"bootstrap.servers": bootstrap}
    patient = {**config, "transaction.timeout.ms": str(int(_SECONDS * 1000))}
    transactional = TransactionalProducer(producer_config(patient, transactional_id="bench"))
    direct = RecordProducer(producer_config(config), "bench")
    transactional.init(deadline)
    for name, rows in _ROWS.items():
        transactional.begin()
        measured(
            f"write, {name}, in a transaction",
            written,
            lambda r=rows: _write(transactional, r, written, deadline),  # type: ignore[misc]
        )
        transactional.commit(deadline)
        direct.begin_count()
        measured(
            f"write, {name}, at least once",
            written,
            lambda r=rows: _write(direct, r, written, deadline),  # type: ignore[misc]
        )
    transactional.close()
    direct.close()
    return found


def _read(settings: ReadSettings, topic: str, records: int) -> None:
    ranges = [
        OffsetRange(TopicPartition(topic, number), 0, records // PARTITIONS) for number in range(PARTITIONS)
    ]
    rows = sum(batch.num_rows for batch in read_ranges(settings, ranges))
    if rows != records:
        raise ValueError(f"{rows} records of {topic} were read; there are {records}")


def _write(producer: RecordProducer, rows: pa.RecordBatch, records: int, deadline: Deadline) -> None:
    for _ in range(records // _BATCH):
        producer.send(rows, _OUT, deadline)
    producer.flush(deadline)


def _load(cluster: Cluster, records: int) -> None:
    deadline = Deadline.after_seconds(_SECONDS)
    producer = RecordProducer(producer_config({"bootstrap.servers": cluster.bootstrap}), "load")
    for topic in (_PLAIN, _WITH_HEADERS, _OUT):
        cluster.create(topic, PARTITIONS)
    for topic, rows in ((_PLAIN, _ROWS["plain"]), (_WITH_HEADERS, _ROWS["2 headers"])):
        for number in range(records // _BATCH):
            to = pa.array([number % PARTITIONS] * _BATCH, pa.int32())
            producer.send(rows.append_column("partition", to), topic, deadline)
        producer.flush(deadline)
    producer.close()


def _in_a_process(bootstrap: str, records: int, native: bool) -> Figures:
    ran = subprocess.run(
        [sys.executable, "-m", "benchmarks.kernel", "--records", str(records), "--measure", bootstrap],
        env={**os.environ, VARIABLE: "1" if native else "0"},
        stdout=subprocess.PIPE,
        check=True,
    )
    return {name: (rate, cpu) for name, (rate, cpu) in json.loads(ran.stdout).items()}


@click.command()
@click.option("--records", default=2_000_000, show_default=True, help="Of each read; a write is a quarter.")
@click.option("--repeat", default=3, show_default=True, help="Rounds; the table has their medians.")
@click.option("--measure", metavar="BOOTSTRAP", help="Once, in this process, on topics that are there.")
def main(records: int, repeat: int, measure: str | None) -> None:
    """Compares the C kernel with its Python twin."""
    records -= records % (_BATCH * PARTITIONS * _READ_OF_EACH_WRITTEN)
    if measure:
        click.echo(json.dumps(figures(measure, records)))
        return
    if choice().kernel is None:
        raise click.ClickException(f"there is no kernel to be measured: {choice().why_not}")
    rounds: dict[bool, list[Figures]] = {False: [], True: []}
    with EmbeddedKafka() as kafka:
        _load(Cluster(kafka.bootstrap_servers), records)
        for _ in range(repeat):
            for native, found in rounds.items():
                found.append(_in_a_process(kafka.bootstrap_servers, records, native))
    click.echo("| | twin, M/s | kernel, M/s | twin, CPU s/M | kernel, CPU s/M | CPU saved |")
    click.echo("|---|---|---|---|---|---|")
    for name in rounds[True][0]:
        rate = {
            native: statistics.median(each[name][0] for each in found) for native, found in rounds.items()
        }
        cpu = {native: statistics.median(each[name][1] for each in found) for native, found in rounds.items()}
        click.echo(
            f"| {name} | {rate[False]:.2f} | {rate[True]:.2f} | {cpu[False]:.2f} | {cpu[True]:.2f} "
            f"| {1 - cpu[True] / cpu[False]:.0%} |"
        )


if __name__ == "__main__":
    main()
