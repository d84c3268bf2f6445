"""What a task does: it reads its ranges, and does what of the query was left to the read."""

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
        step: an option of `read.steps` and its value; None = rows as they are.
    """

    settings: ReadSettings
    step: tuple[str, str] | None = None

    def __call__(self, ranges: Sequence[OffsetRange]) -> Iterator[pa.RecordBatch]:
        """Yields and raises as `read_ranges`."""
        rows = read_ranges(self.settings, ranges)
        if self.step is None:
            return rows
        from kafka_eos_source.read.steps import step  # few reads need it

        return step(*self.step)(rows)
