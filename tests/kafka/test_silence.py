"""The native client when a broker hangs: its connections stay open, and the cluster replaces it later."""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from kafka.protocol.metadata import ApiVersionsRequest
from kafka.protocol.producer import EndTxnRequest, ProduceRequest, TxnOffsetCommitRequest

from kafka_eos_source.kafka import cluster as cluster_module
from kafka_eos_source.kafka import connection
from kafka_eos_source.kafka.reader import POOL
from tests.kafka.consumer_kit import expected as expected_rows
from tests.kafka.consumer_kit import log_of, read
from tests.kafka.wire_kit import PARTITIONS, TOPIC, expected, producer, soon, write
from tests.support.simulated_kafka import Fault, SimulatedKafka

#: No test waits until a request times out.
PATIENT = {"socket.timeout.ms": "60000", "socket.connection.setup.timeout.ms": "60000"}


@pytest.fixture(autouse=True)
def _quick(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    for module in (connection, cluster_module):
        monkeypatch.setattr(module, "SILENT_SECONDS", 0.1)
    monkeypatch.setattr(connection, "_REPORT_SECONDS", 0.05)
    monkeypatch.setattr(cluster_module, "_LEAST_CONNECT_SECONDS", 0.2)
    yield
    POOL.close()


def fenced_after(cluster: SimulatedKafka, looks: int) -> Callable[[str], None]:
    """Returns a function that is told of each request, and fences hung brokers at that many looks."""
    left = looks

    def told(kind: str) -> None:
        nonlocal left
        if kind == "Metadata" and cluster.hung and left:
            left -= 1
            if not left:
                for node in cluster.hung:
                    cluster.fence(node)

    return told


@pytest.mark.parametrize("hung", [{1}, {2}, {3}, {1, 2}, {1, 3}, {2, 3}], ids=str)
def test_a_transaction_goes_on_without_brokers_that_hung_before_it(hung: set[int]) -> None:
    with SimulatedKafka({TOPIC: PARTITIONS}, brokers=3) as cluster:
        client = producer(cluster, **PATIENT)
        client.init(soon())
        write(client, 0)
        told = fenced_after(cluster, 3)
        cluster.fault = lambda kind: told(kind)
        cluster.hung = hung
        write(client, 1)
        client.close()
        assert cluster.committed(TOPIC) == expected(2)


class HangingCluster(SimulatedKafka):
    """A broker hangs for good when it has done what the next request of a kind asks for, and is fenced later.

    Attributes:
        hangs_at: the API key of that request; -1 = none.
    """

    hangs_at = -1

    def _handle(self, node: int, data: bytes, state: Any) -> tuple[bytes, Fault] | None:
        answer = super()._handle(node, data, state)
        if answer is not None and not self.hung and struct.unpack_from(">h", data)[0] == self.hangs_at:
            self.hung = {node}
            return answer[0], Fault("silent")
        return answer


@pytest.mark.parametrize("at", [ApiVersionsRequest, ProduceRequest, TxnOffsetCommitRequest, EndTxnRequest])
def test_a_broker_that_hangs_within_a_transaction_is_replaced(at: Any) -> None:
    """It took the request, so the same request to its successor is a repetition."""
    with HangingCluster({TOPIC: PARTITIONS}, brokers=3) as cluster:
        client = producer(cluster, **PATIENT)
        client.init(soon())
        write(client, 0)
        told = fenced_after(cluster, 3)
        cluster.fault = lambda kind: told(kind)
        cluster.hangs_at = at.API_KEY
        for number in (1, 2):
            write(client, number)
        client.close()
        assert cluster.hung
        assert cluster.committed(TOPIC) == expected(3)


@pytest.mark.parametrize("node", [1, 2])
def test_records_are_read_from_the_successor_of_a_broker_that_hangs(node: int) -> None:
    with SimulatedKafka({"t": [log_of(30) for _ in range(4)]}, brokers=2) as cluster:
        read(cluster, **PATIENT)
        told = fenced_after(cluster, 3)
        cluster.fault = lambda kind: told(kind)
        cluster.hung = {node}
        assert read(cluster, poll_timeout_ms=20_000, **PATIENT) == expected_rows(cluster)


def test_brokers_that_all_are_slow_get_more_and_more_time() -> None:
    """To connect, and to answer: otherwise no attempt would ever succeed."""
    with SimulatedKafka({TOPIC: PARTITIONS}, brokers=3) as cluster:
        slow = {"Metadata", "ApiVersions", "FindCoordinator"}
        cluster.fault = lambda kind: Fault("delay", 350) if kind in slow else None
        client = producer(cluster, **PATIENT)
        client.check_partitions({TOPIC: 0}, soon())
        client.init(soon())
        client.close()
        assert cluster.received["Metadata"] > 1


def test_a_slow_broker_that_the_cluster_still_has_keeps_its_requests() -> None:
    """A second Produce would be harmless, but a broker under load must not be asked for everything again."""
    with SimulatedKafka({TOPIC: PARTITIONS}, brokers=3) as cluster:
        client = producer(cluster, **PATIENT)
        client.init(soon())
        write(client, 0)
        sent, asked = cluster.received["Produce"], cluster.received["Metadata"]
        cluster.fault = lambda kind: Fault("delay", 400) if kind in ("Produce", "EndTxn") else None
        write(client, 1)
        client.close()
        assert cluster.received["Produce"] == 2 * sent
        assert cluster.received["EndTxn"] == 2
        assert cluster.received["Metadata"] > asked, "the brokers that the cluster has were asked for"
        assert cluster.committed(TOPIC) == expected(2)


def test_brokers_are_asked_also_while_requests_to_all_of_them_wait_for_one_that_hangs() -> None:
    """A Produce request waits for replicas, so every leader is silent if one of them hangs."""
    with SimulatedKafka({TOPIC: PARTITIONS}, brokers=3) as cluster:
        client = producer(cluster, **PATIENT)
        client.init(soon())
        write(client, 0)
        asked, limit = cluster.received["Metadata"], soon()
        client._cluster._on_silence(list(client._cluster._connections.values()))
        while cluster.received["Metadata"] == asked and not limit.expired:
            client._cluster.network.wait(0.1)
        assert cluster.received["Metadata"] == asked + 1
        client.close()
