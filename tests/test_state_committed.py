"""Tests of reading a shard's committed offset: waiting, ending a transaction, never a false "no offset"."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from typing import Any

import pytest
from confluent_kafka import Consumer, KafkaError, KafkaException
from confluent_kafka import TopicPartition as ClientTopicPartition
from mock_cluster import Api, MockCluster

from kafka_eos_source.errors import AuthorizationError, UnavailableError
from kafka_eos_source.kafka import group
from kafka_eos_source.kafka.consumer import AssignedConsumer, ConsumerPool
from kafka_eos_source.kafka.group import GroupOffsets
from kafka_eos_source.kafka.kernel_consumer import range_consumer
from kafka_eos_source.model import GroupOffset, TopicPartition
from kafka_eos_source.runtime.deadline import Deadline
from kafka_eos_source.state.changelog import committed
from kafka_eos_source.state.changelog.committed import CommittedShard, changelog_client

GROUP = "orders"
TP = TopicPartition("orders-counts-changelog", 1)
ANCHOR = TopicPartition("out", 0)
HELD = GroupOffset(TP, 42, "token")

Answers = Callable[..., list[list[TopicPartition]]]


def deadline_in(seconds: float = 30.0) -> Deadline:
    return Deadline.after_seconds(seconds)


# -- the state machine, with scripted answers


@pytest.fixture
def answers(monkeypatch: pytest.MonkeyPatch) -> Answers:
    """Scripts the answers; None = unstable; the last one repeats. Returns the requested partitions."""

    def script(*given: dict[TopicPartition, GroupOffset] | None) -> list[list[TopicPartition]]:
        left = list(given)
        asked: list[list[TopicPartition]] = []

        def stable_offsets(
            _consumer: Any, group_id: str, partitions: Collection[TopicPartition], _deadline: Deadline
        ) -> dict[TopicPartition, GroupOffset] | None:
            assert group_id == GROUP
            asked.append(list(partitions))
            return left.pop(0) if len(left) > 1 else left[0]

        monkeypatch.setattr(committed, "stable_offsets", stable_offsets)
        return asked

    return script


def shard(end_transaction: Callable[[Deadline], None] | None = None, end_after_ms: int = 0) -> CommittedShard:
    return CommittedShard(None, GROUP, TP, end_transaction=end_transaction, end_after_ms=end_after_ms)  # type: ignore[arg-type]


def test_a_committed_offset_is_returned_or_none(answers: Answers) -> None:
    asked = answers({TP: HELD}, {})
    assert shard().offset(deadline_in()) == HELD
    assert shard().offset(deadline_in()) is None
    assert asked == [[TP], [TP]]


def test_offsets_of_other_partitions_are_requested_with_the_same_request(answers: Answers) -> None:
    asked = answers({TP: HELD})
    assert shard().offsets([ANCHOR, TP], deadline_in()) == {TP: HELD}
    assert asked == [[TP, ANCHOR]]


def test_the_read_waits_for_an_unfinished_transaction(answers: Answers) -> None:
    asked = answers(None, None, None, {TP: HELD})
    assert shard().offset(deadline_in()) == HELD
    assert len(asked) == 4


def test_an_unfinished_transaction_is_ended_once(answers: Answers) -> None:
    answers(None, None, None, {})
    ended: list[Deadline] = []
    assert shard(ended.append).offset(deadline_in()) is None
    assert len(ended) == 1


def test_an_unfinished_transaction_is_not_ended_before_its_pause(answers: Answers) -> None:
    answers(None, None, None, {TP: HELD})
    ended: list[Deadline] = []
    assert shard(ended.append, end_after_ms=60_000).offset(deadline_in()) == HELD
    assert not ended


def test_a_timeout_is_an_error_and_never_reported_as_no_offset(answers: Answers) -> None:
    answers(None)
    with pytest.raises(UnavailableError, match=r"open transaction has blocked the offset of .*-1 in group"):
        shard().offset(deadline_in(0.05))
    with pytest.raises(UnavailableError, match="another program: this query's own transactions"):
        shard(lambda _: None).offset(deadline_in(0.05))


@pytest.mark.parametrize("kind", [AssignedConsumer, range_consumer()], ids=["python", "kernel"])
@pytest.mark.parametrize("code", [KafkaError._TIMED_OUT, KafkaError.NOT_COORDINATOR])
def test_t146_a_client_that_does_not_find_the_coordinator_is_replaced(
    monkeypatch: pytest.MonkeyPatch, kind: type[AssignedConsumer], code: int
) -> None:
    """A client of librdkafka may wait for ever for a coordinator that has left (issue 5511)."""
    monkeypatch.setattr(group, "_NOT_COORDINATOR_SECONDS", 0.0)
    asked: list[Consumer] = []

    def fetch(client: Consumer, *_: Any, **__: Any) -> list[GroupOffset]:
        asked.append(client)
        if len(asked) == 1:
            raise KafkaException(KafkaError(code))
        return [HELD]

    monkeypatch.setattr(group, "fetch", fetch)
    conf = {"bootstrap.servers": "127.0.0.1:1", "group.id": GROUP, "log_level": "0"}
    consumer = kind(conf)
    assert group.stable_offsets(consumer, GROUP, [TP], deadline_in()) == {TP: HELD}
    assert asked[0] is not asked[1]
    assert consumer.client is asked[1]
    with pytest.raises(RuntimeError, match="closed"):
        asked[0].assignment()
    consumer.close()


def test_a_client_is_kept_while_a_coordinator_moves(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Consumer] = []

    def fetch(client: Consumer, *_: Any, **__: Any) -> list[GroupOffset]:
        asked.append(client)
        if len(asked) < 4:
            raise KafkaException(KafkaError(KafkaError.NOT_COORDINATOR))
        return [HELD]

    monkeypatch.setattr(group, "fetch", fetch)
    monkeypatch.setattr(group, "_NOT_COORDINATOR_SECONDS", 60.0)
    consumer = AssignedConsumer({"bootstrap.servers": "127.0.0.1:1", "group.id": GROUP, "log_level": "0"})
    assert group.stable_offsets(consumer, GROUP, [TP], deadline_in()) == {TP: HELD}
    assert set(asked) == {consumer.client}
    consumer.close()


def test_an_error_while_ending_the_transaction_is_raised(answers: Answers) -> None:
    def refused(_deadline: Deadline) -> None:
        raise AuthorizationError("no")

    answers(None)
    with pytest.raises(AuthorizationError):
        shard(refused).offset(deadline_in())


# -- the request, against librdkafka's mock brokers


@pytest.fixture(scope="module")
def cluster() -> Iterator[MockCluster]:
    with MockCluster() as running:
        running.create_topic(TP.topic, 4)
        consumer = Consumer({"bootstrap.servers": running.bootstrap_servers, "group.id": GROUP})
        held = ClientTopicPartition(TP.topic, TP.partition, 42, "token")
        consumer.commit(offsets=[held], asynchronous=False)
        consumer.close()
        yield running


@pytest.fixture
def consumer(cluster: MockCluster, monkeypatch: pytest.MonkeyPatch) -> Iterator[AssignedConsumer]:
    pool = ConsumerPool()
    monkeypatch.setattr(committed, "POOL", pool)
    with changelog_client({"bootstrap.servers": cluster.bootstrap_servers}, GROUP) as client:
        yield client
    cluster.clear_failures(Api.OFFSET_FETCH)
    pool.close()


def test_the_request_returns_offset_and_metadata(consumer: AssignedConsumer) -> None:
    look = CommittedShard(consumer, GROUP, TP)
    assert look.offset(deadline_in()) == HELD
    assert look.offsets([TopicPartition(TP.topic, 2)], deadline_in()) == {TP: HELD}


def test_reading_the_offset_takes_one_request(cluster: MockCluster, consumer: AssignedConsumer) -> None:
    look = CommittedShard(consumer, GROUP, TP)
    look.offset(deadline_in())
    before = cluster.requests()
    for _ in range(5):
        look.offset(deadline_in())
    asked = cluster.requests() - before
    assert asked[Api.OFFSET_FETCH] == 5
    assert asked[Api.FIND_COORDINATOR] < 5, "the client asks for itself, once in a while"


@pytest.mark.parametrize(
    "code",
    [
        KafkaError.UNSTABLE_OFFSET_COMMIT,
        KafkaError.NOT_COORDINATOR,
        KafkaError.COORDINATOR_LOAD_IN_PROGRESS,
        KafkaError._TRANSPORT,
    ],
)
def test_a_transient_error_is_retried(cluster: MockCluster, consumer: AssignedConsumer, code: int) -> None:
    cluster.fail(Api.OFFSET_FETCH, code, code)
    assert CommittedShard(consumer, GROUP, TP).offset(deadline_in()) == HELD


def test_an_unstable_offset_is_distinguished_from_no_offset(
    cluster: MockCluster, consumer: AssignedConsumer
) -> None:
    cluster.fail(Api.OFFSET_FETCH, *[KafkaError.UNSTABLE_OFFSET_COMMIT] * 3)
    ended: list[Deadline] = []
    look = CommittedShard(consumer, GROUP, TP, end_transaction=ended.append, end_after_ms=0)
    assert look.offset(deadline_in()) == HELD
    assert len(ended) == 1
    cluster.fail(Api.OFFSET_FETCH, *[KafkaError.COORDINATOR_LOAD_IN_PROGRESS] * 3)
    assert look.offset(deadline_in()) == HELD
    assert len(ended) == 1, "a coordinator that moves is no transaction"


def test_an_unfinished_transaction_is_not_reported_as_a_silent_broker(cluster: MockCluster) -> None:
    """At the deadline of the driver's own request, the error names the transaction and the fix."""
    cluster.fail(Api.OFFSET_FETCH, *[KafkaError.UNSTABLE_OFFSET_COMMIT] * 1000)
    offsets = GroupOffsets({"bootstrap.servers": cluster.bootstrap_servers})
    try:
        with pytest.raises(UnavailableError, match="UNSTABLE_OFFSET_COMMIT") as refused:
            offsets.fetch(GROUP, (), deadline_in(0.3))
    finally:
        cluster.clear_failures(Api.OFFSET_FETCH)
    assert "no answer" not in refused.value.message
    assert "Hanging transactions" in refused.value.fix


def test_the_error_names_the_missing_acl(cluster: MockCluster, consumer: AssignedConsumer) -> None:
    cluster.fail(Api.OFFSET_FETCH, KafkaError.GROUP_AUTHORIZATION_FAILED)
    with pytest.raises(AuthorizationError, match=r"offsets of group 'orders' for .*-changelog-1"):
        CommittedShard(consumer, GROUP, TP).offset(deadline_in())


def test_no_coordinator_is_an_error(cluster: MockCluster, consumer: AssignedConsumer) -> None:
    cluster.fail(Api.OFFSET_FETCH, *[KafkaError.COORDINATOR_NOT_AVAILABLE] * 1000)
    with pytest.raises(UnavailableError, match="offsets of group 'orders'"):
        CommittedShard(consumer, GROUP, TP).offset(deadline_in(0.3))


def test_the_client_is_kept_between_tasks(cluster: MockCluster, monkeypatch: pytest.MonkeyPatch) -> None:
    pool = ConsumerPool()
    monkeypatch.setattr(committed, "POOL", pool)
    kafka = {"bootstrap.servers": cluster.bootstrap_servers}
    with changelog_client(kafka, GROUP) as first:
        pass
    with changelog_client(kafka, GROUP) as second:
        assert second is first
    pool.close()
