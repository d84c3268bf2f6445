"""Is this batch in Kafka already? The decision of a freshly initialised owner, as a pure function."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum

from kafka_eos_source.errors import (
    CheckpointAheadError,
    CheckpointRolledBackError,
    ForeignQueryError,
    TokenMissingError,
)
from kafka_eos_source.model import Offsets, TopicPartition
from kafka_eos_source.protocol.token import Token

#: How the query ids of batch writes without ``txnVersion`` start.
ONCE = "once:"


class Verdict(Enum):
    """What to do with the batch."""

    WRITE = "write"  #: it is not in Kafka
    SKIP = "skip"  #: it is in Kafka, whole
    MARK = "mark"  #: a person said that it is in Kafka, where no token says so: write its token alone


@dataclass(frozen=True)
class Batch:
    """One micro-batch, or one batch write, as the decision sees it.

    Attributes:
        application_id: transactional id.
        query_id: of the checkpoint, or ``txnAppId:…``.
        run_id: of this run, "" when not known.
        batch_id: Spark's batch id, or ``txnVersion``.
        start_digest, end_digest: of the offset log's lines; "" for batch writes.
        starts, ends: offsets of the Kafka sources on the sink's own cluster, as far as they are known.
        comparable: whether those are *all* sources of the query, so that offsets alone can tell.
        versioned: a batch write with ``txnVersion``: versions only grow, gaps are allowed.
        once: a batch write without it: only its own token counts, which settles an unknown outcome.
        first_batch: the first batch this checkpoint ever committed through us; None = none yet.
    """

    application_id: str
    query_id: str
    run_id: str
    batch_id: int
    start_digest: str = ""
    end_digest: str = ""
    starts: Offsets | None = None
    ends: Offsets | None = None
    comparable: bool = False
    versioned: bool = False
    once: bool = False
    first_batch: int | None = None


def decide(
    batch: Batch,
    token: Token | None,
    committed: Mapping[TopicPartition, int],
    *,
    missing_token: str = "fail",
    foreign_query: str = "fail",
) -> Verdict:
    """What to do with ``batch``, given what Kafka holds.

    Args:
        batch: the batch at hand.
        token: newest token of the group, read after ``init_transactions``; None = there is none.
        committed: the group's committed offsets.
        missing_token: option ``onMissingToken``: ``fail``, ``assume_committed``, ``assume_not_committed``.
        foreign_query: option ``onForeignQuery``: ``fail`` or ``adopt``.

    Raises:
        TokenMissingError, ForeignQueryError, CheckpointRolledBackError, CheckpointAheadError: see there.
    """
    if token is None:
        return _without_token(batch, missing_token)
    if batch.once and token.query_id.startswith(ONCE):
        return Verdict.SKIP if token.query_id == batch.query_id else Verdict.WRITE
    if token.query_id != batch.query_id:
        return _foreign(batch, token, committed, foreign_query)
    if batch.versioned:
        return Verdict.SKIP if batch.batch_id <= token.batch_id else Verdict.WRITE
    if batch.batch_id == token.batch_id + 1:
        return Verdict.WRITE
    if batch.batch_id == token.batch_id and batch.end_digest == token.end_digest:
        return Verdict.SKIP
    if batch.batch_id <= token.batch_id:
        return _rolled_back(batch, token, committed)
    raise CheckpointAheadError(
        f"Spark is about to write batch {batch.batch_id}, but Kafka holds batch {token.batch_id} of this "
        f"query (application.id={batch.application_id!r}): batches {token.batch_id + 1} to "
        f"{batch.batch_id - 1} were written elsewhere or lost.",
        fix="point the sink at the cluster and application.id that it wrote before; or, if the batches "
        "between may be left out, start a new checkpoint with startingOffsets=group, onForeignQuery=adopt.",
    )


def _without_token(batch: Batch, missing_token: str) -> Verdict:
    never_committed = batch.once or batch.first_batch is None or batch.first_batch == batch.batch_id
    if batch.versioned or never_committed or missing_token == "assume_not_committed":
        return Verdict.WRITE
    if missing_token == "assume_committed":
        return Verdict.MARK
    raise TokenMissingError(
        f"Kafka holds no token of application.id={batch.application_id!r}, although this checkpoint has "
        f"committed batches since batch {batch.first_batch}: whether batch {batch.batch_id} is in the output "
        "cannot be told. The group was deleted, or its offsets expired (offsets.retention.minutes).",
        fix="look whether the batch is in the output; then restart once with "
        ".option('onMissingToken', 'assume_committed') or 'assume_not_committed'.",
    )


def _foreign(
    batch: Batch, token: Token, committed: Mapping[TopicPartition, int], foreign_query: str
) -> Verdict:
    if foreign_query != "adopt":
        raise ForeignQueryError(
            f"application.id={batch.application_id!r} belongs to query {token.query_id} (last batch "
            f"{token.batch_id}, run {token.run_id or 'unknown'}); this is query {batch.query_id}: another "
            "checkpoint, or a new one in place of a lost one.",
            fix="give this query an application.id of its own; or, to go on where the other query stopped, "
            "start with startingOffsets=group and .option('onForeignQuery', 'adopt').",
        )
    for tp, start in (batch.starts or {}).items():
        if tp in committed and committed[tp] != start:
            raise CheckpointRolledBackError(
                f"adopting query {token.query_id}: this query starts {tp} at offset {start}, "
                f"the other one stopped at {committed[tp]}.",
                fix="start the new checkpoint with startingOffsets=group.",
            )
    return Verdict.WRITE


def _rolled_back(batch: Batch, token: Token, committed: Mapping[TopicPartition, int]) -> Verdict:
    """The checkpoint is older than what Kafka holds: offsets tell, if Kafka is all that the query reads."""
    if batch.comparable and batch.ends and batch.starts is not None:
        if all(end <= committed.get(tp, 0) for tp, end in batch.ends.items()):
            return Verdict.SKIP
        if all(committed.get(tp, start) == start for tp, start in batch.starts.items()):
            return Verdict.WRITE
    raise CheckpointRolledBackError(
        f"Spark replays batch {batch.batch_id}, Kafka holds batch {token.batch_id} of this query "
        f"(application.id={batch.application_id!r}), and the replayed range is not the one that was "
        "committed: part of its input is in the output already.",
        fix="restore the newest checkpoint; or start a new one with startingOffsets=group and "
        "onForeignQuery=adopt, which goes on where Kafka stands.",
    )
