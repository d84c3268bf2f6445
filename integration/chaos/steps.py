"""The steps at which a process is killed."""

from __future__ import annotations

#: Failpoints before and within the transaction, in the order in which a batch reaches them.
STEPS = ["commit.after_token", "commit.within_produce", "commit.after_flush"]
