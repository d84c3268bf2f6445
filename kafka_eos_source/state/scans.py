"""Iterators that can be taken away: RocksDB closes nothing while one lives."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from typing import Any, NoReturn
from weakref import WeakSet

from kafka_eos_source.errors import StoreClosedError
from kafka_eos_source.state.overlay import Pair


class Scan(Iterator[Pair]):
    """Pairs of a store or view as they were when the scan began; later writes do not show.

    Raises:
        StoreClosedError: by the next step, once the store or view is closed.
    """

    def __init__(self, pairs: Iterator[Pair], *bases: Iterator[Any]) -> None:
        self._pairs = pairs
        self._bases = bases

    def __iter__(self) -> Scan:
        return self

    def __next__(self) -> Pair:
        return next(self._pairs)

    def close(self) -> None:
        """Lets the database's iterator go. Idempotent."""
        pairs, self._pairs = self._pairs, _Refused()
        bases, self._bases = self._bases, ()
        for iterator in (pairs, *bases):
            with suppress(AttributeError):  # not a generator: holds nothing
                iterator.close()  # type: ignore[attr-defined]


class Scans:
    """The scans of one store or view that are still in somebody's hands."""

    def __init__(self) -> None:
        self._open: WeakSet[Scan] = WeakSet()

    def __len__(self) -> int:
        return len(self._open)

    def track(self, pairs: Iterator[Pair], *bases: Iterator[Any]) -> Scan:
        """A scan over ``pairs``, which draw from ``bases``."""
        scan = Scan(pairs, *bases)
        self._open.add(scan)
        return scan

    def close(self) -> None:
        for scan in list(self._open):
            scan.close()
        self._open.clear()


class _Refused(Iterator[Pair]):
    def __next__(self) -> NoReturn:
        raise StoreClosedError("the store or view that this scan reads is closed")
