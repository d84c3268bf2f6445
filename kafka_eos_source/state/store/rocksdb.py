"""The parts of rocksdict that `database` builds on: options, atomic writes, and errors."""

from __future__ import annotations

import re
import tempfile
import threading
from collections import deque
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, Protocol, overload

import rocksdict

from kafka_eos_source.errors import (
    KafkaEosError,
    StateCorruptedError,
    StateError,
    StateLockedError,
    StoreClosedError,
)
from kafka_eos_source.state.store.config import StoreConfig
from kafka_eos_source.state.store.files import RESTORE_FIX, owner_of

_MIB = 1 << 20
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

#: Keys that one call looks up. Meanwhile, RocksDB keeps a block in memory for each of them, 4 KiB or more.
_KEYS_PER_CALL = 1000

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
    """Returns the options of the data family; `compactions` switches its compactions on and off."""
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


class Family(Protocol):
    """The methods of rocksdict's column families that `compactions` calls. A database has them, too."""

    def property_int_value(self, name: str) -> int | None: ...
    def set_options(self, options: dict[str, str]) -> None: ...
    def write(self, batch: Any, options: Any) -> None: ...


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


def property_of(family: Family, path: Path, name: str) -> int:
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


def check_writable(db: Family, path: Path) -> None:
    """Writes an empty batch.

    Args:
        db: an open database, an object of rocksdict.
        path: its folder.

    Raises:
        StateCorruptedError, StateError: the error after which RocksDB accepts no write. A failure that may
            pass, such as a full disk, need not be one.
    """
    call(path, db.write, rocksdict.WriteBatch(raw_mode=True), rocksdict.WriteOptions())


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
