"""Tests of the changelog topic and its batch record: names, checks and formats, without a broker."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kafka_eos_source.errors import (
    ChangelogError,
    InvalidOptionError,
    StateFormatError,
    StateMismatchError,
)
from kafka_eos_source.kafka.topic_admin import TopicShape
from kafka_eos_source.runtime.deadline import Deadline
from kafka_eos_source.state.changelog import topic as changelog
from kafka_eos_source.state.changelog.topic import (
    ChangelogTopic,
    changelog_name,
    check,
    ensure,
)
from kafka_eos_source.state.model import BatchRecord, decode_batch, encode_batch

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
