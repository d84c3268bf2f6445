"""A time budget that is passed down: every blocking call may use only what remains of it."""

from __future__ import annotations

import time
from dataclasses import dataclass


@dataclass(frozen=True)
class Deadline:
    """A point in time on the monotonic clock.

    Attributes:
        at: seconds on the scale of ``time.monotonic()``.
        budget_seconds: the time that was granted in total, for error messages.
    """

    at: float
    budget_seconds: float

    @classmethod
    def after_seconds(cls, seconds: float) -> Deadline:
        """Returns a deadline that many seconds from now."""
        return cls(time.monotonic() + seconds, seconds)

    @classmethod
    def after_ms(cls, ms: float) -> Deadline:
        """Returns a deadline that many milliseconds from now."""
        return cls.after_seconds(ms / 1000.0)

    def remaining_seconds(self, at_most: float | None = None) -> float:
        """Returns the seconds that are left: at least 0 and at most ``at_most``."""
        left = max(0.0, self.at - time.monotonic())
        return left if at_most is None else min(left, at_most)

    @property
    def expired(self) -> bool:
        """Whether the deadline has passed."""
        return time.monotonic() >= self.at
