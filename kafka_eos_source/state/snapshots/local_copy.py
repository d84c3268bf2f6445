"""The frozen copy of a shard's database that is being uploaded, and when the next one is due.

::

    <state.dir>/…/<shard>/snapshot/
      lock           locked by the process that uploads; a process that dies releases it
      next           time of the next upload, ms since the epoch
      checksums      JSON: checksums of tables, so that none is read twice
      db-<random>/   the frozen copy: links to tables, and copies of small files
      open-<random>/ RocksDB's own log while it reads which tables the copy has

A process that is killed leaves its folders. The next task of the shard on this host removes them.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import logging
import os
import shutil
import tempfile
import uuid
from contextlib import closing
from pathlib import Path

from kafka_eos_source.errors import StateLockedError
from kafka_eos_source.runtime.deadline import Pauses, retry
from kafka_eos_source.runtime.json_input import parse_json
from kafka_eos_source.state.snapshots.manifest import SnapshotFile
from kafka_eos_source.state.store.files import replace_text
from kafka_eos_source.state.store.opening import open_copy
from kafka_eos_source.state.store.transactional import TransactionalStateStore

_FOLDER = "snapshot"
#: How often freezing is tried while RocksDB writes tables in the background.
_TRIES = 5
#: What a process that is killed leaves in the folder.
_LEFT = ("db-*", "open-*")

_log = logging.getLogger(__name__)


def is_due(store: Path, now_ms: int, interval_ms: int) -> bool:
    """Returns whether this host should look for a newer snapshot of the shard; costs one small read.

    A time that is more than two intervals away was written before the clock was set back, or before somebody
    made the interval shorter.
    """
    try:
        next_ms = int((store / _FOLDER / "next").read_text())
    except (OSError, ValueError):
        return True
    return not now_ms < next_ms <= now_ms + 2 * interval_ms


def remove_left_copies(store: Path) -> None:
    """Removes the frozen copies of uploads that were killed, unless an upload of the shard runs.

    Their links would keep the disk space of tables that RocksDB has deleted.

    Args:
        store: folder of the shard's store.
    """
    folder = store / _FOLDER
    try:
        if not _left(folder):
            return
        lock = _locked(folder)
    except OSError as error:
        _log.warning("the copies that a killed upload left in %s cannot be removed: %s", folder, error)
        return
    if lock is None:
        return
    try:
        _remove_left(folder)
    finally:
        _unlock(lock)


def _left(folder: Path) -> list[Path]:
    return [path for pattern in _LEFT for path in folder.glob(pattern)]


def _remove_left(folder: Path) -> None:
    """Removes all copies; the caller holds the lock, so no upload uses any of them."""
    for left in _left(folder):
        shutil.rmtree(left, ignore_errors=True)


def _locked(folder: Path) -> int | None:
    """Returns the lock of a shard's copies, which the caller closes; None if an upload holds it."""
    lock = os.open(folder / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(lock)
        return None
    except BaseException:
        os.close(lock)
        raise
    return lock


def _unlock(lock: int) -> None:
    """Releases a lock of `_locked`, also if a process that was forked meanwhile inherited its descriptor."""
    fcntl.flock(lock, fcntl.LOCK_UN)
    os.close(lock)


class LocalCopy:
    """A frozen copy of a shard's committed state. Its owner holds the shard's lock until `remove`.

    Attributes:
        path: folder of the copy.
    """

    def __init__(self, folder: Path, lock: int) -> None:
        self._folder = folder
        self._lock = lock
        self.path = folder / f"db-{uuid.uuid4().hex}"

    @classmethod
    def freeze(cls, store: TransactionalStateStore) -> LocalCopy | None:
        """Returns a frozen copy of the store; None if an upload of this shard runs on this host.

        Raises:
            StateError, StateLockedError, OSError: as `TransactionalStateStore.freeze`.
        """
        folder = store.path / _FOLDER
        folder.mkdir(exist_ok=True)
        lock = _locked(folder)
        if lock is None:
            return None
        copy = cls(folder, lock)
        try:
            _remove_left(folder)
            retry(lambda: copy._freeze(store), StateLockedError, Pauses(None, 0.0, most=_TRIES))
        except BaseException:
            copy.remove()
            raise
        return copy

    def _freeze(self, store: TransactionalStateStore) -> None:
        shutil.rmtree(self.path, ignore_errors=True)
        self.path.mkdir()
        store.freeze(self.path)

    def files(self) -> list[SnapshotFile]:
        """Returns the files of the copy with their checksums. Tables never change, so each is read once.

        Raises:
            StateCorruptedError, StateError: if the copy cannot be opened, so nobody could use it.
        """
        self._remove_unnamed_tables()
        known = self._known()
        current: dict[str, str] = {}
        found = []
        for path in sorted(self.path.iterdir()):
            status = path.stat()
            key = f"{path.name}/{status.st_ino}/{status.st_size}/{status.st_mtime_ns}"
            checksum = known.get(key)
            if checksum is None:
                checksum = _sha256(path)
            if path.suffix == ".sst":
                current[key] = checksum
            found.append(SnapshotFile(path.name, status.st_size, checksum))
        replace_text(self._folder / "checksums", json.dumps(current))
        return found

    def _remove_unnamed_tables(self) -> None:
        """Removes the tables that the manifest of the copy does not name.

        The owner may have been writing them when the copy was made, or it was about to delete them.
        """
        scratch = Path(tempfile.mkdtemp(prefix="open-", dir=self._folder))
        try:
            with closing(open_copy(self.path, scratch)) as database:
                named = database.tables()
        finally:
            shutil.rmtree(scratch, ignore_errors=True)
        for table in self.path.glob("*.sst"):
            if table.name not in named:
                table.unlink()

    def look_again_at(self, next_ms: int) -> None:
        """Records when the next upload is due."""
        replace_text(self._folder / "next", str(next_ms))

    def remove(self) -> None:
        """Removes the copy and releases the lock."""
        shutil.rmtree(self.path, ignore_errors=True)
        _unlock(self._lock)

    def _known(self) -> dict[str, str]:
        try:
            return dict(parse_json((self._folder / "checksums").read_text()))
        except (OSError, ValueError, TypeError):
            return {}


def _sha256(path: Path) -> str:
    digest = hashlib.sha256()
    with path.open("rb") as opened:
        while chunk := opened.read(4 << 20):
            digest.update(chunk)
    return digest.hexdigest()
