"""``spark.read`` on a real broker: columns, bounds, limits, isolation, push-down, bad input."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import pyspark
import pytest
from pyspark.sql import Row, SparkSession
from pyspark.sql import functions as f

from integration.support.kafka import Admin, read_back
from integration.support.reading import FORMAT, Reader, Topics, texts, values
from kafka_eos_source import map_in_read
from kafka_eos_source.spark.schema import read_schema

SINCE_4_1 = pytest.mark.skipif(pyspark.__version__ < "4.1", reason="filter push-down came with PySpark 4.1")


@pytest.fixture
def topics(broker: str, admin: Admin) -> Topics:
    return Topics(broker, admin)


@pytest.fixture
def reader(spark: SparkSession, broker: str, tmp_path: Path) -> Reader:
    return Reader(spark, broker, tmp_path)


@pytest.mark.core
def test_a_batch_read_has_sparks_columns_and_types(reader: Reader, topics: Topics) -> None:
    topic = topics.new()
    before = time.time()
    topics.send(topic, [None])
    topics.send(topic, ["v"], keys=[b"k"], headers=[("a", b"1"), ("a", None)], timestamp_ms=1_700_000_000_123)
    topics.send(topic, [b""], keys=[b""])
    frame = reader.batch(subscribe=topic, includeHeaders="true")
    assert frame.schema == read_schema(include_headers=True)
    none, full, empty = frame.orderBy("offset").collect()
    assert (none.key, none.value, none.offset, none.partition, none.topic) == (None, None, 0, 0, topic)
    assert (none.timestampType, none.headers) == (0, None)
    assert (bytes(full.key), bytes(full.value), full.offset) == (b"k", b"v", 1)
    assert [(h.key, h.value and bytes(h.value)) for h in full.headers] == [("a", b"1"), ("a", None)]
    assert (bytes(empty.key), bytes(empty.value)) == (b"", b"")
    exact = frame.where("offset = 1").select(f.unix_millis("timestamp")).head()
    assert exact is not None
    assert exact[0] == 1_700_000_000_123
    recent = frame.where("offset = 0").select(f.unix_millis("timestamp")).head()
    assert recent is not None
    assert before * 1000 - 1000 <= recent[0] <= time.time() * 1000 + 1000
    assert "headers" not in reader.batch(subscribe=topic).columns


@pytest.mark.core
def test_a_batch_read_returns_all_records_by_default(reader: Reader, topics: Topics) -> None:
    topic = topics.new(3)
    for partition in range(3):
        topics.send(topic, range(partition * 10, partition * 10 + 7), partition=partition)
    frame = reader.batch(subscribe=topic)
    assert values(frame) == [*texts(range(7)), *texts(range(10, 17)), *texts(range(20, 27))]
    assert frame.union(frame).count() == 42
    assert frame.count() == 21


def test_an_empty_topic_returns_no_rows(reader: Reader, topics: Topics) -> None:
    assert reader.batch(subscribe=topics.new(2)).collect() == []
    assert reader.batch(subscribePattern=f"^{topics.new()}$").count() == 0


def test_starting_and_ending_offsets_limit_the_read(reader: Reader, topics: Topics) -> None:
    topic = topics.new(2)
    topics.send(topic, range(10))
    topics.send(topic, range(100, 105), partition=1)
    both = {
        "startingOffsets": json.dumps({topic: {"0": 4, "1": -2}}),
        "endingOffsets": json.dumps({topic: {"0": 6, "1": -1}}),
    }
    assert values(reader.batch(subscribe=topic, **both)) == ["4", "5", *texts(range(100, 105))]
    assigned = reader.batch(assign=json.dumps({topic: [1]}), endingOffsets=json.dumps({topic: {"1": 2}}))
    assert values(assigned) == ["100", "101"]
    equal = {"startingOffsets": json.dumps({topic: {"0": 3, "1": 0}})}
    nothing = reader.batch(subscribe=topic, **equal, endingOffsets=json.dumps({topic: {"0": 3, "1": 0}}))
    assert values(nothing) == []


def test_timestamps_limit_the_read(reader: Reader, topics: Topics) -> None:
    topic = topics.new(2)
    for number in range(6):
        topics.send(topic, [number], timestamp_ms=1_700_000_000_000 + number * 1000)
    topics.send(topic, ["b"], partition=1, timestamp_ms=1_700_000_002_500)
    at = "1700000002000"
    assert values(reader.batch(subscribe=topic, startingTimestamp=at)) == ["2", "3", "4", "5", "b"]
    assert values(reader.batch(subscribe=topic, endingTimestamp=at)) == ["0", "1"]
    by_partition = {
        "startingOffsetsByTimestamp": json.dumps({topic: {"0": 1_700_000_004_000, "1": 1_700_000_002_500}}),
        "endingOffsetsByTimestamp": json.dumps({topic: {"0": 1_700_000_005_000, "1": 1_900_000_000_000}}),
    }
    assert values(reader.batch(subscribe=topic, **by_partition)) == ["4", "b"]
    late = {"subscribe": topic, "startingTimestamp": "1700000003000"}
    assert values(reader.batch(**late, startingOffsetsByTimestampStrategy="latest")) == ["3", "4", "5"]
    with pytest.raises(Exception, match=r"-1 at time 1700000003000 .* no record at or after"):
        reader.batch(**late).collect()


def test_min_partitions_splits_the_read_into_tasks(reader: Reader, topics: Topics) -> None:
    topic = topics.new(2)
    topics.send(topic, range(10))
    topics.send(topic, range(10, 13), partition=1)

    def tasks(**options: Any) -> int:
        frame = reader.batch(subscribe=topic, **options)
        assert values(frame) == texts(range(13))
        return frame.rdd.getNumPartitions()

    assert tasks() == 1, "a small read needs one task"
    assert tasks(minPartitions="6") == 6
    assert tasks(maxRecordsPerPartition="5") == 3


@pytest.mark.core
def test_the_isolation_level_decides_which_records_are_read(reader: Reader, topics: Topics) -> None:
    """read_committed skips aborted records and everything after the start of an open transaction.

    No isolation level delivers control records.
    """
    topic = topics.new()
    topics.send(topic, range(3))
    topics.aborted(topic, ["aborted", "aborted"])
    topics.committed(topic, ["committed"])
    with topics.open_transaction(topic, ["open"]):
        topics.send(topic, ["behind"])
        assert values(reader.batch(subscribe=topic)) == ["0", "1", "2", "committed"]
        uncommitted = reader.batch(subscribe=topic, **{"kafka.isolation.level": "read_uncommitted"})
        everything = ["0", "1", "2", "aborted", "aborted", "committed", "open", "behind"]
        assert values(uncommitted) == everything
    assert values(reader.batch(subscribe=topic)) == ["0", "1", "2", "committed", "behind"]


def test_a_range_that_starts_or_ends_at_a_control_record_ends_at_once(reader: Reader, topics: Topics) -> None:
    topic = topics.new()
    topics.aborted(topic, range(3))  # offsets 0-2, control record 3
    begun = time.monotonic()
    assert reader.batch(subscribe=topic).collect() == []
    topics.committed(topic, ["a", "b"])  # 4-5, control record 6
    topics.committed(topic, ["c"])  # 7, control record 8
    cases = [(3, 4, []), (1, 3, []), (3, 5, ["a"]), (5, 7, ["b"]), (6, 7, []), (6, 8, ["c"]), (8, 9, [])]
    for start, end, expected in cases:
        bounds = {
            "startingOffsets": json.dumps({topic: {"0": start}}),
            "endingOffsets": json.dumps({topic: {"0": end}}),
        }
        assert values(reader.batch(subscribe=topic, **bounds)) == expected, (start, end)
    assert time.monotonic() - begun < 120, "no read waited for kafkaConsumer.pollTimeoutMs"


def test_a_compacted_log_is_read_to_its_end(reader: Reader, topics: Topics) -> None:
    topic = topics.new(
        cleanup_policy="compact",
        segment_ms="100",
        min_cleanable_dirty_ratio="0.001",
        max_compaction_lag_ms="100",
        min_compaction_lag_ms="0",
    )
    topics.send(topic, range(40), keys=[str(number % 4) for number in range(40)])

    def survivors() -> list[str | None]:
        time.sleep(0.2)  # a segment rolls by time, but only on a write
        topics.send(topic, ["end"], keys=["end"])
        return [
            each
            for each in values(reader.batch(subscribe=topic, maxRecordsPerPartition="6"))
            if each != "end"
        ]

    found = survivors()
    deadline = time.monotonic() + 120
    while len(found) == 40 and time.monotonic() < deadline:
        found = survivors()
    assert len(found) < 40, "the log was not compacted"
    assert found[-4:] == texts(range(36, 40))
    assert len(set(found)) == len(found)


# -- data loss


def test_expired_records_fail_the_read_or_are_skipped(reader: Reader, topics: Topics) -> None:
    topic = topics.new()
    topics.send(topic, range(10))
    topics.admin.delete_records(topic, 0, 4)
    lost = {"subscribe": topic, "startingOffsets": json.dumps({topic: {"0": 0}})}
    with pytest.raises(Exception, match=r"DATA_LOSS.*offsets 0 to 3 of .* cannot be read"):
        reader.batch(**lost).collect()
    assert values(reader.batch(**lost, failOnDataLoss="false")) == texts(range(4, 10))
    assert values(reader.batch(subscribe=topic)) == texts(range(4, 10))


def test_an_ending_offset_after_the_log_fails_the_read_or_is_cut(reader: Reader, topics: Topics) -> None:
    topic = topics.new()
    topics.send(topic, range(10))
    beyond = {"subscribe": topic, "endingOffsets": json.dumps({topic: {"0": 50}})}
    with pytest.raises(Exception, match=r"DATA_LOSS.*offsets 10 to 49 .*the log now ends at offset 10"):
        reader.batch(**beyond).collect()
    assert values(reader.batch(**beyond, failOnDataLoss="false")) == texts(range(10))


# -- push-down


@SINCE_4_1
def test_filters_are_pushed_down(reader: Reader, topics: Topics, spark: SparkSession) -> None:
    topic = topics.new(3)
    for partition in range(3):
        for number in range(4):
            at_ms = 1_700_000_000_000 + number * 1000
            topics.send(topic, [partition * 10 + number], partition=partition, timestamp_ms=at_ms)
    conditions = [
        "partition = 1",
        "partition IN (0, 2)",
        "offset >= 2 AND offset < 3",
        "offset = 1 AND partition > 0",
        "timestamp >= timestamp_millis(1700000002000)",
        "timestamp > timestamp_millis(1700000002000) AND partition <= 1",
        "timestamp = timestamp_millis(1700000001000)",
        "timestamp < timestamp_millis(1700000001000)",
        f"topic = '{topic}' AND offset <= 1",
        "topic = 'other'",
        "partition = 1 OR offset = 3",
        "offset > 99",
    ]
    expected = [values(reader.batch(subscribe=topic).where(condition)) for condition in conditions]
    assert expected[0] == ["10", "11", "12", "13"]
    spark.conf.set("spark.sql.python.filterPushdown.enabled", "true")
    try:
        pushing = {"subscribe": topic, "pushFilters": "true", "maxRecordsPerPartition": "1"}
        for condition, wanted in zip(conditions, expected, strict=True):
            assert values(reader.batch(**pushing).where(condition)) == wanted, condition
        tasks = [
            reader.batch(**pushing).where(condition).rdd.getNumPartitions() for condition in conditions[:5]
        ]
    finally:
        spark.conf.unset("spark.sql.python.filterPushdown.enabled")
    assert tasks == [4, 8, 3, 2, 6], "offsets that a filter excludes are not fetched"


@SINCE_4_1
def test_reads_work_while_sparks_push_down_is_off(reader: Reader, topics: Topics) -> None:
    topic = topics.new()
    topics.send(topic, range(3))
    assert values(reader.batch(subscribe=topic).where("offset = 1")) == ["1"]


# -- bad input


@pytest.mark.core
@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"startingOffset": "earliest"}, "unknown option 'startingoffset'.*'startingOffsets'"),
        ({"subscribePattern": "x"}, "expected exactly one of subscribe, subscribePattern, assign"),
        ({"startingOffsets": "{"}, "startingOffsets"),
        ({"startingOffsets": "latest"}, "startingOffsets"),
        ({"minPartitions": "-1"}, "minPartitions"),
        ({"failOnDataLoss": "maybe"}, "failOnDataLoss"),
        ({"kafka.ssl.truststore.location": "/x.jks"}, r"kafka\.ssl\.ca\.location"),
        ({"kafka.group.instance": "x"}, "neither librdkafka nor Java.s clients have such a property"),
    ],
)
def test_an_invalid_option_is_named(
    reader: Reader, topic: Callable[..., str], options: dict[str, str], message: str
) -> None:
    with pytest.raises(Exception, match=f"INVALID_OPTION.*{message}"):
        reader.batch(subscribe=topic(), **options).collect()


def test_a_missing_subscription_or_missing_brokers_are_errors(spark: SparkSession) -> None:
    with pytest.raises(Exception, match="no topic to read: expected exactly one of the options subscribe"):
        spark.read.format(FORMAT).option("kafka.bootstrap.servers", "h:1").load()
    with pytest.raises(Exception, match=r"'kafka\.bootstrap\.servers' is missing"):
        spark.read.format(FORMAT).option("subscribe", "t").load()


def test_a_missing_topic_is_named(reader: Reader) -> None:
    with pytest.raises(Exception, match=r"UNAVAILABLE.*no-such-topic.*create the topic"):
        reader.batch(subscribe="no-such-topic", **{"fetchOffset.numRetries": "1"}).collect()


def test_starting_offsets_must_name_all_partitions(reader: Reader, topics: Topics) -> None:
    topic = topics.new(2)
    with pytest.raises(Exception, match=f"missing: {topic}-1; unknown: {topic}-7"):
        reader.batch(subscribe=topic, startingOffsets=json.dumps({topic: {"0": 0, "7": 0}})).collect()


@pytest.mark.core
def test_unreachable_brokers_are_an_error_within_the_timeout(spark: SparkSession) -> None:
    options = {"kafka.bootstrap.servers": "127.0.0.1:9", "subscribe": "t", "fetchOffset.numRetries": "0"}
    begun = time.monotonic()
    with pytest.raises(Exception, match=r"UNAVAILABLE.*no answer from Kafka at .*127\.0\.0\.1:9"):
        spark.read.format(FORMAT).options(**options).load().collect()
    assert time.monotonic() - begun < 60


def test_a_user_defined_schema_is_refused(reader: Reader, spark: SparkSession, broker: str) -> None:
    frame = spark.read.format(FORMAT).schema("value string").option("kafka.bootstrap.servers", broker)
    with pytest.raises(Exception, match="this source always has the schema"):
        frame.option("subscribe", "t").load().collect()


@pytest.mark.fault(
    "T374", "records have a timestamp that Spark cannot hold", "batch, stream, step in the read"
)
def test_t374_a_timestamp_beyond_sparks_range_is_null_and_stops_no_query(
    reader: Reader, topics: Topics, broker: str, tmp_path: Path
) -> None:
    topic, sink = topics.new(message_timestamp_after_max_ms="9223372036854775807"), topics.new()
    times = [1_700_000_000_123, 1712345678123456789, 4611686018427387904, 1_700_000_000_124]
    topics.send(topic, "abcd", timestamps_ms=times)
    wanted = [("a", False), ("b", True), ("c", True), ("d", False)]

    def found(rows: list[Row]) -> list[tuple[str, bool]]:
        return [(bytes(row["value"]).decode(), row["timestamp"] is None) for row in rows]

    assert found(reader.batch(subscribe=topic).orderBy("offset").collect()) == wanted
    assert reader.batch(subscribe=topic).where("timestamp < now()").count() == 2
    (rows,) = reader.run(subscribe=topic, startingOffsets="earliest")
    assert found(rows) == wanted

    def letters(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        for each in batches:
            nulls = pc.cast(pc.is_null(each["timestamp"]), pa.string())
            yield pa.record_batch({"key": each["value"], "value": nulls})

    read = reader.stream(subscribe=topic, startingOffsets="earliest")
    writer = map_in_read(read, letters, "key BINARY, value STRING").writeStream.format("kafka-eos")
    writer = writer.options(**{"kafka.bootstrap.servers": broker, "topic": sink})
    query = writer.option("checkpointLocation", str(tmp_path / "mapped")).trigger(availableNow=True).start()
    assert query.awaitTermination(120), "the query did not end"
    sent = [(each.key or b"", each.value) for each in read_back(broker, sink)]
    assert [(key.decode(), value == b"true") for key, value in sent] == wanted
