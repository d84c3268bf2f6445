"""Links the files of a database as of one moment, while its owner continues to write."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

from kafka_eos_source.errors import StateCorruptedError, StateLockedError
from kafka_eos_source.state.store.files import RESTORE_FIX


def named_manifest(database: Path) -> bytes:
    """Returns the name of the manifest that the database says it has; empty if it says nothing.

    The owner replaces the name before it deletes the manifest that had the old one.
    """
    try:
        return (database / "CURRENT").read_bytes()
    except OSError:
        return b""


def current_manifest(database: Path) -> tuple[str, int]:
    """Returns name and size in bytes of RocksDB's manifest.

    It grows with each flush and compaction.

    Raises:
        StateCorruptedError: if the folder has no manifest.
    """
    try:
        name = (database / "CURRENT").read_text(errors="replace").strip()
        size = (database / name).stat().st_size
    except (OSError, ValueError) as error:
        raise _no_manifest(database, error) from error
    if not name.startswith("MANIFEST-"):  # "" would name the folder
        raise _no_manifest(database, ValueError(f"the file CURRENT contains {name[:40]!r}"))
    return name, size


def freeze(database: Path, target: Path, *, copy_logs: bool = False) -> tuple[str, int]:
    """Links a database into another folder, with all its commits up to some moment.

    A reader that opened the database in place could miss rows: RocksDB reads the manifest first and the logs
    afterwards, and a flush in between deletes a log whose rows are in no table of that manifest. The order
    here rules this out:

    1. Logs are linked first. What a commit wrote before this call is then in a linked log, or in a table of
       the manifest that is copied later. Logs that begin later are left out, so that there is no gap between
       two logs.
    2. Tables are linked before the manifest is copied, so that a compaction cannot delete them.
    3. The manifest is copied.
    4. Tables are linked again, for those that a flush wrote in between.
    5. The manifest must be the one that was there at first. Otherwise a batch may be in the copy in part:
       large ones are added as tables, and the log that says so may have been left out or copied too early.

    ``target`` may also contain tables that the manifest does not name: the owner was writing them, or was
    about to delete them. RocksDB ignores them, and their contents may still change. Somebody who keeps the
    copy removes them first (`Database.tables`).

    Only a table that is both written and compacted away during this call can be missing; opening ``target``
    then fails. On another file system, where hard links are impossible, logs are copied and tables become
    symbolic links, which a compaction may break before ``target`` is open.

    Args:
        database: folder of a RocksDB database that is open in any process, or in none.
        target: an empty folder. Once it is open with all its tables (``max_open_files=-1``), its files may be
            removed.
        copy_logs: copy the logs instead of linking them, so that ``target`` never sees what the owner writes
            later.

    Returns:
        Name and size in bytes of the manifest that was copied.

    Raises:
        StateCorruptedError: if the folder has no manifest.
        StateLockedError: if the owner changed the manifest meanwhile. Another call may succeed.
    """
    first = current_manifest(database)
    names = _names(database)
    for name in names:
        if name.endswith(".log"):
            _link_log(database / name, target / name, copy=copy_logs)
    _link_tables(database, target, names)
    manifest = current_manifest(database)
    try:
        shutil.copyfile(database / manifest[0], target / manifest[0])
    except FileNotFoundError as error:
        raise _no_manifest(database, error) from error
    (target / "CURRENT").write_text(f"{manifest[0]}\n")
    _link_tables(database, target, _names(database))
    if not first == manifest == current_manifest(database):
        raise rewritten(database)
    return manifest


def _names(database: Path) -> list[str]:
    """Returns the names of the database's files, in order."""
    try:
        return sorted(os.listdir(database))
    except FileNotFoundError as error:  # the store was set aside meanwhile
        raise _no_manifest(database, error) from error


def rewritten(database: Path) -> StateLockedError:
    """Returns the error for a reader whose files the owner of the database replaced."""
    return StateLockedError(
        f"the owner of the database {database} rewrote its files while they were read.", fix="read again."
    )


def _link_log(source: Path, target: Path, *, copy: bool = False) -> None:
    """Links a log. If a flush deleted it, the manifest that is copied later names a table with its rows."""
    try:
        if copy:
            shutil.copyfile(source, target)
            return
        try:
            os.link(source, target)
        except FileNotFoundError:
            raise
        except OSError:
            shutil.copyfile(source, target)
    except FileNotFoundError:
        target.unlink(missing_ok=True)


def _link_tables(source: Path, target: Path, names: list[str]) -> None:
    """Links the tables among these file names that ``target`` does not contain yet."""
    for name in names:
        if not name.endswith(".sst") or os.path.lexists(target / name):
            continue
        try:
            os.link(source / name, target / name)
        except FileNotFoundError:
            continue  # deleted by a compaction; if the manifest names it, opening fails
        except OSError:
            os.symlink((source / name).resolve(), target / name)


def _no_manifest(database: Path, error: Exception) -> StateCorruptedError:
    return StateCorruptedError(
        f"the database {database} has no manifest, RocksDB's list of its files: {error}.",
        fix=RESTORE_FIX,
    )
