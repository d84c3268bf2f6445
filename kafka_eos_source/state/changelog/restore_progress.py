"""Progress of a restore: a log line every ten seconds, and metrics (KIP-892, KIP-869)."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from dataclasses import dataclass, field

from kafka_eos_source.model import TopicPartition
from kafka_eos_source.state.changelog.restore_plan import Reason

_log = logging.getLogger(__name__)

LOG_EVERY_SECONDS = 10.0


@dataclass
class RestoreProgress:
    """Progress of the restore of one partition.

    Another thread may read it while the restore runs.

    Attributes:
        tp: the changelog partition.
        clock: returns monotonic seconds.
        reason: why the changelog is read.
        wiped: why local state was removed before the restore; None = it was not.
        snapshot_offset: changelog offset of the snapshot with which the store began; None = not with one.
        position: changelog offset up to which records were read (excluded).
        end: changelog offset up to which records will be read (excluded).
        records: number of records read so far.
    """

    tp: TopicPartition
    clock: Callable[[], float] = field(default=time.monotonic, repr=False)
    reason: Reason = Reason.NONE
    wiped: Reason | None = None
    snapshot_offset: int | None = None
    position: int = 0
    end: int = 0
    records: int = 0
    _since: float = 0.0
    _until: float | None = None
    _next_line: float = 0.0

    def begin(self, reason: Reason, start: int, end: int) -> None:
        """Records that a restore of these offsets begins."""
        self.reason = self.wiped or reason
        self.position, self.end, self.records = start, end, 0
        self._since, self._until = self.clock(), None
        self._next_line = self._since + LOG_EVERY_SECONDS

    def advance(self, records: int, position: int) -> None:
        """Records that the store has more records, and holds the changelog up to ``position``."""
        self.records += records
        self.position = position
        now = self.clock()
        if now >= self._next_line:
            self._next_line = now + LOG_EVERY_SECONDS
            _log.info("restoring %s (%s): %s", self.tp, self.reason.value, self._numbers())

    def done(self) -> None:
        """Records that the restore is finished."""
        self._until = self.clock()
        if self.records:
            _log.info("restored %s (%s): %s", self.tp, self.reason.value, self._numbers())

    @property
    def ms(self) -> float:
        """Duration in ms, until now or until the end."""
        return 1000 * ((self.clock() if self._until is None else self._until) - self._since)

    @property
    def rate(self) -> float:
        """Records per second."""
        return self.records / (self.ms / 1000) if self.ms > 0 else 0.0

    @property
    def remaining(self) -> int:
        """Number of offsets still to be read, an upper bound of the number of records."""
        return max(0, self.end - self.position)

    def metrics(self) -> dict[str, float | str]:
        """Returns the metrics by the names of Kafka Streams."""
        return {
            "restore-records-total": self.records,
            "restore-remaining-records": self.remaining,
            "restore-rate": self.rate,
            "restore-time-ms": self.ms,
            "restore-reason": self.reason.value,
        }

    def _numbers(self) -> str:
        return (
            f"{self.records:,} records in {self.ms / 1000:.1f} s ({self.rate:,.0f}/s), at offset "
            f"{self.position} of {self.end}, at most {self.remaining:,} to go"
        )
