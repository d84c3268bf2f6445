"""The states and epochs of the native client's transactions."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kafka_eos_source.errors import (
    AuthorizationError,
    FencedError,
    OutcomeUnknownError,
    RetriableError,
    UnavailableError,
)
from kafka_eos_source.kafka import producer as module
from kafka_eos_source.kafka import transaction
from kafka_eos_source.kafka.producer import State
from kafka_eos_source.model import GroupOffset, TopicPartition
from tests.kafka.wire_kit import producer, rows, soon
from tests.support.simulated_kafka import FENCED, NOT_COORDINATOR, UNKNOWN_TOPIC, Fault, SimulatedKafka

NOT_AUTHORIZED = 53
OFFSETS = [GroupOffset(TopicPartition("source", 0), 1, "token")]


@given(st.lists(st.tuples(st.sampled_from([0, 1, 2]), st.booleans(), st.booleans()), max_size=12))
@settings(deadline=None)
def test_no_two_transactions_have_the_same_epoch(batches: list[tuple[int, bool, bool]]) -> None:
    """Also when ``transaction.version`` is raised in between, and answers are lost."""
    with SimulatedKafka({}) as cluster:
        cluster.version = 0
        client = producer(cluster)
        client.init(soon())
        used: list[tuple[int, int]] = []
        faults: dict[str, Fault] = {}
        cluster.fault = lambda kind: faults.pop(kind, None)
        for version, init_fails, end_is_lost in batches:
            cluster.version = max(cluster.version, version)
            if init_fails:
                faults["InitProducerId"] = Fault("error", NOT_COORDINATOR) if version else Fault("lost")
            client.begin()
            used.append((client._transaction.producer_id, client._transaction.epoch))
            client.send_offsets(OFFSETS, "group", soon())
            if end_is_lost:
                faults["EndTxn"] = Fault("lost")
            client.commit(soon())
            assert client.is_clean()
            faults.clear()
        client.close()
        assert len(set(used)) == len(used)


def test_every_failure_of_a_commit_leaves_its_outcome_unknown() -> None:
    for code, kind in ((FENCED, FencedError), (NOT_AUTHORIZED, AuthorizationError)):
        with SimulatedKafka({}) as cluster:
            client = producer(cluster)
            client.init(soon())
            client.begin()
            client.send_offsets(OFFSETS, "group", soon())
            cluster.fault = lambda name, code=code: Fault("error", code) if name == "EndTxn" else None  # type: ignore[misc]
            with pytest.raises(OutcomeUnknownError) as raised:
                client.commit(soon())
            assert isinstance(raised.value.__cause__, kind)
            assert not client.is_clean()
            asked = cluster.received["EndTxn"]
            client.abort(soon())
            assert cluster.received["EndTxn"] == asked, "nothing may abort a transaction of unknown outcome"
            client.close()


def test_a_coordinator_that_does_not_answer_is_asked_again_by_the_next_try(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """`begin` gives up soon, because only the caller knows the deadline of the commit."""
    monkeypatch.setattr(module, "_BEGIN_SECONDS", 0.2)
    with SimulatedKafka({}) as cluster:
        client = producer(cluster)
        client.init(soon())
        cluster.drop_connections()
        cluster.fault = lambda kind: Fault("cut")
        with pytest.raises(RetriableError) as raised:
            client.begin()
        assert isinstance(raised.value.__cause__, UnavailableError)
        client.close()


def test_a_fenced_producer_says_so() -> None:
    with SimulatedKafka({}, version=1) as cluster:
        client = producer(cluster)
        client.init(soon())
        client.begin()
        client.send_offsets(OFFSETS, "group", soon())
        client.commit(soon())
        other = producer(cluster)
        other.init(soon())
        with pytest.raises(FencedError):
            client.begin()
        client.close()
        other.close()


@pytest.mark.parametrize("epoch", [-1, 0])
def test_an_epoch_that_does_not_grow_is_not_used_again(monkeypatch: pytest.MonkeyPatch, epoch: int) -> None:
    """A broker that returned the old epoch would let records of two transactions look like one."""
    with SimulatedKafka({}) as cluster:
        answer = cluster._on_EndTxn
        client = producer(cluster)
        client.init(soon())

        def with_epoch(*request: Any) -> dict[str, Any]:
            return {**answer(*request), "producer_epoch": epoch}

        client.begin()
        client.send_offsets(OFFSETS, "group", soon())
        monkeypatch.setattr(cluster, "_on_EndTxn", with_epoch)
        first = client._transaction.epoch
        client.commit(soon())
        asked = cluster.received["InitProducerId"]
        client.begin()
        assert cluster.received["InitProducerId"] == asked + 1
        assert client._transaction.epoch > first
        client.close()


def test_every_state_has_its_moves_in_the_table() -> None:
    assert set(module._MOVES) == set(State)


@pytest.mark.parametrize("then", ["it is known", "it is unknown once"])
def test_a_silent_broker_does_not_use_up_the_lookup_of_a_topic(
    monkeypatch: pytest.MonkeyPatch, then: str
) -> None:
    """How long an unknown topic may be new counts from the first such answer, and limits no request."""
    monkeypatch.setattr(transaction, "_NEW_TOPIC_SECONDS", 0.2)
    with SimulatedKafka({"t": 2}, brokers=2) as cluster:
        client = producer(cluster, **{"socket.timeout.ms": "500"})
        client.init(soon())
        faults = [Fault("silent")]
        if then == "it is unknown once":
            faults.append(Fault("error", UNKNOWN_TOPIC))
        cluster.fault = lambda kind: faults.pop(0) if kind == "Metadata" and faults else None
        client.check_partitions({"t": 1}, soon(5.0))
        assert not faults
        client.close()


@pytest.mark.parametrize("seconds", [20.0, 0.3])
def test_a_topic_that_stays_unknown_is_missing(monkeypatch: pytest.MonkeyPatch, seconds: float) -> None:
    monkeypatch.setattr(transaction, "_NEW_TOPIC_SECONDS", 0.2)
    with SimulatedKafka({}) as cluster:
        client = producer(cluster)
        with pytest.raises(UnavailableError, match="looking up output topic 'missing'") as raised:
            client.check_partitions({"missing": -1}, soon(seconds))
        assert "create the topic" in str(raised.value.fix)
        client.close()


@pytest.mark.parametrize("kind", ["TxnOffsetCommit", "AddPartitionsToTxn"])
@pytest.mark.parametrize("answers", [2, 1_000_000])
def test_a_topic_that_a_coordinator_does_not_know_is_new_or_was_deleted(
    monkeypatch: pytest.MonkeyPatch, kind: str, answers: int
) -> None:
    """The transaction of a deleted topic must be aborted before it times out, which fences the producer."""
    monkeypatch.setattr(transaction, "_NEW_TOPIC_SECONDS", 0.3)
    with SimulatedKafka({"t": 3}, version=1) as cluster:
        client = producer(cluster)
        client.init(soon())
        client.begin()
        faults = iter([Fault("error", UNKNOWN_TOPIC)] * answers)
        cluster.fault = lambda name: next(faults, None) if name == kind else None
        deadline = soon()

        def write() -> None:
            client.send(rows(0), "t", deadline)
            client.flush(deadline)
            client.send_offsets(OFFSETS, "group", deadline)

        if answers == 2:
            write()
        else:
            with pytest.raises(UnavailableError, match="unknown to"):
                write()
            assert not deadline.expired, "the caller takes this for brokers that do not answer"
        client.close()
