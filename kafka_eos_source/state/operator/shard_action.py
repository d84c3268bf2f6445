"""Decides how a shard's database reaches the state that a batch starts from. Pure functions.

The token on the shard's changelog partition names the batch and the task attempt that the changelog ends
with. Only the token is authoritative: the local database is a copy that may be behind, may hold pending
batches, or may be gone.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from enum import Enum

from kafka_eos_source.errors import ForeignQueryError
from kafka_eos_source.protocol.identity import adopts
from kafka_eos_source.protocol.token import Token
from kafka_eos_source.state.model import BatchRecord, PendingBatch


class Action(Enum):
    """How the local state reaches the state that the token names."""

    READY = "ready"  #: the local state is that state
    PROMOTE = "promote"  #: the pending batch that the token names becomes the state
    CATCH_UP = "catch up"  #: read the changelog from the store's offset to the token's


@dataclass(frozen=True)
class RequestedBatch:
    """The micro-batch that Spark runs now."""

    query_id: str
    batch_id: int


@dataclass(frozen=True)
class LocalState:
    """What the shard's database holds.

    Attributes:
        batch: batch of the state; None if the store is empty.
        next_offset: offset in the changelog up to which the state was read; None if unknown.
        pending: changes of task attempts that may or may not have been committed.
    """

    batch: BatchRecord | None = None
    next_offset: int | None = None
    pending: Collection[PendingBatch] = ()


def check_owner(requested: RequestedBatch, token: Token | None, *, foreign_query: str) -> None:
    """Raises unless this query may continue with the state in the changelog.

    A changelog without a token is checked elsewhere: the task refuses one that holds state, and the commit
    knows which stores the query had before (`commit.report_checks`).

    This does not check whether Kafka already holds the batch. A shard cannot know that: it knows the batch
    id, but after a checkpoint was restored from a copy, Spark uses the same id for two different batches.
    The shard works on the state that the token names and reports which state that was. The commit compares,
    and drops the changes of a batch that Kafka already holds.

    Args:
        requested: the batch that Spark runs.
        token: token on the shard's changelog partition; None if there is no token.
        foreign_query: option ``onForeignQuery``.

    Raises:
        ForeignQueryError: if the changelog belongs to another query.
    """
    if token is None:
        return
    if token.query_id != requested.query_id and not adopts(foreign_query, token.query_id):
        raise ForeignQueryError(
            f"the state in the changelog belongs to query {token.query_id} (batch {token.batch_id}, run "
            f"{token.run_id or 'unknown'}), but this is query {requested.query_id}: the query uses another "
            "checkpoint, or a new one in place of a lost one.",
            fix="give this query its own application.id; or, to continue where the other query stopped, "
            "start with an empty checkpoint, startingOffsets=group on the source, and "
            "onForeignQuery=adopt on operator and sink.",
        )


def shard_action(local: LocalState, batch: BatchRecord, end: int) -> Action:
    """Returns how the shard's database reaches the state that the batch starts from.

    Args:
        local: what the database holds.
        batch: batch and task attempt that the token on the changelog partition names.
        end: committed offset of the changelog partition.
    """
    attempt = batch.task_attempt_id
    if local.batch is not None and local.batch.task_attempt_id == attempt:
        return Action.READY
    if any(each.record.task_attempt_id == attempt and each.base == local.batch for each in local.pending):
        return Action.PROMOTE
    # The store has everything that is committed below `end`: other attempts at this offset changed nothing.
    if local.batch is not None and local.next_offset == end:
        return Action.READY
    return Action.CATCH_UP
