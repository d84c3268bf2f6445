"""How far the ranges of a task have been read: pure bookkeeping, no client.

A range is finished when a message at or past its end was seen, when the last offset before its end was
seen, or when the log's end at or past its end was reported. Never by counting: control markers, aborted
records and compacted-away records take offsets and are not delivered.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np

from kafka_eos_source.model import OffsetRange, TopicPartition


class Progress:
    """Positions of the ranges of one task, one range a partition.

    Args:
        ranges: what to read. Empty ranges are finished from the start.

    Raises:
        ValueError: two ranges of one partition (they would fight over one fetch position).
    """

    def __init__(self, ranges: Iterable[OffsetRange]) -> None:
        self._end: dict[TopicPartition, int] = {}
        self._position: dict[TopicPartition, int] = {}
        for wanted in ranges:
            if wanted.tp in self._end:
                raise ValueError(f"two ranges of {wanted.tp} in one task")
            self._end[wanted.tp] = wanted.end
            self._position[wanted.tp] = wanted.start
        self._open = {tp for tp, end in self._end.items() if self._position[tp] < end}

    @property
    def open(self) -> frozenset[TopicPartition]:
        """Partitions that are not finished."""
        return frozenset(self._open)

    @property
    def done(self) -> bool:
        return not self._open

    @property
    def remaining(self) -> int:
        """Offsets still to be read: at least as many as there are records."""
        return sum(self._end[tp] - self._position[tp] for tp in self._open)

    def position(self, tp: TopicPartition) -> int:
        """Next offset to read."""
        return self._position[tp]

    def end(self, tp: TopicPartition) -> int:
        return self._end[tp]

    def is_open(self, tp: TopicPartition) -> bool:
        return tp in self._open

    def accept(self, tp: TopicPartition, offsets: np.ndarray[Any, np.dtype[np.int64]]) -> slice:
        """Takes messages of one partition.

        Args:
            offsets: ascending, at least one.

        Returns:
            Those that belong to the range and were not taken before.
        """
        if tp not in self._open:
            return slice(0, 0)
        start, end = self._position[tp], self._end[tp]
        first = 0 if offsets[0] >= start else int(np.searchsorted(offsets, start))
        past = len(offsets) if offsets[-1] < end else int(np.searchsorted(offsets, end))
        self.advance(tp, int(offsets[-1]) + 1)
        return slice(first, past)

    def advance(self, tp: TopicPartition, position: int) -> None:
        """Nothing below ``position`` is still to come: the log ends there, or what was before it is gone."""
        if tp not in self._open:
            return
        end = self._end[tp]
        self._position[tp] = min(end, max(position, self._position[tp]))
        if position >= end:
            self._open.discard(tp)

    def finish(self, tp: TopicPartition) -> None:
        """Gives up what is left of a range."""
        self.advance(tp, self._end[tp])
