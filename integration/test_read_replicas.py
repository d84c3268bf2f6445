"""Tasks in a rack read from the replica there (KIP-392), and from the leader when the replica dies."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import pytest

from integration.support import broker as brokers
from integration.support.kafka import TIMEOUT_SECONDS, Admin, await_stable, end_offsets, produce, transaction
from kafka_eos_source.embedded import EmbeddedKafka
from kafka_eos_source.embedded.cluster import Node, Ports
from kafka_eos_source.kafka.fetch import RangeConsumer
from kafka_eos_source.kafka.reader import POOL
from kafka_eos_source.model import OffsetRange, TopicPartition
from kafka_eos_source.read.fetch import ReadSettings, read_ranges

SELECTOR = "org.apache.kafka.common.replica.RackAwareReplicaSelector"


class InRacks(EmbeddedKafka):
    """A cluster in which each broker is in a rack of its own."""

    def _properties(self, node: Node, ports: Mapping[int, Ports]) -> dict[str, str]:
        rack = {"broker.rack": f"rack-{node.node_id}", "replica.selector.class": SELECTOR}
        return {**super()._properties(node, ports), **rack}


@pytest.fixture
def kafka() -> Iterator[EmbeddedKafka]:
    with InRacks(3, java_options=brokers.JAVA_OPTIONS) as running:
        yield running
        POOL.close()


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Returns the brokers to which Fetch requests are sent, as they are sent."""
    nodes: list[int] = []
    send = RangeConsumer._send

    def recorded(self: RangeConsumer, node: int, wanted: Mapping[TopicPartition, object]) -> None:
        nodes.append(node)
        send(self, node, wanted)  # type: ignore[arg-type]

    monkeypatch.setattr(RangeConsumer, "_send", recorded)
    return nodes


def read(kafka: EmbeddedKafka, tp: TopicPartition, start: int, end: int, rack: str = "") -> list[str]:
    conf = {"bootstrap.servers": kafka.bootstrap_servers, "isolation.level": "read_committed"}
    settings = ReadSettings({**conf, **({"client.rack": rack} if rack else {})}, columns=("value",))
    batches = read_ranges(settings, [OffsetRange(tp, start, end)])
    return [value.decode() for batch in batches for value in batch["value"].to_pylist()]


def test_tasks_read_from_the_replica_in_their_rack(kafka: EmbeddedKafka, asked: list[int]) -> None:
    bootstrap, name = kafka.bootstrap_servers, "racked"
    leader, replica = 1, 2
    Admin(bootstrap).create_on(name, [[leader, replica, 3]])
    tp = TopicPartition(name, 0)
    expected = []
    for number in range(10):
        writing = transaction(bootstrap, f"t-{number}")
        values = [f"{number}.{each} " + "x" * 1000 for each in range(200)]
        for value in values:
            writing.produce(name, value, partition=0)
        if number % 3 == 1:
            assert writing.flush(TIMEOUT_SECONDS) == 0
            writing.abort_transaction(TIMEOUT_SECONDS)
        else:
            writing.commit_transaction(TIMEOUT_SECONDS)
            expected += values
    await_stable(bootstrap, name)
    end = end_offsets(bootstrap, name, "read_committed")[0]

    assert read(kafka, tp, 0, end) == expected
    assert set(asked) == {leader}
    asked.clear()
    assert read(kafka, tp, 0, end, f"rack-{replica}") == expected
    assert asked[0] == leader
    assert set(asked[1:]) == {replica}
    asked.clear()
    assert read(kafka, tp, 0, end, f"rack-{leader}") == expected
    assert set(asked) == {leader}

    # a replica learns a moment later than the leader that records are replicated
    for number in range(20):
        produce(bootstrap, name, [f"new {number}"], partition=0)
        assert read(kafka, tp, end, end + 1, f"rack-{replica}") == [f"new {number}"]
        end += 1

    asked.clear()
    kafka.kill_node(replica)
    assert read(kafka, tp, 0, end, f"rack-{replica}")[: len(expected)] == expected
    assert asked[-1] == leader
