"""Opens RocksDB databases: as their owner, frozen at one moment, or a copy."""

from __future__ import annotations

import shutil
import tempfile
from functools import lru_cache
from pathlib import Path
from typing import Any

import rocksdict

from kafka_eos_source.errors import StateCorruptedError, StateLockedError
from kafka_eos_source.runtime.deadline import Deadline, Pauses, retry
from kafka_eos_source.state.store import ownership
from kafka_eos_source.state.store.compactions import check_undamaged
from kafka_eos_source.state.store.config import StoreConfig
from kafka_eos_source.state.store.database import Database
from kafka_eos_source.state.store.files import disk_errors_reported
from kafka_eos_source.state.store.frozen import current_manifest, freeze, named_manifest, rewritten
from kafka_eos_source.state.store.log_headers import check_logs
from kafka_eos_source.state.store.rocksdb import (
    data_options,
    database_options,
    family_options,
    remove_options_files,
    translate,
)
from kafka_eos_source.state.store.write_chain import least_write

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
    ownership.check_not_forked()
    # RocksDB has no way to wait for its lock
    pauses = Pauses(Deadline.after_ms(config.lock_timeout_ms), 0.01, 0.25)
    access = rocksdict.AccessType.read_write()
    key = str(path.resolve())

    def open_once() -> Database:
        return ownership.opened(key, lambda: Database(path, _open(path, config, access), owner=key))

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
    ownership.check_not_forked()
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
    ownership.check_not_forked()
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
    ownership.record_opening()
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
