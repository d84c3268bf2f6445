"""Records in each codec, and who judges them."""

from __future__ import annotations

from typing import Any

from confluent_kafka import Consumer
from confluent_kafka import TopicPartition as ClientPartition

from integration.support.kafka import TIMEOUT_SECONDS, end_offsets
from kafka_eos_source.model import OffsetRange, TopicPartition
from kafka_eos_source.read.fetch import ReadSettings, read_ranges

CODECS = ("none", "gzip", "snappy", "lz4", "zstd")


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
