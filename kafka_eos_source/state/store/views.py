"""Reading a store from outside of its owner: views of one moment, committed or not (KIP-892, KIP-796).

*read_committed*: the data of the last commit when the view was made, for as long as the view lives.
*read_uncommitted*: that, and over it what the owner has staged at the time of each call, which may be rolled
back later.
"""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from types import TracebackType
from typing import Any, TypeVar

import pyarrow as pa

from kafka_eos_source.errors import NotUpToBoundError, StoreClosedError
from kafka_eos_source.model import TopicPartition
from kafka_eos_source.state.layout import upper_bound
from kafka_eos_source.state.model import BatchRecord
from kafka_eos_source.state.store.overlay import MISSING, Missing, Overlay, Pair, merge
from kafka_eos_source.state.store.records import Committed, Offsets
from kafka_eos_source.state.store.scans import Scan, Scans

_View = TypeVar("_View", bound="StateView")

#: Rows that a view takes from its iterator at a time: at first, and at most.
_FIRST_ROWS, _MOST_ROWS = 32, 2048


class Cursor:
    """A RocksDB iterator, which stands still in time, shared by the scans and threads of one view.

    Each takes some rows at a time and puts it where it needs it.
    """

    def __init__(self, cursor: Any) -> None:
        self._cursor = cursor
        self._lock = threading.Lock()

    def get(self, key: bytes) -> bytes | None:
        with self._lock:
            cursor = self._open()
            cursor.seek(key)
            value: bytes | None = cursor.value() if cursor.valid() and cursor.key() == key else None
            return value

    def scan(self, low: bytes | None, high: bytes | None, *, reverse: bool) -> Iterator[Pair]:
        rows = _FIRST_ROWS
        at = high if reverse else low
        again = False
        while True:
            taken = self._backwards(at, low, rows) if reverse else self._forwards(at, high, rows, again)
            yield from taken
            if len(taken) < rows:
                return
            at, again = taken[-1][0], True
            rows = min(2 * rows, _MOST_ROWS)

    def close(self) -> None:
        with self._lock:
            self._cursor = None

    def _forwards(self, at: bytes | None, high: bytes | None, rows: int, again: bool) -> list[Pair]:
        taken: list[Pair] = []
        with self._lock:
            cursor = self._open()
            if at is None:
                cursor.seek_to_first()
            else:
                cursor.seek(at + b"\0" if again else at)
            while len(taken) < rows and cursor.valid():
                key = cursor.key()
                if high is not None and key >= high:
                    break
                taken.append((key, cursor.value()))
                cursor.next()
        return taken

    def _backwards(self, at: bytes | None, low: bytes | None, rows: int) -> list[Pair]:
        """From the last key before ``at`` down."""
        taken: list[Pair] = []
        with self._lock:
            cursor = self._open()
            if at is None:
                cursor.seek_to_last()
            else:
                cursor.seek_for_prev(at)
                if cursor.valid() and cursor.key() == at:
                    cursor.prev()
            while len(taken) < rows and cursor.valid():
                key = cursor.key()
                if low is not None and key < low:
                    break
                taken.append((key, cursor.value()))
                cursor.prev()
        return taken

    def _open(self) -> Any:
        if self._cursor is None:
            raise StoreClosedError("the view is closed")
        return self._cursor


class StateView(ABC):
    """Read-only access to a store. A context manager; keeps disk space from being freed until closed."""

    def __init__(self, committed: Committed, cursor: Cursor) -> None:
        self._committed = committed
        self._cursor = cursor
        self._scans = Scans()
        self._lock = threading.Lock()

    @abstractmethod
    def get(self, key: bytes) -> bytes | None:
        """Raises: StoreClosedError: the view, or its store, is closed."""

    @abstractmethod
    def _pairs(self, low: bytes | None, high: bytes | None, *, reverse: bool) -> Scan: ...

    def get_many(self, keys: pa.BinaryArray) -> pa.BinaryArray:
        """The value of each key, null where there is none."""
        return pa.array([self.get(key) for key in keys.to_pylist()], pa.binary())

    def range(self, low: bytes | None = None, high: bytes | None = None, *, reverse: bool = False) -> Scan:
        """Pairs in the order of keys; ``low`` included, ``high`` excluded, None = unbounded."""
        return self._pairs(low, high, reverse=reverse)

    def reverse_range(self, low: bytes | None = None, high: bytes | None = None) -> Scan:
        return self._pairs(low, high, reverse=True)

    def prefix_scan(self, prefix: bytes) -> Scan:
        return self._pairs(prefix, upper_bound(prefix), reverse=False)

    def all(self) -> Scan:
        return self._pairs(None, None, reverse=False)

    def committed_offset(self, tp: TopicPartition) -> int | None:
        """Offset of the last changelog record in this view; None = none."""
        return last_offset(self._committed.offsets, tp)

    def next_offset(self, tp: TopicPartition) -> int | None:
        """End (excluded) of the changelog that this view holds; None = not recorded."""
        return self._committed.offsets.get(tp)

    def last_batch(self) -> BatchRecord | None:
        """The micro-batch whose state this is."""
        return self._committed.batch

    def position(self) -> Offsets:
        """Largest input offset of each partition that this view reflects."""
        return self._committed.position

    def close(self) -> None:
        """Idempotent."""
        with self._lock:
            self._scans.close()
            self._cursor.close()

    def __enter__(self: _View) -> _View:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


class CommittedView(StateView):
    """One generation of committed data, whatever the owner does meanwhile."""

    def get(self, key: bytes) -> bytes | None:
        return self._cursor.get(key)

    def _pairs(self, low: bytes | None, high: bytes | None, *, reverse: bool) -> Scan:
        if low is not None and high is not None and low >= high:
            return self._scans.track(iter(()))
        return self._scans.track(self._cursor.scan(low, high, reverse=reverse))


class UncommittedView(StateView):
    """Committed data of one moment, and over it what is staged now.

    Args:
        overlay: what is staged now.
        still_valid: raises once the owner rolled back what this view showed. After a commit it still is what
        it was.
    """

    def __init__(
        self,
        committed: Committed,
        cursor: Cursor,
        overlay: Overlay,
        position: Callable[[], Offsets],
        still_valid: Callable[[], None],
        staging: threading.RLock,
    ) -> None:
        super().__init__(committed, cursor)
        self._overlay = overlay
        self._position = position
        self._still_valid = still_valid
        self._staging = staging

    def get(self, key: bytes) -> bytes | None:
        self._still_valid()
        with self._staging:
            value = self._overlay.rows.get(key, MISSING)
            if not isinstance(value, Missing):
                return value
            if self._overlay.ranges.covers(key):
                return None
        return self._cursor.get(key)

    def _pairs(self, low: bytes | None, high: bytes | None, *, reverse: bool) -> Scan:
        self._still_valid()
        if low is not None and high is not None and low >= high:
            return self._scans.track(iter(()))
        with self._staging:
            staged = self._overlay.foreign_slice(low, high, reverse=reverse)
            ranges = self._overlay.ranges
        base = self._cursor.scan(low, high, reverse=reverse)
        return self._scans.track(merge(staged, base, ranges, reverse=reverse))

    def position(self) -> Offsets:
        return self._position()


def last_offset(offsets: Offsets, tp: TopicPartition) -> int | None:
    """The offset of the last record before the recorded end; None = there is none."""
    end = offsets.get(tp)
    return end - 1 if end else None


def check_bound(position: Offsets, at_least: Mapping[TopicPartition, int] | None) -> None:
    """KIP-796's position bound.

    Raises:
        NotUpToBoundError: an input partition is not in the state up to its offset.
    """
    behind = {tp: at for tp, at in (at_least or {}).items() if position.get(tp, -1) < at}
    if behind:
        text = ", ".join(
            f"{tp.topic}-{tp.partition} at {position.get(tp, 'nothing')}, asked for {at}"
            for tp, at in behind.items()
        )
        raise NotUpToBoundError(f"the state is not there yet: {text}", fix="ask again after the next batch")
