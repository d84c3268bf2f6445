"""``python -m benchmarks.transaction_client``: compares the clients that write transactions, without Spark.

Both write the same rows in turn, in one process, to one embedded broker. The program prints a table of
medians: millions of records per second, CPU seconds of this process per million records, and the milliseconds
of a small transaction. On a busy machine, the CPU seconds are more reliable.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable

import click
import pyarrow as pa

from benchmarks.kafka import Cluster
from kafka_eos_source.commit.interfaces import Producer
from kafka_eos_source.embedded import EmbeddedKafka
from kafka_eos_source.kafka.config import producer_config
from kafka_eos_source.kafka.native_support import LIBRDKAFKA, NATIVE
from kafka_eos_source.kafka.transaction_client import transactional_producer
from kafka_eos_source.model import GroupOffset, TopicPartition
from kafka_eos_source.runtime.deadline import Deadline

BATCH, _SMALL, _SMALL_TRANSACTIONS = 10_000, 100, 50
SECONDS = 600.0
SOURCE = TopicPartition("bench.source", 0)
#: Name of the work → topic, partitions, bytes of a value, compression.
WORK = {
    "110 bytes, 4 partitions": ("bench.four", 4, 100, "none"),
    "110 bytes, 1,000 partitions": ("bench.thousand", 1000, 100, "none"),
    "1 KiB lz4, 4 partitions": ("bench.lz4", 4, 1014, "lz4"),
    "1 KiB zstd, 4 partitions": ("bench.zstd", 4, 1014, "zstd"),
}


def rows(value_bytes: int) -> pa.RecordBatch:
    """Returns a staged batch, whose values compress to about a half."""
    half = bytes(range(256)) * 4
    rest = b"v" * (value_bytes // 2)
    values = [(b"%08d" % number + half)[: value_bytes // 2] + rest for number in range(BATCH)]
    keys = [b"%010d" % number for number in range(BATCH)]
    return pa.record_batch({"key": pa.array(keys, pa.binary()), "value": pa.array(values, pa.binary())})


def transact(producer: Producer, topic: str, batches: list[pa.RecordBatch]) -> None:
    """Writes one transaction, as a commit does."""
    deadline = Deadline.after_seconds(SECONDS)
    producer.begin()
    for batch in batches:
        producer.send(batch, topic, deadline)
    producer.flush(deadline)
    producer.send_offsets([GroupOffset(SOURCE, 1, "token")], "bench", deadline)
    producer.commit(deadline)


def _seconds(work: Callable[[], None]) -> tuple[float, float]:
    wall, cpu = time.perf_counter(), time.process_time()
    work()
    return time.perf_counter() - wall, time.process_time() - cpu


@click.command()
@click.option("--records", default=1_000_000, show_default=True, help="Of each transaction.")
@click.option("--repeat", default=5, show_default=True, help="Rounds; the table has their medians.")
def main(records: int, repeat: int) -> None:
    """Compares librdkafka and the native client."""
    million = records / 1e6
    click.echo("| | librdkafka, M/s | native, M/s | librdkafka, CPU s/M | native, CPU s/M |")
    click.echo("|---|--:|--:|--:|--:|")
    with EmbeddedKafka() as kafka:
        cluster = Cluster(kafka.bootstrap_servers)
        cluster.create(SOURCE.topic, 1)
        small: dict[str, list[float]] = {LIBRDKAFKA: [], NATIVE: []}
        for name, (topic, partitions, value_bytes, compression) in WORK.items():
            cluster.create(topic, partitions)
            batch = rows(value_bytes)
            config = {
                "bootstrap.servers": kafka.bootstrap_servers,
                "compression.type": compression,
                "transaction.timeout.ms": "300000",
            }
            clients = {
                client: transactional_producer(producer_config(config, f"bench-{client}"), client)
                for client in (LIBRDKAFKA, NATIVE)
            }
            walls: dict[str, list[float]] = {client: [] for client in clients}
            cpus: dict[str, list[float]] = {client: [] for client in clients}
            for producer in clients.values():
                producer.init(Deadline.after_seconds(SECONDS))
                transact(producer, topic, [batch])  # warms up
            for _ in range(repeat):
                for client, producer in clients.items():
                    batches = [batch] * (records // BATCH)
                    wall, cpu = _seconds(lambda p=producer, t=topic, b=batches: transact(p, t, b))  # type: ignore[misc]
                    walls[client].append(million / wall)
                    cpus[client].append(cpu / million)
            if topic == "bench.four":
                few = [batch.slice(0, _SMALL)]
                for _ in range(_SMALL_TRANSACTIONS):
                    for client, producer in clients.items():
                        wall, _ = _seconds(lambda p=producer, t=topic, b=few: transact(p, t, b))  # type: ignore[misc]
                        small[client].append(wall * 1000)
            for producer in clients.values():
                producer.close()
            cells = [statistics.median(each[client]) for each in (walls, cpus) for client in clients]
            click.echo(f"| {name} | " + " | ".join(f"{cell:.2f}" for cell in cells) + " |")
    medians = {client: statistics.median(found) for client, found in small.items()}
    click.echo(
        f"\nA transaction of {_SMALL} records: {medians[LIBRDKAFKA]:.1f} ms with librdkafka, "
        f"{medians[NATIVE]:.1f} ms with the native client."
    )


if __name__ == "__main__":
    main()
