"""What is to be committed: one batch, and the offsets that go with it in its transaction."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from kafka_eos_source.commit.sources import OwnOffsets, SourceRange, on_cluster
from kafka_eos_source.commit.verdict import Batch, Held
from kafka_eos_source.model import GroupOffset, Offsets, ShardReport, TopicPartition
from kafka_eos_source.protocol.identity import Predecessor
from kafka_eos_source.protocol.token import Mark, ShardProgress, Token


@dataclass(frozen=True)
class Cluster:
    """The sink's cluster as it was last listed.

    Attributes:
        cluster_id: Kafka's id of it.
        topics: number of partitions of each topic.
    """

    cluster_id: str = ""
    topics: Mapping[str, int] = field(default_factory=dict)

    def has(self, tp: TopicPartition) -> bool:
        return self.topics.get(tp.topic, 0) > tp.partition


@dataclass(frozen=True)
class CommitRequest:
    """One batch to be committed, and how.

    Attributes:
        batch: who and which. Its offsets are filled in from ``sources`` once the cluster is known.
        group_id: consumer group of offsets and token.
        anchor: partition that carries the full token in any case.
        sources: what the batch read.
        topic: the ``topic`` option.
        missing_token, foreign_query, moved_offsets: policies, as `verdict.batch_verdict` takes them.
        source_cluster: option ``source.cluster``.
        new_group: whether the group was made for this write alone, so that it cannot hold anything yet.
        has_native_state: tells whether Spark keeps state of its own for the query. Its output then depends on
            the boundaries of batches, so that offsets alone can never identify a batch.
        predecessor: names of a series of writes in format 1; None = it cannot have had any.
        token_topic: option ``token.topic``.
    """

    batch: Batch
    group_id: str
    anchor: TopicPartition
    sources: Sequence[SourceRange] = ()
    topic: str | None = None
    missing_token: str = "fail"
    foreign_query: str = "fail"
    moved_offsets: str = "fail"
    source_cluster: str = "auto"
    new_group: bool = False
    has_native_state: Callable[[], bool] = lambda: False
    predecessor: Predecessor | None = None
    token_topic: str | None = None

    def own(self, cluster: Cluster) -> OwnOffsets:
        """The offsets of the batch on the sink's cluster."""
        return on_cluster(self.sources, cluster.cluster_id, cluster.topics, self.source_cluster)

    def partitions(self, cluster: Cluster) -> set[TopicPartition]:
        """Every partition of the sink's cluster whose offset the commit of this batch writes."""
        return {self.anchor, *self.own(cluster).ends}

    def batch_on(self, cluster: Cluster, topic_ids: Mapping[str, str]) -> Batch:
        """The batch with its offsets on the sink's cluster.

        Args:
            cluster: the sink's.
            topic_ids: today's ids of the topics that the sources read, as far as they are known.
        """
        own = self.own(cluster)
        unchanged = all(topic_ids.get(topic, known) == known for topic, known in own.topic_ids.items())
        return replace(
            self.batch,
            starts=own.starts,
            ends=own.ends,
            comparable=own.comparable and unchanged and not self.has_native_state(),
            jump=any(each.jump for each in self.sources),
            jumped=own.jumped,
            shared=own.shared,
        )

    def offsets(
        self, token: Token, offsets: Offsets, cluster: Cluster, inherited: Sequence[GroupOffset] = ()
    ) -> list[GroupOffset]:
        """The group offsets of one transaction, with the token or its mark as metadata.

        Args:
            token: of the transaction.
            offsets: of source partitions. Those that do not exist any more are left out.
            cluster: the sink's.
            inherited: `inherited_shards` whose state this query takes over.
        """
        there = {tp: offset for tp, offset in offsets.items() if cluster.has(tp)}
        token = replace(token, partitions=len({*there, self.anchor}))
        text, mark = token.encode(), Mark.of(token).encode()
        anchor_offset = there.pop(self.anchor, max(0, token.batch_id))
        carriers = {self.anchor, *sorted(there)[:1]}
        found = [
            GroupOffset(tp, offset, text if tp in carriers else mark)
            for tp, offset in sorted({**there, self.anchor: anchor_offset}.items())
        ]
        return found + [
            replace(each, metadata=replace(token, shard=shard_progress(each)).encode())
            for each in inherited
            if cluster.has(each.tp)
        ]


def inherited_shards(held: Held, query_id: str) -> list[GroupOffset]:
    """Offsets of changelog partitions whose tokens another query of the same application wrote.

    A query that takes over another one's work takes over its state: the shards' progress stays what it is,
    under the token of the new owner.
    """
    found = []
    for each in held.offsets.values():
        token = Token.decode(each.metadata)
        if (
            token is not None
            and token.application_id == held.application_id
            and token.query_id != query_id
            and token.shard is not None
        ):
            found.append(each)
    return found


def shard_progress(offset: GroupOffset) -> ShardProgress | None:
    """The progress of the shard whose changelog offset this is; None if it is no changelog's."""
    token = Token.decode(offset.metadata)
    return None if token is None else token.shard


def progress_of(report: ShardReport) -> ShardProgress:
    """What the token of a shard's changelog says of the shard."""
    return ShardProgress(report.attempt, report.time_ms, report.event_time_ms, report.counts)
