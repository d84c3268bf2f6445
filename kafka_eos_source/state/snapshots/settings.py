"""The options of snapshots."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(frozen=True)
class SnapshotSettings:
    """Where snapshots are and how often they are made.

    Attributes:
        location: option ``state.snapshot.location``.
        interval_ms: option ``state.snapshot.interval.ms``.
    """

    location: str = field(repr=False)  # may have a password
    interval_ms: int
