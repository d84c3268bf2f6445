"""Logs of a state store that a crash cut off or lost: what opens holds exactly one commit.

A power failure, or a bad disk, may cut any log of a database off, or lose it as a whole, and keep the logs
after it. Each scenario damages copies of a store that a kill left, opens them, continues to write, and
damages them again.
"""

from __future__ import annotations

import os
import random
import shutil
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from kafka_eos_source.errors import NotUpToBoundError, StateCorruptedError
from kafka_eos_source.runtime import failpoints
from kafka_eos_source.state.model import StoreIdentity
from kafka_eos_source.state.store import database, durable
from kafka_eos_source.state.store.database import Database
from kafka_eos_source.state.store.rocksdb import StoreConfig
from kafka_eos_source.state.store.transactional import TransactionalStateStore
from tests.state.state_kit import EFFORT, IDENTITY, TP, Model, Workload, binary, key, put_rows, record
from tests.state.store.crash_kit import (
    OPEN_FOR_EACH_COMMIT,
    OPEN_ONCE,
    SEED,
    copy_of_open_store,
    crash_images,
    log_sizes,
    records_of,
)

SCENARIOS = 60 * EFFORT
ROUNDS = 4

#: What the process that is killed does, and the name of the configuration of its store.
KINDS = {
    "open once": (OPEN_ONCE, "TINY", 40),
    "open for each": (OPEN_FOR_EACH_COMMIT, "TINY", 40),
    "spilling": (OPEN_ONCE, "SPILLING", 8),
}


@pytest.mark.parametrize("kind", KINDS)
def test_a_store_with_lost_logs_holds_exactly_one_commit_or_reports_damage(kind: str, tmp_path: Path) -> None:
    work, config, commits = KINDS[kind]
    images = crash_images(tmp_path, config, work, commits=commits)
    outcomes: Counter[str] = Counter()
    for number in range(SCENARIOS // len(KINDS)):
        image, acknowledged = images[number % len(images)]
        scenario = _Scenario(random.Random(f"{SEED} {kind} {number}"), image, acknowledged, tmp_path / "copy")
        scenario.run()
        outcomes += scenario.outcomes
    assert {"intact", "older", "damaged"} <= outcomes.keys(), outcomes


class _Scenario:
    """A store that is damaged, opened and continued several times.

    Attributes:
        outcomes: how often which of the results occurred.
    """

    def __init__(self, rng: random.Random, image: Path, acknowledged: int, folder: Path) -> None:
        self.outcomes: Counter[str] = Counter()
        self._rng = rng
        self._folder = folder
        self._at_least = acknowledged
        self._at_most = acknowledged + 1
        self._steps: list[str] = []
        shutil.copytree(image, folder / "0")

    def run(self) -> None:
        try:
            for number in range(ROUNDS):
                if not self._round(self._folder / str(number), self._folder / str(number + 1)):
                    return
        except BaseException as error:
            error.add_note(f"steps: {self._steps}")
            raise
        finally:
            shutil.rmtree(self._folder)

    def _round(self, path: Path, following: Path) -> bool:
        is_damaged = self._damage(path)
        try:
            self._read(path)
            with TransactionalStateStore.open(path, IDENTITY) as store:
                done = store.next_offset(TP)
                assert done is not None
                _check(done, store.last_batch(), dict(store.all()))
                assert is_damaged or self._at_least <= done
                assert done <= self._at_most
                self.outcomes["older" if done < self._at_least else "intact"] += 1
                self._steps.append(f"holds {done}")
                work = Workload(SEED)
                for _ in range(done):
                    work.step(None)
                for _ in range(self._rng.choice((0, 1, 1, 2, 5))):
                    work.step(store)
                self._at_least = self._at_most = work.done
                self._steps.append(f"wrote {work.done}")
                is_killed = self._rng.random() < 0.5
                if is_killed:
                    copy_of_open_store(path, following)
            if not is_killed:
                shutil.copytree(path, following)
        except StateCorruptedError:
            assert is_damaged
            self.outcomes["damaged"] += 1
            return False
        return True

    def _read(self, path: Path) -> None:
        """Checks what a reader sees that does not open the store for writing."""
        try:
            with TransactionalStateStore.open_read_only(path) as reader:
                done = reader.next_offset(TP)
                assert done is not None
                _check(done, reader.last_batch(), dict(reader.all()))
        except NotUpToBoundError:
            self.outcomes["between two batches"] += 1

    def _damage(self, path: Path) -> bool:
        """Damages some logs; returns whether it did."""
        logs = sorted((path / "db").glob("*.log"))
        how = self._rng.choice(("nothing", "boundary", "boundary", "within", "delete", "delete"))
        written = [log for log in logs if log.stat().st_size]
        if how == "nothing" or not written:
            return False
        log = self._rng.choice([written[0], self._rng.choice(written)])
        self._steps.append(f"{how} {log.name} of {[each.name for each in logs]}")
        if how == "delete":
            log.unlink()
        elif how == "within":
            os.truncate(log, self._rng.randrange(log.stat().st_size))
        else:
            os.truncate(log, self._rng.choice(records_of(log)))
        return True


def _check(done: int, last: object, rows: Model) -> None:
    assert last == (record(done) if done else None)
    assert rows == Workload.after(SEED, done)


def test_the_first_log_cannot_be_lost_unnoticed(tmp_path: Path) -> None:
    """The second log would do: a store that learns its cluster later records its identity again."""
    for number, identity in enumerate([IDENTITY, replace(IDENTITY, cluster_id="c")], 1):
        _commit(tmp_path / "s", number, identity=identity)
    first, *_ = _written_logs(tmp_path / "s")
    first.unlink()
    _assert_damaged(tmp_path / "s")


def test_a_number_that_was_given_again_is_not_taken_for_the_one_that_was_lost(tmp_path: Path) -> None:
    path = tmp_path / "s"
    with TransactionalStateStore.open(path, IDENTITY) as store:
        for number in (1, 2, 3):
            _put(store, number)
    _commit(path, 4)
    first, second = _written_logs(path)
    end = records_of(first)[-1]
    os.truncate(first, end + 5)  # RocksDB notices a record that is cut off, and ignores the second log
    with TransactionalStateStore.open(path, IDENTITY) as store:
        assert store.next_offset(TP) == 2
        for number in (3, 4):
            _put(store, number)
    assert second in _written_logs(path)
    os.truncate(first, end)
    _assert_damaged(path)


@pytest.mark.parametrize("flushed", [1, 2, 3])
def test_tables_that_a_close_wrote_ahead_of_others_are_noticed_if_the_log_is_lost(
    flushed: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    copies = _copies_at(monkeypatch, "state.within_flush", tmp_path)
    _commit(tmp_path / "live", 1)
    assert not copies
    rows = {key(n): b"x" * 200 for n in range(3000)}
    with TransactionalStateStore.open(tmp_path / "live", IDENTITY) as store:
        put_rows(store, list(rows.items()))
        _put(store, 2)
    copy = copies[flushed - 1]
    intact = shutil.copytree(copy, tmp_path / "intact")
    with TransactionalStateStore.open(intact, IDENTITY) as store:
        assert dict(store.all()) == {**rows, b"\1last": b"2"}
    for log in _written_logs(copy):
        os.truncate(log, records_of(log)[-1])
    if flushed < 3:
        _assert_damaged(copy)


def test_a_large_batch_that_is_ahead_of_its_record_is_noticed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    copies = _copies_at(monkeypatch, "state.apply_slice", tmp_path)
    config = StoreConfig(uncommitted_max_bytes=6_000)
    with TransactionalStateStore.open(tmp_path / "live", IDENTITY, config) as store:
        _put(store, 1)
        put_rows(store, [(key(n), b"x" * 30) for n in range(1000)])
        store.commit({TP: 2}, batch=record(2))
    log = _written_logs(copies[0])[-1]
    os.truncate(log, records_of(log)[-1])
    _assert_damaged(copies[0])


def test_a_restored_chunk_that_is_ahead_of_its_record_is_noticed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(durable, "_INGEST_ROWS", 10)
    copies: list[Path] = []
    ingest = Database.ingest

    def ingest_and_copy(database: Database, *args: Any) -> None:
        ingest(database, *args)
        copies.append(copy_of_open_store(tmp_path / "live", tmp_path / f"copy{len(copies)}"))

    monkeypatch.setattr(Database, "ingest", ingest_and_copy)
    with TransactionalStateStore.open(tmp_path / "live", IDENTITY) as store:
        _put(store, 1)
        store.restore_chunk(binary(map(key, range(10))), binary([b"x"] * 10), {TP: 2})
    with TransactionalStateStore.open(shutil.copytree(copies[0], tmp_path / "intact"), IDENTITY) as store:
        assert (store.next_offset(TP), store.restoring) == (1, True)
    log = _written_logs(copies[0])[-1]
    os.truncate(log, records_of(log)[-1])
    _assert_damaged(copies[0])


class _SyncedLengths:
    """A rocksdict database that knows up to where its logs survive a power failure.

    Attributes:
        synced: bytes of each log, by name, that were on disk when a call that waits for the disk returned.
    """

    def __init__(self, database: Database) -> None:
        self.synced: dict[str, int] = {}
        self._folder = database.path
        self._db = database._db
        self._keep()  # `sync_logs` has synced what was there before
        database._db = self

    def __getattr__(self, name: str) -> Any:
        return getattr(self._db, name)

    def write(self, batch: Any, options: Any) -> None:
        self._db.write(batch, options)
        if options.sync:
            self._keep()

    def flush_wal(self, sync: bool) -> None:
        self._db.flush_wal(sync)
        if sync:
            self._keep()

    def _keep(self) -> None:
        self.synced = {log.name: size for log, size in log_sizes(self._folder).items()}


def _after_power_failure(store: Path, synced: dict[str, int], copy: Path) -> Path:
    """Copies a store without the bytes of its logs that were not on disk."""
    copy_of_open_store(store, copy)
    for log in (copy / "db").glob("*.log"):
        os.truncate(log, synced.get(log.name, 0))
    return copy


def _power_failures_at_requirements(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, logs: list[_SyncedLengths]
) -> list[Path]:
    """Returns a list that receives what a power failure leaves right after each requirement is stored."""
    copies: list[Path] = []
    replace_text = database.replace_text

    def store_and_copy(*args: Any, **options: Any) -> None:
        replace_text(*args, **options)
        copies.append(
            _after_power_failure(tmp_path / "live", logs[-1].synced, tmp_path / f"cut{len(copies)}")
        )

    monkeypatch.setattr(database, "replace_text", store_and_copy)
    return copies


def test_a_power_failure_while_a_store_closes_is_no_damage(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    logs: list[_SyncedLengths] = []
    copies = _power_failures_at_requirements(monkeypatch, tmp_path, logs)
    rows = {key(n): b"x" * 200 for n in range(3000)}
    with TransactionalStateStore.open(tmp_path / "live", IDENTITY) as store:
        logs.append(_SyncedLengths(store._durable.database))
        _put(store, 1)
        put_rows(store, list(rows.items()))
        _put(store, 2)
    (copy,) = copies
    hole = shutil.copytree(copy, tmp_path / "hole")
    with TransactionalStateStore.open(copy, IDENTITY) as store:
        assert dict(store.all()) == {**rows, b"\1last": b"2"}
    log = _written_logs(hole)[-1]
    os.truncate(log, records_of(log)[-1])
    _assert_damaged(hole)


def test_a_power_failure_while_a_restore_continues_is_no_damage(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A small chunk is written without a sync; the next one is large enough for a sorted file."""
    monkeypatch.setattr(durable, "_INGEST_ROWS", 10)
    logs: list[_SyncedLengths] = []
    copies = _power_failures_at_requirements(monkeypatch, tmp_path, logs)
    with TransactionalStateStore.open(tmp_path / "live", IDENTITY) as store:
        store.restore_chunk(binary([key(0)]), binary([b"x"]), {TP: 1}, done=False)
    with TransactionalStateStore.open(tmp_path / "live", IDENTITY) as store:
        logs.append(_SyncedLengths(store._durable.database))
        store.restore_chunk(binary([key(1)]), binary([b"x"]), {TP: 2}, done=False)
        store.restore_chunk(binary(map(key, range(10))), binary([b"x"] * 10), {TP: 12}, done=False)
    copy = copies[0]
    hole = shutil.copytree(copy, tmp_path / "hole")
    with TransactionalStateStore.open(copy, IDENTITY) as store:
        assert (store.next_offset(TP), store.restoring) == (2, True)
    log = _written_logs(hole)[-1]
    os.truncate(log, records_of(log)[-1])
    with pytest.raises(StateCorruptedError, match="a log is missing or ends too early"):
        TransactionalStateStore.open(hole, IDENTITY)


def test_a_requirement_that_a_full_disk_does_not_take_leaves_the_log(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_args: Any, **_options: Any) -> None:
        raise OSError(28, "No space left on device")

    with TransactionalStateStore.open(tmp_path / "s", IDENTITY) as store:
        put_rows(store, [(key(n), b"x" * 200) for n in range(3000)])
        _put(store, 1)
        monkeypatch.setattr(database, "replace_text", full)
    assert not list(tmp_path.glob("s/db/*.sst"))
    with TransactionalStateStore.open(tmp_path / "s", IDENTITY) as store:
        assert store.get(key(2999)) == b"x" * 200
    monkeypatch.undo()
    with TransactionalStateStore.open(tmp_path / "s", IDENTITY) as store:
        assert store.get(b"\1last") == b"1"
    assert list(tmp_path.glob("s/db/*.sst"))


def test_a_damaged_requirement_is_damage(tmp_path: Path) -> None:
    _commit(tmp_path / "s", 1)
    (tmp_path / "s" / "db" / "least-write").write_text("seven")
    with pytest.raises(StateCorruptedError, match="least-write contains b'seven'; expected a number"):
        TransactionalStateStore.open(tmp_path / "s", IDENTITY)


def test_logs_of_a_process_that_was_killed_are_synced_before_the_next_write(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    synced: list[str] = []
    monkeypatch.setattr(database, "fsync", synced.append)
    with TransactionalStateStore.open(tmp_path / "live", IDENTITY) as store:
        _put(store, 1)
        copy_of_open_store(tmp_path / "live", tmp_path / "killed")
    assert not synced
    logs = _written_logs(tmp_path / "killed")
    with TransactionalStateStore.open(tmp_path / "killed", IDENTITY):
        assert {str(log) for log in logs} <= set(synced)


def _commit(path: Path, number: int, identity: StoreIdentity = IDENTITY) -> None:
    with TransactionalStateStore.open(path, identity) as store:
        _put(store, number)


def _put(store: TransactionalStateStore, number: int) -> None:
    store.put(b"\1last", b"%d" % number)
    store.commit({TP: number}, batch=record(number))


def _written_logs(path: Path) -> list[Path]:
    return [log for log, size in log_sizes(path / "db").items() if size]


def _copies_at(monkeypatch: pytest.MonkeyPatch, failpoint: str, folder: Path) -> list[Path]:
    """Copies the store ``live`` whenever a failpoint is reached; returns the list of the copies."""
    copies: list[Path] = []

    def reach(name: str) -> None:
        if name == failpoint:
            copies.append(copy_of_open_store(folder / "live", folder / f"copy{len(copies)}"))

    monkeypatch.setattr(failpoints, "reach", reach)
    return copies


def _assert_damaged(path: Path) -> None:
    with pytest.raises(StateCorruptedError, match="a log is missing or ends too early"):
        TransactionalStateStore.open_read_only(path)
    with pytest.raises(StateCorruptedError, match="a log is missing or ends too early"):
        TransactionalStateStore.open(path, IDENTITY)


def test_each_bit_of_a_log_may_change(tmp_path: Path) -> None:
    """RocksDB alone hangs if the bit makes a record one of a log that was used again."""
    work = Workload(SEED)
    with TransactionalStateStore.open(tmp_path / "store", IDENTITY) as store:
        for _ in range(3):
            work.step(store)
    (log,) = (tmp_path / "store" / "db").glob("*.log")
    content = log.read_bytes()
    outcomes: Counter[int | str] = Counter()
    for begin in records_of(log):
        for bit in range(8 * 7):
            changed = bytearray(content)
            changed[begin + bit // 8] ^= 1 << bit % 8
            copy = shutil.copytree(tmp_path / "store", tmp_path / "copy")
            (copy / "db" / log.name).write_bytes(changed)
            try:
                with TransactionalStateStore.open(copy, IDENTITY) as store:
                    done = store.next_offset(TP)
                    assert done is not None
                    assert dict(store.all()) == Workload.after(SEED, done)
                outcomes[done] += 1
            except StateCorruptedError as error:
                # another length leads the check into a record's data, where any type may follow
                hangs = f"the record at byte {begin} has the type 5" in str(error)
                outcomes["hangs RocksDB" if hangs else "damaged"] += 1
            shutil.rmtree(copy)
    assert outcomes["hangs RocksDB"] == len(records_of(log))
    assert outcomes[0]
    assert outcomes[2]
