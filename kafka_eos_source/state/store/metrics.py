"""What a store counts and times, under the names of KIP-892's table and Kafka Streams."""

from __future__ import annotations

import time
from collections import Counter, deque
from collections.abc import Iterator
from contextlib import contextmanager

#: Rates are over this time, as Kafka's default of two samples of 30 s.
_WINDOW_S = 60.0


class Timed:
    """How often something was done and how long it took."""

    def __init__(self) -> None:
        self._recent: deque[tuple[float, float]] = deque()
        self._since = time.monotonic()
        self.total = 0

    @contextmanager
    def time(self) -> Iterator[None]:
        """Counts only what did not raise."""
        start = time.monotonic()
        yield
        now = time.monotonic()
        self.total += 1
        self._recent.append((now, (now - start) * 1000))
        self._forget(now)

    def numbers(self, name: str) -> dict[str, float]:
        """``-rate`` per second, ``-latency-avg`` and ``-latency-max`` in ms, ``-total``."""
        now = time.monotonic()
        self._forget(now)
        took = [ms for _, ms in self._recent]
        return {
            f"{name}-rate": len(took) / max(min(now - self._since, _WINDOW_S), 1e-3),
            f"{name}-latency-avg": sum(took) / len(took) if took else 0.0,
            f"{name}-latency-max": max(took, default=0.0),
            f"{name}-total": float(self.total),
        }

    def _forget(self, now: float) -> None:
        while self._recent and self._recent[0][0] < now - _WINDOW_S:
            self._recent.popleft()


class StoreMetrics:
    """The counters of one open store."""

    def __init__(self) -> None:
        self.commits = Timed()
        self.totals: Counter[str] = Counter()

    def count(self, name: str, by: int = 1) -> None:
        self.totals[name] += by

    def numbers(self) -> dict[str, float]:
        return {**self.commits.numbers("commit"), **{name: float(n) for name, n in self.totals.items()}}
