"""``python -m benchmarks.client``: what reading and writing records costs a Python process, without Spark.

Each round runs in a process of its own, on one embedded broker. The program prints a table of medians:
millions of records per second, and CPU seconds per million records. On a busy machine, the CPU seconds are
more reliable.
"""

from __future__ import annotations

import json
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
from kafka_eos_source.kafka.producer import RecordProducer, TransactionalProducer
from kafka_eos_source.kafka.reader import POOL
from kafka_eos_source.model import OffsetRange, TopicPartition
from kafka_eos_source.read.fetch import ReadSettings, read_ranges
from kafka_eos_source.runtime.deadline import Deadline
from kafka_eos_source.spark.arrow import HEADERS_ARROW

PARTITIONS = 4
_BATCH = 10_000
_READ_OF_EACH_WRITTEN = 4
_SECONDS = 600.0
_PLAIN, _WITH_HEADERS, _OUT = "bench.client.plain", "bench.client.headers", "bench.client.out"

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
    """Does all the work once in this process."""
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


def _write(
    producer: RecordProducer | TransactionalProducer, rows: pa.RecordBatch, records: int, deadline: Deadline
) -> None:
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


def _in_a_process(bootstrap: str, records: int) -> Figures:
    ran = subprocess.run(
        [sys.executable, "-m", "benchmarks.client", "--records", str(records), "--measure", bootstrap],
        stdout=subprocess.PIPE,
        check=True,
    )
    return {name: (rate, cpu) for name, (rate, cpu) in json.loads(ran.stdout).items()}


@click.command()
@click.option("--records", default=2_000_000, show_default=True, help="Of each read; a write is a quarter.")
@click.option("--repeat", default=3, show_default=True, help="Rounds; the table has their medians.")
@click.option("--measure", metavar="BOOTSTRAP", help="Once, in this process, on topics that are there.")
def main(records: int, repeat: int, measure: str | None) -> None:
    """Measures reading and writing."""
    records -= records % (_BATCH * PARTITIONS * _READ_OF_EACH_WRITTEN)
    if measure:
        click.echo(json.dumps(figures(measure, records)))
        return
    with EmbeddedKafka() as kafka:
        _load(Cluster(kafka.bootstrap_servers), records)
        rounds = [_in_a_process(kafka.bootstrap_servers, records) for _ in range(repeat)]
    click.echo("| | M/s | CPU s/M |")
    click.echo("|---|--:|--:|")
    for name in rounds[0]:
        rate, cpu = (statistics.median(each[name][index] for each in rounds) for index in (0, 1))
        click.echo(f"| {name} | {rate:.2f} | {cpu:.2f} |")


if __name__ == "__main__":
    main()
