"""Computes from the output alone how many input records were counted and visible at each moment.

Each output record holds the count of its key. A record adds its count minus the previous count of the key;
the sum up to an offset is the number of input records counted there. With samples of the last stable offsets,
this yields how many were counted, and visible to ``read_committed``, at each sample's time.
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
        offsets, keys, counts: offset, key number and count of each record.
    """

    offsets: Ints = field(default_factory=lambda: np.empty(0, np.int64))
    keys: Ints = field(default_factory=lambda: np.empty(0, np.int64))
    counts: Ints = field(default_factory=lambda: np.empty(0, np.int64))

    def add(self, offsets: Ints, keys: Ints, counts: Ints) -> None:
        self.offsets = np.concatenate([self.offsets, offsets])
        self.keys = np.concatenate([self.keys, keys])
        self.counts = np.concatenate([self.counts, counts])

    def add_copies(self, offsets: Ints, keys: Ints) -> None:
        """Adds records that are copies; each one increases its key's count by one."""
        order = np.argsort(keys, kind="stable")
        begins = np.flatnonzero(np.diff(keys[order], prepend=-1))
        sizes = np.diff(np.append(begins, len(keys)))
        ranks = np.empty(len(keys), np.int64)
        ranks[order] = np.arange(len(keys)) - np.repeat(begins, sizes)
        known = np.bincount(self.keys, minlength=int(keys.max(initial=0)) + 1)
        self.add(offsets, keys, known[keys] + ranks + 1)

    def gains(self) -> Ints:
        """Returns how many input records each output record adds."""
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
    """One observation of a run.

    Attributes:
        seconds: its time, on the clock of `time.time`.
        stable: last stable offset of each output partition.
    """

    seconds: float
    stable: tuple[int, ...]


def counted(output: Sequence[Output]) -> int:
    """Returns the number of input records counted in all of the output that was read."""
    return sum(int(part.gains().sum()) for part in output)


def curve(output: Sequence[Output], samples: Sequence[Sample]) -> Ints:
    """Returns the number of input records counted and visible at each sample."""
    total = np.zeros(len(samples), np.int64)
    for number, part in enumerate(output):
        sums = np.concatenate([[0], np.cumsum(part.gains())])
        stable = np.array([sample.stable[number] for sample in samples], np.int64)
        total += sums[np.searchsorted(part.offsets, stable, side="left")]
    return total


def wrong(output: Sequence[Output], truth: Ints, exactly_once: bool) -> str:
    """Returns why the output is wrong; empty if it is correct.

    Args:
        output: the output of all partitions.
        truth: number of records of each key.
        exactly_once: whether the contender promises it; then no count of a key may repeat or decrease. The
            final counts must be right in any case, because no process is killed.
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
