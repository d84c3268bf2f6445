"""The request to commit one batch, and the offsets that its transaction commits."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from kafka_eos_source.commit.facts import Batch, Held
from kafka_eos_source.commit.sources import OwnOffsets, SourceRange, on_cluster
from kafka_eos_source.errors import InvalidOptionError
from kafka_eos_source.model import Epochs, GroupOffset, Offsets, ShardReport, TopicPartition
from kafka_eos_source.protocol.token import Due, Mark, ShardProgress, Token


@dataclass(frozen=True)
class Cluster:
    """The sink's cluster, as it was last listed.

    Attributes:
        cluster_id: Kafka's id of the cluster.
        topics: number of partitions of each topic.
    """

    cluster_id: str = ""
    topics: Mapping[str, int] = field(default_factory=dict)

    def has(self, tp: TopicPartition) -> bool:
        """Whether the partition exists."""
        return self.topics.get(tp.topic, 0) > tp.partition


@dataclass(frozen=True)
class CommitRequest:
    """One batch to commit, and how to commit it.

    Attributes:
        batch: the batch. `batch_on` fills in its offsets once the cluster is known.
        group_id: the consumer group of offsets and token.
        anchor: the partition whose offset always carries the full token.
        sources: the ranges that the sources of the batch read.
        topic: the ``topic`` option.
        missing_token, foreign_query, moved_offsets: policies, as `verdict.batch_verdict` takes them.
        source_cluster: option ``source.cluster``.
        new_group: whether the group was created for this write, so that it cannot hold anything yet.
        has_native_state: returns whether Spark keeps its own state for the query. The output then depends on
            the boundaries of batches, so offsets alone can never identify a batch.
        token_topic: option ``token.topic``.
        dead_letter_topic: option ``deadLetter.topic``.
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
    token_topic: str | None = None
    dead_letter_topic: str | None = None

    def own(self, cluster: Cluster) -> OwnOffsets:
        """Returns the offsets of the batch on the sink's cluster.

        Raises:
            InvalidOptionError: if a source reads the topic of the dead letters.
        """
        own = on_cluster(self.sources, cluster.cluster_id, cluster.topics, self.source_cluster)
        if self.dead_letter_topic in {tp.topic for tp in own.ends}:
            raise InvalidOptionError(
                f"option 'deadLetter.topic' has the value {self.dead_letter_topic!r}, which is a topic that "
                "the query reads; expected another topic. Each dead letter would come back as input. Nothing "
                f"of batch {self.batch.batch_id} was written.",
                fix="create a topic for the dead letters, and set 'deadLetter.topic' to its name. If "
                "subscribePattern matches that name, change the pattern so that it does not.",
            )
        return own

    def partitions(self, own: OwnOffsets) -> set[TopicPartition]:
        """Returns every partition of the sink's cluster whose offset the commit of this batch writes."""
        return {self.anchor, *own.ends}

    def batch_on(self, own: OwnOffsets, topic_ids: Mapping[str, str]) -> Batch:
        """Returns the batch with its offsets on the sink's cluster.

        Args:
            own: these offsets.
            topic_ids: current ids of the topics that the sources read, as far as they are known.
        """
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
        self,
        token: Token,
        offsets: Offsets,
        cluster: Cluster,
        inherited: Sequence[GroupOffset] = (),
        epochs: Epochs | None = None,
    ) -> list[GroupOffset]:
        """Returns the group offsets of one transaction, with the token or its mark as metadata.

        Args:
            token: the token of the transaction.
            offsets: offsets of source partitions. Partitions that no longer exist are left out.
            cluster: the sink's cluster.
            inherited: changelog offsets whose state this query takes over (`inherited_shards`).
            epochs: leader epochs that belong to ``offsets``, as far as they are known.
        """
        existing = {tp: offset for tp, offset in offsets.items() if cluster.has(tp)}
        token = replace(token, partitions=len({*existing, self.anchor}))
        text, mark = token.encode(), Mark.of(token).encode()
        anchor_offset = existing.pop(self.anchor, max(0, token.batch_id))
        carriers = {self.anchor, *sorted(existing)[:1]}
        committed = [
            GroupOffset(tp, offset, text if tp in carriers else mark, (epochs or {}).get(tp, -1))
            for tp, offset in sorted({**existing, self.anchor: anchor_offset}.items())
        ]
        return committed + [
            replace(each, metadata=_inherited(token, each).encode())
            for each in inherited
            if cluster.has(each.tp)
        ]


def inherited_shards(held: Held, query_id: str) -> list[GroupOffset]:
    """Returns the changelog offsets whose tokens another query of the same application wrote.

    A query that takes over the work of another one takes over its state: the progress of the shards stays
    the same, and the new owner commits it with its own token.
    """
    inherited = []
    for each in held.offsets.values():
        token = Token.decode(each.metadata)
        if (
            token is not None
            and token.application_id == held.application_id
            and token.query_id != query_id
            and token.shard is not None
        ):
            inherited.append(each)
    return inherited


def _inherited(token: Token, offset: GroupOffset) -> Token:
    """Returns the token of a transaction for a changelog offset whose state it takes over."""
    former = Token.decode(offset.metadata)
    assert former is not None, "`inherited_shards` chose the offset by its token"
    return replace(token, shard=former.shard, shards=former.shards, in_read=former.in_read)


def earliest_due(reports: Iterable[ShardReport]) -> Due | None:
    """Returns when the next micro-batch is due by the shards' requests; None if no shard requested one."""
    requested = [Due(each.due_ms, each.time_ms) for each in reports if each.due_ms is not None]
    return min(requested, key=lambda due: due.at_ms, default=None)


def progress_of(report: ShardReport) -> ShardProgress:
    """Returns the progress of a shard to store in the token on its changelog offset."""
    return ShardProgress(
        report.task_attempt_id, report.time_ms, report.event_time_ms, report.counts, report.log_start
    )
