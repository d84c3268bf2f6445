"""``kafka-eos topics``, ``produce``, ``tail``, ``lag`` and ``flights`` on a real broker."""

from __future__ import annotations

import json
import uuid
from collections.abc import Callable, Iterator
from itertools import count
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from integration.support.kafka import await_stable, produce, transaction
from integration.support.operated import Query
from kafka_eos_source.cli import main
from kafka_eos_source.kafka.admin import ClusterReader
from kafka_eos_source.model import TopicPartition
from kafka_eos_source.operate import records
from kafka_eos_source.operate.records import TopicRecord, describe_topic
from kafka_eos_source.operate.topics import measure_lag
from kafka_eos_source.protocol.identity import group_of
from kafka_eos_source.runtime.deadline import Deadline


@pytest.fixture
def run(broker: str) -> Callable[..., Result]:
    def invoke(*arguments: str, text: str | None = None, code: int = 0) -> Result:
        result = CliRunner().invoke(main, [*arguments, "--bootstrap-servers", broker], input=text)
        assert result.exception is None or isinstance(result.exception, SystemExit), result.exception
        assert result.exit_code == code, result.output
        return result

    return invoke


def _json_lines(result: Result) -> list[dict[str, Any]]:
    return [json.loads(line) for line in result.stdout.splitlines()]


def test_a_topic_is_created_filled_described_and_read(run: Callable[..., Result]) -> None:
    name = f"t-{uuid.uuid4().hex[:8]}"
    missing = run("tail", name, code=1)
    assert f"topic '{name}' does not exist" in missing.output
    assert f"kafka-eos topics create {name}" in missing.output
    created = run("topics", "create", name, "--partitions", "2", "--config", "retention.ms=1000000")
    assert f"Created topic '{name}'" in created.output
    assert "exists and was left as it is" in run("topics", "create", name).output
    assert {"topic": name, "partitions": 2} in json.loads(run("topics", "list", "--json").stdout)
    run("produce", name, "--key-separator", "|", text="a|1\nb|2\n")
    run("produce", name, "--format", "json", text='{"key": "c", "value": {"n": 3}, "headers": {"h": "x"}}\n')
    found = _json_lines(run("tail", name, "--json"))
    assert sorted((each["key"], each["value"]) for each in found) == [
        ("a", "1"),
        ("b", "2"),
        ("c", '{"n": 3}'),
    ]
    assert {each["state"] for each in found} == {"committed"}
    assert len(_json_lines(run("tail", name, "--json", "-n", "2"))) == 2
    described = json.loads(run("topics", "describe", name, "--json").stdout)
    assert described["config"]["retention.ms"] == "1000000"
    assert sum(each["end"] for each in described["partitions"]) == 3
    assert "INVALID_RECORD" in run("produce", name, "--format", "json", text='{"valeu": 1}\n', code=1).output


def test_tail_shows_committed_records_and_marks_the_others(
    run: Callable[..., Result], broker: str, topic: Callable[..., str]
) -> None:
    name = topic()
    for outcome in ("committed", "aborted", "open"):
        producer = transaction(broker, f"{name}-{outcome}")
        producer.produce(name, outcome.encode())
        assert producer.flush(30) == 0
        if outcome == "committed":
            producer.commit_transaction(30)
        elif outcome == "aborted":
            producer.abort_transaction(30)
        if outcome != "open":
            await_stable(broker, name)
    assert [each["value"] for each in _json_lines(run("tail", name, "--json"))] == ["committed"]
    every = _json_lines(run("tail", name, "--json", "--uncommitted"))
    assert [(each["value"], each["state"]) for each in every] == [
        (state, state) for state in ("committed", "aborted", "open")
    ]
    described = json.loads(run("topics", "describe", name, "--json").stdout)["partitions"][0]
    assert described["stable"] < described["end"]
    assert "open transaction" in run("topics", "describe", name).output
    producer.abort_transaction(30)
    await_stable(broker, name)
    assert [each["state"] for each in _json_lines(run("tail", name, "--json", "--uncommitted"))][
        -1
    ] == "aborted"


def test_tail_continues_after_control_records(broker: str, topic: Callable[..., str]) -> None:
    name = topic()
    produce(broker, name, ["before"])
    seen: list[TopicRecord] = []

    def follow() -> Iterator[TopicRecord]:
        rounds = count()  # a control record may take many rounds to arrive

        def wait() -> bool:
            number = next(rounds)
            if number < 3:
                producer = transaction(broker, f"{name}-{number}")
                producer.produce(name, b"%d" % number)
                producer.commit_transaction(30)
            return len(seen) < 3

        start = {TopicPartition(name, 0): 1}
        yield from records.follow({"bootstrap.servers": broker}, start, uncommitted=False, wait=wait)

    for record in follow():
        seen.append(record)
    assert [record.value for record in seen] == [b"0", b"1", b"2"]


def test_tail_prints_a_record_once_that_arrives_before_it_follows(
    broker: str, topic: Callable[..., str]
) -> None:
    name, kafka = topic(), {"bootstrap.servers": broker}
    produce(broker, name, ["first"])
    logs = describe_topic(kafka, name, Deadline.after_seconds(30)).logs
    produce(broker, name, ["between"])
    printed = records.newest(kafka, logs, count=10, uncommitted=False)
    start = {tp: log.stable for tp, log in logs.items()}
    rounds = iter([True, True, False])
    printed += records.follow(kafka, start, uncommitted=False, wait=lambda: next(rounds))
    assert [record.value for record in printed] == [b"first", b"between"]


def test_the_lag_of_a_query(
    run: Callable[..., Result], broker: str, topic: Callable[..., str], tmp_path: Path
) -> None:
    query = Query(broker, topic(), topic(), tmp_path / "checkpoint", f"app-{uuid.uuid4().hex[:10]}")
    query.run(0, 0, 10)
    produce(broker, query.source, [str(number) for number in range(7)])
    for which in (
        ("--checkpoint", query.checkpoint),
        (query.application_id),
        ("--group", group_of(query.application_id)),
    ):
        (found,) = _json_lines(run("lag", *which, "--json"))
        assert found["lag"] == 7
        assert [each["topic"] for each in found["partitions"]] == [query.source], (
            "the anchor partition is not part of the lag"
        )
    assert "7 behind" in run("lag", "--group", group_of(query.application_id)).output
    assert "has no committed offsets" in run("lag", "--group", "nobody", code=1).output
    assert "name the query" in run("lag", code=2).output
    with ClusterReader({"bootstrap.servers": broker}) as cluster:
        assert measure_lag(cluster, group_of(query.application_id), Deadline.after_seconds(30)).total == 7


def test_the_flights_command_fills_a_topic(run: Callable[..., Result]) -> None:
    name = f"flights-{uuid.uuid4().hex[:8]}"
    made = run("flights", name, "--records", "500")
    assert f"500 flights sent to topic '{name}'" in made.output
    (record,) = _json_lines(run("tail", name, "-n", "1", "--json"))
    assert json.loads(record["value"])["carrier"] == record["key"].split("-")[0]
    assert "exists" in run("flights", name, code=1).output
