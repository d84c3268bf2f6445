"""Iterators over a database, which must be closed before RocksDB can close."""

from __future__ import annotations

import threading
from collections.abc import Generator, Iterator
from typing import Any
from weakref import WeakSet

from kafka_eos_source.errors import StoreClosedError
from kafka_eos_source.state.store.overlay import Pair

#: Rows that a scan takes from a cursor at a time: at first, and at most.
_FIRST_ROWS, _MOST_ROWS = 32, 2048


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


def check_end(cursor: Any, last: bytes, *, reverse: bool, is_quiet: bool) -> None:
    """Raises if a scan ended because a file could not be read, and not because there are no more rows.

    RocksDB's iterators become invalid in both cases. Those that rocksdict iterates over by itself do not tell
    which of them it was.

    Args:
        cursor: another iterator with the bounds of the scan.
        last: key of the last row of the scan.
        reverse: direction of the scan.
        is_quiet: whether nothing was written since the scan began, so that there cannot be more rows now.

    Raises:
        Exception: RocksDB's error, or one like it.
    """
    if reverse:
        cursor.seek_for_prev(last)
    else:
        cursor.seek(last)
    if cursor.valid() and cursor.key() == last:
        cursor.prev() if reverse else cursor.next()
    if not cursor.valid():
        cursor.status()
    elif is_quiet:
        raise OSError("IO error: a scan ended before its last row, because a file could not be read")


class Cursor:
    """A RocksDB iterator over the data of one moment, shared by all scans of a view.

    Each scan takes some rows at a time, and first moves the iterator to where it needs it.
    """

    def __init__(self, cursor: Any) -> None:
        self._cursor = cursor
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
        rows = _FIRST_ROWS
        at = high if reverse else low
        continued = False
        while True:
            pairs = self._backwards(at, low, rows) if reverse else self._forwards(at, high, rows, continued)
            yield from pairs
            if len(pairs) < rows:
                return
            at, continued = pairs[-1][0], True
            rows = min(2 * rows, _MOST_ROWS)

    def close(self) -> None:
        with self._lock:
            self._cursor = None

    def _forwards(self, at: bytes | None, high: bytes | None, rows: int, continued: bool) -> list[Pair]:
        """Returns up to ``rows`` pairs from the key ``at`` on, or after it if ``continued``."""
        pairs: list[Pair] = []
        with self._lock:
            cursor = self._require_open()
            if at is None:
                cursor.seek_to_first()
            else:
                cursor.seek(at + b"\0" if continued else at)
            while len(pairs) < rows and cursor.valid():
                key = cursor.key()
                if high is not None and key >= high:
                    break
                pairs.append((key, cursor.value()))
                cursor.next()
            if not cursor.valid():
                cursor.status()
        return pairs

    def _backwards(self, at: bytes | None, low: bytes | None, rows: int) -> list[Pair]:
        """Returns up to ``rows`` pairs before the key ``at``, from the last to the first."""
        pairs: list[Pair] = []
        with self._lock:
            cursor = self._require_open()
            if at is None:
                cursor.seek_to_last()
            else:
                cursor.seek_for_prev(at)
                if cursor.valid() and cursor.key() == at:
                    cursor.prev()
            while len(pairs) < rows and cursor.valid():
                key = cursor.key()
                if low is not None and key < low:
                    break
                pairs.append((key, cursor.value()))
                cursor.prev()
            if not cursor.valid():
                cursor.status()
        return pairs

    def _require_open(self) -> Any:
        if self._cursor is None:
            raise StoreClosedError("the view is closed.")
        return self._cursor
