"""Tasks read from replicas in their rack (KIP-392), and from the leader if a replica fails."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from dataclasses import replace

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kafka_eos_source.errors import DataLossError
from kafka_eos_source.kafka import fetch as wire_consumer
from kafka_eos_source.kafka.reader import POOL
from kafka_eos_source.model import OffsetRange, TopicPartition
from tests.kafka.consumer_kit import ALL, consuming, expected, log_of, plain_log, read, spoiled, take_until
from tests.support.fetched_log import Log, Record
from tests.support.simulated_kafka import Fault, Partition, SimulatedKafka

TP = TopicPartition("t", 0)
LEADER, REPLICA = 1, 2
RACK = {"client.rack": "here"}


@pytest.fixture(autouse=True)
def _closed_consumers() -> Iterator[None]:
    yield
    POOL.close()


def cluster_of(log: Log, copy: Log | None) -> SimulatedKafka:
    """Returns two brokers; the leader refers clients in the rack to the other one, which has this copy."""
    cluster = SimulatedKafka({"t": [log]}, brokers=2)
    cluster.refers = lambda tp, rack: REPLICA if rack == "here" else -1
    if copy is not None:
        cluster.copies = {(REPLICA, ("t", 0)): copy}
    return cluster


def test_a_task_in_a_rack_reads_from_the_replica_there() -> None:
    log = log_of(30)
    with cluster_of(log, log) as cluster:
        assert read(cluster, **RACK) == expected(cluster)
        assert cluster.asked_racks[0] == (LEADER, "here")
        assert {node for node, _ in cluster.asked_racks[1:]} == {REPLICA}


def test_a_task_without_a_rack_reads_from_the_leader() -> None:
    log = log_of(30)
    with cluster_of(log, log) as cluster:
        assert read(cluster) == expected(cluster)
        assert set(cluster.asked_racks) == {(LEADER, "")}


def test_the_leader_is_asked_again_when_its_answer_is_old() -> None:
    log = log_of(3)
    with (
        cluster_of(log, log) as cluster,
        consuming(cluster, **RACK, **{"metadata.max.age.ms": "1"}) as consumer,
    ):
        consumer.assign({TP: 0}, ALL)
        take_until(consumer, lambda _: cluster.asked_racks.count((LEADER, "here")) > 1)
        assert (REPLICA, "here") in cluster.asked_racks


def lagging(log: Log) -> Log:
    """Returns the first half of a log."""
    return replace(log, batches=log.batches[: len(log.batches) // 2], end=log.end // 2, aborted=[], open={})


def short(log: Log) -> Log:
    """Returns a log whose first half retention has removed."""
    return replace(log, start=log.end // 2)


@pytest.mark.parametrize("copy", [lagging, short, None], ids=["lagging", "short", "no copy"])
def test_the_leader_has_what_a_replica_lacks(copy: object, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(wire_consumer, "_STALL_SECONDS", 0.2)
    log = plain_log(20)
    with cluster_of(log, copy(log) if callable(copy) else None) as cluster:
        assert read(cluster, **RACK) == expected(cluster)
        assert (REPLICA, "here") in cluster.asked_racks
        assert cluster.asked_racks[-1] == (LEADER, "")


def test_a_replica_that_the_cluster_does_not_have_is_not_asked() -> None:
    with cluster_of(log_of(10), None) as cluster:
        cluster.refers = lambda tp, rack: 7 if rack else -1
        assert read(cluster, **RACK) == expected(cluster)


@pytest.mark.parametrize("circle", [{LEADER: LEADER}, {LEADER: REPLICA, REPLICA: LEADER}], ids=["1", "2"])
def test_brokers_that_refer_in_a_circle_are_left(circle: dict[int, int]) -> None:
    """Kafka's followers refer to nobody; other services are less certain."""
    log = log_of(10)
    with cluster_of(log, log) as cluster:
        cluster.refers = lambda tp, rack: circle[cluster.asked_racks[-1][0]] if rack else -1
        cluster.followers_refer = True
        assert read(cluster, poll_timeout_ms=3_000, **RACK) == expected(cluster)
        assert cluster.received["Fetch"] < 20


def test_a_replica_that_hangs_is_left() -> None:
    log = log_of(10)
    with cluster_of(log, log) as cluster:
        cluster.hung = {REPLICA}
        slow = {"socket.timeout.ms": "1000", "socket.connection.setup.timeout.ms": "1000"}
        assert read(cluster, **RACK, **slow) == expected(cluster)


@pytest.mark.parametrize("how", ["record", "length", "decoded"])
def test_what_is_damaged_in_a_replica_comes_from_the_leader(
    how: str, caplog: pytest.LogCaptureFixture
) -> None:
    log, copy = plain_log(20), plain_log(20)
    spoiled(copy, {7: how})
    with cluster_of(log, copy) as cluster, caplog.at_level(logging.WARNING):
        assert read(cluster, **RACK) == expected(cluster)
    assert "Broker 2, a replica, sent it like this" in caplog.text


def test_a_cut_that_the_replica_does_not_know_is_noticed() -> None:
    """The leader does not compare epochs in an answer that refers to a replica."""
    log = Log()
    log.elect(3)
    for number in range(10):
        log.append([Record(0, value=b"%d" % number)])
    copy = replace(log, batches=list(log.batches), epochs=list(log.epochs))
    log.elect(5, end=6)
    for number in range(10):
        log.append([Record(0, value=b"other %d" % number)])
    with cluster_of(log, copy) as cluster:
        cluster.shift = 5
        cluster.refers = lambda tp, rack: 3 - cluster.leader(0) if rack else -1
        cluster.copies = {(3 - cluster.leader(0), ("t", 0)): copy}
        with pytest.raises(DataLossError, match="the log was cut at offset 6"):
            read(cluster, [OffsetRange(TP, 0, 10, 3)], **RACK)


#: An error of a fetch; no broker answers a request for metadata with it, so there it is not temporary.
_OUT_OF_RANGE = Fault("error", 1)
_faults = st.dictionaries(
    st.tuples(st.sampled_from(["Fetch", "Fetch", "Metadata", "OffsetForLeaderEpoch"]), st.integers(0, 10)),
    st.one_of(
        st.builds(Fault, st.just("error"), st.sampled_from([1, 3, 6, 9, 13, 56, 74, 75, 78])),
        st.builds(Fault, st.sampled_from(["cut", "lost", "move", "twice"])),
        st.builds(Fault, st.just("truncate"), st.integers(0, 3000)),
    ),
    max_size=5,
).map(
    lambda faults: {at: each for at, each in faults.items() if (at[0], each) != ("Metadata", _OUT_OF_RANGE)}
)


@settings(max_examples=15, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(_faults, st.sampled_from([500, 1 << 20]))
def test_faults_of_replicas_and_leaders_neither_lose_nor_double_records(
    faults: dict[tuple[str, int], Fault], most_of_partition: int
) -> None:
    logs = {f"t{number}": [log_of(6 + 5 * number)] for number in range(3)}
    with SimulatedKafka(logs, brokers=3) as cluster:

        def other(tp: Partition, rack: str) -> int:
            return cluster.leader(tp[1]) % 3 + 1 if rack else -1

        cluster.refers = other
        cluster.copies = {(node, tp): log for node in (1, 2, 3) for tp, log in cluster.logs.items()}
        cluster.fault = lambda kind: faults.get((kind, cluster.received[kind]))
        sizes = {"max.partition.fetch.bytes": str(most_of_partition)}
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(wire_consumer, "_LEADER_SECONDS", 0.1)
            assert read(cluster, **RACK, **sizes) == expected(cluster)
