"""What Kafka holds of a query at this moment."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from kafka_eos_source.commit.facts import Held
from kafka_eos_source.commit.sources import OwnOffsets, on_cluster
from kafka_eos_source.errors import KafkaEosError
from kafka_eos_source.kafka.cluster_reader import LogEnds
from kafka_eos_source.model import GroupOffset, TopicPartition
from kafka_eos_source.operate.checkpoint import Checkpoint
from kafka_eos_source.plan.loss import Loss, reconcile
from kafka_eos_source.protocol.identity import anchor as anchor_of
from kafka_eos_source.protocol.offset_log import LoggedOffsets
from kafka_eos_source.protocol.source_position import SourcePosition, is_kafka_offset_json
from kafka_eos_source.protocol.token import Token
from kafka_eos_source.runtime.deadline import Deadline

#: Where tokens go for want of a topic; its log is nobody's to look at.
_INTERNAL = "__"


class Look(Protocol):
    """What is asked of a cluster; see `kafka.cluster_reader.ClusterReader`."""

    def topics(self, deadline: Deadline) -> tuple[str, Mapping[str, int]]: ...
    def group(
        self, group_id: str, certainly: Collection[TopicPartition], deadline: Deadline
    ) -> tuple[Mapping[TopicPartition, GroupOffset], bool]: ...
    def topic_ids(self, topics: Collection[str]) -> Mapping[str, str]: ...
    def logs(self, partitions: Collection[TopicPartition]) -> Mapping[TopicPartition, LogEnds]: ...


@dataclass(frozen=True)
class PartitionView:
    """One partition that the query reads, writes, or has an offset of.

    Attributes:
        tp: which.
        start, end: of the next batch, by Spark's log; None = it does not read it, or is not planned yet.
        group: committed offset of the group; None = none.
        token: beside that offset.
        log: where its log begins and ends; None = it is gone, or Kafka's own.
    """

    tp: TopicPartition
    start: int | None = None
    end: int | None = None
    group: int | None = None
    token: Token | None = None
    log: LogEnds | None = None

    @property
    def transaction_since(self) -> int | None:
        """First offset of a transaction that is open in it, anybody's; None = there is none."""
        return self.log.stable if self.log is not None and self.log.stable < self.log.end else None


@dataclass(frozen=True)
class KafkaView:
    """What Kafka holds.

    Attributes:
        cluster_id: Kafka's id of the cluster.
        topics: all of its topics, with their number of partitions.
        held: what the group holds of the application.
        anchor: partition of the full token, as far as it is known.
        pending: whether an unfinished transaction is about to change the group's offsets.
        own: the next batch's offsets on this cluster.
        partitions: that the query reads, writes, or has an offset of.
        losses: what the next batch would not find any more.
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
        """The newest token of the application; None = there is none, or a newer one was lost."""
        return self.held.whole_token

    @property
    def offsets(self) -> Mapping[TopicPartition, GroupOffset]:
        """The committed offsets of the group."""
        return self.held.offsets

    @property
    def committed(self) -> dict[TopicPartition, int]:
        """The committed offsets without their metadata."""
        return self.held.committed


def view(
    look: Look,
    deadline: Deadline,
    group_id: str,
    checkpoint: Checkpoint | None,
    *,
    application_id: str,
    anchor_topic: str | None = None,
    source_cluster: str = "auto",
) -> KafkaView:
    """Asks the cluster.

    Raises:
        UnavailableError, AuthorizationError: as `Look` has it.
        OperatorError: a token is damaged, or of a newer format.
    """
    cluster_id, topics = look.topics(deadline)
    sources = checkpoint.sources() if checkpoint is not None else ()
    own = on_cluster(sources, cluster_id, topics, source_cluster)
    anchor = anchor_of(anchor_topic, None)
    stated = {anchor} if anchor_topic is not None else set()
    offsets, pending = look.group(group_id, {*own.ends, *stated}, deadline)
    read = {*own.ends, *(own.starts or {})}
    tokens = {tp: Token.decode(each.metadata) for tp, each in offsets.items()}
    written = {tp.topic for tp in {*offsets, *stated} - read}
    shown = {*read, *offsets, *(TopicPartition(t, n) for t in written for n in range(topics.get(t, 0)))}
    there = {tp for tp in shown if tp.partition < topics.get(tp.topic, 0)}
    logs = look.logs({tp for tp in there if not tp.topic.startswith(_INTERNAL)})
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
            if tp in read or tp in offsets or not tp.topic.startswith(_INTERNAL)
        ],
        losses=_losses(look, checkpoint, own, there, logs),
    )


def _losses(
    look: Look,
    checkpoint: Checkpoint | None,
    own: OwnOffsets,
    there: Collection[TopicPartition],
    logs: Mapping[TopicPartition, LogEnds],
) -> list[Loss]:
    """By the source's own rule. Partitions that the batch does not know are not looked for."""
    if checkpoint is None or not own.starts:
        return []
    partitions = [tp for tp in own.starts if tp in there]
    return reconcile(
        own.starts,
        _topic_ids(checkpoint.before if checkpoint.replays else checkpoint.logged),
        partitions,
        {tp: logs[tp].earliest for tp in partitions},
        {tp: logs[tp].end for tp in partitions},
        look.topic_ids({tp.topic for tp in partitions}),
    ).losses


def _topic_ids(logged: LoggedOffsets | None) -> dict[str, str]:
    found: dict[str, str] = {}
    for line in (logged.sources if logged is not None else {}).values():
        if line is not None and is_kafka_offset_json(line):
            found.update(SourcePosition.from_json(line).topic_ids)
    return found
