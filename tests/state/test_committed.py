"""Tests of reading a shard's committed offset: waiting, ending a transaction, never a false "no offset"."""

from __future__ import annotations

import socket
from collections.abc import Callable, Collection, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
from confluent_kafka import KafkaError

from kafka_eos_source.errors import AuthorizationError, OperatorError, UnavailableError
from kafka_eos_source.kafka.fetch import RangeConsumer
from kafka_eos_source.kafka.group import GroupOffsets
from kafka_eos_source.kafka.reader import ConsumerPool
from kafka_eos_source.model import GroupOffset, TopicPartition
from kafka_eos_source.runtime.deadline import Deadline
from kafka_eos_source.state.changelog import committed
from kafka_eos_source.state.changelog.committed import CommittedShard, changelog_client
from tests.support.simulated_kafka import Fault, SimulatedKafka

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
            _cluster: Any, group_id: str, partitions: Collection[TopicPartition], _deadline: Deadline
        ) -> dict[TopicPartition, GroupOffset] | None:
            assert group_id == GROUP
            asked.append(list(partitions))
            return left.pop(0) if len(left) > 1 else left[0]

        monkeypatch.setattr(committed, "stable_offsets", stable_offsets)
        return asked

    return script


def shard(end_transaction: Callable[[Deadline], None] | None = None, end_after_ms: int = 0) -> CommittedShard:
    consumer: Any = SimpleNamespace(cluster=None)
    return CommittedShard(consumer, GROUP, TP, end_transaction=end_transaction, end_after_ms=end_after_ms)


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


def test_an_error_while_ending_the_transaction_is_raised(answers: Answers) -> None:
    def refused(_deadline: Deadline) -> None:
        raise AuthorizationError("no")

    answers(None)
    with pytest.raises(AuthorizationError):
        shard(refused).offset(deadline_in())


# -- the request


@pytest.fixture(params=[7, 8], ids=["version 7", "version 8"])
def cluster(request: pytest.FixtureRequest) -> Iterator[SimulatedKafka]:
    """A cluster of two brokers, one of which is the group's coordinator."""
    with SimulatedKafka({TP.topic: 4}, brokers=2) as running:
        running.announced = {"OffsetFetch": (0, request.param)}
        running.offsets[TP.topic, TP.partition] = (42, "token")
        yield running


@pytest.fixture
def consumer(cluster: SimulatedKafka, monkeypatch: pytest.MonkeyPatch) -> Iterator[RangeConsumer]:
    pool = ConsumerPool()
    monkeypatch.setattr(committed, "POOL", pool)
    with changelog_client({"bootstrap.servers": cluster.bootstrap}) as client:
        yield client
    pool.close()


def refusing(cluster: SimulatedKafka, code: int, times: int) -> None:
    """Makes the coordinator refuse the next requests for offsets."""
    last = cluster.received["OffsetFetch"] + times
    cluster.fault = lambda kind: (
        Fault("error", code) if kind == "OffsetFetch" and cluster.received[kind] <= last else None
    )


def test_the_request_returns_offset_and_metadata(consumer: RangeConsumer) -> None:
    look = CommittedShard(consumer, GROUP, TP)
    assert look.offset(deadline_in()) == HELD
    assert look.offsets([TopicPartition(TP.topic, 2)], deadline_in()) == {TP: HELD}


def test_reading_the_offset_takes_one_request(cluster: SimulatedKafka, consumer: RangeConsumer) -> None:
    look = CommittedShard(consumer, GROUP, TP)
    look.offset(deadline_in())
    before = dict(cluster.received)
    for _ in range(5):
        look.offset(deadline_in())
    assert cluster.received == {**before, "OffsetFetch": before["OffsetFetch"] + 5}


@pytest.mark.parametrize(
    "code",
    [
        KafkaError.NOT_COORDINATOR,
        KafkaError.COORDINATOR_LOAD_IN_PROGRESS,
        KafkaError.COORDINATOR_NOT_AVAILABLE,
    ],
)
def test_a_transient_error_is_retried(cluster: SimulatedKafka, consumer: RangeConsumer, code: int) -> None:
    refusing(cluster, code, 2)
    assert CommittedShard(consumer, GROUP, TP).offset(deadline_in()) == HELD


@pytest.mark.parametrize("kind", ["cut", "lost", "move"])
def test_t146_a_coordinator_that_moves_or_dies_is_found_again(
    cluster: SimulatedKafka, consumer: RangeConsumer, kind: str
) -> None:
    look = CommittedShard(consumer, GROUP, TP)
    assert look.offset(deadline_in()) == HELD
    asked = cluster.received["OffsetFetch"]
    cluster.fault = lambda name: (
        Fault(kind) if name == "OffsetFetch" and cluster.received[name] == asked + 1 else None
    )
    assert look.offset(deadline_in()) == HELD


def test_an_open_transaction_is_distinguished_from_no_offset(
    cluster: SimulatedKafka, consumer: RangeConsumer
) -> None:
    cluster.pending[TP.topic, TP.partition] = (50, "later")

    def end(_: Deadline) -> None:
        cluster.offsets |= cluster.pending
        cluster.pending.clear()

    look = CommittedShard(consumer, GROUP, TP, end_transaction=end, end_after_ms=0)
    assert look.offset(deadline_in()) == GroupOffset(TP, 50, "later")
    other = TopicPartition(TP.topic, 3)
    cluster.pending[other.topic, other.partition] = (1, "")
    assert look.offset(deadline_in()) == GroupOffset(TP, 50, "later"), "it was not asked for"
    with pytest.raises(UnavailableError, match="open transaction has blocked"):
        CommittedShard(consumer, GROUP, other).offset(deadline_in(0.1))


def test_a_coordinator_that_loads_is_no_transaction(cluster: SimulatedKafka, consumer: RangeConsumer) -> None:
    refusing(cluster, KafkaError.COORDINATOR_LOAD_IN_PROGRESS, 3)
    ended: list[Deadline] = []
    look = CommittedShard(consumer, GROUP, TP, end_transaction=ended.append, end_after_ms=0)
    assert look.offset(deadline_in()) == HELD
    assert not ended


def test_the_offsets_of_a_group_include_those_that_transactions_are_about_to_add(
    cluster: SimulatedKafka,
) -> None:
    """Brokers check for open transactions only the partitions that are named, or that have offsets."""
    new = TopicPartition(TP.topic, 2)
    cluster.pending[new.topic, new.partition] = (1, "")
    offsets = GroupOffsets({"bootstrap.servers": cluster.bootstrap})
    assert offsets.fetch(GROUP, [TP], deadline_in()) == {TP: HELD}
    assert offsets.now(GROUP, [new], deadline_in()) == ({TP: HELD}, True)
    assert offsets.committed_now(GROUP, [new, TP], deadline_in()) == {TP: HELD}
    with pytest.raises(UnavailableError, match="UNSTABLE_OFFSET_COMMIT") as refused:
        offsets.fetch(GROUP, [new], deadline_in(0.3))
    assert "no answer" not in refused.value.message
    assert "Hanging transactions" in refused.value.fix


def cut_off(cluster: SimulatedKafka) -> str:
    """Cuts the coordinator off from the others, which have a newer offset; returns its address."""
    former = cluster.leader(0)
    cluster.cut_off = {former: cluster.shift}
    cluster.outdated = {former: dict(cluster.offsets)}
    cluster.offsets[TP.topic, TP.partition] = (50, "newer")
    cluster.move()
    return str(cluster.bootstrap.split(",")[former - 1])


def test_a_coordinator_that_is_cut_off_proves_nothing(cluster: SimulatedKafka) -> None:
    """It answers whoever begins at its address; only the true coordinator knows of our transaction."""
    offsets = GroupOffsets({"bootstrap.servers": cut_off(cluster)})
    cluster.pending[TP.topic, TP.partition] = (60, "ours")
    assert offsets.fetch(GROUP, [TP], deadline_in()) == {TP: HELD}
    assert offsets.committed_now(GROUP, [TP], deadline_in()) == {TP: HELD}
    assert offsets.proved(GROUP, [TP], deadline_in()) == {TP: GroupOffset(TP, 50, "newer")}


def test_without_a_coordinator_that_knows_the_transaction_nothing_is_proved(cluster: SimulatedKafka) -> None:
    offsets = GroupOffsets({"bootstrap.servers": cluster.bootstrap})
    with pytest.raises(UnavailableError, match="offsets of group 'orders'"):
        offsets.proved(GROUP, [TP], deadline_in(0.5))


def test_an_answer_about_a_transaction_that_nobody_asked_for_is_not_taken_for_no_offset(
    cluster: SimulatedKafka,
) -> None:
    refusing(cluster, KafkaError.UNSTABLE_OFFSET_COMMIT, 2)
    offsets = GroupOffsets({"bootstrap.servers": cluster.bootstrap})
    assert offsets.committed_now(GROUP, [TP], deadline_in()) == {TP: HELD}


def test_deleting_a_group_ends_at_the_deadline() -> None:
    """librdkafka alone would retry for an hour."""
    with socket.create_server(("127.0.0.1", 0)) as silent:
        group = GroupOffsets({"bootstrap.servers": f"127.0.0.1:{silent.getsockname()[1]}"})
        with pytest.raises(UnavailableError, match="deleting group 'group'"):
            group.delete_group("group", Deadline.after_seconds(0.5))


def test_the_error_names_the_missing_acl(cluster: SimulatedKafka, consumer: RangeConsumer) -> None:
    refusing(cluster, KafkaError.GROUP_AUTHORIZATION_FAILED, 1)
    with pytest.raises(AuthorizationError, match=r"offsets of group 'orders' for .*-changelog-1"):
        CommittedShard(consumer, GROUP, TP).offset(deadline_in())


def test_no_coordinator_is_an_error(cluster: SimulatedKafka, consumer: RangeConsumer) -> None:
    refusing(cluster, KafkaError.COORDINATOR_NOT_AVAILABLE, 1000)
    with pytest.raises(UnavailableError, match="offsets of group 'orders'"):
        CommittedShard(consumer, GROUP, TP).offset(deadline_in(0.3))


def test_a_group_that_does_not_exist_has_no_offsets(cluster: SimulatedKafka, consumer: RangeConsumer) -> None:
    refusing(cluster, KafkaError.GROUP_ID_NOT_FOUND, 1)
    assert CommittedShard(consumer, GROUP, TP).offset(deadline_in()) is None


def test_a_broker_that_cannot_tell_stable_offsets_is_refused(
    cluster: SimulatedKafka, consumer: RangeConsumer
) -> None:
    cluster.announced = {"OffsetFetch": (0, 6)}
    with pytest.raises(OperatorError, match="does not support OffsetFetchRequest"):
        CommittedShard(consumer, GROUP, TP).offset(deadline_in())


def test_the_client_is_kept_between_tasks(cluster: SimulatedKafka, monkeypatch: pytest.MonkeyPatch) -> None:
    pool = ConsumerPool()
    monkeypatch.setattr(committed, "POOL", pool)
    kafka = {"bootstrap.servers": cluster.bootstrap}
    with changelog_client(kafka) as first:
        pass
    with changelog_client(kafka) as second:
        assert second is first
    pool.close()
