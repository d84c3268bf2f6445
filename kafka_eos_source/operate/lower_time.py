"""Lowers the recorded processing time of an operator's shards after a clock was wrong.

The token on each changelog partition carries the processing time of the shard's last batch, and no later
batch has an earlier one. If a clock was ahead once, that time stays in the future, and no timer fires until
the other clocks are there. This command commits the same tokens again, with a time that is not in the future,
in one transaction of the query's own id. Offsets, state and the position of the query stay as they are.

A driver that is alive is fenced; it takes the id back before this command commits, which then changes
nothing, or after it. In that case tasks that began before still report the time in the future, and the commit
of their batch is refused (`commit.shard_checks`).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from kafka_eos_source.commit.ownership import refuse_changed
from kafka_eos_source.commit.session import KafkaClients
from kafka_eos_source.errors import (
    AbortableError,
    FencedError,
    OutcomeUnknownError,
    StateError,
    TokenMissingError,
)
from kafka_eos_source.kafka.config import admin_config
from kafka_eos_source.kafka.group import GroupOffsets
from kafka_eos_source.model import GroupOffset, TopicPartition
from kafka_eos_source.protocol.token import ShardProgress, Token
from kafka_eos_source.runtime.deadline import Deadline
from kafka_eos_source.state.changelog.topic import changelog_name


@dataclass(frozen=True)
class LoweredShard:
    """A shard whose recorded time is in the future.

    Attributes:
        shard: number of the shard.
        was_ms: recorded processing time, in ms since the epoch.
        offset: what the command commits instead: the same offset, with the token at the lower time.
    """

    shard: int
    was_ms: int
    offset: GroupOffset


def future_shards(
    offsets: Mapping[TopicPartition, GroupOffset], application_id: str, store: str, now_ms: int
) -> list[LoweredShard]:
    """Returns the shards of a store whose recorded time is later than ``now_ms``.

    Args:
        offsets: the committed offsets of the query's group.
        application_id: the query's ``application.id``.
        store: name of the store.
        now_ms: the current time, in ms since the epoch.

    Raises:
        TokenMissingError: if the group has no token of the store.
        StateError: if the state is being moved to other shards.
    """
    topic = changelog_name(application_id, store)
    shards: dict[TopicPartition, tuple[Token, ShardProgress]] = {}
    for tp, each in offsets.items():
        token = Token.decode(each.metadata) if tp.topic == topic else None
        if token is not None and token.shard is not None and token.application_id == application_id:
            shards[tp] = token, token.shard
    if not shards:
        raise TokenMissingError(
            f"the consumer group has no token of store {store!r} of application.id {application_id!r}, so "
            "there is no recorded time.",
            fix="correct --application-id, --store or --kafka group.id=…; `kafka-eos state ls` lists the "
            "stores.",
        )
    return [
        LoweredShard(
            tp.partition,
            progress.time_ms,
            replace(
                offsets[tp],
                metadata=replace(token, shard=replace(progress, time_ms=now_ms)).encode(),
            ),
        )
        for tp, (token, progress) in sorted(shards.items())
        if progress.time_ms > now_ms
    ]


def find_future_shards(
    kafka: Mapping[str, str], application_id: str, store: str, group_id: str, now_ms: int, deadline: Deadline
) -> list[LoweredShard]:
    """Returns the shards that `lower` would change; raises as `future_shards`, or if Kafka fails."""
    offsets, _ = GroupOffsets(admin_config(kafka)).now(group_id, (), deadline)
    return future_shards(offsets, application_id, store, now_ms)


def lower_times(
    kafka: Mapping[str, str], application_id: str, store: str, group_id: str, now_ms: int, deadline: Deadline
) -> list[LoweredShard]:
    """Lowers the recorded times that are in the future to ``now_ms``; returns these shards.

    Args:
        kafka: librdkafka properties of a producer.
        application_id, store: the store.
        group_id: the query's consumer group.
        now_ms: the current time, in ms since the epoch.
        deadline: for the whole call.

    Raises:
        StateError: if the query is alive, or the group changed meanwhile. Nothing was changed.
        TokenMissingError: if the group has no token of the store.
        OutcomeUnknownError: if Kafka did not answer the commit; run the command again.
        KafkaEosError: if Kafka fails.
    """
    clients = KafkaClients(kafka)
    producer = clients.producer(application_id)
    try:
        producer.init(deadline)
        offsets = clients.group_offsets(group_id, (), deadline)
        shards = future_shards(offsets, application_id, store, now_ms)
        if not shards:
            return []
        producer.begin()
        producer.send_offsets([each.offset for each in shards], group_id, deadline)
        # a coordinator that accepted these offsets is up to date; the one that was asked before may not be
        partitions = [each.offset.tp for each in shards]
        refuse_changed(group_id, partitions, offsets, clients.proved_offsets(group_id, partitions, deadline))
        producer.commit(deadline)
        return shards
    except OutcomeUnknownError as error:
        raise OutcomeUnknownError(
            error.message, fix="run the command again; it shows which times are recorded."
        ) from error
    except (FencedError, AbortableError) as error:
        producer.abort(deadline)
        raise StateError(
            f"a driver of application.id={application_id!r} is alive, or another program commits offsets to "
            f"the group, so no time was lowered: {error.message}",
            fix="stop the query, then run the command again.",
        ) from error
    finally:
        producer.close()
