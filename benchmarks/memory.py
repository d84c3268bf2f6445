"""``python -m benchmarks.memory``: peak memory of each process in a micro-batch of 20 million records.

It counts resident bytes, including those of mapped files, which the operating system reclaims when needed.
The JVM's memory grows towards ``spark.driver.memory`` (1 GiB by default).
"""

from __future__ import annotations

import tempfile
import threading
from collections import defaultdict
from pathlib import Path

import click
import psutil

from benchmarks.contenders.base import Job
from benchmarks.contenders.spark_query import EosQuery
from benchmarks.kafka import Cluster
from benchmarks.processes import Processes
from benchmarks.workload import Workload
from kafka_eos_source.embedded import EmbeddedKafka

_MIB = 1 << 20
_LOOK_SECONDS = 0.2
#: Part of a process's command line, and the role of the process.
_ROLES = (
    ("python_streaming_sink_runner", "driver: commits"),
    ("python_streaming_source_runner", "driver: plans"),
    ("pyspark.daemon pyspark.worker", "executor: one Python worker"),
    ("pyspark.daemon", "driver: makes writers and readers"),
    ("SparkSubmit", "JVM"),
)


@click.command()
@click.option("--records", default=20_000_000, show_default=True)
@click.option("--record-bytes", default=110, show_default=True)
def main(records: int, record_bytes: int) -> None:
    """Runs one topic-to-topic micro-batch, exactly once, and prints peak memory."""
    workload = Workload(records=records, record_bytes=record_bytes)
    with EmbeddedKafka() as kafka, tempfile.TemporaryDirectory() as folder:
        cluster = Cluster(kafka.bootstrap_servers)
        cluster.create("in", workload.partitions)
        cluster.create("out", workload.partitions)
        click.echo(f"sending {records:,} records of {record_bytes} bytes", err=True)
        cluster.preload(workload, "in")
        job = Job(
            name="memory",
            bootstrap=kafka.bootstrap_servers,
            topic_in="in",
            topic_out="out",
            partitions=workload.partitions,
            cores=psutil.cpu_count() or 1,
            batch_records=records,
            folder=Path(folder),
        )
        most: dict[str, int] = defaultdict(int)
        pause = threading.Event()
        with Processes(EosQuery("kafka-eos").commands(job), job.folder) as processes:
            while not processes.ended():
                for each in psutil.Process().children(recursive=True):
                    _look(each, most)
                pause.wait(_LOOK_SECONDS)
            if processes.failed():
                raise click.ClickException(processes.failed())
            batches = processes.batches()
        written = sum(cluster.stable("out", workload.partitions))
    if len(batches) != 1 or written < records:
        raise click.ClickException(f"{len(batches)} micro-batches, {written:,} offsets written")
    click.echo(f"{records:,} records in one micro-batch of {batches[0].trigger_ms / 1000:.0f} s")
    for role, size in most.items():
        click.echo(f"{role}: {size / _MIB:,.0f} MiB")


def _look(process: psutil.Process, most: dict[str, int]) -> None:
    try:
        line = " ".join(process.cmdline())
        size = process.memory_info().rss
    except psutil.Error:
        return
    for part, role in _ROLES:
        if part in line:
            most[role] = max(most[role], size)
            return


if __name__ == "__main__":
    main()
