"""Bad records go to the dead-letter topic once, in the transaction of their batch."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pytest
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as f

from integration.support.kafka import end_offsets, produce, read_back, values
from integration.support.query import Query
from integration.support.sink_kills import killed_at
from integration.support.sink_stream import rows, spec
from kafka_eos_source import invalid_record, map_in_read, record_origin
from kafka_eos_source.protocol import records
from kafka_eos_source.protocol.records import DeadLetter
from kafka_eos_source.sinks.filesystem import committed_files
from kafka_eos_source.state import apply
from kafka_eos_source.state.vector.function import KeyedBatch

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
        assert headers[records.ERROR] == b"Seven"
        assert headers[records.ORIGIN_TOPIC] == source.encode()
        partition = int(headers[records.ORIGIN_PARTITION])
        assert int(headers[records.ORIGIN_OFFSET]) < offsets[partition]


class Checked(Query):
    """A query whose bad records go to the topic ``dead``; its input ends with 7 where it is bad."""

    def __init__(self, spark: SparkSession, broker: str, topic: Callable[..., str], checkpoint: str) -> None:
        super().__init__(spark, broker, topic(2), topic(2), checkpoint)
        self.dead = topic(1)
        self.application = f"app-{self.sink}"
        self.sent = rows(0, 40)
        produce(broker, self.source, self.sent, keys=[f"k{each[-1]}" for each in self.sent])

    @property
    def bad(self) -> list[str]:
        return [each for each in self.sent if each.endswith("7")]

    @property
    def good(self) -> list[str]:
        return [each for each in self.sent if not each.endswith("7")]

    def write(self, frame: DataFrame, **options: str) -> None:
        """Runs the query to its end, then again as if the driver had died before Spark's commit."""
        for _ in range(2):
            writer = frame.writeStream.format("kafka-eos").option("kafka.bootstrap.servers", self.broker)
            writer = writer.options(**{"onInvalidRecord": "dead-letter", "deadLetter.topic": self.dead})
            writer = writer.options(**{"application.id": self.application, "topic": self.sink, **options})
            writer = writer.option("checkpointLocation", self.checkpoint).trigger(availableNow=True)
            assert writer.start().awaitTermination(120)
            self.forget_commit(0)

    def letters(self) -> dict[str, DeadLetter]:
        """Returns what the headers of each letter say, by its value; fails if a letter is there twice."""
        found = read_back(self.broker, self.dead)
        by_value = {(each.value or b"").decode(): DeadLetter.parse(each.headers or ()) for each in found}
        assert len(by_value) == len(found), "a letter is there twice"
        return by_value

    def check_origin_of_letters(self) -> None:
        """Reads the record that each letter names, which must have the letter's value and time."""
        read = {(each.partition, each.offset): each for each in read_back(self.broker, self.source)}
        for value, letter in self.letters().items():
            assert letter.origin_topic == self.source
            assert letter.origin_partition is not None
            assert letter.origin_offset is not None
            record = read[letter.origin_partition, letter.origin_offset]
            assert (record.value, record.timestamp_ms) == (value.encode(), letter.origin_timestamp_ms)


@pytest.fixture
def checked(spark: SparkSession, broker: str, topic: Callable[..., str], checkpoint: str) -> Checked:
    return Checked(spark, broker, topic, checkpoint)


MARK = "STRUCT<error: STRING, topic: STRING, partition: INT, offset: BIGINT, timestamp: TIMESTAMP>"


@pytest.mark.core
def test_a_function_inside_the_read_marks_rows(checked: Checked) -> None:
    def check(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        for batch in batches:
            named = {name: batch[name] for name in ("topic", "partition", "offset", "timestamp")}
            error = pa.repeat(pa.scalar("Seven"), batch.num_rows)
            bad = pc.match_substring_regex(batch["text"], "7$")
            mark = pa.StructArray.from_arrays(
                [error, *named.values()], names=["error", *named], mask=pc.invert(bad)
            )
            yield pa.record_batch({"key": batch["key"], "value": batch["text"], "kafka_eos_invalid": mark})

    source = checked.frame().selectExpr(
        "key", "CAST(value AS STRING) AS text", "topic", "partition", "offset", "timestamp"
    )
    frame = map_in_read(source, check, f"key BINARY, value STRING, kafka_eos_invalid {MARK}")
    assert frame.columns == ["__kafka_eos_rows"]
    plan = frame._jdf.queryExecution().analyzed()
    assert plan.nodeName().startswith("StreamingRelation"), "the function runs inside the read"
    checked.write(frame)
    assert values(read_back(checked.broker, checked.sink)) == checked.good
    assert {value: each.error for value, each in checked.letters().items()} == dict.fromkeys(
        checked.bad, "Seven"
    )
    checked.check_origin_of_letters()


def test_sinks_outside_kafka_get_no_marked_rows_and_their_letters_are_in_kafka(
    checked: Checked, tmp_path: Path
) -> None:
    """A row that only breaks a rule of Kafka's records leaves the other sinks, too."""
    frame = checked.frame().select(
        "key",
        "value",
        f.expr("CASE WHEN value = X'3030303033' THEN -1 END").alias("partition"),
        f.col("value").cast("string").alias("text"),
        invalid_record("CAST(value AS STRING) LIKE '%7'", "ends with 7", error="Seven"),
        record_origin(),
    )
    archive = str(tmp_path / "archive")
    checked.write(
        frame,
        **{
            "sinks": "archive",
            "sink.archive.type": "filesystem",
            "sink.archive.path": archive,
            "sink.archive.columns": "text",
            "sink.archive.format": "json",
        },
    )
    archived = [line for file in committed_files(archive) for line in Path(file).read_text().splitlines()]
    written = [each for each in checked.good if each != "00003"]
    assert sorted(archived) == [f'{{"text":"{each}"}}' for each in written]
    assert values(read_back(checked.broker, checked.sink)) == written
    found = checked.letters()
    assert {value: each.holds for value, each in found.items()} == {
        **dict.fromkeys(checked.bad, records.INPUT),
        "00003": records.OUTPUT,
    }
    checked.check_origin_of_letters()


def count_rows(batch: KeyedBatch) -> tuple[pa.RecordBatch, pa.StructArray]:
    """Counts the rows of each key that do not end with 7; marks the others."""
    rows = batch.rows
    bad = pc.match_substring_regex(rows["text"], "7$")
    key = batch.key_of_row.to_numpy()
    before = batch.state.field("n").fill_null(0).to_numpy()
    good = np.bincount(key[~bad.to_numpy(zero_copy_only=False)], minlength=len(before))
    named = {name: rows[name] for name in ("topic", "partition", "offset", "timestamp")}
    error = pa.repeat(pa.scalar("Seven"), rows.num_rows)
    mark = pa.StructArray.from_arrays([error, *named.values()], names=["error", *named], mask=pc.invert(bad))
    output = pa.record_batch({"key": rows["key"], "value": rows["text"], "kafka_eos_invalid": mark})
    return output, pa.StructArray.from_arrays([pa.array(before + good)], names=["n"])


def test_a_stateful_operator_marks_rows_and_does_not_count_them(checked: Checked, tmp_path: Path) -> None:
    source = checked.frame().selectExpr(
        "key", "CAST(value AS STRING) AS text", "topic", "partition", "offset", "timestamp"
    )
    options = {
        "kafka.bootstrap.servers": checked.broker,
        "application.id": checked.application,
        "state.dir": str(tmp_path / "state"),
    }
    frame = apply(
        source,
        count_rows,
        f"key BINARY, value STRING, kafka_eos_invalid {MARK}",
        "n LONG",
        options=options,
        key="key",
        shards=2,
    )
    checked.write(frame)
    assert values(read_back(checked.broker, checked.sink)) == checked.good
    assert sorted(checked.letters()) == checked.bad
    checked.check_origin_of_letters()


def test_marked_rows_go_around_a_stateful_operator(checked: Checked, tmp_path: Path) -> None:
    marked = checked.frame().select(
        "key",
        f.col("value").cast("string").alias("value"),
        invalid_record("CAST(value AS STRING) LIKE '%7'", "ends with 7", error="Seven"),
    )
    options = {
        "kafka.bootstrap.servers": checked.broker,
        "application.id": checked.application,
        "state.dir": str(tmp_path / "state"),
    }
    counted = apply(
        marked.where("kafka_eos_invalid IS NULL").drop("kafka_eos_invalid"),
        number_rows,
        "key BINARY, value STRING",
        "n LONG",
        options=options,
        key="key",
        shards=2,
    )
    aside = marked.where("kafka_eos_invalid IS NOT NULL")
    checked.write(counted.unionByName(aside, allowMissingColumns=True))
    written = read_back(checked.broker, checked.sink)
    assert sorted((each.key, each.value) for each in written) == sorted(
        (f"k{each[-1]}".encode(), str(1 + int(each) // 10).encode()) for each in checked.good
    )
    assert sorted(checked.letters()) == checked.bad
    checked.check_origin_of_letters()


def number_rows(batch: KeyedBatch) -> tuple[pa.RecordBatch, pa.StructArray]:
    """Numbers the rows of each key from 1 on."""
    before = batch.state.field("n").fill_null(0).to_pylist()
    values = []
    for key in batch.key_of_row.to_pylist():
        before[key] += 1
        values.append(str(before[key]))
    output = pa.record_batch({"key": batch.rows["key"], "value": pa.array(values)})
    return output, pa.StructArray.from_arrays([pa.array(before, pa.int64())], names=["n"])


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
    letters = {dict(each.headers)[records.ERROR]: each for each in read_back(broker, dead)}
    assert letters[b"InvalidRecord"].value == b"bad"
    large = letters[b"RecordTooLarge"]
    assert dict(large.headers)[records.VALUE_BYTES] == b"30000"
    assert large.value == b"x" * len(large.value)
    assert len(letters) == 2
