"""Small files next to a store's database, and how folders are replaced and removed safely.

::

    owner-…        JSON: process id and host of the process that has the database open. It names the owner in
                   error messages; the lock itself is RocksDB's.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import socket
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from kafka_eos_source.errors import StateError
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
