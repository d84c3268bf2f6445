"""``kafka-eos inspect``, ``fence``, ``adopt`` and ``sweep`` on a real broker with real checkpoints."""

from __future__ import annotations

import json
import os
import sys
import time
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result
from confluent_kafka import Consumer, KafkaException, Producer
from confluent_kafka import TopicPartition as ClientTopicPartition
from pyspark.sql import SparkSession

from integration.support import query as spark_sink
from integration.support import tools
from integration.support.kafka import (
    Admin,
    end_offsets,
    final_end_offsets,
    produce,
    transaction,
)
from integration.support.operated import Query
from integration.support.security import PASSWORDS, SecuredCluster
from integration.support.sink_stream import rows
from kafka_eos_source.cli import main
from kafka_eos_source.errors import ForeignQueryError, TokenMissingError
from kafka_eos_source.observe.figures import Step
from kafka_eos_source.protocol.identity import group_of


@pytest.fixture
def query(broker: str, topic: Callable[..., str], tmp_path: Path) -> Query:
    return Query(broker, topic(), topic(), tmp_path / "checkpoint", f"app-{uuid.uuid4().hex[:10]}")


def run(*arguments: str) -> Result:
    result = CliRunner().invoke(main, list(arguments))
    assert result.exception is None or isinstance(result.exception, SystemExit), result.exception
    return result


def command(name: str, query: Query | spark_sink.Query, *more: str) -> Result:
    return run(name, "--checkpoint", query.checkpoint, "--bootstrap-servers", query.broker, *more)


def inspected(query: Query | spark_sink.Query) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(command("inspect", query, "--json").stdout)
    return found


def test_inspect_reports_a_batch_that_kafka_holds_and_spark_has_not_logged(
    spark: SparkSession, broker: str, topic: Callable[..., str], checkpoint: str
) -> None:
    query = spark_sink.Query(spark, broker, topic(2), topic(2), checkpoint)
    produce(broker, query.source, rows(0, 30))
    query.run()
    query.forget_commit(0)
    shown = command("inspect", query)
    assert shown.exit_code == 0
    assert shown.output.rstrip().endswith(
        "Kafka holds batch 0, Spark's commit log does not: a restart skips it."
    )
    # the control record of the commit is in the log now, also for the command
    ends, written = end_offsets(broker, query.source), final_end_offsets(broker, query.sink)
    found = inspected(query)
    assert (found["checkpoint"]["planned"], found["checkpoint"]["committed"]) == (0, None)
    assert (found["kafka"]["token"]["batch"], found["kafka"]["token"]["rows"]) == (0, 30)
    partitions = {(each["topic"], each["partition"]): each for each in found["kafka"]["partitions"]}
    for number in (0, 1):
        source = partitions[query.source, number]
        assert source["end"] == source["group"] == source["log_end"] == ends[number]
        assert partitions[query.sink, number]["log_end"] == written[number]
    query.run()
    assert end_offsets(broker, query.sink) == written, "the replay was not skipped"
    assert "batch 0 is complete in Spark and in Kafka" in command("inspect", query).output


def test_sweep_keeps_staged_parts_that_may_still_be_committed(query: Query) -> None:
    query.run(0, 0, 10)
    query.run(1, 10, 20)
    staging = Path(query.checkpoint, "kafka-eos/staging")
    for name in ("0", "1", "2", "write-" + "0" * 32):
        (staging / name).mkdir()
        (staging / name / "part.arrow").write_bytes(b"x" * 1000)
    assert "1 of 4 entries can be deleted, 1,000 bytes" in command("sweep", query).output
    assert (staging / "0").exists()
    assert command("sweep", query, "--yes").exit_code == 0
    old = time.time() - 2 * 86_400
    for path in staging.rglob("*"):
        os.utime(path, (old, old))
    assert command("sweep", query, "--yes").exit_code == 0
    assert sorted(path.name for path in staging.iterdir()) == ["2", "shared-path"]


def leave_open_transaction(query: Query) -> Producer:
    """Leaves an open transaction, as a driver that died after it sent its records and offsets."""
    dead = transaction(query.broker, query.application_id)
    dead.produce(query.sink, "half a batch", partition=0)
    assert dead.flush(60) == 0
    consumer = Consumer({"bootstrap.servers": query.broker, "group.id": group_of(query.application_id)})
    offset = ClientTopicPartition(query.source, 0, 10_000)
    dead.send_offsets_to_transaction([offset], consumer.consumer_group_metadata())
    consumer.close()
    return dead


def test_fence_ends_the_open_transaction_of_a_dead_driver(query: Query, broker: str) -> None:
    query.run(0, 0, 50)
    before = final_end_offsets(broker, query.sink)[0]
    dead = leave_open_transaction(query)

    def group_offsets() -> tuple[bool, int | None]:
        kafka = inspected(query)["kafka"]
        (sink,) = [each for each in kafka["partitions"] if each["topic"] == query.sink]
        return kafka["pending"], sink["transaction_since"]

    assert group_offsets() == (True, before)
    who = [query.application_id, "--bootstrap-servers", broker]
    assert "an unfinished transaction is about to change it" in run("fence", *who).output
    assert group_offsets() == (True, before), "a dry run fences nobody"
    assert tools.transactions(broker)[query.application_id] == "Ongoing", (
        "Kafka's own tool sees an open transaction"
    )
    assert "no unfinished transaction" in run("fence", *who, "--yes").output
    assert group_offsets() == (False, None)
    assert tools.transactions(broker)[query.application_id] != "Ongoing"
    with pytest.raises(KafkaException, match="_FENCED"):
        dead.commit_transaction(30)
    query.run(1, 50, 80)
    assert query.written() == rows(0, 80)


def test_a_running_query_continues_after_a_fence(query: Query, broker: str) -> None:
    for batch_id in range(2):
        query.run(batch_id, 20 * batch_id, 20 * batch_id + 20)
        fenced = run("fence", query.application_id, "--bootstrap-servers", broker, "--yes")
        assert "Fenced." in fenced.output
    query.run(2, 40, 60)
    assert query.written() == rows(0, 60)


def test_adopt_lets_a_new_checkpoint_continue_an_application_id(
    query: Query, broker: str, topic: Callable[..., str], tmp_path: Path
) -> None:
    """A query is handed over after its checkpoint was lost; the new query writes the same topic."""
    for batch_id in range(3):
        query.run(batch_id, 20 * batch_id, 20 * batch_id + 20)
    new = Query(broker, query.source, query.sink, tmp_path / "new", query.application_id)
    guide = command("adopt", new, new.application_id)
    assert guide.exit_code == 0
    assert ".option('startingOffsets', 'group')" in guide.output
    assert ".option('onForeignQuery', 'adopt')" in guide.output

    produce(broker, new.source, rows(60, 80))
    new.plan(0, start=60)
    with pytest.raises(ForeignQueryError):
        new.commit(0, rows(60, 80), restarted=True)
    named = [new.application_id]
    assert "With --yes" in command("adopt", new, *named).output
    assert command("inspect", new, *named).exit_code == 3, "a dry run hands nothing over"
    assert "Start the query" in command("adopt", new, *named, "--yes").output
    assert new.commit(0, rows(60, 80), restarted=True) is Step.COMMITTED
    assert new.commit(0, rows(60, 80), restarted=True) is Step.SKIPPED
    new.made.log_commit(0)
    new.run(1, 80, 100)
    assert query.written() == rows(0, 100)
    query.plan(3)
    with pytest.raises(ForeignQueryError):
        query.commit(3, rows(60, 100), restarted=True)


@pytest.mark.parametrize("outcome", ["--committed", "--not-committed"])
def test_adopt_writes_a_lost_token_with_the_stated_outcome(query: Query, admin: Admin, outcome: str) -> None:
    query.run(0, 0, 30)
    query.run(1, 30, 50)
    query.made.forget("commits/1")
    admin.delete_group(group_of(query.application_id))
    with pytest.raises(TokenMissingError):
        query.commit(1, rows(30, 50), restarted=True)
    assert command("adopt", query, outcome).exit_code == 0
    assert inspected(query)["findings"][0]["condition"] == "TOKEN_MISSING", "a dry run changes nothing"
    assert command("adopt", query, outcome, "--yes").exit_code == 0
    step = query.commit(1, rows(30, 50), restarted=True)
    assert step is (Step.SKIPPED if outcome == "--committed" else Step.COMMITTED)
    query.made.log_commit(1)
    query.run(2, 50, 60)
    again = [] if outcome == "--committed" else rows(30, 50)
    assert query.written() == sorted(rows(0, 60) + again), (
        "the operator's declaration is followed, right or wrong"
    )


def test_a_properties_file_of_kafkas_tools_is_accepted(
    secured_cluster: SecuredCluster, tmp_path: Path
) -> None:
    file = tmp_path / "client.properties"
    file.write_text(
        "security.protocol=SASL_PLAINTEXT\nsasl.mechanism=PLAIN\n"
        "sasl.jaas.config=org.apache.kafka.common.security.plain.PlainLoginModule required \\\n"
        f'    username="admin" password="{PASSWORDS["admin"]}";\n'
    )
    who = ["nobody", "--bootstrap-servers", secured_cluster.bootstrap_servers]
    found = run("inspect", *who, "--kafka-properties", str(file))
    assert found.exit_code == 0, found.output
    assert "Kafka holds no token" in found.output
    file.write_text(file.read_text().replace(PASSWORDS["admin"], PASSWORDS["alice"]))
    refused = run("inspect", *who, "--kafka-properties", str(file))
    assert refused.exit_code == 3
    assert "NOT_AUTHORIZED" in refused.output
    assert not any(password in found.output + refused.output for password in PASSWORDS.values())


def test_inspect_reports_brokers_that_do_not_answer(query: Query) -> None:
    query.run(0, 0, 10)
    silent = ["--checkpoint", query.checkpoint, "--bootstrap-servers", "127.0.0.1:1", "--timeout", "1s"]
    found = run("inspect", *silent)
    assert found.exit_code == 3
    assert "UNAVAILABLE" in found.output
    assert "by Spark's logs, a restart continues with batch 1" in found.output


def findings(result: Result) -> dict[str, dict[str, Any]]:
    return {each["check"]: each for each in json.loads(result.stdout)["findings"]}


def test_doctor_looks_at_a_running_query(
    query: Query, broker: str, admin: Admin, topic: Callable[..., str], spark: SparkSession
) -> None:
    """Cluster, clocks, rights, retention, and a Spark job in the executors of this session."""
    query.run(0, 0, 10)
    clocks = topic(**{"message.timestamp.type": "LogAppendTime"})
    names = ("brokers", "transactions", "clock", "rights", "retention", "staging", "executors")
    checks = [part for name in names for part in ("--check", name)]
    asked = ("--topic", query.sink, "--clock-topic", clocks, "--json")
    result = command("doctor", query, *asked, *checks, "--spark")
    found = findings(result)
    assert set(found) == set(names), result.output
    assert {each["severity"] for each in found.values()} == {"ok"}, result.output
    assert result.exit_code == 0
    assert "transaction.version=2" in found["transactions"]["what"]
    assert "7 days" in found["retention"]["what"]
    assert "host(s) share" in found["staging"]["what"]
    assert not list(Path(query.checkpoint, "kafka-eos/staging").glob(".doctor*"))

    assert "have the 5 rights" in found["rights"]["what"]
    derived = command("doctor", query, "--check", "rights", "--json")
    assert findings(derived)["rights"] == found["rights"], "the token shows the output topic"

    create_time = command("doctor", query, "--clock-topic", query.sink, "--check", "clock", "--json")
    assert "keeps the time of the producer" in findings(create_time)["clock"]["what"]
    admin.delete_group(group_of(query.application_id))
    lost = command("doctor", query, "--check", "retention", "--json")
    assert lost.exit_code == 3
    assert "the token is gone" in findings(lost)["retention"]["what"]
    assert query.written() == rows(0, 10), "the clock was compared in another topic"


def test_doctor_finds_an_executor_without_the_package(
    query: Query, spark: SparkSession, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The tasks run a Python that has PySpark's libraries and hides this package."""
    hidden = tmp_path / "python"
    hidden.write_text(f'#!/bin/sh\nexport PYTHONPATH={tmp_path}/hidden\ncd /\nexec {sys.executable} "$@"\n')
    hidden.chmod(0o755)
    (tmp_path / "hidden").mkdir()
    (tmp_path / "hidden" / "sitecustomize.py").write_text(
        "import sys\n"
        "class Hide:\n"
        "    def find_spec(self, name, path=None, target=None):\n"
        "        if name.partition('.')[0] == 'kafka_eos_source':\n"
        "            raise ModuleNotFoundError(f'no module named {name}')\n"
        "sys.meta_path.insert(0, Hide())\n"
    )
    monkeypatch.setattr(spark.sparkContext, "pythonExec", str(hidden))
    result = run("doctor", "--check", "executors", "--spark", "--json")
    assert result.exit_code == 3, result.output
    found = findings(result)["executors"]
    assert "kafka-eos-source cannot be used in" in found["what"]
