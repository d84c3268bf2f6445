"""T20: the answer to a commit is wrong or lost, with the real client.

Whatever the broker answered, the product aborts nothing. A new producer reads the token, and the batch is in
Kafka once, whether the first commit took effect or not.
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
    shorten,
    values,
    visible_values_and_token,
)

from kafka_eos_source.commit.interfaces import ProducerSession
from kafka_eos_source.commit.machine import Result
from kafka_eos_source.commit.steps import Step
from kafka_eos_source.errors import OutcomeUnknownError, UnavailableError

ONCE = ["init", "token", "begin", "flush", "offsets", "commit"]
LOST_MS = 20_000  #: an answer that comes after the timeout of `QUICK`

#: Errors of EndTxn: two that librdkafka does not classify, one fatal, one fenced, one that needs a new epoch.
COMMIT_ERRORS = [
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


@pytest.mark.parametrize("error", COMMIT_ERRORS)
def test_t20_a_failed_commit_that_had_no_effect_is_repeated(mock: MockCluster, error: str) -> None:
    """The token is not in Kafka, so the product writes the batch again."""
    kafka, session = MockKafka(mock), ProducerSession()
    mock.answer(1, Api.END_TXN, (getattr(KafkaError, error), 0))
    assert commit(kafka, session) == Result(Step.COMMITTED, 2)
    assert kafka.calls == ONCE + ONCE
    assert mock.requests()[Api.END_TXN] == 2, "something else ended a transaction"
    visible, token = visible_values_and_token(kafka)
    assert visible == sorted(values())
    assert token is not None
    assert token.transaction_number == 2
    session.drop()


@pytest.mark.parametrize("error", COMMIT_ERRORS)
def test_t20_a_failed_commit_that_took_effect_is_skipped_after_reading_the_token(
    mock: MockCluster, error: str
) -> None:
    """The commit took effect, but its answer was lost; the error answers the second request."""
    kafka, session = MockKafka(mock, **QUICK), ProducerSession()
    mock.answer(1, Api.END_TXN, (0, LOST_MS), (getattr(KafkaError, error), 0))
    assert commit(kafka, session) == Result(Step.SKIPPED, 1, confirmed_by_token=True)
    assert kafka.calls == [*ONCE, "init", "token"]
    assert mock.requests()[Api.END_TXN] == 2
    visible, token = visible_values_and_token(kafka)
    assert visible == sorted(values())
    assert token is not None
    assert token.transaction_number == 1
    session.drop()


def test_t20_a_fatal_error_for_a_commit_that_took_effect_is_resolved_by_the_token(mock: MockCluster) -> None:
    """librdkafka can report a fatal error for a commit of which it knows that it took effect."""

    class KafkaWithContradictingClient(MockKafka):
        def producer(self, transactional_id: str) -> WatchedProducer:
            producer = super().producer(transactional_id)
            if "init" not in self.calls:
                producer._producer._client = _ContradictingClient(producer._producer._client)
            return producer

    kafka, session = KafkaWithContradictingClient(mock), ProducerSession()
    assert commit(kafka, session) == Result(Step.SKIPPED, 1, confirmed_by_token=True)
    assert kafka.calls == [*ONCE, "init", "token"]
    assert visible_values_and_token(kafka)[0] == sorted(values())
    session.drop()


class _ContradictingClient:
    """A client whose commit takes effect and raises an error."""

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


def test_t20_a_commit_that_is_never_answered_is_unknown_and_the_replay_skips_the_batch(
    mock: MockCluster,
) -> None:
    """The deadline passes: the product claims and aborts nothing, and Spark's replay reads the token."""
    kafka, session, deadline = MockKafka(mock, **QUICK), ProducerSession(), far_off()
    mock.answer(1, Api.END_TXN, *[(0, LOST_MS)] * 5)
    kafka.before["commit"] = lambda: shorten(deadline, 1)
    with pytest.raises(OutcomeUnknownError):
        commit(kafka, session, deadline=deadline)
    assert kafka.calls == ONCE
    assert session.producer is None
    assert commit(kafka, ProducerSession()) == Result(Step.SKIPPED, 0)
    assert visible_values_and_token(kafka)[0] == sorted(values())


def test_t20_a_commit_that_never_arrives_is_unknown_and_the_replay_writes_the_batch(
    mock: MockCluster,
) -> None:
    """The driver sees the same as with a lost answer, but the commit had no effect."""
    kafka, session, deadline = MockKafka(mock), ProducerSession(), far_off()

    def stop_the_broker() -> None:
        mock.set_down(1)
        shorten(deadline, 1)

    kafka.before["commit"] = stop_the_broker
    with pytest.raises(OutcomeUnknownError):
        commit(kafka, session, deadline=deadline)
    assert kafka.calls == ONCE
    assert session.producer is None
    mock.set_up(1)
    replay = ProducerSession()
    assert commit(kafka, replay) == Result(Step.COMMITTED, 1)
    assert visible_values_and_token(kafka)[0] == sorted(values())
    replay.drop()


def test_a_producer_whose_commit_was_answered_at_once_is_reused(mock: MockCluster) -> None:
    """The epoch rule: only one INIT_PRODUCER_ID request reaches the broker."""
    kafka, session = MockKafka(mock), ProducerSession()
    for batch_id in range(3):
        commit(kafka, session, batch_id)
    assert kafka.calls == ONCE + 2 * ["begin", "flush", "offsets", "commit"]
    assert mock.requests()[Api.INIT_PRODUCER_ID] == 1
    assert visible_values_and_token(kafka)[0] == sorted(values(0) + values(1) + values(2))
    session.drop()


def test_t18_a_producer_whose_commit_was_answered_at_the_second_try_is_not_reused(mock: MockCluster) -> None:
    """The first request took effect; a late copy of it could end the next transaction."""
    kafka, session = MockKafka(mock, **QUICK), ProducerSession()
    mock.answer(1, Api.END_TXN, (0, LOST_MS))
    assert commit(kafka, session, 0) == Result(Step.COMMITTED, 1)
    assert mock.requests()[Api.END_TXN] == 2
    assert commit(kafka, session, 1) == Result(Step.COMMITTED, 1)
    assert kafka.calls == ONCE + ONCE
    assert visible_values_and_token(kafka)[0] == sorted(values(0) + values(1))
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
def test_t30_t31_a_coordinator_that_moves_is_followed_within_the_transaction(
    kind: Literal["transaction", "group"], call: str
) -> None:
    """T30 and T31 without killing brokers."""
    with MockCluster(3) as mock:
        mock.set_coordinator("transaction", APPLICATION_ID, 1)
        mock.set_coordinator("group", APPLICATION_ID, 2)
        kafka, session = MockKafka(mock), ProducerSession()
        kafka.before[call] = lambda: mock.set_coordinator(kind, APPLICATION_ID, 3)
        assert commit(kafka, session) == Result(Step.COMMITTED, 1)
        assert kafka.calls == ONCE
        assert visible_values_and_token(kafka)[0] == sorted(values())
        session.drop()


@pytest.mark.parametrize("call", ["token", "begin", "offsets"])
def test_t29_a_leader_that_stays_away_fails_the_batch_at_its_deadline(call: str) -> None:
    """No new leader is elected: the batch waits for the old one until its deadline, and no longer."""
    with MockCluster(3) as mock:
        mock.set_coordinator("transaction", APPLICATION_ID, 1)
        mock.set_coordinator("group", APPLICATION_ID, 1)
        kafka, deadline = MockKafka(mock, **QUICK), far_off()
        for partition in range(OUTPUT_PARTITIONS):
            mock.set_leader(OUTPUT, partition, 1)

        def stop_the_broker() -> None:
            mock.set_down(1)
            shorten(deadline, 1)

        kafka.before[call] = stop_the_broker
        with pytest.raises(UnavailableError, match="no answer from Kafka"):
            commit(kafka, ProducerSession(), deadline=deadline)
        mock.set_up(1)
        replay = ProducerSession()
        assert commit(kafka, replay).step is Step.COMMITTED
        assert visible_values_and_token(kafka)[0] == sorted(values())
        replay.drop()
