"""The files of a database as they are at one moment, while its owner goes on writing."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

from kafka_eos_source.errors import StateCorruptedError


def manifest_in_force(database: Path) -> tuple[str, int]:
    """Returns the name and the size in bytes of the manifest; it grows with each flush and compaction.

    Raises:
        StateCorruptedError: the folder has none.
    """
    try:
        name = (database / "CURRENT").read_text().strip()
        return name, (database / name).stat().st_size
    except OSError as error:
        raise StateCorruptedError(f"the database {database} has no list of its files: {error}") from error


def freeze(database: Path, target: Path) -> tuple[str, int]:
    """Makes the folder ``target`` a database that holds a prefix of the commits of ``database``.

    Opened in place, a database that flushes can be read torn: RocksDB reads the manifest first and the logs
    after, and a flush in between deletes a log whose rows that manifest does not have yet. The order here
    rules this out. Logs first: whatever a commit wrote before this call is in a log that is linked, or in a
    table of the manifest that is copied afterwards. Logs that begin later are left out, so no log can be
    missing between two that are there. Tables are linked before the manifest, so that a compaction cannot
    take them away, and again after it, for those of a flush in between.

    Only a table that is written and compacted away within this call can be missing; opening ``target`` then
    fails. Files are linked. Where that is impossible (another file system), logs are copied, and tables are
    named by symbolic links, which a compaction may break before ``target`` is open.

    Args:
        database: the folder of a RocksDB, open in any process or in none.
        target: an empty folder. Once it is open with all its tables (``max_open_files=-1``), its files are
            no longer needed.

    Returns:
        The manifest that was copied: its name and its size in bytes then.

    Raises:
        StateCorruptedError: the folder has no manifest.
    """
    names = sorted(os.listdir(database))
    for name in names:
        if name.endswith(".log"):
            _link_log(database / name, target / name)
    _link_tables(database, target, names)
    manifest = manifest_in_force(database)
    try:
        shutil.copyfile(database / manifest[0], target / manifest[0])
    except FileNotFoundError as error:
        raise StateCorruptedError(f"the database {database} has no list of its files: {error}") from error
    (target / "CURRENT").write_text(f"{manifest[0]}\n")
    _link_tables(database, target, os.listdir(database))
    return manifest


def _link_log(source: Path, target: Path) -> None:
    """Links a log, unless a flush has deleted it: the manifest that is copied afterwards has its rows."""
    try:
        try:
            os.link(source, target)
        except FileNotFoundError:
            raise
        except OSError:
            shutil.copyfile(source, target)
    except FileNotFoundError:
        target.unlink(missing_ok=True)


def _link_tables(source: Path, target: Path, names: list[str]) -> None:
    for name in names:
        if not name.endswith(".sst") or os.path.lexists(target / name):
            continue
        try:
            os.link(source / name, target / name)
        except FileNotFoundError:
            continue  # a compaction deleted it; should the manifest name it, opening fails
        except OSError:
            os.symlink((source / name).resolve(), target / name)
