"""Staged writes of a transaction that only their owner sees (KIP-892).

They are a dict in front of the database, and a set of deleted key ranges. Kafka Streams chose the same after
trying RocksDB's indexed batch (KAFKA-20490), because a plain sorted map is faster to read and to write.

*Size*: Python keeps each key and each value as an object, and the commit copies all of them into one batch. A
staged row of 116 bytes was measured to take three times that. So an entry counts as `ENTRY_BYTES` plus twice
its payload, and an overwrite counts what it adds.

*Ranges*: deleting a range drops the keys that were staged in it and hides the keys of the database. Keys that
are staged afterwards are visible again.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Mapping
from itertools import repeat

from kafka_eos_source.state.store.sorted_keys import SortedKeys

#: Memory of a staged entry besides its payload: the headers of two objects and a slot of a dict.
ENTRY_BYTES = 120

Pair = tuple[bytes, bytes]


class Missing:
    """Type of `MISSING`: no write of the key is staged. A staged delete is None."""


MISSING = Missing()


class Ranges:
    """Deleted key ranges: disjoint and in order.

    The object is immutable, so that a reader may keep a reference.

    Args:
        spans: pairs of a low key (included) and a high key (excluded; None = unbounded).
    """

    def __init__(self, spans: tuple[tuple[bytes, bytes | None], ...] = ()) -> None:
        self.spans = spans
        self._lows = [low for low, _ in spans]

    def __bool__(self) -> bool:
        return bool(self.spans)

    def covers(self, key: bytes) -> bool:
        """Returns whether a range contains the key."""
        at = bisect_right(self._lows, key) - 1
        if at < 0:
            return False
        high = self.spans[at][1]
        return high is None or key < high

    def plus(self, low: bytes, high: bytes | None) -> Ranges:
        """Returns these ranges and another one; joins ranges that touch."""
        spans: list[tuple[bytes, bytes | None]] = []
        for other_low, other_high in self.spans:
            if (other_high is not None and other_high < low) or (high is not None and high < other_low):
                spans.append((other_low, other_high))
            else:
                low = min(low, other_low)
                high = None if high is None or other_high is None else max(high, other_high)
        spans.append((low, high))
        return Ranges(tuple(sorted(spans, key=lambda span: span[0])))


class Overlay:
    """Staged writes of one transaction.

    Only the owner writes; other threads may read `rows` and `ranges`.

    Attributes:
        rows: the last staged value of each key; None = deleted.
        ranges: deleted ranges, which apply before `rows`.
        bytes: memory that the writes take, as the module describes.
    """

    def __init__(self) -> None:
        self.rows: dict[bytes, bytes | None] = {}
        self.ranges = Ranges()
        self.bytes = 0
        self._sorted = SortedKeys()

    def __len__(self) -> int:
        return len(self.rows)

    def put(self, key: bytes, value: bytes | None) -> None:
        """Stages one write; a value of None deletes."""
        rows = self.rows
        size = 0 if value is None else 2 * len(value)
        old = rows.get(key, MISSING)
        rows[key] = value
        if isinstance(old, Missing):
            self.bytes += ENTRY_BYTES + 2 * len(key) + size
            self._sorted.add(key)
        else:
            self.bytes += size - (2 * len(old) if old else 0)

    def put_many(self, keys: list[bytes], values: list[bytes | None]) -> None:
        """Stages many writes; the last value of a repeated key counts."""
        rows = self.rows
        new = dict(zip(keys, values, strict=True))
        again = rows.keys() & new.keys() if rows else ()
        added = len(new) - len(again)
        payload = sum(map(len, new)) + sum(map(len, filter(None, new.values())))
        payload -= sum(map(len, again)) + sum(len(rows[key] or b"") for key in again)
        self.bytes += ENTRY_BYTES * added + 2 * payload
        self._sorted.add_many(new.keys() - again if again else new)
        if rows:
            rows.update(new)
        else:
            self.rows = new

    def delete_range(self, low: bytes, high: bytes | None) -> None:
        """Stages the delete of all keys of the range, staged ones and those of the database."""
        self.drop(low, high)
        self.ranges = self.ranges.plus(low, high)

    def drop(self, low: bytes, high: bytes | None) -> None:
        """Drops the writes that are staged in the range."""
        for key in self._sorted.between(low, high):
            value = self.rows.pop(key, MISSING)
            if not isinstance(value, Missing):
                self.bytes -= ENTRY_BYTES + 2 * len(key) + 2 * len(value or b"")

    def slice(
        self, low: bytes | None, high: bytes | None, *, reverse: bool
    ) -> list[tuple[bytes, bytes | None]]:
        """Returns a copy of the staged writes between the bounds, in key order, deletes included.

        Only for the owner's thread.
        """
        keys = self._sorted.between(low, high)
        if reverse:
            keys.reverse()
        rows = self.rows
        return [(key, rows[key]) for key in keys if key in rows]

    def slice_for_other_thread(
        self, low: bytes | None, high: bytes | None, *, reverse: bool
    ) -> list[tuple[bytes, bytes | None]]:
        """Returns the result of `slice`, without the sorted keys, which only the owner's thread may use."""
        taken = list(self.rows.items())  # one step of the interpreter, so no write happens in between
        return sorted(
            (
                (key, value)
                for key, value in taken
                if (low is None or low <= key) and (high is None or key < high)
            ),
            reverse=reverse,
        )

    def get_many(
        self, keys: list[bytes], recent: Mapping[bytes, bytes | None]
    ) -> list[bytes | Missing | None]:
        """Returns the value of each key from memory: from the staged writes, else from ``recent``.

        A deleted key has None; `MISSING` means that only the database knows the value.

        Args:
            keys: may repeat.
            recent: values of the database that are in memory already.
        """
        if not self.ranges:
            unstaged = map(recent.get, keys, repeat(MISSING))
            return list(map(self.rows.get, keys, unstaged)) if self.rows else list(unstaged)
        rows, covers = self.rows, self.ranges.covers
        return [rows.get(key, None if covers(key) else recent.get(key, MISSING)) for key in keys]


def merge(
    staged: list[tuple[bytes, bytes | None]], base: Iterator[Pair], ranges: Ranges, *, reverse: bool = False
) -> Iterator[Pair]:
    """Yields the pairs that the owner sees: a staged write replaces the pair of the database.

    Args:
        staged: writes in the order of the scan; None deletes the key.
        base: pairs of the database in the same order.
        ranges: where pairs of the database are hidden.
        reverse: the order is descending.
    """
    if ranges:
        covers = ranges.covers
        base = (pair for pair in base if not covers(pair[0]))
    rows = iter(staged)
    top = next(rows, None)
    for pair in base:
        key = pair[0]
        while top is not None and (top[0] > key if reverse else top[0] < key):
            if top[1] is not None:
                yield top[0], top[1]
            top = next(rows, None)
        if top is None:
            yield pair
            break
        if top[0] != key:
            yield pair
            continue
        if top[1] is not None:
            yield key, top[1]
        top = next(rows, None)
    yield from base
    while top is not None:
        if top[1] is not None:
            yield top[0], top[1]
        top = next(rows, None)
