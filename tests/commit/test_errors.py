"""T21: each error that a broker may answer to each request of a commit, once and five times in a row.

The tests check how the product handles each error, from the staged rows to the committed token, with the real
producer. Each case has a simulated cluster of its own.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from enum import Enum
from itertools import pairwise
from typing import NamedTuple

import pytest

from kafka_eos_source.commit.machine import Result
from kafka_eos_source.commit.request import ProducerSession
from kafka_eos_source.errors import (
    AuthorizationError,
    FencedError,
    InvalidOptionError,
    InvalidRecordError,
    KafkaEosError,
)
from kafka_eos_source.kafka.error_codes import ErrorCode
from kafka_eos_source.observe.figures import Step
from kafka_eos_source.protocol.token import Token
from tests.commit.wire_commit import RecordingClients, cluster, commit, values, visible_values_and_token
from tests.support.simulated_kafka import Fault


class Recovery(Enum):
    """How the batch is committed although the request failed."""

    RESENT = "the request is sent again, in the same transaction"
    REOPENED = "a new producer is initialised, before any transaction"
    REPEATED = "the transaction is aborted and begun again by a new producer"
    TOKEN_READ = "the outcome is unknown: nothing is aborted, a new producer reads the token and begins again"


Outcome = Recovery | type[KafkaEosError]


class Row(NamedTuple):
    """The outcomes after one error, and after five, in answer to one request."""

    request: str
    errors: str
    once: Outcome
    five_times: Outcome


def _same(request: str, errors: str, outcome: Outcome) -> Row:
    return Row(request, errors, outcome, outcome)


#: The transactional id has another owner now, or lost its producer id because it was not used for long.
_FENCED = "PRODUCER_FENCED INVALID_PRODUCER_EPOCH INVALID_PRODUCER_ID_MAPPING"
#: Requests that clients send only below version 2.
_OLD = ("AddPartitionsToTxn", "AddOffsetsToTxn")

TABLE = [
    # any call
    _same("Metadata", "CUT", Recovery.RESENT),
    # init_transactions
    _same(
        "FindCoordinator",
        "COORDINATOR_NOT_AVAILABLE COORDINATOR_LOAD_IN_PROGRESS REQUEST_TIMED_OUT CUT",
        Recovery.RESENT,
    ),
    _same("FindCoordinator", "TRANSACTIONAL_ID_AUTHORIZATION_FAILED", AuthorizationError),
    _same(
        "InitProducerId",
        "CONCURRENT_TRANSACTIONS COORDINATOR_LOAD_IN_PROGRESS COORDINATOR_NOT_AVAILABLE NOT_COORDINATOR "
        "REQUEST_TIMED_OUT CUT",
        Recovery.RESENT,
    ),
    _same("InitProducerId", "UNKNOWN_SERVER_ERROR", Recovery.REOPENED),
    _same(
        "InitProducerId",
        "TRANSACTIONAL_ID_AUTHORIZATION_FAILED CLUSTER_AUTHORIZATION_FAILED",
        AuthorizationError,
    ),
    _same("InitProducerId", "INVALID_TRANSACTION_TIMEOUT", InvalidOptionError),
    Row("InitProducerId", _FENCED, Recovery.REOPENED, FencedError),
    # produce, until the first record of a partition may be sent
    _same(
        "AddPartitionsToTxn",
        "CONCURRENT_TRANSACTIONS COORDINATOR_LOAD_IN_PROGRESS COORDINATOR_NOT_AVAILABLE NOT_COORDINATOR "
        "CUT UNKNOWN_TOPIC_OR_PARTITION REQUEST_TIMED_OUT",
        Recovery.RESENT,
    ),
    _same(
        "AddPartitionsToTxn",
        "INVALID_TXN_STATE UNKNOWN_PRODUCER_ID TRANSACTION_ABORTABLE OPERATION_NOT_ATTEMPTED "
        "UNKNOWN_SERVER_ERROR",
        Recovery.REPEATED,
    ),
    Row("AddPartitionsToTxn", _FENCED, Recovery.REPEATED, FencedError),
    _same(
        "AddPartitionsToTxn",
        "TRANSACTIONAL_ID_AUTHORIZATION_FAILED TOPIC_AUTHORIZATION_FAILED",
        AuthorizationError,
    ),
    # produce, the records
    _same(
        "Produce",
        "CUT REQUEST_TIMED_OUT NOT_LEADER_OR_FOLLOWER NOT_ENOUGH_REPLICAS "
        "NOT_ENOUGH_REPLICAS_AFTER_APPEND KAFKA_STORAGE_ERROR UNKNOWN_TOPIC_OR_PARTITION",
        Recovery.RESENT,
    ),
    _same(
        "Produce",
        "UNKNOWN_PRODUCER_ID INVALID_TXN_STATE OUT_OF_ORDER_SEQUENCE_NUMBER TRANSACTION_ABORTABLE "
        "UNKNOWN_SERVER_ERROR",
        Recovery.REPEATED,
    ),
    Row("Produce", _FENCED, Recovery.REPEATED, FencedError),
    # a batch of a few records is halved until a single record is refused
    Row("Produce", "MESSAGE_TOO_LARGE", Recovery.RESENT, InvalidRecordError),
    _same("Produce", "INVALID_RECORD", InvalidRecordError),
    _same("Produce", "TOPIC_AUTHORIZATION_FAILED", AuthorizationError),
    # send_offsets_to_transaction, at the transaction's coordinator
    _same(
        "AddOffsetsToTxn",
        "CONCURRENT_TRANSACTIONS COORDINATOR_LOAD_IN_PROGRESS COORDINATOR_NOT_AVAILABLE NOT_COORDINATOR "
        "REQUEST_TIMED_OUT CUT",
        Recovery.RESENT,
    ),
    _same(
        "AddOffsetsToTxn",
        "INVALID_TXN_STATE UNKNOWN_PRODUCER_ID TRANSACTION_ABORTABLE UNKNOWN_SERVER_ERROR",
        Recovery.REPEATED,
    ),
    Row("AddOffsetsToTxn", _FENCED, Recovery.REPEATED, FencedError),
    _same(
        "AddOffsetsToTxn",
        "TRANSACTIONAL_ID_AUTHORIZATION_FAILED GROUP_AUTHORIZATION_FAILED",
        AuthorizationError,
    ),
    # send_offsets_to_transaction, at the group's coordinator
    _same(
        "TxnOffsetCommit",
        "COORDINATOR_LOAD_IN_PROGRESS COORDINATOR_NOT_AVAILABLE NOT_COORDINATOR REQUEST_TIMED_OUT CUT "
        "CONCURRENT_TRANSACTIONS UNKNOWN_TOPIC_OR_PARTITION",
        Recovery.RESENT,
    ),
    _same(
        "TxnOffsetCommit",
        "ILLEGAL_GENERATION UNKNOWN_MEMBER_ID REBALANCE_IN_PROGRESS INVALID_TXN_STATE UNKNOWN_PRODUCER_ID "
        "TRANSACTION_ABORTABLE UNKNOWN_SERVER_ERROR",
        Recovery.REPEATED,
    ),
    Row(
        "TxnOffsetCommit",
        f"{_FENCED} FENCED_INSTANCE_ID",
        Recovery.REPEATED,
        FencedError,
    ),
    _same(
        "TxnOffsetCommit",
        "TRANSACTIONAL_ID_AUTHORIZATION_FAILED GROUP_AUTHORIZATION_FAILED TOPIC_AUTHORIZATION_FAILED",
        AuthorizationError,
    ),
    _same("TxnOffsetCommit", "OFFSET_METADATA_TOO_LARGE", InvalidOptionError),
    # commit_transaction
    _same(
        "EndTxn",
        "CONCURRENT_TRANSACTIONS COORDINATOR_LOAD_IN_PROGRESS COORDINATOR_NOT_AVAILABLE NOT_COORDINATOR CUT",
        Recovery.RESENT,
    ),
    _same(
        "EndTxn",
        "INVALID_TXN_STATE UNKNOWN_PRODUCER_ID TRANSACTION_ABORTABLE "
        "TRANSACTIONAL_ID_AUTHORIZATION_FAILED CLUSTER_AUTHORIZATION_FAILED UNKNOWN_SERVER_ERROR",
        Recovery.TOKEN_READ,
    ),
    Row("EndTxn", _FENCED, Recovery.TOKEN_READ, FencedError),
]


@dataclass(frozen=True)
class Case:
    """``times`` answers of one error to one request."""

    request: str
    error: str
    times: int
    expected: Outcome
    version: int  #: the finalized ``transaction.version``

    def __str__(self) -> str:
        times = {1: "once", 5: "five"}[self.times]
        return f"T21-{self.request}-{self.error}-{times}-version={self.version}"


def _cases() -> Iterator[Case]:
    for row in TABLE:
        versions = (1,) if row.request in _OLD else (1, 2)
        for error in row.errors.split():
            for version in versions:
                yield Case(row.request, error, 1, row.once, version)
            yield Case(row.request, error, 5, row.five_times, versions[-1])


@dataclass
class CaseRun:
    """How the product handled one case.

    Attributes:
        outcome: how the first commit ended.
        visible: the values that readers saw after it.
        calls: transactional calls of that commit.
        unused: injected answers that it did not consume.
        replays: how further commits of the same batch ended; Spark replays a batch after an error.
        next_calls: transactional calls of the next batch, which meets no fault.
        last: visible values and token after the next batch.
    """

    outcome: Result | KafkaEosError
    visible: list[str]
    calls: list[str]
    unused: int
    replays: list[Result | KafkaEosError] = field(default_factory=list)
    next_calls: list[str] = field(default_factory=list)
    last: tuple[list[str], Token | None] = ([], None)


def _run(case: Case) -> CaseRun:
    with cluster(version=case.version) as simulated:
        kafka, session = RecordingClients(simulated), ProducerSession()
        fault = Fault("cut") if case.error == "CUT" else Fault("error", getattr(ErrorCode, case.error))
        kafka.faults[case.request] = left = [fault] * case.times

        def commit_batch() -> Result | KafkaEosError:
            try:
                return commit(kafka, session)
            except KafkaEosError as error:
                assert session.producer is None, "a producer was kept after an error"
                return error

        run = CaseRun(commit_batch(), kafka.visible(), list(kafka.calls), len(left))
        while isinstance([run.outcome, *run.replays][-1], KafkaEosError) and len(run.replays) < 5:
            run.replays.append(commit_batch())
        seen = len(kafka.calls)
        commit(kafka, session, 1)
        run.next_calls = kafka.calls[seen:]
        run.last = visible_values_and_token(kafka)
        session.drop()
        return run


@pytest.mark.parametrize("case", list(_cases()), ids=str)
def test_t21_an_error_is_handled_as_the_table_says(case: Case) -> None:
    """The batch is in Kafka once, or it is not and the error has the class of the table."""
    run = _run(case)
    if isinstance(case.expected, Recovery):
        assert isinstance(run.outcome, Result), run.outcome
        assert run.unused == 0
        assert sorted(run.visible) == sorted(values())
        _check_recovery(case, run.outcome, run.calls)
    else:
        assert type(run.outcome) is case.expected, run.outcome
        assert run.visible == []
        assert {type(error) for error in run.replays[:-1]} <= {case.expected}
        assert isinstance(run.replays[-1], Result), "the query did not recover after the fault"

    assert ("commit", "abort") not in set(pairwise(run.calls)), "a commit of unknown outcome was aborted"
    assert run.next_calls[0] == "begin", "the next transaction has an epoch of its own in any case"
    visible, token = run.last
    assert visible == sorted(values(0) + values(1))
    assert token is not None
    assert token.batch_id == 1


def _check_recovery(case: Case, result: Result, calls: list[str]) -> None:
    assert result.step is Step.COMMITTED
    once = ["init", "token", "begin", "commit"]
    aborted = ["init", "token", "begin", "abort"]
    calls = [call for call in calls if call not in ("flush", "offsets")]
    if case.expected is Recovery.RESENT:
        assert calls == once
    elif case.expected is Recovery.REOPENED:
        assert calls == ["init"] * case.times + once
    else:
        failed = result.transactions - 1
        # two partitions: there may be two such requests in a transaction, or one that fails before the other
        two = case.request in ("AddPartitionsToTxn", "Produce") and case.times > 1
        assert failed in (range(3, 6) if two else [case.times])
        assert calls == (once if case.expected is Recovery.TOKEN_READ else aborted) * failed + once
