"""T20: what becomes of a batch when the answer to its commit cannot be believed, with the real client.

Whatever was answered, or not answered: nothing is aborted, a new producer asks the token, and both truths
come out right, the batch that is in Kafka and the batch that is not.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Literal

import pytest
from confluent_kafka import KafkaError, KafkaException
from mock_cluster import Api, MockCluster
from mock_commit import (
    APPLICATION_ID,
    OUTPUT,
    OUTPUT_PARTITIONS,
    MockKafka,
    WatchedProducer,
    commit,
    far_off,
    look,
    shorten,
    values,
)

from kafka_eos_source.commit.interfaces import ProducerSession
from kafka_eos_source.commit.machine import Result
from kafka_eos_source.commit.steps import Step
from kafka_eos_source.errors import OutcomeUnknownError, UnavailableError

ONCE = ["init", "token", "begin", "flush", "offsets", "commit"]
LOST_MS = 20_000  #: an answer that comes after `QUICK` has given it up

#: Errors of EndTxn: two that librdkafka has no rule for, one it calls fatal, one fenced, one for a new epoch.
UNBELIEVABLE = [
    "UNKNOWN",
    "REQUEST_TIMED_OUT",
    "INVALID_TXN_STATE",
    "PRODUCER_FENCED",
    "INVALID_PRODUCER_ID_MAPPING",
]
QUICK = {"socket_timeout_ms": "1000"}


@pytest.fixture
def mock() -> Iterator[MockCluster]:
    with MockCluster() as cluster:
        yield cluster


@pytest.mark.parametrize("error", UNBELIEVABLE)
def test_an_error_of_the_commit_that_is_true(mock: MockCluster, error: str) -> None:
    """T20: the transaction was not committed; the token is not there, and the batch is written again."""
    kafka, session = MockKafka(mock), ProducerSession()
    mock.answer(1, Api.END_TXN, (getattr(KafkaError, error), 0))
    assert commit(kafka, session) == Result(Step.COMMITTED, 2)
    assert kafka.calls == ONCE + ONCE
    assert mock.requests()[Api.END_TXN] == 2, "something else ended a transaction"
    visible, token = look(kafka)
    assert visible == sorted(values())
    assert token is not None
    assert token.transaction_number == 2
    session.drop()


@pytest.mark.parametrize("error", UNBELIEVABLE)
def test_an_error_of_the_commit_that_is_a_lie(mock: MockCluster, error: str) -> None:
    """T20: the commit took effect and its answer was lost, the error is that of the second request."""
    kafka, session = MockKafka(mock, **QUICK), ProducerSession()
    mock.answer(1, Api.END_TXN, (0, LOST_MS), (getattr(KafkaError, error), 0))
    assert commit(kafka, session) == Result(Step.SKIPPED, 1, confirmed_by_token=True)
    assert kafka.calls == [*ONCE, "init", "token"]
    assert mock.requests()[Api.END_TXN] == 2
    visible, token = look(kafka)
    assert visible == sorted(values())
    assert token is not None
    assert token.transaction_number == 1
    session.drop()


def test_a_commit_that_succeeded_after_the_transaction_had_failed_locally(mock: MockCluster) -> None:
    """T20: librdkafka's own contradiction, a fatal error for a commit that it knows to be done."""

    class Contradicting(MockKafka):
        def producer(self, transactional_id: str) -> WatchedProducer:
            producer = super().producer(transactional_id)
            if "init" not in self.calls:
                producer._producer._client = _Contradiction(producer._producer._client)
            return producer

    kafka, session = Contradicting(mock), ProducerSession()
    assert commit(kafka, session) == Result(Step.SKIPPED, 1, confirmed_by_token=True)
    assert kafka.calls == [*ONCE, "init", "token"]
    assert look(kafka)[0] == sorted(values())
    session.drop()


class _Contradiction:
    """A client whose commit takes effect and says otherwise."""

    def __init__(self, client: Any) -> None:
        self._client = client

    def __getattr__(self, name: str) -> Any:
        return getattr(self._client, name)

    def __len__(self) -> int:
        return len(self._client)

    def commit_transaction(self, timeout: float) -> None:
        self._client.commit_transaction(timeout)
        text = "Transaction commit succeeded on the broker but the transaction had already failed locally"
        raise KafkaException(KafkaError(KafkaError.UNKNOWN_PRODUCER_ID, text, True))


def test_a_commit_that_is_never_answered_is_unknown_and_the_replay_finds_it_there(mock: MockCluster) -> None:
    """T20: time runs out; nothing is claimed, nothing aborted, and Spark's replay asks again."""
    kafka, session, deadline = MockKafka(mock, **QUICK), ProducerSession(), far_off()
    mock.answer(1, Api.END_TXN, *[(0, LOST_MS)] * 5)
    kafka.before["commit"] = lambda: shorten(deadline, 1)
    with pytest.raises(OutcomeUnknownError):
        commit(kafka, session, deadline=deadline)
    assert kafka.calls == ONCE
    assert session.producer is None
    assert commit(kafka, ProducerSession()) == Result(Step.SKIPPED, 0)
    assert look(kafka)[0] == sorted(values())


def test_a_commit_that_never_arrives_is_unknown_and_the_replay_does_not_find_it(mock: MockCluster) -> None:
    """T20: the same from outside, and the other truth."""
    kafka, session, deadline = MockKafka(mock), ProducerSession(), far_off()

    def away() -> None:
        mock.set_down(1)
        shorten(deadline, 1)

    kafka.before["commit"] = away
    with pytest.raises(OutcomeUnknownError):
        commit(kafka, session, deadline=deadline)
    assert kafka.calls == ONCE
    assert session.producer is None
    mock.set_up(1)
    replay = ProducerSession()
    assert commit(kafka, replay) == Result(Step.COMMITTED, 1)
    assert look(kafka)[0] == sorted(values())
    replay.drop()


def test_a_clean_producer_is_used_again(mock: MockCluster) -> None:
    """The epoch rule against the client's own statistics."""
    kafka, session = MockKafka(mock), ProducerSession()
    for batch_id in range(3):
        commit(kafka, session, batch_id)
    assert kafka.calls == ONCE + 2 * ["begin", "flush", "offsets", "commit"]
    assert mock.requests()[Api.INIT_PRODUCER_ID] == 1
    assert look(kafka)[0] == sorted(values(0) + values(1) + values(2))
    session.drop()


def test_a_producer_whose_commit_was_answered_at_the_second_try_is_not(mock: MockCluster) -> None:
    """T18 without a proxy: the first request took effect; a third one could still be on its way."""
    kafka, session = MockKafka(mock, **QUICK), ProducerSession()
    mock.answer(1, Api.END_TXN, (0, LOST_MS))
    assert commit(kafka, session, 0) == Result(Step.COMMITTED, 1)
    assert mock.requests()[Api.END_TXN] == 2
    assert commit(kafka, session, 1) == Result(Step.COMMITTED, 1)
    assert kafka.calls == ONCE + ONCE
    assert look(kafka)[0] == sorted(values(0) + values(1))
    session.drop()


@pytest.mark.parametrize(
    ("kind", "call"),
    [
        ("transaction", "begin"),
        ("transaction", "offsets"),
        ("transaction", "commit"),
        ("group", "token"),
        ("group", "offsets"),
    ],
)
def test_a_coordinator_that_moves_is_followed(kind: Literal["transaction", "group"], call: str) -> None:
    """T30, T31 without brokers to kill: within the same transaction."""
    with MockCluster(3) as mock:
        mock.set_coordinator("transaction", APPLICATION_ID, 1)
        mock.set_coordinator("group", APPLICATION_ID, 2)
        kafka, session = MockKafka(mock), ProducerSession()
        kafka.before[call] = lambda: mock.set_coordinator(kind, APPLICATION_ID, 3)
        assert commit(kafka, session) == Result(Step.COMMITTED, 1)
        assert kafka.calls == ONCE
        assert look(kafka)[0] == sorted(values())
        session.drop()


@pytest.mark.parametrize("call", ["token", "begin", "offsets"])
def test_a_broker_that_is_away_for_good_is_named(call: str) -> None:
    """T29 without an election: the batch waits for the partition's leader, and no longer than it may."""
    with MockCluster(3) as mock:
        mock.set_coordinator("transaction", APPLICATION_ID, 1)
        mock.set_coordinator("group", APPLICATION_ID, 1)
        kafka, deadline = MockKafka(mock, **QUICK), far_off()
        for partition in range(OUTPUT_PARTITIONS):
            mock.set_leader(OUTPUT, partition, 1)

        def away() -> None:
            mock.set_down(1)
            shorten(deadline, 1)

        kafka.before[call] = away
        with pytest.raises(UnavailableError, match="no answer from Kafka"):
            commit(kafka, ProducerSession(), deadline=deadline)
        mock.set_up(1)
        replay = ProducerSession()
        assert commit(kafka, replay).step is Step.COMMITTED
        assert look(kafka)[0] == sorted(values())
        replay.drop()
