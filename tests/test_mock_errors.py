"""T21: each error that a broker may answer to each request of a commit, once and five times in a row.

The table follows librdkafka's error classes. The tests check how the product handles each error, from the
staged rows to the committed token, with the real client. The cases run concurrently, each on its own mock
cluster, because they mostly wait: librdkafka repeats some requests after a fixed 500 ms.
"""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, field
from enum import Enum
from itertools import pairwise
from typing import NamedTuple, cast

import pytest
from confluent_kafka import KafkaError
from mock_cluster import Api, MockCluster
from mock_commit import MockKafka, commit, staged, values, visible_values_and_token

from kafka_eos_source.commit.interfaces import ProducerSession
from kafka_eos_source.commit.machine import Result
from kafka_eos_source.commit.steps import Step
from kafka_eos_source.errors import (
    AuthorizationError,
    FencedError,
    InvalidOptionError,
    InvalidRecordError,
    KafkaEosError,
    OperatorError,
)
from kafka_eos_source.protocol.token import Token

#: Cases that run at the same time.
_CONCURRENT_CASES = 24
#: If no case ends for this long, the remaining ones count as hanging.
_HANG_SECONDS = 300


class Recovery(Enum):
    """How the batch is committed although the request failed."""

    RESENT = "the request is sent again, in the same transaction"
    REOPENED = "a new producer is initialised, before any transaction"
    REPEATED = "the transaction is aborted and begun again by a new producer"
    TOKEN_READ = "the outcome is unknown: nothing is aborted, a new producer reads the token and begins again"


Outcome = Recovery | type[KafkaEosError]


class Row(NamedTuple):
    """The outcomes after one error, and after five, in answer to one request."""

    request: Api
    errors: str
    once: Outcome
    five_times: Outcome


def _same(request: Api, errors: str, outcome: Outcome) -> Row:
    return Row(request, errors, outcome, outcome)


TABLE = [
    # any call
    _same(Api.METADATA, "LEADER_NOT_AVAILABLE _TRANSPORT", Recovery.RESENT),
    # init_transactions
    _same(
        Api.FIND_COORDINATOR,
        "COORDINATOR_NOT_AVAILABLE COORDINATOR_LOAD_IN_PROGRESS REQUEST_TIMED_OUT _TRANSPORT",
        Recovery.RESENT,
    ),
    _same(Api.FIND_COORDINATOR, "TRANSACTIONAL_ID_AUTHORIZATION_FAILED", AuthorizationError),
    _same(
        Api.INIT_PRODUCER_ID,
        "CONCURRENT_TRANSACTIONS COORDINATOR_LOAD_IN_PROGRESS COORDINATOR_NOT_AVAILABLE NOT_COORDINATOR "
        "REQUEST_TIMED_OUT _TRANSPORT INVALID_PRODUCER_ID_MAPPING UNKNOWN",
        Recovery.RESENT,
    ),
    _same(
        Api.INIT_PRODUCER_ID,
        "TRANSACTIONAL_ID_AUTHORIZATION_FAILED CLUSTER_AUTHORIZATION_FAILED",
        AuthorizationError,
    ),
    _same(Api.INIT_PRODUCER_ID, "INVALID_TRANSACTION_TIMEOUT", InvalidOptionError),
    Row(Api.INIT_PRODUCER_ID, "PRODUCER_FENCED INVALID_PRODUCER_EPOCH", Recovery.REOPENED, FencedError),
    # reading the token
    _same(
        Api.OFFSET_FETCH,
        "UNSTABLE_OFFSET_COMMIT NOT_COORDINATOR COORDINATOR_LOAD_IN_PROGRESS COORDINATOR_NOT_AVAILABLE "
        "_TRANSPORT",
        Recovery.RESENT,
    ),
    _same(Api.OFFSET_FETCH, "GROUP_AUTHORIZATION_FAILED TOPIC_AUTHORIZATION_FAILED", AuthorizationError),
    _same(Api.OFFSET_FETCH, "UNKNOWN", OperatorError),
    # produce, until the first record of a partition may be sent
    _same(
        Api.ADD_PARTITIONS_TO_TXN,
        "CONCURRENT_TRANSACTIONS COORDINATOR_LOAD_IN_PROGRESS COORDINATOR_NOT_AVAILABLE NOT_COORDINATOR "
        "_TRANSPORT UNKNOWN_TOPIC_OR_PART",
        Recovery.RESENT,
    ),
    _same(
        Api.ADD_PARTITIONS_TO_TXN,
        "INVALID_TXN_STATE UNKNOWN_PRODUCER_ID INVALID_PRODUCER_ID_MAPPING TRANSACTION_ABORTABLE "
        "OPERATION_NOT_ATTEMPTED REQUEST_TIMED_OUT UNKNOWN",
        Recovery.REPEATED,
    ),
    Row(Api.ADD_PARTITIONS_TO_TXN, "PRODUCER_FENCED INVALID_PRODUCER_EPOCH", Recovery.REPEATED, FencedError),
    _same(
        Api.ADD_PARTITIONS_TO_TXN,
        "TRANSACTIONAL_ID_AUTHORIZATION_FAILED TOPIC_AUTHORIZATION_FAILED",
        AuthorizationError,
    ),
    # produce, the records
    _same(
        Api.PRODUCE,
        "_TRANSPORT REQUEST_TIMED_OUT NOT_LEADER_FOR_PARTITION NOT_ENOUGH_REPLICAS "
        "NOT_ENOUGH_REPLICAS_AFTER_APPEND KAFKA_STORAGE_ERROR UNKNOWN_TOPIC_OR_PART",
        Recovery.RESENT,
    ),
    _same(
        Api.PRODUCE,
        "UNKNOWN_PRODUCER_ID INVALID_PRODUCER_ID_MAPPING INVALID_TXN_STATE OUT_OF_ORDER_SEQUENCE_NUMBER "
        "TRANSACTION_ABORTABLE UNKNOWN",
        Recovery.REPEATED,
    ),
    Row(Api.PRODUCE, "PRODUCER_FENCED INVALID_PRODUCER_EPOCH", Recovery.REPEATED, FencedError),
    _same(Api.PRODUCE, "MSG_SIZE_TOO_LARGE INVALID_RECORD", InvalidRecordError),
    _same(Api.PRODUCE, "TOPIC_AUTHORIZATION_FAILED", AuthorizationError),
    # send_offsets_to_transaction, at the transaction's coordinator
    _same(
        Api.ADD_OFFSETS_TO_TXN,
        "CONCURRENT_TRANSACTIONS COORDINATOR_LOAD_IN_PROGRESS COORDINATOR_NOT_AVAILABLE NOT_COORDINATOR "
        "REQUEST_TIMED_OUT _TRANSPORT",
        Recovery.RESENT,
    ),
    _same(
        Api.ADD_OFFSETS_TO_TXN,
        "INVALID_TXN_STATE UNKNOWN_PRODUCER_ID INVALID_PRODUCER_ID_MAPPING TRANSACTION_ABORTABLE UNKNOWN",
        Recovery.REPEATED,
    ),
    Row(Api.ADD_OFFSETS_TO_TXN, "PRODUCER_FENCED INVALID_PRODUCER_EPOCH", Recovery.REPEATED, FencedError),
    _same(
        Api.ADD_OFFSETS_TO_TXN,
        "TRANSACTIONAL_ID_AUTHORIZATION_FAILED GROUP_AUTHORIZATION_FAILED",
        AuthorizationError,
    ),
    # send_offsets_to_transaction, at the group's coordinator
    _same(
        Api.TXN_OFFSET_COMMIT,
        "COORDINATOR_LOAD_IN_PROGRESS COORDINATOR_NOT_AVAILABLE NOT_COORDINATOR REQUEST_TIMED_OUT _TRANSPORT "
        "CONCURRENT_TRANSACTIONS UNKNOWN_TOPIC_OR_PART",
        Recovery.RESENT,
    ),
    _same(
        Api.TXN_OFFSET_COMMIT,
        "ILLEGAL_GENERATION UNKNOWN_MEMBER_ID REBALANCE_IN_PROGRESS INVALID_TXN_STATE UNKNOWN_PRODUCER_ID "
        "INVALID_PRODUCER_ID_MAPPING TRANSACTION_ABORTABLE UNKNOWN",
        Recovery.REPEATED,
    ),
    Row(
        Api.TXN_OFFSET_COMMIT,
        "PRODUCER_FENCED INVALID_PRODUCER_EPOCH FENCED_INSTANCE_ID",
        Recovery.REPEATED,
        FencedError,
    ),
    _same(
        Api.TXN_OFFSET_COMMIT,
        "TRANSACTIONAL_ID_AUTHORIZATION_FAILED GROUP_AUTHORIZATION_FAILED TOPIC_AUTHORIZATION_FAILED",
        AuthorizationError,
    ),
    _same(Api.TXN_OFFSET_COMMIT, "OFFSET_METADATA_TOO_LARGE", InvalidOptionError),
    # commit_transaction
    _same(
        Api.END_TXN,
        "CONCURRENT_TRANSACTIONS COORDINATOR_LOAD_IN_PROGRESS COORDINATOR_NOT_AVAILABLE NOT_COORDINATOR "
        "_TRANSPORT",
        Recovery.RESENT,
    ),
    _same(
        Api.END_TXN,
        "INVALID_TXN_STATE UNKNOWN_PRODUCER_ID INVALID_PRODUCER_ID_MAPPING TRANSACTION_ABORTABLE "
        "TRANSACTIONAL_ID_AUTHORIZATION_FAILED CLUSTER_AUTHORIZATION_FAILED REQUEST_TIMED_OUT UNKNOWN",
        Recovery.TOKEN_READ,
    ),
    Row(Api.END_TXN, "PRODUCER_FENCED INVALID_PRODUCER_EPOCH", Recovery.TOKEN_READ, FencedError),
]


@dataclass(frozen=True)
class Case:
    """``times`` answers of one error to one request."""

    request: Api
    error: str
    times: int
    expected: Outcome
    timestamps: bool = False  #: rows are sent one by one, see `mock_commit.staged`

    def __str__(self) -> str:
        suffix = "-singly" if self.timestamps else ""
        times = {1: "once", 5: "five"}.get(self.times, str(self.times))
        return f"T21-{self.request.name}-{self.error}-{times}{suffix}"


#: With 0.5 s each, the group has no coordinator for longer than the client waits for any other request.
_LONG = Case(Api.TXN_OFFSET_COMMIT, "COORDINATOR_NOT_AVAILABLE", 14, Recovery.RESENT)


def _cases() -> Iterator[Case]:
    yield _LONG
    for row in TABLE:
        for error in row.errors.split():
            yield Case(row.request, error, 1, row.once)
            yield Case(row.request, error, 5, row.five_times)
            if row.request in (Api.ADD_PARTITIONS_TO_TXN, Api.PRODUCE):
                yield Case(row.request, error, 1, row.once, timestamps=True)


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


def _run_case(case: Case) -> CaseRun:
    with MockCluster() as mock:
        kafka, session = MockKafka(mock), ProducerSession()
        mock.answer(1, case.request, *[(getattr(KafkaError, case.error), 0)] * case.times)

        def commit_batch() -> Result | KafkaEosError:
            try:
                return commit(kafka, session, rows=staged(values(), timestamps=case.timestamps))
            except KafkaEosError as error:
                assert session.producer is None, "a producer was kept after an error"
                return error

        run = CaseRun(
            commit_batch(), kafka.visible(), list(kafka.calls), mock.unused_answers(1, case.request)
        )
        while isinstance([run.outcome, *run.replays][-1], KafkaEosError) and len(run.replays) < 5:
            run.replays.append(commit_batch())
        seen = len(kafka.calls)
        commit(kafka, session, 1)
        run.next_calls = kafka.calls[seen:]
        run.last = visible_values_and_token(kafka)
        session.drop()
        return run


@pytest.fixture(scope="module")
def runs(request: pytest.FixtureRequest) -> Iterator[dict[Case, Future[CaseRun]]]:
    """Runs the cases of the selected tests concurrently; returns their futures."""
    selected = [item for item in request.session.items if isinstance(item, pytest.Function)]
    cases = [
        cast(Case, item.callspec.params["case"])
        for item in selected
        if item.function is test_t21_an_error_is_handled_as_the_table_says
    ]
    with ThreadPoolExecutor(_CONCURRENT_CASES, "case") as pool:
        futures = {case: pool.submit(_run_case, case) for case in cases}
        left = set(futures.values())
        while left and (ended := wait(left, _HANG_SECONDS, FIRST_COMPLETED).done):
            left -= ended
        yield futures


@pytest.mark.timeout(1800)  # the first test waits for all cases; _HANG_SECONDS detects those that hang
@pytest.mark.parametrize("case", list(_cases()), ids=str)
def test_t21_an_error_is_handled_as_the_table_says(case: Case, runs: dict[Case, Future[CaseRun]]) -> None:
    """The batch is in Kafka once, or it is not and the error has the class of the table."""
    assert runs[case].done(), "the case hangs"
    run = runs[case].result()

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
    if case.request is Api.END_TXN and case.expected is Recovery.RESENT:
        # a late copy of the first request could end the next transaction of the same epoch
        assert run.next_calls[0] == "init", "a producer whose commit was sent twice was used again"
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
        two = case.request in (Api.ADD_PARTITIONS_TO_TXN, Api.PRODUCE) and case.times > 1
        assert failed in (range(3, 6) if two else [case.times])
        assert calls == (once if case.expected is Recovery.TOKEN_READ else aborted) * failed + once
