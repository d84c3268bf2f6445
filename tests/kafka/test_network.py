"""What the network, a broker or the cluster may do to the clients' requests, one fault at a time.

Each ends in success or in the right error within a bounded time, and the simulated logs show that no record
is lost, doubled or torn.
"""

from __future__ import annotations

import time
from collections import Counter

import pytest

from kafka_eos_source.errors import AuthorizationError, KafkaEosError, UnavailableError
from kafka_eos_source.kafka import connection
from kafka_eos_source.kafka.fetch import RangeConsumer
from kafka_eos_source.model import TopicPartition
from tests.kafka.wire_kit import (
    PARTITIONS,
    TOPIC,
    expected,
    planned,
    producer,
    soon,
    write,
    write_until_committed,
)
from tests.support.fetched_log import ABORT, COMMIT, Log, Record
from tests.support.simulated_kafka import LAST_EPOCH, Fault, SimulatedKafka

#: More than any of this takes that does not hang.
SECONDS = 20.0
LOGIN = {
    "security.protocol": "sasl_plaintext",
    "sasl.mechanisms": "PLAIN",
    "sasl.username": "alice",
    "sasl.password": "hunter2",
}
#: The requests of a connection, of a transaction of version 2 and of version 1, and of a reader.
OPENING = ["ApiVersions", "SaslHandshake", "SaslAuthenticate"]
WRITING = ["FindCoordinator", "Metadata", "InitProducerId", "Produce", "TxnOffsetCommit", "EndTxn"]
READING = ["Metadata", "ListOffsets", "Fetch"]
#: What goes wrong with one request or answer. Those that only cost a request must not cost a transaction.
FAULTS = {
    "cut before": Fault("cut"),
    "cut after": Fault("lost"),
    "delayed": Fault("delay", 120),
    "throttled": Fault("throttle", 120),
    "reordered": Fault("reorder"),
    "twice": Fault("twice"),
    "other correlation id": Fault("correlation", 1),
    "another one far away": Fault("correlation", -1000),
    "too short a length": Fault("length", -3),
    "too long a length": Fault("length", 5),
    "negative length": Fault("length", -(1 << 30)),
    "length of 2 GB": Fault("length", 1 << 31),
    "byte by byte": Fault("trickle", 150),
    "never complete": Fault("loris", 60),
    "never complete, and large": Fault("loris", 50 << 20),
    "no answer": Fault("silent"),
    "moved": Fault("move"),
}


def log_of(count: int) -> Log:
    """Returns a log of small transactions, some of which are aborted."""
    log = Log()
    for number in range(count):
        log.append([Record(0, b"k", b"%d" % number)] * 2, producer=1, transactional=True)
        log.finish(1, ABORT if number % 3 == 0 else COMMIT)
    return log


def offsets_of(log: Log) -> list[int]:
    return [each.offset for each in log.visible(0, log.end, committed=True)]


def read(cluster: SimulatedKafka, topic: str = "r", **more: str) -> dict[TopicPartition, list[int]]:
    """Reads whole logs with one consumer, as a task does, and returns the offsets."""
    tps = [TopicPartition(name, number) for name, number in cluster.logs if name == topic]
    ours = {
        "bootstrap.servers": cluster.bootstrap,
        "socket.timeout.ms": "300",
        "socket.connection.setup.timeout.ms": "400",
        **more,
    }
    consumer = RangeConsumer({**ours, "isolation.level": "read_committed"})
    try:
        ends = {tp: consumer.log_bounds(tp, soon())[1] for tp in tps}
        consumer.assign(dict.fromkeys(tps, 0), ["value"], ends)
        found: dict[TopicPartition, list[int]] = {tp: [] for tp in tps}
        reached, limit = dict.fromkeys(tps, 0), soon()
        while any(reached[tp] < ends[tp] for tp in tps):
            assert not limit.expired, consumer.last_complaint
            taken = consumer.take(0.2)
            for index in range(len(taken.messages)):
                found[taken.messages.partition_at(index)].append(int(taken.messages.offsets[index]))
            reached |= taken.reached
        return found
    finally:
        consumer.close()


@pytest.fixture(autouse=True)
def _short_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connection, "_LONGEST_MUTE_SECONDS", 0.3)


@pytest.mark.parametrize("name", FAULTS)
@pytest.mark.parametrize("kind", [*OPENING, *WRITING])
def test_one_fault_in_a_transaction_costs_no_record(kind: str, name: str) -> None:
    """The first such request of the connections, and the second one, fail."""
    with SimulatedKafka({TOPIC: PARTITIONS}, brokers=2) as cluster:
        cluster.users = {"alice": "hunter2"}
        cluster.fault = planned((kind, 1, FAULTS[name]), (kind, 3, FAULTS[name]))
        begun = time.monotonic()
        write_until_committed(cluster, 2, **LOGIN)
        assert time.monotonic() - begun < SECONDS
        assert cluster.committed(TOPIC) == expected(2)
        assert cluster.hanging() == 0


@pytest.mark.parametrize("name", FAULTS)
@pytest.mark.parametrize("kind", [*OPENING, *READING])
def test_one_fault_in_a_read_costs_no_record(kind: str, name: str) -> None:
    with SimulatedKafka({"r": [log_of(12), log_of(9)]}, brokers=2) as cluster:
        cluster.users = {"alice": "hunter2"}
        wanted = {TopicPartition("r", number): offsets_of(cluster.logs["r", number]) for number in range(2)}
        cluster.fault = planned((kind, 1, FAULTS[name]), (kind, 3, FAULTS[name]))
        begun = time.monotonic()
        assert read(cluster, **LOGIN) == wanted
        assert time.monotonic() - begun < SECONDS


@pytest.mark.parametrize("kind", ["SaslHandshake", "SaslAuthenticate", *WRITING])
def test_an_answer_that_is_cut_at_any_byte_costs_no_record(kind: str) -> None:
    with SimulatedKafka({TOPIC: PARTITIONS}, brokers=2) as cluster:
        cluster.users = {"alice": "hunter2"}
        cuts = iter(range(1, 40))

        def fault(name: str) -> Fault | None:
            return Fault("truncate", next(cuts, 0) or 4) if name == kind and next(turn) else None

        turn = iter([True, False, False] * 1000)  # else no two connections would ever work
        cluster.fault = fault
        write_until_committed(cluster, 12, **LOGIN)
        assert cluster.committed(TOPIC) == expected(12)


def test_a_fetch_that_is_cut_at_any_byte_costs_no_record() -> None:
    with SimulatedKafka({"r": [log_of(4)]}) as cluster:
        wanted = {TopicPartition("r", 0): offsets_of(cluster.logs["r", 0])}
        consumed, cuts = Counter[str](), iter(range(1, 2000, 7))

        def fault(name: str) -> Fault | None:
            consumed[name] += 1
            return Fault("truncate", next(cuts)) if name == "Fetch" and consumed[name] % 2 else None

        cluster.fault = fault
        for _ in range(20):
            assert read(cluster) == wanted


@pytest.mark.parametrize(
    "sent", [b"HTTP/1.1 400 Bad Request\r\n\r\n", b"\x15\x03\x01\0\2\2F", bytes(8), b"\xff" * 64]
)
def test_a_server_that_is_no_broker_is_named_in_time(sent: bytes) -> None:
    with SimulatedKafka({TOPIC: PARTITIONS}) as cluster:
        cluster.greet = lambda: sent
        client = producer(cluster)
        begun = time.monotonic()
        with pytest.raises(UnavailableError, match=cluster.bootstrap):
            client.init(soon(1.0))
        assert time.monotonic() - begun < SECONDS
        client.close()


@pytest.mark.parametrize("code", [58, 33])
def test_a_login_that_is_refused_at_either_step_is_named_at_once(code: int) -> None:
    with SimulatedKafka({TOPIC: PARTITIONS}) as cluster:
        cluster.users = {"alice": "hunter2"}
        kind = "SaslHandshake" if code == 33 else "SaslAuthenticate"
        cluster.fault = lambda name: Fault("error", code) if name == kind else None
        client = producer(cluster, **LOGIN)
        begun = time.monotonic()
        with pytest.raises(AuthorizationError) as refused:
            client.init(soon())
        assert time.monotonic() - begun < SECONDS / 2
        assert "hunter2" not in str(refused.value)
        client.close()


def test_a_session_that_expires_is_renewed_between_requests() -> None:
    with SimulatedKafka({TOPIC: PARTITIONS}) as cluster:
        cluster.users, cluster.session_ms = {"alice": "hunter2"}, 200
        client = producer(cluster, **LOGIN)
        client.init(soon())
        for number in range(4):
            write(client, number)
            time.sleep(0.1)  # a part of the session's lifetime
        client.close()
        assert cluster.received["SaslAuthenticate"] > 2
        assert cluster.committed(TOPIC) == expected(4)


# -- the cluster changes


@pytest.mark.parametrize("version", [2, 1])
def test_each_epoch_up_to_the_wrap_and_behind_it_is_used_once(version: int) -> None:
    with SimulatedKafka({TOPIC: PARTITIONS}, brokers=2, version=version) as cluster:
        cluster.epoch = LAST_EPOCH - 2
        client = producer(cluster)
        client.init(soon())
        used = []
        for number in range(5):
            write(client, number)
            used += [
                (each.producer, each.producer_epoch)
                for log in cluster.logs.values()
                for each in log.batches[-1:]
                if each.sent is None  # the marker
            ]
        client.close()
        assert cluster.producer_id == 1001
        assert cluster.committed(TOPIC) == expected(5)
        assert cluster.hanging() == 0


@pytest.mark.parametrize("kind", [*WRITING, "Fetch"])
def test_leaders_and_coordinators_that_move_at_every_request_of_a_kind(kind: str) -> None:
    """At every fifth one: with each, nothing would ever be reached."""
    with SimulatedKafka({TOPIC: PARTITIONS}, brokers=3) as cluster:
        seen = Counter[str]()

        def fault(name: str) -> Fault | None:
            seen[name] += 1
            return Fault("move") if name == kind and seen[name] % 5 == 0 else None

        cluster.fault = fault
        write_until_committed(cluster, 4)
        assert cluster.committed(TOPIC) == expected(4)
        found = read(cluster, TOPIC)
        for (_, number), log in cluster.logs.items():
            assert found[TopicPartition(TOPIC, number)] == offsets_of(log)


@pytest.mark.parametrize("number", [1, 2, 3])
def test_two_brokers_that_disagree_about_leaders(number: int) -> None:
    """One is cut off, and believes that it still leads what it led before; it cannot write."""
    with SimulatedKafka({TOPIC: PARTITIONS}, brokers=3) as cluster:
        client = producer(cluster)
        client.init(soon())
        write(client, 0)
        cluster.cut_off = {number: cluster.shift}
        cluster.move()
        try:
            write(client, 1)
        except KafkaEosError:
            client.abort(soon(1))
        client.close()
        write_until_committed(cluster, 3)
        assert cluster.committed(TOPIC) == expected(3)
        found = read(cluster, TOPIC)
        for (_, partition), log in cluster.logs.items():
            assert found[TopicPartition(TOPIC, partition)] == offsets_of(log)


def test_a_topic_that_is_deleted_and_created_again_gets_only_whole_transactions() -> None:
    with SimulatedKafka({TOPIC: PARTITIONS}, brokers=2) as cluster:
        client = producer(cluster)
        client.init(soon())
        write(client, 0)
        before = client.topic_ids([TOPIC])
        cluster.remove_topic(TOPIC)
        assert client.topic_ids([TOPIC]) == {}
        cluster.add_topic(TOPIC, [Log() for _ in range(PARTITIONS)])
        assert client.topic_ids([TOPIC])[TOPIC] != before[TOPIC]
        write(client, 1)
        client.close()
        wanted = {
            number: [value for value in values if value.startswith(b"1-")]
            for number, values in expected(2).items()
        }
        assert cluster.committed(TOPIC) == wanted


def test_a_topic_that_is_deleted_while_it_is_read_is_reported_as_gone() -> None:
    with SimulatedKafka({"r": [log_of(5)]}) as cluster:
        tp = TopicPartition("r", 0)
        ours = {"bootstrap.servers": cluster.bootstrap, "topic.metadata.propagation.max.ms": "1"}
        consumer = RangeConsumer({**ours, "isolation.level": "read_committed"})
        consumer.assign({tp: 0}, ["value"])
        limit, reached = soon(), 0
        while reached < cluster.logs["r", 0].end and not limit.expired:
            reached = consumer.take(0.2).reached.get(tp, reached)
        cluster.remove_topic("r")
        gone: list[TopicPartition] = []
        while not gone and not limit.expired:
            gone += consumer.take(0.2).gone
        consumer.close()
        assert gone == [tp]
