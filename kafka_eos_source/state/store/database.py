"""A RocksDB database with three column families, used so that rocksdict loses no data.

Each rule below answers a behaviour of rocksdict 0.3.29 that was measured; tests hold the first four in place.

- A flush writes one column family to disk, even with atomic flush enabled, and dropping an object that
  `get_column_family` returned is a flush too. A temporary object would put *its* family on disk ahead of the
  others. So the objects are created once, kept until `close`, and dropped in the order data, pending,
  offsets: data without its offset is repaired by replay, an offset without its data is silent loss. Nothing
  else here flushes.
- After `cancel_all_background` RocksDB refuses to flush, so dropping these objects writes nothing. `close`
  uses this while the write-ahead log is short: three tables for each micro-batch would cost more than reading
  the log at the next open.
- `close` releases no file while an iterator, snapshot or family object lives. All of them are tracked and
  dropped first.
- A reverse iteration ignores a lower bound. An upper bound works in both directions, but RocksDB keeps a
  pointer into the `ReadOptions` that hold it, and rocksdict does not keep that object alive. Without it a
  scan ends early now and then.
- An iterator shows the data of one moment. An iterator over a rocksdict `Snapshot` does not: it also shows
  later writes. So views hold an iterator.
- A process that was forked after its parent opened a database hangs at its first flush. It is recognised by
  its process id and refused.
- The write-ahead log is on and not synced, so a process that is killed loses nothing. Atomic flush is on
  too: without it a family that is seldom written keeps old log files alive, and one damaged old log makes
  the whole database unreadable.
- RocksDB hangs at a log with a certain bit changed; see `log_headers`.
- RocksDB does not notice that a log ends too early if it ends between two records; see `write_chain`.
"""

from __future__ import annotations

import os
import shutil
import tempfile
from bisect import bisect_right
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator
from contextlib import suppress
from functools import lru_cache
from itertools import chain, islice
from pathlib import Path
from typing import Any, NoReturn
from weakref import WeakSet

import pyarrow as pa
import rocksdict

from kafka_eos_source.errors import StateCorruptedError, StateError, StateLockedError, StoreClosedError
from kafka_eos_source.runtime import failpoints
from kafka_eos_source.runtime.deadline import Deadline
from kafka_eos_source.runtime.file_systems import fsync
from kafka_eos_source.runtime.retry import Pauses, retry
from kafka_eos_source.state.store import ownership
from kafka_eos_source.state.store.config import StoreConfig
from kafka_eos_source.state.store.files import disk_errors_reported
from kafka_eos_source.state.store.frozen import current_manifest, freeze, named_manifest, rewritten
from kafka_eos_source.state.store.lease import ask_to_release
from kafka_eos_source.state.store.log_headers import check_logs
from kafka_eos_source.state.store.overlay import Pair, StagedPair
from kafka_eos_source.state.store.rocksdb import WriteBatch, database_options, family_options, translate
from kafka_eos_source.state.store.scans import check_end
from kafka_eos_source.state.store.write_chain import FAMILY, HIGH, LOW, WriteChain, least_write

#: Column families in the order in which `close` drops, and so flushes, them; see the module's docstring.
FAMILIES = ("data", "pending", "offsets")

#: `close` leaves the changes in the write-ahead log while all log files together have at most this many
#: bytes, and their number is at most this. The next open reads them.
_KEPT_LOG_BYTES, _KEPT_LOGS = 256 << 10, 16
#: What RocksDB answers to a flush after `cancel_all_background`.
_SHUTTING_DOWN = "Shutdown in progress"
#: A file that rocksdict adds to each folder that it opens.
_SETTINGS_OF_ROCKSDICT = "rocksdict-config.json"

#: From this number of keys on, `get_many` chooses between lookups and a scan.
_MANY_KEYS = 256
#: Number of pairs that a scan reads in the time of one lookup.
_PAIRS_PER_LOOKUP = 4
#: A scan of at most this many pairs is read at once and leaves no iterator open.
_SHORT_SCAN = 32
#: Rows that exist as Python objects at the same time while a sorted file is written.
_ROWS_PER_SLICE = 10_000
#: How long a reader retries while compactions delete the tables that it is about to open.
_READER_RETRY_SECONDS = 10.0

_opened_by: int | None = None
_alive: WeakSet[Database] = WeakSet()
#: Databases of the parent of a forked process. They are never dropped, because the flush would hang.
_inherited: list[Database] = []


class Database:
    """An open database. Its methods raise errors of this package (`rocksdb.translate`).

    Attributes:
        path: folder of the database.
        key: absolute path, which identifies the database in this process.
        get: ``get(key) -> value | None`` of the data family. It is rocksdict's own method, for speed, so the
            caller translates its errors.
    """

    get: Callable[[bytes], bytes | None]

    def __init__(self, path: Path, db: Any, *, read_only: bool = False, least: int | None = None) -> None:
        self.path = path
        self.key = str(path.resolve())
        self._db: Any = db
        self._writes = 0
        self._read_only = read_only
        self._is_counted = False
        self._lock_file: tuple[int, int] | None = None
        self._families: dict[str, Any] = {name: db.get_column_family(name) for name in FAMILIES}
        self._handles: dict[str, Any] = {name: db.get_column_family_handle(name) for name in FAMILIES}
        self.get = self._families["data"].get
        self._chain: WriteChain | None = None
        _alive.add(self)
        try:
            keys = (key for key, _ in self.scan(LOW, HIGH, family=FAMILY))
            self._chain = WriteChain(path, keys, least_write(path) if least is None else least)
        except BaseException:
            self.close()
            raise

    @classmethod
    def open(cls, path: Path, config: StoreConfig) -> Database:
        """Opens or creates a database; waits while another process has it open.

        A process that only keeps the database open closes it (`lease`).

        Args:
            path: folder of the database.
            config: of the store.

        Raises:
            StateLockedError: if another process still has it open after ``config.lock_timeout_ms``.
            StateCorruptedError: if files are damaged.
            StateError: if this process was forked from one that had opened a database, or the disk fails.
        """
        _check_not_forked()
        # RocksDB has no way to wait for its lock
        pauses = Pauses(Deadline.after_ms(config.lock_timeout_ms), 0.01, 0.25)
        access = rocksdict.AccessType.read_write()

        def open_once() -> Database:
            try:
                return ownership.opened(str(path.resolve()), lambda: cls(path, _open(path, config, access)))
            except StateLockedError:
                ask_to_release(path)
                raise

        database = retry(open_once, StateLockedError, pauses)
        database._is_counted = True
        database._lock_file = _identity_of(path / "LOCK")
        return database

    @classmethod
    def open_read_only(cls, path: Path, log_folder: Path) -> Database:
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
        _check_not_forked()
        config = StoreConfig()
        pauses = Pauses(Deadline.after_seconds(_READER_RETRY_SECONDS), 0.0)

        def open_frozen() -> Database:
            folder = Path(tempfile.mkdtemp(prefix="files-", dir=log_folder))
            manifest, named, least = None, named_manifest(path), least_write(path)
            try:
                with disk_errors_reported(path.parent):
                    manifest = freeze(path, folder)
                access = rocksdict.AccessType.read_only(False)
                db = _open(folder, config, access, log_folder, known_as=path, opens_all_tables=True)
                return cls(path, db, read_only=True, least=least)
            except StateCorruptedError as error:
                # If the owner rewrote files meanwhile, a missing table is no damage.
                if manifest is not None and current_manifest(path) == manifest:
                    raise
                if manifest is None and named_manifest(path) == named:
                    raise
                raise rewritten(path) from error
            finally:
                shutil.rmtree(folder, ignore_errors=True)

        return retry(open_frozen, StateLockedError, pauses)

    @classmethod
    def open_copy(cls, path: Path, log_folder: Path) -> Database:
        """Opens files that `freeze` made, for reading. Nobody may change them until the database is closed.

        Args:
            path: folder of the files.
            log_folder: an existing folder for RocksDB's own log files.

        Raises:
            StateCorruptedError, StateError: if files are damaged, or the manifest names a missing table.
        """
        _check_not_forked()
        db = _open(path, StoreConfig(), rocksdict.AccessType.read_only(False), log_folder)
        (path / _SETTINGS_OF_ROCKSDICT).unlink(missing_ok=True)  # opening wrote it; the copy has none
        database = cls(path, db, read_only=True, least=least_write(path))
        missing = {name for name in database.tables() if not (path / name).exists()}
        if missing:
            database.close()
            raise StateCorruptedError(f"the copy {path} lacks the tables {', '.join(sorted(missing))}.")
        return database

    def write(self, batch: WriteBatch, *, sync: bool) -> None:
        """Writes the whole batch or nothing.

        Args:
            batch: the changes. Do not use it again.
            sync: wait until the write-ahead log is on disk.

        Raises:
            StateError, StateCorruptedError: if the disk is full or fails. Close the database then; only
                opening it again shows what was written.
        """
        _check_not_forked()
        options = rocksdict.WriteOptions()
        options.sync = sync
        self._writes += 1
        assert self._chain is not None
        self._chain.add_to(batch)
        self._call(self._db.write, batch.raw, options)
        self._chain.written()

    def require_writes(self) -> None:
        """Makes the loss of any write so far damage from now on.

        Call this before tables are written that hold data ahead of its metadata; see `write_chain`. The
        write-ahead log is synced first: a power failure must not cut off a write that is required already.

        Raises:
            StateError: if the disk is full or fails.
        """
        assert self._chain is not None
        if self._chain.has_unrequired_writes:
            self._call(self._db.flush_wal, True)
            self._call(self._chain.require)

    def sync_logs(self) -> None:
        """Waits until the logs that earlier processes left are on disk.

        RocksDB syncs only the log that it has opened itself. If this process synced a write and the machine
        then lost power, the logs before that write could be cut off.

        Raises:
            StateError: if the disk fails.
        """
        for log in self.path.glob("*.log"):
            try:
                fsync(str(log))
            except FileNotFoundError:
                continue  # a flush deleted it
            except OSError as error:
                raise translate(error, self.path) from error

    def new_batch(self) -> WriteBatch:
        """Returns an empty batch for `write`."""
        return WriteBatch(self._handles)

    def get_many(self, keys: list[bytes]) -> list[bytes | None]:
        """Returns the values in the order of the keys; None for a missing key.

        Measured for 100,000 keys: lookups in key order 0.18 s, in random order 0.30 s, rocksdict's call for
        many keys 0.21 s, a scan over 100,000 pairs 0.06 s. So keys are looked up in order, and if they are a
        large part of the data, everything between the first and the last is scanned instead.
        """
        if len(keys) < _MANY_KEYS:
            few: list[bytes | None] = self._call(_collect, self.get, keys)
            return few
        wanted = sorted(set(keys))
        found: dict[bytes, bytes | None] = {}
        most = _PAIRS_PER_LOOKUP * len(wanted)
        if self.property("estimate-num-keys") <= most:
            found.update(islice(self.scan(wanted[0], wanted[-1] + b"\0"), most))
            if len(found) == most:  # the estimate was too low: look up the rest
                last = next(reversed(found))
                wanted = wanted[bisect_right(wanted, last) :]
            else:
                wanted = []
        found.update(zip(wanted, self._call(_collect, self.get, wanted), strict=True))
        return list(map(found.get, keys))

    def get_from(self, family: str, key: bytes) -> bytes | None:
        """Returns the value of a key in any column family."""
        value: bytes | None = self._call(self._families[family].get, key)
        return value

    def scan(
        self,
        low: bytes | None = None,
        high: bytes | None = None,
        *,
        reverse: bool = False,
        family: str = "data",
    ) -> Iterator[Pair]:
        """Iterates over the pairs from ``low`` (included) to ``high`` (excluded) as they are now."""
        first, rest = self.begin_scan(low, high, reverse=reverse, family=family)
        return chain(first, rest) if rest else iter(first)

    def begin_scan(
        self,
        low: bytes | None = None,
        high: bytes | None = None,
        *,
        reverse: bool = False,
        family: str = "data",
    ) -> tuple[list[Pair], Generator[Pair, None, None] | None]:
        """Begins a scan like `scan`, and reads its first pairs at once.

        Most scans of a processor are short. They cost half as much if no iterator has to be tracked.

        Returns:
            The first pairs, and an iterator over the others; None if there are no others. The caller closes
            the iterator before the database.
        """
        if low is not None and high is not None and low >= high:
            return [], None
        options = rocksdict.ReadOptions()
        if high is not None:
            options.set_iterate_upper_bound(high)
        try:
            cursor = self._families[family].iter(options)
            if not reverse:
                cursor.seek_to_first() if low is None else cursor.seek(low)
            else:
                cursor.seek_to_last()
            step = cursor.prev if reverse else cursor.next
            first: list[Pair] = []
            while cursor.valid():
                key = cursor.key()
                if reverse and low is not None and key < low:
                    break
                if len(first) == _SHORT_SCAN:
                    items = self._families[family].items(backwards=reverse, from_key=key, read_opt=options)
                    last = low if reverse else None
                    return first, self._pairs(items, key, last, options, family, reverse, self._writes)
                first.append((key, cursor.value()))
                step()
            cursor.status()
        except Exception as error:
            raise translate(error, self.path) from error
        return first, None

    def cursor(self) -> Any:
        """Returns a RocksDB iterator over the data of this moment. Later writes do not show."""
        return self._call(self._families["data"].iter)

    def has_files(self) -> bool:
        """Returns whether the folder still has the files of this database, which its owner has opened."""
        return self._lock_file is not None and self._lock_file == _identity_of(self.path / "LOCK")

    def has_data(self) -> bool:
        """Returns whether the data family holds any pair."""
        return next(self.scan(), None) is not None

    def key_after_last(self) -> bytes:
        """Returns the smallest key that is larger than all keys of the data family."""
        last = next(self.scan(reverse=True), None)
        return b"" if last is None else last[0] + b"\0"

    def tables(self) -> set[str]:
        """Returns the names of the tables that RocksDB's manifest names."""
        return {each["name"].lstrip("/") for each in self._call(self._db.live_files)}

    def property(self, name: str, family: str = "data") -> int:
        """Returns a property of RocksDB, such as ``estimate-num-keys``; 0 if unknown."""
        return int(self._call(self._families[family].property_int_value, f"rocksdb.{name}") or 0)

    def ingest(
        self, keys: pa.BinaryArray, values: pa.BinaryArray, scratch: Path, config: StoreConfig
    ) -> None:
        """Adds rows to the data family as a sorted file.

        For many rows this is faster than a batch. The rows are on disk when the call returns.

        Args:
            keys: in order, without repetition.
            values: null deletes the key.
            scratch: path of the file; one that a dead process left is replaced.
            config: of the store.
        """
        slices = range(0, len(keys), _ROWS_PER_SLICE)
        parts = (slice(first, first + _ROWS_PER_SLICE) for first in slices)
        self._ingest(((keys[part].to_pylist(), values[part].to_pylist()) for part in parts), scratch, config)

    def ingest_rows(self, rows: list[StagedPair], scratch: Path, config: StoreConfig) -> None:
        """Adds rows like `ingest`.

        Args:
            rows: in key order, without repetition; a value of None deletes the key.
            scratch: path of the file; one that a dead process left is replaced.
            config: of the store.
        """
        self._ingest([([key for key, _ in rows], [value for _, value in rows])], scratch, config)

    def _ingest(
        self,
        parts: Iterable[tuple[list[bytes], list[bytes | None]]],
        scratch: Path,
        config: StoreConfig,
    ) -> None:
        """Writes keys and values to a sorted file, and moves the file into the data family."""
        # it may be another name of a table of the database, whose contents must not change
        scratch.unlink(missing_ok=True)
        self._writes += 1
        writer = rocksdict.SstFileWriter(family_options(config))
        self._call(writer.open, str(scratch))
        for keys, values in parts:
            if None not in values:
                self._call(_write_all, writer, keys, values)
                continue
            for key, value in zip(keys, values, strict=True):
                if value is None:
                    self._call(writer.__delitem__, key)
                else:
                    self._call(writer.__setitem__, key, value)
        self._call(writer.finish)
        options = rocksdict.IngestExternalFileOptions()
        options.set_move_files(True)
        self._call(self._families["data"].ingest_external_file, [str(scratch)], options)

    def close(self) -> None:
        """Closes the database; everything that was written is on disk, at least in the write-ahead log.

        The caller has dropped all iterators.
        """
        if self._db is None or self in _inherited:
            return
        self.get = _closed
        self._handles.clear()
        db = self._db
        try:
            flushes = not self._read_only and self._may_flush()
            keeps_log = not self._read_only and not flushes
            if keeps_log:
                self._call(db.cancel_all_background, True)
                failpoints.reach("state.within_close")
            for name in FAMILIES:
                del self._families[name]  # flushes the family, unless the background work is cancelled
                if flushes:
                    failpoints.reach("state.within_flush")
            try:
                self._call(db.close)  # waits until the log is on disk
            except StateError as error:
                if not (keeps_log and _SHUTTING_DOWN in str(error)):
                    raise
        finally:
            self._db = None
            if self._is_counted:
                ownership.closed(self.key)

    def _may_flush(self) -> bool:
        """Returns whether `close` should write tables, and may: what is written is required from then on."""
        if self._chain is None or self._log_is_short():
            return False
        try:
            self.require_writes()
        except (StateError, StateCorruptedError):
            return False  # the log keeps everything; a disk that is full would not take the tables either
        return True

    def _log_is_short(self) -> bool:
        """Returns whether the next open reads the write-ahead log faster than this one writes tables."""
        sizes = []
        for log in self.path.glob("*.log"):
            with suppress(FileNotFoundError):  # a flush that runs at present deletes logs
                sizes.append(log.stat().st_size)
        return len(sizes) <= _KEPT_LOGS and sum(sizes) <= _KEPT_LOG_BYTES

    def _pairs(
        self,
        items: Any,
        first: bytes,
        low: bytes | None,
        options: Any,
        family: str,
        reverse: bool,
        writes: int,
    ) -> Generator[Pair, None, None]:
        """Yields ``items`` from the key ``first`` on, down to ``low``. ``options`` hold the upper bound.

        Args:
            writes: number of writes when the scan began.

        Raises:
            StateCorruptedError, StateError: if ``items`` ended because a file could not be read.
        """
        last = first
        try:
            for pair in items:
                if low is not None and pair[0] < low:
                    return
                last = pair[0]
                yield pair
            cursor = self._families[family].iter(options)
            check_end(cursor, last, reverse=reverse, is_quiet=self._writes == writes)
        except Exception as error:
            raise translate(error, self.path) from error

    def _call(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        try:
            return function(*args, **kwargs)
        except Exception as error:
            raise translate(error, self.path) from error


def _open(
    path: Path,
    config: StoreConfig,
    access: Any,
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
    global _opened_by
    check_logs(path)
    if log_folder is None:
        options, families = _options_of_owners(config)
    else:
        options, families = database_options(config), _options_of_families(config)
        options.set_db_log_dir(str(log_folder))
        if opens_all_tables:
            options.set_max_open_files(-1)
    _opened_by = os.getpid()
    try:
        db = rocksdict.Rdict(str(path), options=options, column_families=families, access_type=access)
    except Exception as error:
        if known_as is None:
            raise translate(error, path) from error
        text = str(error).replace(str(path), str(known_as))
        raise translate(Exception(text), known_as) from error
    if log_folder is None:
        _remove_options_files(path)
    return db


def _identity_of(file: Path) -> tuple[int, int] | None:
    """Returns device and inode of a file; None if there is no such file."""
    try:
        status = file.stat()
    except FileNotFoundError:
        return None
    return status.st_dev, status.st_ino


@lru_cache(maxsize=4)
def _options_of_owners(config: StoreConfig) -> tuple[Any, dict[str, Any]]:
    """Returns the options of databases that this process owns, and of their families.

    RocksDB copies options when it opens a database, so all databases with the same settings can share them.
    """
    return database_options(config), _options_of_families(config)


def _remove_options_files(path: Path) -> None:
    """Removes the options that RocksDB wrote when it opened the database.

    Nothing needs them, and rocksdict would parse them when it opens the database again, although all options
    are passed to it. That takes a fifth of the time of opening.
    """
    for file in path.glob("OPTIONS-*"):
        with suppress(OSError):  # a file that stays makes only the next open slower
            file.unlink()


def _options_of_families(config: StoreConfig) -> dict[str, Any]:
    return {name: family_options(config, small=name == "offsets") for name in FAMILIES}


def _check_not_forked() -> None:
    if _opened_by is not None and _opened_by != os.getpid():
        raise StateError(
            f"process {os.getpid()} was forked from process {_opened_by}, which had opened a state database. "
            "RocksDB's threads do not survive a fork, so the first flush would hang.",
            fix="start processes with multiprocessing's start method 'spawn', or open state databases in the "
            "forked processes only.",
        )


os.register_at_fork(after_in_child=lambda: _inherited.extend(_alive))


def _write_all(writer: Any, keys: list[bytes], values: list[bytes | None]) -> None:
    deque(map(writer.__setitem__, keys, values), 0)


def _collect(get: Callable[[bytes], bytes | None], keys: list[bytes]) -> list[bytes | None]:
    return list(map(get, keys))


def _closed(_key: bytes) -> NoReturn:
    raise StoreClosedError("the store is closed.")
