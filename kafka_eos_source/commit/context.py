"""The records that the parts of a commit share: the work to do, the decision about it, and the progress."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from kafka_eos_source.commit.facts import Batch, Held
from kafka_eos_source.commit.interfaces import (
    Clients,
    IdentityMarker,
    NoCheckpoint,
    NoSinks,
    Producer,
    ProducerSession,
    Sinks,
    StagedBatch,
)
from kafka_eos_source.commit.request import CommitRequest
from kafka_eos_source.commit.sources import OwnOffsets
from kafka_eos_source.commit.steps import MOVES, Step
from kafka_eos_source.commit.verdict import Verdict
from kafka_eos_source.errors import FencedError, OutcomeUnknownError
from kafka_eos_source.model import GroupOffset, TopicPartition
from kafka_eos_source.observe.figures import TracedStep
from kafka_eos_source.observe.trace import Trace
from kafka_eos_source.runtime.deadline import Deadline


@dataclass(frozen=True)
class CommitContext:
    """The inputs of the commit of one batch, the same for every try.

    Attributes:
        request: the batch to commit, and how.
        staged: the rows of the batch.
        clients: clients of the sink's cluster.
        session: the producer that this process keeps for the transactional id.
        deadline: time limit of the whole commit.
        sinks: the sinks outside Kafka.
        identity_file: the identity file of the checkpoint.
    """

    request: CommitRequest
    staged: StagedBatch
    clients: Clients
    session: ProducerSession
    deadline: Deadline
    sinks: Sinks = field(default_factory=NoSinks)
    identity_file: IdentityMarker = field(default_factory=NoCheckpoint)


@dataclass(frozen=True)
class Decision:
    """The verdict of one try to commit the batch, with the facts on which it is based.

    Attributes:
        producer: an initialised producer with no open transaction.
        batch: the batch with its offsets on the sink's cluster.
        own: the offsets of the batch on the sink's cluster, from which those of ``batch`` were taken.
        held: what Kafka holds of the query, as the verdict saw it.
        verdict: whether to write the batch.
        in_group: the committed offsets of the group itself. They differ from ``held`` if the token was found
            elsewhere.
    """

    producer: Producer
    batch: Batch
    own: OwnOffsets
    held: Held
    verdict: Verdict
    in_group: Mapping[TopicPartition, GroupOffset]


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
        sent_bytes: size of the records and state changes that the newest transaction sent before its commit.
        trace: measures the steps.
    """

    step: Step = Step.OPEN
    transactions: int = 0
    begun_at: float = 0.0
    fenced: FencedError | None = None
    unknown: OutcomeUnknownError | None = None
    anchor_before: GroupOffset | None = None
    sent_bytes: int = 0
    trace: Trace = field(default_factory=Trace)

    def move(self, to: Step) -> None:
        """Enters another step.

        Raises:
            AssertionError: if `steps.MOVES` does not allow this move.
        """
        if to not in MOVES[self.step]:
            raise AssertionError(f"commit cannot go from {self.step.name} to {to.name}")
        self.step = to
        self.trace.enter(TracedStep(to.value))


class OvertakenError(FencedError):
    """The token names the run that took over. Trying again cannot help."""


class OutcomeLostError(OutcomeUnknownError):
    """Kafka no longer shows whether a transaction was committed. Trying again cannot help."""
