"""The transactions of the native client, against a model of the coordinator."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from kafka.protocol.producer import EndTxnRequest, InitProducerIdRequest

from kafka_eos_source.errors import (
    AuthorizationError,
    FencedError,
    OutcomeUnknownError,
    RetriableError,
    UnavailableError,
)
from kafka_eos_source.kafka import kernel
from kafka_eos_source.kafka.config import producer_config
from kafka_eos_source.kafka.wire import producer as module
from kafka_eos_source.kafka.wire.cluster import Cluster, TemporaryError
from kafka_eos_source.kafka.wire.producer import State, WireProducer
from kafka_eos_source.runtime.deadline import Deadline

KERNEL = kernel.choice().kernel
pytestmark = pytest.mark.skipif(KERNEL is None, reason=kernel.choice().why_not)

FENCED, NOT_COORDINATOR, NOT_AUTHORIZED = 90, 16, 53


class Answer:
    def __init__(self, **fields: Any) -> None:
        self.__dict__.update(fields)


class Coordinator(Cluster):
    """A cluster with one broker, which coordinates one transactional id.

    Attributes:
        finalized: the finalized ``transaction.version``.
        faults: what the next requests answer: an error code, or None for no answer.
        ended: producer id, epoch and outcome of each EndTxn that took effect.
    """

    def __init__(self) -> None:
        super().__init__({"bootstrap.servers": "127.0.0.1:1"})
        self.finalized = 2
        self.epoch = -1
        self.faults: list[int | None] = []
        self.ended: list[tuple[int, int, bool]] = []

    def coordinator(self, kind: int, key: str, deadline: Deadline) -> Any:
        return self

    def version(self, kind: Any, highest: int, lowest: int = 0) -> int:
        return highest

    def features(self, connection: Any, deadline: Deadline) -> dict[str, int]:
        return {"transaction.version": self.finalized}

    def ask(self, connection: Any, request: Any, deadline: Deadline) -> Any:
        fault = self.faults.pop(0) if self.faults else 0
        if fault:
            return Answer(error_code=fault)
        if isinstance(request, InitProducerIdRequest):
            if request.producer_epoch not in (-1, self.epoch):
                return Answer(error_code=FENCED)
            self.epoch += 1
            answer = Answer(error_code=0, producer_id=7, producer_epoch=self.epoch)
        else:
            assert isinstance(request, EndTxnRequest)
            bumps = self.finalized >= 2
            done = 7, request.producer_epoch, request.committed
            if not (bumps and self.ended and self.ended[-1] == done):  # the same request again
                if request.producer_epoch != self.epoch:
                    return Answer(error_code=FENCED)
                self.ended.append(done)
                self.epoch += bumps
            answer = Answer(error_code=0, producer_id=7, producer_epoch=self.epoch)
        if fault is None:
            raise TemporaryError("the answer is lost")
        return answer


def connected(coordinator: Coordinator) -> WireProducer:
    assert KERNEL is not None
    made = WireProducer(producer_config({"bootstrap.servers": "127.0.0.1:1"}, "t"), KERNEL)
    made._cluster.close()
    made._cluster = made._transaction._cluster = coordinator
    return made


def soon() -> Deadline:
    return Deadline.after_seconds(5)


@pytest.fixture
def coordinator(monkeypatch: pytest.MonkeyPatch) -> Coordinator:
    return Coordinator()


@given(st.lists(st.tuples(st.sampled_from([0, 1, 2]), st.booleans(), st.booleans()), max_size=12))
def test_no_two_transactions_have_the_same_epoch(batches: list[tuple[int, bool, bool]]) -> None:
    """Whatever becomes of ``transaction.version``, and although answers are lost."""
    coordinator = Coordinator()
    producer = connected(coordinator)
    producer.init(soon())
    used = []
    for version, init_is_lost, end_is_lost in batches:
        coordinator.finalized = version
        if init_is_lost and version < 2 and used:
            coordinator.faults = [NOT_COORDINATOR]
        producer.begin()
        coordinator.faults = []
        used.append((producer._transaction.producer_id, producer._transaction.epoch))
        if end_is_lost and version >= 2:
            coordinator.faults = [None]
        producer.commit(soon())
        assert producer.is_clean()
    assert len(set(used)) == len(used)
    assert [each[:2] for each in coordinator.ended] == used


def test_every_failure_of_a_commit_leaves_its_outcome_unknown(coordinator: Coordinator) -> None:
    for code, kind in ((FENCED, FencedError), (NOT_AUTHORIZED, AuthorizationError)):
        producer = connected(coordinator)
        producer.init(soon())
        producer.begin()
        coordinator.faults = [code]
        with pytest.raises(OutcomeUnknownError) as raised:
            producer.commit(soon())
        assert isinstance(raised.value.__cause__, kind)
        assert not producer.is_clean()
        producer.abort(soon())
        assert coordinator.ended == [], "after a commit of unknown outcome, nothing may abort the transaction"


def test_a_coordinator_that_does_not_answer_is_asked_again_by_the_next_try(
    coordinator: Coordinator, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`begin` gives up soon, because only the caller knows the deadline of the commit."""
    monkeypatch.setattr(module, "_BEGIN_SECONDS", 0.05)
    producer = connected(coordinator)
    producer.init(soon())

    def none(*_: object) -> Any:
        raise TemporaryError("no broker")

    monkeypatch.setattr(coordinator, "coordinator", none)
    with pytest.raises(RetriableError) as raised:
        producer.begin()
    assert isinstance(raised.value.__cause__, UnavailableError)


def test_a_fenced_producer_says_so(coordinator: Coordinator) -> None:
    coordinator.finalized = 1
    producer = connected(coordinator)
    producer.init(soon())
    producer.begin()
    producer.commit(soon())
    coordinator.epoch += 1  # another producer
    with pytest.raises(FencedError):
        producer.begin()


def test_every_state_has_its_moves_in_the_table() -> None:
    assert set(module._MOVES) == set(State)
