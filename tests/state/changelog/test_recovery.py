"""Tests that unusable local state is replaced once and restored, with real databases and without Kafka."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from kafka_eos_source.errors import ChangelogError, RetriableError, StateCorruptedError, StateMismatchError
from kafka_eos_source.model import TopicPartition
from kafka_eos_source.state.changelog.recovery import (
    Reason,
    Restored,
    RestoreProgress,
    WipeNeeded,
    open_restored,
)
from kafka_eos_source.state.model import BatchRecord, StoreIdentity
from kafka_eos_source.state.store.rocksdb import StoreConfig
from kafka_eos_source.state.store.transactional import TransactionalStateStore

TP = TopicPartition("a-s-changelog", 0)
IDENTITY = StoreIdentity("a", "s", 0, 1, TP.topic, "topic-id")
READY = Restored(0, 0, Reason.NONE, 0.0)

Restore = Callable[[TransactionalStateStore], "Restored | WipeNeeded"]


class Case:
    def __init__(self, folder: Path) -> None:
        self.path = folder / "store"
        self.progress = RestoreProgress(TP)
        self.seen: list[dict[bytes, bytes]] = []
        with TransactionalStateStore.open(self.path, IDENTITY) as store:
            store.put(b"\x01old", b"1")
            store.commit({TP: 5}, batch=BatchRecord("q", 1, "a"))

    def run(self, restore: Restore, identity: StoreIdentity = IDENTITY) -> Restored:
        def seeing(store: TransactionalStateStore) -> Restored | WipeNeeded:
            self.seen.append(dict(store.all()))
            return restore(store)

        store, outcome = open_restored(self.path, identity, StoreConfig(), seeing, self.progress)
        assert store.is_open
        store.close()
        return outcome

    @property
    def aside(self) -> int:
        return len(list(self.path.parent.glob("store.corrupt-*")))


@pytest.fixture
def case(tmp_path: Path) -> Case:
    return Case(tmp_path)


def wiping(*reasons: Reason) -> Restore:
    left = list(reasons)
    return lambda _store: WipeNeeded(left.pop(0), "so says the test") if left else READY


def test_sound_local_state_is_kept(case: Case) -> None:
    assert case.run(wiping()) is READY
    assert case.seen == [{b"\x01old": b"1"}]
    assert case.progress.wiped is None


@pytest.mark.parametrize("reason", [Reason.TOO_OLD, Reason.OUT_OF_RANGE, Reason.NO_OFFSET])
def test_unusable_local_state_is_removed_and_restored(case: Case, reason: Reason) -> None:
    assert case.run(wiping(reason)) is READY
    assert case.seen == [{b"\x01old": b"1"}, {}]
    assert case.progress.wiped is reason
    assert case.aside == 0


def test_state_that_is_unusable_again_after_a_restore_is_an_error(case: Case) -> None:
    with pytest.raises(ChangelogError, match=r"too-old.*cannot be used either \(out-of-range.*retention, or"):
        case.run(wiping(Reason.TOO_OLD, Reason.OUT_OF_RANGE))
    with TransactionalStateStore.open(case.path, IDENTITY):
        """Opening succeeds only if the store was closed."""


def test_a_damaged_database_is_set_aside_and_restored(case: Case) -> None:
    (case.path / "db" / "CURRENT").write_bytes(b"nonsense\n")
    assert case.run(wiping()) is READY
    assert (case.seen, case.aside, case.progress.wiped) == ([{}], 1, Reason.CORRUPT)


def test_a_database_that_is_unusable_after_damage_was_replaced_is_an_error(case: Case) -> None:
    (case.path / "db" / "CURRENT").write_bytes(b"nonsense\n")
    with pytest.raises(ChangelogError, match=r"\(corrupt: .*\(out-of-range"):
        case.run(wiping(Reason.OUT_OF_RANGE))


def test_the_database_of_a_recreated_changelog_is_replaced(case: Case) -> None:
    recreated = replace(IDENTITY, topic_id="another")
    assert case.run(wiping(), recreated) is READY
    assert (case.seen, case.aside, case.progress.wiped) == ([{}], 0, Reason.OTHER_TOPIC)


def test_damage_that_a_read_detects_leads_to_a_restore(case: Case) -> None:
    damaged = [True]

    def restore(_store: TransactionalStateStore) -> Restored:
        if damaged:
            damaged.pop()
            raise StateCorruptedError("a block is not what it was")
        return READY

    assert case.run(restore) is READY
    assert (case.aside, case.progress.wiped) == (1, Reason.CORRUPT)


def test_repeated_damage_is_an_error(case: Case) -> None:
    def restore(_store: TransactionalStateStore) -> Restored:
        raise StateCorruptedError("the disk is bad")

    with pytest.raises(StateCorruptedError, match="the disk is bad"):
        case.run(restore)
    assert len(case.seen) == 2


@pytest.mark.parametrize("error", [RetriableError("later"), KeyboardInterrupt()])
def test_any_other_error_removes_no_state(case: Case, error: BaseException) -> None:
    """A broker that cannot be reached is no reason to wipe state."""

    def restore(_store: TransactionalStateStore) -> Restored:
        raise error

    with pytest.raises(type(error)):
        case.run(restore)
    assert case.run(wiping()) is READY
    assert case.seen[-1] == {b"\x01old": b"1"}


def test_the_store_of_another_query_is_not_changed(case: Case) -> None:
    with pytest.raises(StateMismatchError):
        case.run(wiping(), replace(IDENTITY, application_id="b"))
    assert case.run(wiping()) is READY
    assert case.seen == [{b"\x01old": b"1"}]
