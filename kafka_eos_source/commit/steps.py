"""Which step of a commit may follow which, and the progress of one commit through them.

`commit.machine` follows this table. ``python -m kafka_eos_source.commit.steps`` prints it as the diagram in
``docs/guarantees.md``.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field

from kafka_eos_source.errors import FencedError, OutcomeUnknownError
from kafka_eos_source.model import GroupOffset
from kafka_eos_source.observe.figures import Step
from kafka_eos_source.observe.trace import Trace

MOVES: Mapping[Step, frozenset[Step]] = {
    Step.OPEN: frozenset({Step.INIT, Step.CHECK, Step.PREPARE, Step.BEGIN, Step.LOST}),
    Step.INIT: frozenset({Step.TOKEN, Step.LOST}),
    Step.TOKEN: frozenset({Step.CHECK, Step.PREPARE, Step.BEGIN, Step.FINISH, Step.SKIPPED, Step.LOST}),
    Step.CHECK: frozenset({Step.PREPARE, Step.BEGIN, Step.LOST}),
    Step.PREPARE: frozenset({Step.BEGIN, Step.RESTAGE, Step.LOST}),
    Step.RESTAGE: frozenset({Step.OPEN, Step.LOST}),
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

#: Steps within an open transaction, which is aborted on an error. COMMIT is not one of them, because a commit
#: that was sent may succeed.
ABORTED_ON_ERROR = frozenset({Step.PRODUCE, Step.FLUSH, Step.OFFSETS})

#: Steps after which an error means that Kafka will never commit this try, so that sinks abort what they have
#: prepared for it. Not COMMIT: its outcome may be unknown, and the token decides. Not FINISH: Kafka has
#: committed.
ROLLED_BACK_ON_ERROR = frozenset({Step.PREPARE, Step.BEGIN}) | ABORTED_ON_ERROR


def diagram() -> str:
    """Returns the table of moves as a Mermaid state diagram, without the moves to LOST."""
    moves = [
        f"    {step.name} --> {to.name}"
        for step, follows in MOVES.items()
        for to in sorted(follows, key=list(Step).index)
        if to is not Step.LOST
    ]
    ends = [f"    {step.name} --> [*]" for step, follows in MOVES.items() if not follows]
    return "\n".join(["stateDiagram-v2", "    [*] --> OPEN", *moves, *ends])


@dataclass
class Progress:
    """The progress of a commit, and the facts that it keeps from one try to the next.

    Attributes:
        step: the current step.
        transactions: number of transactions begun for the batch.
        begun_at: when the newest of them was begun, in seconds of `time.monotonic`.
        fenced: the error of the try that was fenced.
        unknown: the error of the newest commit whose outcome is unknown.
        anchor_before: the group's offset of the anchor partition before the newest transaction.
        refusals: how often each sink refused rows.
        sent_bytes: size of the records and state changes that the newest transaction sent before its commit.
        trace: measures the steps.
    """

    step: Step = Step.OPEN
    transactions: int = 0
    begun_at: float = 0.0
    fenced: FencedError | None = None
    unknown: OutcomeUnknownError | None = None
    anchor_before: GroupOffset | None = None
    refusals: Counter[str] = field(default_factory=Counter)
    sent_bytes: int = 0
    trace: Trace = field(default_factory=Trace)

    def move(self, to: Step) -> None:
        """Enters another step.

        Raises:
            AssertionError: if `MOVES` does not allow this move.
        """
        if to not in MOVES[self.step]:
            raise AssertionError(f"commit cannot go from {self.step.name} to {to.name}")
        self.step = to
        self.trace.enter(to)


class OvertakenError(FencedError):
    """The token names the run that took over. Trying again cannot help."""


class OutcomeLostError(OutcomeUnknownError):
    """Kafka no longer shows whether a transaction was committed. Trying again cannot help."""


if __name__ == "__main__":
    print(diagram())
