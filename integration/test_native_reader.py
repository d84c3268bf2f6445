"""The native reader and librdkafka read the same rows of a real log, whoever wrote and compressed it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from confluent_kafka import Producer

from integration.support.kafka import TIMEOUT_SECONDS, await_stable, end_offsets, transaction
from integration.support.tools import run
from kafka_eos_source.kafka import kernel
from kafka_eos_source.kafka.config import consumer_config
from kafka_eos_source.kafka.native_support import LIBRDKAFKA, NATIVE
from kafka_eos_source.model import OffsetRange, TopicPartition
from kafka_eos_source.read.fetch import ReadSettings, read_ranges

CODECS = ("none", "gzip", "snappy", "lz4", "zstd")
RECORDS = 300

pytestmark = pytest.mark.skipif(kernel.choice().kernel is None, reason=kernel.choice().why_not)


def rows(broker: str, name: str, isolation: str, client: str) -> list[dict[str, Any]]:
    conf = consumer_config({"bootstrap.servers": broker}, "g", isolation)
    ends = end_offsets(broker, name, isolation)
    ranges = [OffsetRange(TopicPartition(name, number), 0, end) for number, end in ends.items()]
    settings = ReadSettings(conf, True, client=client)
    found = [row for batch in read_ranges(settings, ranges) for row in batch.to_pylist()]
    return sorted(found, key=lambda row: (row["partition"], row["offset"]))


@pytest.mark.parametrize("append_time", [False, True], ids=["create time", "append time"])
def test_the_native_reader_and_librdkafka_read_the_same(
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
        found = rows(broker, name, isolation, NATIVE)
        written = 2 if append_time else 3
        hidden = 2 * RECORDS if isolation == "read_committed" else 0
        assert len(found) == written * RECORDS * len(CODECS) - hidden
        assert found == rows(broker, name, isolation, LIBRDKAFKA)
