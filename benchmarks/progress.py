"""How many records were counted, and visible, at each moment: from the output alone, the same for everybody.

Each output record says how far its key is counted. What a record adds is its count less the one before it of
the same key; the sum of that up to an offset is the number of records counted there. A sample of the last
stable offsets then tells how many were counted, and visible to ``read_committed``, at its time.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

Ints = NDArray[np.int64]


@dataclass
class Output:
    """The output of one partition, in order, as far as it was read.

    Attributes:
        offsets, keys, counts: of each record; keys by their number.
    """

    offsets: Ints = field(default_factory=lambda: np.empty(0, np.int64))
    keys: Ints = field(default_factory=lambda: np.empty(0, np.int64))
    counts: Ints = field(default_factory=lambda: np.empty(0, np.int64))

    def add(self, offsets: Ints, keys: Ints, counts: Ints) -> None:
        self.offsets = np.concatenate([self.offsets, offsets])
        self.keys = np.concatenate([self.keys, keys])
        self.counts = np.concatenate([self.counts, counts])

    def add_copies(self, offsets: Ints, keys: Ints) -> None:
        """Records that are copies: each counts its key one further."""
        order = np.argsort(keys, kind="stable")
        begins = np.flatnonzero(np.diff(keys[order], prepend=-1))
        sizes = np.diff(np.append(begins, len(keys)))
        ranks = np.empty(len(keys), np.int64)
        ranks[order] = np.arange(len(keys)) - np.repeat(begins, sizes)
        known = np.bincount(self.keys, minlength=int(keys.max(initial=0)) + 1)
        self.add(offsets, keys, known[keys] + ranks + 1)

    def gains(self) -> Ints:
        """What each record adds to the records counted."""
        order = np.argsort(self.keys, kind="stable")
        keys, counts = self.keys[order], self.counts[order]
        before = np.zeros_like(counts)
        same = keys[1:] == keys[:-1]
        before[1:][same] = counts[:-1][same]
        gains = np.empty_like(counts)
        gains[order] = counts - before
        return gains


@dataclass(frozen=True)
class Sample:
    """One look at a run.

    Attributes:
        seconds: when, on the clock of `time.time`.
        stable: last stable offset of each output partition.
    """

    seconds: float
    stable: tuple[int, ...]


def counted(output: Sequence[Output]) -> int:
    """Records counted, by all of the output that was read."""
    return sum(int(part.gains().sum()) for part in output)


def curve(output: Sequence[Output], samples: Sequence[Sample]) -> Ints:
    """Records counted and visible at each sample."""
    total = np.zeros(len(samples), np.int64)
    for number, part in enumerate(output):
        sums = np.concatenate([[0], np.cumsum(part.gains())])
        stable = np.array([sample.stable[number] for sample in samples], np.int64)
        total += sums[np.searchsorted(part.offsets, stable, side="left")]
    return total


def wrong(output: Sequence[Output], truth: Ints, exactly_once: bool) -> str:
    """Why the output is not what it must be; empty when it is.

    Args:
        output: of all partitions.
        truth: records of each key.
        exactly_once: who promises it is held to it: no key's count may come again, or a lower one. Nobody is
            killed here, so the final counts of one who promises less must be right too.
    """
    final = np.zeros_like(truth)
    seen = np.zeros(len(truth), np.int64)
    for number, part in enumerate(output):
        if part.keys.size and (part.keys.min() < 0 or part.keys.max() >= len(truth)):
            return f"partition {number} has a key that was never sent"
        if exactly_once and (part.gains() <= 0).any():
            return f"partition {number} tells a key's count anew or lower than before"
        final[part.keys] = part.counts  # numpy keeps the last one
        seen[np.unique(part.keys)] += 1
    if (seen > 1).any():
        return f"{int((seen > 1).sum())} keys are in two partitions"
    different = final != truth
    if different.any():
        key = int(np.flatnonzero(different)[0])
        return (
            f"{int(different.sum())} of {len(truth)} keys have another count, the first one {key}: "
            f"{int(final[key])} instead of {int(truth[key])}"
        )
    return ""
