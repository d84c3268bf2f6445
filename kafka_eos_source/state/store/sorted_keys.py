"""The staged keys in order, for scans between writes.

A processor may well scan a few keys of each group and write a few others in between, so neither sorting anew
for each scan nor shifting one long list for each write will do. New keys are only noted; the next scan puts
them in their place: one by one into short blocks when they are few, all at once by sorting when they are
many.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterable

#: Keys of a block: short enough that inserting is cheap, long enough that blocks are few.
_BLOCK = 512


class SortedKeys:
    """An ordered set of keys that only grows. A key noted twice is held once."""

    def __init__(self) -> None:
        self._blocks: list[list[bytes]] = []
        self._firsts: list[bytes] = []
        self._count = 0
        self._noted: list[bytes] = []
        #: Notes one new key, which `between` will find.
        self.note = self._noted.append

    def note_many(self, keys: Iterable[bytes]) -> None:
        """Notes new keys, which `between` will find."""
        self._noted.extend(keys)

    def between(self, low: bytes | None, high: bytes | None) -> list[bytes]:
        """The keys from ``low`` (included) to ``high`` (excluded), in order; None = unbounded."""
        self._settle()
        found: list[bytes] = []
        at = 0 if low is None else max(0, bisect_left(self._firsts, low) - 1)
        for block in self._blocks[at:]:
            if high is not None and block[0] >= high:
                break
            start = 0 if low is None else bisect_left(block, low)
            end = len(block) if high is None else bisect_left(block, high)
            found += block[start:end]
        return found

    def _settle(self) -> None:
        noted = self._noted
        if not noted:
            return
        if len(noted) * 8 > self._count:
            merged = sorted(set(noted).union(*self._blocks))
            self._blocks = [merged[i : i + _BLOCK] for i in range(0, len(merged), _BLOCK)]
            self._firsts = [block[0] for block in self._blocks]
            self._count = len(merged)
        else:
            for key in noted:
                self._insert(key)
        noted.clear()

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
