"""Iterators that can be taken away: RocksDB closes nothing while one lives."""

from __future__ import annotations

from collections.abc import Generator, Iterator
from weakref import WeakSet

from kafka_eos_source.errors import StoreClosedError
from kafka_eos_source.state.store.overlay import Pair


class Scan(Iterator[Pair]):
    """Pairs of a store or view as they were when the scan began; later writes do not show.

    Raises:
        StoreClosedError: by the next step, once the store or view is closed.
    """

    def __init__(self, scans: Scans, pairs: Iterator[Pair], base: Generator[Pair, None, None] | None) -> None:
        self._scans = scans
        self._pairs = pairs
        self._base = base

    def __iter__(self) -> Scan:
        return self

    def __next__(self) -> Pair:
        if self._scans.closed:
            raise StoreClosedError("the store or view that this scan reads is closed")
        return next(self._pairs)

    def close(self) -> None:
        """Lets the database's iterator go. Idempotent."""
        self._pairs = iter(())
        base, self._base = self._base, None
        if base is not None:
            base.close()


class Scans:
    """The scans of one store or view that are still in somebody's hands and hold an iterator."""

    def __init__(self) -> None:
        self._open: WeakSet[Scan] = WeakSet()
        self.closed = False

    def __len__(self) -> int:
        return len(self._open)

    def track(self, pairs: Iterator[Pair], base: Generator[Pair, None, None] | None = None) -> Scan:
        """A scan over ``pairs``, which draw from ``base``, the database's iteration, if that is not None."""
        scan = Scan(self, pairs, base)
        if base is not None:
            self._open.add(scan)
        return scan

    def close(self) -> None:
        """For good."""
        self.closed = True
        for scan in list(self._open):
            scan.close()
        self._open.clear()
