"""The frozen copy of a shard's database that is being uploaded, and when the next one is due.

::

    <state.dir>/…/<shard>/snapshot/
      lock           locked by the process that uploads; a process that dies releases it
      next           time of the next upload, ms since the epoch
      checksums      JSON: checksums of tables, so that none is read twice
      db-<random>/   the frozen copy: links to tables, and copies of small files
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import shutil
import uuid
from pathlib import Path

from kafka_eos_source.errors import StateLockedError
from kafka_eos_source.runtime.retry import Pauses, retry
from kafka_eos_source.state.snapshots.manifest import SnapshotFile
from kafka_eos_source.state.store.files import replace_text
from kafka_eos_source.state.store.transactional import TransactionalStateStore

_FOLDER = "snapshot"
#: How often freezing is tried while RocksDB writes tables in the background.
_TRIES = 5


def is_due(store: Path, now_ms: int) -> bool:
    """Returns whether this host should look for a newer snapshot of the shard; costs one small read."""
    try:
        return now_ms >= int((store / _FOLDER / "next").read_text())
    except (OSError, ValueError):
        return True


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
        lock = os.open(folder / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(lock)
            return None
        copy = cls(folder, lock)
        try:
            for left in folder.glob("db-*"):  # by a process that was killed
                shutil.rmtree(left, ignore_errors=True)
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
        """Returns the files of the copy with their checksums. Tables never change, so each is read once."""
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

    def look_again_at(self, next_ms: int) -> None:
        """Records when the next upload is due."""
        replace_text(self._folder / "next", str(next_ms))

    def remove(self) -> None:
        """Removes the copy and releases the lock."""
        shutil.rmtree(self.path, ignore_errors=True)
        os.close(self._lock)

    def _known(self) -> dict[str, str]:
        try:
            return dict(json.loads((self._folder / "checksums").read_text()))
        except (OSError, ValueError, TypeError):
            return {}


def _sha256(path: Path) -> str:
    digest = hashlib.sha256()
    with path.open("rb") as opened:
        while chunk := opened.read(4 << 20):
            digest.update(chunk)
    return digest.hexdigest()
