"""The errors with which a verdict refuses a batch.

Each function returns one error; its docstring states the reason for it.
"""

from __future__ import annotations

from collections.abc import Collection

from kafka_eos_source.commit.facts import Batch, Held
from kafka_eos_source.errors import (
    CheckpointAheadError,
    CheckpointRolledBackError,
    ForeignQueryError,
    KafkaEosError,
    OffsetsMovedError,
    TokenMissingError,
)
from kafka_eos_source.model import Offsets, TopicPartition
from kafka_eos_source.protocol.token import Token

#: A message names this many partitions and counts the others.
_NAMED = 5


def shared_group(batch: Batch, tp: TopicPartition, other: Token | None) -> ForeignQueryError:
    """Another transactional id commits its offsets to the same partitions of the group.

    Args:
        batch: the batch.
        tp: one of these partitions.
        other: the token on it; None if its metadata is a mark, which holds only a hash of the id.
    """
    name = "another application.id" if other is None else f"application.id={other.application_id!r}"
    return ForeignQueryError(
        f"the offset of {tp} in the consumer group of this query was committed by {name}; this query has "
        f"application.id={batch.application_id!r}. Two transactional ids cannot share one group: neither "
        "would fence the other.",
        fix="give each query its own kafka.group.id; or, if this query should continue the work of the other "
        "one, give it the application.id of the other one and .option('onForeignQuery', 'adopt').",
    )


def token_missing(batch: Batch, token_topic: str | None) -> TokenMissingError:
    """Batches of the query were committed, and Kafka has lost their token."""
    places = "" if token_topic is None else f", in the consumer group or in token.topic={token_topic!r}"
    if batch.versioned:
        fix = (
            f"check whether version {batch.batch_id} is in the output. If it is not, write it once with "
            ".option('onMissingToken', 'assume_not_committed'). If it is, skip it, and write the next "
            "version once with that option."
        )
    else:
        fix = (
            "check whether the batch is in the output; then restart once with "
            ".option('onMissingToken', 'assume_committed') or 'assume_not_committed'."
        )
    return TokenMissingError(
        f"Kafka holds no token of application.id={batch.application_id!r}{places}, although batches of "
        f"this query were committed. So Kafka cannot show whether batch {batch.batch_id} is in the output. "
        "The consumer group was deleted, its offsets expired (offsets.retention.minutes), or the topic whose "
        "offset carried the token was deleted.",
        fix=fix,
    )


def foreign_query(batch: Batch, token: Token) -> ForeignQueryError:
    """The transactional id belongs to another query."""
    return ForeignQueryError(
        f"application.id={batch.application_id!r} belongs to query {token.query_id} (last batch "
        f"{token.batch_id}, run {token.run_id or 'unknown'}), but this is query {batch.query_id}. The query "
        "uses another checkpoint, or its checkpoint was lost and replaced.",
        fix="give this query its own application.id; or, to continue where the other query stopped, "
        "start with startingOffsets=group and .option('onForeignQuery', 'adopt').",
    )


def adopted_start_not_logged(token: Token) -> CheckpointRolledBackError:
    """The batch does not record where it starts, so an adoption cannot be checked."""
    return CheckpointRolledBackError(
        f"cannot adopt query {token.query_id}: the start of this query is not known, so it cannot be "
        "compared with where the other query stopped. Spark's own Kafka source does not log where its "
        "first batch starts.",
        fix="read with format('kafka-eos') and startingOffsets=group.",
    )


def adopted_with_shared_partitions(batch: Batch, token: Token) -> CheckpointRolledBackError:
    """Two sources read one partition, so one committed offset cannot tell where both of them stopped."""
    return CheckpointRolledBackError(
        f"cannot adopt query {token.query_id}: two sources of this query read {_list(sorted(batch.shared))}. "
        "The group holds one offset for each partition, that of the slower source, so the position of the "
        "faster source is not known.",
        fix="restore the other checkpoint; or give this query a new application.id and set startingOffsets "
        "of each source.",
    )


def adopted_offsets_deleted(token: Token, unknown: list[TopicPartition]) -> CheckpointRolledBackError:
    """The group lost offsets of the other query, so its last position is not known."""
    return CheckpointRolledBackError(
        f"cannot adopt query {token.query_id}: the group has no offset of {_list(unknown)}, and it lost "
        "offsets that the other query committed. So the position where that query stopped is not known.",
        fix="restore the other checkpoint; or give this query a new application.id and set startingOffsets "
        "to where it should start.",
    )


def adopted_from_another_offset(
    token: Token, tp: TopicPartition, start: int | None, stopped: int
) -> CheckpointRolledBackError:
    """The batch does not start at the offset where the other query stopped."""
    return CheckpointRolledBackError(
        f"cannot adopt query {token.query_id}: this query starts {tp} at offset "
        f"{'unknown' if start is None else start}, but the other query stopped at {stopped}.",
        fix="start the new checkpoint with startingOffsets=group.",
    )


def offsets_moved(batch: Batch, token: Token, held: Held, moved: list[TopicPartition]) -> OffsetsMovedError:
    """Another program committed offsets in the consumer group of the query."""
    return OffsetsMovedError(
        f"another program committed the offsets of {_list(moved)} in the consumer group of "
        f"application.id={batch.application_id!r} after batch {token.batch_id}: they do not carry the mark "
        f"of a transaction of this query. Committed now: {_offsets(held.committed, moved)}; the checkpoint "
        f"is at {_offsets(batch.starts or {}, moved)}.",
        fix="to continue from the checkpoint, restart once with .option('onMovedOffsets', 'overwrite'); to "
        "continue from the moved offsets, start a new checkpoint with startingOffsets=group and "
        ".option('onForeignQuery', 'adopt').",
    )


def not_continued(batch: Batch, token: Token, held: Held) -> KafkaEosError:
    """The batch neither continues what Kafka holds nor is part of it.

    Returns:
        `CheckpointAheadError` if batches between are missing; otherwise `CheckpointRolledBackError`.
    """
    committed = held.committed
    known = sorted(tp for tp in batch.ends or {} if tp in committed)
    starts, ends = batch.starts or {}, batch.ends or {}
    differing = [
        tp for tp in known if starts.get(tp) != committed[tp] or (ends[tp] > committed[tp]) is batch.jump
    ] or known
    ahead = (
        bool(known) and all(starts.get(tp, 0) >= committed[tp] for tp in known)
        if batch.comparable
        else batch.batch_id > token.batch_id
    )
    ranges = (
        f" Offsets of the batch: {_ranges(starts, ends, differing)}; committed: "
        f"{_offsets(committed, differing)}."
        if differing
        else ""
    )
    transaction = (
        f"transaction {token.sequence} with batch {token.batch_id}"
        if token.sequence > 0
        else "the transaction that recorded where the query starts"
    )
    text = (
        f"batch {batch.batch_id} does not continue the last transaction that Kafka holds of application.id="
        f"{batch.application_id!r}: {transaction}.{ranges}"
    )
    if ahead:
        return CheckpointAheadError(
            f"{text} The batches between them were written elsewhere or lost.",
            fix="point the sink at the cluster and application.id that it wrote before; or, if the missing "
            "batches may be skipped, start a new checkpoint with startingOffsets=group and "
            ".option('onForeignQuery', 'adopt').",
        )
    why = (
        "A part of its input is in the output already."
        if batch.comparable
        else "The query has sources other than Kafka, two sources on one partition, a recreated topic, or "
        "Spark's own state, so offsets cannot show which part of its input is in the output already."
    )
    return CheckpointRolledBackError(
        f"{text} {why}",
        fix="restore the newest checkpoint; or set application.id and onRolledBackCheckpoint=jump on the "
        "source, so that it continues from the offsets that Kafka holds; or start a new checkpoint with "
        "startingOffsets=group and .option('onForeignQuery', 'adopt').",
    )


def _list(partitions: list[TopicPartition]) -> str:
    return ", ".join(str(tp) for tp in partitions[:_NAMED]) + _others(partitions)


def _offsets(offsets: Offsets, partitions: list[TopicPartition]) -> str:
    named = ", ".join(f"{tp} at {offsets.get(tp, 'none')}" for tp in partitions[:_NAMED])
    return named + _others(partitions)


def _ranges(starts: Offsets, ends: Offsets, partitions: list[TopicPartition]) -> str:
    named = ", ".join(f"{tp} [{starts.get(tp, '?')}, {ends[tp]})" for tp in partitions[:_NAMED])
    return named + _others(partitions)


def _others(partitions: Collection[TopicPartition]) -> str:
    return f" and {len(partitions) - _NAMED} more" if len(partitions) > _NAMED else ""
