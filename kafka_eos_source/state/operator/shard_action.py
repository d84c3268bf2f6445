"""What a shard has to do before a batch, given what Kafka holds and what lies on its disk: a pure function.

The token on the shard's changelog partition says which batch and which attempt the changelog ends with. It is
the only truth: the local database is a copy that may be behind, may hold pending batches, or may be gone.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from enum import Enum

from kafka_eos_source.errors import ForeignQueryError, TokenMissingError
from kafka_eos_source.protocol.token import Token
from kafka_eos_source.state.model import BatchRecord, PendingBatch


class Action(Enum):
    """How the local state gets to what the token says."""

    READY = "ready"  #: it is there
    PROMOTE = "promote"  #: the pending batch that the token names becomes the state
    CATCH_UP = "catch up"  #: the records from the store's offset to the token's are read
    START = "start"  #: no token: the changelog must be empty, which is looked at


@dataclass(frozen=True)
class Spark:
    """The batch that Spark asks for."""

    query_id: str
    batch_id: int


@dataclass(frozen=True)
class Local:
    """What the shard's database holds.

    Attributes:
        batch: of the state; None = an empty store.
        next_offset: of the changelog; None = none known.
        pending: changes of attempts that may or may not have been committed.
    """

    batch: BatchRecord | None = None
    next_offset: int | None = None
    pending: Collection[PendingBatch] = ()


def check_owner(spark: Spark, token: Token | None, *, missing_state: str, foreign_query: str) -> None:
    """Refuses a changelog whose state cannot be the one that the batch starts from.

    A shard does not decide whether its batch is in Kafka already: it knows the batch id, and Spark uses one
    number for two different batches after a checkpoint was restored from a copy. It changes the state that
    the token says, and reports which one that is; the commit compares, and drops the changes of a batch
    that Kafka holds.

    Args:
        spark: the batch at hand.
        token: on the shard's changelog partition; None = there is none.
        missing_state: option ``onMissingState``.
        foreign_query: option ``onForeignQuery``.

    Raises:
        ForeignQueryError: the changelog is another query's.
        TokenMissingError: a query that has run has no token on its changelog.
    """
    if token is None:
        if spark.batch_id > 0 and missing_state != "changelog":
            raise TokenMissingError(
                f"Spark is at batch {spark.batch_id} and no batch of the query ever committed state to this "
                "changelog: the operator is new to the query, its column of changes was dropped on the way, "
                "the sink has another application.id or kafka.group.id, or the group was deleted.",
                fix="for an operator that is new to the query, or to go on with what the changelog holds, "
                "start once with onMissingState=changelog; else start anew with a new checkpoint and "
                "application.id.",
            )
        return
    if token.query_id != spark.query_id and foreign_query != "adopt":
        raise ForeignQueryError(
            f"the changelog's state is that of query {token.query_id} (batch {token.batch_id}, run "
            f"{token.run_id or 'unknown'}); this is query {spark.query_id}: another checkpoint, or a new one "
            "in place of a lost one.",
            fix="give this query an application.id of its own; or, to go on where the other query stopped, "
            "start with startingOffsets=group on the source and onForeignQuery=adopt on operator and sink.",
        )


def shard_action(local: Local, token: Token | None, end: int) -> Action:
    """How the shard's database gets to the state that the batch starts from.

    Args:
        local: what it holds.
        token: on the changelog partition; None = there is none.
        end: committed offset of the changelog partition; of no account without a token.
    """
    if token is None:
        return Action.START
    attempt = token.shard.task_attempt_id if token.shard is not None else None
    if local.batch is not None and local.batch.attempt == attempt:
        return Action.READY
    if any(each.record.attempt == attempt and each.base == local.batch for each in local.pending):
        return Action.PROMOTE
    # all that is committed below `end` is in the store: other attempts at the same offset changed nothing
    if local.batch is not None and local.next_offset == end:
        return Action.READY
    return Action.CATCH_UP
