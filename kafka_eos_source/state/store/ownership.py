"""Tells whether a process has a database open for writing, and refuses processes that must not open one."""

from __future__ import annotations

import fcntl
import os
import threading
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

from kafka_eos_source.errors import StateError

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
