"""Views: reading a store from outside its owner, as of one moment (KIP-892, KIP-796).

*read_committed*: the data of the last commit before the view was created, as long as the view is open.
*read_uncommitted*: that data, overlaid by what the owner has staged at the time of each call, which may be
rolled back later.
"""

from __future__ import annotations

import threading
from abc import abstractmethod
from collections.abc import Callable, Mapping
from types import TracebackType
from typing import TypeVar

import pyarrow as pa

from kafka_eos_source.errors import NotUpToBoundError
from kafka_eos_source.model import TopicPartition
from kafka_eos_source.state.store.overlay import Missing, Overlay, merge
from kafka_eos_source.state.store.reads import Reads
from kafka_eos_source.state.store.records import Offsets, StoreMetadata
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
            ViewInvalidatedError: if the owner rolled back what an uncommitted view showed.
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


class UncommittedView(StateView):
    """The data of one commit, overlaid by what the owner has staged now.

    Args:
        overlay: the staged writes.
        check_valid: raises `ViewInvalidatedError` once the owner rolled back what this view showed. After a
            commit the view stays valid, because what it showed is committed then; unless writes were on disk,
            which the commit removes.
        staging: the lock that the owner holds while it changes the overlay.
    """

    def __init__(
        self,
        metadata: StoreMetadata,
        cursor: Cursor,
        overlay: Overlay,
        check_valid: Callable[[], None],
        staging: threading.RLock,
    ) -> None:
        super().__init__(metadata, cursor)
        self._overlay = overlay
        self._check_valid = check_valid
        self._staging = staging

    def get(self, key: bytes) -> bytes | None:
        self._check_valid()
        with self._staging:
            value = self._overlay.get(key)
        return self._cursor.get(key) if isinstance(value, Missing) else value

    def range(self, low: bytes | None = None, high: bytes | None = None, *, reverse: bool = False) -> Scan:
        self._check_valid()
        if low is not None and high is not None and low >= high:
            return self._scans.track(iter(()))
        with self._staging:
            staged = self._overlay.scan_from_other_thread(low, high, reverse=reverse)
            ranges = self._overlay.ranges
        base = self._cursor.scan(low, high, reverse=reverse)
        return self._scans.track(merge(staged, base, ranges, reverse=reverse))


def check_bound(position: Offsets, at_least: Mapping[TopicPartition, int] | None) -> None:
    """Checks that state reflects the input up to the offsets that a reader asks for (KIP-796).

    Args:
        position: largest input offset that the state reflects, by partition.
        at_least: input offset that it must reflect, by partition; None = no bound.

    Raises:
        NotUpToBoundError: if it does not reflect the offset of some partition yet.
    """
    behind = {tp: at for tp, at in (at_least or {}).items() if position.get(tp, -1) < at}
    if behind:
        text = ", ".join(
            f"{tp} at {position.get(tp, 'nothing')}, asked for {at}" for tp, at in behind.items()
        )
        raise NotUpToBoundError(
            f"the state does not reflect the requested input yet: {text}.",
            fix="ask again after the next batch.",
        )
