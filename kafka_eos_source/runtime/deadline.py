"""One time budget, handed down: every blocking call takes what remains of it."""

from __future__ import annotations

import time
from dataclasses import dataclass


@dataclass(frozen=True)
class Deadline:
    """A point on the monotonic clock.

    Attributes:
        at: seconds on ``time.monotonic()``'s scale.
        budget_seconds: what was granted, for error messages.
    """

    at: float
    budget_seconds: float

    @classmethod
    def after_seconds(cls, seconds: float) -> Deadline:
        return cls(time.monotonic() + seconds, seconds)

    @classmethod
    def after_ms(cls, ms: float) -> Deadline:
        return cls.after_seconds(ms / 1000.0)

    def remaining_seconds(self, at_most: float | None = None) -> float:
        """Seconds left, never below 0, never above ``at_most``."""
        left = max(0.0, self.at - time.monotonic())
        return left if at_most is None else min(left, at_most)

    @property
    def expired(self) -> bool:
        return time.monotonic() >= self.at
