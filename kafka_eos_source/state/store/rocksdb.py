"""How the store uses rocksdict: settings, options, atomic writes, iterators, and errors."""

from __future__ import annotations

import re
import tempfile
import threading
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, overload
from weakref import WeakSet

import rocksdict

from kafka_eos_source.errors import (
    InvalidOptionError,
    KafkaEosError,
    StateCorruptedError,
    StateError,
    StateLockedError,
    StoreClosedError,
)
from kafka_eos_source.state.store.files import RESTORE_FIX, owner_of
from kafka_eos_source.state.store.overlay import Pair

_MIB = 1 << 20


@dataclass(frozen=True)
class StoreConfig:
    """Settings of a store; the data on disk does not depend on them.

    Attributes:
        uncommitted_max_bytes: [``statestore.uncommitted.max.bytes``, KIP-892] memory of staged writes above
            which they go to disk; the stores of a process share it; -1 = no limit. Counted as `overlay`
            describes.
        lock_timeout_ms: [``state.lock.timeout.ms``] how long `open` waits while another process has the store
            open.
        wal_sync: [``state.wal.sync``] wait until each commit is on disk. Without it a process that is killed
            loses nothing; a machine that loses power loses the last seconds, in whole commits.
        write_buffer_bytes: size of RocksDB's memtable of each column family.
        max_wal_bytes: size of the write-ahead log above which RocksDB flushes. It bounds the time to open a
            store after a crash; with two million keys and batches of 100,000 changes: 4 MiB 0.2 s, 8 MiB
            0.4 s, 16 MiB 0.7 s.
        block_cache_bytes: size of the block cache that the stores of a process share; the first store that is
            opened sets it.
    """

    uncommitted_max_bytes: int = 64 * _MIB
    lock_timeout_ms: int = 10_000
    wal_sync: bool = False
    write_buffer_bytes: int = 8 * _MIB
    max_wal_bytes: int = 8 * _MIB
    block_cache_bytes: int = 64 * _MIB

    def __post_init__(self) -> None:
        """Raises `InvalidOptionError` if a value is out of range."""
        _at_least("statestore.uncommitted.max.bytes", self.uncommitted_max_bytes, 1, or_unlimited=True)
        for name in ("write_buffer_bytes", "max_wal_bytes", "block_cache_bytes"):
            _at_least(name, getattr(self, name), 1)
        _at_least("lock_timeout_ms", self.lock_timeout_ms, 0)


def _at_least(name: str, value: int, least: int, *, or_unlimited: bool = False) -> None:
    if value < least and not (or_unlimited and value == -1):
        expected = f"at least {least}" + (", or -1 for no limit" if or_unlimited else "")
        raise InvalidOptionError(f"{name} is {value}; expected {expected}.")


#: Memtable of a column family that holds a few records, which are overwritten again and again.
_SMALL_BUFFER_BYTES = 1 * _MIB

#: Most tables that a database keeps open. With a limit, RocksDB opens at most 16 tables in advance; without
#: one it would read the index and the filter of every table whenever a task opens the database.
_MAX_OPEN_FILES = 512

#: Sizes of the data family's tables and of the level above level 0. RocksDB's defaults (64 and 256 MiB) suit
#: databases that stay open. Here a task waits for the running compaction when it closes the store, so a
#: compaction must be short: it rewrites one table, and about ten tables of the next level that overlap it.
#: Only the compaction of level 0 rewrites all of that level, and what overlaps it in the next one.
_TABLE_BYTES, _LEVEL_BYTES = 8 * _MIB, 16 * _MIB
#: Numbers of tables at level 0 from which on RocksDB slows down and stops writes. A restore can leave more
#: than its defaults, 20 and 36. A write would then wait for a whole compaction, and so would every thread of
#: the process, because rocksdict holds Python's global lock while it writes.
_SLOWDOWN_TABLES, _STOP_TABLES = 200, 250

#: Options for which rocksdict has no method. It can load them from a file of RocksDB's.
_MORE_OPTIONS = """\
[Version]
  rocksdb_version=9.0.0
  options_file_version=1.1
[DBOptions]
  avoid_flush_during_recovery=true
[CFOptions "default"]
[TableOptions/BlockBasedTable "default"]
"""

#: From this number of keys on, `get_many` chooses between lookups and a scan.
MANY_KEYS = 256
#: Number of pairs that a scan reads in the time of one lookup.
PAIRS_PER_LOOKUP = 4
#: Keys that one call looks up. Meanwhile, RocksDB keeps a block in memory for each of them, 4 KiB or more.
_KEYS_PER_CALL = 1000

#: Keys and values of some rows; a value of None deletes the key.
RowLists = tuple[list[bytes], list[bytes | None]]

_cache: Any = None
_cache_lock = threading.Lock()


def database_options(config: StoreConfig) -> Any:
    """Returns the options of a database as a whole.

    Each task opens a database and closes it again, so opening must be cheap. RocksDB's defaults would start
    16 threads for each column family to open its tables, read the properties of tables for statistics, and
    write what the log holds into new tables.
    """
    options = family_options(config, small=True, options=_more_options())
    options.set_max_open_files(_MAX_OPEN_FILES)
    options.set_max_file_opening_threads(1)
    options.set_skip_stats_update_on_db_open(True)
    options.create_if_missing(True)
    options.create_missing_column_families(True)
    options.set_atomic_flush(True)
    options.set_max_total_wal_size(config.max_wal_bytes)
    options.set_wal_recovery_mode(rocksdict.DBRecoveryMode.point_in_time())
    options.set_max_background_jobs(2)
    options.set_keep_log_file_num(2)
    options.set_stats_dump_period_sec(0)
    options.set_stats_persist_period_sec(0)
    return options


def remove_options_files(path: Path) -> None:
    """Removes the files of options that RocksDB writes when a database is opened or its options change.

    Nothing needs them, and rocksdict would parse them when it opens the database again, although all options
    are passed to it. That takes a fifth of the time of opening.
    """
    for file in path.glob("OPTIONS-*"):
        with suppress(OSError):  # a file that stays makes only the next open slower
            file.unlink()


def _more_options() -> Any:
    """Returns new options with those of `_MORE_OPTIONS`, and RocksDB's defaults for all others."""
    with tempfile.TemporaryDirectory(prefix="kafka-eos-rocksdb-") as folder:
        Path(folder, "OPTIONS-000001").write_text(_MORE_OPTIONS)
        options, _families = rocksdict.Options.load_latest(folder)
    return options


def family_options(config: StoreConfig, *, small: bool = False, options: Any = None) -> Any:
    """Returns the options of a column family.

    Args:
        small: the family holds a few records, which are overwritten again and again.
        options: the options to change; None = RocksDB's defaults.
    """
    options = options or rocksdict.Options(raw_mode=True)
    options.set_write_buffer_size(_SMALL_BUFFER_BYTES if small else config.write_buffer_bytes)
    options.set_max_write_buffer_number(3)
    options.set_compression_type(rocksdict.DBCompressionType.lz4())
    options.set_min_level_to_compress(2)  # young levels are read and rewritten most
    blocks = rocksdict.BlockBasedOptions()
    blocks.set_block_cache(_block_cache(config))
    blocks.set_bloom_filter(10, False)
    blocks.set_format_version(5)
    options.set_block_based_table_factory(blocks)
    return options


def data_options(config: StoreConfig) -> Any:
    """Returns the options of the data family; `Database` switches its compactions on and off."""
    options = family_options(config)
    options.set_disable_auto_compactions(True)
    options.set_level_zero_slowdown_writes_trigger(_SLOWDOWN_TABLES)
    options.set_level_zero_stop_writes_trigger(_STOP_TABLES)
    options.set_target_file_size_base(_TABLE_BYTES)
    options.set_max_bytes_for_level_base(_LEVEL_BYTES)
    return options


def _block_cache(config: StoreConfig) -> Any:
    """Returns the block cache, which all databases of the process share."""
    global _cache
    with _cache_lock:
        if _cache is None:
            _cache = rocksdict.Cache(config.block_cache_bytes)
        return _cache


class WriteBatch:
    """Changes of one atomic write, in order, to all column families."""

    def __init__(self, handles: Mapping[str, Any]) -> None:
        self.raw: Any = rocksdict.WriteBatch(raw_mode=True)
        self._handles = handles

    def put(self, family: str, key: bytes, value: bytes) -> None:
        self.raw.put(key, value, self._handles[family])

    def delete(self, family: str, key: bytes) -> None:
        self.raw.delete(key, self._handles[family])

    def change(self, family: str, pairs: Mapping[bytes, bytes | None]) -> None:
        """Adds a few records; a value of None deletes the key."""
        for key, value in pairs.items():
            if value is None:
                self.delete(family, key)
            else:
                self.put(family, key, value)

    def delete_range(self, family: str, low: bytes, high: bytes) -> None:
        self.raw.delete_range(low, high, self._handles[family])

    def put_rows(self, rows: Mapping[bytes, bytes | None]) -> None:
        """Adds rows of the data family; a value of None deletes the key.

        Rows are sorted first. For 300,000 rows this takes 0.14 s and saves 0.5 s of `Database.write`, which
        holds Python's global lock.
        """
        keys = sorted(rows)
        values = list(map(rows.__getitem__, keys))
        self.raw.set_default_column_family(self._handles["data"])
        if None in values:
            puts = []
            for key, value in zip(keys, values, strict=True):
                if value is None:
                    self.raw.delete(key)
                else:
                    puts.append((key, value))
            keys, values = [key for key, _ in puts], [value for _, value in puts]
        deque(map(self.raw.put, keys, values), 0)


class Get(Protocol):
    """The method ``get`` of rocksdict's databases and column families."""

    @overload
    def __call__(self, key: bytes, /) -> bytes | None: ...
    @overload
    def __call__(self, key: list[bytes], /) -> list[bytes | None]: ...


def look_up(path: Path, get: Get, keys: list[bytes]) -> list[bytes | None]:
    """Returns the values of the keys, in their order; None for a missing key.

    Lookups are fastest if the keys are in order. A call for many keys takes 2 µs a key while RocksDB has the
    blocks in memory, and 4 µs while it reads them from files. A call for each key takes 2.5 and 6.5 µs.

    Args:
        path: folder of the database.
        get: of the database or column family.
        keys: the keys.

    Raises:
        StateCorruptedError, StateError: if a table is damaged or cannot be read.
    """
    found: list[bytes | None] = []
    for first in range(0, len(keys), _KEYS_PER_CALL):
        found += call(path, get, keys[first : first + _KEYS_PER_CALL])
    return found


def property_of(family: Any, path: Path, name: str) -> int:
    """Returns a property of the database at ``path``, such as ``estimate-num-keys``; 0 if unknown."""
    return int(call(path, family.property_int_value, f"rocksdb.{name}") or 0)


def call(path: Path, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Calls a method of rocksdict for the database in the folder ``path``.

    Raises:
        KafkaEosError: instead of rocksdict's error; see `translate`.
    """
    try:
        return function(*args, **kwargs)
    except Exception as error:
        raise translate(error, path) from error


def ingest(target: Any, folder: Path, file: Path, parts: Iterable[RowLists], config: StoreConfig) -> None:
    """Writes rows to a sorted file, and moves the file into a database.

    Args:
        target: a column family of rocksdict, or a database with only one.
        folder: of the database.
        file: path of the new file.
        parts: keys and values, in the order of the keys, without repetition.
        config: of the store.

    Raises:
        StateError, StateCorruptedError: if the disk is full or fails.
    """
    # a dead process may have left it, as another name of a table, whose contents must not change
    file.unlink(missing_ok=True)
    writer = rocksdict.SstFileWriter(family_options(config))
    call(folder, writer.open, str(file))
    for keys, values in parts:
        call(folder, _write_rows, writer, keys, values)
    call(folder, writer.finish)
    options = rocksdict.IngestExternalFileOptions()
    options.set_move_files(True)
    call(folder, target.ingest_external_file, [str(file)], options)


def _write_rows(writer: Any, keys: list[bytes], values: list[bytes | None]) -> None:
    if None not in values:
        deque(map(writer.__setitem__, keys, values), 0)
        return
    for key, value in zip(keys, values, strict=True):
        if value is None:
            del writer[key]
        else:
            writer[key] = value


def translate(error: Exception, path: Path) -> KafkaEosError:
    """Returns the error of this package for an error of rocksdict.

    rocksdict raises a plain `Exception` with RocksDB's text, so the text decides.

    Args:
        path: folder of the database.
    """
    text = str(error)
    if isinstance(error, KafkaEosError):
        return error
    if isinstance(error, rocksdict.DbClosedError):
        return StoreClosedError(f"the database {path} is closed.")
    if text.startswith("IO error") and re.search(r"lock", text.split(str(path))[0], re.IGNORECASE):
        return StateLockedError(
            f"the database {path} is open in {owner_of(path)}.",
            fix="stop that process. A process that crashed holds no lock; do not remove files named LOCK.",
        )
    if text.startswith("Corruption") or (text.startswith("IO error: No such file") and str(path) in text):
        return StateCorruptedError(
            f"the database {path} is damaged: {text}.",
            fix=RESTORE_FIX,
        )
    return StateError(
        f"the database {path} failed: {text}.", fix="check the disk, then start the query again."
    )


# ---------------------------------------- iterators, which must be closed before RocksDB can close

#: Rows that a scan takes from a cursor at a time: at first, and at most.
FIRST_ROWS, _MOST_ROWS = 32, 256


class Scan(Iterator[Pair]):
    """Pairs of a store or view as they were when the scan began; later writes do not show.

    Raises:
        StoreClosedError: from ``next``, once the store or view is closed.
    """

    def __init__(self, scans: Scans, pairs: Iterator[Pair], base: Generator[Pair, None, None] | None) -> None:
        self._scans = scans
        self._pairs = pairs
        self._base = base

    def __iter__(self) -> Scan:
        return self

    def __next__(self) -> Pair:
        if self._scans.closed:
            raise StoreClosedError("the store or view that this scan reads is closed.")
        return next(self._pairs)

    def close(self) -> None:
        """Releases the database's iterator. May be called again."""
        self._pairs = iter(())
        base, self._base = self._base, None
        if base is not None:
            base.close()


class Scans:
    """The open scans of one store or view that hold an iterator of the database."""

    def __init__(self) -> None:
        self._open: WeakSet[Scan] = WeakSet()
        self.closed = False

    def __len__(self) -> int:
        return len(self._open)

    def track(self, pairs: Iterator[Pair], base: Generator[Pair, None, None] | None = None) -> Scan:
        """Returns a scan over ``pairs``.

        Args:
            base: the database's iterator that ``pairs`` draws from; None if no iterator stays open.
        """
        scan = Scan(self, pairs, base)
        if base is not None:
            self._open.add(scan)
        return scan

    def close(self) -> None:
        """Closes all scans, and every later one."""
        self.closed = True
        for scan in list(self._open):
            scan.close()
        self._open.clear()


class Cursor:
    """A RocksDB iterator over the data of one moment. Several scans may share it.

    Each scan takes some rows at a time, and first moves the iterator to where it needs it.

    Args:
        cursor: the iterator of rocksdict.
        options: those that the iterator was created with. rocksdict does not keep them alive, although
            RocksDB reads the upper bound in them.
    """

    def __init__(self, cursor: Any, options: Any = None) -> None:
        self._cursor = cursor
        self._options = options
        self._lock = threading.Lock()

    def get(self, key: bytes) -> bytes | None:
        with self._lock:
            cursor = self._require_open()
            cursor.seek(key)
            if not cursor.valid():
                cursor.status()
                return None
            value: bytes | None = cursor.value() if cursor.key() == key else None
            return value

    def scan(self, low: bytes | None, high: bytes | None, *, reverse: bool) -> Iterator[Pair]:
        """Iterates over the pairs from ``low`` (included) to ``high`` (excluded)."""
        pairs, is_end = self.first_rows(low, high, reverse=reverse)
        yield from pairs
        if not is_end:
            yield from self.rows_after(pairs[-1][0], low, high, reverse=reverse)

    def first_rows(self, low: bytes | None, high: bytes | None, *, reverse: bool) -> tuple[list[Pair], bool]:
        """Returns the first rows of a scan, and whether these are all."""
        return self._read(high if reverse else low, low if reverse else high, FIRST_ROWS, reverse)

    def rows_after(
        self, at: bytes, low: bytes | None, high: bytes | None, *, reverse: bool
    ) -> Iterator[Pair]:
        """Iterates over the rows of a scan that follow the key ``at``."""
        rows, is_end = FIRST_ROWS, False
        while not is_end:
            rows = min(2 * rows, _MOST_ROWS)
            start = at if reverse else at + b"\0"
            pairs, is_end = self._read(start, low if reverse else high, rows, reverse)
            yield from pairs
            at = pairs[-1][0] if pairs else at

    def close(self) -> None:
        with self._lock:
            self._cursor = None

    def _read(
        self, start: bytes | None, stop: bytes | None, rows: int, reverse: bool
    ) -> tuple[list[Pair], bool]:
        """Returns up to ``rows`` pairs, and whether there are no more.

        Args:
            start: the first key; None = the first one of all. A reverse scan shows only smaller keys.
            stop: the end of the scan (excluded). The last key of a reverse scan (included).
            rows: largest number of pairs.
            reverse: direction of the scan.
        """
        pairs: list[Pair] = []
        with self._lock:
            cursor = self._require_open()
            if reverse:
                cursor.seek_to_last() if start is None else cursor.seek_for_prev(start)
                if start is not None and cursor.valid() and cursor.key() == start:
                    cursor.prev()
            else:
                cursor.seek_to_first() if start is None else cursor.seek(start)
            step = cursor.prev if reverse else cursor.next
            is_valid, key_of, value_of = cursor.valid, cursor.key, cursor.value
            while is_valid():
                key = key_of()
                if stop is not None and (key < stop if reverse else key >= stop):
                    return pairs, True
                if len(pairs) == rows:
                    return pairs, False
                pairs.append((key, value_of()))
                step()
            # An iterator also becomes invalid if a file cannot be read.
            cursor.status()
        return pairs, True

    def _require_open(self) -> Any:
        if self._cursor is None:
            raise StoreClosedError("the view is closed.")
        return self._cursor
