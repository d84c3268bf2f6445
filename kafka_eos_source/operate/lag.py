"""Measures how far a query, or any consumer group, is behind the topics that it reads."""

from __future__ import annotations

import time
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from datetime import datetime, timezone
from typing import Any

from kafka_eos_source.errors import InvalidOptionError
from kafka_eos_source.kafka.cluster_reader import ClusterReader
from kafka_eos_source.model import GroupOffset, TopicPartition
from kafka_eos_source.operate.cluster import INTERNAL_PREFIX
from kafka_eos_source.protocol.token import Mark, Token
from kafka_eos_source.runtime.deadline import Deadline


@dataclass(frozen=True)
class PartitionLag:
    """How far a consumer group is behind in one partition.

    Attributes:
        tp: the partition.
        committed: next offset that the group will read.
        end: the last stable offset: what a read_committed consumer can read up to.
        is_open: whether a transaction is open in the partition, so that more records wait behind ``end``.
    """

    tp: TopicPartition
    committed: int
    end: int
    is_open: bool

    @property
    def lag(self) -> int:
        """Offsets from ``committed`` to ``end``, including control records."""
        return max(0, self.end - self.committed)


@dataclass(frozen=True)
class GroupLag:
    """The lag of a consumer group.

    Attributes:
        group_id: the group.
        at_seconds: when it was measured, in seconds since the epoch.
        partitions: of the topics that the group reads.
    """

    group_id: str
    at_seconds: float
    partitions: Sequence[PartitionLag]

    @property
    def total(self) -> int:
        return sum(each.lag for each in self.partitions)

    def to_json(self) -> dict[str, Any]:
        return {
            "group": self.group_id,
            "at": datetime.fromtimestamp(self.at_seconds, timezone.utc).isoformat(timespec="milliseconds"),
            "lag": self.total,
            "partitions": [
                {
                    "topic": each.tp.topic,
                    "partition": each.tp.partition,
                    "committed": each.committed,
                    "end": each.end,
                    "lag": each.lag,
                    "open_transaction": each.is_open,
                }
                for each in self.partitions
            ],
        }


def measure_lag(
    cluster: ClusterReader,
    group_id: str,
    deadline: Deadline,
    *,
    sources: Iterable[TopicPartition] = (),
) -> GroupLag:
    """Measures how far the committed offsets of a group are behind the topics it reads.

    Args:
        cluster: a reader of the group's cluster.
        group_id: the group of a query, or of any consumer.
        deadline: for the brokers.
        sources: partitions that the query is known to read, from its checkpoint.

    Raises:
        InvalidOptionError: the group has committed no offsets.
        UnavailableError, AuthorizationError: the cluster does not answer, or refuses to.
    """
    offsets, _ = cluster.group(group_id, (), deadline)
    if not offsets:
        raise InvalidOptionError(
            f"consumer group {group_id!r} has no committed offsets.",
            fix="check the name; the group of a query is 'kafka-eos.' and its application.id, unless "
            "kafka.group.id is set.",
        )
    read = {tp: offsets[tp].offset for tp in source_partitions(offsets.values(), sources)}
    _, known = cluster.topics(deadline)
    read = {tp: at for tp, at in read.items() if tp.partition < known.get(tp.topic, 0)}
    bounds = cluster.logs(list(read)) if read else {}
    return GroupLag(
        group_id,
        time.time(),
        [
            PartitionLag(tp, read[tp], bounds[tp].stable, bounds[tp].stable < bounds[tp].end)
            for tp in sorted(read)
        ],
    )


def source_partitions(
    offsets: Collection[GroupOffset], known: Iterable[TopicPartition] = ()
) -> set[TopicPartition]:
    """Returns the partitions that a group reads.

    The group of a query also holds offsets that are no positions of a reader: those of changelog
    partitions, and that of the anchor partition, which is the batch id. The anchor and one source partition
    carry the full token; the other source partitions carry marks.

    Args:
        offsets: all committed offsets of the group.
        known: partitions that the query is known to read, from its checkpoint.
    """
    found = set(known)
    full_tokens = []
    for each in offsets:
        token = Token.decode(each.metadata)
        if token is None and (Mark.decode(each.metadata) or not each.tp.topic.startswith(INTERNAL_PREFIX)):
            found.add(each.tp)
        elif token is not None and token.shard is None:
            full_tokens.append((each, token))
    topics = {tp.topic for tp in found}
    for each, token in full_tokens:
        if each.tp.topic in topics or each.offset != max(0, token.batch_id):
            found.add(each.tp)
    return found & {each.tp for each in offsets}
