"""Uploads a shard's state to shared storage, in a thread of the worker that ran the shard's task.

::

    task      token ─▶ store at the token's state ─▶ freeze ─▶ process the batch …
                                                       │ links; the task does not wait
    thread                                             └─▶ newest snapshot recent? ─yes─▶ nothing
                                                             │ no
                  files that the storage lacks ─▶ manifest ─▶ files still there? ─▶ remove old snapshots

What each crash leaves:

- the frozen copy on the local disk. The next task of the shard on this host removes it.
- before the manifest: files without a manifest. The next upload finds and uses them by their checksums; what
  no snapshot uses for a day is removed.
- after the manifest: a complete snapshot. The next upload removes the old ones.

Two owners may upload at once, for example the task of this batch and a *zombie*, a task of an older batch
that Spark has given up. Neither can damage the other's snapshot: files are named by their contents, and each
manifest has a name of its own. Both states were committed when they were frozen, so both snapshots are
correct; the older one is removed first. If one of them removes a file that the other is about to use, the
other finds that out after its manifest, and withdraws the manifest; a reader checks every file anyway.

The frozen copy::

    <state.dir>/…/<shard>/snapshot/
      lock           locked by the process that uploads; a process that dies releases it
      next           time of the next upload, ms since the epoch
      checksums      JSON: checksums of tables, so that none is read twice
      db-<random>/   the frozen copy: links to tables, and copies of small files
      open-<random>/ RocksDB's own log while it reads which tables the copy has
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import logging
import os
import shutil
import tempfile
import threading
import time
import uuid
from collections.abc import Mapping
from contextlib import closing
from enum import Enum
from pathlib import Path

from pyarrow.fs import FileInfo

from kafka_eos_source.errors import KafkaEosError, StateLockedError
from kafka_eos_source.model import TopicPartition
from kafka_eos_source.runtime import failpoints
from kafka_eos_source.runtime.deadline import Pauses, retry
from kafka_eos_source.runtime.file_systems import without_secrets
from kafka_eos_source.runtime.json_input import parse_json
from kafka_eos_source.runtime.logs import warn_once
from kafka_eos_source.state.model import BatchRecord
from kafka_eos_source.state.options import SnapshotSettings
from kafka_eos_source.state.snapshots.storage import (
    Manifest,
    ManifestName,
    SnapshotFile,
    SnapshotStorage,
    StorageError,
    UnusableSnapshotError,
    topic_hash,
)
from kafka_eos_source.state.store.durable import same_batch
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


# ---------------------------------------- the upload


#: Number of snapshots that are kept. Somebody may be downloading the newest one while the next one appears.
KEPT = 2
#: After this time a file that no snapshot uses was left by an upload that died, and not by one that runs.
_ABANDONED_MS = 24 * 3_600_000
#: More than clocks of hosts differ. A snapshot that is older than this and ahead of the committed offset
#: shows that the changelog was truncated.
_CLOCKS_DIFFER_MS = 3_600_000
#: Pause after a failed upload, unless the interval is shorter.
_AFTER_FAILURE_MS = 60_000


class Uploaded(Enum):
    """How an upload ended."""

    DONE = "uploaded"
    RECENT = "the newest snapshot is recent enough"
    SAME = "the newest snapshot holds this state, or a later one"
    WITHDRAWN = "another process removed a file that it needed"


#: After this time, unless the interval is longer, a task warns of an upload that does not end.
_LONG_UPLOAD_SECONDS = 600.0

_thread: threading.Thread | None = None
#: When `_thread` began, on the monotonic clock.
_began_at = 0.0


def take_if_due(
    store: TransactionalStateStore,
    tp: TopicPartition,
    committed_offset: int,
    committed_batch: BatchRecord,
    settings: SnapshotSettings,
) -> None:
    """Freezes the state and uploads it in a thread, if a snapshot is due and no upload runs here.

    A failure is logged, and does not disturb the task: the changelog has all of the state.

    Args:
        store: open, with nothing staged or pending.
        tp: the shard's changelog partition.
        committed_offset, committed_batch: what the token confirms. Other state is not uploaded.
        settings: of the snapshots.
    """
    global _thread, _began_at
    now_ms = int(time.time() * 1000)
    identity = store.identity
    if not committed_offset or not is_due(store.path, now_ms, settings.interval_ms):
        return
    if _thread is not None and _thread.is_alive():
        _warn_of_long_upload(_thread, settings)
        return
    batch = store.last_batch()
    is_committed = store.next_offset(tp) == committed_offset and same_batch(batch, committed_batch)
    if not is_committed or batch is None or not identity.topic_id:
        _log.warning("no snapshot of shard %s is made: the store is not at the token's state", tp)
        return
    try:
        copy = LocalCopy.freeze(store)
    except (KafkaEosError, OSError) as error:
        _log.warning("no snapshot of shard %s is made: %s", tp, error)
        return
    if copy is None:
        return
    state = Manifest(identity, committed_offset, batch, now_ms, ())
    _thread = threading.Thread(
        target=_run, args=(copy, state, settings), name=f"kafka-eos-snapshot-{tp}", daemon=True
    )
    _began_at = time.monotonic()
    try:
        _thread.start()
    except RuntimeError as error:  # the host has too many threads
        _log.warning("no snapshot of shard %s is made: %s", tp, error)
        _thread = None
        copy.remove()


def _warn_of_long_upload(thread: threading.Thread, settings: SnapshotSettings) -> None:
    """Logs once that an upload does not end, for example because a network file system does not answer."""
    if time.monotonic() - _began_at >= max(_LONG_UPLOAD_SECONDS, settings.interval_ms / 1000):
        warn_once(
            _log,
            f"the upload {thread.name}, to {without_secrets(settings.location)} or another location, does "
            "not end. Until it does, this process makes no other snapshot, and the disk keeps the copy. "
            "Check that the location answers; to end the upload, end the Python worker with process id "
            f"{os.getpid()}.",
        )


def _run(copy: LocalCopy, state: Manifest, settings: SnapshotSettings) -> None:
    interval_ms = settings.interval_ms
    try:
        storage = SnapshotStorage(settings.location, state.identity)
        began = time.monotonic()
        outcome, newest_ms, sent_bytes = upload(copy, storage, state, interval_ms)
        copy.look_again_at(newest_ms + interval_ms)
        _log.info(
            "snapshot of shard %d at changelog offset %d in %s: %s (%.1f MB sent in %.1f s)",
            state.identity.shard,
            state.next_offset,
            storage.path,
            outcome.value,
            sent_bytes / 1e6,
            time.monotonic() - began,
        )
    except (KafkaEosError, UnusableSnapshotError, *StorageError) as error:
        _log.warning(
            "the state of shard %d could not be uploaded to %s, which is tried again: %s",
            state.identity.shard,
            without_secrets(settings.location),
            error,
        )
        try:
            copy.look_again_at(state.created_ms + min(interval_ms, _AFTER_FAILURE_MS))
        except OSError as also:
            _log.warning("the time of the next upload could not be written: %s", also)
    finally:
        copy.remove()


def upload(
    copy: LocalCopy, storage: SnapshotStorage, state: Manifest, interval_ms: int
) -> tuple[Uploaded, int, int]:
    """Uploads a frozen copy unless the storage has a recent snapshot, and removes old ones.

    Args:
        copy: the files.
        storage: of the shard.
        state: what the files hold; its list of files is empty.
        interval_ms: least time between two snapshots.

    Returns:
        How it ended, when the newest snapshot was created (ms since the epoch), and the number of bytes sent.

    Raises:
        UnusableSnapshotError, StorageError: if the upload failed. No snapshot was changed.
        StateCorruptedError, StateError: if the frozen copy cannot be opened. Nothing was uploaded.
    """
    own = [name for name in storage.manifests() if name.topic == topic_hash(state.identity)]
    stored = storage.files()
    newest = _newest(storage, own, state, stored)
    if newest is not None:
        if abs(state.created_ms - newest.created_ms) < interval_ms:
            return Uploaded.RECENT, newest.created_ms, 0
        if newest.next_offset >= state.next_offset:
            return Uploaded.SAME, state.created_ms, 0
    sent_bytes = 0
    files = copy.files()
    for file in files:
        known = stored.get(file.sha256)
        if known is None or known.size != file.size_bytes:
            storage.put_file(copy.path / file.name, file)
            sent_bytes += file.size_bytes
            failpoints.reach("snapshot.after_file")
    failpoints.reach("snapshot.before_manifest")
    manifest = Manifest(state.identity, state.next_offset, state.batch, state.created_ms, tuple(files))
    name = storage.put_manifest(manifest)
    failpoints.reach("snapshot.after_manifest")
    stored = storage.files()
    if any(file.sha256 not in stored for file in files):
        storage.remove(name.text)
        return Uploaded.WITHDRAWN, state.created_ms, sent_bytes
    remove_old(storage, state, stored)
    return Uploaded.DONE, state.created_ms, sent_bytes


def _newest(
    storage: SnapshotStorage, own: list[ManifestName], state: Manifest, stored: Mapping[str, FileInfo]
) -> Manifest | None:
    """Returns the newest complete snapshot; removes those that the committed offset refutes."""
    for name in own:
        try:
            found = storage.read(name)
        except UnusableSnapshotError as error:
            _log.warning("the snapshot %s/%s cannot be used: %s", storage.path, name.text, error)
            continue
        is_ahead = found.next_offset > state.next_offset
        if is_ahead and found.created_ms < state.created_ms - _CLOCKS_DIFFER_MS:
            _log.warning(
                "the snapshot %s/%s is removed: it was made at changelog offset %d, and later only offset %d "
                "was committed, so the changelog was truncated",
                storage.path,
                name.text,
                found.next_offset,
                state.next_offset,
            )
            storage.remove(name.text)
            continue
        if any(file.sha256 not in stored for file in found.files):
            continue  # readers cannot use it, either
        return found
    return None


def remove_old(storage: SnapshotStorage, state: Manifest, stored: dict[str, FileInfo]) -> None:
    """Removes all but the newest snapshots, and what dead uploads left.

    The files of an old snapshot are removed before its manifest, so that a crash leaves a manifest, from
    which the next call continues.

    Args:
        storage: of the shard.
        state: of the snapshot that was just made.
        stored: all files on the storage.
    """
    kept, needed, old = 0, set[str](), list[tuple[ManifestName, Manifest | None]]()
    all_known = True
    for name in storage.manifests():
        try:
            manifest = storage.read(name)
        except UnusableSnapshotError:
            if name.next_offset < state.next_offset:
                old.append((name, None))
            else:  # a newer release may have written it
                all_known = False
            continue
        if name.topic == topic_hash(state.identity):
            kept += 1
            is_kept = kept <= KEPT
        elif manifest.identity.cluster_id != state.identity.cluster_id:
            is_kept = True  # a query on another Kafka cluster has the same names
        else:
            is_kept = _is_recent(manifest.created_ms, state.created_ms)
        if is_kept:
            needed.update(file.sha256 for file in manifest.files)
        else:
            old.append((name, manifest))
    removed = set[str]()
    for name, old_manifest in old:
        for file in () if old_manifest is None else old_manifest.files:
            if file.sha256 not in needed and file.sha256 not in removed:
                storage.remove(f"files/{file.sha256}")
                removed.add(file.sha256)
        failpoints.reach("snapshot.before_removal")
        storage.remove(name.text)
    for file_name, each in stored.items() if all_known else ():
        changed_ms = (each.mtime_ns or 0) // 1_000_000  # not every file system knows it
        is_abandoned = not _is_recent(changed_ms, state.created_ms)
        if is_abandoned and file_name not in needed and file_name not in removed:
            storage.remove(f"files/{file_name}")


def _is_recent(time_ms: int, now_ms: int) -> bool:
    return time_ms > now_ms - _ABANDONED_MS
