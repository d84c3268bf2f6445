"""Tasks and confluent-kafka's consumer read the same rows of a real log, whoever wrote and compressed it."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from confluent_kafka import Producer

from integration.support.codecs import CODECS, judged, rows
from integration.support.kafka import TIMEOUT_SECONDS, await_stable, transaction
from integration.support.tools import run

RECORDS = 300


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
