"""Tests of the store itself: staged writes, commits and offsets, pending batches, restored chunks."""

from __future__ import annotations

import inspect
import os
from collections.abc import Callable, Iterator
from pathlib import Path

import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kafka_eos_source.errors import (
    NotUpToBoundError,
    OffsetWentBackError,
    StateCorruptedError,
    StateError,
    StateMismatchError,
    StoreClosedError,
)
from kafka_eos_source.model import TopicPartition
from kafka_eos_source.state.model import BatchRecord, StateAccess
from kafka_eos_source.state.store.database import Database
from kafka_eos_source.state.store.durable import in_key_order
from kafka_eos_source.state.store.overlay import SortedKeys
from kafka_eos_source.state.store.rocksdb import WriteBatch
from kafka_eos_source.state.store.transactional import StateHandle, TransactionalStateStore
from tests.state.state_kit import IDENTITY, INPUT, TINY, TP, binary, key, put_rows, record

A, B, C, D, E, F = (b"\1" + letter for letter in (b"a", b"b", b"c", b"d", b"e", b"f"))


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "s"


@pytest.fixture
def store(path: Path) -> Iterator[TransactionalStateStore]:
    with TransactionalStateStore.open(path, IDENTITY) as opened:
        yield opened


def fill(store: TransactionalStateStore, *keys: bytes, offset: int = 0) -> None:
    """Commits each key with the key as its value."""
    put_rows(store, [(each, each) for each in keys])
    store.commit({TP: offset})


def keys(pairs: Iterator[tuple[bytes, bytes]]) -> list[bytes]:
    return [key for key, _ in pairs]


@pytest.mark.parametrize("mode", [None, 0o755, 0o777])
def test_only_the_owner_may_open_the_folder_of_a_store(path: Path, mode: int | None) -> None:
    """The files that RocksDB creates have the usual permissions, so the folder protects them."""
    if mode is not None:
        path.mkdir()
        path.chmod(mode)
    before = os.umask(0)
    try:
        with TransactionalStateStore.open(path, IDENTITY) as opened:
            fill(opened, A)
    finally:
        os.umask(before)
    assert path.stat().st_mode & 0o777 == 0o700


# ------------------------------------------------------------------ staged writes and scans


def test_scans_contain_neither_offsets_nor_pending_changes(store: TransactionalStateStore) -> None:
    """KAFKA-20749: an outer join of Kafka Streams found staged offsets among its data."""
    store.put(A, A)
    store.commit({TP: 7})
    store.persist_pending(record(0))
    for scan in (store.all(), store.range(), store.prefix_scan(b""), store.range(reverse=True)):
        assert keys(scan) == [A]


def test_staged_puts_and_deletes_hide_committed_values(store: TransactionalStateStore) -> None:
    fill(store, A, B, C)
    store.put(B, b"new")
    store.delete(C)
    store.put(D, b"d")
    assert list(store.all()) == [(A, A), (B, b"new"), (D, b"d")]
    assert list(store.range(reverse=True)) == [(D, b"d"), (B, b"new"), (A, A)]
    assert [store.get(each) for each in (A, B, C, D)] == [A, b"new", None, b"d"]
    assert store.get_many(pa.array([C, D, C, E, A], pa.binary())).to_pylist() == [None, b"d", None, None, A]


@pytest.mark.parametrize("between", [0, 500], ids=["few keys", "many keys"])
def test_a_put_after_a_range_delete_is_kept(path: Path, between: int) -> None:
    """Few keys are deleted one by one, many as a range; the result is the same."""
    with TransactionalStateStore.open(path, IDENTITY) as store:
        fill(store, A, B, C, D, E, F, *(B + key(n) for n in range(between)))
        store.put(D + b"staged", b"")
        store.delete_range(B, E)
        store.put(C, b"again")
        assert list(store.all()) == [(A, A), (C, b"again"), (E, E), (F, F)]
        assert list(store.range(B, F, reverse=True)) == [(E, E), (C, b"again")]
        assert [store.get(each) for each in (A, B, C, D)] == [A, None, b"again", None]
        assert store.get_many(pa.array([A, B, C], pa.binary())).to_pylist() == [A, None, b"again"]
        assert bool(store._uncommitted.overlay.ranges) is bool(between)
        changed = [row for rows in store.staged_changes() for row in rows["key"].to_pylist()]
        assert sorted(changed) == [B, *(B + key(n) for n in range(between)), C, D]
        store.commit({TP: 1})
    with TransactionalStateStore.open(path, IDENTITY) as store:
        assert list(store.all()) == [(A, A), (C, b"again"), (E, E), (F, F)]


def test_a_range_delete_without_an_end_deletes_to_the_last_key(store: TransactionalStateStore) -> None:
    many = [key(n) for n in range(400)]
    fill(store, *many, b"\xff\xff\xff")
    store.delete_range(many[5], None)
    assert keys(store.all()) == many[:5]
    store.commit({TP: 1})
    assert keys(store.all()) == many[:5]


def test_a_scan_shows_the_state_at_its_start(store: TransactionalStateStore) -> None:
    many = [key(n) for n in range(300)]
    fill(store, *many[::2])
    put_rows(store, [(each, each) for each in many[1::2]])
    scans = [store.all(), store.range(reverse=True), store.prefix_scan(b"\1k")]
    first = [next(scan)[0] for scan in scans]
    store.delete_range(many[10], many[290])
    store.delete_range(many[10], many[280])
    store.put(many[20], b"new")
    store.delete(many[0])
    store.commit({TP: 1})
    assert [first[0], *keys(scans[0])] == many
    assert [first[1], *keys(scans[1])] == many[::-1]
    assert [first[2], *keys(scans[2])] == many


def test_a_scan_that_fails_to_start_leaves_nothing_open(store: TransactionalStateStore) -> None:
    fill(store, *(key(n) for n in range(100)))
    store.put(A, b"")
    for wrong in ("text", 5):
        with pytest.raises((TypeError, StateError)):
            store.range(wrong)  # type: ignore[arg-type]
    assert len(store._scans) == 0


def test_put_many_stages_all_rows_or_none(store: TransactionalStateStore) -> None:
    with pytest.raises(ValueError, match="nothing was staged"):
        store.put_many(pa.array([A, None], pa.binary()), pa.array([b"1", b"2"], pa.binary()))
    with pytest.raises(ValueError, match="None"):
        store.put(None, b"1")  # type: ignore[arg-type]
    assert store.approximate_num_uncommitted_bytes() == 0
    put_rows(store, [(A, b"1"), (B, b"2")])
    with store.view() as view:
        assert list(view.all()) == []
    store.commit({TP: 2})
    with store.view() as view:
        assert list(view.all()) == [(A, b"1"), (B, b"2")]


def test_every_method_of_a_closed_store_raises(store: TransactionalStateStore) -> None:
    fill(store, *(key(n) for n in range(100)))
    store.put(A, b"1")
    manager = store.view()
    view = manager.__enter__()
    scans = [store.all(), store.range(A, reverse=True), view.all(), view.range(reverse=True)]
    for scan in scans:
        next(scan)
    empty = pa.array([], pa.binary())
    store.close()
    assert not store.is_open
    store.close()
    calls: list[Callable[[], object]] = [
        lambda: store.get(A),
        lambda: store.get(B),
        lambda: store.get_many(empty),
        lambda: store.range(),
        lambda: store.prefix_scan(A),
        store.all,
        store.approximate_num_uncommitted_bytes,
        store.staged_bytes,
        store.approximate_committed_size,
        lambda: store.put(A, b""),
        lambda: store.put_many(empty, empty),
        lambda: store.delete(A),
        lambda: store.delete_range(A, B),
        store.rollback,
        lambda: store.commit({TP: 1}),
        lambda: store.next_offset(TP),
        store.last_batch,
        lambda: list(store.staged_changes()),
        lambda: store.persist_pending(record(0)),
        lambda: list(store.pending_changes(record(0))),
        store.pending,
        lambda: store.promote(record(0), {TP: 1}),
        store.drop_pending,
        lambda: store.freeze(store.path),
        lambda: store.restore_chunk(binary(), binary(), {TP: 1}),
        lambda: store.view().__enter__(),
        lambda: view.get(A),
        lambda: list(view.all()),
        *(lambda scan=scan: next(scan) for scan in scans),
    ]
    for call in calls:
        with pytest.raises(StoreClosedError):
            call()
    harmless = {"close", "view"}
    named = {name for call in calls for name in call.__code__.co_names} if calls else set()
    public = {
        name
        for name, member in inspect.getmembers(TransactionalStateStore, inspect.isfunction)
        if not name.startswith("_")
    }
    bound = {"all", "approximate_num_uncommitted_bytes", "rollback", "last_batch"}
    bound |= {"pending", "drop_pending", "approximate_committed_size", "staged_bytes"}
    static = {"open_read_only", "set_aside", "destroy"}
    assert public - harmless - static - bound <= named


def test_scans_respect_bounds_and_prefixes(store: TransactionalStateStore) -> None:
    fill(store, b"\1key", b"\1key1", b"\1key2", b"\1kf", b"\xff\xff", b"\xff\xffa", b"\xff\xfe")
    store.put(b"\1key3", b"")
    assert keys(store.range(b"\1key1", b"\1key3", reverse=True)) == [b"\1key2", b"\1key1"]
    assert keys(store.range(b"\1key1", reverse=True)) == [
        b"\xff\xffa",
        b"\xff\xff",
        b"\xff\xfe",
        b"\1kf",
        b"\1key3",
        b"\1key2",
        b"\1key1",
    ]
    assert keys(store.prefix_scan(b"\xff\xff")) == [b"\xff\xff", b"\xff\xffa"]
    assert keys(store.prefix_scan(b"\1key")) == [b"\1key", b"\1key1", b"\1key2", b"\1key3"]
    assert keys(store.range(b"\1key2", b"\1key1")) == keys(store.range(A, A)) == []
    store.delete_range(b"\1key2", b"\1key1")
    assert store.get(b"\1key1") == b"\1key1"


def test_a_processors_handle_has_every_method_of_state_access_and_cannot_commit(
    store: TransactionalStateStore,
) -> None:
    handle = StateHandle(store)
    access: StateAccess = handle
    wanted = {name for name in vars(StateAccess) if not name.startswith("_")}
    assert wanted
    assert all(callable(getattr(handle, name)) for name in wanted)
    for name in wanted - {"get", "put"}:
        expected = list(inspect.signature(getattr(StateAccess, name)).parameters)[1:]
        assert list(inspect.signature(getattr(handle, name)).parameters) == expected
    access.put(A, b"1")
    access.put_many(pa.array([B, C, D], pa.binary()), pa.array([b"2", b"3", b"4"], pa.binary()))
    access.delete(B)
    access.delete_range(D, E)
    assert access.get(A) == b"1"
    assert access.get_many(pa.array([A, B], pa.binary())).to_pylist() == [b"1", None]
    for scan in (access.range(), access.prefix_scan(b"\1")):
        assert list(scan) == [(A, b"1"), (C, b"3")]
    assert list(access.range(reverse=True)) == [(C, b"3"), (A, b"1")]
    for refused in (handle.commit, handle.rollback, handle.close):
        with pytest.raises(StateError, match="by a processor"):
            refused()


def test_only_one_thread_may_write(store: TransactionalStateStore) -> None:
    import threading

    store.put(A, b"1")
    failed: list[BaseException] = []

    def other() -> None:
        try:
            store.put(B, b"2")
        except StateError as error:
            failed.append(error)

    for expected in (1, 1):
        thread = threading.Thread(target=other)
        thread.start()
        thread.join()
        assert len(failed) == expected
        store.rollback()  # after which another thread may write


@given(st.lists(st.lists(st.binary(min_size=1, max_size=2), max_size=40)), st.binary(max_size=2))
def test_sorted_keys_behave_like_a_sorted_set(groups: list[list[bytes]], bound: bytes) -> None:
    ordered, plain = SortedKeys(), set()
    for group in groups:
        ordered.add_many(group)
        plain.update(group)
        assert ordered.between(None, None) == sorted(plain)
        assert ordered.between(bound, None) == sorted(each for each in plain if each >= bound)
        assert ordered.between(None, bound) == sorted(each for each in plain if each < bound)


def test_sorted_keys_work_across_many_blocks() -> None:
    ordered = SortedKeys()
    numbers = [(n * 7919) % 20_011 for n in range(20_000)]
    ordered.add_many(key(n) for n in numbers[:9000])
    for start in range(9000, 20_000, 500):  # so few keys that each is inserted into its block
        ordered.add_many(key(n) for n in numbers[start : start + 500])
        ordered.between(key(5), key(6))
    expected = sorted(key(n) for n in numbers)
    assert ordered.between(None, None) == expected
    assert ordered.between(key(777), key(15_000)) == [k for k in expected if key(777) <= k < key(15_000)]


# ------------------------------------------------------------------ offsets and commits


def test_a_commit_with_wrong_offsets_is_refused_and_writes_nothing(store: TransactionalStateStore) -> None:
    fill(store, A, offset=5)
    store.put(B, b"")
    for offsets in ({}, {TP: None}, {TP: -1}):
        with pytest.raises(ValueError, match="offset"):
            store.commit(offsets)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="forget"):
        store.commit({TP: 6}, forget_offsets=True)
    with pytest.raises(OffsetWentBackError, match="from 5 to 4"):
        store.commit({TP: 4})
    assert store.next_offset(TP) == 5
    with store.view() as view:
        assert keys(view.all()) == [A]
    store.commit({TP: 5})
    assert store.approximate_num_uncommitted_bytes() == 0


def test_each_of_several_partitions_keeps_its_newest_offset(path: Path) -> None:
    tps = [TP, TopicPartition("other/topic-1"[:5], 1), TopicPartition("third", 12)]
    with TransactionalStateStore.open(path, IDENTITY) as store:
        store.commit({tp: n + 1 for n, tp in enumerate(tps)})
        store.commit({tps[0]: 100})
    with TransactionalStateStore.open(path, IDENTITY) as store:
        assert [store.next_offset(tp) for tp in tps] == [100, 2, 3]


def test_a_missing_offset_differs_from_offset_zero(path: Path) -> None:
    with TransactionalStateStore.open(path, IDENTITY) as store:
        assert store.next_offset(TP) == 0
        assert store.next_offset(INPUT) is None
        store.put(A, b"")
        store.commit({}, forget_offsets=True)
        assert store.next_offset(TP) is None
    with pytest.raises(StateCorruptedError) as raised:
        TransactionalStateStore.open(path, IDENTITY)
    assert raised.value.reason == "no-offset"


def test_a_commit_without_changes_advances_the_offset(path: Path) -> None:
    with TransactionalStateStore.open(path, IDENTITY) as store:
        store.commit({TP: 3}, batch=record(4))
        assert store.last_commit_ms > 0
    with TransactionalStateStore.open(path, IDENTITY) as store:
        assert (store.next_offset(TP), store.last_batch()) == (3, record(4))


def test_a_leftover_owner_file_does_not_prevent_opening(path: Path) -> None:
    for number in range(3):
        with TransactionalStateStore.open(path, IDENTITY) as store:
            assert len(list(path.glob("owner*"))) == 1
            fill(store, key(number), offset=number)
        assert not list(path.glob("owner*"))
    (path / "owner-0123dead").write_text('{"pid": 1}')  # as a killed process leaves it
    with TransactionalStateStore.open(path, IDENTITY) as store:
        assert len(list(path.glob("owner*"))) == 1
        assert len(list(store.all())) == 3


def test_a_failed_commit_closes_the_store_and_changes_nothing(
    path: Path, monkeypatch: pytest.MonkeyPatch, store: TransactionalStateStore
) -> None:
    store.put(A, A)
    store.commit({TP: 1})
    store.put(B, b"")

    def failing(_self: Database, _batch: WriteBatch, *, sync: bool) -> None:
        raise StateError("IO error: No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(Database, "write", failing)
        with pytest.raises(StateError, match="No space"):
            store.commit({TP: 2})
    with pytest.raises(StoreClosedError):
        store.last_batch()
    with TransactionalStateStore.open(path, IDENTITY) as again:
        assert again.next_offset(TP) == 1
        assert keys(again.all()) == [A]


def test_the_age_of_a_store_counts_from_its_last_batch(path: Path) -> None:
    with TransactionalStateStore.open(path, IDENTITY) as store:
        assert store.last_commit_ms == 0
        store.commit({TP: 1}, batch=BatchRecord("q", 0, "a", time_ms=1_000_000))
        assert store.last_commit_ms == 1_000_000


# ------------------------------------------------------------------ pending batches


def test_a_pending_batch_is_promoted_and_survives_a_restart(path: Path) -> None:
    with TransactionalStateStore.open(path, IDENTITY) as store:
        store.put(A, b"1")
        store.commit({TP: 1}, batch=record(0))
        store.put(B, b"2")
        store.delete(A)
        assert list(store.all()) == [(B, b"2")]
        store.persist_pending(record(1))
        assert list(store.all()) == [(A, b"1")]
        assert store.approximate_num_uncommitted_bytes() == 0
    with TransactionalStateStore.open(path, IDENTITY) as store:
        (kept,) = store.pending()
        assert (kept.record, kept.base) == (record(1), record(0))
        assert kept.size_bytes > 0
        later = BatchRecord("query", 1, "attempt1", event_time_ms=99)
        store.promote(later, {TP: 3})
        assert store.pending() == []
        assert store.next_offset(TP) == 3
    with TransactionalStateStore.open(path, IDENTITY) as store:
        assert list(store.all()) == [(B, b"2")]
        assert store.last_batch() == later


def test_of_two_task_attempts_the_named_one_is_promoted(store: TransactionalStateStore) -> None:
    for attempt in ("lost", "won"):
        store.put(A, attempt.encode())
        store.persist_pending(record(0, attempt))
    assert {kept.record.task_attempt_id for kept in store.pending()} == {"lost", "won"}
    store.promote(record(0, "won"), {TP: 1})
    assert store.get(A) == b"won"
    assert store.pending() == []


def test_persisting_a_task_attempt_again_replaces_it(store: TransactionalStateStore) -> None:
    put_rows(store, [(key(n), b"x" * 200) for n in range(70_000)])
    store.persist_pending(record(0, "a"))
    store.put(A, b"1")
    store.persist_pending(record(0, "a"))
    assert len(list(store._durable.database.scan(family="pending"))) == 2, "a header and a blob"
    store.promote(record(0, "a"), {TP: 1})
    assert list(store.all()) == [(A, b"1")]
    assert list(store._durable.database.scan(family="pending")) == []


def test_a_pending_range_delete_is_applied_before_the_rows(store: TransactionalStateStore) -> None:
    fill(store, *(key(n) for n in range(1000)))
    store.delete_range(key(0), None)
    store.put(key(5), b"new")
    store.persist_pending(record(0))
    assert len(list(store.all())) == 1000
    store.promote(record(0), {TP: 1})
    assert list(store.all()) == [(key(5), b"new")]


def test_a_pending_batch_that_starts_from_another_state_is_not_promoted(
    store: TransactionalStateStore,
) -> None:
    with pytest.raises(StateMismatchError, match="no pending changes of batch 3"):
        store.promote(record(3), {TP: 1})
    store.put(A, b"1")
    store.persist_pending(record(0))
    store.commit({TP: 1}, batch=record(7))
    with pytest.raises(StateMismatchError, match=r"batch none.*batch 7"):
        store.promote(record(0), {TP: 2})
    store.put(B, b"2")
    with pytest.raises(StateError, match="staged"):
        store.promote(record(0), {TP: 2})
    store.rollback()
    assert list(store.all()) == []
    assert len(store.pending()) == 1


def test_all_pending_batches_except_the_named_ones_are_dropped(path: Path) -> None:
    with TransactionalStateStore.open(path, IDENTITY) as store:
        for attempt in "abc":
            store.put(A, attempt.encode())
            store.persist_pending(record(0, attempt))
        store.drop_pending(except_attempts=["b"])
        assert [kept.record.task_attempt_id for kept in store.pending()] == ["b"]
    with TransactionalStateStore.open(path, IDENTITY) as store:
        assert [kept.record.task_attempt_id for kept in store.pending()] == ["b"]
        store.drop_pending()
        assert list(store._durable.database.scan(family="pending")) == []


def test_changes_are_returned_in_batches_of_a_few_megabytes(store: TransactionalStateStore) -> None:
    rows = [(key(n), b"v" * 1000) for n in range(20_000)]
    put_rows(store, rows)
    batches = list(store.staged_changes())
    assert all(batch.nbytes < 6 << 20 for batch in batches)
    assert len(batches) > 3
    assert [k for batch in batches for k in batch["key"].to_pylist()] == [k for k, _ in rows]


# ------------------------------------------------------------------ restore


@pytest.mark.parametrize("rows", [100, 25_000], ids=["as a batch", "as a file"])
def test_a_restore_continues_where_it_stopped(path: Path, rows: int) -> None:
    numbers = [key(n * 7919 % rows) for n in range(rows)]
    with TransactionalStateStore.open(path, IDENTITY, TINY) as store:
        store.restore_chunk(binary([*numbers, A, A, B]), binary([*numbers, b"old", b"new", None]), {TP: rows})
        assert store.restoring
        with pytest.raises(NotUpToBoundError, match="being restored"):
            store.view().__enter__()
    with TransactionalStateStore.open(path, IDENTITY, TINY) as store:
        assert store.restoring
        assert store.next_offset(TP) == rows
        assert store.last_batch() is None
        store.restore_chunk(binary(numbers[:50]), binary([None] * 50), {TP: rows + 50}, batch=record(4))
        assert not store.restoring
        store.restore_chunk(binary(), binary(), {TP: rows + 51})
        assert not store.restoring
        assert dict(store.all()) == {A: b"new", **{k: k for k in numbers[50:]}}
        assert (store.next_offset(TP), store.last_batch()) == (rows + 51, record(4))
        store.put(A, b"1")
        with pytest.raises(StateError, match="staged"):
            store.restore_chunk(binary(), binary(), {TP: rows + 60})


def test_an_unfinished_restore_promotes_no_pending_batch(store: TransactionalStateStore) -> None:
    store.put(A, b"1")
    store.persist_pending(record(0))
    store.restore_chunk(binary([B]), binary([b"2"]), {TP: 1})
    with pytest.raises(StateMismatchError):
        store.promote(record(0), {TP: 2})
    store.restore_chunk(binary(), binary(), {TP: 2}, done=True)
    store.promote(record(0), {TP: 2})
    assert keys(store.all()) == [A, B]


def test_a_large_chunk_may_contain_deletes(store: TransactionalStateStore) -> None:
    numbers = [key(n) for n in range(25_000)]
    store.restore_chunk(binary(numbers), binary(numbers), {TP: 1}, batch=record(0))
    values = [None if n % 2 else b"new" for n in range(25_000)]
    store.restore_chunk(binary(numbers), binary(values), {TP: 2}, batch=record(1))
    assert list(store.all()) == [(k, b"new") for k in numbers[::2]]
    assert not (store.path / "restore.sst").exists()


# ------------------------------------------------------------------ many keys at once


def test_get_many_returns_nearly_all_keys_or_a_few(store: TransactionalStateStore) -> None:
    numbers = [key(n) for n in range(5000)]
    fill(store, *numbers)
    for _ in range(6):  # overwrites make RocksDB's estimate far too high
        fill(store, *numbers)
    store.put(numbers[3], b"staged")
    wanted = [numbers[n] for n in (3, 1, 4999, 1)] + [A, b"\1z"]
    for some in (numbers, numbers[:300], [*numbers[100:700], *wanted], wanted):
        expected = [b"staged" if k == numbers[3] else k if k in set(numbers) else None for k in some]
        assert store.get_many(pa.array(some, pa.binary())).to_pylist() == expected


def test_get_many_is_right_when_rocksdb_underestimates_the_number_of_keys(
    store: TransactionalStateStore,
) -> None:
    numbers = [key(n) for n in range(5000)]
    fill(store, *numbers)
    absent = [b"\2" + key(n) for n in range(4400)]
    put_rows(store, [(k, None) for k in absent])  # RocksDB counts each delete as one key less
    store.commit({TP: 1})
    wanted = numbers[::16]
    assert store._durable.database.property("estimate-num-keys") < 2 * len(wanted)
    assert store._durable.database.get_many(wanted) == wanted


def test_recently_committed_rows_are_read_from_memory_with_the_right_values(
    store: TransactionalStateStore,
) -> None:
    """Every way to change the data updates the rows that are kept in memory."""
    numbers = [key(n) for n in range(300)]

    def expect(*values: bytes | None) -> None:
        wanted = [numbers[0], numbers[1], numbers[299]]
        assert [store.get(k) for k in wanted] == list(values)
        assert store.get_many(pa.array(wanted, pa.binary())).to_pylist() == list(values)

    put_rows(store, [(k, b"1") for k in numbers])
    store.commit({TP: 1})
    expect(b"1", b"1", b"1")
    store.put(numbers[0], b"2")
    store.persist_pending(record(1))
    store.promote(record(1), {TP: 2})
    expect(b"2", b"1", b"1")
    store.put(numbers[1], b"3")
    store.commit({TP: 3}, batch=record(2))
    store.restore_chunk(binary(numbers[:2]), binary([None, b"4"]), {TP: 4}, batch=record(3))
    expect(None, b"4", b"1")
    put_rows(store, [(k, b"5") for k in numbers])
    store.commit({TP: 5}, batch=record(4))
    store.delete_range(numbers[0], numbers[299])
    expect(None, None, b"5")
    store.put(numbers[1], b"6")
    store.persist_pending(record(5))
    expect(b"5", b"5", b"5")
    store.promote(record(5), {TP: 6})
    expect(None, b"6", b"5")


@given(st.lists(st.tuples(st.binary(max_size=3), st.none() | st.binary(max_size=2)), max_size=40))
def test_the_rows_of_a_chunk_are_sorted_by_key_and_only_the_last_of_each_is_kept(
    rows: list[tuple[bytes, bytes | None]],
) -> None:
    keys, values = in_key_order(binary(key for key, _ in rows), binary(value for _, value in rows))
    last = dict(rows)
    assert keys.to_pylist() == sorted(last)
    assert values.to_pylist() == [last[key] for key in sorted(last)]


def test_many_writes_may_have_other_arrow_types_of_bytes(store: TransactionalStateStore) -> None:
    store.put_many(pa.array([A, B], pa.binary_view()), pa.array([b"1", b"2"], pa.large_binary()))
    store.put_many(pa.array([A]), pa.nulls(1))
    assert dict(store.all()) == {B: b"2"}


def test_persisting_changes_returns_what_the_changelog_gets(store: TransactionalStateStore) -> None:
    fill(store, *(key(n) for n in range(400)))
    store.delete_range(key(0), key(300))
    store.put_many(binary([key(7), key(350), key(999)]), binary([b"new", None, b"x" * 1000]))
    expected = list(store.staged_changes())
    assert sum(batch.num_rows for batch in expected) == 299 + 3
    assert store.persist_pending(record(5)) == expected
    assert list(store.pending_changes(record(5))) == expected
    assert store.persist_pending(record(6)) == []


def test_the_size_of_staged_writes_is_that_of_their_keys_and_values(store: TransactionalStateStore) -> None:
    def staged(keys: list[bytes], values: list[bytes | None]) -> int:
        store.put_many(binary([b"cut off", *keys])[1:], binary([b"cut off", *values])[1:])
        return store.approximate_num_uncommitted_bytes()

    one = staged([A], [b"1"])
    assert staged([B], [None]) == 2 * one - 2
    assert staged([A, B], [b"", b"1"]) == 2 * one - 2
    assert staged([A, A], [b"12", b"1"]) == 2 * one, "the last value counts"
