"""Puts the newest snapshot that fits in the place of a store.

A snapshot is downloaded next to the store, checked as a whole by opening it, and then renamed. So a crash
leaves a folder ``<shard>.download-<random>``, which the next download removes, and never half a store.
"""

from __future__ import annotations

import fcntl
import logging
import os
import shutil
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager, suppress
from pathlib import Path
from typing import TypeVar

from kafka_eos_source.errors import KafkaEosError
from kafka_eos_source.model import TopicPartition
from kafka_eos_source.runtime import failpoints
from kafka_eos_source.runtime.deadline import Deadline
from kafka_eos_source.runtime.file_systems import fsync
from kafka_eos_source.runtime.folders import OWNERS_FOLDER, make_missing
from kafka_eos_source.runtime.watchdog import GRACE_SECONDS, Watchdog
from kafka_eos_source.state.model import StoreIdentity
from kafka_eos_source.state.snapshots.storage import (
    Manifest,
    ManifestName,
    SnapshotFile,
    SnapshotStorage,
    StorageError,
    UnusableSnapshotError,
    topic_hash,
)
from kafka_eos_source.state.store.durable import FORMAT
from kafka_eos_source.state.store.files import replace_text
from kafka_eos_source.state.store.rocksdb import StoreConfig
from kafka_eos_source.state.store.transactional import TransactionalStateStore

T = TypeVar("T")

_log = logging.getLogger(__name__)

#: How many manifests are read, and how many snapshots are downloaded, before the changelog is read instead.
_MANIFESTS, _DOWNLOADS = 20, 3
#: A folder that nobody has locked is left over if it did not change for this long.
_ABANDONED_SECONDS = 3600.0


@contextmanager
def downloaded(
    storage: SnapshotStorage,
    store: Path,
    identity: StoreIdentity,
    refusal: Callable[[Manifest], str | None],
    deadline: Deadline,
) -> Iterator[tuple[Manifest, Path] | None]:
    """Downloads the newest snapshot that fits, for the length of the block.

    Args:
        storage: of the shard.
        store: folder of the store, next to which the snapshot is kept.
        identity: which state is wanted.
        refusal: returns why a snapshot does not fit, or None if it does. It is called before the files are
            downloaded.
        deadline: for the download of all files. A call of the file system that does not return, because a
            network file system hangs for example, is abandoned some seconds later.

    Yields:
        The snapshot and the folder of its store, which is closed; None if there is none that fits. Each
        snapshot that does not fit is logged with its reason.
    """
    watched = _WatchedStorage(storage, deadline)
    try:
        names = watched.manifests()
    except (KafkaEosError, *StorageError) as error:
        _log.warning("the snapshots in %s cannot be listed: %s", storage.path, error)
        names = []
    own = [name for name in names if name.topic == topic_hash(identity)]
    if len(own) < len(names):
        _log.info("%d snapshots in %s are of another changelog topic", len(names) - len(own), storage.path)
    elif not own:
        _log.info("there is no snapshot in %s", storage.path)
    with closing(watched), _scratch(store) as scratch:
        downloads = 0
        for name in own[:_MANIFESTS]:
            folder = scratch / str(downloads)
            try:
                manifest = _fitting(watched, name, identity, refusal)
                downloads += 1
                _download(watched, manifest, identity, folder)
            except (UnusableSnapshotError, KafkaEosError, *StorageError) as error:
                _log.warning("the snapshot %s/%s is not used: %s", storage.path, name.text, error)
                shutil.rmtree(folder, ignore_errors=True)
                if downloads == _DOWNLOADS:
                    break
                continue
            yield manifest, folder
            return
        yield None


def install(downloaded_store: Path, store: Path) -> bool:
    """Renames a downloaded store to its place; returns False if there is a store by now."""
    try:
        downloaded_store.rename(store)
    except OSError as error:
        _log.warning("the snapshot is not used, because %s is in use by now: %s", store, error)
        return False
    fsync(str(store.parent))
    return True


class _WatchedStorage:
    """Calls a storage in a thread, so that a call that hangs does not keep the task for ever.

    Args:
        storage: the storage.
        deadline: for all calls.
    """

    def __init__(self, storage: SnapshotStorage, deadline: Deadline) -> None:
        self._storage = storage
        self._deadline = deadline
        self._watchdog = Watchdog(f"the storage of snapshots {storage.path}")

    def manifests(self) -> list[ManifestName]:
        return self._call("listing the snapshots", self._storage.manifests)

    def read(self, name: ManifestName) -> Manifest:
        return self._call(f"reading {name.text}", lambda: self._storage.read(name))

    def fetch(self, file: SnapshotFile, target: Path) -> None:
        self._call(f"downloading {file.name}", lambda: self._storage.fetch(file, target, self._deadline))

    def close(self) -> None:
        """Ends the thread, unless a call hangs."""
        self._watchdog.end(lambda: None, 0.0 if self._watchdog.is_lost else GRACE_SECONDS)

    def _call(self, doing: str, what: Callable[[], T]) -> T:
        return self._watchdog.call(doing, what, self._deadline.remaining_seconds())


def _fitting(
    storage: _WatchedStorage,
    name: ManifestName,
    identity: StoreIdentity,
    refusal: Callable[[Manifest], str | None],
) -> Manifest:
    """Returns the manifest of a snapshot.

    Raises:
        UnusableSnapshotError, StorageError, KafkaEosError: if it does not fit, or is damaged.
    """
    manifest = storage.read(name)
    if not identity.agrees_with(manifest.identity):
        raise UnusableSnapshotError(f"it holds other state, {manifest.identity}; expected {identity}")
    reason = refusal(manifest)
    if reason is not None:
        raise UnusableSnapshotError(reason)
    return manifest


def _download(storage: _WatchedStorage, manifest: Manifest, identity: StoreIdentity, folder: Path) -> None:
    """Downloads one snapshot into ``folder``, and checks it.

    Raises:
        UnusableSnapshotError, StorageError, KafkaEosError: if it is damaged, or the disk has no room for it.
    """
    database = folder / "db"
    database.mkdir(parents=True)
    free = shutil.disk_usage(database).free
    if manifest.size_bytes > free:
        raise UnusableSnapshotError(
            f"its files need {manifest.size_bytes} bytes, and {free} bytes are free in {folder.parent.parent}"
        )
    for file in manifest.files:
        storage.fetch(file, database / file.name)
        failpoints.reach("snapshot.after_fetch")
    replace_text(folder / "VERSION", f"{FORMAT}\n", durable=True)
    tp = TopicPartition(identity.changelog_topic, identity.shard)
    with TransactionalStateStore.open(folder, identity, StoreConfig()) as store:
        found = (store.next_offset(tp), store.last_batch())
        if found != (manifest.next_offset, manifest.batch):
            raise UnusableSnapshotError(
                f"its files hold changelog offset and batch {found}, its manifest says "
                f"{(manifest.next_offset, manifest.batch)}"
            )
        if store.restoring or store.pending():
            raise UnusableSnapshotError("its files hold changes that no token had confirmed")
    for each in (database, folder):
        fsync(str(each))


@contextmanager
def _scratch(store: Path) -> Iterator[Path]:
    """Creates a folder next to a store, and removes it at the end; removes those of dead processes."""
    make_missing(store.parent, "state.dir")
    for left in store.parent.glob(f"{store.name}.download-*"):
        _remove_unless_locked(left)
    scratch = store.parent / f"{store.name}.download-{uuid.uuid4().hex}"
    scratch.mkdir(mode=OWNERS_FOLDER)
    lock = os.open(scratch / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield scratch
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
        os.close(lock)


def _remove_unless_locked(folder: Path) -> None:
    try:
        lock = os.open(folder / "lock", os.O_RDWR | os.O_CLOEXEC)
    except FileNotFoundError:
        # another process is just creating or removing it, unless that process died long ago
        with suppress(FileNotFoundError):
            if time.time() - folder.stat().st_mtime > _ABANDONED_SECONDS:
                shutil.rmtree(folder, ignore_errors=True)
        return
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        shutil.rmtree(folder, ignore_errors=True)
    except BlockingIOError:
        return
    finally:
        os.close(lock)
