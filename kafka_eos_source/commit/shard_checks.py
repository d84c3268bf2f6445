"""Checks that the state changes of a batch belong to the state that Kafka holds of each shard."""

from __future__ import annotations

from collections.abc import Sequence

from kafka_eos_source.commit.facts import Held
from kafka_eos_source.errors import RestartQueryError, StateError, StatefulProcessorError, StateLostError
from kafka_eos_source.model import ShardReport
from kafka_eos_source.protocol.token import Token

_SAME_NAMES = (
    "restart the query; if the error comes back, give the operator and the sink the same application.id, "
    "kafka.group.id and cluster."
)


def check_shards(shards: Sequence[ShardReport], batch_id: int, held: Held) -> None:
    """Checks that every shard applied its changes to the state that Kafka holds.

    Args:
        shards: the reports of a batch that is about to be written.
        batch_id: id of the batch, for messages.
        held: what the group holds.

    Raises:
        RestartQueryError: if a shard started from the state of another transaction.
        StateLostError: if transactions were committed without the state changes of a shard.
        StateError: if an operator in the read did not run, which ran in the last transaction.
        StatefulProcessorError: if the processor failed on the batch.
    """
    newest = -1 if held.token is None else held.token.sequence
    _check_all_in_read(shards, batch_id, held, newest)
    for shard in shards:
        if shard.skipped:
            raise RestartQueryError(
                f"the changelog {shard.tp} already holds batch {batch_id}, but the token shows that Kafka "
                "does not hold the batch.",
                fix=_SAME_NAMES,
            )
        token = _token(shard, held)
        committed_sequence = _sequence(token)
        if shard.sequence != committed_sequence:
            raise RestartQueryError(
                f"shard {shard.tp} started from the state of transaction {shard.sequence}, but Kafka holds "
                f"the state of transaction {committed_sequence} (-1 means none).",
                fix=_SAME_NAMES,
            )
        if token is not None and committed_sequence < newest and not shard.accepts_gap:
            raise StateLostError(
                f"the changelog {shard.tp} holds the state of transaction {committed_sequence} (batch "
                f"{token.batch_id}), but the last transaction of the query is {newest}: transactions between "
                "them were committed without their state changes.",
                fix="keep the operator's column of changes in the rows that the query writes. Then start "
                "with a new checkpoint and application.id; or, to continue with the state as it is, start "
                "once with onMissingState=changelog.",
            )
        if shard.failure:
            raise StatefulProcessorError(f"shard {shard.tp}, batch {batch_id}: {shard.failure}")


def check_one_source(shards: Sequence[ShardReport], sources: int) -> None:
    """Checks that a query with an operator in the read has no other source.

    Spark reads a source only in batches for which that source has new offsets. In other batches such an
    operator would not run, and the chain of its transactions would have a gap.

    Args:
        shards: the reports of a batch.
        sources: number of sources in the offset log.

    Raises:
        StateError: if there are several.
    """
    topic = next((shard.tp.topic for shard in shards if shard.in_read), None)
    if topic is None or sources == 1:
        return
    raise StateError(
        f"the operator with the changelog {topic!r} has shards='partitions', and the query has {sources} "
        "sources; expected one. Spark would not run the operator in batches that only another source has "
        "records for. Nothing of this batch was written.",
        fix="read all topics with one source (subscribe), write the results of the sources with queries of "
        "their own, or pass a number of shards; with a new application.id and a new checkpoint.",
    )


def _check_all_in_read(shards: Sequence[ShardReport], batch_id: int, held: Held, newest: int) -> None:
    """Checks that each operator in the read that ran in the last transaction has run in this batch."""
    reported = {shard.tp.topic for shard in shards}
    for tp, offset in held.offsets.items():
        token = Token.decode(offset.metadata) if tp.topic not in reported else None
        if token is None or not token.in_read or token.application_id != held.application_id:
            continue
        if token.sequence == newest:
            raise StateError(
                f"the operator with the changelog {tp.topic!r} has shards='partitions', and did not run in "
                f"batch {batch_id}. Spark ran the batch without the source, which had no new offsets, for a "
                "stateful step of its own (such as dropDuplicates or a join); or the query no longer has the "
                "operator. Nothing of this batch was written.",
                fix="remove Spark's stateful step, or pass a number of shards, and start over with a new "
                "application.id and a new checkpoint. If you removed the operator from the query for good, "
                f"stop the query and delete the offsets of its changelog: kafka-consumer-groups.sh "
                f"--delete-offsets --group … --topic {tp.topic}.",
            )


def shards_match(shards: Sequence[ShardReport], held: Held) -> bool:
    """Whether every shard applied its changes to the state in ``held``."""
    return not any(shard.skipped or shard.sequence != _sequence(_token(shard, held)) for shard in shards)


def _token(shard: ShardReport, held: Held) -> Token | None:
    offset = held.offsets.get(shard.tp)
    return None if offset is None else Token.decode(offset.metadata)


def _sequence(token: Token | None) -> int:
    return -1 if token is None else token.sequence


def check_same_log(shard: ShardReport, end: int) -> None:
    """Checks that nobody deleted and recreated the changelog, which would lose the shard's earlier state.

    Args:
        shard: the report of the shard.
        end: end offset of the changelog, after the changes were flushed.

    Raises:
        StateLostError: if the changelog is shorter, because the topic was deleted and created again.
    """
    if end < shard.next_offset + shard.records:
        raise StateLostError(
            f"the changelog {shard.tp} ends at offset {end} and includes {shard.records} changes of this "
            f"batch, but the state that they belong to ends at offset {shard.next_offset}: the topic was "
            "deleted and created again while the query ran. Nothing of this batch was committed.",
            fix="restore the topic from a copy, or start with a new checkpoint and application.id.",
        )
