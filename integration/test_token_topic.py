"""The token topic keeps the newest committed token of each query, and restores it after the group is lost."""

from __future__ import annotations

import json
import threading
import uuid
from collections.abc import Callable
from typing import Any

import pytest
from click.testing import CliRunner, Result
from confluent_kafka import Producer
from pyspark.errors import PySparkException
from pyspark.sql import SparkSession

from integration.support.kafka import (
    Admin,
    await_stable,
    end_offsets,
    final_end_offsets,
    produce,
    read_back,
    transaction,
    values,
)
from integration.support.query import Query
from integration.support.sink_stream import rows
from kafka_eos_source.cli import main
from kafka_eos_source.errors import InvalidOptionError, OperatorError, UnavailableError
from kafka_eos_source.kafka import token_topic
from kafka_eos_source.kafka.config import producer_config
from kafka_eos_source.kafka.producer import TransactionalProducer
from kafka_eos_source.kafka.token_topic import TokenTopic, last
from kafka_eos_source.model import TopicPartition
from kafka_eos_source.protocol.token import Token, TokenRecord, record_batch, tombstone_batch
from kafka_eos_source.runtime.deadline import Deadline

IN, OUT = TopicPartition("in", 0), TopicPartition("out", 0)


def in_seconds(seconds: float = 60.0) -> Deadline:
    return Deadline.after_seconds(seconds)


def record(
    topic: TokenTopic, application_id: str, sequence: int, partition: int | None = None
) -> TokenRecord:
    token = Token(application_id, "query-1", "run", sequence, sequence, "aa", "bb", 10)
    own = topic.partition_of(application_id) if partition is None else partition
    return TokenRecord(token, {IN: 10 * sequence, OUT: sequence}, OUT, application_id, topic.topic_id, own, 0)


class Tokens:
    """A token topic, and queries that write to it."""

    def __init__(self, broker: str, partitions: int = 1) -> None:
        self.kafka = {"bootstrap.servers": broker}
        self.topic, made = token_topic.create(
            self.kafka, f"tokens-{uuid.uuid4().hex[:8]}", in_seconds(), partitions=partitions
        )
        assert made

    def write(self, *records: TokenRecord) -> None:
        """Writes records, each in a separate transaction, as a commit does."""
        for each in records:
            producer = TransactionalProducer(producer_config(self.kafka, each.token.application_id))
            try:
                producer.init(in_seconds())
                producer.check_partitions({self.topic.name: each.partition}, in_seconds())
                producer.begin()
                producer.send(record_batch(each), self.topic.name, in_seconds())
                producer.flush(in_seconds())
                assert producer.enqueued == 1
                producer.commit(in_seconds())
            finally:
                producer.close()

    def open_transaction(self, each: TokenRecord) -> Producer:
        """Leaves a query's transaction open after it has sent its record."""
        producer = transaction(self.kafka["bootstrap.servers"], each.token.application_id)
        producer.produce(self.topic.name, each.encode(), each.key, partition=each.partition)
        assert producer.flush(60) == 0
        return producer

    def last(self, application_id: str, seconds: float = 60.0, *, certain: bool = True) -> TokenRecord | None:
        return last(self.kafka, self.topic, application_id, in_seconds(seconds), certain=certain)


@pytest.fixture
def tokens(broker: str) -> Tokens:
    return Tokens(broker)


@pytest.fixture
def name() -> str:
    return f"app-{uuid.uuid4().hex[:8]}"


@pytest.mark.core
def test_the_newest_committed_record_is_found(tokens: Tokens, name: str) -> None:
    assert tokens.last(name) is None
    tokens.write(*(record(tokens.topic, name, sequence) for sequence in range(3)))
    tokens.write(record(tokens.topic, "another", 9))
    assert tokens.last(name) == tokens.last(name, certain=False) == record(tokens.topic, name, 2)
    aborted = tokens.open_transaction(record(tokens.topic, name, 3))
    aborted.abort_transaction(60)
    assert tokens.last(name) == record(tokens.topic, name, 2)


def test_a_tombstone_removes_the_record(tokens: Tokens, name: str) -> None:
    tokens.write(record(tokens.topic, name, 1))
    assert tombstone_batch(name.encode(), 0).num_rows == 1
    produce(tokens.kafka["bootstrap.servers"], tokens.topic.name, [None], keys=[name], partition=0)
    assert tokens.last(name) is None
    tokens.write(record(tokens.topic, name, 2))
    assert tokens.last(name) == record(tokens.topic, name, 2)


def test_a_read_waits_for_the_open_transaction_of_another_query(tokens: Tokens, name: str) -> None:
    tokens.write(record(tokens.topic, name, 1))
    await_stable(tokens.kafka["bootstrap.servers"], tokens.topic.name)
    other = tokens.open_transaction(record(tokens.topic, f"{name}-other", 5))
    tokens.write(record(tokens.topic, name, 2))
    assert tokens.last(name, certain=False) == record(tokens.topic, name, 1), (
        "without certainty it does not wait"
    )
    found: list[TokenRecord | None] = []
    reader = threading.Thread(target=lambda: found.append(tokens.last(name)))
    reader.start()
    other.commit_transaction(60)
    reader.join(60)
    assert found == [record(tokens.topic, name, 2)]


def test_the_timeout_names_the_application_whose_transaction_is_open(tokens: Tokens, name: str) -> None:
    other = tokens.open_transaction(record(tokens.topic, f"{name}-other", 5))
    tokens.write(record(tokens.topic, name, 2))
    with pytest.raises(UnavailableError, match="waited 6 s") as caught:
        tokens.last(name, 6.0)  # the time includes the answers of the brokers, also of slow ones
    owner = f"transaction of application.id='{name}-other' holds partition {tokens.topic.name}-0"
    assert owner in caught.value.message
    assert f"kafka-eos fence {name}-other --yes" in caught.value.fix
    other.abort_transaction(60)
    assert tokens.last(name) == record(tokens.topic, name, 2)


def test_an_added_partition_does_not_hide_an_older_record(tokens: Tokens, admin: Admin, name: str) -> None:
    tokens.write(record(tokens.topic, name, 1, partition=0))
    admin.grow(tokens.topic.name, 3)
    tokens.topic = token_topic.check(tokens.kafka, tokens.topic.name, in_seconds())
    assert tokens.topic.partitions == 3
    assert tokens.last(name) == record(tokens.topic, name, 1, partition=0)
    for sequence, partition in ((2, 1), (3, 2)):
        tokens.write(record(tokens.topic, name, sequence, partition))
        assert tokens.last(name) == record(tokens.topic, name, sequence, partition)


def test_the_key_selects_the_same_partition_as_in_other_producers(broker: str) -> None:
    tokens = Tokens(broker, partitions=7)
    names = [f"app-{number}" for number in range(40)]
    config = {"partitioner": "murmur2_random"}
    produce(broker, tokens.topic.name, ["x"] * len(names), keys=names, config=config)
    placed = {each.key: each.partition for each in read_back(broker, tokens.topic.name)}
    assert placed == {each.encode(): tokens.topic.partition_of(each) for each in names}


def test_records_of_other_programs_are_skipped(tokens: Tokens, broker: str, name: str) -> None:
    produce(broker, tokens.topic.name, ["no record"], keys=["foreign"])
    tokens.write(record(tokens.topic, name, 1))
    assert tokens.last(name) == record(tokens.topic, name, 1)
    with pytest.raises(OperatorError, match="damaged"):
        tokens.last("foreign")


@pytest.mark.parametrize("policy", ["delete", "compact,delete"])
def test_a_topic_that_would_lose_tokens_is_refused(
    broker: str, topic: Callable[..., str], policy: str
) -> None:
    other = topic(1, cleanup_policy=policy)
    kafka = {"bootstrap.servers": broker}
    with pytest.raises(InvalidOptionError, match=f"{other}.*cleanup.policy='{policy}'; expected 'compact'"):
        token_topic.check(kafka, other, in_seconds())
    with pytest.raises(InvalidOptionError, match="expected 'compact'"):
        token_topic.create(kafka, other, in_seconds())


def test_a_topic_with_large_segments_is_accepted_with_a_warning(
    broker: str, topic: Callable[..., str]
) -> None:
    found = token_topic.check({"bootstrap.servers": broker}, topic(1, cleanup_policy="compact"), in_seconds())
    assert "segment.bytes=1,073,741,824" in found.warnings[0]


def run(*arguments: str) -> Result:
    result = CliRunner().invoke(main, ["token-topic", *arguments])
    assert result.exception is None or isinstance(result.exception, SystemExit), result.exception
    return result


def test_the_commands_create_show_and_forget_records(broker: str, admin: Admin, name: str) -> None:
    topic = f"tokens-{uuid.uuid4().hex[:8]}"
    which = (topic, "--bootstrap-servers", broker)
    assert "does not exist" in run("describe", *which).output
    created = run("create", *which, "--partitions", "2", "--min-insync-replicas", "1")
    assert (created.exit_code, "Created topic" in created.output) == (0, True)
    assert "was not changed" in run("create", *which).output
    assert "holds no record" in run("show", *which).output

    tokens = Tokens(broker)
    tokens.topic = token_topic.check(tokens.kafka, topic, in_seconds())
    tokens.write(record(tokens.topic, name, 3), record(tokens.topic, name, 4), record(tokens.topic, "b", 1))
    await_stable(broker, topic)
    described = run("describe", *which).output
    for text in (tokens.topic.topic_id, "cleanup.policy", "compact", "segment.bytes", "1048576", "3, "):
        assert text in described
    shown = run("show", *which).output
    assert name in shown
    assert "1970-01-01 00:00:00 UTC" in shown
    found: list[dict[str, Any]] = json.loads(run("show", *which, name, "--json").output)
    assert [(each["application_id"], each["token"]["seq"]) for each in found] == [(name, 4)]
    assert found[0]["offsets"] == {"in-0": 40, "out-0": 4}

    assert "With --yes: the command deletes this record" in run("forget", *which, name).output
    assert tokens.last(name) is not None
    assert "Deleted." in run("forget", *which, name, "--yes").output
    assert tokens.last(name) is None
    assert tokens.last("b") is not None
    assert "holds no record" in run("forget", *which, name, "--yes").output


# -- queries whose consumer group is lost


@pytest.fixture
def query(spark: SparkSession, broker: str, topic: Callable[..., str], checkpoint: str) -> Query:
    return Query(spark, broker, topic(2), topic(2), checkpoint)


def restart(query: Query, **options: str) -> None:
    """Runs the query as a new driver would, without anything cached from earlier commits.

    Spark reuses the sink's Python process, which keeps a producer for each set of ``kafka.*`` options.
    """
    query.run(kafka__client__id=uuid.uuid4().hex, **options)


def record_in_topic(tokens: Tokens, query: Query) -> TokenRecord:
    found = tokens.last(query.application_id)
    assert found is not None
    return found


def assert_group_is_whole(admin: Admin, broker: str, query: Query, record: TokenRecord) -> None:
    """Checks that the group's offsets are the source's ends, and its token is that of the record."""
    group = admin.group(query.group)
    ends = {number: group[query.source, number][0] for number in (0, 1)}
    assert ends == end_offsets(broker, query.source)
    assert Token.decode(group[query.sink, 0][1]) == record.token


@pytest.mark.fault("T41b", "the group is deleted, and there is a token.topic", "restart with a replay")
@pytest.mark.parametrize("batches", [1, 3])
def test_a_query_continues_after_its_group_was_deleted(
    query: Query, tokens: Tokens, broker: str, admin: Admin, batches: int
) -> None:
    for first in range(0, 20 * batches, 20):
        produce(broker, query.source, rows(first, first + 20))
        query.run(token__topic=tokens.topic.name)
    assert_group_is_whole(admin, broker, query, record_in_topic(tokens, query))
    written = final_end_offsets(broker, query.sink)
    query.forget_commit(batches - 1)
    admin.delete_group(query.group)
    restart(query, token__topic=tokens.topic.name)
    assert end_offsets(broker, query.sink) == written, "the replay was skipped"

    assert query.group not in admin.groups(), "a skipped batch commits nothing"
    produce(broker, query.source, rows(20 * batches, 20 * batches + 20))
    restart(query, token__topic=tokens.topic.name)
    assert values(read_back(broker, query.sink)) == rows(0, 20 * batches + 20)
    record = record_in_topic(tokens, query)
    assert record.token.sequence == batches + 1
    assert_group_is_whole(admin, broker, query, record)


@pytest.mark.fault("T41c", "the group is deleted, and there is a token.topic", "restart with new input")
def test_a_planned_batch_is_written_once_after_the_group_was_deleted(
    query: Query, tokens: Tokens, broker: str, admin: Admin
) -> None:
    produce(broker, query.source, rows(0, 20))
    query.run(token__topic=tokens.topic.name)
    admin.delete_group(query.group)
    produce(broker, query.source, rows(20, 40))
    restart(query, token__topic=tokens.topic.name)
    assert values(read_back(broker, query.sink)) == rows(0, 40)
    assert_group_is_whole(admin, broker, query, record_in_topic(tokens, query))


def test_the_token_topic_may_be_set_later_and_removed_again(
    query: Query, tokens: Tokens, broker: str, admin: Admin
) -> None:
    for first, options in ((0, {}), (20, {"token__topic": tokens.topic.name}), (40, {})):
        produce(broker, query.source, rows(first, first + 20))
        query.run(**options)
    assert values(read_back(broker, query.sink)) == rows(0, 60)
    assert record_in_topic(tokens, query).token.batch_id == 1
    query.forget_commit(2)
    admin.delete_group(query.group)
    with pytest.raises(
        PySparkException, match=r"TOKEN_MISSING.*batch 1.*committed batches without a record since"
    ):
        restart(query, token__topic=tokens.topic.name)
    assert values(read_back(broker, query.sink)) == rows(0, 60)


def test_the_error_without_a_record_names_group_and_token_topic(
    query: Query, tokens: Tokens, broker: str, admin: Admin
) -> None:
    produce(broker, query.source, rows(0, 20))
    query.run()
    query.forget_commit(0)
    admin.delete_group(query.group)
    wanted = rf"TOKEN_MISSING.*in the consumer group or in token\.topic='{tokens.topic.name}'"
    with pytest.raises(PySparkException, match=wanted):
        restart(query, token__topic=tokens.topic.name)
    assert values(read_back(broker, query.sink)) == rows(0, 20)


@pytest.mark.fault("T41d", "the group is deleted, and there is a token.topic", "replay of a versioned write")
def test_a_version_is_written_once_although_its_group_was_deleted(
    spark: SparkSession, broker: str, admin: Admin, tokens: Tokens, topic: Callable[..., str]
) -> None:
    name, app = topic(), f"job-{uuid.uuid4().hex[:8]}"
    frame = spark.range(10).selectExpr("CAST(id AS STRING) AS value")

    def write(version: int) -> None:
        writer = frame.write.format("kafka-eos").mode("append").option("kafka.bootstrap.servers", broker)
        writer = writer.option("topic", name).option("txnAppId", app).option("txnVersion", version)
        writer.option("token.topic", tokens.topic.name).save()

    for version in (0, 1):
        write(version)
        (group,) = [each for each in admin.groups() if app in each]
        admin.delete_group(group)
        for replayed in range(version + 1):
            write(replayed)
    assert len(read_back(broker, name)) == 20


def test_the_restore_command_restores_a_lost_group(
    query: Query, tokens: Tokens, broker: str, admin: Admin
) -> None:
    produce(broker, query.source, rows(0, 20))
    query.run(token__topic=tokens.topic.name)
    before = admin.group(query.group)
    which = (
        tokens.topic.name,
        query.application_id,
        "--bootstrap-servers",
        broker,
    )
    assert "add --checkpoint" in run("restore", *which, "--yes").output
    which += ("--checkpoint", query.checkpoint)
    assert "has lost nothing" in run("restore", *which, "--yes").output
    admin.delete_group(query.group)
    assert "With --yes" in run("restore", *which).output
    assert query.group not in admin.groups()
    assert "at batch 0" in run("restore", *which, "--yes").output
    restored = admin.group(query.group)
    assert {tp: offset for tp, (offset, _) in restored.items()} == {
        tp: offset for tp, (offset, _) in before.items()
    }
    assert restored[query.sink, 0] == before[query.sink, 0]
    query.forget_commit(0)
    produce(broker, query.source, rows(20, 40))
    query.run()
    assert values(read_back(broker, query.sink)) == rows(0, 40)
    # the query ran without the option, so the record is out of date
    admin.delete_group(query.group)
    assert "may not be the newest" in run("restore", *which, "--yes").output
