"""T35 and T36 of the fault tests: rows that the Kafka client itself refuses, on a mock cluster."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from mock_cluster import Api, MockCluster
from mock_commit import MockKafka, commit, staged, values, visible_values_and_token

from kafka_eos_source.commit.interfaces import ProducerSession
from kafka_eos_source.commit.steps import Step
from kafka_eos_source.errors import InvalidRecordError


@pytest.fixture
def mock() -> Iterator[MockCluster]:
    with MockCluster() as cluster:
        yield cluster


@pytest.mark.parametrize("timestamps", [False, True], ids=["as a batch", "one by one"])
def test_t35_a_row_too_large_for_the_client_fails_the_batch_with_its_size_and_topic(
    mock: MockCluster, timestamps: bool
) -> None:
    """An error inside the client does not fail the commit by itself, so the product must raise it."""
    kafka, session = MockKafka(mock, message_max_bytes="2000"), ProducerSession()
    rows = ["small", "large " * 1000, "small too"]
    with pytest.raises(InvalidRecordError, match=r"6,000 bytes to topic 'out'.*message\.max\.bytes"):
        commit(kafka, session, rows=staged(rows, timestamps=timestamps))
    assert visible_values_and_token(kafka) == ([], None)
    assert kafka.calls == ["init", "token", "begin", "abort"]
    assert mock.requests()[Api.TXN_OFFSET_COMMIT] == 0
    assert session.producer is None


@pytest.mark.parametrize("timestamps", [False, True], ids=["as a batch", "one by one"])
def test_t36_a_producer_queue_of_ten_records_passes_a_thousand_rows(
    mock: MockCluster, timestamps: bool
) -> None:
    """The product waits while the queue is full, and enqueues every refused row again."""
    kafka, session = MockKafka(mock, queue_buffering_max_messages="10"), ProducerSession()
    rows = values(rows=1000)
    result = commit(kafka, session, rows=staged(rows, timestamps=timestamps))
    assert (result.step, result.transactions) == (Step.COMMITTED, 1)
    visible, token = visible_values_and_token(kafka)
    assert visible == sorted(rows)
    assert token is not None
    assert token.rows == 1000
    session.drop()
