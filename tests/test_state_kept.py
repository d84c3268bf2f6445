"""A resident worker keeps databases open between tasks, and closes one for another process that needs it."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest
from crash_kit import until
from state_kit import IDENTITY, TP, record

from kafka_eos_source.errors import StateLockedError, StoreClosedError
from kafka_eos_source.state.model import PendingBatch, StoreIdentity
from kafka_eos_source.state.store import folder, kept, transactional
from kafka_eos_source.state.store.config import StoreConfig
from kafka_eos_source.state.store.database import Database
from kafka_eos_source.state.store.files import lease_socket_of
from kafka_eos_source.state.store.kept import KeptDatabases
from kafka_eos_source.state.store.transactional import TransactionalStateStore

A, B = b"\1a", b"\1b"
#: A process that finds a database locked does not wait for it.
AT_ONCE = StoreConfig(lock_timeout_ms=0)


@pytest.fixture
def keeping(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[KeptDatabases]:
    """This process keeps the databases below ``tmp_path``, as a resident worker does."""
    databases = KeptDatabases()
    for module in (folder, transactional):
        monkeypatch.setattr(module, "KEPT", databases)
    databases.begin(tmp_path)
    yield databases
    databases.close()


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "app" / "counts" / "0"


@pytest.fixture
def opened(monkeypatch: pytest.MonkeyPatch) -> list[Path]:
    """Paths of the databases that RocksDB has opened."""
    paths: list[Path] = []
    original = folder.open_owned

    def recorded(database: Path, config: StoreConfig) -> Database:
        paths.append(database)
        return original(database, config)

    monkeypatch.setattr(folder, "open_owned", recorded)
    return paths


def batch(path: Path, number: int, identity: StoreIdentity = IDENTITY) -> TransactionalStateStore:
    """Promotes the batch before this one, and leaves this one pending, as a task does."""
    store = TransactionalStateStore.open(path, identity)
    if number:
        store.promote(record(number - 1), {TP: number})
    store.put(A, b"%d" % number)
    store.persist_pending(record(number))
    store.keep()
    return store


def test_a_process_that_keeps_nothing_closes_the_database(path: Path) -> None:
    batch(path, 0)
    assert OTHER.run(path, "open") == "opened"


def test_tasks_of_a_shard_use_the_database_that_is_open(
    keeping: KeptDatabases, path: Path, opened: list[Path]
) -> None:
    for number in range(4):
        batch(path, number)
    assert len(opened) == 1
    with TransactionalStateStore.open(path, IDENTITY) as store:
        assert store.get(A) == b"2"
        assert [each.record for each in store.pending()] == [record(3)]
        assert store.next_offset(TP) == 3
    assert len(opened) == 1
    batch(path, 4)
    assert len(opened) == 2, "close() closes it"


def test_what_a_task_leaves_staged_or_open_ends_with_it(keeping: KeptDatabases, path: Path) -> None:
    store = TransactionalStateStore.open(path, IDENTITY)
    store.put_all([(b"\1%d" % number, b"0") for number in range(100)])
    store.commit({TP: 1}, batch=record(0))
    store.put(A, b"staged")
    scan = store.range(None, None)
    next(scan)
    with store.view() as view:
        store.keep()
        for use in (lambda: store.get(A), lambda: next(scan), lambda: view.get(A), lambda: store.put(A, b"")):
            with pytest.raises(StoreClosedError):
                use()
    with TransactionalStateStore.open(path, IDENTITY) as again:
        assert again.get(A) is None
        assert again.staged_bytes() == (0, 0)


@pytest.mark.parametrize("change", ["identity", "config", "removed", "replaced"])
def test_a_kept_database_that_does_not_fit_is_closed_and_what_is_on_disk_opened(
    keeping: KeptDatabases, path: Path, opened: list[Path], change: str
) -> None:
    batch(path, 0)
    identity, config = IDENTITY, StoreConfig()
    if change == "identity":
        identity = replace(IDENTITY, topic_id="topic-1")
    elif change == "config":
        config = StoreConfig(wal_sync=True)
    else:
        shutil.rmtree(path)
        if change == "replaced":
            (path / "db").mkdir(parents=True)
            (path / "db" / "LOCK").touch()
    with TransactionalStateStore.open(path, identity, config) as store:
        expected = [record(0)] if change in ("identity", "config") else []
        assert [each.record for each in store.pending()] == expected
    assert len(opened) == 2


def test_a_store_that_failed_is_not_kept(
    keeping: KeptDatabases, path: Path, opened: list[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    store = TransactionalStateStore.open(path, IDENTITY)
    store.put(A, b"1")

    def fail(*_: object, **__: object) -> None:
        raise StateLockedError("the disk is full")

    with monkeypatch.context() as patch:
        patch.setattr(Database, "write", fail)
        with pytest.raises(StateLockedError):
            store.persist_pending(record(0))
    store.keep()
    batch(path, 0)
    assert len(opened) == 2


class Other:
    """Another process, which has the program below."""

    PROGRAM = """
import sys, time
from pathlib import Path
from state_kit import IDENTITY, TP, record
from kafka_eos_source.errors import StateLockedError
from kafka_eos_source.state.store.config import StoreConfig
from kafka_eos_source.state.store.kept import KEPT
from kafka_eos_source.state.store.transactional import TransactionalStateStore

path, action = Path(sys.argv[1]), sys.argv[2]
if action == "keep":
    KEPT.begin(path.parents[2])
    store = TransactionalStateStore.open(path, IDENTITY)
    store.put(b"\\1a", b"kept")
    store.commit({TP: 1}, batch=record(0))
    store.put(b"\\1a", b"pending")
    store.persist_pending(record(1))
    store.keep()
    print("kept", flush=True)
    time.sleep(600)
try:
    if action == "destroy":
        TransactionalStateStore.destroy(path)
        print("destroyed")
    else:
        with TransactionalStateStore.open(path, IDENTITY, StoreConfig(lock_timeout_ms=int(sys.argv[3]))):
            print("opened")
except StateLockedError:
    print("locked")
"""

    def run(self, path: Path, action: str, lock_timeout_ms: int = 60_000) -> str:
        """Runs the program to its end and returns what it printed."""
        return subprocess.run(
            self._command(path, action, lock_timeout_ms),
            check=True,
            stdout=subprocess.PIPE,
            text=True,
            env=self._environment(),
        ).stdout.strip()

    @contextmanager
    def keeps(self, path: Path) -> Iterator[subprocess.Popen[str]]:
        """Runs the program, which keeps the database with a pending batch."""
        with subprocess.Popen(
            self._command(path, "keep", 0), stdout=subprocess.PIPE, text=True, env=self._environment()
        ) as process:
            try:
                assert process.stdout is not None
                assert process.stdout.readline().strip() == "kept"
                yield process
            finally:
                process.kill()

    def _command(self, path: Path, action: str, lock_timeout_ms: int) -> list[str]:
        return [sys.executable, "-c", self.PROGRAM, str(path), action, str(lock_timeout_ms)]

    @staticmethod
    def _environment() -> dict[str, str]:
        return {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}


OTHER = Other()


def test_another_process_gets_a_kept_database_at_once(
    keeping: KeptDatabases, path: Path, opened: list[Path]
) -> None:
    batch(path, 0)
    assert OTHER.run(path, "open") == "opened"
    batch(path, 1)
    assert len(opened) == 2
    assert OTHER.run(path, "destroy") == "destroyed"


def test_a_process_gets_the_database_that_another_one_keeps(path: Path) -> None:
    with OTHER.keeps(path), TransactionalStateStore.open(path, IDENTITY) as store:
        assert store.get(A) == b"kept"
        assert store.pending() == [PendingBatch(record(1), record(0), store.pending()[0].size_bytes)]


def test_a_database_in_use_is_released_after_its_use(keeping: KeptDatabases, path: Path) -> None:
    store = TransactionalStateStore.open(path, IDENTITY)
    assert OTHER.run(path, "open", lock_timeout_ms=0) == "locked"
    store.keep()
    with pytest.MonkeyPatch.context() as patch:  # nobody has to ask again
        patch.setattr(KeptDatabases, "release", None)
        assert OTHER.run(path, "open", lock_timeout_ms=0) == "opened"


@pytest.mark.fault(
    "T214",
    "a process that keeps databases open is killed",
    "between two batches, with a pending batch in the write-ahead log",
)
def test_a_database_of_a_killed_process_has_its_pending_batch(path: Path) -> None:
    with OTHER.keeps(path) as process:
        process.kill()
        process.wait()
        with TransactionalStateStore.open(path, IDENTITY) as store:
            assert store.get(A) == b"kept"
            store.promote(record(1), {TP: 2})
            assert store.get(A) == b"pending"


def test_a_stopped_process_keeps_its_databases(path: Path) -> None:
    """It holds the lock, so nobody may use its databases; the error says who has them."""
    with OTHER.keeps(path) as process:
        process.send_signal(signal.SIGSTOP)
        with pytest.raises(StateLockedError, match=f"process {process.pid} "):
            TransactionalStateStore.open(path, IDENTITY, AT_ONCE)
        process.send_signal(signal.SIGCONT)
        TransactionalStateStore.open(path, IDENTITY).close()


def test_a_long_path_of_the_state_folder_has_a_socket_too(tmp_path: Path) -> None:
    path = tmp_path / ("long" * 40) / "app" / "counts" / "0"
    with OTHER.keeps(path):
        TransactionalStateStore.open(path, IDENTITY).close()


def test_without_a_socket_nothing_is_kept(
    tmp_path: Path, path: Path, opened: list[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nobody could ask for the databases."""

    def fail(*_: object) -> None:
        raise OSError("no sockets here")

    monkeypatch.setattr(kept, "LeaseListener", fail)
    databases = KeptDatabases()
    for module in (folder, transactional):
        monkeypatch.setattr(module, "KEPT", databases)
    databases.begin(tmp_path)
    batch(path, 0)
    batch(path, 1)
    assert len(opened) == 2


@pytest.mark.parametrize("limit", ["_MOST_DATABASES", "_MOST_MEMTABLE_BYTES"])
def test_databases_beyond_the_limits_are_closed_least_recently_used_first(
    keeping: KeptDatabases, tmp_path: Path, opened: list[Path], monkeypatch: pytest.MonkeyPatch, limit: str
) -> None:
    identities = [replace(IDENTITY, shard=number) for number in range(3)]
    paths = [tmp_path / "app" / "counts" / str(number) for number in range(3)]
    if limit == "_MOST_DATABASES":
        monkeypatch.setattr(kept, limit, 2)
    else:
        monkeypatch.setattr(kept.OpenDatabase, "memtable_bytes", lambda _: 60 << 20)
    for path, identity in zip(paths, identities, strict=True):
        TransactionalStateStore.open(path, identity).keep()
    for number in (2, 1):
        TransactionalStateStore.open(paths[number], identities[number]).keep()
    assert len(opened) == 3
    TransactionalStateStore.open(paths[0], identities[0]).keep()
    assert len(opened) == 4
    TransactionalStateStore.open(paths[2], identities[2]).keep()
    assert len(opened) == 5, "shard 2 was used least recently"


def test_a_process_that_ends_closes_its_databases_and_removes_its_socket(
    keeping: KeptDatabases, tmp_path: Path, path: Path
) -> None:
    batch(path, 0)
    socket_path = lease_socket_of(path / "db")
    assert socket_path is not None
    assert socket_path.is_socket()
    keeping.close()
    assert not socket_path.exists()
    assert not (path / "owner").exists()
    until(lambda: not list(tmp_path.glob(".lease-*")))
    TransactionalStateStore.open(path, IDENTITY, AT_ONCE).close()
