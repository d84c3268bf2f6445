"""The uncommitted half of a store: staged writes, their thread, their limit, and their form as changes.

Kafka Streams commits early when its buffer is full (KIP-892). A micro-batch cannot: Spark records its offsets
before it runs, and it is one transaction. So writes beyond the limit go to disk, and the size of a batch is
limited by the disk alone. The stores of a process share the limit::

    <path>/spill/<id>/    a RocksDB database of one transaction: key → 0x00 (deleted) or 0x01 value

A spill adds the writes in memory as one sorted file. Nothing in this database is committed state: only the
store that staged the writes reads it, until the header of a pending attempt, or the record ``apply`` of a
store that applies the rows, names its id. A folder that nobody names was left by a dead task attempt.

The database is a separate one, and not part of the store's, so that it is removed by deleting its folder: in
the store's own database gigabytes of dropped rows would wait for compactions.
"""

from __future__ import annotations

import shutil
import threading
import uuid
from collections.abc import Callable, Collection, Generator, Iterable, Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, cast
from weakref import WeakSet

import pyarrow as pa
import rocksdict

from kafka_eos_source.errors import KafkaEosError, StateCorruptedError, StateError
from kafka_eos_source.runtime import failpoints
from kafka_eos_source.state.store import files
from kafka_eos_source.state.store.files import RESTORE_FIX, disk_errors_reported
from kafka_eos_source.state.store.overlay import MISSING, Missing, Overlay, StagedPair, slices
from kafka_eos_source.state.store.rocksdb import (
    MANY_KEYS,
    PAIRS_PER_LOOKUP,
    Cursor,
    Scans,
    StoreConfig,
    call,
    family_options,
    ingest,
    look_up,
    property_of,
    translate,
)

#: Name of the folder next to the store's database.
FOLDER = "spill"

_DELETED = b"\x00"
_PRESENT = b"\x01"

#: Sorted files that may exist side by side before RocksDB merges some of them in the background. Fewer make
#: reads faster, more make writes cheaper.
_FILES = 12
#: A number of files that is never reached: a spill must not wait for RocksDB to merge files.
_NEVER = 1 << 20


class SpilledRows:
    """Writes of one transaction on disk: the last value of each key, None = deleted.

    Args:
        path: folder of the database.
        config: of the store.
        access: rocksdict's access type.
        log_folder: folder for RocksDB's own log files; None = ``path``.

    Attributes:
        id: name of the folder.
        size_bytes: memory that the writes took, as `overlay` counts it; an overwrite in a later run counts
            again.
    """

    def __init__(self, path: Path, config: StoreConfig, access: Any, log_folder: Path | None = None) -> None:
        self.path = path
        self.id = path.name
        self.size_bytes = 0
        self._config = config
        self._scans = Scans()
        self._db: Any = self._call(
            rocksdict.Rdict, str(path), options=_options(config, log_folder), access_type=access
        )
        self._get: Any = self._db.get

    @classmethod
    def create(cls, store: Path, config: StoreConfig) -> SpilledRows:
        """Creates an empty one for a transaction of the store in the folder ``store``.

        Raises:
            StateError: if the disk is full or fails.
        """
        path = store / FOLDER / uuid.uuid4().hex
        with disk_errors_reported(store):
            path.mkdir(parents=True)
        return cls(path, config, rocksdict.AccessType.read_write())

    @classmethod
    def open(
        cls, store: Path, spill_id: str, config: StoreConfig, log_folder: Path | None = None
    ) -> SpilledRows:
        """Opens the rows that `seal` completed, for reading. It takes no lock and changes no rows.

        Raises:
            StateCorruptedError: if they are missing or damaged.
        """
        path = store / FOLDER / spill_id
        if is_removed(store, spill_id):
            raise StateCorruptedError(
                f"the rows of a large batch in {path} are missing, but the database names them.",
                fix=RESTORE_FIX,
            )
        return cls(path, config, rocksdict.AccessType.read_only(False), log_folder)

    # ------------------------------------------------------------------ writes

    def add(self, rows: dict[bytes, bytes | None], size_bytes: int) -> None:
        """Writes rows as one sorted file; they replace earlier rows of the same keys.

        Args:
            rows: None deletes the key.
            size_bytes: what `overlay` counts for them.

        Raises:
            StateError: if the disk is full or fails, or this process was forked from the owner. Nothing was
                added.
        """
        files.check_not_forked()
        keys = sorted(rows)
        values: list[bytes | None] = [
            _DELETED if value is None else _PRESENT + value for value in map(rows.__getitem__, keys)
        ]
        file = self.path / "run.sst"
        try:
            ingest(self._db, self.path, file, [(keys, values)], self._config)
        except KafkaEosError:
            file.unlink(missing_ok=True)
            raise
        self.size_bytes += size_bytes

    def delete_range(self, low: bytes, high: bytes | None) -> None:
        """Removes the rows of a range: for their keys nothing is staged afterwards."""
        if high is None:
            last = next(self.scan(None, None, reverse=True), None)
            high = b"" if last is None else last[0] + b"\0"
        if low < high:
            self._call(self._db.delete_range, low, high)

    def seal(self) -> None:
        """Makes all rows durable, also against a power failure, and closes the database.

        Raises:
            StateError: if the disk is full or fails, or this process was forked from the owner.
        """
        files.check_not_forked()
        self._call(self._db.flush)
        self.close()

    def close(self) -> None:
        """Closes the database and its scans. May be called again."""
        if self._db is None:
            return
        self._scans.close()
        db, self._db, self._get = self._db, None, None
        self._call(db.close)

    def remove(self) -> None:
        """Closes the database, and removes it from disk."""
        with suppress(Exception):  # what cannot be closed is not needed any more
            self.close()
        shutil.rmtree(self.path, ignore_errors=True)

    # ------------------------------------------------------------------ reads

    def get(self, key: bytes) -> bytes | Missing | None:
        """Returns the value of a key; None if it is deleted, `MISSING` if nothing is written for it."""
        value = self._call(self._get, key)
        return MISSING if value is None else _decoded(value)

    def get_many(self, keys: list[bytes]) -> list[bytes | Missing | None]:
        """Returns the values in the order of the keys; see `get`."""
        if len(keys) >= MANY_KEYS and self._estimate() <= PAIRS_PER_LOOKUP * len(keys):
            wanted = set(keys)
            pairs = self.scan(min(wanted), max(wanted) + b"\0", reverse=False)
            found = {key: value for key, value in pairs if key in wanted}
            return [found.get(key, MISSING) for key in keys]
        values = look_up(self.path, self._get, keys)
        return [MISSING if value is None else _decoded(value) for value in values]

    def scan(self, low: bytes | None, high: bytes | None, *, reverse: bool) -> Iterator[StagedPair]:
        """Iterates over the rows between the bounds as they are now; the value of a deleted key is None."""
        cursor = Cursor(self._call(self._db.iter))
        pairs = self._decoded_pairs(cursor, low, high, reverse)
        return cast("Iterator[StagedPair]", self._scans.track(pairs, pairs))

    def _decoded_pairs(
        self, cursor: Cursor, low: bytes | None, high: bytes | None, reverse: bool
    ) -> Generator[Any, None, None]:
        try:
            for key, value in cursor.scan(low, high, reverse=reverse):
                yield key, value[1:] if value[0] else None
        except Exception as error:
            raise translate(error, self.path) from error
        finally:
            cursor.close()

    def _estimate(self) -> int:
        return property_of(self._db, self.path, "estimate-num-keys")

    def _call(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        return call(self.path, function, *args, **kwargs)


def is_removed(store: Path, spill_id: str) -> bool:
    """Returns whether rows on disk that a database names are gone; False if ``spill_id`` is ""."""
    return bool(spill_id) and not (store / FOLDER / spill_id / "CURRENT").exists()


def remove_spills(store: Path, *, keep: Collection[str]) -> None:
    """Removes the spilled rows of all transactions of a store except those with these ids.

    Raises:
        StateError: if this process was forked from the owner, whose transactions it may not know.
    """
    files.check_not_forked()
    with suppress(FileNotFoundError):
        for each in (store / FOLDER).iterdir():
            if each.name not in keep:
                shutil.rmtree(each, ignore_errors=True)


def _options(config: StoreConfig, log_folder: Path | None) -> Any:
    options = family_options(config)
    options.create_if_missing(True)
    options.set_compaction_style(rocksdict.DBCompactionStyle.universal())
    options.set_level_zero_file_num_compaction_trigger(_FILES)
    options.set_level_zero_slowdown_writes_trigger(_NEVER)
    options.set_level_zero_stop_writes_trigger(_NEVER)
    options.set_max_background_jobs(1)
    options.set_keep_log_file_num(1)
    options.set_stats_dump_period_sec(0)
    options.set_stats_persist_period_sec(0)
    if log_folder is not None:
        options.set_db_log_dir(str(log_folder))
        options.set_max_open_files(-1)  # open files stay readable after the owner deletes them
    return options


def _decoded(value: bytes) -> bytes | None:
    return value[1:] if value[0] else None


# ---------------------------------------- staged writes

#: Schema of changes: of a changelog's records, and of pending changes. A null value deletes the key.
CHANGES = pa.schema([("key", pa.binary()), ("value", pa.binary())])

#: Largest number of rows and of bytes in one batch of changes.
_CHANGE_ROWS, _CHANGE_BYTES = 65_536, 4 << 20


class _Sharing:
    """The stores of this process that have staged writes; each may stage an equal share of the limit."""

    def __init__(self) -> None:
        self.stores = 1
        self._writing: WeakSet[UncommittedWrites] = WeakSet()
        self._lock = threading.Lock()

    def join(self, writes: UncommittedWrites) -> None:
        with self._lock:
            self._writing.add(writes)
            self.stores = len(self._writing)

    def leave(self, writes: UncommittedWrites) -> None:
        with self._lock:
            self._writing.discard(writes)
            self.stores = max(1, len(self._writing))


_sharing = _Sharing()


class UncommittedWrites:
    """Staged writes of the current transaction, which one thread stages.

    Args:
        store: its name, for error messages.
        path: the store's folder, for writes that go to disk.
        config: of the store.

    Attributes:
        overlay: the writes.
    """

    def __init__(self, store: str, path: Path, config: StoreConfig) -> None:
        self.overlay = Overlay()
        self._store = store
        self._path = path
        self._config = config
        self._max_bytes = config.uncommitted_max_bytes
        self._spilled: SpilledRows | None = None
        self._thread = 0

    @property
    def spill_id(self) -> str:
        """Name of the writes on disk; "" if all writes are in memory."""
        return "" if self._spilled is None else self._spilled.id

    def owned_by_this_thread(self) -> bool:
        """Returns whether this thread staged the first write of the transaction."""
        return self._thread == threading.get_ident()

    def claim(self) -> None:
        """Makes this thread the only one that may stage writes until the transaction ends.

        Raises:
            StateError: if another thread has staged writes in this transaction.
        """
        if self._thread:
            raise StateError(
                f"two threads stage writes in one transaction of store {self._store}.",
                fix="write from one thread; other threads read through view().",
            )
        self._thread = threading.get_ident()
        _sharing.join(self)

    def exceeds_share(self) -> bool:
        """Returns whether the writes in memory exceed this store's share of the limit."""
        return self.overlay.bytes * _sharing.stores > self._max_bytes != -1

    def spill(self) -> None:
        """Moves the writes in memory to disk, where only this transaction reads them.

        Raises:
            StateError: if the disk is full or fails. The writes stay in memory then.
        """
        overlay = self.overlay
        if not overlay.rows:
            return
        if self._spilled is None:
            self._spilled = SpilledRows.create(self._path, self._config)
        failpoints.reach("state.before_spill")
        self._spilled.add(overlay.rows, overlay.bytes)
        failpoints.reach("state.after_spill")
        overlay.spilled = self._spilled
        overlay.forget_rows()

    def seal(self) -> str:
        """Moves all writes to disk and makes them durable. Returns the name of the writes on disk.

        The caller writes this name into the store's database, and then calls `hand_over`.
        """
        self.spill()
        assert self._spilled is not None
        self._spilled.seal()
        return self._spilled.id

    def hand_over(self) -> None:
        """Ends the transaction, but keeps its writes on disk, because the database names them now."""
        self._spilled = None
        self.clear()

    def clear(self) -> None:
        """Ends the transaction, whose writes were committed or are discarded.

        A process that was forked from the store's owner leaves the files of the transaction to the owner.
        """
        self.overlay = Overlay()
        self._thread = 0
        _sharing.leave(self)
        spilled, self._spilled = self._spilled, None
        if spilled is not None and not files.was_forked():
            spilled.remove()


def changes_of_pairs(pairs: Iterable[StagedPair]) -> Iterator[pa.RecordBatch]:
    """Yields writes as batches of `CHANGES` of a few MB each, without holding more than one batch of them."""
    for some in slices(pairs, _CHANGE_ROWS, _CHANGE_BYTES):
        yield from change_batches(dict(some))


def change_batches(rows: Mapping[bytes, bytes | None]) -> Iterator[pa.RecordBatch]:
    """Yields rows as batches of `CHANGES` of a few MB each; a value of None deletes the key."""
    keys, values = list(rows), list(rows.values())
    for at in range(0, len(keys), _CHANGE_ROWS):
        yield from _divided(keys[at : at + _CHANGE_ROWS], values[at : at + _CHANGE_ROWS])


def _divided(keys: list[bytes], values: list[bytes | None]) -> Iterator[pa.RecordBatch]:
    """Halves the rows until each part is small enough for one batch."""
    size = sum(map(len, keys)) + sum(map(len, filter(None, values)))
    if len(keys) > 1 and size > _CHANGE_BYTES:
        half = len(keys) // 2
        yield from _divided(keys[:half], values[:half])
        yield from _divided(keys[half:], values[half:])
    else:
        columns = [pa.array(keys, pa.binary()), pa.array(values, pa.binary())]
        yield pa.record_batch(columns, schema=CHANGES)
