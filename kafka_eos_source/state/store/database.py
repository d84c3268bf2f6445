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
- RocksDB hangs at a log with a certain bit changed; see `files.check_logs`.
- RocksDB does not notice that a log ends too early if it ends between two records; see `WriteChain`.
- With RocksDB's own rules, nearly every task would compact in vain; see `_await_compaction`.
"""

from __future__ import annotations

import logging
import os
import struct
from bisect import bisect_right
from collections.abc import Callable, Generator, Iterable, Iterator
from contextlib import suppress
from itertools import chain, islice
from pathlib import Path
from typing import Any, NoReturn
from weakref import WeakSet

import rocksdict

from kafka_eos_source.errors import KafkaEosError, StateCorruptedError, StateError, StoreClosedError
from kafka_eos_source.runtime import failpoints
from kafka_eos_source.runtime.deadline import Deadline, Pauses
from kafka_eos_source.runtime.file_systems import fsync
from kafka_eos_source.state.store import files
from kafka_eos_source.state.store.files import RESTORE_FIX, replace_text
from kafka_eos_source.state.store.overlay import Pair
from kafka_eos_source.state.store.rocksdb import (
    MANY_KEYS,
    PAIRS_PER_LOOKUP,
    Cursor,
    Get,
    RowLists,
    StoreConfig,
    WriteBatch,
    call,
    ingest,
    look_up,
    property_of,
    remove_options_files,
    translate,
)

#: Column family and range of the keys.
FAMILY, LOW, HIGH = "offsets", b"write/", b"write0"

_FIRST = LOW + b"first"
_NUMBER = struct.Struct(">Q8s")
_VALUE = b"\x01"
_LEAST = "least-write"


class WriteChain:
    """Numbers the writes of one open database, to show after a crash whether the log lost one in between.

    A log that ends exactly where a record ends looks complete. RocksDB then continues with the next log, as
    if the lost writes had never been made: after a power failure, or on a bad disk, a database could miss one
    commit and hold the next. So each write adds a key with its own number, and deletes the key of the write
    before::

        write/<number><session>    number in 8 bytes, big endian, and 8 random bytes of the open database
        write/first                written with the first number, and never deleted

    Without a loss there is exactly one number. If writes are lost, nobody deletes the key of the last write
    before them; if the first log is lost as a whole, ``write/first`` is missing. The random bytes tell
    numbers apart that were given again after the end of a log was lost. The keys are in the column family
    ``offsets``.

    Some tables hold data before the metadata that belongs to it is in a table too: sorted files of a large
    batch, and those that `Database.close` writes for one family after the other. If the log lost that
    metadata, the data would be ahead of it. So before such a table is written, the owner syncs the log, and
    the file ``least-write`` in the database's folder gets the number of the last write. A database that holds
    only earlier writes is damaged.

    Args:
        path: folder of the database.
        keys: keys of the database from `LOW` to `HIGH`.
        least: what `least_write` returned, for a reader before it read the keys.

    Raises:
        StateCorruptedError: if writes were lost.
    """

    def __init__(self, path: Path, keys: Iterable[bytes], least: int) -> None:
        found = set(keys)
        has_first = _FIRST in found
        found.discard(_FIRST)
        numbers = sorted(_number(path, key) for key in found)
        if len(numbers) > 1:
            raise _lost(path, f"writes after number {numbers[0]}, although it holds number {numbers[-1]}")
        if len(numbers) != has_first:
            raise _lost(path, "its first writes" if numbers else "all numbers of its writes")
        self._last = numbers[0] if numbers else 0
        self._last_key = found.pop() if found else b""
        if self._last < least:
            raise _lost(
                path, f"writes after number {self._last}, although tables hold data of number {least}"
            )
        self._path = path
        self._least = least
        self._session = os.urandom(8)

    def add_to(self, batch: WriteBatch) -> None:
        """Numbers a batch. Call `written` once it is written."""
        batch.put(FAMILY, self._next_key(), _VALUE)
        batch.delete(FAMILY, self._last_key) if self._last else batch.put(FAMILY, _FIRST, _VALUE)

    def written(self) -> None:
        """Counts the batch that `add_to` numbered last."""
        self._last_key = self._next_key()
        self._last += 1

    @property
    def has_unrequired_writes(self) -> bool:
        """Whether there were writes since `require` was called last."""
        return self._least < self._last

    def require(self) -> None:
        """Makes the loss of any write so far damage from now on. The requirement survives a power failure.

        All writes must be on disk already. Otherwise a power failure that cuts some of them off would look
        like damage, although no table depends on them yet.

        Raises:
            OSError: if the disk is full or fails.
        """
        replace_text(self._path / _LEAST, f"{self._last}\n", durable=True)
        self._least = self._last

    def _next_key(self) -> bytes:
        return LOW + _NUMBER.pack(self._last + 1, self._session)


def least_write(path: Path) -> int:
    """Returns the number of a write that the database in a folder must hold; 0 = none.

    A reader calls this before it reads the database's files, because the owner may require more meanwhile.

    Raises:
        StateCorruptedError: if the file has no number.
    """
    try:
        text = (path / _LEAST).read_bytes()
    except FileNotFoundError:
        return 0
    if not text.strip().isdigit():
        raise StateCorruptedError(
            f"the file {path / _LEAST} contains {text[:40]!r}; expected a number.", fix=RESTORE_FIX
        )
    return int(text)


def _lost(path: Path, what: str) -> StateCorruptedError:
    return StateCorruptedError(
        f"the database {path} lost {what}: a log is missing or ends too early.", fix=RESTORE_FIX
    )


def _number(path: Path, key: bytes) -> int:
    try:
        number, _session = _NUMBER.unpack(key.removeprefix(LOW))
    except struct.error as error:
        raise StateCorruptedError(
            f"the database {path} has a damaged number of a write: {key!r}.", fix=RESTORE_FIX
        ) from error
    return int(number)


#: Column families in the order in which `close` drops, and so flushes, them; see the module's docstring.
FAMILIES = ("data", "pending", "offsets")

#: `close` leaves the changes in the write-ahead log while all log files together have at most this many
#: bytes, and their number is at most this. The next open reads them.
_KEPT_LOG_BYTES, _KEPT_LOGS = 256 << 10, 16
#: What RocksDB answers to a flush after `cancel_all_background`.
_SHUTTING_DOWN = "Shutdown in progress"


#: Number of tables at level 0 from which on the data family is compacted. A lookup checks the Bloom filter of
#: each of them, which takes 0.2 µs.
DUE_TABLES = 8
#: How long `Database.close` waits for a due compaction to begin. RocksDB begins none after a failed write.
_BEGIN_SECONDS = 1.0
#: How often it looks whether a compaction has ended: first, and later on. RocksDB does not tell it.
_FIRST_LOOK_SECONDS, _LOOK_SECONDS = 0.001, 0.02
#: File of a database in which a compaction found damage; it has the text of the error.
_DAMAGE = "damage"

_log = logging.getLogger(__name__)

_alive: WeakSet[Database] = WeakSet()
#: Databases of the parent of a forked process. They are never dropped, because the flush would hang.
_inherited: list[Database] = []


class Database:
    """An open database. Its methods raise errors of this package (`rocksdb.translate`).

    Args:
        path: folder of the database.
        db: the open database of rocksdict.
        read_only: whether nothing may be written.
        least: the number of the write that the database must hold (`WriteChain`); None = as its folder says.
        owner: name under which `ownership` counts the database as open; "" if this process does not own it.

    Attributes:
        path: folder of the database.
        owner_file: file that says that this process has the database open; None = there is none.
        has_unsynced_logs: whether earlier processes may have left logs that are not on disk (`sync_logs`).
        get: ``get(key) -> value | None`` of the data family. It is rocksdict's own method, for speed, so the
            caller translates its errors.
    """

    get: Get

    def __init__(
        self, path: Path, db: Any, *, read_only: bool = False, least: int | None = None, owner: str = ""
    ) -> None:
        self.path = path
        self._db: Any = db
        self._read_only = read_only
        self._compacts = False
        self._owner = ""
        self.owner_file: Path | None = None
        self.has_unsynced_logs = False
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
        self._owner = owner

    def write(self, batch: WriteBatch, *, sync: bool) -> None:
        """Writes the whole batch or nothing.

        Args:
            batch: the changes. Do not use it again.
            sync: wait until the write-ahead log is on disk.

        Raises:
            StateError, StateCorruptedError: if the disk is full or fails. Close the database then; only
                opening it again shows what was written.
        """
        files.check_not_forked()
        options = rocksdict.WriteOptions()
        options.sync = sync
        assert self._chain is not None
        self._chain.add_to(batch)
        self._call(self._db.write, batch.raw, options)
        self._chain.written()
        self._compact_if_due()

    def require_writes(self) -> None:
        """Makes the loss of any write so far damage from now on.

        Call this before tables are written that hold data ahead of its metadata; see `WriteChain`. The
        write-ahead log is synced first: a power failure must not cut off a write that is required already.

        Raises:
            StateError: if the disk is full or fails.
        """
        files.check_not_forked()
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
        try:
            for name in os.listdir(self.path):
                if name.endswith(".log"):
                    with suppress(FileNotFoundError):  # a flush deleted it
                        fsync(str(self.path / name))
        except OSError as error:
            raise translate(error, self.path) from error

    def new_batch(self) -> WriteBatch:
        """Returns an empty batch for `write`."""
        return WriteBatch(self._handles)

    def get_many(self, keys: list[bytes]) -> list[bytes | None]:
        """Returns the values in the order of the keys; None for a missing key.

        Many keys are looked up in order. If they are a large part of the data, everything between the first
        and the last is scanned instead, which takes 0.6 µs a pair.
        """
        if len(keys) < MANY_KEYS:
            return look_up(self.path, self.get, keys)
        wanted = sorted(set(keys))
        found: dict[bytes, bytes | None] = {}
        most = PAIRS_PER_LOOKUP * len(wanted)
        if self.property("estimate-num-keys") <= most:
            found.update(islice(self.scan(wanted[0], wanted[-1] + b"\0"), most))
            if len(found) == most:  # the estimate was too low: look up the rest
                last = next(reversed(found))
                wanted = wanted[bisect_right(wanted, last) :]
            else:
                wanted = []
        found.update(zip(wanted, look_up(self.path, self.get, wanted), strict=True))
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
            cursor = Cursor(self._families[family].iter(options), options)
            first, is_end = cursor.first_rows(low, high, reverse=reverse)
        except Exception as error:
            raise translate(error, self.path) from error
        if is_end:
            return first, None
        at = first[-1][0]
        items = self._call(
            self._families[family].items,
            backwards=reverse,
            from_key=at if reverse else at + b"\0",
            read_opt=options,
        )
        return first, self._rest(items, cursor, at, low, high, reverse)

    def _rest(
        self, items: Any, cursor: Cursor, at: bytes, low: bytes | None, high: bytes | None, reverse: bool
    ) -> Generator[Pair, None, None]:
        """Yields the pairs of a scan that follow the key ``at``.

        ``items`` is faster than the cursor. But it also ends if a file cannot be read. So the cursor, which
        raises an error then, has the last word.
        """
        try:
            for pair in items:
                if pair[0] == at:  # with which a reverse iteration begins
                    continue
                if reverse and low is not None and pair[0] < low:
                    return
                at = pair[0]
                yield pair
            yield from cursor.rows_after(at, low, high, reverse=reverse)
        except Exception as error:
            raise translate(error, self.path) from error
        finally:
            cursor.close()

    def cursor(self) -> Cursor:
        """Returns an iterator over the data of this moment. Later writes do not show."""
        return Cursor(self._call(self._families["data"].iter))

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
        return property_of(self._families[family], self.path, name)

    def ingest(self, parts: Iterable[RowLists], scratch: Path, config: StoreConfig) -> None:
        """Adds rows to the data family as a sorted file.

        For many rows this is faster than a batch. The rows are on disk when the call returns.

        Args:
            parts: keys and values, in the order of the keys, without repetition.
            scratch: path of the file; one that a dead process left is replaced.
            config: of the store.
        """
        files.check_not_forked()
        ingest(self._families["data"], self.path, scratch, parts, config)
        self._compact_if_due()

    # ------------------------------------------------------------------ compactions

    # A task has its store open for a moment only. With RocksDB's own rules, nearly every task began a
    # compaction of many tables, closing the store aborted it, and the next task began it again;
    # ``docs/state-store.md`` has measurements. Therefore compactions are off when a database is opened. A
    # write switches them on if level 0 has many tables, and closing the database waits for the one that runs.
    # `rocksdb.data_options` keeps them short.
    #
    #   off ──a write finds many tables at level 0──▶ on ──close──▶ off ──the running one ends──▶ closed
    #
    # If a compaction fails, its task succeeds all the same; see `_report_failed_compaction`.

    def _compact_if_due(self) -> None:
        if not self._compacts and self.property("num-files-at-level0") >= DUE_TABLES:
            self._compacts = True
            self._switch_compactions(on=True)

    def _switch_compactions(self, *, on: bool) -> None:
        """Says whether RocksDB may begin compactions of the data family. A failure is logged."""
        value = "false" if on else "true"
        try:
            self._call(self._families["data"].set_options, {"disable_auto_compactions": value})
        except KafkaEosError as error:
            # Whoever writes next gets an error, too, if the disk is full or has failed. The log must not keep
            # the error itself, because its traceback would keep the database open.
            text = str(error)
            _log.warning("the compactions of %s could not be switched on or off: %s", self.path, text)
        remove_options_files(self.path)

    def _await_compaction(self) -> None:
        """Waits until the running compaction has ended, and lets no other one begin.

        So a task waits for one compaction at most, and none is done in vain. There is no time limit: a
        compaction that is aborted whenever the disk is slow would never end.
        """
        pauses = Pauses(Deadline.after_seconds(_BEGIN_SECONDS), _FIRST_LOOK_SECONDS, _LOOK_SECONDS)
        while self.property("compaction-pending") and not self._is_compacting():
            if self._has_background_errors() or pauses.expired:
                break
            pauses.wait()
        self._switch_compactions(on=False)
        failpoints.reach("state.within_compaction")
        pauses = Pauses(None, _FIRST_LOOK_SECONDS, _LOOK_SECONDS)
        while self._is_compacting():
            pauses.wait()
        if self._has_background_errors():
            self._report_failed_compaction()

    def _is_compacting(self) -> bool:
        """Returns whether a compaction of any column family runs."""
        return self.property("num-running-compactions") > 0

    def _has_background_errors(self) -> bool:
        """Returns whether a compaction or a flush of any column family has failed since this open."""
        # RocksDB counts them in the family "default"
        return property_of(self._db, self.path, "background-errors") > 0

    def _report_failed_compaction(self) -> None:
        """Logs why a compaction failed. If a table is damaged, the next open raises an error.

        The batch is in the log, so its task succeeds. But no later task could compact a damaged table either.
        """
        text = "the disk may be full; RocksDB's file LOG has the reason"
        try:
            # After some errors RocksDB accepts no write. A failure that may pass, such as a full disk, need
            # not be one of them.
            self._call(self._db.write, rocksdict.WriteBatch(raw_mode=True), rocksdict.WriteOptions())
        except KafkaEosError as error:
            text = error.message
            if isinstance(error, StateCorruptedError):
                with suppress(OSError):  # the disk is full; a later task finds the damage again
                    replace_text(self.path / _DAMAGE, text)
        _log.warning("a compaction of %s failed, and a later task repeats it: %s", self.path, text)

    # ------------------------------------------------------------------ closing

    def close(self) -> None:
        """Closes the database; everything that was written is on disk, at least in the write-ahead log.

        The caller has dropped all iterators.
        """
        if self._db is None or self in _inherited:
            return
        self.get = _closed
        self._handles.clear()
        try:
            if self._compacts:
                self._await_compaction()
        finally:  # somebody may interrupt the wait
            self._release()

    def _release(self) -> None:
        """Closes the database in the way that `close` describes, without waiting for compactions."""
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
            if self._owner:
                files.closed(self._owner)

    def _may_flush(self) -> bool:
        """Returns whether `close` should write tables, and may: what is written is required from then on."""
        if self._chain is None or self.has_unsynced_logs or self._log_is_short():
            return False
        if self._has_background_errors():
            return False  # a flush would fail, too
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

    def _call(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        return call(self.path, function, *args, **kwargs)


os.register_at_fork(after_in_child=lambda: _inherited.extend(_alive))


def check_undamaged(path: Path) -> None:
    """Checks that no compaction has found damage in the database of this folder.

    Raises:
        StateCorruptedError: if one has.
    """
    file = path / _DAMAGE
    if file.exists():
        raise StateCorruptedError(
            f"a compaction found damage: {file.read_text(errors='replace')}", fix=RESTORE_FIX
        )


def _closed(_key: object) -> NoReturn:
    raise StoreClosedError("the store is closed.")
