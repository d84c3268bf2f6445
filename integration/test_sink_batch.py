"""``df.write.format("kafka-eos")`` on a real broker: one write is one transaction, all or nothing."""

from __future__ import annotations

import datetime
import time
import uuid
from collections.abc import Callable
from typing import Any

import pytest
from pyspark.errors import PySparkException
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as sf

from integration.support.kafka import Admin, final_end_offsets, read_back, values
from kafka_eos_source.observe.figures import Outcome
from kafka_eos_source.observe.journal import query_journal
from kafka_eos_source.protocol.identity import group_of

NOON = datetime.datetime(2013, 1, 1, 12, tzinfo=datetime.timezone.utc)


@pytest.fixture
def write(broker: str) -> Callable[..., None]:
    def to(frame: DataFrame, topic: str | None = None, **options: str) -> None:
        named = {name.replace("__", "."): value for name, value in options.items()}
        writer = frame.write.format("kafka-eos").mode("append")
        writer = writer.option("kafka.bootstrap.servers", broker).options(**named)
        (writer if topic is None else writer.option("topic", topic)).save()

    return to


def numbers(spark: SparkSession, rows: int) -> DataFrame:
    return spark.range(0, rows, 1, 2).selectExpr(
        "CAST(id AS STRING) AS key", "format_string('%05d', id) AS value"
    )


def wanted(rows: int) -> list[str]:
    return [f"{row:05d}" for row in range(rows)]


@pytest.mark.core
def test_a_batch_write_writes_each_row_once(spark: SparkSession, broker: str, topic: Any, write: Any) -> None:
    name = topic(3)
    write(numbers(spark, 5000), name)
    assert values(read_back(broker, name)) == wanted(5000)


def test_a_large_batch_write_stages_files(spark: SparkSession, broker: str, topic: Any, write: Any) -> None:
    name = topic(2)
    write(numbers(spark, 20_000), name, staging__inline__bytes="1000")
    assert values(read_back(broker, name)) == wanted(20_000)


def test_every_column_of_a_row_is_written(spark: SparkSession, broker: str, topic: Any, write: Any) -> None:
    name, other = topic(3), topic(1)
    rows = [
        (other, 0, "k", "v", [("h", b"1"), ("h", None)], NOON),
        (other, None, None, None, None, None),
        (name, 2, "", "", [], NOON),
    ]
    frame = spark.createDataFrame(
        rows,
        "topic string, partition int, key string, value string, "
        "headers array<struct<key:string,value:binary>>, timestamp timestamp",
    )
    before = int(time.time() * 1000)
    write(frame, includeTimestamp="true")
    first, tombstone = read_back(broker, other)
    assert (first.key, first.value) == (b"k", b"v")
    assert first.headers == [("h", b"1"), ("h", None)]
    assert first.timestamp_ms == int(NOON.timestamp() * 1000)
    assert (tombstone.key, tombstone.value, tombstone.headers) == (None, None, None)
    assert tombstone.timestamp_ms >= before
    (empty,) = read_back(broker, name)
    assert (empty.partition, empty.key, empty.value) == (2, b"", b"")


def test_the_topic_option_overrides_the_column(
    spark: SparkSession, broker: str, topic: Any, write: Any
) -> None:
    name = topic()
    write(numbers(spark, 3).withColumn("topic", sf.lit(5)), name)
    assert values(read_back(broker, name)) == wanted(3)


def murmur2(key: bytes) -> int:
    """Computes Kafka's murmur2 hash (``org.apache.kafka.common.utils.Utils``) without the product's code."""
    mask, m = 0xFFFFFFFF, 0x5BD1E995
    h = (0x9747B28C ^ len(key)) & mask
    for at in range(0, len(key) - len(key) % 4, 4):
        k = int.from_bytes(key[at : at + 4], "little") * m & mask
        k = (k ^ k >> 24) * m & mask
        h = (h * m & mask) ^ k
    tail = key[len(key) - len(key) % 4 :]
    if tail:
        h = (h ^ int.from_bytes(tail, "little")) * m & mask
    h = (h ^ h >> 13) * m & mask
    return h ^ h >> 15


def test_keys_select_the_same_partitions_as_in_java(
    spark: SparkSession, broker: str, topic: Any, write: Any
) -> None:
    name = topic(4)
    write(numbers(spark, 200), name)
    for record in read_back(broker, name):
        assert record.partition == (murmur2(record.key or b"") & 0x7FFFFFFF) % 4


@pytest.mark.core
def test_a_version_is_written_once(
    spark: SparkSession, broker: str, admin: Admin, topic: Any, write: Any
) -> None:
    name = topic(2)
    for version in ("0", "0", "1", "0", "7", "7"):
        write(numbers(spark, 10), name, txnAppId="job", txnVersion=version)
    assert len(read_back(broker, name)) == 30
    assert group_of(f"kafka-eos-txn-job:{name}") in admin.groups()
    figures = query_journal(f"kafka-eos-txn-job:{name}")
    assert figures is not None
    outcomes = [(each.batch_id, each.outcome) for each in figures.batches]
    written, skipped = Outcome.COMMITTED, Outcome.SKIPPED
    assert outcomes == [(0, written), (0, skipped), (1, written), (0, skipped), (7, written), (7, skipped)]
    newest = figures.batches[-1]
    assert (newest.totals["records"], newest.totals["batches"], newest.runs) == (30, 6, 1)
    assert newest.topic_totals == {name: {"records": 30, "bytes": 30 * (1 + 5)}}


def test_one_txn_app_id_may_write_several_topics(
    spark: SparkSession, broker: str, topic: Any, write: Any
) -> None:
    first, second = topic(), topic()
    for _ in range(2):
        write(numbers(spark, 5), first, txnAppId="fan-out", txnVersion="3")
        write(numbers(spark, 6), second, txnAppId="fan-out", txnVersion="3")
    assert len(read_back(broker, first)) == 5
    assert len(read_back(broker, second)) == 6


@pytest.mark.fault("T66", "two series of batch writes whose names join to the same text", "batch write")
def test_series_whose_names_join_to_the_same_text_stay_separate(
    spark: SparkSession, broker: str, write: Any, admin: Admin
) -> None:
    """Application ``a`` writing ``b-c`` and application ``a-b`` writing ``c`` are different series."""
    own = uuid.uuid4().hex[:8]
    first, second = admin.create(f"eu-{own}"), admin.create(own)
    write(numbers(spark, 10), first, txnAppId=f"orders-{own}", txnVersion="5")
    write(numbers(spark, 10), second, txnAppId=f"orders-{own}-eu", txnVersion="3")
    assert values(read_back(broker, first)) == wanted(10)
    assert values(read_back(broker, second)) == wanted(10)


def test_a_batch_write_without_a_version_leaves_no_group(
    spark: SparkSession, broker: str, admin: Admin, topic: Any, write: Any
) -> None:
    name = topic()
    before = set(admin.groups())
    write(numbers(spark, 5), name)
    write(numbers(spark, 5), name)
    assert len(read_back(broker, name)) == 10
    assert not [
        group for group in set(admin.groups()) - before if group.startswith(group_of("kafka-eos-batch"))
    ]


def test_an_empty_frame_writes_nothing(spark: SparkSession, broker: str, topic: Any, write: Any) -> None:
    name = topic()
    write(numbers(spark, 0), name)
    assert read_back(broker, name, committed=False) == []


def test_an_at_least_once_batch_write_sends_rows_directly(
    spark: SparkSession, broker: str, topic: Any, write: Any
) -> None:
    name = topic(2)
    write(numbers(spark, 1000), name, processing__guarantee="at_least_once")
    assert values(read_back(broker, name, committed=False)) == wanted(1000)


# -- bad input fails early with an error that names the cause, and nothing becomes visible


def refused(write: Any, frame: DataFrame, topic: str | None, message: str, **options: str) -> None:
    with pytest.raises(PySparkException) as caught:
        write(frame, topic, **options)
    assert message in str(caught.value)


@pytest.mark.parametrize(
    ("column", "expression", "message"),
    [
        ("partition", "IF(id = 7, 99, NULL)", "has the value 99"),
        ("partition", "IF(id = 7, -1, NULL)", "'partition' is negative"),
        ("headers", "array(struct(CAST(NULL AS STRING) AS key, CAST('x' AS BINARY) AS value))", "null key"),
        ("value", "IF(id = 7, repeat('x', 2000000), 'y')", "MESSAGE_TOO_LARGE"),
    ],
)
def test_an_invalid_row_fails_the_write_and_nothing_is_visible(
    spark: SparkSession, broker: str, topic: Any, write: Any, column: str, expression: str, message: str
) -> None:
    name = topic(2)
    frame = spark.range(10).selectExpr("CAST(id AS STRING) AS value", f"{expression} AS {column}")
    if column == "value":
        frame = spark.range(10).selectExpr(f"{expression} AS value")
    refused(write, frame, name, message)
    assert read_back(broker, name) == []


def test_a_null_topic_fails_the_write_and_nothing_is_visible(
    spark: SparkSession, broker: str, topic: Any, write: Any
) -> None:
    name = topic()
    frame = spark.range(10).selectExpr("CAST(id AS STRING) AS value", f"IF(id = 7, NULL, '{name}') AS topic")
    refused(write, frame, None, "column 'topic' is null")
    assert read_back(broker, name, committed=False) == []


def test_a_record_larger_than_the_topic_allows_fails_the_write(
    spark: SparkSession, broker: str, topic: Any, write: Any
) -> None:
    name = topic(1, max_message_bytes="1000")
    frame = spark.range(10).selectExpr("repeat(CAST(id AS STRING), 2000) AS value")
    refused(write, frame, name, "KAFKA_EOS.INVALID_RECORD")
    assert read_back(broker, name) == []


@pytest.mark.parametrize(
    ("columns", "message"),
    [
        (["id AS value"], "'value' has type bigint; expected string or binary"),
        (["CAST(id AS STRING) AS VALUE"], "the frame has no column 'value'"),
        (["'a' AS value", "id AS partition"], "'partition' has type bigint; expected int"),
        (["'a' AS value", "map('a', 'b') AS headers"], "'headers' has type map<string,string>"),
        (["'a' AS value", "id AS key"], "'key' has type bigint"),
    ],
)
def test_a_frame_with_wrong_columns_is_refused(
    spark: SparkSession, topic: Any, write: Any, columns: list[str], message: str
) -> None:
    refused(write, spark.range(3).selectExpr(*columns), topic(), message)


def test_invalid_options_and_missing_topics_are_refused(
    spark: SparkSession, broker: str, topic: Any, write: Any
) -> None:
    frame = numbers(spark, 3)
    refused(write, frame, "not-there", "looking up output topic 'not-there'")
    refused(write, frame, topic(), "Did you mean 'topic'", topc="x")
    refused(write, frame, None, "the option 'topic' is not set, and the frame has no column 'topic'")
    refused(write, frame, topic(), "set the option application.id", kafka__transactional__id="x")
    with pytest.raises(PySparkException, match="'overwrite' is not supported"):
        (
            frame.write.format("kafka-eos")
            .mode("overwrite")
            .option("kafka.bootstrap.servers", broker)
            .option("topic", topic())
            .save()
        )


def test_a_write_to_unreachable_brokers_is_an_error(spark: SparkSession) -> None:
    started = time.monotonic()
    with pytest.raises(PySparkException, match=r"no answer from Kafka at kafka\.bootstrap\.servers='127"):
        (
            numbers(spark, 3)
            .write.format("kafka-eos")
            .mode("append")
            .option("kafka.bootstrap.servers", "127.0.0.1:1")
            .option("topic", "t")
            .option("commitTimeoutMs", "2000")
            .option("kafka.sasl.password", "hunter2")
            .save()
        )
    assert time.monotonic() - started < 60, "an error, not a hang"


def test_a_write_adds_its_rows_and_one_control_record_per_partition(
    spark: SparkSession, broker: str, topic: Any, write: Any
) -> None:
    name = topic(1)
    write(numbers(spark, 10), name)
    assert final_end_offsets(broker, name) == {0: 11}, "one transaction: one control record"
