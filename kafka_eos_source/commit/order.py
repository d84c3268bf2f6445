"""What is to be committed: one batch, and the offsets that go with it in its transaction."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType

from kafka_eos_source.commit.decide import Batch
from kafka_eos_source.commit.sources import SourceRange, on_cluster
from kafka_eos_source.model import GroupOffset, ShardReport, TopicPartition
from kafka_eos_source.protocol.token import ShardProgress, Token


@dataclass(frozen=True)
class Order:
    """One batch to be committed, and how.

    Attributes:
        batch: who and which. Its offsets are filled in from ``sources`` once the cluster is known.
        sources: what the batch read.
        group_id: consumer group of offsets and token.
        anchor: partition that carries the token in any case.
        topic: the ``topic`` option.
        missing_token, foreign_query: policies, as `decide` takes them.
        source_cluster: option ``source.cluster``.
    """

    batch: Batch
    group_id: str
    anchor: TopicPartition
    sources: Sequence[SourceRange] = ()
    topic: str | None = None
    missing_token: str = "fail"
    foreign_query: str = "fail"
    source_cluster: str = "auto"

    def batch_on(self, cluster_id: str, topics: Mapping[str, int]) -> Batch:
        """The batch with its offsets on the sink's cluster."""
        own = on_cluster(self.sources, cluster_id, topics, self.source_cluster)
        return replace(self.batch, starts=own.starts, ends=own.ends, comparable=own.comparable)

    def offsets(
        self,
        token: Token,
        cluster_id: str,
        topics: Mapping[str, int],
        inherited: Mapping[TopicPartition, GroupOffset] = MappingProxyType({}),
    ) -> list[GroupOffset]:
        """Source offsets and anchor, each with the token. A partition that is gone is left out.

        Args:
            token: of this batch.
            cluster_id, topics: of the sink's cluster.
            inherited: offsets with another query's token. They stay and get this token too: the other's, of a
                higher batch id, would else be taken for the newest by the next owner.
        """
        text = token.encode()
        own = on_cluster(self.sources, cluster_id, topics, self.source_cluster)
        left = {tp: each.offset for tp, each in inherited.items()}
        # a shard's state is still that of the other query's attempt
        marked = {tp: mark for tp, each in inherited.items() if (mark := _shard_mark(each)) is not None}
        there = {
            tp: end for tp, end in {**left, **own.ends}.items() if topics.get(tp.topic, 0) > tp.partition
        }
        ends = {**there, self.anchor: own.ends.get(self.anchor, max(0, self.batch.batch_id))}
        return [
            GroupOffset(tp, end, replace(token, shard=marked[tp]).encode() if tp in marked else text)
            for tp, end in sorted(ends.items())
        ]

    def partitions(self) -> set[TopicPartition]:
        """Every partition that may carry the token of this batch."""
        return {self.anchor, *(tp for each in self.sources for tp in each.end or ())}


def mark_of(shard: ShardReport) -> ShardProgress:
    """What the token of a shard's changelog says of it."""
    return ShardProgress(shard.attempt, shard.time_ms, shard.event_time_ms, shard.counts)


def _shard_mark(offset: GroupOffset) -> ShardProgress | None:
    token = Token.decode(offset.metadata)
    return None if token is None else token.shard
