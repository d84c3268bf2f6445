"""Opens the database of a store: as its owner, frozen at one moment, or a copy; removes stores safely.

::

    <path>/VERSION                 format of the store, read before RocksDB may touch the folder
    <path>/db/                     RocksDB
    <path>/owner-…                 who has it open; a file that is left over means it was not closed
    <path>.corrupt-<ms>/           a damaged store that was set aside; the newest is kept
    <path>.trash-…/                a store that is being removed
"""

from __future__ import annotations

import fcntl
import logging
import os
import shutil
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, replace
from functools import lru_cache
from pathlib import Path
from types import MappingProxyType
from typing import Any

import rocksdict

from kafka_eos_source.errors import (
    StateCorruptedError,
    StateError,
    StateFormatError,
    StateLockedError,
    StateMismatchError,
)
from kafka_eos_source.model import TopicPartition
from kafka_eos_source.runtime.deadline import Deadline, Pauses, retry
from kafka_eos_source.runtime.folders import make_private
from kafka_eos_source.state.model import StoreIdentity
from kafka_eos_source.state.store import durable, files
from kafka_eos_source.state.store.database import Database, check_undamaged, least_write
from kafka_eos_source.state.store.durable import StoreMetadata
from kafka_eos_source.state.store.files import (
    RESTORE_FIX,
    check_logs,
    current_manifest,
    disk_errors_reported,
    freeze,
    is_open_here,
    named_manifest,
    owner_files,
    owner_of,
    remove_trash,
    remove_tree,
    replace_text,
    rewritten,
    was_forked,
    write_owner,
)
from kafka_eos_source.state.store.rocksdb import (
    StoreConfig,
    data_options,
    database_options,
    family_options,
    remove_options_files,
    translate,
)

#: Damage twice within this time is an error: restoring again and again would hide a failing disk.
_REPEATED_DAMAGE_MS = 600_000

_log = logging.getLogger(__name__)


def open_store(path: Path, identity: StoreIdentity, config: StoreConfig) -> tuple[Database, StoreMetadata]:
    """Opens or creates a store; raises what `TransactionalStateStore.open` raises.

    Returns:
        The open database and its metadata.
    """
    make_private(path, "state.dir")
    remove_trash(path)
    db_path = path / "db"
    exists = check_version(path)
    if exists and db_path.exists() and any(db_path.iterdir()) and not (db_path / "CURRENT").exists():
        raise StateCorruptedError(f"the database {db_path} has lost its file CURRENT.", fix=RESTORE_FIX)
    if not exists:
        replace_text(path / "VERSION", f"{durable.FORMAT}\n", durable=True)
    database = open_owned(db_path, config)
    database.has_unsynced_logs = True  # until it is known how the last owner ended
    try:
        with disk_errors_reported(path):
            earlier = owner_files(db_path)
        if earlier:
            _log.info("the last owner of the store %s did not close it", path)
            database.sync_logs()
        database.has_unsynced_logs = False
        database.owner_file = write_owner(db_path, earlier)
        stored = durable.decode_metadata(database.scan(family="offsets"))
        metadata = _checked_metadata(path, stored, identity, has_data=database.has_data())
        if metadata != stored:
            writes = database.new_batch()
            writes.change("offsets", durable.encode_metadata(stored, metadata))
            database.write(writes, sync=config.wal_sync)
    except BaseException:
        database.close()
        if not database.has_unsynced_logs:  # otherwise the files of owners tell the next one to sync
            mark_closed(database)
        raise
    return database, metadata


def mark_closed(database: Database) -> None:
    """Removes the owner's file after the owner has closed the database.

    In a process that was forked from the owner, the function does nothing: the owner still has it open.
    """
    if database.owner_file is not None and not was_forked():
        database.owner_file.unlink(missing_ok=True)


def check_version(path: Path) -> bool:
    """Checks the format of a store, if there is one.

    Returns:
        Whether the folder has a store.

    Raises:
        StateFormatError: if a newer release wrote it.
        StateCorruptedError: if the file ``VERSION`` has no number.
    """
    try:
        text = (path / "VERSION").read_bytes().decode(errors="replace").strip()
    except FileNotFoundError:
        return False
    if not text.isdecimal():
        raise StateCorruptedError(
            f"the file {path / 'VERSION'} contains {text[:40]!r}; expected a number.", fix=RESTORE_FIX
        )
    try:
        durable.check_format(int(text))
    except StateFormatError as error:
        raise StateFormatError(f"{path}: {error.message}", fix=error.fix) from None
    return True


def set_aside(path: Path) -> Path | None:
    """Renames a damaged store; see `TransactionalStateStore.set_aside`."""
    now_ms = int(time.time() * 1000)
    with _locked(path):
        if not path.exists():
            return None
        aside = path.with_name(f"{path.name}.corrupt-{now_ms}")
        earlier = [
            other for other in path.parent.glob(f"{path.name}.corrupt-*") if other.name[-13:].isdecimal()
        ]
        for other in earlier:
            # the difference is negative if somebody has set the clock back
            since_ms = abs(now_ms - int(other.name.rpartition("-")[2]))
            if since_ms < _REPEATED_DAMAGE_MS:
                raise StateError(
                    f"the store {path} is damaged again, {since_ms // 1000} s after {other} was set aside.",
                    fix=f"check the disk. Remove {other} to have the state restored once more.",
                )
        path.rename(aside)
    for other in earlier:
        remove_tree(other)
    return aside


def destroy(path: Path) -> None:
    """Removes a store; see `TransactionalStateStore.destroy`."""
    with _locked(path):
        remove_tree(path)


def _checked_metadata(
    path: Path, stored: StoreMetadata, identity: StoreIdentity, *, has_data: bool
) -> StoreMetadata:
    """Returns the metadata of a new store, or the stored metadata if it fits.

    Args:
        identity: which state the caller expects.
        has_data: the database holds data.

    Raises:
        StateCorruptedError: if the changelog offset of the data is missing, or the changelog topic was
            deleted and created again.
        StateMismatchError: if the store holds other state.
    """
    changelog = TopicPartition(identity.changelog_topic, identity.shard)
    if stored.identity is None:
        if has_data:
            raise StateCorruptedError(
                f"the store {path} has data, but does not record which state it is and up to which changelog "
                "offset.",
                fix=RESTORE_FIX,
                reason="no-offset",
            )
        return replace(stored, identity=identity, offsets=MappingProxyType({changelog: 0}))
    checked = replace(stored, identity=_merged_identity(path, stored.identity, identity))
    if changelog not in stored.offsets:
        raise StateCorruptedError(
            f"the store {path} does not record the offset of its changelog {changelog}.",
            fix=RESTORE_FIX,
            reason="no-offset",
        )
    return checked


def _merged_identity(path: Path, stored: StoreIdentity, expected: StoreIdentity) -> StoreIdentity:
    """Returns the expected identity, with the stored topic id and cluster if it has none.

    Raises:
        StateMismatchError: if the store holds other state.
        StateCorruptedError: if the changelog topic was deleted and created again, with any number of shards.
    """
    known = replace(
        expected,
        topic_id=expected.topic_id or stored.topic_id,
        cluster_id=expected.cluster_id or stored.cluster_id,
    )
    if stored.cluster_id and stored.cluster_id != known.cluster_id:
        raise StateMismatchError(
            f"the store {path} belongs to store {stored.store!r} of application.id "
            f"{stored.application_id!r} on the Kafka cluster {stored.cluster_id!r}, and this query uses the "
            f"cluster {known.cluster_id!r}.",
            fix="give each of the two queries its own state.dir. If the query has moved to this cluster "
            "for good, and its changelog is complete here, remove the folder: the state is restored from "
            "the changelog on this cluster.",
        )
    stored_name = (stored.application_id, stored.store, stored.shard, stored.changelog_topic)
    is_same = stored_name == (known.application_id, known.store, known.shard, known.changelog_topic)
    if is_same and stored.topic_id and stored.topic_id != known.topic_id:
        raise StateCorruptedError(
            f"the store {path} belongs to the changelog topic {expected.changelog_topic} with id "
            f"{stored.topic_id}, which was deleted; the topic of that name now has id {expected.topic_id}.",
            fix=RESTORE_FIX,
            reason="topic",
        )
    comparable = asdict(replace(stored, topic_id=known.topic_id, cluster_id=known.cluster_id))
    differences = ", ".join(
        f"{name} {comparable[name]!r}, expected {wanted!r}"
        for name, wanted in asdict(known).items()
        if comparable[name] != wanted
    )
    if differences:
        raise StateMismatchError(
            f"the store {path} holds other state: {differences}.",
            fix="the number of shards cannot change in place. Use `kafka-eos state rescale` "
            "for another number of shards. If the folder is left from another query, remove it: the state is "
            "then restored from the changelog. Another store name begins with empty state, so it needs a new "
            "application.id and a new checkpoint.",
        )
    return known


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    """Locks a closed database inside the block, so that no other process opens it.

    Raises:
        StateLockedError: if any process has the database open.
    """
    db_path = path / "db"
    if is_open_here(db_path):
        raise StateLockedError(
            f"the database {db_path} is open in this process.", fix="close the store first."
        )
    try:
        lock = os.open(db_path / "LOCK", os.O_RDWR)
    except FileNotFoundError:
        yield  # the database was never opened, or is removed already
        return
    try:
        fcntl.lockf(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        os.close(lock)
        raise StateLockedError(
            f"the database {db_path} is open in {owner_of(db_path)}.", fix="stop that process first."
        ) from error
    try:
        yield
    finally:
        os.close(lock)


# ---------------------------------------- opening RocksDB

#: A file that rocksdict adds to each folder that it opens.
_SETTINGS_OF_ROCKSDICT = "rocksdict-config.json"
#: How long a reader retries while compactions delete the tables that it is about to open.
_READER_RETRY_SECONDS = 10.0


def open_owned(path: Path, config: StoreConfig) -> Database:
    """Opens or creates a database; waits while another process has it open.

    Args:
        path: folder of the database.
        config: of the store.

    Raises:
        StateLockedError: if another process still has it open after ``config.lock_timeout_ms``.
        StateCorruptedError: if files are damaged.
        StateError: if this process was forked from one that had opened a database, or the disk fails.
    """
    files.check_not_forked()
    # RocksDB has no way to wait for its lock
    pauses = Pauses(Deadline.after_ms(config.lock_timeout_ms), 0.01, 0.25)
    access = rocksdict.AccessType.read_write()
    key = str(path.resolve())

    def open_once() -> Database:
        return files.opened(key, lambda: Database(path, _open(path, config, access), owner=key))

    return retry(open_once, StateLockedError, pauses)


def open_frozen(path: Path, log_folder: Path) -> Database:
    """Opens the database as it is on disk now, even while another process has it open.

    The result holds all commits that had finished before this call, possibly a few later ones, and does
    not follow further commits; see `freeze`.

    Args:
        path: folder of the database.
        log_folder: an existing folder for RocksDB's own log files and, during this call, for links to the
            database's files. Links need it on the same file system.

    Raises:
        StateCorruptedError: if files are damaged.
        StateLockedError: if the owner rewrote its files during every try. Calling again may succeed.
        StateError: if the files cannot be linked or copied.
    """
    files.check_not_forked()
    config = StoreConfig()
    pauses = Pauses(Deadline.after_seconds(_READER_RETRY_SECONDS), 0.0)

    def open_once() -> Database:
        folder = Path(tempfile.mkdtemp(prefix="files-", dir=log_folder))
        manifest, named, least = None, named_manifest(path), least_write(path)
        try:
            with disk_errors_reported(path.parent):
                manifest = freeze(path, folder)
            access = rocksdict.AccessType.read_only(False)
            db = _open(folder, config, access, log_folder, known_as=path, opens_all_tables=True)
            return Database(path, db, read_only=True, least=least)
        except StateCorruptedError as error:
            # If the owner rewrote files meanwhile, a missing table is no damage.
            if manifest is not None and current_manifest(path) == manifest:
                raise
            if manifest is None and named_manifest(path) == named:
                raise
            raise rewritten(path) from error
        finally:
            shutil.rmtree(folder, ignore_errors=True)

    return retry(open_once, StateLockedError, pauses)


def open_copy(path: Path, log_folder: Path) -> Database:
    """Opens files that `freeze` made, for reading. Nobody may change them until the database is closed.

    Args:
        path: folder of the files.
        log_folder: an existing folder for RocksDB's own log files.

    Raises:
        StateCorruptedError, StateError: if files are damaged, or the manifest names a missing table.
    """
    files.check_not_forked()
    db = _open(path, StoreConfig(), rocksdict.AccessType.read_only(False), log_folder)
    (path / _SETTINGS_OF_ROCKSDICT).unlink(missing_ok=True)  # opening wrote it; the copy has none
    database = Database(path, db, read_only=True, least=least_write(path))
    missing = {name for name in database.tables() if not (path / name).exists()}
    if missing:
        database.close()
        raise StateCorruptedError(f"the copy {path} lacks the tables {', '.join(sorted(missing))}.")
    return database


def _open(
    path: Path,
    config: StoreConfig,
    access: rocksdict.AccessType,
    log_folder: Path | None = None,
    known_as: Path | None = None,
    *,
    opens_all_tables: bool = False,
) -> Any:
    """Returns an open rocksdict database.

    Args:
        path: folder of the files.
        config: of the store.
        access: rocksdict's access type.
        log_folder: folder for RocksDB's own log files; None = this process owns the database.
        known_as: folder that error messages name instead of ``path``.
        opens_all_tables: open all tables now. They stay readable after the owner deletes them.
    """
    check_logs(path)
    if log_folder is None:
        check_undamaged(path)
        options, families = _options_of_owners(config)
    else:
        options, families = database_options(config), _options_of_families(config)
        options.set_db_log_dir(str(log_folder))
        if opens_all_tables:
            options.set_max_open_files(-1)
    files.record_opening()
    try:
        db = rocksdict.Rdict(str(path), options=options, column_families=families, access_type=access)
    except Exception as error:
        if known_as is None:
            raise translate(error, path) from error
        text = str(error).replace(str(path), str(known_as))
        raise translate(Exception(text), known_as) from error
    if log_folder is None:
        remove_options_files(path)
    return db


@lru_cache(maxsize=4)
def _options_of_owners(config: StoreConfig) -> tuple[Any, dict[str, Any]]:
    """Returns the options of databases that this process owns, and of their families.

    RocksDB copies options when it opens a database, so all databases with the same settings can share them.
    """
    return database_options(config), _options_of_families(config)


def _options_of_families(config: StoreConfig) -> dict[str, Any]:
    return {
        "data": data_options(config),
        "pending": family_options(config),
        "offsets": family_options(config, small=True),
    }
