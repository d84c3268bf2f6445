"""Tests of views: what others see of a store while its owner works."""

from __future__ import annotations

import errno
import os
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from kafka_eos_source.errors import (
    NotUpToBoundError,
    StateCorruptedError,
    StateError,
    StateLockedError,
    StoreClosedError,
)
from kafka_eos_source.state.store import files, opening
from kafka_eos_source.state.store.transactional import TransactionalStateStore
from kafka_eos_source.state.store.views import StateView
from tests.state.state_kit import EFFORT, IDENTITY, TINY, TP, binary, key, put_rows, record

A, B, C = (b"\1" + letter for letter in (b"a", b"b", b"c"))


@pytest.fixture
def store(tmp_path: Path) -> Iterator[TransactionalStateStore]:
    with TransactionalStateStore.open(tmp_path / "s", IDENTITY, TINY) as opened:
        yield opened


def rows(view: StateView) -> dict[bytes, bytes]:
    return dict(view.all())


def test_views_show_nothing_that_is_staged(store: TransactionalStateStore) -> None:
    expected: dict[bytes, bytes] = {}
    for burst in range(3):
        before = dict(expected)
        for number in range(burst * 40, burst * 40 + 60):
            store.put(key(number), b"%d" % burst)
            expected[key(number)] = b"%d" % burst
        with store.view() as view:
            assert rows(view) == before
            assert dict(store.all()) == expected
        store.commit({TP: burst})
        with store.view() as view:
            assert rows(view) == expected


def test_a_view_shows_one_commit_although_others_follow(store: TransactionalStateStore) -> None:
    numbers = [key(n) for n in range(3000)]
    put_rows(store, [(k, b"old") for k in numbers])
    store.commit({TP: 1}, batch=record(1))
    with store.view() as view:
        scan = view.range(numbers[10], numbers[2990])
        back = view.range(numbers[10], numbers[2990], reverse=True)
        assert next(scan) == (numbers[10], b"old")
        store.delete_range(numbers[0], numbers[2000])
        put_rows(store, [(k, b"new") for k in numbers[1500:]])
        store.commit({TP: 2}, batch=record(2))
        assert list(scan) == [(k, b"old") for k in numbers[11:2990]]
        assert list(back) == [(k, b"old") for k in reversed(numbers[10:2990])]
        assert rows(view) == dict.fromkeys(numbers, b"old")
        assert view.get(numbers[5]) == b"old"
        assert view.get(A) is None
        assert view.get_many(pa.array([numbers[1], A], pa.binary())).to_pylist() == [b"old", None]
        assert [k for k, _ in view.prefix_scan(numbers[7])] == [numbers[7]]
        assert list(view.range(A, A)) == []
        assert (view.next_offset(TP), view.last_batch()) == (1, record(1))
    with store.view() as view:
        assert rows(view) == dict.fromkeys(numbers[1500:], b"new")
        assert (view.next_offset(TP), view.last_batch()) == (2, record(2))


def test_every_view_shows_one_commit_while_a_writer_commits(store: TransactionalStateStore) -> None:
    """Four threads read: data, offset and batch of a view always belong to the same commit."""
    rounds = 150 * EFFORT
    done = threading.Event()
    views = [0] * 4
    wrong: list[object] = []

    def write() -> None:
        try:
            for number in range(1, rounds + 1):
                put_rows(store, [(key(n), b"%d" % number) for n in range(50)])
                if number % 5 == 0:
                    store.persist_pending(record(number))
                    store.promote(record(number), {TP: number})
                else:
                    store.commit({TP: number}, batch=record(number))
        finally:
            done.set()

    def read(me: int) -> None:
        latest = 0
        while not done.is_set():
            with store.view() as view:
                number = view.next_offset(TP) or 0
                found = {
                    *(view.range(key(10), key(20), reverse=bool(me % 2))),
                    *((key(n), view.get(key(n))) for n in (0, 49)),
                }
                expected = {(key(n), b"%d" % number if number else None) for n in (*range(10, 20), 0, 49)}
                last = view.last_batch()
                if (
                    (number and found != expected)
                    or (last.batch_id if last else 0) != number
                    or number < latest
                ):
                    wrong.append((number, latest, found))
                latest = number
            views[me] += 1

    threads = [threading.Thread(target=read, args=(me,)) for me in range(4)]
    for thread in threads:
        thread.start()
    write()
    for thread in threads:
        thread.join()
    assert not wrong, wrong[:3]
    assert all(views)


def test_a_commit_leaves_nothing_staged(store: TransactionalStateStore) -> None:
    for number in range(20):
        store.put(A, b"%d" % number)
        assert 0 < store.approximate_num_uncommitted_bytes() < 200
        store.commit({TP: number})
        assert store.approximate_num_uncommitted_bytes() == 0
        with store.view() as view:
            assert view.get(A) == b"%d" % number


@pytest.mark.parametrize("how", ["rollback", "persist"])
def test_changes_that_were_rolled_back_are_not_visible(store: TransactionalStateStore, how: str) -> None:
    store.put(A, b"1")
    store.commit({TP: 0})
    store.put(B, b"2")
    with store.view() as before:
        store.rollback() if how == "rollback" else store.persist_pending(record(0))
        with store.view() as after:
            assert rows(before) == rows(after) == {A: b"1"}


def test_a_view_ends_with_its_block_and_with_the_store(store: TransactionalStateStore) -> None:
    put_rows(store, [(key(n), b"") for n in range(200)])
    store.commit({TP: 0})
    with store.view() as view:
        scan = view.all()
        next(scan)
    for use in (lambda: next(scan), lambda: view.get(A), lambda: list(view.all())):
        with pytest.raises(StoreClosedError):
            use()
    with ExitStack() as stack:
        views = [stack.enter_context(store.view()) for _ in range(2)]
        store.close()
        for each in views:
            with pytest.raises(StoreClosedError):
                each.get(A)


def test_a_reader_reports_a_missing_store_and_opens_a_closed_one(tmp_path: Path) -> None:
    with pytest.raises(StateError, match="there is no state store"):
        TransactionalStateStore.open_read_only(tmp_path / "s")
    assert not (tmp_path / "s").exists()
    with TransactionalStateStore.open(tmp_path / "s", IDENTITY) as store:
        put_rows(store, [(key(n), b"1") for n in range(100)])
        store.commit({TP: 3}, batch=record(0))
    with TransactionalStateStore.open_read_only(tmp_path / "s") as reader:
        assert reader.identity == IDENTITY
        assert len(rows(reader)) == 100
        scan = reader.all()
        next(scan)
        with TransactionalStateStore.open(tmp_path / "s", IDENTITY) as store:  # the reader takes no lock
            store.put(A, b"1")
            store.commit({TP: 4}, batch=record(1))
            assert len(list(scan)) == 99
            reader.refresh()
            assert (reader.get(A), reader.next_offset(TP), reader.last_batch()) == (b"1", 4, record(1))
            with pytest.raises(StoreClosedError):
                next(scan)
            store.restore_chunk(binary([B]), binary([b""]), {TP: 5})
            with pytest.raises(NotUpToBoundError, match="being restored"):
                reader.refresh()
    with pytest.raises(StoreClosedError):
        reader.get(A)


def _rewrite(store: TransactionalStateStore) -> None:
    """Commits the rows of `_rows_of` for increasing offsets until RocksDB has deleted logs and tables."""
    files = store.path / "db"
    before = set(files.glob("*.log")), set(files.glob("*.sst"))
    while any(not was or was <= set(files.iterdir()) for was in before):
        _commit_next(store)
        before = before[0], before[1] or set(files.glob("*.sst"))
    _await_rest(store)
    _commit_next(store)  # this commit is in a log only


def _await_rest(store: TransactionalStateStore) -> None:
    """Waits until RocksDB neither flushes nor compacts, so that it deletes no more files by itself."""
    database, deadline = store._durable.database, time.monotonic() + 60
    running = ("num-running-flushes", "num-running-compactions", "mem-table-flush-pending")
    while any(map(database.property, running)) or (
        database._compacts and database.property("compaction-pending")
    ):
        assert time.monotonic() < deadline, "RocksDB does not come to rest"
        time.sleep(0.001)


def _commit_next(store: TransactionalStateStore) -> None:
    offset = (store.next_offset(TP) or 0) + 1
    put_rows(store, list(_rows_of(offset).items()))
    store.commit({TP: offset})


def _rows_of(offset: int) -> dict[bytes, bytes]:
    return {key(n): b"%d" % offset * 20 for n in range(50)}


@pytest.mark.parametrize("linked", [True, False], ids=["links", "no links"])
@pytest.mark.parametrize("moment", ["logs", "tables", "manifest", "later tables", "opening"])
def test_a_reader_sees_whole_commits_although_files_are_deleted_while_it_opens(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, moment: str, linked: bool
) -> None:
    """The owner flushes and compacts before the named step. With links, the first try succeeds."""
    steps = ["logs", "tables", "manifest", "later tables", "opening"]
    taken: list[str] = []
    with TransactionalStateStore.open(tmp_path / "s", IDENTITY, TINY) as store:

        def rewriting_first(place: Any, name: str, names: list[str]) -> None:
            step = getattr(place, name)

            def after_rewriting(*args: Any, **more: Any) -> Any:
                now = next(each for each in names if each not in taken or each == names[-1])
                if now == moment and now not in taken:
                    _rewrite(store)
                taken.append(now)
                return step(*args, **more)

            monkeypatch.setattr(place, name, after_rewriting)

        def no_link(source: Path, target: Path) -> None:
            if not source.exists():
                raise FileNotFoundError(errno.ENOENT, "No such file or directory", str(source))
            raise OSError(errno.EXDEV, "Invalid cross-device link", str(source))

        rewriting_first(files, "_link_log", ["logs"])
        rewriting_first(files, "_link_tables", ["tables", "later tables"])
        rewriting_first(files, "current_manifest", ["manifest"])
        rewriting_first(opening, "_open", ["opening"])
        if not linked:
            monkeypatch.setattr(os, "link", no_link)
        _rewrite(store)
        before = store.next_offset(TP)
        assert before is not None
        with TransactionalStateStore.open_read_only(store.path) as reader:
            offset = reader.next_offset(TP)
            assert offset is not None
            assert offset >= before
            assert rows(reader) == _rows_of(offset)
        assert set(taken) == set(steps)
        if linked:
            assert taken.count("opening") == 1


def test_a_reader_retries_while_tables_are_missing(
    store: TransactionalStateStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A compaction deletes a table between the copy of the manifest and the link to the table."""
    store.put(A, b"1")
    store.commit({TP: 1})
    attempts: list[tuple[str, int]] = []
    open_raw = opening._open

    def damaged(*args: Any, **more: Any) -> Any:
        attempts.append(("", len(attempts)))
        if len(attempts) < 3:
            raise StateCorruptedError("a table is missing")
        return open_raw(*args, **more)

    with monkeypatch.context() as patch:
        patch.setattr(opening, "_open", damaged)
        patch.setattr(opening, "current_manifest", lambda path: attempts[-1])
        with TransactionalStateStore.open_read_only(store.path) as reader:
            assert reader.get(A) == b"1"
    assert len(attempts) == 3
    attempts.clear()

    def always_damaged(*args: Any, **more: Any) -> Any:
        attempts.append(("", len(attempts)))
        raise StateCorruptedError("a table is missing")

    monkeypatch.setattr(opening, "_open", always_damaged)
    with pytest.raises(StateCorruptedError, match="a table is missing"):
        TransactionalStateStore.open_read_only(store.path)
    assert len(attempts) == 1, "the files have not changed: they are damaged"
    monkeypatch.setattr(opening, "current_manifest", lambda path: attempts[-1])
    monkeypatch.setattr(opening, "_READER_RETRY_SECONDS", 0.2)
    with pytest.raises(StateLockedError, match="rewrote its files while they were read"):
        TransactionalStateStore.open_read_only(store.path)


def test_a_reader_leaves_no_links_behind(store: TransactionalStateStore) -> None:
    """A leftover link would keep the disk space of a table that a compaction has deleted."""
    store.put(A, b"1")
    store.commit({TP: 1})
    with TransactionalStateStore.open_read_only(store.path) as reader:
        for _ in range(3):
            reader.refresh()
        assert all(file.stat().st_nlink == 1 for file in (store.path / "db").iterdir() if file.is_file())
