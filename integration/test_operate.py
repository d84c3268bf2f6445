"""``kafka-eos inspect``, ``fence``, ``adopt``, ``sweep`` on a real broker, beside real checkpoints."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result
from confluent_kafka import Consumer, KafkaException, Producer, TopicPartition
from pyspark.errors import PySparkException
from pyspark.sql import SparkSession

from integration.support import tools
from integration.support.kafka import Admin, end_offsets, produce, read_back, transaction, values
from integration.support.processes import await_condition
from integration.support.security import PASSWORDS, SecuredCluster
from integration.test_sink_stream import Query, rows
from kafka_eos_source.cli import main


@pytest.fixture
def query(spark: SparkSession, broker: str, topic: Callable[..., str], checkpoint: str) -> Query:
    return Query(spark, broker, topic(2), topic(2), checkpoint)


def run(*arguments: str) -> Result:
    result = CliRunner().invoke(main, list(arguments))
    assert result.exception is None or isinstance(result.exception, SystemExit), result.exception
    return result


def command(name: str, query: Query, *more: str) -> Result:
    return run(name, "--checkpoint", query.checkpoint, "--bootstrap-servers", query.broker, *more)


def inspected(query: Query, *more: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(command("inspect", query, "--json", *more).stdout)
    return found


def committed(query: Query) -> list[str]:
    return values(read_back(query.broker, query.sink))


def die_within_a_commit(query: Query) -> Producer:
    """A driver of this query that has sent its records and offsets, and is gone."""
    dead = transaction(query.broker, query.group)
    dead.produce(query.sink, "half a batch", partition=0)
    dead.flush()
    consumer = Consumer({"bootstrap.servers": query.broker, "group.id": query.group})
    dead.send_offsets_to_transaction(
        [TopicPartition(query.source, 0, 10_000)], consumer.consumer_group_metadata()
    )
    consumer.close()
    return dead


def test_between_kafkas_commit_and_sparks(query: Query, broker: str) -> None:
    for end in (100, 130):
        produce(broker, query.source, rows(0 if end == 100 else 100, end))
        query.run()
    query.forget_commit(1)
    shown = command("inspect", query)
    assert shown.exit_code == 0
    assert shown.output.rstrip().endswith("batch 1 is in Kafka and not in Spark's log: a restart skips it.")
    found = inspected(query)
    assert (found["checkpoint"]["planned"], found["checkpoint"]["committed"]) == (1, 0)
    assert (found["kafka"]["token"]["batch"], found["kafka"]["token"]["rows"]) == (1, 30)
    ends = end_offsets(broker, query.source)
    partitions = {(each["topic"], each["partition"]): each for each in found["kafka"]["partitions"]}
    for number in (0, 1):
        source = partitions[query.source, number]
        assert source["end"] == source["group"] == source["log_end"] == ends[number]
        assert partitions[query.sink, number]["log_end"] == end_offsets(broker, query.sink)[number]
    assert found["kafka"]["losses"] == []

    written = end_offsets(broker, query.sink)
    query.run()
    assert end_offsets(broker, query.sink) == written, "as it was said"
    assert "batch 1 is done on both sides" in command("inspect", query).output

    staging = Path(query.checkpoint, "kafka-eos/staging")
    for name in ("0", "1", "2", "write-" + "0" * 32):
        (staging / name).mkdir()
        (staging / name / "part.arrow").write_bytes(b"x" * 1000)
    assert "1 of 4 entries may go, 1,000 bytes" in command("sweep", query).output
    assert command("sweep", query, "--yes").exit_code == 0
    old = time.time() - 2 * 86_400
    for path in [*staging.rglob("*"), *staging.iterdir()]:
        os.utime(path, (old, old))
    assert command("sweep", query, "--yes").exit_code == 0
    assert sorted(path.name for path in staging.iterdir()) == ["2", "shared-path"]


def test_fence_ends_what_a_dead_driver_left(query: Query, broker: str) -> None:
    produce(broker, query.source, rows(0, 50))
    query.run()
    before = end_offsets(broker, query.sink)[0]
    dead = die_within_a_commit(query)

    def held() -> tuple[bool, int | None]:
        kafka = inspected(query)["kafka"]
        (sink,) = [p for p in kafka["partitions"] if (p["topic"], p["partition"]) == (query.sink, 0)]
        return kafka["pending"], sink["transaction_since"]

    assert held() == (True, before)
    who = ["--application-id", query.group, "--bootstrap-servers", broker]
    dry = run("fence", *who)
    assert "an unfinished transaction is about to change it" in dry.output
    assert held() == (True, before), "a dry run fences nobody"
    assert tools.describe_transaction(broker, query.group)["TransactionState"] == "Ongoing"
    assert "no unfinished transaction" in run("fence", *who, "--yes").output
    assert held() == (False, None)
    assert tools.describe_transaction(broker, query.group)["TransactionState"] in (
        "Empty",
        "CompleteAbort",
    )
    with pytest.raises(KafkaException, match="_FENCED"):
        dead.commit_transaction(30)
    produce(broker, query.source, rows(50, 80))
    query.run()
    assert committed(query) == rows(0, 80)


def test_a_query_that_runs_goes_on_after_a_fence(query: Query, broker: str) -> None:
    produce(broker, query.source, rows(0, 20))
    writer = query.frame().selectExpr("key", "value").writeStream.format("kafka-eos")
    writer = writer.option("kafka.bootstrap.servers", broker).option("topic", query.sink)
    running = writer.option("checkpointLocation", query.checkpoint).start()
    try:
        for end in (20, 40, 60):
            await_condition(lambda end=end: committed(query) == rows(0, end), 60, f"{end} records")
            fenced = run("fence", "--application-id", query.group, "--bootstrap-servers", broker, "--yes")
            assert "Fenced." in fenced.output
            if end < 60:
                produce(broker, query.source, rows(end, end + 20))
        assert running.isActive
    finally:
        running.stop()


def test_adopt_hands_an_application_id_over(
    query: Query, spark: SparkSession, broker: str, topic: Callable[..., str], tmp_path: Path
) -> None:
    """The checkpoint is lost, and the new query writes another topic: the old one keeps its token."""
    app = f"app-{query.sink}"
    for end in (40, 60, 80):
        produce(broker, query.source, rows(end - 40 if end == 40 else end - 20, end))
        query.run(application__id=app)
    new = Query(spark, broker, query.source, topic(2), str(tmp_path / "new"))

    def start() -> None:
        frame = new.frame(**{"startingOffsets": "group", "application.id": app})
        new.run(frame, application__id=app)

    guide = command("adopt", new, "--application-id", app)
    assert guide.exit_code == 0
    assert ".option('startingOffsets', 'group')" in guide.output
    assert ".option('onForeignQuery', 'adopt')" in guide.output

    produce(broker, query.source, rows(80, 100))
    with pytest.raises(PySparkException, match="FOREIGN_QUERY"):
        start()
    assert command("inspect", new).exit_code == 3
    assert "With --yes" in command("adopt", new).output
    with pytest.raises(PySparkException, match="FOREIGN_QUERY"):
        start()
    assert "Start the query" in command("adopt", new, "--yes").output
    start()
    new.forget_commit(0)
    start()  # skipped by a token that is looked up anew
    produce(broker, query.source, rows(100, 120))
    start()
    assert committed(query) + committed(new) == rows(0, 120)
    with pytest.raises(PySparkException, match="FOREIGN_QUERY"):
        query.run(application__id=app)


@pytest.mark.parametrize("said", ["--committed", "--not-committed"])
def test_adopt_says_what_kafka_forgot(query: Query, broker: str, admin: Admin, said: str) -> None:
    produce(broker, query.source, rows(0, 30))
    query.run()
    produce(broker, query.source, rows(30, 50))
    query.run()
    query.forget_commit(1)
    admin.delete_group(query.group)
    assert "TOKEN_MISSING" in command("inspect", query).output
    assert command("adopt", query, said).exit_code == 0
    assert inspected(query)["findings"][0]["condition"] == "TOKEN_MISSING", "a dry run says nothing"
    assert command("adopt", query, said, "--yes").exit_code == 0
    produce(broker, query.source, rows(50, 60))
    query.run()
    query.run()  # PySpark 4.0: a replayed batch is all that one run does
    again = [] if said == "--committed" else rows(30, 50)
    assert committed(query) == sorted(rows(0, 60) + again), "as the person said, right or wrong"


def test_a_properties_file_as_kafkas_tools_take_it(secured_cluster: SecuredCluster, tmp_path: Path) -> None:
    password = PASSWORDS["admin"]
    file = tmp_path / "client.properties"
    file.write_text(
        "security.protocol=SASL_PLAINTEXT\nsasl.mechanism=PLAIN\n"
        "sasl.jaas.config=org.apache.kafka.common.security.plain.PlainLoginModule required \\\n"
        f'    username="admin" password="{password}";\n'
    )
    who = ["--application-id", "nobody", "--bootstrap-servers", secured_cluster.bootstrap_servers]
    found = run("inspect", *who, "--kafka-properties", str(file))
    assert found.exit_code == 0, found.output
    assert "Kafka holds no token" in found.output
    file.write_text(file.read_text().replace(password, "wrong-" + password))
    refused = run("inspect", *who, "--kafka-properties", str(file), "--timeout", "10s")
    assert refused.exit_code == 3
    assert password not in found.output + refused.output


def test_brokers_that_do_not_answer_are_a_finding(query: Query, broker: str) -> None:
    produce(broker, query.source, rows(0, 10))
    query.run()
    silent = ["--checkpoint", query.checkpoint, "--bootstrap-servers", "127.0.0.1:1", "--timeout", "2s"]
    found = run("inspect", *silent)
    assert found.exit_code == 3
    assert "UNAVAILABLE" in found.output
    assert "by Spark's logs batch 1 comes next" in found.output
