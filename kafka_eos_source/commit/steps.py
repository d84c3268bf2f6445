"""The steps of a commit and what may follow on each: the table that `commit.transaction` goes by."""

from __future__ import annotations

from collections.abc import Mapping
from enum import Enum


class Step(Enum):
    """Where a commit is. `MOVES` lists what may follow."""

    OPEN = "open"  #: look for a clean producer
    INIT = "init"  #: a new producer: fence older owners, settle what they left
    TOKEN = "token"  #: read what Kafka holds, decide
    CHECK = "check"  #: output topics and partitions exist
    BEGIN = "begin"
    PRODUCE = "produce"
    FLUSH = "flush"
    OFFSETS = "offsets"
    COMMIT = "commit"
    COMMITTED = "committed"  #: by this call
    SKIPPED = "skipped"  #: it was in Kafka already
    LOST = "lost"  #: this attempt is over, another may follow


MOVES: Mapping[Step, frozenset[Step]] = {
    Step.OPEN: frozenset({Step.INIT, Step.CHECK, Step.BEGIN, Step.LOST}),
    Step.INIT: frozenset({Step.TOKEN, Step.LOST}),
    Step.TOKEN: frozenset({Step.CHECK, Step.BEGIN, Step.SKIPPED, Step.LOST}),
    Step.CHECK: frozenset({Step.BEGIN, Step.LOST}),
    Step.BEGIN: frozenset({Step.PRODUCE, Step.OFFSETS, Step.LOST}),
    Step.PRODUCE: frozenset({Step.FLUSH, Step.LOST}),
    Step.FLUSH: frozenset({Step.OFFSETS, Step.LOST}),
    Step.OFFSETS: frozenset({Step.COMMIT, Step.LOST}),
    Step.COMMIT: frozenset({Step.COMMITTED, Step.LOST}),
    Step.LOST: frozenset({Step.OPEN}),
    Step.COMMITTED: frozenset(),
    Step.SKIPPED: frozenset(),
}

#: Steps within an open transaction, which an error may still abort. COMMIT is not one of them.
ABORTED_ON_ERROR = frozenset({Step.PRODUCE, Step.FLUSH, Step.OFFSETS})
