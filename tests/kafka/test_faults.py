"""The native client against brokers that refuse, lose, delay, cut and damage requests and answers."""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from functools import partial

import pyarrow as pa
import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from kafka_eos_source.errors import (
    AbortableError,
    FencedError,
    KafkaEosError,
    OutcomeUnknownError,
    UnavailableError,
)
from kafka_eos_source.kafka import connection, kernel, queue
from kafka_eos_source.kafka import producer as module
from kafka_eos_source.kafka.connection import Network
from kafka_eos_source.kafka.producer import TransactionalProducer
from kafka_eos_source.model import GroupOffset
from tests.kafka.wire_kit import (
    FAULT,
    PARTITIONS,
    ROWS,
    SECONDS,
    SOURCE,
    TOPIC,
    expected,
    planned,
    producer,
    rows,
    soon,
    write,
    write_until_committed,
)
from tests.support.fetched_log import OUT_OF_ORDER
from tests.support.simulated_kafka import (
    CONCURRENT,
    LAST_EPOCH,
    NOT_ENOUGH_REPLICAS,
    NOT_LEADER,
    UNSUPPORTED_VERSION,
    Fault,
    SimulatedKafka,
)

KERNEL = kernel.kernel()

KINDS = [
    "ApiVersions",
    "FindCoordinator",
    "Metadata",
    "InitProducerId",
    "AddPartitionsToTxn",
    "AddOffsetsToTxn",
    "Produce",
    "TxnOffsetCommit",
    "EndTxn",
]


@pytest.fixture(params=[2, 1], ids=["transaction.version=2", "transaction.version=1"])
def cluster(request: pytest.FixtureRequest) -> Iterator[SimulatedKafka]:
    with SimulatedKafka({TOPIC: PARTITIONS}, brokers=2, version=request.param) as made:
        yield made


@given(
    st.sampled_from([1, 2]),
    st.lists(st.tuples(st.sampled_from(KINDS), st.integers(1, 12), FAULT), max_size=8),
)
@example(2, [("Produce", number, Fault("error", NOT_LEADER)) for number in (1, 3, 5)])
@example(2, [("Produce", number, Fault("unsure", NOT_LEADER)) for number in (2, 4, 7, 12)])
@example(2, [("EndTxn", 1, Fault("lost")), ("EndTxn", 3, Fault("silent"))])
@example(2, [("EndTxn", 1, Fault("late", 60)), ("Produce", 4, Fault("late", 60))])
@example(1, [("Produce", 2, Fault("late", 60)), ("Produce", 3, Fault("late", 5))])
@example(1, [("EndTxn", 1, Fault("late", 5)), ("InitProducerId", 2, Fault("lost"))])
@settings(deadline=None, max_examples=60, suppress_health_check=[HealthCheck.too_slow])
def test_whatever_happens_to_requests_and_answers_each_transaction_is_exact(
    version: int, faults: list[tuple[str, int, Fault]]
) -> None:
    with SimulatedKafka({TOPIC: PARTITIONS}, brokers=2, version=version) as cluster:
        cluster.fault = planned(*faults)
        write_until_committed(cluster, 3)
        assert cluster.committed(TOPIC) == expected(3)
        if version >= 2:
            assert cluster.hanging() == 0


@given(
    st.sampled_from(
        ["Produce", "TxnOffsetCommit", "EndTxn", "InitProducerId", "Metadata", "FindCoordinator"]
    ),
    st.integers(1, 3),
    st.integers(0, 8 * 400),
)
@settings(deadline=None, max_examples=50, suppress_health_check=[HealthCheck.too_slow])
def test_a_damaged_answer_neither_loses_nor_doubles_records(kind: str, number: int, bit: int) -> None:
    """The requests themselves arrive; what the client believes must not tear a transaction."""
    with pytest.MonkeyPatch.context() as patch, SimulatedKafka({TOPIC: PARTITIONS}, brokers=2) as cluster:
        patch.setattr(connection, "_LONGEST_MUTE_SECONDS", 0.2)
        cluster.fault = planned((kind, number, Fault("damage", bit)))
        write_until_committed(cluster, 2)
        assert cluster.committed(TOPIC) == expected(2)


def test_a_later_batch_acknowledged_before_an_earlier_one_is_sent_again(cluster: SimulatedKafka) -> None:
    """The broker wrote both, and answered an error to the first: both are sent again, and recognised."""
    cluster.fault = planned(*[("Produce", number, Fault("unsure", 20)) for number in (4, 8)])
    client = producer(cluster)
    client.init(soon())
    client.begin()
    client.send(rows(0), TOPIC, soon())
    client.flush(soon())
    assert client.queued == 0
    client.send_offsets([GroupOffset(SOURCE, 0, "token")], "group", soon())
    client.commit(soon())
    client.close()
    assert cluster.committed(TOPIC) == expected(1)


def test_an_acknowledgement_of_a_later_batch_is_none_of_the_earlier_ones(cluster: SimulatedKafka) -> None:
    """Not even if a leader took the later one alone: nothing is forgotten before its own acknowledgement."""
    client = producer(cluster)
    client.init(soon())
    client.begin()
    client.send(rows(0), TOPIC, soon())
    client._encode(soon())
    sends = client._queue
    tp, state = next(iter(sends._partitions.items()))
    first, second = state.waiting[0], state.waiting[1]
    state.sent, before = 2, sends.records
    sends._on_batch(tp, second, 0, 100, None)
    assert (state.waiting[0], sends.records, sends.acknowledged) == (first, before, 0)
    assert sends._must_drain
    client.close()


def test_below_version_2_nothing_ends_a_transaction_with_records_on_the_way() -> None:
    """A record that arrives after the end could join the next transaction; the next epoch ends this one."""
    with SimulatedKafka({TOPIC: PARTITIONS}, version=1) as cluster:
        client = producer(cluster)
        client.init(soon())
        client.begin()
        client.send(rows(0), TOPIC, soon())
        cluster.fault = lambda kind: Fault("silent") if kind == "Produce" else None
        with pytest.raises(UnavailableError):
            client.flush(soon(0.1))
        client.abort(soon())
        assert cluster.received["EndTxn"] == 0
        client.close()
        cluster.fault = lambda kind: None
        write_until_committed(cluster, 1)
        assert cluster.committed(TOPIC) == expected(1)


def test_pipelined_requests_survive_leaders_that_move(cluster: SimulatedKafka) -> None:
    """Without an abort: the batches are sent again, in order, to the new leaders."""
    cluster.fault = planned(*[("Produce", number, Fault("move")) for number in (4, 9, 10, 17)])
    client = producer(cluster)
    client.init(soon())
    for number in range(3):
        write(client, number)
    client.close()
    assert cluster.committed(TOPIC) == expected(3)


@pytest.mark.parametrize("code", [NOT_LEADER, NOT_ENOUGH_REPLICAS, CONCURRENT, OUT_OF_ORDER])
def test_the_first_batch_of_a_partition_goes_alone_because_any_sequence_may_follow(
    cluster: SimulatedKafka, code: int
) -> None:
    """A leader that does not know the producer would take the second batch after it refused the first."""
    refused = 1 if code == OUT_OF_ORDER else 3
    cluster.fault = planned(*[("Produce", number + 1, Fault("error", code)) for number in range(refused)])
    client = producer(cluster)
    client.init(soon())
    if code == OUT_OF_ORDER:  # for the first batch: the leader lost what it knew, and the transaction is void
        with pytest.raises(AbortableError):
            write(client, 0)
        client.abort(soon())
        assert cluster.committed(TOPIC) == expected(0)
    else:
        write(client, 0)
        assert cluster.committed(TOPIC) == expected(1)
    client.close()


def test_an_answer_that_leaves_out_a_partition_is_no_acknowledgement(
    cluster: SimulatedKafka, monkeypatch: pytest.MonkeyPatch
) -> None:
    answer = cluster._on_TxnOffsetCommit

    def without_partitions(*request: object) -> dict[str, object]:
        return {**answer(*request), "topics": []}  # type: ignore[arg-type]

    monkeypatch.setattr(cluster, "_on_TxnOffsetCommit", without_partitions)
    client = producer(cluster)
    client.init(soon())
    client.begin()
    complaints: list[str] = []
    monkeypatch.setattr(client._cluster, "complain", lambda what: complaints.append(str(what)))
    with pytest.raises(UnavailableError):
        client.send_offsets([GroupOffset(SOURCE, 1, "token")], "group", soon(0.5))
    assert any("does not mention source" in each for each in complaints)
    client.close()


def finish(zombie: TransactionalProducer, step: str) -> None:
    """Continues a transaction from a step on."""
    if step == "send":
        zombie.flush(soon())
    if step != "commit":
        zombie.send_offsets([GroupOffset(SOURCE, 0, "zombie")], "group", soon())
    zombie.commit(soon())


def test_an_answer_with_another_correlation_id_is_no_answer(cluster: SimulatedKafka) -> None:
    """The first bits of an answer are its correlation id; the request is sent again on another connection."""
    cluster.fault = planned(("EndTxn", 1, Fault("damage", 0)))
    client = producer(cluster)
    client.init(soon())
    write(client, 0)
    assert cluster.received["EndTxn"] == 2
    client.close()
    assert cluster.committed(TOPIC) == expected(1)


def test_an_empty_transaction_needs_no_end(cluster: SimulatedKafka) -> None:
    """Brokers have not heard of it, and answer INVALID_TXN_STATE to its commit."""
    client = producer(cluster)
    client.init(soon())
    used = set()
    for _ in range(2):
        client.begin()
        used.add(client._transaction.epoch)
        client.commit(soon())
    write(client, 0)
    assert len(used | {cluster.epoch}) == 3, "each transaction has an epoch of its own nevertheless"
    client.close()
    assert cluster.committed(TOPIC) == expected(1)


def test_a_zombie_is_fenced_at_every_request(cluster: SimulatedKafka) -> None:
    for step in ("send", "send_offsets", "commit"):
        zombie = producer(cluster)
        zombie.init(soon())
        zombie.begin()
        zombie.send(rows(0), TOPIC, soon())
        if step != "send":
            zombie.flush(soon())
        if step == "commit":
            zombie.send_offsets([GroupOffset(SOURCE, 0, "zombie")], "group", soon())
        owner = producer(cluster)
        owner.init(soon())
        with pytest.raises(KafkaEosError) as raised:
            finish(zombie, step)
        assert FencedError in (type(raised.value), type(raised.value.__cause__))
        zombie.abort(soon())
        zombie.close()
        owner.close()
    assert cluster.committed(TOPIC) == expected(0)
    assert cluster.offsets == {}


def test_the_epoch_wraps_to_another_producer_id(cluster: SimulatedKafka) -> None:
    cluster.epoch = LAST_EPOCH - 2
    write_until_committed(cluster, 5)
    assert cluster.producer_id == 1001
    assert cluster.committed(TOPIC) == expected(5)


def test_sequence_numbers_wrap(cluster: SimulatedKafka, monkeypatch: pytest.MonkeyPatch) -> None:
    """A log that does not know the producer accepts any first sequence number, so the test can begin late."""
    made = queue._Partition
    monkeypatch.setattr(queue, "_Partition", partial(made, sequence=2**31 - 7))
    client = producer(cluster)
    client.init(soon())
    write(client, 0)
    client.close()
    assert cluster.committed(TOPIC) == expected(1)


def test_a_version_that_was_lowered_before_the_transaction_began_aborts_it() -> None:
    with SimulatedKafka({TOPIC: PARTITIONS}) as cluster:
        client = producer(cluster)
        client.init(soon())
        write(client, 0)
        cluster.version = 1
        with pytest.raises(AbortableError, match=r"transaction\.version was lowered from 2 to 1"):
            write(client, 1)
        client.abort(soon())
        client.close()
        write_until_committed(cluster, 2)
        assert cluster.committed(TOPIC) == expected(2)


def test_a_version_that_was_lowered_within_the_transaction_aborts_it() -> None:
    """Brokers then refuse the newer requests; the next transaction uses the older ones."""
    with SimulatedKafka({TOPIC: PARTITIONS}) as cluster:
        client = producer(cluster)
        client.init(soon())
        client.begin()
        client.send(rows(0), TOPIC, soon())
        cluster.version = 1
        cluster.fault = planned(("Produce", 1, Fault("error", UNSUPPORTED_VERSION)))
        with pytest.raises(AbortableError):
            client.flush(soon())
        client.abort(soon())
        client.close()
        write_until_committed(cluster, 2)
        assert cluster.committed(TOPIC) == expected(2)


def test_a_version_that_was_raised_is_used_by_the_transaction_after_the_next(cluster: SimulatedKafka) -> None:
    cluster.version = 1
    client = producer(cluster)
    client.init(soon())
    write(client, 0)
    cluster.version = 2
    write(client, 1)
    before = cluster.received["AddOffsetsToTxn"]
    write(client, 2)
    assert cluster.received["AddOffsetsToTxn"] == before, "version 2 needs no such request"
    client.close()
    assert cluster.committed(TOPIC) == expected(3)


@pytest.mark.parametrize("kind", ["InitProducerId", "Produce", "TxnOffsetCommit", "EndTxn"])
@pytest.mark.parametrize("fault", [Fault("silent"), Fault("error", CONCURRENT), Fault("cut")], ids=str)
def test_no_call_outlives_its_deadline(cluster: SimulatedKafka, kind: str, fault: Fault) -> None:
    client = producer(cluster)
    client.init(soon())
    client.begin()
    client.send(rows(0), TOPIC, soon())
    cluster.fault = lambda name: fault if name == kind else None
    limit = soon(0.5)
    calls: dict[str, Callable[[], object]] = {
        "InitProducerId": lambda: producer(cluster).init(limit),
        "Produce": lambda: client.flush(limit),
        "TxnOffsetCommit": lambda: client.send_offsets([GroupOffset(SOURCE, 0, "token")], "group", limit),
        "EndTxn": lambda: client.commit(limit),
    }
    if kind == "EndTxn":
        client.flush(soon())
    ended = threading.Event()

    def call() -> None:
        with pytest.raises((UnavailableError, OutcomeUnknownError)):
            calls[kind]()
        ended.set()

    thread = threading.Thread(target=call, daemon=True)
    thread.start()
    assert ended.wait(SECONDS), f"{kind} hangs"
    assert limit.expired
    client.close()


def test_a_broker_that_accepts_connections_and_says_nothing_does_not_exceed_the_deadline(
    cluster: SimulatedKafka,
) -> None:
    cluster.fault = lambda kind: Fault("silent") if kind == "ApiVersions" else None
    client = producer(cluster, **{"socket.connection.setup.timeout.ms": "60000"})
    limit = soon(0.3)
    begun = time.monotonic()
    with pytest.raises(UnavailableError):
        client.init(limit)
    assert time.monotonic() - begun < SECONDS, "the connection's own limit is a minute"
    client.close()


def test_idle_connections_that_brokers_closed_cost_no_error(cluster: SimulatedKafka) -> None:
    client = producer(cluster)
    client.init(soon())
    write(client, 0)
    cluster.drop_connections()
    write(client, 1)
    client.close()
    assert cluster.committed(TOPIC) == expected(2)


def test_waiting_without_a_connection_returns_at_once() -> None:
    """Nothing can arrive; the callers pace themselves."""
    network = Network()
    begun = time.monotonic()
    network.wait(SECONDS)
    assert time.monotonic() - begun < SECONDS / 2
    network.close()


def test_the_queue_bounds_its_memory(cluster: SimulatedKafka, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows are encoded and sent while more arrive."""
    monkeypatch.setattr(module, "_COLLECT_BYTES", 1_000)
    monkeypatch.setattr(module, "_QUEUE_BYTES", 4_000)
    client = producer(cluster)
    client.init(soon())
    client.begin()
    most = 0
    for _ in range(50):
        client.send(rows(0), TOPIC, soon())
        most = max(most, client._queue.bytes)
    client.flush(soon())
    assert most <= 4_000
    assert client.enqueued == 50 * ROWS
    client.abort(soon())
    client.close()


def test_an_answer_does_not_cost_a_look_at_every_partition(monkeypatch: pytest.MonkeyPatch) -> None:
    """With 1,000 partitions and many answers, such looks would be most of the client's work."""
    partitions = 300
    looks = Counter[str]()
    is_due = queue._Partition.is_due.fget
    assert is_due is not None

    def counted(state: queue._Partition) -> bool:
        looks["is_due"] += 1
        return bool(is_due(state))

    monkeypatch.setattr(queue._Partition, "is_due", property(counted))
    monkeypatch.setattr(queue, "_ENOUGH_BYTES", 2000)  # so that there are many requests
    with SimulatedKafka({TOPIC: partitions}) as cluster:
        client = producer(cluster)
        client.init(soon())
        client.begin()
        numbers = pa.array([number % partitions for number in range(10 * partitions)], pa.int32())
        values = pa.array([b"x" * 100] * len(numbers), pa.binary())
        client.send(pa.record_batch({"value": values, "partition": numbers}), TOPIC, soon(60))
        client.flush(soon(60))
        client.close()
        requests = cluster.received["Produce"]
    assert looks["is_due"] < 5 * len(numbers) < requests * partitions
