"""Tracks how far a task has read its offset ranges.

A range is finished when the task has received a message at or after its end, the message at its last offset,
or the report that the log ends at or after its end. Counting messages would not work: control records,
aborted records and records removed by compaction occupy offsets, but the broker does not deliver them.
"""

from __future__ import annotations

from collections.abc import Sequence, Set
from typing import Any

import numpy as np

from kafka_eos_source.model import OffsetRange, TopicPartition


class Progress:
    """Positions in the ranges of one task, with one range per partition.

    Args:
        ranges: ranges to read. Empty ranges count as finished.

    Raises:
        ValueError: if two ranges have the same partition, because a consumer has one position per partition.
    """

    def __init__(self, ranges: Sequence[OffsetRange]) -> None:
        self._end: dict[TopicPartition, int] = {}
        self._position: dict[TopicPartition, int] = {}
        for wanted in ranges:
            if wanted.tp in self._end:
                raise ValueError(f"the task has two ranges of {wanted.tp}; expected one")
            self._end[wanted.tp] = wanted.end
            self._position[wanted.tp] = wanted.start
        self._epoch = {each.tp: each.epoch for each in ranges}
        self._open = {tp for tp, end in self._end.items() if self._position[tp] < end}
        self._remaining = sum(self._end[tp] - self._position[tp] for tp in self._open)
        self._finished: list[TopicPartition] = []

    @property
    def open(self) -> Set[TopicPartition]:
        """Partitions that are not finished. The set changes with every call of `advance`."""
        return self._open

    def take_finished(self) -> list[TopicPartition]:
        """Returns the partitions that have been finished since the last call."""
        finished, self._finished = self._finished, []
        return finished

    @property
    def done(self) -> bool:
        return not self._open

    @property
    def remaining(self) -> int:
        """Number of offsets that remain: at least the number of records that remain."""
        return self._remaining

    def position(self, tp: TopicPartition) -> int:
        """Returns the next offset to read."""
        return self._position[tp]

    def end(self, tp: TopicPartition) -> int:
        return self._end[tp]

    def epoch(self, tp: TopicPartition) -> int:
        """Returns the leader epoch that belongs to the end; -1 = unknown."""
        return self._epoch[tp]

    def is_open(self, tp: TopicPartition) -> bool:
        return tp in self._open

    def accept(self, tp: TopicPartition, offsets: np.ndarray[Any, np.dtype[np.int64]]) -> slice:
        """Registers messages of one partition.

        Args:
            tp: the partition.
            offsets: offsets of the messages, ascending, at least one.

        Returns:
            The messages that are in the range and were not accepted before.
        """
        if tp not in self._open:
            return slice(0, 0)
        start, end = self._position[tp], self._end[tp]
        first = 0 if offsets[0] >= start else int(np.searchsorted(offsets, start))
        past = len(offsets) if offsets[-1] < end else int(np.searchsorted(offsets, end))
        self.advance(tp, int(offsets[-1]) + 1)
        return slice(first, past)

    def advance(self, tp: TopicPartition, position: int) -> None:
        """Moves the position forward, because no message before it will come."""
        if tp not in self._open:
            return
        end, before = self._end[tp], self._position[tp]
        self._position[tp] = min(end, max(position, before))
        self._remaining -= self._position[tp] - before
        if position >= end:
            self._open.discard(tp)
            self._finished.append(tp)
