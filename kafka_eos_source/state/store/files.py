"""Small files next to a store's database, and how folders are replaced and removed safely.

::

    owner          JSON: process id and host of the process that has the database open, for error messages,
                   and the socket where it can be asked to close it (`lease`). The lock itself is RocksDB's.
"""

from __future__ import annotations

import json
import os
import shutil
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from kafka_eos_source.errors import StateError
from kafka_eos_source.runtime.file_systems import fsync


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


def write_owner(database: Path, lease_socket: Path | None = None) -> None:
    """Records that this process has the database open.

    Args:
        database: folder of the database.
        lease_socket: where other processes can ask for the database; None = nowhere.

    Raises:
        StateError: if the disk is full or fails.
    """
    owner: dict[str, Any] = {
        "pid": os.getpid(),
        "host": socket.gethostname(),
        "since_ms": int(time.time() * 1000),
    }
    if lease_socket is not None:
        owner["lease"] = str(lease_socket)
    with disk_errors_reported(database.parent):
        replace_text(database.parent / "owner", json.dumps(owner))


def has_owner_file(database: Path) -> bool:
    """Returns whether there is an owner file. Its writer has the store open, or did not close it."""
    return (database.parent / "owner").exists()


def remove_owner(database: Path) -> None:
    """Removes the owner file, if there is one."""
    (database.parent / "owner").unlink(missing_ok=True)


def owner_of(database: Path) -> str:
    """Returns process and host of the owner of a database, for an error message."""
    owner = _owner(database)
    return "another process" if owner is None else f"process {owner['pid']} on {owner['host']}"


def is_owned_elsewhere(database: Path) -> bool:
    """Returns whether a process of another host opened the database last, and did not close it."""
    owner = _owner(database)
    return owner is not None and owner["host"] != socket.gethostname()


def lease_socket_of(database: Path) -> Path | None:
    """Returns the socket where the owner of a database can be asked to close it; None if there is none."""
    owner = _owner(database)
    path = None if owner is None else owner.get("lease")
    return Path(path) if isinstance(path, str) else None


def _owner(database: Path) -> dict[str, Any] | None:
    """Returns what the owner wrote, with at least ``pid`` and ``host``; None if that cannot be read."""
    try:
        owner = json.loads((database.parent / "owner").read_text())
    except (OSError, ValueError):
        return None
    return owner if isinstance(owner, dict) and {"pid", "host"} <= owner.keys() else None
