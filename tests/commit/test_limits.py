"""T35 and T36 of the fault tests: rows that the Kafka client itself refuses, or must hold back."""

from __future__ import annotations

import pytest

from kafka_eos_source.commit.request import ProducerSession
from kafka_eos_source.errors import InvalidRecordError
from kafka_eos_source.kafka.wire import producer
from kafka_eos_source.observe.steps import Step
from tests.commit.wire_commit import (
    RecordingClients,
    cluster,
    commit,
    staged,
    values,
    visible_values_and_token,
)


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
