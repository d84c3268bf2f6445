"""Views: reading a store from outside its owner, as of one moment (KIP-892).

All views show committed data. KIP-892's *read_uncommitted* has no counterpart: what is staged lives in the
memory of a task, which ends with its micro-batch, and no other code runs in that process for users.
"""

from __future__ import annotations

import threading
from abc import abstractmethod
from types import TracebackType
from typing import TypeVar

import pyarrow as pa

from kafka_eos_source.state.store.overlay import Missing, Overlay, merge
from kafka_eos_source.state.store.reads import Reads
from kafka_eos_source.state.store.records import StoreMetadata
from kafka_eos_source.state.store.scans import Cursor, Scan, Scans

_View = TypeVar("_View", bound="StateView")


class StateView(Reads):
    """Read-only access to a store as of one moment; a context manager.

    While a view is open, RocksDB cannot free the disk space of what it shows.
    """

    def __init__(self, metadata: StoreMetadata, cursor: Cursor) -> None:
        self._metadata = metadata
        self._cursor = cursor
        self._scans = Scans()
        self._lock = threading.Lock()

    @abstractmethod
    def get(self, key: bytes) -> bytes | None:
        """Returns the value of a key, or None.

        Raises:
            StoreClosedError: if the view or its store is closed.
        """

    def get_many(self, keys: pa.BinaryArray) -> pa.BinaryArray:
        """Returns the value of each key, null for a missing key."""
        return pa.array([self.get(key) for key in keys.to_pylist()], pa.binary())

    def _committed(self) -> StoreMetadata:
        return self._metadata

    def close(self) -> None:
        """Closes the view and its scans. May be called again."""
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
    """The data of one commit, unaffected by later writes of the owner."""

    def get(self, key: bytes) -> bytes | None:
        return self._cursor.get(key)

    def range(self, low: bytes | None = None, high: bytes | None = None, *, reverse: bool = False) -> Scan:
        if low is not None and high is not None and low >= high:
            return self._scans.track(iter(()))
        return self._scans.track(self._cursor.scan(low, high, reverse=reverse))


class PromotedView(StateView):
    """The data of one commit, overlaid by the changes of an attempt that the commit token names.

    Only one thread may read it.

    Args:
        overlay: the changes.
    """

    def __init__(self, metadata: StoreMetadata, cursor: Cursor, overlay: Overlay) -> None:
        super().__init__(metadata, cursor)
        self._overlay = overlay

    def get(self, key: bytes) -> bytes | None:
        value = self._overlay.get(key)
        return self._cursor.get(key) if isinstance(value, Missing) else value

    def range(self, low: bytes | None = None, high: bytes | None = None, *, reverse: bool = False) -> Scan:
        if low is not None and high is not None and low >= high:
            return self._scans.track(iter(()))
        staged = self._overlay.scan(low, high, reverse=reverse)
        base = self._cursor.scan(low, high, reverse=reverse)
        return self._scans.track(merge(staged, base, self._overlay.ranges, reverse=reverse))
