"""Bad records go to the dead-letter topic once, in the transaction of their batch."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from pyspark.sql import SparkSession

from integration.support.kafka import end_offsets, produce, read_back, values
from integration.support.query import Query
from integration.test_sink_kills import killed_at
from integration.test_sink_stream import rows, spec
from kafka_eos_source import invalid_record
from kafka_eos_source.protocol import dead_letters

#: Marks every tenth record, as `invalid_record` does.
MARKED = (
    "CASE WHEN CAST(value AS STRING) LIKE '%7' THEN named_struct('error', 'Seven', 'message', 'ends with 7', "
    "'topic', topic, 'partition', partition, 'offset', offset) END AS kafka_eos_invalid"
)


@pytest.mark.long  # `chaos.test_dead_letters` shows the same without Spark
@pytest.mark.fault("T120", "the driver is killed while a batch has dead letters", "produce, commit")
@pytest.mark.timeout(600)
def test_dead_letters_are_written_once_although_the_driver_is_killed(
    broker: str, topic: Callable[..., str], driver: Any, checkpoint: str, tmp_path: Path
) -> None:
    source, sink, dead = topic(2), topic(2), topic(1)
    sent = rows(0, 300)
    produce(broker, source, sent, keys=sent)
    query = spec(broker, source, sink, checkpoint, 100, select=["key", "value", MARKED])
    query["sink"]["options"].update({"onInvalidRecord": "dead-letter", "deadLetter.topic": dead})
    killed_at(driver, query, tmp_path, ["commit.within_produce", "commit.after_commit"], [{}])
    bad = [each for each in sent if each.endswith("7")]
    assert values(read_back(broker, sink)) == [each for each in sent if each not in bad]
    letters = read_back(broker, dead)
    assert values(letters) == bad
    offsets = end_offsets(broker, source)
    for letter in letters:
        headers = dict(letter.headers or [])
        assert headers[dead_letters.ERROR] == b"Seven"
        assert headers[dead_letters.ORIGIN_TOPIC] == source.encode()
        partition = int(headers[dead_letters.ORIGIN_PARTITION])
        assert int(headers[dead_letters.ORIGIN_OFFSET]) < offsets[partition]


def test_marked_rows_and_records_that_are_too_large_become_dead_letters(
    spark: SparkSession, broker: str, topic: Callable[..., str], checkpoint: str
) -> None:
    """A marked row, and a record that is larger than a topic accepts."""
    query = Query(spark, broker, topic(1), topic(1), checkpoint)
    dead = topic(1, **{"max.message.bytes": "20000"})
    produce(broker, query.source, ["good", "bad", "x" * 30_000])
    frame = query.frame().select("key", "value", invalid_record("value = X'626164'", "it says so"))
    writer = (
        frame.writeStream.format("kafka-eos")
        .options(**{"kafka.bootstrap.servers": broker, "topic": query.sink})
        .options(**{"onInvalidRecord": "dead-letter", "deadLetter.topic": dead})
        .option("checkpointLocation", query.checkpoint)
        .trigger(availableNow=True)
    )
    assert writer.start().awaitTermination(120)
    assert values(read_back(broker, query.sink)) == ["good"]
    letters = {dict(each.headers)[dead_letters.ERROR]: each for each in read_back(broker, dead)}
    assert letters[b"InvalidRecord"].value == b"bad"
    large = letters[b"RecordTooLarge"]
    assert dict(large.headers)[dead_letters.VALUE_BYTES] == b"30000"
    assert large.value == b"x" * len(large.value)
    assert len(letters) == 2
