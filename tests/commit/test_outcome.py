"""T20: the answer to a commit is wrong or lost, with the real producer on a simulated cluster.

Whatever the broker answered, the product aborts nothing. A new producer reads the token, and the batch is in
Kafka once, whether the first commit took effect or not.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal

import pytest

from kafka_eos_source.commit.machine import Result
from kafka_eos_source.commit.request import ProducerSession
from kafka_eos_source.errors import InvalidRecordError, OutcomeUnknownError, UnavailableError
from kafka_eos_source.kafka import producer
from kafka_eos_source.kafka.error_codes import ErrorCode
from kafka_eos_source.observe.figures import Step
from tests.commit.wire_commit import (
    RecordingClients,
    cluster,
    commit,
    far_off,
    shorten,
    staged,
    values,
    visible_values_and_token,
)
from tests.support.simulated_kafka import Fault, SimulatedKafka

ONCE = ["init", "token", "begin", "flush", "offsets", "commit"]
#: Errors of EndTxn for which nothing but the token tells the outcome.
COMMIT_ERRORS = [
    "UNKNOWN_SERVER_ERROR",
    "INVALID_TXN_STATE",
    "PRODUCER_FENCED",
    "INVALID_PRODUCER_ID_MAPPING",
]
QUICK = {"socket_timeout_ms": "1000"}


@pytest.fixture
def simulated() -> Iterator[SimulatedKafka]:
    with cluster() as made:
        yield made


@pytest.mark.parametrize("error", COMMIT_ERRORS)
def test_t20_a_failed_commit_that_had_no_effect_is_repeated(simulated: SimulatedKafka, error: str) -> None:
    """The token is not in Kafka, so the product writes the batch again."""
    kafka, session = RecordingClients(simulated), ProducerSession()
    kafka.faults["EndTxn"] = [Fault("error", getattr(ErrorCode, error))]
    assert commit(kafka, session) == Result(Step.COMMITTED, 2)
    assert kafka.calls == ONCE + ONCE
    assert simulated.received["EndTxn"] == 2, "something else ended a transaction"
    visible, token = visible_values_and_token(kafka)
    assert visible == sorted(values())
    assert token is not None
    assert token.transaction_number == 2
    session.drop()


@pytest.mark.parametrize("error", COMMIT_ERRORS)
def test_t20_a_failed_commit_that_took_effect_is_skipped_after_reading_the_token(
    simulated: SimulatedKafka, error: str
) -> None:
    """The commit took effect, but its answer was lost; the error answers the second request."""
    kafka, session = RecordingClients(simulated, **QUICK), ProducerSession()
    kafka.faults["EndTxn"] = [Fault("silent"), Fault("error", getattr(ErrorCode, error))]
    assert commit(kafka, session) == Result(Step.SKIPPED, 1, confirmed_by_token=True)
    assert kafka.calls == [*ONCE, "init", "token"]
    assert simulated.received["EndTxn"] == 2
    visible, token = visible_values_and_token(kafka)
    assert visible == sorted(values())
    assert token is not None
    assert token.transaction_number == 1
    session.drop()


def test_t20_a_commit_that_is_never_answered_is_unknown_and_the_replay_skips_the_batch(
    simulated: SimulatedKafka,
) -> None:
    """The deadline passes: the product claims and aborts nothing, and Spark's replay reads the token."""
    kafka, session, deadline = RecordingClients(simulated, **QUICK), ProducerSession(), far_off()
    kafka.faults["EndTxn"] = [Fault("silent")] * 5
    kafka.before["commit"] = lambda: shorten(deadline, 1)
    with pytest.raises(OutcomeUnknownError):
        commit(kafka, session, deadline=deadline)
    assert kafka.calls == ONCE
    assert session.producer is None
    assert commit(kafka, ProducerSession()) == Result(Step.SKIPPED, 0)
    assert visible_values_and_token(kafka)[0] == sorted(values())


def test_t20_a_commit_that_never_arrives_is_unknown_and_the_replay_writes_the_batch(
    simulated: SimulatedKafka,
) -> None:
    """The driver sees the same as with a lost answer, but the commit had no effect."""
    kafka, session, deadline = RecordingClients(simulated, **QUICK), ProducerSession(), far_off()

    def stop_the_broker() -> None:
        simulated.hung = {1}
        shorten(deadline, 1)

    kafka.before["commit"] = stop_the_broker
    with pytest.raises(OutcomeUnknownError):
        commit(kafka, session, deadline=deadline)
    assert kafka.calls == ONCE
    assert session.producer is None
    simulated.hung = set()
    replay = ProducerSession()
    assert commit(kafka, replay) == Result(Step.COMMITTED, 1)
    assert visible_values_and_token(kafka)[0] == sorted(values())
    replay.drop()


def test_a_producer_whose_commit_was_answered_at_once_is_reused(simulated: SimulatedKafka) -> None:
    """Only one InitProducerId request reaches the broker: the answers to EndTxn have the next epochs."""
    kafka, session = RecordingClients(simulated), ProducerSession()
    for batch_id in range(3):
        commit(kafka, session, batch_id)
    assert kafka.calls == ONCE + 2 * ["begin", "flush", "offsets", "commit"]
    assert simulated.received["InitProducerId"] == 1
    assert visible_values_and_token(kafka)[0] == sorted(values(0) + values(1) + values(2))
    session.drop()


def test_t18_after_a_commit_that_was_answered_at_the_second_try_comes_another_epoch(
    simulated: SimulatedKafka,
) -> None:
    """The first request took effect; a late copy of it cannot end the next transaction."""
    kafka, session = RecordingClients(simulated, **QUICK), ProducerSession()
    kafka.faults["EndTxn"] = [Fault("silent")]
    before = simulated.epoch
    assert commit(kafka, session, 0) == Result(Step.COMMITTED, 1)
    assert simulated.received["EndTxn"] == 2
    assert simulated.epoch == before + 2, "of InitProducerId and of EndTxn"
    assert commit(kafka, session, 1) == Result(Step.COMMITTED, 1)
    assert simulated.epoch == before + 3
    assert kafka.calls == [*ONCE, "begin", "flush", "offsets", "commit"]
    assert visible_values_and_token(kafka)[0] == sorted(values(0) + values(1))
    session.drop()


@pytest.mark.parametrize("version", [1, 2])
@pytest.mark.parametrize("call", ["token", "begin", "flush", "offsets", "commit"])
def test_t30_t31_coordinators_and_leaders_that_move_are_followed_within_the_transaction(
    version: Literal[1, 2], call: str
) -> None:
    """T30 and T31 without killing brokers."""
    with cluster(3, version) as simulated:
        kafka, session = RecordingClients(simulated), ProducerSession()
        kafka.before[call] = simulated.move
        assert commit(kafka, session) == Result(Step.COMMITTED, 1)
        assert kafka.calls == ONCE
        assert visible_values_and_token(kafka)[0] == sorted(values())
        session.drop()


@pytest.mark.parametrize("call", ["token", "begin", "offsets"])
def test_t29_brokers_that_stay_away_fail_the_batch_at_its_deadline(call: str) -> None:
    """The batch waits for a broker until its deadline, and no longer."""
    with cluster() as simulated:
        kafka, deadline = RecordingClients(simulated, **QUICK), far_off()

        def stop_the_broker() -> None:
            simulated.hung = {1}
            shorten(deadline, 1)

        kafka.before[call] = stop_the_broker
        with pytest.raises(UnavailableError, match="no answer from Kafka"):
            commit(kafka, ProducerSession(), deadline=deadline)
        simulated.hung = set()
        replay = ProducerSession()
        assert commit(kafka, replay).step is Step.COMMITTED
        assert visible_values_and_token(kafka)[0] == sorted(values())
        replay.drop()


# -- T35 and T36: rows that the client itself refuses, or must hold back --------------------------------


def test_t35_a_row_too_large_for_the_client_fails_the_batch_with_its_size_and_topic() -> None:
    with cluster() as simulated:
        kafka, session = RecordingClients(simulated, message_max_bytes="2000"), ProducerSession()
        rows = ["small", "large " * 1000, "small too"]
        with pytest.raises(InvalidRecordError, match=r"6,000 bytes to topic 'out'.*message\.max\.bytes"):
            commit(kafka, session, rows=staged(rows))
        assert visible_values_and_token(kafka) == ([], None)
        assert kafka.calls == ["init", "token", "begin", "flush", "abort"]
        assert simulated.received["TxnOffsetCommit"] == 0
        assert session.producer is None


def test_t36_a_queue_of_a_few_bytes_passes_a_thousand_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    """The product waits while the queue is full."""
    monkeypatch.setattr(producer, "_COLLECT_BYTES", 100)
    monkeypatch.setattr(producer, "_QUEUE_BYTES", 100)
    with cluster() as simulated:
        kafka, session = RecordingClients(simulated, batch_size="200"), ProducerSession()
        rows = values(rows=1000)
        result = commit(kafka, session, rows=staged(rows))
        assert (result.step, result.transactions) == (Step.COMMITTED, 1)
        visible, token = visible_values_and_token(kafka)
        assert visible == sorted(rows)
        assert token is not None
        assert token.rows == 1000
        session.drop()
