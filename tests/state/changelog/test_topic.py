"""Tests of the changelog topic, its batch record, and how a shard's committed offset is read."""

from __future__ import annotations

import json
import socket
from collections.abc import Callable, Collection, Iterator
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kafka_eos_source.errors import (
    AuthorizationError,
    ChangelogError,
    InvalidOptionError,
    OperatorError,
    StateFormatError,
    StateMismatchError,
    UnavailableError,
)
from kafka_eos_source.kafka.error_codes import ErrorCode
from kafka_eos_source.kafka.fetch import RangeConsumer
from kafka_eos_source.kafka.group import GroupOffsets
from kafka_eos_source.kafka.reader import ConsumerPool
from kafka_eos_source.kafka.topic_admin import TopicShape
from kafka_eos_source.model import GroupOffset, TopicPartition
from kafka_eos_source.runtime.deadline import Deadline
from kafka_eos_source.state.changelog import topic
from kafka_eos_source.state.changelog import topic as changelog
from kafka_eos_source.state.changelog.topic import (
    ChangelogTopic,
    CommittedShard,
    changelog_client,
    changelog_name,
    check,
    ensure,
)
from kafka_eos_source.state.model import BatchRecord, decode_batch, encode_batch
from tests.support.simulated_kafka import Fault, SimulatedKafka

CONFIG = {"cleanup.policy": "compact", "delete.retention.ms": "86400000"}
SHAPE = TopicShape(4, True, "id-1")

records = st.builds(
    BatchRecord,
    query_id=st.text(max_size=40),
    batch_id=st.integers(-1, 2**63 - 1),
    task_attempt_id=st.text(max_size=40),
    run_id=st.text(max_size=40),
    time_ms=st.integers(0, 2**63 - 1),
    event_time_ms=st.none() | st.integers(-(2**63), 2**63 - 1),
    counts=st.dictionaries(st.text(max_size=9), st.integers(0, 2**63 - 1), max_size=3),
)


def test_the_changelog_topic_is_named_as_in_kafka_streams() -> None:
    assert changelog_name("orders", "counts") == "orders-counts-changelog"


@pytest.mark.parametrize("store", ["a b", "ä", "x" * 240, "a/b"])
def test_a_store_name_that_makes_no_valid_topic_name_is_refused(store: str) -> None:
    with pytest.raises(InvalidOptionError, match="letters, digits"):
        changelog_name("orders", store)


def test_a_suitable_topic_is_accepted() -> None:
    assert check("c", SHAPE, CONFIG, 4) == ChangelogTopic("c", "id-1", 4, 86_400_000)


@pytest.mark.parametrize("shards", [1, 3, 5])
def test_another_number_of_partitions_is_refused(shards: int) -> None:
    with pytest.raises(StateMismatchError, match=f"has 4 partitions.*has {shards} shards.*state rescale"):
        check("c", SHAPE, CONFIG, shards)


@pytest.mark.parametrize("policy", ["delete", "", "compact,delete", "delete, compact"])
def test_only_a_compacted_topic_is_a_changelog(policy: str) -> None:
    with pytest.raises(ChangelogError, match=r"kafka-configs\.sh .*cleanup\.policy=compact"):
        check("c", SHAPE, {**CONFIG, "cleanup.policy": policy}, 4)


class Topics:
    """Stands for `TopicAdmin`: a cluster that has, or gets, one topic."""

    def __init__(self, shape: TopicShape | None, raced: TopicShape | None = None) -> None:
        self.there, self._raced = shape, raced
        self.created: list[tuple[Any, ...]] = []

    def __call__(self, kafka: Any) -> Topics:
        return self

    def __enter__(self) -> Topics:
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def shape(self, name: str, deadline: Deadline) -> TopicShape | None:
        return self.there

    def create(
        self, name: str, partitions: int, replication: int, config: dict[str, str], deadline: Deadline
    ) -> bool:
        self.created.append((name, partitions, replication, config))
        self.there = self._raced or TopicShape(partitions, True, "new")
        return self._raced is None

    def await_led(self, name: str, deadline: Deadline) -> TopicShape:
        assert self.there is not None
        return self.there

    def config(self, name: str, deadline: Deadline) -> dict[str, str]:
        return CONFIG

    def cluster_id(self, deadline: Deadline) -> str:
        return "cluster-1"


def _ensure(monkeypatch: pytest.MonkeyPatch, topics: Topics, **more: Any) -> ChangelogTopic:
    monkeypatch.setattr(changelog, "TopicAdmin", topics)
    return ensure({}, "c", 4, deadline=Deadline.after_seconds(5), **more)


def test_a_missing_topic_is_created_compacted(monkeypatch: pytest.MonkeyPatch) -> None:
    topics = Topics(None)
    assert _ensure(monkeypatch, topics, replication_factor=3, min_insync=2).topic_id == "new"
    assert topics.created == [("c", 4, 3, {"cleanup.policy": "compact", "min.insync.replicas": "2"})]


def test_a_new_topic_keeps_the_brokers_defaults(monkeypatch: pytest.MonkeyPatch) -> None:
    topics = Topics(None)
    _ensure(monkeypatch, topics)
    assert topics.created == [("c", 4, -1, {"cleanup.policy": "compact"})]


def test_an_existing_topic_is_not_created_again(monkeypatch: pytest.MonkeyPatch) -> None:
    topics = Topics(SHAPE)
    assert _ensure(monkeypatch, topics).topic_id == "id-1"
    assert not topics.created


def test_a_topic_that_another_process_creates_meanwhile_is_checked(monkeypatch: pytest.MonkeyPatch) -> None:
    assert _ensure(monkeypatch, Topics(None, raced=SHAPE)).topic_id == "id-1"
    with pytest.raises(StateMismatchError, match="has 7 partitions"):
        _ensure(monkeypatch, Topics(None, raced=replace(SHAPE, partitions=7)))


def test_a_missing_topic_may_be_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    topics = Topics(None)
    with pytest.raises(ChangelogError, match=r"does not exist.*kafka-topics\.sh .* --partitions 4"):
        _ensure(monkeypatch, topics, create=False)
    assert not topics.created


@given(records)
def test_a_batch_record_survives_encoding_and_decoding(record: BatchRecord) -> None:
    assert decode_batch(encode_batch(record)) == record


def test_the_format_of_a_batch_record_is_stable() -> None:
    record = BatchRecord("q", 7, "a1", "r", 123, -5, end_digest="e")
    written = b'{"v":1,"query":"q","batch":7,"attempt":"a1","run":"r","time":123,"event":-5,"end":"e"}'
    assert encode_batch(record) == written
    assert decode_batch(written) == record


def test_a_newer_batch_record_is_refused() -> None:
    with pytest.raises(StateFormatError, match=r"format 2.*reads format 1.*newer version"):
        decode_batch(json.dumps({"v": 2, "all": "new"}).encode())


@pytest.mark.parametrize("value", [b"", b"{", b"\xff\xfe", b"[]", b"7", b'{"v":1}', b'{"v":"one"}'])
def test_an_invalid_batch_record_is_refused(value: bytes) -> None:
    with pytest.raises(ChangelogError, match="damaged"):
        decode_batch(value)


# ---------------------------------------- the committed offset
#
# The reader waits, ends a transaction, and never answers a false "no offset".


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

        monkeypatch.setattr(topic, "stable_offsets", stable_offsets)
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
    monkeypatch.setattr(topic, "POOL", pool)
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
        ErrorCode.NOT_COORDINATOR,
        ErrorCode.COORDINATOR_LOAD_IN_PROGRESS,
        ErrorCode.COORDINATOR_NOT_AVAILABLE,
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
    refusing(cluster, ErrorCode.COORDINATOR_LOAD_IN_PROGRESS, 3)
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
    refusing(cluster, ErrorCode.UNSTABLE_OFFSET_COMMIT, 2)
    offsets = GroupOffsets({"bootstrap.servers": cluster.bootstrap})
    assert offsets.committed_now(GROUP, [TP], deadline_in()) == {TP: HELD}


def test_deleting_a_group_ends_at_the_deadline() -> None:
    """librdkafka alone would retry for an hour."""
    with socket.create_server(("127.0.0.1", 0)) as silent:
        group = GroupOffsets({"bootstrap.servers": f"127.0.0.1:{silent.getsockname()[1]}"})
        with pytest.raises(UnavailableError, match="deleting group 'group'"):
            group.delete_group("group", Deadline.after_seconds(0.5))


def test_the_error_names_the_missing_acl(cluster: SimulatedKafka, consumer: RangeConsumer) -> None:
    refusing(cluster, ErrorCode.GROUP_AUTHORIZATION_FAILED, 1)
    with pytest.raises(AuthorizationError, match=r"offsets of group 'orders' for .*-changelog-1"):
        CommittedShard(consumer, GROUP, TP).offset(deadline_in())


def test_no_coordinator_is_an_error(cluster: SimulatedKafka, consumer: RangeConsumer) -> None:
    refusing(cluster, ErrorCode.COORDINATOR_NOT_AVAILABLE, 1000)
    with pytest.raises(UnavailableError, match="offsets of group 'orders'"):
        CommittedShard(consumer, GROUP, TP).offset(deadline_in(0.3))


def test_a_group_that_does_not_exist_has_no_offsets(cluster: SimulatedKafka, consumer: RangeConsumer) -> None:
    refusing(cluster, ErrorCode.GROUP_ID_NOT_FOUND, 1)
    assert CommittedShard(consumer, GROUP, TP).offset(deadline_in()) is None


def test_a_broker_that_cannot_tell_stable_offsets_is_refused(
    cluster: SimulatedKafka, consumer: RangeConsumer
) -> None:
    cluster.announced = {"OffsetFetch": (0, 6)}
    with pytest.raises(OperatorError, match="does not support OffsetFetchRequest"):
        CommittedShard(consumer, GROUP, TP).offset(deadline_in())


def test_the_client_is_kept_between_tasks(cluster: SimulatedKafka, monkeypatch: pytest.MonkeyPatch) -> None:
    pool = ConsumerPool()
    monkeypatch.setattr(topic, "POOL", pool)
    kafka = {"bootstrap.servers": cluster.bootstrap}
    with changelog_client(kafka) as first:
        pass
    with changelog_client(kafka) as second:
        assert second is first
    pool.close()
