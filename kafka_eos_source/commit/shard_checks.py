"""Checks that the state changes of a batch fit what Kafka holds of each shard, before they are committed."""

from __future__ import annotations

from collections.abc import Sequence

from kafka_eos_source.commit.facts import Held
from kafka_eos_source.errors import RestartQueryError, StatefulProcessorError, StateLostError
from kafka_eos_source.model import ShardReport
from kafka_eos_source.protocol.token import Token

_SAME_NAMES = (
    "restart the query; if it stays so, give operator and sink the same application.id, kafka.group.id and "
    "cluster."
)


def check_shards(shards: Sequence[ShardReport], batch_id: int, held: Held) -> None:
    """Checks that every shard made its changes to the state that Kafka holds.

    Args:
        shards: the reports of a batch that is about to be written.
        batch_id: of the batch, for messages.
        held: what the group holds.

    Raises:
        RestartQueryError: the state of a shard is that of another transaction.
        StateLostError: transactions were committed without the state of a shard.
        StatefulProcessorError: the processor failed on the batch.
    """
    newest = -1 if held.token is None else held.token.sequence
    for shard in shards:
        if shard.skipped:
            raise RestartQueryError(
                f"the changelog of {shard.tp} holds batch {batch_id} already; the token says that Kafka does "
                "not hold the batch.",
                fix=_SAME_NAMES,
            )
        token = _token(shard, held)
        stands_at = _sequence(token)
        if shard.sequence != stands_at:
            raise RestartQueryError(
                f"shard {shard.tp} changed the state of transaction {shard.sequence}; Kafka holds that of "
                f"transaction {stands_at} (-1 = none).",
                fix=_SAME_NAMES,
            )
        if token is not None and stands_at < newest and not shard.accepts_gap:
            raise StateLostError(
                f"the state of shard {shard.tp} in the changelog is that of transaction {stands_at} (batch "
                f"{token.batch_id}), the query's last one is {newest}: transactions between them were "
                "committed without the changes that they made to the state.",
                fix="keep the operator's column of changes in what is written; start anew with a new "
                "checkpoint and application.id, or, to go on with the state as it is, once with "
                "onMissingState=changelog.",
            )
        if shard.failure:
            raise StatefulProcessorError(f"shard {shard.tp}, batch {batch_id}: {shard.failure}")


def stand_at(shards: Sequence[ShardReport], held: Held) -> bool:
    """Whether every shard made its changes to the state that the group holds, as far as it is known."""
    return not any(shard.skipped or shard.sequence != _sequence(_token(shard, held)) for shard in shards)


def _token(shard: ShardReport, held: Held) -> Token | None:
    offset = held.offsets.get(shard.tp)
    return None if offset is None else Token.decode(offset.metadata)


def _sequence(token: Token | None) -> int:
    return -1 if token is None else token.sequence


def check_same_log(shard: ShardReport, end: int) -> None:
    """The changes stand behind the state that they are made to, else the changelog would hold a part of it.

    Raises:
        StateLostError: they do not.
    """
    if end < shard.next_offset + shard.records:
        raise StateLostError(
            f"changelog {shard.tp} ends at offset {end}, with {shard.records} changes of this batch in it; "
            f"the state that they are made to is that of offset {shard.next_offset}: the topic was deleted "
            "and made anew while the query ran.",
            fix="nothing of this batch is in Kafka. Put the topic back from a copy, or start anew with a new "
            "checkpoint and application.id.",
        )
