"""T21: each error that a broker may answer to each request of a commit, once and five times in a row.

The table is that of librdkafka's error classes; what is tested is what the product makes of them, from the
staged rows to the committed token, with the real client. The stories run side by side, since they wait most
of the time (librdkafka tries some requests again after a fixed 500 ms), each on a mock cluster of its own.
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
from mock_commit import MockKafka, commit, look, staged, values

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

#: Stories told at the same time.
_SIDE_BY_SIDE = 24
#: Not one story came to its end for so long: those that are left hang.
_HANG_SECONDS = 300


class Way(Enum):
    """How a batch gets into Kafka nevertheless."""

    RESENT = "the request is sent again, in the same transaction"
    REOPENED = "a new producer is initialised, before any transaction"
    REPEATED = "the transaction is aborted and begun again by a new producer"
    ASKED = "the outcome is unknown: nothing is aborted, a new producer reads the token and begins again"


Outcome = Way | type[KafkaEosError]


class Row(NamedTuple):
    """What errors do that are answered to one request."""

    request: Api
    errors: str
    once: Outcome
    five_times: Outcome


def _same(request: Api, errors: str, outcome: Outcome) -> Row:
    return Row(request, errors, outcome, outcome)


TABLE = [
    # any call
    _same(Api.METADATA, "LEADER_NOT_AVAILABLE _TRANSPORT", Way.RESENT),
    # init_transactions
    _same(
        Api.FIND_COORDINATOR,
        "COORDINATOR_NOT_AVAILABLE COORDINATOR_LOAD_IN_PROGRESS REQUEST_TIMED_OUT _TRANSPORT",
        Way.RESENT,
    ),
    _same(Api.FIND_COORDINATOR, "TRANSACTIONAL_ID_AUTHORIZATION_FAILED", AuthorizationError),
    _same(
        Api.INIT_PRODUCER_ID,
        "CONCURRENT_TRANSACTIONS COORDINATOR_LOAD_IN_PROGRESS COORDINATOR_NOT_AVAILABLE NOT_COORDINATOR "
        "REQUEST_TIMED_OUT _TRANSPORT INVALID_PRODUCER_ID_MAPPING UNKNOWN",
        Way.RESENT,
    ),
    _same(
        Api.INIT_PRODUCER_ID,
        "TRANSACTIONAL_ID_AUTHORIZATION_FAILED CLUSTER_AUTHORIZATION_FAILED",
        AuthorizationError,
    ),
    _same(Api.INIT_PRODUCER_ID, "INVALID_TRANSACTION_TIMEOUT", InvalidOptionError),
    Row(Api.INIT_PRODUCER_ID, "PRODUCER_FENCED INVALID_PRODUCER_EPOCH", Way.REOPENED, FencedError),
    # the token
    _same(
        Api.OFFSET_FETCH,
        "UNSTABLE_OFFSET_COMMIT NOT_COORDINATOR COORDINATOR_LOAD_IN_PROGRESS COORDINATOR_NOT_AVAILABLE "
        "_TRANSPORT",
        Way.RESENT,
    ),
    _same(Api.OFFSET_FETCH, "GROUP_AUTHORIZATION_FAILED TOPIC_AUTHORIZATION_FAILED", AuthorizationError),
    _same(Api.OFFSET_FETCH, "UNKNOWN", OperatorError),
    # produce, until the first record of a partition may be sent
    _same(
        Api.ADD_PARTITIONS_TO_TXN,
        "CONCURRENT_TRANSACTIONS COORDINATOR_LOAD_IN_PROGRESS COORDINATOR_NOT_AVAILABLE NOT_COORDINATOR "
        "_TRANSPORT UNKNOWN_TOPIC_OR_PART",
        Way.RESENT,
    ),
    _same(
        Api.ADD_PARTITIONS_TO_TXN,
        "INVALID_TXN_STATE UNKNOWN_PRODUCER_ID INVALID_PRODUCER_ID_MAPPING TRANSACTION_ABORTABLE "
        "OPERATION_NOT_ATTEMPTED REQUEST_TIMED_OUT UNKNOWN",
        Way.REPEATED,
    ),
    Row(Api.ADD_PARTITIONS_TO_TXN, "PRODUCER_FENCED INVALID_PRODUCER_EPOCH", Way.REPEATED, FencedError),
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
        Way.RESENT,
    ),
    _same(
        Api.PRODUCE,
        "UNKNOWN_PRODUCER_ID INVALID_PRODUCER_ID_MAPPING INVALID_TXN_STATE OUT_OF_ORDER_SEQUENCE_NUMBER "
        "TRANSACTION_ABORTABLE UNKNOWN",
        Way.REPEATED,
    ),
    Row(Api.PRODUCE, "PRODUCER_FENCED INVALID_PRODUCER_EPOCH", Way.REPEATED, FencedError),
    _same(Api.PRODUCE, "MSG_SIZE_TOO_LARGE INVALID_RECORD", InvalidRecordError),
    _same(Api.PRODUCE, "TOPIC_AUTHORIZATION_FAILED", AuthorizationError),
    # send_offsets_to_transaction, at the transaction's coordinator
    _same(
        Api.ADD_OFFSETS_TO_TXN,
        "CONCURRENT_TRANSACTIONS COORDINATOR_LOAD_IN_PROGRESS COORDINATOR_NOT_AVAILABLE NOT_COORDINATOR "
        "REQUEST_TIMED_OUT _TRANSPORT",
        Way.RESENT,
    ),
    _same(
        Api.ADD_OFFSETS_TO_TXN,
        "INVALID_TXN_STATE UNKNOWN_PRODUCER_ID INVALID_PRODUCER_ID_MAPPING TRANSACTION_ABORTABLE UNKNOWN",
        Way.REPEATED,
    ),
    Row(Api.ADD_OFFSETS_TO_TXN, "PRODUCER_FENCED INVALID_PRODUCER_EPOCH", Way.REPEATED, FencedError),
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
        Way.RESENT,
    ),
    _same(
        Api.TXN_OFFSET_COMMIT,
        "ILLEGAL_GENERATION UNKNOWN_MEMBER_ID REBALANCE_IN_PROGRESS INVALID_TXN_STATE UNKNOWN_PRODUCER_ID "
        "INVALID_PRODUCER_ID_MAPPING TRANSACTION_ABORTABLE UNKNOWN",
        Way.REPEATED,
    ),
    Row(
        Api.TXN_OFFSET_COMMIT,
        "PRODUCER_FENCED INVALID_PRODUCER_EPOCH FENCED_INSTANCE_ID",
        Way.REPEATED,
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
        Way.RESENT,
    ),
    _same(
        Api.END_TXN,
        "INVALID_TXN_STATE UNKNOWN_PRODUCER_ID INVALID_PRODUCER_ID_MAPPING TRANSACTION_ABORTABLE "
        "TRANSACTIONAL_ID_AUTHORIZATION_FAILED CLUSTER_AUTHORIZATION_FAILED REQUEST_TIMED_OUT UNKNOWN",
        Way.ASKED,
    ),
    Row(Api.END_TXN, "PRODUCER_FENCED INVALID_PRODUCER_EPOCH", Way.ASKED, FencedError),
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
        way = "-singly" if self.timestamps else ""
        times = {1: "once", 5: "five"}.get(self.times, str(self.times))
        return f"T21-{self.request.name}-{self.error}-{times}{way}"


#: Half a second each: a group that has no coordinator for longer than the client waits for another request.
_LONG = Case(Api.TXN_OFFSET_COMMIT, "COORDINATOR_NOT_AVAILABLE", 14, Way.RESENT)


def _cases() -> Iterator[Case]:
    yield _LONG
    for row in TABLE:
        for error in row.errors.split():
            yield Case(row.request, error, 1, row.once)
            yield Case(row.request, error, 5, row.five_times)
            if row.request in (Api.ADD_PARTITIONS_TO_TXN, Api.PRODUCE):
                yield Case(row.request, error, 1, row.once, timestamps=True)


@dataclass
class Story:
    """What became of a case.

    Attributes:
        ended: how the first commit ended.
        visible: what readers saw then.
        calls: transactional calls of that commit.
        unused: answers that were not used up by it.
        replays: how further commits of the same batch ended, as Spark makes them after an error.
        next_calls: calls of the next batch, which nothing disturbs.
        last: what is in Kafka after it.
    """

    ended: Result | KafkaEosError
    visible: list[str]
    calls: list[str]
    unused: int
    replays: list[Result | KafkaEosError] = field(default_factory=list)
    next_calls: list[str] = field(default_factory=list)
    last: tuple[list[str], Token | None] = ([], None)


def _tell(case: Case) -> Story:
    with MockCluster() as mock:
        kafka, session = MockKafka(mock), ProducerSession()
        mock.answer(1, case.request, *[(getattr(KafkaError, case.error), 0)] * case.times)

        def attempt() -> Result | KafkaEosError:
            try:
                return commit(kafka, session, rows=staged(values(), timestamps=case.timestamps))
            except KafkaEosError as error:
                assert session.producer is None, "a producer was kept after an error"
                return error

        story = Story(attempt(), kafka.visible(), list(kafka.calls), mock.unused_answers(1, case.request))
        while isinstance([story.ended, *story.replays][-1], KafkaEosError) and len(story.replays) < 5:
            story.replays.append(attempt())
        seen = len(kafka.calls)
        commit(kafka, session, 1)
        story.next_calls = kafka.calls[seen:]
        story.last = look(kafka)
        session.drop()
        return story


@pytest.fixture(scope="module")
def stories(request: pytest.FixtureRequest) -> Iterator[dict[Case, Future[Story]]]:
    """Those of the selected tests, told side by side."""
    selected = [item for item in request.session.items if isinstance(item, pytest.Function)]
    cases = [
        cast(Case, item.callspec.params["case"])
        for item in selected
        if item.function is test_an_error_is_of_the_class_in_the_table
    ]
    with ThreadPoolExecutor(_SIDE_BY_SIDE, "story") as pool:
        told = {case: pool.submit(_tell, case) for case in cases}
        left = set(told.values())
        while left and (ended := wait(left, _HANG_SECONDS, FIRST_COMPLETED).done):
            left -= ended
        yield told


@pytest.mark.xdist_group("stories")  # they are told once, by one worker
@pytest.mark.timeout(1800)  # the first one waits for all of them; what hangs is known by _HANG_SECONDS
@pytest.mark.parametrize("case", list(_cases()), ids=str)
def test_an_error_is_of_the_class_in_the_table(case: Case, stories: dict[Case, Future[Story]]) -> None:
    """T21: the batch is there once, or it is not there and a named error says why."""
    assert stories[case].done(), "it hangs"
    story = stories[case].result()

    if isinstance(case.expected, Way):
        assert isinstance(story.ended, Result), story.ended
        assert story.unused == 0
        assert sorted(story.visible) == sorted(values())
        _check_way(case, story.ended, story.calls)
    else:
        assert type(story.ended) is case.expected, story.ended
        assert story.visible == []
        assert {type(error) for error in story.replays[:-1]} <= {case.expected}
        assert isinstance(story.replays[-1], Result), "the query did not come round when the fault was gone"

    assert ("commit", "abort") not in set(pairwise(story.calls)), "a commit of unknown outcome was aborted"
    if case.request is Api.END_TXN and case.expected is Way.RESENT:
        # the first one may still be on its way, and would end the next transaction of the same epoch
        assert story.next_calls[0] == "init", "a producer whose commit was sent twice was used again"
    visible, token = story.last
    assert visible == sorted(values(0) + values(1))
    assert token is not None
    assert token.batch_id == 1


def _check_way(case: Case, result: Result, calls: list[str]) -> None:
    assert result.step is Step.COMMITTED
    once = ["init", "token", "begin", "commit"]
    aborted = ["init", "token", "begin", "abort"]
    calls = [call for call in calls if call not in ("flush", "offsets")]
    if case.expected is Way.RESENT:
        assert calls == once
    elif case.expected is Way.REOPENED:
        assert calls == ["init"] * case.times + once
    else:
        lost = result.transactions - 1
        # two partitions: there may be two such requests in a transaction, or one that fails before the other
        two = case.request in (Api.ADD_PARTITIONS_TO_TXN, Api.PRODUCE) and case.times > 1
        assert lost in (range(3, 6) if two else [case.times])
        assert calls == (once if case.expected is Way.ASKED else aborted) * lost + once
