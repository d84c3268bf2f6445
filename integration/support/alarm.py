"""A processor with timers, whose output shows each timer that is lost or fires twice."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from pyspark.sql import Row
from pyspark.sql.streaming.stateful_processor import StatefulProcessor, StatefulProcessorHandle, TimerValues


class Alarm(StatefulProcessor):
    """Counts the rows of a key and emits the count once, some time after the first row.

    Args:
        after_ms: how long after the first row.
        ttl_ms: time to live of the count; None = it stays.
    """

    def __init__(self, after_ms: int, ttl_ms: int | None = None) -> None:
        self._after_ms = after_ms
        self._ttl_ms = ttl_ms

    def init(self, handle: StatefulProcessorHandle) -> None:
        self._handle = handle
        self._count = handle.getValueState("count", "n long", self._ttl_ms)

    def handleInputRows(self, key: Any, rows: Iterator[Any], timerValues: TimerValues) -> Iterator[Row]:  # noqa: N802, N803
        before = self._count.get()[0] if self._count.exists() else 0
        if not before:
            self._handle.registerTimer(timerValues.getCurrentProcessingTimeInMs() + self._after_ms)
        self._count.update((before + sum(1 for _ in rows),))
        return iter(())

    def handleExpiredTimer(self, key: Any, timerValues: TimerValues, expiredTimerInfo: Any) -> Iterator[Row]:  # noqa: N802, N803
        yield Row(key=key[0], value=str(self._count.get()[0]))

    def close(self) -> None:
        return
