"""The steps at which a process is killed."""

from __future__ import annotations

#: Failpoints before, within and after the transaction.
STEPS = [
    "commit.after_token",
    "commit.within_produce",
    "commit.within_sealed",
    "commit.after_flush",
    "commit.before_commit",
    "commit.after_commit",
]
