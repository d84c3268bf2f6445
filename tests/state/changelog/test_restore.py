"""Tests of restoring a store, with a model of the log instead of a broker."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kafka_eos_source.errors import (
    ChangelogError,
    StateFormatError,
    StateLostError,
    StateMismatchError,
    UnavailableError,
)
from kafka_eos_source.kafka.reader import LogEnds, Pulled, Records
from kafka_eos_source.model import TopicPartition
from kafka_eos_source.runtime.deadline import Deadline
from kafka_eos_source.state.changelog import restore as module
from kafka_eos_source.state.changelog.recovery import (
    ReadRange,
    Reason,
    Restored,
    RestoreProgress,
    WipeNeeded,
    plan_restore,
    tag_restoring,
    untag_restoring,
)
from kafka_eos_source.state.changelog.restore import RestoreTarget, restore
from kafka_eos_source.state.model import BATCH_PREFIX, BatchRecord, Owner, StoreIdentity, encode_batch
from kafka_eos_source.state.store import durable
from kafka_eos_source.state.store.database import Database
from kafka_eos_source.state.store.transactional import TransactionalStateStore
from tests.state.state_kit import binary

TP = TopicPartition("app-s-changelog", 3)
IDENTITY = StoreIdentity("app", "s", 3, 4, TP.topic)
OWNER = Owner("app", "s", 4)
BATCH = BatchRecord("q", 7, "a1", "r", 1_000_000)
HOUR_MS = 3_600_000
NOW_MS = BATCH.time_ms + HOUR_MS


class Killed(Exception):
    """The process was killed."""


@dataclass
class Store:
    """Stands for a `TransactionalStateStore`: a chunk is written in full or not at all."""

    data: dict[bytes, bytes] = field(default_factory=dict)
    next: int | None = 0
    batch: BatchRecord | None = None
    restoring: bool = False
    chunks: int = 0
    killed_after: int = 1 << 60
    last_commit_ms: int = 0

    def next_offset(self, tp: TopicPartition) -> int | None:
        assert tp == TP
        return self.next

    def last_batch(self) -> BatchRecord | None:
        return self.batch

    def restore_chunk(
        self,
        keys: pa.BinaryArray,
        values: pa.BinaryArray,
        changelog_offsets: Mapping[TopicPartition, int],
        *,
        batch: BatchRecord | None = None,
        done: bool | None = None,
    ) -> None:
        if self.chunks >= self.killed_after:
            raise Killed
        self.chunks += 1
        assert OWNER.key not in keys.to_pylist()
        for key, value in zip(keys.to_pylist(), values.to_pylist(), strict=True):
            if value is None:
                self.data.pop(key, None)
            else:
                self.data[key] = value
        assert changelog_offsets[TP] >= (self.next or 0), "offsets never go back"
        self.next = changelog_offsets[TP]
        self.batch = batch or self.batch
        assert done is not None
        self.restoring = not done


Record = tuple[int, "bytes | None", "bytes | None"]


class Log:
    """A partition read with read_committed; an offset without a record is a control or removed record."""

    at_once = 1_000

    def __init__(
        self, records: Sequence[Record], end: int, *, start: int = 0, stable: int | None = None
    ) -> None:
        self.records = list(records)
        self.start_offset, self.end, self.stable = start, end, end if stable is None else stable
        self.at = -1
        self.assigned = False
        self.asked: list[str] = []
        self.told_end: int | None = None
        self.last_complaint = "the model says nothing"

    def start(self, position: int) -> None:
        self.at, self.assigned, self.told_end = position, True, None

    def stop(self) -> None:
        self.assigned = False

    def take(self, wait_seconds: float, end: int) -> Pulled:
        assert self.assigned
        if not self.start_offset <= self.at <= self.end:
            return Pulled(out_of_range=True)
        found = [each for each in self.records if self.at <= each[0] < self.stable][: self.at_once]
        pulled = Pulled()
        if found:
            self.at = found[-1][0] + 1
            kept = [each for each in found if each[0] < end]
            offsets = np.array([at for at, _, _ in kept], np.int64)
            keys, values = binary(key for _, key, _ in kept), binary(value for _, _, value in kept)
            pulled.records = Records(offsets, keys, values, min(self.at, end))
        elif self.told_end != self.stable:
            self.at = max(self.at, self.stable)
            self.told_end = self.stable
            pulled.log_end = self.stable
        self.between_reads()
        return pulled

    def between_reads(self) -> None:
        """Hook for what happens to the log between two reads."""

    def readable(self, deadline: Deadline) -> tuple[int, int]:
        self.asked.append("readable")
        return self.start_offset, self.stable

    def ends(self) -> LogEnds:
        self.asked.append("ends")
        return LogEnds(self.start_offset, self.stable, self.end)


def outcome_of(
    store: RestoreTarget, log: Log, end: int | None, seconds: float = 5.0, **more: Any
) -> Restored | WipeNeeded:
    more = {"clock_ms": lambda: NOW_MS, "owner": OWNER, **more}
    return restore(store, TP, end, log, deadline=Deadline.after_seconds(seconds), **more)


def run(store: Store, log: Log, end: int | None, seconds: float = 5.0, **more: Any) -> Restored:
    outcome = outcome_of(store, log, end, seconds, **more)
    assert isinstance(outcome, Restored), outcome
    assert not log.assigned, "nothing is fetched any more"
    return outcome


@pytest.fixture
def no_grace(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_SHORT_LOG_GRACE_SECONDS", -1.0)


# -- the plan


def plan(next_offset: int | None, batch: BatchRecord | None, start: int, end: int, **more: Any) -> Any:
    more = {"now_ms": NOW_MS, "delete_retention_ms": 24 * HOUR_MS, **more}
    return plan_restore(next_offset, batch, start, end, **more)


@pytest.mark.parametrize("next_offset", [None, 0])
def test_an_empty_store_reads_the_whole_changelog(next_offset: int | None) -> None:
    assert plan(next_offset, None, 0, 10) == ReadRange(0, 10, Reason.EMPTY, NOW_MS)
    assert plan(next_offset, None, 4, 10) == ReadRange(4, 10, Reason.EMPTY, NOW_MS)
    assert plan(next_offset, None, 0, 0) == ReadRange(0, 0, Reason.NONE, NOW_MS)


def test_a_store_at_the_committed_offset_reads_nothing_whatever_its_age() -> None:
    assert plan(10, BATCH, 0, 10, now_ms=10**15).start == 10
    assert plan(10, BATCH, 20, 10, now_ms=10**15).reason is Reason.NONE


def test_a_store_behind_the_committed_offset_reads_the_rest() -> None:
    assert plan(6, BATCH, 0, 10) == ReadRange(6, 10, Reason.CATCH_UP, BATCH.time_ms)
    assert plan(6, BATCH, 6, 10).start == 6


@pytest.mark.parametrize(
    ("next_offset", "start", "end", "reason"),
    [
        (None, 0, 10, Reason.NO_OFFSET),
        (5, 6, 10, Reason.OUT_OF_RANGE),
        (11, 0, 10, Reason.OUT_OF_RANGE),
        (5, 0, 0, Reason.OUT_OF_RANGE),
    ],
)
def test_a_store_that_cannot_be_brought_up_to_date_is_wiped(
    next_offset: int | None, start: int, end: int, reason: Reason
) -> None:
    assert plan(next_offset, BATCH, start, end).reason is reason
    assert isinstance(plan(next_offset, BATCH, start, end), WipeNeeded)


def test_a_store_is_too_old_after_half_the_retention_of_deletions() -> None:
    half = {"delete_retention_ms": 2 * HOUR_MS}
    assert isinstance(plan(6, BATCH, 0, 10, **half), ReadRange)
    late = plan(6, BATCH, 0, 10, **half, now_ms=NOW_MS + 1)
    assert isinstance(late, WipeNeeded)
    assert late.reason is Reason.TOO_OLD
    assert "1.0 h old" in late.why
    assert isinstance(plan(6, BATCH, 0, 10, delete_retention_ms=None, now_ms=10**15), ReadRange)


def test_the_age_of_a_store_is_known_although_a_clock_was_ahead_when_its_batch_ran() -> None:
    """Times of batches never go back, so all of them are ahead until the other clocks are there."""
    ahead = replace(BATCH, time_ms=NOW_MS + 1000 * HOUR_MS)
    young = plan(6, ahead, 0, 10, saved_ms=NOW_MS - HOUR_MS)
    assert young == ReadRange(6, 10, Reason.CATCH_UP, NOW_MS - HOUR_MS)
    for more in ({"saved_ms": NOW_MS - 13 * HOUR_MS}, {"saved_ms": ahead.time_ms}, {}):
        old = plan(6, ahead, 0, 10, **more)
        assert isinstance(old, WipeNeeded)
        assert old.reason is Reason.TOO_OLD
    assert plan(6, replace(BATCH, time_ms=NOW_MS + HOUR_MS), 0, 10).start == 6, "clocks differ a little"
    assert plan(6, BATCH, 0, 10, saved_ms=NOW_MS).since_ms == BATCH.time_ms


def test_a_store_written_under_a_clock_that_was_ahead_is_caught_up_only_while_it_is_young(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ahead = replace(BATCH, time_ms=NOW_MS + 1000 * HOUR_MS)
    log = Log([(4, b"k", None), (5, b"z", b"1")], 6)
    with TransactionalStateStore.open(tmp_path / "3", IDENTITY) as store:
        monkeypatch.setattr("time.time", lambda: NOW_MS / 1000)
        store.put(b"k", b"1")
        store.commit({TP: 4}, batch=ahead)
        for hours, wanted in [(13, WipeNeeded), (1, Restored)]:
            clock: Any = lambda hours=hours: NOW_MS + hours * HOUR_MS  # noqa: E731
            outcome = outcome_of(store, log, log.end, clock_ms=clock, delete_retention_ms=24 * HOUR_MS)
            assert isinstance(outcome, wanted)


def test_the_age_of_an_interrupted_restore_counts_from_its_own_start() -> None:
    half_way = tag_restoring(BATCH, NOW_MS)
    soon = plan(6, half_way, 0, 10, now_ms=NOW_MS + 5 * HOUR_MS, delete_retention_ms=12 * HOUR_MS)
    assert soon == ReadRange(6, 10, Reason.RESUMED, NOW_MS)
    late = plan(6, half_way, 0, 10, now_ms=NOW_MS + 7 * HOUR_MS, delete_retention_ms=12 * HOUR_MS)
    assert isinstance(late, WipeNeeded)


@given(
    st.none() | st.text().map(lambda attempt: replace(BATCH, task_attempt_id=attempt)), st.integers(0, 2**62)
)
def test_the_tag_of_an_unfinished_restore_survives_encoding_and_decoding(
    batch: BatchRecord | None, since_ms: int
) -> None:
    expected = batch or BatchRecord("", -1, "")
    assert untag_restoring(tag_restoring(batch, since_ms)) == (expected, since_ms)


def test_a_batch_record_without_a_tag_is_not_an_unfinished_restore() -> None:
    assert untag_restoring(BATCH) == (BATCH, None)


# -- the restored store


def test_a_changelog_with_one_record_is_restored() -> None:
    store = Store()
    found = run(store, Log([(0, b"k", b"v")], 1), 1)
    assert (store.data, store.next, found.records) == ({b"k": b"v"}, 1, 1)
    assert found.reason is Reason.EMPTY


@pytest.mark.parametrize("end", [4, 9])
def test_a_changelog_may_end_with_control_records_only(end: int) -> None:
    store = Store()
    found = run(store, Log([(0, b"k", b"v"), (2, b"l", b"w")], end), end)
    assert (store.next, found.records, found.skipped) == (end, 2, end - 2)


@pytest.mark.parametrize("end", [0, 6])
def test_an_empty_changelog_restores_an_empty_store(end: int) -> None:
    store = Store()
    log = Log([], end)
    assert run(store, log, end).records == 0
    assert (store.data, store.next, store.batch, store.restoring) == ({}, end, None, False)


def test_an_offset_out_of_range_is_returned_as_a_reason_to_wipe() -> None:
    store = Store({b"old": b"1"}, next=5, batch=BATCH)
    for log in (Log([], 9, start=6), Log([], 3)):
        outcome = outcome_of(store, log, log.end, has_snapshots=True)
        assert isinstance(outcome, WipeNeeded)
        assert outcome.reason is Reason.OUT_OF_RANGE
    assert store.data == {b"old": b"1"}, "nothing was done yet"


def test_an_outdated_leader_is_not_asked_all_the_time() -> None:
    class Outdated(Log):
        takes = 0

        def take(self, wait_seconds: float, end: int) -> Pulled:
            self.takes += 1
            return Pulled(out_of_range=True)

    log = Outdated([], 9)
    with pytest.raises(UnavailableError, match="at offset 2 of 9"):
        outcome_of(Store(next=2, batch=BATCH), log, 9, seconds=0.5)
    assert log.takes < 10


def test_a_log_that_loses_its_start_during_the_restore_is_a_reason_to_wipe() -> None:
    class Losing(Log):
        def take(self, wait_seconds: float, end: int) -> Pulled:
            self.start_offset = 7
            return super().take(wait_seconds, end)

    store = Store(next=2, batch=BATCH)
    outcome = outcome_of(store, Losing([], 9), 9, has_snapshots=True)
    assert isinstance(outcome, WipeNeeded)
    assert outcome.why == "it holds the changelog up to offset 2; the log now starts at 7"


def test_a_restore_that_was_suspended_until_compaction_removed_a_delete_begins_again() -> None:
    now_ms = NOW_MS

    class Suspended(Log):
        at_once = 2

        def between_reads(self) -> None:
            nonlocal now_ms
            if now_ms == NOW_MS:  # after the value of k was read, and before its delete
                now_ms += 25 * HOUR_MS
                self.records = [each for each in self.records if each[0] not in (0, 5)]

    log = Suspended(
        [(0, b"k", b"1"), *((at, b"other", b"1") for at in range(1, 5)), (5, b"k", None), (6, b"z", b"1")], 7
    )

    def restored(store: Store) -> Restored | WipeNeeded:
        return outcome_of(store, log, log.end, clock_ms=lambda: now_ms, delete_retention_ms=24 * HOUR_MS)

    outcome = restored(Store())
    assert isinstance(outcome, WipeNeeded)
    assert outcome.reason is Reason.TOO_OLD
    assert "25.0 h old before its restore ends; with delete.retention.ms=86400000" in outcome.why
    assert not log.assigned
    again = Store()
    assert isinstance(restored(again), Restored)
    assert again.data == {b"other": b"1", b"z": b"1"}


def test_the_age_of_a_restore_that_was_killed_in_its_first_chunk_counts_from_its_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The rows of a large chunk are on disk before the chunk's offset and batch."""
    monkeypatch.setattr(durable, "_INGEST_ROWS", 2)
    monkeypatch.setattr(module, "CHUNK_RECORDS", 2)
    ingest = Database.ingest

    def killed(*args: Any, **kwargs: Any) -> None:
        ingest(*args, **kwargs)
        raise Killed

    log = Log([(0, b"k", b"1"), (1, b"l", b"1"), (2, b"k", None), (3, b"z", b"1")], 4)
    log.at_once = 2
    now_ms = NOW_MS

    def task() -> Restored | WipeNeeded:
        with TransactionalStateStore.open(tmp_path / "3", IDENTITY) as store:
            return outcome_of(store, log, log.end, clock_ms=lambda: now_ms, delete_retention_ms=24 * HOUR_MS)

    with monkeypatch.context() as mutation:
        mutation.setattr(Database, "ingest", killed)
        with pytest.raises(Killed):
            task()
    now_ms += 25 * HOUR_MS
    # compaction removes the value and its delete
    log.records = [each for each in log.records if each[0] not in (0, 2)]
    outcome = task()
    if isinstance(outcome, WipeNeeded):
        assert outcome.reason is Reason.TOO_OLD
        TransactionalStateStore.destroy(tmp_path / "3")
        assert isinstance(task(), Restored)
    with TransactionalStateStore.open(tmp_path / "3", IDENTITY) as store:
        assert dict(store.all()) == {b"l": b"1", b"z": b"1"}, "the deleted key came back"
    assert isinstance(outcome, WipeNeeded)


def test_no_request_is_sent_for_a_store_at_the_committed_offset() -> None:
    store = Store({b"k": b"v"}, next=9, batch=BATCH)
    log = Log([(8, b"k", b"other")], 12)
    found = run(store, log, 9)
    assert (found.records, found.skipped, found.reason) == (0, 0, Reason.NONE)
    assert not log.asked
    assert not store.chunks


def test_only_records_before_the_committed_offset_are_read() -> None:
    """Records after the committed offset belong to a batch whose transaction is not decided."""
    store = Store()
    log = Log([(0, b"k", b"1"), (1, b"k", b"2"), (2, b"k", b"3"), (3, b"l", b"4")], 5)
    assert run(store, log, 2).records == 2
    assert (store.data, store.next) == ({b"k": b"2"}, 2)


def test_the_last_value_of_a_key_wins_and_null_deletes_it() -> None:
    store = Store({b"gone": b"1", b"back": b"1"}, next=0, batch=BATCH)
    log = Log(
        [
            (0, b"gone", b"2"),
            (1, b"gone", None),
            (2, b"back", None),
            (3, b"back", b"2"),
            (4, b"never", None),
        ],
        5,
    )
    run(store, log, 5)
    assert store.data == {b"back": b"2"}


def test_the_batch_record_is_not_restored_as_data() -> None:
    store = Store()
    log = Log(
        [
            (0, OWNER.key, encode_batch(replace(BATCH, batch_id=6))),
            (1, b"k", b"v"),
            (2, OWNER.key, encode_batch(BATCH)),
            (3, b"l", b"w"),
        ],
        5,
    )
    run(store, log, 5)
    assert (store.batch, store.restoring, set(store.data)) == (BATCH, False, {b"k", b"l"})


def test_without_a_batch_record_the_state_is_older_than_all_batches() -> None:
    store = Store()
    run(store, Log([(0, b"k", b"v")], 1), 1)
    assert store.batch == BatchRecord("", -1, "")


def test_a_batch_record_of_a_newer_format_fails_the_restore() -> None:
    with pytest.raises(StateFormatError):
        run(Store(), Log([(0, OWNER.key, b'{"v":9}')], 1), 1)


@pytest.mark.parametrize("key", [None, b""])
def test_a_record_of_another_program_fails_the_restore(key: bytes | None) -> None:
    store = Store()
    with pytest.raises(ChangelogError, match="without a key between offsets 0 and 2"):
        run(store, Log([(0, b"k", b"v"), (1, key, b"v")], 2), 2)
    assert not store.data


def test_the_restore_waits_for_another_programs_transaction_and_then_names_it() -> None:
    log = Log([(0, b"k", b"v")], 5, stable=1)
    with pytest.raises(ChangelogError, match=r"open transaction.*at offset 1, .*continues to 5.*\.sh"):
        run(Store(), log, None, seconds=0.05)


def test_the_restore_continues_when_another_programs_transaction_ends() -> None:
    class Ending(Log):
        def ends(self) -> LogEnds:
            found = super().ends()
            self.stable = self.end
            return found

    store = Store()
    found = run(store, Ending([(0, b"k", b"v"), (3, b"k", b"w")], 5, stable=1), None)
    assert (found.records, store.data, store.next) == (2, {b"k": b"w"}, 5)


def test_the_open_transaction_of_an_earlier_driver_is_ended_once() -> None:
    log = Log([(0, b"k", b"v")], 5, stable=1)
    ended: list[Deadline] = []

    def end_transaction(deadline: Deadline) -> None:
        ended.append(deadline)
        log.stable = log.end

    assert run(Store(), log, None, end_transaction=end_transaction).records == 1
    with pytest.raises(ChangelogError, match="open transaction"):
        run(Store(), Log([], 5, stable=1), None, seconds=0.05, end_transaction=ended.append)
    assert len(ended) == 2


@pytest.mark.usefixtures("no_grace")
def test_the_changelogs_control_record_may_arrive_after_that_of_the_group() -> None:
    """The group's offset is committed while the same transaction still looks open in the changelog."""

    class Late(Log):
        looks = 0

        def between_reads(self) -> None:
            self.looks += 1
            if self.looks == 5:
                self.stable = self.end

    store = Store()
    log = Late([(0, b"k", b"1"), (2, b"k", b"2"), (3, b"l", b"3")], 5, stable=1)
    assert run(store, log, 4).records == 3
    assert (store.next, store.data) == (4, {b"k": b"2", b"l": b"3"})


def test_a_control_record_that_never_arrives_is_an_error() -> None:
    log = Log([(0, b"k", b"1"), (2, b"k", b"2")], 5, stable=1)
    with pytest.raises(ChangelogError, match=r"at offset 1, below the committed offset 4"):
        run(Store(), log, 4, seconds=0.05)


@pytest.mark.usefixtures("no_grace")
@pytest.mark.parametrize("position", [0, 3])
def test_a_changelog_that_lost_its_end_is_an_error(position: int) -> None:
    log = Log([(0, b"k", b"1")], 2)
    with pytest.raises(ChangelogError, match=r"committed up to offset 9 and ends at 2"):
        run(Store(next=position, batch=BATCH), log, 9)


def test_a_broker_that_sends_nothing_is_an_error() -> None:
    class Silent(Log):
        def take(self, wait_seconds: float, end: int) -> Pulled:
            assert 0 <= wait_seconds <= 0.2
            return Pulled()

    log = Silent([], 5)
    log.last_complaint = "broker 1 is down"
    with pytest.raises(UnavailableError, match=r"at offset 2 of 5.*broker 1 is down"):
        run(Store(next=2, batch=BATCH), log, 5, seconds=0.05)
    assert not log.assigned


def test_a_deleted_changelog_is_an_error() -> None:
    class Gone(Log):
        def take(self, wait_seconds: float, end: int) -> Pulled:
            return Pulled(gone=True)

    with pytest.raises(UnavailableError, match="was deleted"):
        run(Store(), Gone([], 5), 5)


def test_the_time_limit_restarts_with_each_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    """A long restore is no error; only silence is."""
    seconds = [0.0]
    monkeypatch.setattr("time.monotonic", lambda: seconds[0])

    class Slow(Log):
        at_once = 1
        calls = 0

        def take(self, wait_seconds: float, end: int) -> Pulled:
            self.calls += 1
            if self.calls % 3:
                seconds[0] += 1.0
                return Pulled()
            return super().take(wait_seconds, end)

    log = Slow([(at, b"k%d" % at, b"v") for at in range(12)], 12)
    assert run(Store(), log, 12, seconds=3.0).records == 12
    assert seconds[0] > 20.0, "all answers together take longer than one may"


def test_chunks_of_large_values_have_fewer_records(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "CHUNK_BYTES", 4000)
    monkeypatch.setattr(Log, "at_once", 16)
    store = Store()
    run(store, Log([(at, b"%d" % at, b"x" * 100) for at in range(320)], 320), 320)
    assert store.chunks == 7 + 1, "three looks fill a chunk; the last write ends the restore"


# -- whose state it is, and whether all of it is there


@pytest.mark.parametrize(
    ("owner", "error"),
    [
        (Owner("app-s", "t", 4), ChangelogError),
        (Owner("app", "other", 4), ChangelogError),
        (Owner("app", "s", 3), StateMismatchError),
    ],
)
def test_the_state_of_another_owner_is_not_restored(owner: Owner, error: type[Exception]) -> None:
    """Compaction keeps the newest batch record of each owner, wherever it is in the log."""
    for at in ((0, 1), (1, 0)):
        found = sorted(zip(at, (owner.key, OWNER.key), (encode_batch(BATCH),) * 2, strict=True))
        store = Store()
        with pytest.raises(error, match=f"holds the state of {owner}; expected the state of {OWNER}"):
            run(store, Log([*found, (2, b"k", b"v")], 3), 3)
        assert not store.data


def test_a_batch_record_names_its_owner() -> None:
    assert Owner.of_key(OWNER.key) == OWNER
    for key in (BATCH_PREFIX, BATCH_PREFIX + b"a/b", BATCH_PREFIX + b"a/b/c", BATCH_PREFIX + b"\xff/b/1"):
        with pytest.raises(ChangelogError, match="which kafka-eos did not write"):
            Owner.of_key(key)


def test_an_empty_store_is_not_filled_from_a_log_that_lost_its_beginning() -> None:
    log = Log([(6, b"k", b"v")], 9, start=6)
    for end in (9, None):
        with pytest.raises(StateLostError, match=r"begins at offset 6, and there is no local state"):
            run(Store(), log, end)
    accepted = Store()
    run(accepted, log, 9, accepted_start=6)
    assert accepted.data == {b"k": b"v"}
    run(Store(next=6, batch=BATCH), log, 9)
    run(Store(next=9, batch=BATCH), log, 9)


@pytest.mark.parametrize("next_offset", [5, 11])
def test_local_state_that_the_log_cannot_replace_is_not_given_up(next_offset: int) -> None:
    store = Store({b"old": b"1"}, next=next_offset, batch=BATCH)
    with pytest.raises(StateLostError, match=r"the local state cannot be used \(it holds .* offset"):
        run(store, Log([], 9, start=6), 9)


# -- killed and started again

keys = st.sampled_from([b"\x01a", b"\x01b", b"\x01c", b"\x81d"])
history = st.lists(
    st.one_of(
        st.tuples(keys, st.none() | st.binary(max_size=3)),
        st.builds(
            lambda number: (OWNER.key, encode_batch(replace(BATCH, batch_id=number))), st.integers(0, 9)
        ),
        st.none(),
    ),
    max_size=40,
)


@given(history, st.lists(st.integers(0, 4), max_size=4), st.integers(1, 7), st.integers(1, 9), st.data())
def test_kills_gaps_and_repeated_reads_do_not_change_the_restored_state(
    log_: Any, kills: list[int], at_most: int, chunk_records: int, data: st.DataObject
) -> None:
    """The state equals that of one uninterrupted restore, after kills at any chunk."""
    found = [(at, *each) for at, each in enumerate(log_) if each is not None]
    end = len(log_)
    expected = Store()
    run(expected, Log(found, end), end)

    store = Store()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Log, "at_once", at_most)
        patch.setattr(module, "CHUNK_RECORDS", chunk_records)
        for chunks in kills:
            store.chunks, store.killed_after = 0, chunks
            try:
                run(store, Log(found, end), end)
            except Killed:
                pass
            else:
                break
        store.killed_after = 1 << 60
        run(store, Log(found, end), end)
        assert (store.data, store.next, store.batch) == (expected.data, expected.next, expected.batch)
        assert not store.restoring

        again = replace(store, data=dict(store.data), next=data.draw(st.integers(0, end)), chunks=0)
        run(again, Log(found, end), end)
        assert (again.data, again.next) == (expected.data, expected.next), "read twice, the same"


def test_a_killed_restore_continues_where_it_stopped(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Log, "at_once", 30)
    monkeypatch.setattr(module, "CHUNK_RECORDS", 100)
    found = [(at, b"k%d" % at, b"v") for at in range(1000)]
    store = Store(killed_after=1)
    with pytest.raises(Killed):
        run(store, Log(found, 1000), 1000)
    reached = store.next
    assert reached == 120
    assert store.restoring
    store.killed_after = 1 << 60
    outcome = run(store, Log(found, 1000), 1000)
    assert (outcome.records, outcome.reason) == (1000 - reached, Reason.RESUMED)
    assert len(store.data) == 1000


# -- progress


def test_progress_is_reported_and_logged(caplog: pytest.LogCaptureFixture) -> None:
    now = [100.0]
    progress = RestoreProgress(TP, clock=lambda: now[0])
    progress.begin(Reason.CATCH_UP, 50, 1050)
    with caplog.at_level(logging.INFO):
        now[0] += 9
        progress.advance(100, 200)
        assert not caplog.records
        now[0] += 1
        progress.advance(400, 650)
    assert (
        "restoring app-s-changelog-3 (catch-up): 500 records in 10.0 s (50/s), at offset 650 of 1050"
        in caplog.text
    )
    assert progress.metrics() == {
        "restore-records-total": 500,
        "restore-remaining-records": 400,
        "restore-rate": 50.0,
        "restore-time-ms": 10_000.0,
        "restore-reason": "catch-up",
    }
    progress.done()
    now[0] += 100
    assert progress.metrics()["restore-time-ms"] == 10_000.0


def test_the_reason_of_a_wipe_is_reported_with_the_restore() -> None:
    progress = RestoreProgress(TP, wiped=Reason.TOO_OLD)
    store = Store()
    outcome = run(store, Log([(0, b"k", b"v")], 1), 1, progress=progress)
    assert outcome.reason is Reason.TOO_OLD
    assert progress.metrics()["restore-reason"] == "too-old"
    assert progress.metrics()["restore-remaining-records"] == 0
