"""The first batch of a new query replaces all tokens of the query that used the group before."""

from __future__ import annotations

from dataclasses import replace

import pytest

from kafka_eos_source.commit.machine import Commit
from kafka_eos_source.commit.request import CommitRequest, ProducerSession
from kafka_eos_source.errors import OutcomeUnknownError
from kafka_eos_source.model import TopicPartition
from kafka_eos_source.observe.steps import Step
from kafka_eos_source.runtime.deadline import Deadline
from tests.commit.model_broker import Fault, ModelBroker, ModelRows, no_sleep
from tests.commit.test_transaction import IN, OUT, broker_with_genesis, commit, request, rows

OLD = TopicPartition("old", 0)


@pytest.fixture
def broker() -> ModelBroker:
    """A broker with batches 0 to 3 of ``query``, which also wrote another topic earlier."""
    broker = broker_with_genesis()
    broker.topics["old"] = 1
    session = ProducerSession()
    for batch_id in range(4):
        commit(broker, session, batch_id)
    broker.group[OLD] = replace(broker.group[OUT], tp=OLD, offset=77)
    return broker


def run(broker: ModelBroker, request: CommitRequest, staged: list[str]) -> Step:
    deadline = Deadline.after_seconds(5)
    machine = Commit(request, ModelRows(staged), broker, ProducerSession(), deadline, sleep=no_sleep)
    return machine.run().step


def of_new_query(batch_id: int) -> CommitRequest:
    """Returns a batch of the new query, whose batch 0 starts where batch 3 of the other query ended."""
    later = request(4 + batch_id)
    return replace(later, batch=replace(later.batch, query_id="new", batch_id=batch_id))


def test_the_next_driver_of_an_adopting_query_finds_its_token(broker: ModelBroker) -> None:
    adopting = replace(of_new_query(0), foreign_query="adopt")
    assert run(broker, adopting, rows(4)) is Step.COMMITTED
    assert broker.group[OLD].offset == 77, "the offset of the other query is kept"
    for again in (of_new_query(0), adopting):
        assert run(broker, again, rows(4)) is Step.SKIPPED
    assert run(broker, of_new_query(1), rows(5)) is Step.COMMITTED
    assert broker.log == [row for batch_id in range(6) for row in rows(batch_id)]
    assert broker.group[IN].offset == 60


@pytest.mark.parametrize("anchors", [("old", "out"), ("out", "old")])
def test_a_batch_write_finds_its_own_token_after_a_write_to_another_topic(anchors: tuple[str, str]) -> None:
    """The commit of the second write is not answered: it must find its own token, not that of the first."""
    broker = ModelBroker()
    broker.topics["old"] = 1
    for number, topic in enumerate(anchors):
        if number == 1:
            broker.faults.append(Fault("commit", OutcomeUnknownError("lost"), after=True))
        write = replace(request(0), sources=(), anchor=TopicPartition(topic, 0))
        batch = replace(write.batch, query_id=f"once:{number}", once=True, promised=False)
        run(broker, replace(write, batch=batch), rows(number))
    assert broker.log == rows(0) + rows(1)
