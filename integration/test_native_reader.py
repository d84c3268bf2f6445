"""Tasks and confluent-kafka's consumer read the same rows of a real log, whoever wrote and compressed it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from confluent_kafka import Consumer, Producer
from confluent_kafka import TopicPartition as ClientPartition

from integration.support.kafka import TIMEOUT_SECONDS, await_stable, end_offsets, transaction
from integration.support.tools import run
from kafka_eos_source.model import OffsetRange, TopicPartition
from kafka_eos_source.read.fetch import ReadSettings, read_ranges

CODECS = ("none", "gzip", "snappy", "lz4", "zstd")
RECORDS = 300


def rows(broker: str, name: str, isolation: str, parts: int = 1) -> list[tuple[Any, ...]]:
    """Returns what tasks read, in this many ranges of each partition."""
    settings = ReadSettings({"bootstrap.servers": broker, "isolation.level": isolation}, True)
    found = []
    for part in range(parts):  # the consumer is the same, and reads from a position where it did not stop
        ranges = [
            OffsetRange(TopicPartition(name, number), end * part // parts, end * (part + 1) // parts)
            for number, end in end_offsets(broker, name, isolation).items()
        ]
        for batch in read_ranges(settings, ranges):
            for row in batch.to_pylist():
                headers = [(each["key"], each["value"]) for each in row["headers"] or ()]
                at = round(row["timestamp"].timestamp() * 1000), row["timestampType"]
                found.append((row["partition"], row["offset"], row["key"], row["value"], *at, headers))
    return sorted(found)


def judged(broker: str, name: str, isolation: str) -> list[tuple[Any, ...]]:
    """Returns what confluent-kafka's consumer reads."""
    left = {number: end for number, end in end_offsets(broker, name, isolation).items() if end}
    consumer = Consumer(
        {
            "bootstrap.servers": broker,
            "group.id": "judge",
            "isolation.level": isolation,
            "enable.partition.eof": True,
            "enable.auto.commit": False,
        }
    )
    consumer.assign([ClientPartition(name, number, 0) for number in left])
    found: list[tuple[Any, ...]] = []
    while left:
        message = consumer.poll(TIMEOUT_SECONDS)
        assert message is not None
        if message.error() is not None:
            assert message.error().name() == "_PARTITION_EOF"
            left.pop(message.partition(), None)
            continue
        kind, ms = message.timestamp()
        found.append(
            (
                message.partition(),
                message.offset(),
                message.key(),
                message.value(),
                ms,
                kind - 1,  # Spark counts from 0, librdkafka from 1
                list(message.headers() or ()),
            )
        )
    consumer.close()
    return sorted(found)


@pytest.mark.parametrize("append_time", [False, True], ids=["create time", "append time"])
def test_tasks_and_librdkafka_read_the_same(
    broker: str, topic: Callable[..., str], append_time: bool
) -> None:
    config = {"message_timestamp_type": "LogAppendTime"} if append_time else {}
    name = topic(2, **config)
    for codec in CODECS:
        how = {"compression.type": codec, "linger.ms": 5}
        plain = Producer({"bootstrap.servers": broker, **how})
        writing = transaction(broker, f"{name}-{codec}", how)
        for number in range(RECORDS):
            for producer in (plain, writing):
                producer.produce(
                    name,
                    None if number % 11 == 0 else b"value %d " % number * (number % 50),
                    None if number % 3 == 0 else codec,
                    partition=number % 2,
                    headers=[("a", b"%d" % number), ("a", None), ("é", b"")] if number % 5 == 0 else None,
                )
            if number % 100 == 99:
                assert plain.flush(TIMEOUT_SECONDS) == 0
                assert writing.flush(TIMEOUT_SECONDS) == 0
        (writing.abort_transaction if codec in ("gzip", "lz4") else writing.commit_transaction)(
            TIMEOUT_SECONDS
        )
        assert plain.flush(TIMEOUT_SECONDS) == 0
        if not append_time:
            run(
                "org.apache.kafka.tools.ProducerPerformance",
                *("--topic", name, "--num-records", str(RECORDS), "--record-size", "900"),
                *("--throughput", "-1", "--producer-props"),
                *(f"bootstrap.servers={broker}", f"compression.type={codec}"),
            )
    await_stable(broker, name)
    for isolation in ("read_committed", "read_uncommitted"):
        found = rows(broker, name, isolation)
        written = 2 if append_time else 3
        hidden = 2 * RECORDS if isolation == "read_committed" else 0
        assert len(found) == written * RECORDS * len(CODECS) - hidden
        assert found == judged(broker, name, isolation)
        assert found == rows(broker, name, isolation, parts=3)
