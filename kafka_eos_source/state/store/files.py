"""The files of a store's database: its owners, links to it as of one moment, and damage in its logs.

Nothing here uses RocksDB itself.

::

    owner-…        JSON: process id and host of the process that has the database open. It names the owner in
                   error messages; the lock itself is RocksDB's.
"""

from __future__ import annotations

import fcntl
import json
import os
import re
import shutil
import socket
import struct
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TypeVar

from kafka_eos_source.errors import StateCorruptedError, StateError, StateLockedError
from kafka_eos_source.runtime.file_systems import fsync
from kafka_eos_source.runtime.json_input import SHAPE_ERRORS, parse_json

#: Fix of every error about damage: the changelog has all of the state.
RESTORE_FIX = "start the query, or run `kafka-eos state restore`: the state is restored from the changelog."

_OWNER_FILE = re.compile(r"owner-[0-9a-f]{8}")


@contextmanager
def disk_errors_reported(path: Path) -> Iterator[None]:
    """Raises a `StateError` in place of an `OSError` of the block, which uses files of this folder."""
    try:
        yield
    except OSError as error:
        raise StateError(
            f"the disk of the state store {path} failed: {error}.",
            fix="free space or check the disk, then start the query again.",
        ) from error


def replace_text(path: Path, text: str, *, durable: bool = False) -> None:
    """Writes a file atomically: after a crash it has either the old or the new text, in full.

    Args:
        durable: also survive a power failure. Files that only describe the database do not need this.
    """
    scratch = path.with_name(f".{path.name}.{os.getpid()}")
    with scratch.open("w") as file:
        file.write(text)
        if durable:
            file.flush()
            os.fsync(file.fileno())
    scratch.replace(path)
    if durable:
        fsync(str(path.parent))


def remove_tree(path: Path) -> None:
    """Renames and removes a folder, so that a crash never leaves half a store."""
    trash = path.with_name(f"{path.name}.trash-{os.getpid()}-{time.monotonic_ns()}")
    with suppress(FileNotFoundError):  # another process may remove it, too
        path.rename(trash)
    remove_trash(path)


def remove_trash(path: Path) -> None:
    """Removes what an interrupted `remove_tree` of this folder left."""
    for left in path.parent.glob(f"{path.name}.trash-*"):
        shutil.rmtree(left, ignore_errors=True)


def write_owner(database: Path, earlier: Iterable[Path] = ()) -> Path:
    """Writes a file that says that this process has the database open.

    Each owner has a file of its own: an owner releases RocksDB's lock a moment before it removes its file,
    and the next owner may have written another file by then.

    Args:
        database: folder of the database.
        earlier: files of owners that did not close the database; they are removed.

    Returns:
        The file. The caller removes it after it has closed the database.

    Raises:
        StateError: if the disk is full or fails.
    """
    owner = {"pid": os.getpid(), "host": socket.gethostname(), "since_ms": int(time.time() * 1000)}
    with disk_errors_reported(database.parent):
        file = database.parent / f"owner-{os.urandom(4).hex()}"
        file.write_text(json.dumps(owner))
        for each in earlier:
            each.unlink(missing_ok=True)
    return file


def owner_of(database: Path) -> str:
    """Returns process and host of the owner of a database, for an error message."""
    owner = _owner(database)
    return "another process" if owner is None else f"process {owner[0]} on {owner[1]}"


def is_owned_elsewhere(database: Path) -> bool:
    """Returns whether a process of another host opened the database last, and did not close it."""
    owner = _owner(database)
    return owner is not None and owner[1] != socket.gethostname()


def _owner(database: Path) -> tuple[int, str] | None:
    """Returns process and host of the newest owner."""
    found = []
    try:
        files = owner_files(database)
    except OSError:
        return None  # the name is for a message about something else
    for file in files:
        try:
            owner = parse_json(file.read_text())
            found.append((int(owner["since_ms"]), int(owner["pid"]), str(owner["host"])))
        except (OSError, *SHAPE_ERRORS):
            continue  # the owner closed the database meanwhile, or died while it wrote the file
    return max(found)[1:] if found else None


def owner_files(database: Path) -> list[Path]:
    """Returns the files of owners that have the database open, or did not close it.

    Raises:
        OSError: if the folder cannot be listed.
    """
    # Since Python 3.13, Path.glob returns nothing for a folder that it cannot list.
    return [database.parent / name for name in os.listdir(database.parent) if _OWNER_FILE.fullmatch(name)]


# ---------------------------------------- processes that have a database open

_Opened = TypeVar("_Opened")

#: Number of objects of this process that have a database open, or are opening it, by absolute path.
_open_here: Counter[str] = Counter()
_lock = threading.Lock()
#: The process that opened the first database; see `check_not_forked`.
_opened_by: int | None = None


def opened(key: str, open_database: Callable[[], _Opened]) -> _Opened:
    """Opens a database for writing and counts it as open in this process, until `closed` is called.

    Args:
        key: absolute path of the database.
        open_database: opens it.
    """
    with _lock:
        _open_here[key] += 1
    try:
        return open_database()
    except BaseException:
        closed(key)
        raise


def closed(key: str) -> None:
    """Records that this process has closed a database that it opened for writing."""
    with _lock:
        _open_here[key] -= 1
        if _open_here[key] <= 0:
            del _open_here[key]


def is_open_here(database: Path) -> bool:
    """Returns whether this process has the database open for writing, or is opening it."""
    with _lock:
        return str(database.resolve()) in _open_here


def has_owner(database: Path) -> bool:
    """Returns whether any process of this host has the database open for writing, or is opening it.

    RocksDB's owner holds a lock of the file ``LOCK``, which the system releases when the process ends. This
    function takes the lock for a moment, so an owner that opens the database just then tries again. If the
    lock cannot be examined, because the file belongs to another user for example, there may be an owner.
    """
    # Closing any descriptor of the file would release the lock that this process itself holds.
    with _lock:
        if str(database.resolve()) in _open_here:
            return True
        try:
            descriptor = os.open(database / "LOCK", os.O_RDONLY)
        except FileNotFoundError:
            return False
        except OSError:
            return True
        try:
            fcntl.lockf(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except OSError:
            return True
        finally:
            os.close(descriptor)
    return False


def record_opening() -> None:
    """Records that this process opens a database; `check_not_forked` then refuses its forked children."""
    global _opened_by
    _opened_by = os.getpid()


def was_forked() -> bool:
    """Returns whether this process was forked from one that had opened a database."""
    return _opened_by is not None and _opened_by != os.getpid()


def check_not_forked() -> None:
    """Raises StateError if this process was forked from one that had opened a database."""
    if was_forked():
        raise StateError(
            f"process {os.getpid()} was forked from process {_opened_by}, which had opened a state database. "
            "RocksDB's threads do not survive a fork, so the first flush would hang.",
            fix="start processes with multiprocessing's start method 'spawn', or open state databases in the "
            "forked processes only.",
        )


# ---------------------------------------- links to a database as of one moment, while its owner writes


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


# ---------------------------------------- damage in write-ahead logs at which RocksDB itself would hang
#
# A log consists of blocks of 32 KiB. Each fragment of a record has a header: checksum (4 bytes), length (2,
# little endian) and type (1). Types 5 to 8 belong to logs that are used again, which no store does. If one
# changed bit makes such a type of another one, RocksDB (10.4) reads the same header again without end, in
# ``log::Reader::ReadRecord``, and the thread that opens the database holds Python's global lock meanwhile.

_BLOCK_BYTES = 32 << 10
_HEADER = struct.Struct("<IHB")
#: Fragments of logs that are used again, and two other records in them.
_RECYCLED = frozenset({5, 6, 7, 8, 11, 13})


def check_logs(database: Path) -> None:
    """Checks the types of all fragments. RocksDB checks everything else when it opens the database.

    Args:
        database: folder of the database; it need not exist.

    Raises:
        StateCorruptedError: if a log has a fragment that RocksDB cannot pass.
    """
    for log in sorted(database.glob("*.log")):
        with suppress(FileNotFoundError):  # an owner that has the database open deletes logs
            _check(log)


def _check(log: Path) -> None:
    content, at = log.read_bytes(), 0
    while at + _HEADER.size <= len(content):
        left_in_block = _BLOCK_BYTES - at % _BLOCK_BYTES
        if left_in_block < _HEADER.size:
            at += left_in_block
            continue
        _checksum, length, kind = _HEADER.unpack_from(content, at)
        if kind in _RECYCLED:
            raise StateCorruptedError(
                f"the log {log} is damaged: the record at byte {at} has the type {kind}.", fix=RESTORE_FIX
            )
        if not kind and not length:  # space that RocksDB reserved in advance
            return
        at += _HEADER.size + length
