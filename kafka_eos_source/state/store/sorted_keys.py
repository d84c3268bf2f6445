"""An ordered set of staged keys that stays fast when writes and scans alternate.

A processor may scan a few keys of each group and write others in between. Sorting all keys for each scan
would be too slow, and so would inserting each key into one long list. New keys are collected in a list, and
the next scan inserts them: one by one into short blocks if they are few, by sorting everything if they are
many.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterable

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
