"""Reads what Kafka holds of a query."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from kafka_eos_source.commit.facts import Held
from kafka_eos_source.commit.sources import OwnOffsets, on_cluster
from kafka_eos_source.errors import KafkaEosError
from kafka_eos_source.kafka.cluster_reader import LogEnds
from kafka_eos_source.model import Epochs, GroupOffset, TopicPartition
from kafka_eos_source.operate.checkpoint import Checkpoint
from kafka_eos_source.plan.loss import Loss, cut_logs, reconcile
from kafka_eos_source.protocol.identity import anchor as anchor_of
from kafka_eos_source.protocol.offset_log import LoggedOffsets
from kafka_eos_source.protocol.source_position import SourcePosition, is_kafka_offset_json
from kafka_eos_source.protocol.token import Token
from kafka_eos_source.runtime.deadline import Deadline

#: Prefix of Kafka's internal topics. One of them carries the tokens of a sink without a topic; the commands
#: do not show its log.
INTERNAL_PREFIX = "__"


class MetadataReader(Protocol):
    """Reads a cluster's metadata; implemented by `kafka.cluster_reader.ClusterReader`."""

    def topics(self, deadline: Deadline) -> tuple[str, Mapping[str, int]]:
        """Returns the cluster's id, and the number of partitions of each topic."""
        ...

    def group(
        self, group_id: str, certainly: Collection[TopicPartition], deadline: Deadline
    ) -> tuple[Mapping[TopicPartition, GroupOffset], bool]:
        """Returns the group's offsets, and whether an unfinished transaction is about to change them."""
        ...

    def topic_ids(self, topics: Collection[str]) -> Mapping[str, str]:
        """Returns the topic ids (KIP-516)."""
        ...

    def logs(self, partitions: Collection[TopicPartition]) -> Mapping[TopicPartition, LogEnds]:
        """Returns the bounds of each partition's log."""
        ...

    def epoch_ends(self, epochs: Epochs) -> Mapping[TopicPartition, int]:
        """Returns where a leader epoch ends in each partition's log, as `SourceAdmin.epoch_ends` does."""
        ...


@dataclass(frozen=True)
class PartitionView:
    """One partition that the query reads or writes, or has committed offsets for.

    Attributes:
        tp: the partition.
        start, end: offsets of the next batch, from Spark's log; None = the query does not read the partition,
            or has not planned the batch.
        group: the group's committed offset; None = no offset.
        token: the token in the metadata of that offset.
        log: bounds of the log; None = the partition does not exist, or is internal to Kafka.
    """

    tp: TopicPartition
    start: int | None = None
    end: int | None = None
    group: int | None = None
    token: Token | None = None
    log: LogEnds | None = None

    @property
    def transaction_since(self) -> int | None:
        """First offset of an open transaction of any producer; None if no transaction is open."""
        return self.log.stable if self.log is not None and self.log.stable < self.log.end else None


@dataclass(frozen=True)
class KafkaView:
    """What Kafka holds of a query.

    Attributes:
        cluster_id: Kafka's id of the cluster.
        topics: number of partitions of each topic on the cluster.
        held: what the group holds for the application.
        anchor: partition that carries the full token, as far as it is known.
        pending: whether an unfinished transaction is about to change the group's offsets.
        own: the next batch's offsets on this cluster.
        partitions: partitions that the query reads or writes, or has committed offsets for.
        losses: records that the next batch needs and Kafka no longer has.
        unrecovered: why ``held`` could not be completed from the query's token topic; None = it is complete,
            or the query has no token topic.
    """

    cluster_id: str
    topics: Mapping[str, int]
    held: Held
    anchor: TopicPartition
    pending: bool
    own: OwnOffsets
    partitions: Sequence[PartitionView] = ()
    losses: Sequence[Loss] = ()
    unrecovered: KafkaEosError | None = None

    @property
    def token(self) -> Token | None:
        """The newest token of the application; None = no token, or Kafka lost a newer one."""
        return self.held.whole_token

    @property
    def offsets(self) -> Mapping[TopicPartition, GroupOffset]:
        """The committed offsets of the group."""
        return self.held.offsets

    @property
    def committed(self) -> dict[TopicPartition, int]:
        """The committed offsets without their metadata."""
        return self.held.committed


def kafka_view(
    reader: MetadataReader,
    deadline: Deadline,
    group_id: str,
    checkpoint: Checkpoint | None,
    *,
    application_id: str,
    anchor_topic: str | None = None,
    source_cluster: str = "auto",
) -> KafkaView:
    """Reads what Kafka holds of a query.

    Raises:
        UnavailableError, AuthorizationError: if Kafka cannot be reached or refuses the request.
        OperatorError: if a token is damaged or has a newer format.
    """
    cluster_id, topics = reader.topics(deadline)
    sources = checkpoint.sources() if checkpoint is not None else ()
    own = on_cluster(sources, cluster_id, topics, source_cluster)
    anchor = anchor_of(anchor_topic, None)
    known_anchor = {anchor} if anchor_topic is not None else set()
    offsets, pending = reader.group(group_id, {*own.ends, *known_anchor}, deadline)
    read = {*own.ends, *(own.starts or {})}
    tokens = {tp: Token.decode(each.metadata) for tp, each in offsets.items()}
    written = {tp.topic for tp in {*offsets, *known_anchor} - read}
    shown = {*read, *offsets, *(TopicPartition(t, n) for t in written for n in range(topics.get(t, 0)))}
    existing = {tp for tp in shown if tp.partition < topics.get(tp.topic, 0)}
    logs = reader.logs({tp for tp in existing if not tp.topic.startswith(INTERNAL_PREFIX)})
    planned = checkpoint is not None and checkpoint.replays
    return KafkaView(
        cluster_id=cluster_id,
        topics=topics,
        held=Held.of(application_id, offsets),
        anchor=anchor,
        pending=pending,
        own=own,
        partitions=[
            PartitionView(
                tp,
                start=(own.starts or {}).get(tp),
                end=own.ends.get(tp) if planned else None,
                group=offsets[tp].offset if tp in offsets else None,
                token=tokens.get(tp),
                log=logs.get(tp),
            )
            for tp in sorted(shown)
            if tp in read or tp in offsets or not tp.topic.startswith(INTERNAL_PREFIX)
        ],
        losses=_losses(reader, checkpoint, own, existing, logs),
    )


def _losses(
    reader: MetadataReader,
    checkpoint: Checkpoint | None,
    own: OwnOffsets,
    existing: Collection[TopicPartition],
    logs: Mapping[TopicPartition, LogEnds],
) -> list[Loss]:
    """Returns the lost records, by the source's own rule. Checks only partitions that the batch knows."""
    if checkpoint is None or not own.starts:
        return []
    partitions = [tp for tp in own.starts if tp in existing]
    begins = _positions(checkpoint.before if checkpoint.replays else checkpoint.logged)
    epochs = {
        tp: epoch
        for each in begins
        for tp, epoch in each.epochs.items()
        if tp in partitions and each.end[tp] == own.starts[tp]
    }
    return reconcile(
        own.starts,
        {topic: topic_id for each in begins for topic, topic_id in each.topic_ids.items()},
        partitions,
        {tp: logs[tp].earliest for tp in partitions},
        {tp: logs[tp].end for tp in partitions},
        reader.topic_ids({tp.topic for tp in partitions}),
        cuts=cut_logs(own.starts, reader.epoch_ends(epochs)) if epochs else None,
    ).losses


def _positions(logged: LoggedOffsets | None) -> list[SourcePosition]:
    lines = logged.sources.values() if logged is not None else ()
    return [
        SourcePosition.from_json(line) for line in lines if line is not None and is_kafka_offset_json(line)
    ]
