"""Tests of staged writes: their size and limit, and on disk kills at every step, leftovers and damage."""

from __future__ import annotations

import errno
import json
import os
import signal
import tracemalloc
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kafka_eos_source.errors import (
    InvalidOptionError,
    NotUpToBoundError,
    StateCorruptedError,
    StateError,
    StateLockedError,
)
from kafka_eos_source.runtime import failpoints
from kafka_eos_source.state.store import durable, transactional, uncommitted
from kafka_eos_source.state.store.files import has_owner
from kafka_eos_source.state.store.overlay import ENTRY_BYTES, Overlay, Ranges
from kafka_eos_source.state.store.rocksdb import StoreConfig
from kafka_eos_source.state.store.transactional import TransactionalStateStore
from kafka_eos_source.state.store.uncommitted import SpilledRows
from tests.state.state_kit import (
    IDENTITY,
    SPILLING,
    TINY,
    TP,
    Model,
    binary,
    key,
    other_process,
    put_rows,
    record,
)
from tests.state.store.crash_kit import copy_of_open_store

#: What a batch of the tests does to a store with `OLD`. It spills several times.
OLD: Model = {key(n): b"old" for n in range(400)}
NEW: Model = {
    **{key(n): b"old" for n in range(30)},
    **{key(n): b"new" for n in range(1000, 1600)},
    **{key(n): b"again" for n in range(1300, 1400)},
}

#: Stages the change from `OLD` to `NEW`: a large range delete, new keys, overwrites, other deletes.
STAGE = """
put_rows(store, [(key(n), b'gone') for n in range(30, 60)])
store.delete_range(key(30), key(400))
for n in range(1000, 1600):
    store.put(key(n), b'new')
store.put_many(binary(key(n) for n in range(1300, 1420)), binary([b'again'] * 120))
store.put_many(binary(key(n) for n in range(1400, 1420)), binary([b'new'] * 20))
put_rows(store, [(key(n), b'short') for n in range(2000, 2300)])
store.delete_range(key(2000), key(2300))
store.put(key(3000), b'x' * 3000); store.put(key(3001), b'x' * 3000); store.delete(key(3000))
store.delete_range(key(3001), key(3002))
"""


def opened(path: Path, config: StoreConfig = SPILLING) -> TransactionalStateStore:
    return TransactionalStateStore.open(path, IDENTITY, config)


def with_old_state(path: Path) -> TransactionalStateStore:
    store = opened(path)
    put_rows(store, list(OLD.items()))
    store.commit({TP: 10}, batch=record(1))
    return store


def stage(store: TransactionalStateStore) -> None:
    exec(STAGE, {"store": store, "key": key, "binary": binary, "put_rows": put_rows})
    assert store._uncommitted.overlay.spilled is not None


def applied(old: Model, batches: list[pa.RecordBatch]) -> Model:
    state = dict(old)
    for rows in batches:
        for k, v in zip(rows["key"].to_pylist(), rows["value"].to_pylist(), strict=True):
            state.pop(k, None) if v is None else state.update({k: v})
    return state


def spilled_folders(path: Path) -> list[Path]:
    return sorted(path.glob("spill/*"))


def test_a_spilled_batch_is_pending_invisible_and_then_promoted(tmp_path: Path) -> None:
    path = tmp_path / "s"
    with with_old_state(path) as store:
        stage(store)
        assert store.approximate_num_uncommitted_bytes() <= SPILLING.uncommitted_max_bytes
        size, on_disk = store.staged_bytes()
        assert size > on_disk > 5 * SPILLING.uncommitted_max_bytes
        assert dict(store.all()) == NEW
        with store.view() as view:
            assert dict(view.all()) == OLD
        assert applied(OLD, list(store.staged_changes())) == NEW
        store.persist_pending(record(2))
        assert dict(store.all()) == OLD
        assert applied(OLD, list(store.pending_changes(record(2)))) == NEW
        with TransactionalStateStore.open_read_only(path) as reader:
            assert dict(reader.all()) == OLD
            with reader.promoted(record(2), {TP: 20}) as view:
                assert dict(view.all()) == NEW
                assert list(view.range(reverse=True)) == sorted(NEW.items(), reverse=True)
                assert view.next_offset(TP) == 20
    with opened(path) as store:
        assert [each.record for each in store.pending()] == [record(2)]
        store.promote(record(2), {TP: 20})
        assert dict(store.all()) == NEW
        assert (store.next_offset(TP), store.last_batch(), store.pending()) == (20, record(2), [])
        assert spilled_folders(path) == []


#: Step at which the process dies, and the state that must be found.
KILLS = [
    ("state.before_spill*1", OLD),
    ("state.after_spill*1", OLD),
    ("state.after_spill*4", OLD),
    ("state.before_spill*9", OLD),
    ("state.after_seal", OLD),
    ("state.apply_began", NEW),
    ("state.apply_slice*1", NEW),
    ("state.apply_slice*2", NEW),
    ("state.apply_slice*4", NEW),
    ("state.apply_written", NEW),
    ("state.apply_ended", NEW),
]


@pytest.mark.parametrize("how", ["promote", "commit"])
def test_a_kill_at_any_step_leaves_the_old_or_the_new_state(tmp_path: Path, how: str) -> None:
    """A reader finds one of them too, or is told to wait. What the dead process spilled is removed."""
    for number, (kill, expected) in enumerate(KILLS):
        path = tmp_path / str(number)
        end = {
            "promote": "store.persist_pending(record(2)); store.promote(record(2), {TP: 20})",
            "commit": "store.commit({TP: 20}, batch=record(2))",
        }[how]
        if how == "commit" and number % 2 == 0:
            continue  # the other steps are the same code; `state.after_seal` is reached by an attempt only
        with_old_state(path).close()
        with other_process() as other:
            other.send(
                f"os.environ['KAFKA_EOS_FAILPOINTS'] = {kill.partition('*')[0]!r} + '=kill-worker' "
                f"+ {kill[len(kill.partition('*')[0]) :]!r}\n"
                "from kafka_eos_source.state.store import durable, overlay\n"
                "durable._APPLY_ROWS, overlay._ROWS_PER_STEP = 200, 50\n"
                f"store = TransactionalStateStore.open({str(path)!r}, IDENTITY, SPILLING)\n{STAGE}\n{end}"
            )
            assert psutil.Process(other.pid).wait(60) == -signal.SIGKILL, kill
        began = expected is NEW and kill != "state.apply_ended"
        if began:
            with pytest.raises(NotUpToBoundError, match=r"a large batch.*has ended.*start the query"):
                TransactionalStateStore.open_read_only(path)
        else:
            with TransactionalStateStore.open_read_only(path) as reader:
                assert dict(reader.all()) == expected, kill
        with opened(path, TINY) as store:
            assert dict(store.all()) == expected, kill
            assert store.last_batch() == record(2 if expected is NEW else 1)
            assert store.next_offset(TP) == (20 if expected is NEW else 10)
            assert not store.restoring
            assert store.pending() == []
            store.drop_pending()
            assert spilled_folders(path) == []
            stage_again = store.get(key(0))
            assert stage_again == b"old"


def test_two_attempts_spill_and_only_the_named_one_is_promoted(tmp_path: Path) -> None:
    path = tmp_path / "s"
    with with_old_state(path) as store:
        for attempt in ("one", "two", "one"):
            stage(store)
            store.put(key(1), attempt.encode())
            store.persist_pending(record(2, attempt))
        assert len(spilled_folders(path)) == 2, "persisting an attempt again replaces its rows"
        store.promote(record(2, "two"), {TP: 20})
        assert dict(store.all()) == {**NEW, key(1): b"two"}
        assert spilled_folders(path) == []


def test_a_small_attempt_is_promoted_next_to_a_spilled_one(tmp_path: Path) -> None:
    path = tmp_path / "s"
    with with_old_state(path) as store:
        stage(store)
        store.persist_pending(record(2, "large"))
        store.put(key(1), b"small")
        store.persist_pending(record(2, "small"))
        store.promote(record(2, "small"), {TP: 20})
        assert dict(store.all()) == {**OLD, key(1): b"small"}
        assert spilled_folders(path) == []


def test_a_rollback_and_a_close_remove_what_was_spilled(tmp_path: Path) -> None:
    path = tmp_path / "s"
    store = with_old_state(path)
    stage(store)
    scan = store.all()
    next(scan)
    assert len(spilled_folders(path)) == 1
    store.rollback()
    assert dict(store.all()) == OLD
    assert spilled_folders(path) == []
    stage(store)
    store.close()
    assert spilled_folders(path) == []
    with opened(path) as store:
        assert dict(store.all()) == OLD


def test_rows_of_dead_attempts_are_dropped_and_those_of_the_running_one_are_kept(tmp_path: Path) -> None:
    path = tmp_path / "s"
    with with_old_state(path) as store:
        stage(store)
        store.persist_pending(record(2, "dead"))
        (path / "spill" / "killed").mkdir()
        stage(store)
        store.drop_pending()
        assert len(spilled_folders(path)) == 1
        assert dict(store.all()) == NEW
        store.commit({TP: 20}, batch=record(2))
        assert dict(store.all()) == NEW
        assert spilled_folders(path) == []


def test_lost_rows_of_an_attempt_are_damage_and_not_an_empty_batch(tmp_path: Path) -> None:
    path = tmp_path / "s"
    with with_old_state(path) as store:
        stage(store)
        store.persist_pending(record(2))
        uncommitted.remove_spills(path, keep=())
        with pytest.raises(StateCorruptedError, match="rows of a large batch"):
            store.promote(record(2), {TP: 20})
        assert not store.is_open
    with pytest.raises(StateCorruptedError, match="rows of a large batch"):
        opened(path)
    TransactionalStateStore.set_aside(path)


def test_a_view_shows_spilled_writes_once_they_are_committed(tmp_path: Path) -> None:
    with with_old_state(tmp_path / "s") as store:
        old = dict(store.all())
        stage(store)
        with store.view() as view:
            assert dict(view.all()) == old
            store.commit({TP: 20}, batch=record(2))
            assert dict(view.all()) == old
        with store.view() as view:
            assert dict(view.all()) == NEW


def test_the_stores_of_a_process_share_the_limit(tmp_path: Path) -> None:
    config = StoreConfig(uncommitted_max_bytes=100_000)
    stores = [opened(tmp_path / str(n), config) for n in range(4)]
    try:
        largest = 0
        for n in range(3000):
            for store in stores:
                store.put(key(n), b"x" * 20)
            if n > 10:
                largest = max(largest, sum(each.approximate_num_uncommitted_bytes() for each in stores))
        assert largest <= 100_000
        for store in stores[1:]:
            store.rollback()
        for n in range(300):
            stores[0].put(key(n), b"x" * 20)
        assert stores[0].approximate_num_uncommitted_bytes() > 100_000 / 4
        assert len(list(stores[0].all())) == 3000
    finally:
        for store in stores:
            store.close()


def test_without_a_limit_nothing_is_spilled(tmp_path: Path) -> None:
    with opened(tmp_path / "s", StoreConfig(uncommitted_max_bytes=-1)) as store:
        put_rows(store, [(key(n), b"x" * 1000) for n in range(1000)])
        assert store.approximate_num_uncommitted_bytes() > 2_000_000
        assert store.staged_bytes()[1] == 0


def test_a_full_disk_fails_the_batch_and_loses_no_commit(tmp_path: Path) -> None:
    path = tmp_path / "s"
    with_old_state(path).close()
    with other_process() as other:
        said = other.run(
            "import resource\n"
            f"store = TransactionalStateStore.open({str(path)!r}, IDENTITY, "
            "replace(SPILLING, uncommitted_max_bytes=2_000_000))\n"
            "resource.setrlimit(resource.RLIMIT_FSIZE, (200_000, resource.RLIM_INFINITY))\n"
            "try:\n"
            "    put_rows(store, [(key(n), os.urandom(500)) for n in range(3000)])\n"
            "except Exception as error:\n"
            "    result = [type(error).__name__, str(error)]\n"
            "store.close()"
        )
    assert said[0] == "StateError"
    assert "spill" in said[1]
    with opened(path) as store:
        assert dict(store.all()) == OLD
        assert spilled_folders(path) == []


def test_a_release_without_spills_refuses_the_header_of_a_spilled_attempt(tmp_path: Path) -> None:
    """It restores the state from the changelog, instead of taking the attempt for one without rows."""
    with with_old_state(tmp_path / "s") as store:
        stage(store)
        store.persist_pending(record(2))
        ((_, header),) = store._durable.database.scan(b"h", b"i", family="pending")
    assert b'"blobs"' not in header


def test_the_record_of_a_batch_being_applied_is_read_back() -> None:
    applying = durable.Applying("id", {TP: 7}, record(3))
    old = durable.StoreMetadata(IDENTITY)
    new = durable.StoreMetadata(IDENTITY, restoring=True, applying=applying)
    pairs = {**durable.encode_metadata(durable.StoreMetadata(), old), **durable.encode_metadata(old, new)}
    assert durable.decode_metadata((k, v) for k, v in pairs.items() if v is not None) == new
    assert durable.encode_metadata(new, old)[b"apply"] is None


def test_a_reader_is_told_to_wait_for_an_owner_that_is_alive(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The owner may be this process, another one on this host, or one on another host."""
    seen: list[str] = []

    def reach(name: str) -> None:
        if name == "state.apply_began":
            with pytest.raises(NotUpToBoundError) as refused:
                TransactionalStateStore.open_read_only(tmp_path / "s")
            seen.append(str(refused.value))
            with pytest.raises(NotUpToBoundError) as elsewhere:
                TransactionalStateStore.open_read_only(tmp_path / "copy")
            seen.append(str(elsewhere.value))

    with with_old_state(tmp_path / "s") as store:
        stage(store)

        def copy_then_reach(name: str) -> None:
            if name == "state.apply_began":
                copy_of_open_store(tmp_path / "s", tmp_path / "copy")
                (file,) = (tmp_path / "copy").glob("owner-*")
                file.write_text(json.dumps({**json.loads(file.read_text()), "host": "worker-7"}))
            reach(name)

        monkeypatch.setattr(failpoints, "reach", copy_then_reach)
        store.commit({TP: 20}, batch=record(2))
        assert dict(store.all()) == NEW, "the look does not take the owner's lock away"
    here, elsewhere = seen
    assert f"process {os.getpid()} on" in here
    assert "ask again when that has finished" in here
    assert f"Process {os.getpid()} on worker-7 had it open last" in elsewhere


def test_another_process_sees_that_the_owner_is_alive(tmp_path: Path) -> None:
    path, code = tmp_path / "s", "from kafka_eos_source.state.store.files import has_owner\n"
    with other_process() as other:
        code += f"result = has_owner(Path({str(path / 'db')!r}))"
        assert other.run(code) is False
        with with_old_state(path) as store:
            assert other.run(code) is True
            assert has_owner(path / "db")
            with pytest.raises(StateLockedError):
                opened(path, StoreConfig(lock_timeout_ms=0))
            assert has_owner(path / "db")
            assert other.run(code) is True, "neither look released the lock"
            store.commit({TP: 11})
        assert other.run(code) is False
        assert not has_owner(path / "db")


def test_a_reader_whose_owner_removes_the_rows_reads_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "s"
    with with_old_state(path) as store:
        stage(store)
        store.persist_pending(record(2))
        with TransactionalStateStore.open_read_only(path) as reader:
            monkeypatch.setattr(transactional, "remove_spills", _remove_tables)
            store.promote(record(2), {TP: 20})
            with pytest.raises(StateLockedError, match="read again"):
                reader.promoted(record(2), {TP: 20})
            monkeypatch.undo()
            store.drop_pending()
            with pytest.raises(StateLockedError, match="read again"):
                reader.promoted(record(2), {TP: 20})
            reader.refresh()
            assert dict(reader.all()) == NEW
        stage(store)
        store.persist_pending(record(3))
        uncommitted.remove_spills(path, keep=())
        with (
            TransactionalStateStore.open_read_only(path) as reader,
            pytest.raises(StateCorruptedError, match="rows of a large batch"),
        ):
            reader.promoted(record(3), {TP: 30})


def _remove_tables(store: Path, *, keep: object) -> None:
    """Removes what a folder of spilled rows loses first while its owner removes it."""
    for table in store.glob("spill/*/*.sst"):
        table.unlink()


def test_a_folder_for_spilled_rows_that_cannot_be_created_is_an_error_of_the_disk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_args: object, **_named: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    with TransactionalStateStore.open(tmp_path / "s", IDENTITY, SPILLING) as store:
        with monkeypatch.context() as patch:
            patch.setattr(Path, "mkdir", full)
            with pytest.raises(StateError, match="the disk of the state store"):
                put_rows(store, [(key(n), b"x" * 100) for n in range(1000)])
        store.rollback()
        assert store.get(key(1)) is None


# ---------------------------------------- scans that meet a damaged table
#
# They fail, and do not end early, as if there were no more rows.


ROWS = 60_000


def long_key(number: int) -> bytes:
    return b"\1%08d" % number


def damage(folder: Path) -> None:
    """Overwrites some bytes in the middle of the largest table."""
    table = max(folder.glob("*.sst"), key=lambda path: path.stat().st_size)
    with table.open("r+b") as file:
        file.seek(table.stat().st_size // 2)
        file.write(b"\xff" * 64)


@pytest.fixture
def damaged(tmp_path: Path) -> Path:
    """The folder of a store of which one block cannot be read."""
    path = tmp_path / "s"
    with TransactionalStateStore.open(path, IDENTITY) as store:
        put_rows(store, [(long_key(number), b"%032d" % number) for number in range(ROWS)])
        store.commit({TP: 1})
    with TransactionalStateStore.open(path, IDENTITY) as store:
        store.put(b"\2", b"")
        store.commit({TP: 2})
    damage(path / "db")
    return path


@pytest.mark.parametrize(
    "read",
    [
        pytest.param(lambda store: sum(1 for _ in store.range()), id="forwards"),
        pytest.param(lambda store: sum(1 for _ in store.range(reverse=True)), id="backwards"),
        pytest.param(lambda store: list(map(store.get, map(long_key, range(ROWS)))), id="get"),
        pytest.param(
            lambda store: store.get_many(pa.array([long_key(n) for n in range(ROWS)], pa.binary())),
            id="get_many",
        ),
    ],
)
def test_a_read_of_a_damaged_block_is_an_error(
    damaged: Path, read: Callable[[TransactionalStateStore], Any]
) -> None:
    with TransactionalStateStore.open(damaged, IDENTITY) as store, pytest.raises(StateCorruptedError):
        read(store)


@pytest.mark.parametrize("reverse", [False, True])
def test_a_scan_of_damaged_rows_on_disk_is_an_error(tmp_path: Path, reverse: bool) -> None:
    config = StoreConfig()
    rows = SpilledRows.create(tmp_path, config)
    rows.add({long_key(number): b"%032d" % number for number in range(ROWS)}, 1)
    rows.seal()
    damage(rows.path)
    again = SpilledRows.open(tmp_path, rows.path.name, config)
    with pytest.raises(StateCorruptedError):
        sum(1 for _ in again.scan(None, None, reverse=reverse))
    again.close()


# ---------------------------------------- the limit of staged writes in memory, and the size of an entry


LIMIT = 100_000


@pytest.fixture
def limited(tmp_path: Path) -> Iterator[TransactionalStateStore]:
    config = StoreConfig(uncommitted_max_bytes=LIMIT)
    with TransactionalStateStore.open(tmp_path / "s", IDENTITY, config) as opened:
        yield opened


def test_an_overwritten_key_counts_once(limited: TransactionalStateStore) -> None:
    keys = pa.array([key(1)] * 50_000, pa.binary())
    values = pa.array([b"x" * 50] * 50_000, pa.binary())
    for _ in range(20):  # a million writes
        limited.put_many(keys, values)
    for _ in range(1000):
        limited.put(key(1), b"x" * 50)
    assert limited.approximate_num_uncommitted_bytes() == ENTRY_BYTES + 2 * (len(key(1)) + 50)


@given(
    st.lists(
        st.one_of(
            st.tuples(st.just("put"), st.binary(min_size=1, max_size=2), st.none() | st.binary(max_size=9)),
            st.tuples(
                st.just("many"),
                st.lists(st.tuples(st.binary(min_size=1, max_size=2), st.none() | st.binary(max_size=9))),
                st.none(),
            ),
            st.tuples(st.just("range"), st.binary(max_size=2), st.binary(max_size=2)),
            st.tuples(st.just("drop"), st.binary(max_size=2), st.binary(max_size=2)),
        )
    )
)
def test_the_byte_count_equals_the_size_of_staged_entries(steps: list[tuple[str, object, object]]) -> None:
    overlay = Overlay()
    for kind, one, two in steps:
        if kind == "put":
            overlay.put(one, two)  # type: ignore[arg-type]
        elif kind == "many":
            overlay.put_many([k for k, _ in one], [v for _, v in one])  # type: ignore[attr-defined]
        elif kind == "range":
            overlay.delete_range(one, two)  # type: ignore[arg-type]
        else:
            overlay.drop(one, two)  # type: ignore[arg-type]
        payload = sum(len(k) + len(v or b"") for k, v in overlay.rows.items())
        assert overlay.bytes == ENTRY_BYTES * len(overlay.rows) + 2 * payload
        assert [k for k, _ in overlay.scan(None, None, reverse=False)] == sorted(overlay.rows)


@given(st.lists(st.tuples(st.integers(0, 20), st.integers(0, 20) | st.none())), st.lists(st.integers(0, 22)))
def test_merged_ranges_cover_exactly_what_any_of_them_covers(
    spans: list[tuple[int, int | None]], probes: list[int]
) -> None:
    ranges = Ranges()
    for low, high in spans:
        if high is None or low < high:
            ranges = ranges.plus(bytes([low]), None if high is None else bytes([high]))
    for probe in probes:
        expected = any(low <= probe and (high is None or probe < high) for low, high in spans)
        assert ranges.covers(bytes([probe])) is expected
    ends = [end for _, end in ranges.spans]
    assert all(end is not None for end in ends[:-1])
    assert all(end < low for end, (low, _) in zip(ends, ranges.spans[1:], strict=False))  # type: ignore[operator]


def test_the_byte_count_approximates_the_memory_in_use() -> None:
    tracemalloc.start()
    try:
        before = tracemalloc.get_traced_memory()[0]
        overlay = Overlay()
        for n in range(20_000):
            overlay.put(b"%16d" % n, b"%100d" % n)
        taken = tracemalloc.get_traced_memory()[0] - before
    finally:
        tracemalloc.stop()
    assert 0.6 * overlay.bytes < taken < 1.2 * overlay.bytes  # the count includes the batch of the commit


def test_writes_over_the_limit_leave_the_memory_and_commit(limited: TransactionalStateStore) -> None:
    n = 0
    while limited.staged_bytes()[0] <= 5 * LIMIT:
        limited.put(key(n), b"x" * 100)
        assert limited.approximate_num_uncommitted_bytes() <= LIMIT
        n += 1
    limited.commit({TP: 1})
    assert limited.approximate_num_uncommitted_bytes() == 0
    assert len(list(limited.all())) == n


def test_invalid_limits_are_refused() -> None:
    for limit in (0, -2):
        with pytest.raises(InvalidOptionError, match=r"statestore\.uncommitted\.max\.bytes"):
            StoreConfig(uncommitted_max_bytes=limit)
