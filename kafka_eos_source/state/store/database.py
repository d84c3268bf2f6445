"""One RocksDB with three column families, through rocksdict, and what must be known to use that safely.

Measured with rocksdict 0.3.29; the tests hold the first four in place:

- A flush is of one column family only, even with atomic flush on, and dropping an object made by
  `get_column_family` flushes too: a temporary one puts *its* family on the disk ahead of the others. So the
  objects are made once, kept until `close`, and dropped data first, offsets last: data ahead of its offset is
  repaired by replay, an offset ahead of its data is silent loss. Nothing else here flushes.
- `close` closes nothing while an iterator, snapshot or family object lives: all are tracked and dropped
  first.
- An iteration backwards goes past a lower bound; an upper bound holds both ways, but only as long as the
  `ReadOptions` live that it was set in: RocksDB keeps a pointer to it, rocksdict does not keep the object. A
  scan ends early otherwise, now and then.
- An iterator stands still in time; one made by a *snapshot* does not, it shows what was written after. So
  views hold an iterator.
- A process forked from one that ever had a database open hangs for good at its first flush: refused by pid.
- A log (WAL) is kept, not synced: a killed process loses nothing then. Atomic flush with it, else a family
  that is seldom written keeps old log files alive, and a damaged one of those makes the database unreadable.
"""

from __future__ import annotations

import os
import shutil
import tempfile
import time
from bisect import bisect_right
from collections import deque
from collections.abc import Callable, Generator, Iterator, Mapping
from itertools import chain, islice, takewhile
from pathlib import Path
from typing import Any, NoReturn
from weakref import WeakSet

import pyarrow as pa
import rocksdict

from kafka_eos_source.errors import StateCorruptedError, StateError, StateLockedError, StoreClosedError
from kafka_eos_source.state.store.config import StoreConfig
from kafka_eos_source.state.store.frozen import freeze, manifest_in_force
from kafka_eos_source.state.store.overlay import Pair
from kafka_eos_source.state.store.rocks_errors import translate
from kafka_eos_source.state.store.rocks_options import database_options, family_options

#: Data last opened, first dropped; see the module's text.
FAMILIES = ("data", "pending", "offsets")

#: From so many keys on, reading them is planned.
_MANY = 256
#: Reading a pair in order costs about a quarter of looking up a key.
_DENSE = 4
#: A scan that ends within so many pairs needs no iterator that outlives the call.
_SHORT_SCAN = 32
#: Rows that are Python objects at once while a file is written.
_ROWS_AT_ONCE = 10_000
#: A reader tries again for so long while compactions delete the tables that it is about to open.
_STILL_WITHIN_S = 10.0

_opened_by: int | None = None
_open_here: set[str] = set()
_alive: WeakSet[Database] = WeakSet()
#: Databases of the process that this one was forked from: dropping them would flush, which hangs.
_inherited: list[Database] = []


class Database:
    """An open database. Its errors are `translate`d; a failed write closes it for good.

    Attributes:
        get: ``get(key) -> value | None`` of the data family, as direct as can be.
    """

    get: Callable[[bytes], bytes | None]

    def __init__(self, path: Path, db: Any, *, read_only: bool = False) -> None:
        self.path = path
        self.key = str(path.resolve())
        self._db: Any = db
        self._read_only = read_only
        self._families: dict[str, Any] = {name: db.get_column_family(name) for name in FAMILIES}
        self._handles: dict[str, Any] = {name: db.get_column_family_handle(name) for name in FAMILIES}
        self.get = self._families["data"].get
        _alive.add(self)

    @classmethod
    def open(cls, path: Path, config: StoreConfig) -> Database:
        """Opens or creates the database in the folder ``path``, waiting for another owner to let go.

        Raises:
            StateLockedError: it did not within ``config.lock_timeout_ms``.
            StateCorruptedError: the files are damaged.
            StateError: this process was forked from one that had a database open; or the disk fails.
        """
        _check_not_forked()
        deadline = time.monotonic() + config.lock_timeout_ms / 1000
        pause = 0.01
        while True:
            try:
                database = cls(path, _open(path, config, rocksdict.AccessType.read_write()))
                _open_here.add(database.key)
                return database
            except StateLockedError:
                left = deadline - time.monotonic()
                if left <= 0:
                    raise
                time.sleep(min(pause, left))  # RocksDB has no way to wait for its lock
                pause = min(2 * pause, 0.25)

    @classmethod
    def open_read_only(cls, path: Path, log_folder: Path) -> Database:
        """Opens the database as it is on disk now, also while another process has it open.

        It shows a prefix of the owner's commits, at least those that were done before this call, and does not
        follow on; see `freeze`.

        Args:
            path: the folder of the database.
            log_folder: an existing folder for RocksDB's own log files and, during this call, for links to the
                database's files; best on the same file system.

        Raises:
            StateCorruptedError: the files are damaged.
            StateLockedError: the owner rewrote its files during every attempt; try again.
        """
        _check_not_forked()
        config = StoreConfig()
        deadline = time.monotonic() + _STILL_WITHIN_S
        while True:
            folder = Path(tempfile.mkdtemp(prefix="files-", dir=log_folder))
            manifest = None
            try:
                manifest = freeze(path, folder)
                access = rocksdict.AccessType.read_only(False)
                return cls(path, _open(folder, config, access, log_folder, known_as=path), read_only=True)
            except StateCorruptedError as error:
                if manifest is not None and manifest_in_force(path) == manifest:
                    raise
                if manifest is None and not (path / "CURRENT").exists():
                    raise
                if time.monotonic() >= deadline:
                    raise StateLockedError(
                        f"the database {path} changed under every attempt to read it for {_STILL_WITHIN_S} s"
                    ) from error
            finally:
                shutil.rmtree(folder, ignore_errors=True)

    def write(self, batch: Writes, *, sync: bool) -> None:
        """All of the batch or nothing.

        Raises:
            StateError, StateCorruptedError: the disk is full or fails; the database must be opened anew.
        """
        _check_not_forked()
        options = rocksdict.WriteOptions()
        options.sync = sync
        self._call(self._db.write, batch.raw, options)

    def batch(self) -> Writes:
        return Writes(self._handles)

    def get_each(self, keys: list[bytes]) -> list[bytes | None]:
        """Values in the order of the keys.

        Measured for 100,000 keys of as many, or of many more: in order, one call a key, 0.18 s; not in order
        0.30 s; by rocksdict's call for many 0.21 s; by reading everything 0.06 s. So: in order, and if the
        keys are a good part of what there is, all of it between the first and the last.
        """
        if len(keys) < _MANY:
            few: list[bytes | None] = self._call(_collect, self.get, keys)
            return few
        wanted = sorted(set(keys))
        found: dict[bytes, bytes | None] = {}
        if self.property("estimate-num-keys") <= _DENSE * len(wanted):
            found.update(islice(self.scan(wanted[0], wanted[-1] + b"\0"), _DENSE * len(wanted)))
            if len(found) == _DENSE * len(wanted):  # the estimate was wrong
                last = next(reversed(found))
                wanted = wanted[bisect_right(wanted, last) :]
            else:
                wanted = []
        found.update(zip(wanted, self._call(_collect, self.get, wanted), strict=True))
        return list(map(found.get, keys))

    def read(self, family: str, key: bytes) -> bytes | None:
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
        """Pairs from ``low`` (included) to ``high`` (excluded) as they are at this moment."""
        first, rest = self.scan_first(low, high, reverse=reverse, family=family)
        return chain(first, rest) if rest else iter(first)

    def scan_first(
        self,
        low: bytes | None = None,
        high: bytes | None = None,
        *,
        reverse: bool = False,
        family: str = "data",
    ) -> tuple[list[Pair], Generator[Pair, None, None] | None]:
        """The same in two parts: some pairs, and the iteration over those behind them, if there are any.

        Most scans of a processor are short; they cost half without an iteration that has to be looked after.
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
                    return first, self._pairs(items, low if reverse else None, options)
                first.append((key, cursor.value()))
                step()
            cursor.status()
        except Exception as error:
            raise translate(error, self.path) from error
        return first, None

    def cursor(self) -> Any:
        """An iterator over the data that stands still in time."""
        return self._call(self._families["data"].iter)

    def has_data(self) -> bool:
        """The data family is not empty."""
        return next(self.scan(), None) is not None

    def behind_all(self) -> bytes:
        """A key behind all of the data family's."""
        last = next(self.scan(reverse=True), None)
        return b"" if last is None else last[0] + b"\0"

    def property(self, name: str, family: str = "data") -> int:
        """A RocksDB number, such as ``estimate-num-keys``; 0 = unknown."""
        return int(self._call(self._families[family].property_int_value, f"rocksdb.{name}") or 0)

    def ingest(
        self, keys: pa.BinaryArray, values: pa.BinaryArray, scratch: Path, config: StoreConfig
    ) -> None:
        """Adds rows in the order of their keys, each once; null deletes. They go in as a file: quicker than a
        batch when they are many. On the disk when this returns."""
        writer = rocksdict.SstFileWriter(family_options(config))
        self._call(writer.open, str(scratch))
        for first in range(0, len(keys), _ROWS_AT_ONCE):
            part = slice(first, first + _ROWS_AT_ONCE)
            rows = keys[part].to_pylist(), values[part].to_pylist()
            if not values[part].null_count:
                deque(map(writer.__setitem__, *rows), 0)
                continue
            for key, value in zip(*rows, strict=True):
                if value is None:
                    writer.__delitem__(key)
                else:
                    writer[key] = value
        self._call(writer.finish)
        options = rocksdict.IngestExternalFileOptions()
        options.set_move_files(True)
        self._call(self._families["data"].ingest_external_file, [str(scratch)], options)

    def close(self) -> None:
        """Lets the files go. Iterators and snapshots must have been dropped."""
        if self._db is None or self in _inherited:
            return
        self.get = _closed
        self._handles.clear()
        for name in FAMILIES:
            del self._families[name]  # flushes it: data first
        db, self._db = self._db, None
        try:
            self._call(db.close)
        finally:
            if not self._read_only:
                _open_here.discard(self.key)

    def _pairs(self, items: Any, low: bytes | None, _options: Any) -> Generator[Pair, None, None]:
        """``_options`` are only kept: they hold the bound that ``items`` points to."""
        try:
            if low is None:
                yield from items
            else:
                yield from takewhile(lambda pair: pair[0] >= low, items)
        except Exception as error:
            raise translate(error, self.path) from error

    def _call(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        try:
            return function(*args, **kwargs)
        except Exception as error:
            raise translate(error, self.path) from error


class Writes:
    """What one atomic write will do, in order, over all families."""

    def __init__(self, handles: Mapping[str, Any]) -> None:
        self.raw: Any = rocksdict.WriteBatch(raw_mode=True)
        self._handles = handles

    def put(self, family: str, key: bytes, value: bytes) -> None:
        self.raw.put(key, value, self._handles[family])

    def delete(self, family: str, key: bytes) -> None:
        self.raw.delete(key, self._handles[family])

    def delete_range(self, family: str, low: bytes, high: bytes) -> None:
        self.raw.delete_range(low, high, self._handles[family])

    def rows(self, rows: Mapping[bytes, bytes | None]) -> None:
        """Rows of the data family; None deletes.

        In the order of the keys: sorting 300,000 of them takes 0.14 s and saves 0.5 s of finding their
        places in the memtable, all of it time in which RocksDB is not left to other threads.
        """
        keys = sorted(rows)
        values = list(map(rows.__getitem__, keys))
        self.raw.set_default_column_family(self._handles["data"])
        if None in values:
            kept = []
            for key, value in zip(keys, values, strict=True):
                if value is None:
                    self.raw.delete(key)
                else:
                    kept.append((key, value))
            keys, values = [key for key, _ in kept], [value for _, value in kept]
        deque(map(self.raw.put, keys, values), 0)


def is_open_here(path: Path) -> bool:
    """This process has the database open for writing."""
    return str(path.resolve()) in _open_here


def _open(
    path: Path, config: StoreConfig, access: Any, log_folder: Path | None = None, known_as: Path | None = None
) -> Any:
    global _opened_by
    options = database_options(config)
    if log_folder is not None:
        options.set_db_log_dir(str(log_folder))
        options.set_max_open_files(-1)  # a file that the owner deletes stays readable for us
    families = {name: family_options(config, small=name == "offsets") for name in FAMILIES}
    _opened_by = os.getpid()
    try:
        return rocksdict.Rdict(str(path), options=options, column_families=families, access_type=access)
    except Exception as error:
        if known_as is None:
            raise translate(error, path) from error
        text = str(error).replace(str(path), str(known_as))
        raise translate(Exception(text), known_as) from error


def _check_not_forked() -> None:
    if _opened_by is not None and _opened_by != os.getpid():
        raise StateError(
            f"process {os.getpid()} was forked from {_opened_by}, which had opened a state database; "
            "RocksDB's threads do not survive that, and the first flush would hang",
            fix='start processes by multiprocessing\'s "spawn", or open databases only in the forked ones',
        )


os.register_at_fork(after_in_child=lambda: _inherited.extend(_alive))


def _collect(get: Callable[[bytes], bytes | None], keys: list[bytes]) -> list[bytes | None]:
    return list(map(get, keys))


def _closed(_key: bytes) -> NoReturn:
    raise StoreClosedError("the store is closed")
