"""All consumers read the same from a real log with aborted records and control records."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from confluent_kafka import Producer

from integration.support.driver import ROOT
from integration.support.kafka import TIMEOUT_SECONDS, await_stable, produce, read_back, transaction, values
from integration.test_sink_stream import rows, spec
from kafka_eos_source.kafka import kernel
from kafka_eos_source.kafka.config import consumer_config
from kafka_eos_source.kafka.consumer import POOL, AssignedConsumer
from kafka_eos_source.kafka.kernel_consumer import KernelConsumer
from kafka_eos_source.kafka.wire.consumer import WireConsumer
from kafka_eos_source.model import OffsetRange, TopicPartition
from kafka_eos_source.read import fetch
from kafka_eos_source.read.fetch import ReadSettings, read_ranges

PARTITIONS = 3
RECORDS = 2000
ROUNDS = 4


def write_transactions(producer: Producer, round_number: int) -> None:
    """Writes transactions, of which every second one is aborted."""
    if round_number % 2:
        producer.abort_transaction(TIMEOUT_SECONDS)
    else:
        producer.commit_transaction(TIMEOUT_SECONDS)


@pytest.mark.skipif(kernel.choice().kernel is None, reason=kernel.choice().why_not)
@pytest.mark.parametrize("isolation", ["read_committed", "read_uncommitted"])
def test_all_consumers_read_the_same_rows_of_a_log(
    broker: str, topic: Callable[..., str], monkeypatch: pytest.MonkeyPatch, isolation: str
) -> None:
    name = topic(PARTITIONS)
    for round_number in range(ROUNDS):
        producer = transaction(broker, f"kernel-{name}")
        for number in range(RECORDS):
            producer.produce(
                name,
                None if number % 11 == 0 else b"%d" % number * (number % 50),
                None if number % 3 == 0 else b"k%d" % round_number,
                partition=number % PARTITIONS,
                headers=[("a", b"%d" % number), ("a", None), ("é", b"")] if number % 5 == 0 else None,
                timestamp=1_700_000_000_000 + number,
            )
        write_transactions(producer, round_number)
    await_stable(broker, name)  # else the log may end later for the next consumer
    conf = consumer_config({"bootstrap.servers": broker}, "g", isolation)
    tps = [TopicPartition(name, partition) for partition in range(PARTITIONS)]
    found: dict[type[Any], pa.Table] = {}
    for kind in (AssignedConsumer, KernelConsumer, WireConsumer):
        monkeypatch.setattr(fetch, "reading_consumer", lambda *_, kind=kind: kind)
        with POOL.borrow(conf, kind) as consumer:
            ends = {tp: consumer.log_bounds(tp, TIMEOUT_SECONDS)[1] for tp in tps}
        for part in (1, 2):  # a cached client must also read from a position where it did not stop
            ranges = [OffsetRange(tp, ends[tp] * (part - 1) // 2, ends[tp]) for tp in tps]
            batches = list(read_ranges(ReadSettings(conf, include_headers=True), ranges))
            table = pa.Table.from_batches(batches).sort_by(
                [("partition", "ascending"), ("offset", "ascending")]
            )
        found[kind] = table.combine_chunks()
    POOL.close()
    twin, kernels = found[AssignedConsumer], found[KernelConsumer]
    assert kernels.equals(twin)
    assert found[WireConsumer].equals(twin)
    kernels.validate(full=True)
    committed = ROUNDS // 2 if isolation == "read_committed" else ROUNDS
    assert 0 < kernels.num_rows <= RECORDS * committed
    assert kernels.column("offset").to_pylist() != list(
        range(kernels.num_rows)
    )  # control records take offsets


@pytest.mark.skipif(kernel.choice().kernel is None, reason=kernel.choice().why_not)
def test_a_query_says_that_its_processes_import_a_copy_of_the_package_without_kernel(
    broker: str, topic: Callable[..., str], driver: Any, checkpoint: str, tmp_path: Path
) -> None:
    """The program has the kernel; Spark's processes find another copy in its working directory."""
    checkout, source, sink = tmp_path / "checkout", topic(1), topic(1)
    for package in ("kafka_eos_source", "pyspark_kafka_eos"):
        shutil.copytree(ROOT / package, checkout / package, ignore=shutil.ignore_patterns("*.so"))
    produce(broker, source, rows(0, 10))
    running = driver(spec(broker, source, sink, checkpoint, 10, directory=str(checkout)))
    running.finish()
    assert values(read_back(broker, sink)) == rows(0, 10)
    said = [line for line in running.log.read_text().splitlines() if "without the C kernel" in line]
    assert len(said) == 1, said
    assert "the query runs" in said[0]
    assert str(checkout) in said[0]
