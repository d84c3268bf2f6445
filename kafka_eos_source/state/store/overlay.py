"""Staged writes of a transaction that only their owner sees (KIP-892).

They are a dict in front of the database, and a set of deleted key ranges. Kafka Streams chose the same after
trying RocksDB's indexed batch (KAFKA-20490), because a plain sorted map is faster to read and to write.

*Size*: Python keeps each key and each value as an object, and the commit copies all of them into one batch. A
staged row of 116 bytes was measured to take three times that. So an entry counts as `ENTRY_BYTES` plus twice
its payload, and an overwrite counts what it adds.

*Ranges*: deleting a range drops the keys that were staged in it and hides the keys of the database. Keys that
are staged afterwards are visible again.

*Spills*: writes that no longer fit into memory are on disk (`uncommitted.SpilledRows`), between the dict and
the ranges. A read asks the dict, the spilled rows, the ranges and the database, in this order.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right, insort
from collections.abc import Iterable, Iterator, Mapping
from itertools import islice, repeat
from typing import TYPE_CHECKING, cast

if TYPE_CHECKING:
    from kafka_eos_source.state.store.uncommitted import SpilledRows

#: Number of keys in a block: few enough for a cheap insert, many enough to keep the number of blocks small.
_BLOCK = 512


class SortedKeys:
    """An ordered set of keys; keys are only added."""

    def __init__(self) -> None:
        self._blocks: list[list[bytes]] = []
        self._firsts: list[bytes] = []
        self._count = 0
        self._new: list[bytes] = []
        #: Adds one key.
        self.add = self._new.append

    def add_many(self, keys: Iterable[bytes]) -> None:
        """Adds keys."""
        self._new.extend(keys)

    def between(self, low: bytes | None, high: bytes | None) -> list[bytes]:
        """Returns the keys from ``low`` (included) to ``high`` (excluded), in order."""
        self._insert_new()
        found: list[bytes] = []
        at = 0 if low is None else max(0, bisect_left(self._firsts, low) - 1)
        for block in self._blocks[at:]:
            if high is not None and block[0] >= high:
                break
            start = 0 if low is None else bisect_left(block, low)
            end = len(block) if high is None else bisect_left(block, high)
            found += block[start:end]
        return found

    def _insert_new(self) -> None:
        new = self._new
        if not new:
            return
        if len(new) * 8 > self._count:
            merged = sorted(set(new).union(*self._blocks))
            self._blocks = [merged[i : i + _BLOCK] for i in range(0, len(merged), _BLOCK)]
            self._firsts = [block[0] for block in self._blocks]
            self._count = len(merged)
        else:
            for key in new:
                self._insert(key)
        new.clear()

    def _insert(self, key: bytes) -> None:
        at = max(0, bisect_left(self._firsts, key) - 1)
        if at + 1 < len(self._firsts) and self._firsts[at + 1] == key:
            return
        block = self._blocks[at]
        place = bisect_left(block, key)
        if place < len(block) and block[place] == key:
            return
        insort(block, key, place)
        self._firsts[at] = block[0]
        self._count += 1
        if len(block) > 2 * _BLOCK:
            self._blocks[at : at + 1] = [block[:_BLOCK], block[_BLOCK:]]
            self._firsts[at : at + 1] = [block[0], block[_BLOCK]]


#: Memory of a staged entry besides its payload: the headers of two objects and a slot of a dict.
ENTRY_BYTES = 120

#: Rows that `slices` takes at a time.
_ROWS_PER_STEP = 256

Pair = tuple[bytes, bytes]
#: A staged write; None deletes the key.
StagedPair = tuple[bytes, bytes | None]


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

    Only one thread may use it.

    Attributes:
        rows: the last staged value of each key in memory; None = deleted.
        spilled: writes on disk, which `rows` replace; None = all writes are in memory.
        ranges: deleted ranges, which apply before `spilled` and `rows`.
        bytes: memory that the writes take, as the module describes.
    """

    def __init__(self) -> None:
        self.rows: dict[bytes, bytes | None] = {}
        self.spilled: SpilledRows | None = None
        self.ranges = Ranges()
        self.bytes = 0
        self._sorted = SortedKeys()

    @property
    def empty(self) -> bool:
        """Whether nothing is staged."""
        return not (self.rows or self.ranges or self.spilled)

    @property
    def size_bytes(self) -> int:
        """Memory that all writes take or took, those on disk included."""
        return self.bytes + (0 if self.spilled is None else self.spilled.size_bytes)

    def forget_rows(self) -> None:
        """Frees the memory of `rows`, which `spilled` contains now."""
        self.rows, self.bytes, self._sorted = {}, 0, SortedKeys()

    def get(self, key: bytes) -> bytes | Missing | None:
        """Returns the staged value of a key; None if it is deleted, `MISSING` if nothing is staged for it."""
        value = self.rows.get(key, MISSING)
        if not isinstance(value, Missing):
            return value
        if self.spilled is not None and not isinstance(value := self.spilled.get(key), Missing):
            return value
        return None if self.ranges and self.ranges.covers(key) else MISSING

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

    def put_many(
        self, keys: list[bytes], values: list[bytes | None], payload_bytes: int | None = None
    ) -> None:
        """Stages many writes; the last value of a repeated key counts.

        Args:
            keys: may repeat.
            values: None deletes.
            payload_bytes: size of all keys and values; None = not known.
        """
        rows = self.rows
        new = dict(zip(keys, values, strict=True))
        again = rows.keys() & new.keys() if rows else ()
        added = len(new) - len(again)
        if payload_bytes is not None and len(new) == len(keys):
            payload = payload_bytes
        else:
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
        if self.spilled is not None:
            self.spilled.delete_range(low, high)
        self.ranges = self.ranges.plus(low, high)

    def drop(self, low: bytes, high: bytes | None) -> None:
        """Drops the writes in memory that are staged in the range."""
        for key in self._sorted.between(low, high):
            value = self.rows.pop(key, MISSING)
            if not isinstance(value, Missing):
                self.bytes -= ENTRY_BYTES + 2 * len(key) + 2 * len(value or b"")

    def scan(self, low: bytes | None, high: bytes | None, *, reverse: bool) -> Iterable[StagedPair]:
        """Returns the staged writes between the bounds as they are now, in key order, deletes included."""
        keys = self._sorted.between(low, high)
        if reverse:
            keys.reverse()
        rows = self.rows
        staged = [(key, rows[key]) for key in keys if key in rows]
        if self.spilled is None:
            return staged
        return overlaid(staged, self.spilled.scan(low, high, reverse=reverse), reverse=reverse)

    def get_many(
        self, keys: list[bytes], recent: Mapping[bytes, bytes | None]
    ) -> list[bytes | Missing | None]:
        """Returns the value of each key from memory: from the staged writes, else from ``recent``.

        A deleted key has None; `MISSING` means that only the database knows the value.

        Args:
            keys: may repeat.
            recent: values of the database that are in memory already.
        """
        if self.spilled is not None:
            return self._get_many_with(self.spilled, keys, recent)
        if not self.ranges:
            unstaged = map(recent.get, keys, repeat(MISSING))
            return list(map(self.rows.get, keys, unstaged)) if self.rows else list(unstaged)
        rows, covers = self.rows, self.ranges.covers
        return [rows.get(key, None if covers(key) else recent.get(key, MISSING)) for key in keys]

    def _get_many_with(
        self, spilled: SpilledRows, keys: list[bytes], recent: Mapping[bytes, bytes | None]
    ) -> list[bytes | Missing | None]:
        values: list[bytes | Missing | None] = list(map(self.rows.get, keys, repeat(MISSING)))
        unstaged = [at for at, value in enumerate(values) if value is MISSING]
        covers = self.ranges.covers if self.ranges else None
        for at, value in zip(unstaged, spilled.get_many([keys[at] for at in unstaged]), strict=True):
            if value is MISSING:
                key = keys[at]
                value = None if covers is not None and covers(key) else recent.get(key, MISSING)
            values[at] = value
        return values


def overlaid(
    upper: Iterable[StagedPair], lower: Iterator[StagedPair] | Iterator[Pair], *, reverse: bool = False
) -> Iterator[StagedPair]:
    """Yields the writes of two layers in the order of the scan; of equal keys, that of ``upper``."""
    rows = iter(upper)
    top = next(rows, None)
    for pair in lower:
        key = pair[0]
        while top is not None and (top[0] > key if reverse else top[0] < key):
            yield top
            top = next(rows, None)
        if top is None:
            yield pair
            break
        if top[0] == key:
            yield top
            top = next(rows, None)
        else:
            yield pair
    yield from lower
    if top is not None:
        yield top
        yield from rows


def slices(rows: Iterable[StagedPair], most_rows: int, most_bytes: int) -> Iterator[list[StagedPair]]:
    """Cuts rows into lists of about this number of rows and bytes, so that few are in memory at a time."""
    rest = iter(rows)
    taken: list[StagedPair] = []
    size = 0
    while some := list(islice(rest, _ROWS_PER_STEP)):
        taken += some
        size += sum(len(key) + len(value or b"") for key, value in some)
        if len(taken) >= most_rows or size >= most_bytes:
            yield taken
            taken, size = [], 0
    if taken:
        yield taken


def unstaged_keys(base: Iterator[Pair], staged: Iterable[StagedPair]) -> Iterator[bytes]:
    """Yields the keys of ``base`` for which nothing is staged; both are in key order."""
    rows = iter(staged)
    top = next(rows, None)
    for key, _ in base:
        while top is not None and top[0] < key:
            top = next(rows, None)
        if top is None or top[0] != key:
            yield key


def merge(
    staged: Iterable[StagedPair], base: Iterator[Pair], ranges: Ranges, *, reverse: bool = False
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
    for pair in overlaid(staged, base, reverse=reverse):
        if pair[1] is not None:
            yield cast("Pair", pair)
