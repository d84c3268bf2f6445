"""``python -m benchmarks.sealing``: what tasks and the commit spend on rows and on sealed batches.

One process stages rows as four tasks would, and then commits them, in turn as rows and as sealed record
batches, to one embedded broker. The program prints medians of CPU seconds per million records.
"""

from __future__ import annotations

import statistics
import tempfile
import time
from collections.abc import Callable
from functools import partial
from typing import TypeVar

import click
import pyarrow as pa

from benchmarks.kafka import Cluster
from kafka_eos_source.commit.request import Producer
from kafka_eos_source.embedded import EmbeddedKafka
from kafka_eos_source.kafka.config import producer_config
from kafka_eos_source.kafka.producer import TransactionalProducer
from kafka_eos_source.model import GroupOffset, StagedPart, TopicPartition
from kafka_eos_source.runtime.deadline import Deadline
from kafka_eos_source.spark.arrow import SEALED
from kafka_eos_source.stage.files import StagingFolder
from kafka_eos_source.stage.parts import StagedRows
from kafka_eos_source.stage.staging import sealed_batches, sealing_plan, stage

T = TypeVar("T")
_TASKS = 4
_BATCH = 10_000
_SECONDS = 600.0
_SOURCE = TopicPartition("bench.source", 0)
#: Name of the work → topic, partitions, bytes of a value, compression.
_WORK = {
    "110 bytes, 4 partitions": ("bench.four", 4, 100, "none"),
    "110 bytes, 1,000 partitions": ("bench.thousand", 1000, 100, "none"),
    "1 KiB lz4, 4 partitions": ("bench.lz4", 4, 1014, "lz4"),
    "1 KiB zstd, 4 partitions": ("bench.zstd", 4, 1014, "zstd"),
}


def _rows(value_bytes: int) -> pa.RecordBatch:
    """Returns a staged batch, whose values compress to about a half."""
    half = bytes(range(256)) * 4
    rest = b"v" * (value_bytes // 2)
    values = [(b"%08d" % number + half)[: value_bytes // 2] + rest for number in range(_BATCH)]
    keys = [b"%010d" % number for number in range(_BATCH)]
    return pa.record_batch({"key": pa.array(keys, pa.binary()), "value": pa.array(values, pa.binary())})


def commit(producer: Producer, topic: str, folder: StagingFolder, parts: list[StagedPart]) -> None:
    """Verifies and writes what was staged in one transaction, as a commit does."""
    deadline = Deadline.after_seconds(_SECONDS)
    staged = StagedRows(folder, "1", parts)
    producer.check_partitions(staged.topics, deadline)
    producer.begin()
    for batch in staged.batches():
        if SEALED in batch.schema.names:
            producer.send_sealed(sealed_batches(batch), topic, deadline)
        else:
            producer.send(batch, topic, deadline)
    producer.flush(deadline)
    producer.send_offsets([GroupOffset(_SOURCE, 1, "token")], "bench", deadline)
    producer.commit(deadline)


def _timed(seconds: list[float], work: Callable[[], T]) -> T:
    began = time.process_time()
    result = work()
    seconds.append(time.process_time() - began)
    return result


@click.command()
@click.option("--records", default=1_000_000, show_default=True, help="Of each transaction.")
@click.option("--repeat", default=5, show_default=True, help="Rounds; the table has their medians.")
def main(records: int, repeat: int) -> None:
    """Compares rows and sealed batches on their way through the staging folder."""
    click.echo("| | rows: task | rows: commit | sealed: task | sealed: commit |")
    click.echo("|---|--:|--:|--:|--:|")
    with EmbeddedKafka() as kafka:
        cluster = Cluster(kafka.bootstrap_servers)
        cluster.create(_SOURCE.topic, 1)
        for name, (topic, partitions, value_bytes, compression) in _WORK.items():
            cluster.create(topic, partitions)
            config = {"bootstrap.servers": kafka.bootstrap_servers, "compression.type": compression}
            batches = [_rows(value_bytes)] * (records // _TASKS // _BATCH)
            schema = pa.schema([batches[0].schema.field(column) for column in ("key", "value")])
            producer = TransactionalProducer(producer_config(config, f"bench-{topic}"))
            producer.init(Deadline.after_seconds(_SECONDS))
            medians = []
            for plan in (None, sealing_plan(config, topic)):
                of_tasks: list[float] = []
                of_commit: list[float] = []
                for _ in range(1 + repeat):
                    with tempfile.TemporaryDirectory() as location:
                        folder = StagingFolder.at(f"{location}/staging")
                        staging = partial(
                            stage,
                            batches,
                            schema,
                            folder=folder,
                            batch="1",
                            inline_bytes=0,
                            topic=topic,
                            sealing=plan,
                        )
                        parts = [_timed(of_tasks, staging) for _ in range(_TASKS)]
                        _timed(of_commit, partial(commit, producer, topic, folder, parts))
                # the first round warms up
                medians += [
                    _TASKS * statistics.median(of_tasks[_TASKS:]),
                    statistics.median(of_commit[1:]),
                ]
            producer.close()
            click.echo(f"| {name} | " + " | ".join(f"{each * 1e6 / records:.2f}" for each in medians) + " |")


if __name__ == "__main__":
    main()
