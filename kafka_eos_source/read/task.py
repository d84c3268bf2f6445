"""What a task does: it reads its ranges, and combines them first where an aggregation begins in the read."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import pyarrow as pa

from kafka_eos_source.model import OffsetRange
from kafka_eos_source.read.fetch import ReadSettings, read_ranges


@dataclass(frozen=True)
class TaskRead:
    """Pickled to the tasks.

    Attributes:
        settings: of the read.
        aggregate: `AggregateInRead` as JSON; None = rows as they are.
    """

    settings: ReadSettings
    aggregate: str | None = None

    def __call__(self, ranges: Sequence[OffsetRange]) -> Iterator[pa.RecordBatch]:
        """Yields and raises as `read_ranges`."""
        rows = read_ranges(self.settings, ranges)
        if self.aggregate is None:
            return rows
        from kafka_eos_source.state.vector.in_read import AggregateInRead  # few reads need it

        return AggregateInRead.from_json(self.aggregate)(rows)
