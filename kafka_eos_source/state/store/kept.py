"""Databases that a process keeps open between the tasks of their shards.

RocksDB takes milliseconds to open a database, and writes tables when it closes one, which for a small
micro-batch is most of what its state costs. A resident worker, which runs the same shards again and again,
therefore keeps their databases open. Other processes keep nothing.

RocksDB's lock is the lease of a database: only one process has it open. A process that needs a database which
another one keeps asks for it::

    task                                    resident worker, between two tasks of the shard
      │ open ──▶ locked                       │
      │ asks the socket in the file `owner` ─▶│ closes the database, which releases the lock
      │ open ──▶ done                         │

If the other process ended meanwhile, however it ended, the system has released the lock. If it works on the
shard at that moment, it closes the database after that work, and the task waits until then.
"""

from __future__ import annotations

import atexit
import logging
import threading
from collections import OrderedDict
from dataclasses import dataclass
from pathlib import Path

from kafka_eos_source.errors import KafkaEosError
from kafka_eos_source.state.model import StoreIdentity
from kafka_eos_source.state.store.config import StoreConfig
from kafka_eos_source.state.store.database import FAMILIES, Database
from kafka_eos_source.state.store.files import remove_owner
from kafka_eos_source.state.store.lease import LeaseListener
from kafka_eos_source.state.store.ownership import is_open_here
from kafka_eos_source.state.store.records import StoreMetadata

_log = logging.getLogger(__name__)

#: Memory of the memtables of all kept databases above which those are closed that were used least recently.
_MOST_MEMTABLE_BYTES = 128 << 20
#: Most databases that are kept open. Each has some files open.
_MOST_DATABASES = 64


@dataclass
class OpenDatabase:
    """An open database of a store, without a transaction.

    Attributes:
        path: the store's folder.
        database: open.
        metadata: what the database records.
        config: settings of the store.
    """

    path: Path
    database: Database
    metadata: StoreMetadata
    config: StoreConfig

    def close(self) -> None:
        """Closes the database and records that it is closed."""
        self.database.close()
        remove_owner(self.path / "db")

    def memtable_bytes(self) -> int:
        """Returns the memory of writes that are in no table yet."""
        return sum(self.database.property("cur-size-all-mem-tables", family) for family in FAMILIES)


class KeptDatabases:
    """The databases that this process keeps open. At first it keeps none; see `begin`."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._idle: OrderedDict[str, OpenDatabase] = OrderedDict()
        self._wanted: set[str] = set()
        self._listeners: dict[Path, LeaseListener] = {}

    def begin(self, folder: Path) -> None:
        """Keeps the databases below a state folder from now on, if other processes can ask for them."""
        folder.mkdir(parents=True, exist_ok=True)
        folder = folder.resolve()
        with self._lock:
            if folder in self._listeners:
                return
            if not self._listeners:
                atexit.register(self.close)
            try:
                self._listeners[folder] = LeaseListener(folder, self.release)
            except OSError as error:
                _log.warning("databases in %s are closed after each task, because: %s", folder, error)

    def lease_socket(self, path: Path) -> Path | None:
        """Returns the socket where other processes can ask for the database of a store."""
        folders = path.resolve().parents
        return next((each.path for root, each in self._listeners.items() if root in folders), None)

    def take(self, path: Path, identity: StoreIdentity, config: StoreConfig) -> OpenDatabase | None:
        """Returns the open database of a store, which then belongs to the caller; None if it is not kept.

        A kept database is closed if it holds other state, was opened with other settings, or its files were
        removed meanwhile. Opening it again then finds out what is there.
        """
        with self._lock:
            opened = self._idle.pop(_key(path), None)
        if opened is None:
            return None
        if opened.metadata.identity == identity and opened.config == config and opened.database.has_files():
            return opened
        _close_other(opened)
        return None

    def put_back(self, opened: OpenDatabase) -> None:
        """Keeps a database, or closes it if this process keeps none there, or somebody asked for it."""
        key = _key(opened.path)
        with self._lock:
            keeps = self.lease_socket(opened.path) is not None and key not in self._wanted
            self._wanted.discard(key)
            if keeps:
                self._idle[key] = opened
            surplus = self._surplus()
        for each in surplus:
            _close_other(each)
        if not keeps:
            opened.close()

    def release(self, database: Path) -> None:
        """Closes a database for another process: now, or when it is put back."""
        key = str(database)
        with self._lock:
            opened = self._idle.pop(key, None)
            if opened is None:
                if is_open_here(database):
                    self._wanted.add(key)
                return
            _close_other(opened)  # within the lock: `take` must not return before that

    def close(self) -> None:
        """Closes all kept databases and keeps none from now on."""
        with self._lock:
            for listener in self._listeners.values():
                listener.close()
            self._listeners.clear()
            while self._idle:
                _close_other(self._idle.popitem()[1])

    def _surplus(self) -> list[OpenDatabase]:
        """Takes the databases out that exceed the limits; those that were used least recently."""
        sizes = {key: opened.memtable_bytes() for key, opened in self._idle.items()}
        total, surplus = sum(sizes.values()), []
        while self._idle and (len(self._idle) > _MOST_DATABASES or total > _MOST_MEMTABLE_BYTES):
            key, opened = self._idle.popitem(last=False)
            total -= sizes[key]
            surplus.append(opened)
        return surplus


def _close_other(opened: OpenDatabase) -> None:
    """Closes a database that the present task does not use, so an error is not the task's."""
    try:
        opened.close()
    except KafkaEosError as error:
        _log.warning("cannot close the database of %s: %s", opened.path, error)


def _key(path: Path) -> str:
    return str((path / "db").resolve())


#: The databases that this process keeps open.
KEPT = KeptDatabases()
