"""The steps of a commit and what may follow on each: the table that `commit.transaction` goes by.

``python -m kafka_eos_source.commit.steps`` prints the table as the diagram in ``docs/guarantees.md``.
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import Enum


class Step(Enum):
    """Where a commit is. `MOVES` lists what may follow."""

    OPEN = "open"  #: look for a clean producer
    INIT = "init"  #: a new producer: fence older owners, settle what they left
    TOKEN = "token"  #: read what Kafka holds, decide
    GENESIS = "genesis"  #: the first token of all is in Kafka: begin with the batch itself
    CHECK = "check"  #: output topics and partitions exist
    PREPARE = "prepare"  #: sinks outside Kafka make sure that they can commit
    BEGIN = "begin"
    PRODUCE = "produce"
    FLUSH = "flush"
    OFFSETS = "offsets"
    COMMIT = "commit"
    FINISH = "finish"  #: it is in Kafka: sinks outside Kafka commit
    COMMITTED = "committed"  #: by this call
    SKIPPED = "skipped"  #: it was in Kafka already
    LOST = "lost"  #: this attempt is over, another may follow


MOVES: Mapping[Step, frozenset[Step]] = {
    Step.OPEN: frozenset({Step.INIT, Step.CHECK, Step.PREPARE, Step.BEGIN, Step.LOST}),
    Step.INIT: frozenset({Step.TOKEN, Step.LOST}),
    Step.TOKEN: frozenset({Step.CHECK, Step.PREPARE, Step.BEGIN, Step.FINISH, Step.SKIPPED, Step.LOST}),
    Step.CHECK: frozenset({Step.PREPARE, Step.BEGIN, Step.LOST}),
    Step.PREPARE: frozenset({Step.BEGIN, Step.LOST}),
    Step.BEGIN: frozenset({Step.PRODUCE, Step.OFFSETS, Step.LOST}),
    Step.PRODUCE: frozenset({Step.FLUSH, Step.LOST}),
    Step.FLUSH: frozenset({Step.OFFSETS, Step.LOST}),
    Step.OFFSETS: frozenset({Step.COMMIT, Step.LOST}),
    Step.COMMIT: frozenset({Step.FINISH, Step.GENESIS, Step.LOST}),
    Step.GENESIS: frozenset({Step.OPEN, Step.LOST}),
    Step.FINISH: frozenset({Step.COMMITTED, Step.SKIPPED, Step.LOST}),
    Step.LOST: frozenset({Step.OPEN}),
    Step.COMMITTED: frozenset(),
    Step.SKIPPED: frozenset(),
}

#: Steps within an open transaction, which an error may still abort. COMMIT is not one of them.
ABORTED_ON_ERROR = frozenset({Step.PRODUCE, Step.FLUSH, Step.OFFSETS})

#: Steps from which Kafka can never commit the attempt, so that what sinks have prepared for it is taken back.
#: Not COMMIT: its outcome may be unknown, and the token decides. Not FINISH: it is in Kafka.
ROLLED_BACK_ON_ERROR = frozenset({Step.PREPARE, Step.BEGIN}) | ABORTED_ON_ERROR


def diagram() -> str:
    """The table of moves as a Mermaid state diagram; moves to LOST, which any step may make, are left out."""
    moves = [
        f"    {step.name} --> {to.name}"
        for step, follows in MOVES.items()
        for to in sorted(follows, key=list(Step).index)
        if to is not Step.LOST
    ]
    ends = [f"    {step.name} --> [*]" for step, follows in MOVES.items() if not follows]
    return "\n".join(["stateDiagram-v2", "    [*] --> OPEN", *moves, *ends])


if __name__ == "__main__":
    print(diagram())
