"""The request to commit one batch, and what the commit works with.

`CommitRequest` is immutable. It holds what the checkpoint says about the batch, and computes from it the
offsets that the batch commits on the sink's cluster. `CommitContext` adds the staged rows, the clients of
Kafka and the sinks.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Protocol

import pyarrow as pa

from kafka_eos_source.commit import refusals
from kafka_eos_source.commit.identity_file import IdentityFile
from kafka_eos_source.commit.two_phase import Refusal, Sinks
from kafka_eos_source.commit.verdict import Batch, Held, Verdict
from kafka_eos_source.model import Epochs, GroupOffset, Offsets, ShardReport, TopicPartition
from kafka_eos_source.protocol.offset_log import LoggedOffsets, SourcePosition, is_kafka_offset_json
from kafka_eos_source.protocol.token import Due, Mark, ShardProgress, Token, TokenRecord
from kafka_eos_source.runtime.deadline import Deadline
from kafka_eos_source.state.changelog.topic import Tail


@dataclass(frozen=True)
class SourceRange:
    """The range that one source of the batch read.

    Attributes:
        end: next offset to read, per partition; None if this is not a Kafka source.
        start: first offset read, per partition; None if it is not known (the first batch of Spark's own
            source).
        cluster_id: Kafka's id of the cluster that was read; None if the source does not log it (Spark's own).
        topic_ids: ids (KIP-516) of the topics that were read; empty if the source does not log them.
        jump: whether this batch skips the range instead of reading it.
        lossy: whether the user accepts that records of this source are lost.
        application_id: option ``application.id`` of the source; None if it is not set, or if the source
            planned nothing new for the batch.
        same_topics: whether no topic was created again between the start and the end of the range. If one
            was, the offsets at the start and those of the consumer group belong to the former topic.
        epochs: leader epochs that belong to ``end``, as far as the source logs them.
    """

    end: Offsets | None
    start: Offsets | None = None
    cluster_id: str | None = None
    topic_ids: Mapping[str, str] = field(default_factory=dict)
    jump: bool = False
    lossy: bool = False
    same_topics: bool = True
    epochs: Epochs = field(default_factory=dict)
    application_id: str | None = None


def ranges(logged: LoggedOffsets, before: LoggedOffsets | None) -> list[SourceRange]:
    """Returns the ranges that the sources of a batch read.

    ``before`` is the entry of the batch before it; None if there is none.
    """
    found = []
    for name, line in logged.sources.items():
        if line is None:
            continue
        if not is_kafka_offset_json(line):
            found.append(SourceRange(None))
            continue
        position = SourcePosition.from_json(line)
        line_before = before.sources.get(name) if before is not None else None
        start, same_topics = position.start, True
        if line_before is not None and is_kafka_offset_json(line_before):
            earlier = SourcePosition.from_json(line_before)
            start = earlier.end
            ids = position.topic_ids
            same_topics = all(ids.get(topic, was) == was for topic, was in earlier.topic_ids.items())
        # for a source without new records, Spark logs the line before again, with the jump of that batch
        jump = position.jump and line != line_before
        found.append(
            SourceRange(
                position.end,
                start,
                position.cluster_id,
                position.topic_ids,
                jump,
                position.lossy,
                same_topics,
                position.epochs,
                None if line == line_before else position.application_id,
            )
        )
    return found


@dataclass(frozen=True)
class OwnOffsets:
    """The offsets of a batch on the sink's cluster.

    Attributes:
        ends: the offsets to commit. If two sources read a partition, the lower end counts.
        starts: the offsets where the batch starts; None if they are not known for some source.
        comparable: whether these are all sources of the batch, no partition is read by two of them, and no
            topic was created again, so that offsets alone identify the batch.
        topic_ids: ids of the topics that were read, as far as the sources log them.
        lossy_topics: topics whose records the user accepts to lose.
        jumped: partitions of the sources that jump in this batch.
        shared: partitions that more than one source reads.
        epochs: leader epochs that belong to ``ends``, as far as the sources log them.
    """

    ends: Offsets
    starts: Offsets | None
    comparable: bool
    topic_ids: Mapping[str, str] = field(default_factory=dict)
    lossy_topics: frozenset[str] = frozenset()
    jumped: frozenset[TopicPartition] = frozenset()
    shared: frozenset[TopicPartition] = frozenset()
    epochs: Epochs = field(default_factory=dict)


def on_cluster(
    sources: Sequence[SourceRange], cluster_id: str, topics: Mapping[str, int], source_cluster: str
) -> OwnOffsets:
    """Combines the offsets of the sources that read the cluster to which the sink writes.

    Args:
        sources: the sources of the batch.
        cluster_id: Kafka's id of the sink's cluster.
        topics: the topics of that cluster, with their number of partitions.
        source_cluster: option ``source.cluster``. ``same`` and ``other`` decide for sources that do not log
            their cluster; ``auto`` assumes the same cluster if it has all their topics.
    """
    own = [each for each in sources if _is_own(each, cluster_id, topics, source_cluster)]
    ends: dict[TopicPartition, int] = {}
    starts: dict[TopicPartition, int] = {}
    for each in own:
        for tp, end in (each.end or {}).items():
            ends[tp] = min(end, ends.get(tp, end))
        for tp, start in (each.start or {}).items():
            starts[tp] = min(start, starts.get(tp, start))
    readers = Counter(tp for each in own for tp in each.end or {})
    shared = frozenset(tp for tp, number in readers.items() if number > 1)
    return OwnOffsets(
        ends=ends,
        starts=None if any(each.start is None for each in own) else starts,
        comparable=len(own) == len(sources) > 0 and not shared and all(each.same_topics for each in own),
        topic_ids={topic: topic_id for each in own for topic, topic_id in each.topic_ids.items()},
        lossy_topics=frozenset(topic for each in own if each.lossy for topic in each.topic_ids),
        jumped=frozenset(tp for each in own if each.jump for tp in each.end or {}),
        shared=shared,
        epochs={
            tp: epoch for each in own for tp, epoch in each.epochs.items() if (each.end or {})[tp] == ends[tp]
        },
    )


def _is_own(source: SourceRange, cluster_id: str, topics: Mapping[str, int], source_cluster: str) -> bool:
    if source.end is None:
        return False
    if source.cluster_id is not None:
        return source.cluster_id == cluster_id
    if source_cluster == "auto":
        return all(tp.topic in topics for tp in source.end)
    return source_cluster == "same"


# -- the request ----------------------------------------------------------------------------------------


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
        has_native_state: whether Spark keeps its own state for the query. The output then depends on
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
    has_native_state: bool = False
    token_topic: str | None = None
    dead_letter_topic: str | None = None

    def own(self, cluster: Cluster) -> OwnOffsets:
        """Returns the offsets of the batch on the sink's cluster.

        Raises:
            InvalidOptionError: if a source reads the topic of the dead letters.
        """
        own = on_cluster(self.sources, cluster.cluster_id, cluster.topics, self.source_cluster)
        letters = self.dead_letter_topic
        if letters is not None and letters in {tp.topic for tp in own.ends}:
            raise refusals.reads_dead_letters(letters, self.batch.batch_id)
        return own

    def partitions(self, own: OwnOffsets) -> set[TopicPartition]:
        """Returns every partition of the sink's cluster whose offset the commit of this batch writes."""
        return {self.anchor, *own.ends}

    def batch_on(self, own: OwnOffsets, topic_ids: Mapping[str, str]) -> Batch:
        """Returns the batch with its offsets on the sink's cluster.

        ``topic_ids`` are the current ids of the topics that the sources read, as far as they are known.
        """
        unchanged = all(topic_ids.get(topic, known) == known for topic, known in own.topic_ids.items())
        return replace(
            self.batch,
            starts=own.starts,
            ends=own.ends,
            comparable=own.comparable and unchanged and not self.has_native_state,
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


# -- what the commit works with -------------------------------------------------------------------------


class Producer(Protocol):
    """What a commit uses of a client that writes transactions (`kafka.producer`)."""

    enqueued: int

    @property
    def queued(self) -> int: ...
    @property
    def complaint(self) -> str: ...
    def init(self, deadline: Deadline) -> None: ...
    def is_clean(self) -> bool: ...
    def cluster(self, deadline: Deadline) -> tuple[str, Mapping[str, int]]: ...
    def ask_topic_ids(self, topics: Collection[str]) -> None: ...
    def topic_ids(self, topics: Collection[str]) -> Mapping[str, str]: ...
    def check_partitions(self, highest: Mapping[str, int], deadline: Deadline) -> None: ...
    def begin(self) -> None: ...
    def send(
        self, rows: pa.RecordBatch, topic: str | None, deadline: Deadline, partitions: int = 0
    ) -> None: ...
    def send_sealed(
        self, batches: Iterable[tuple[int, memoryview]], topic: str, deadline: Deadline
    ) -> None: ...
    def flush(self, deadline: Deadline) -> None: ...
    def ends(self, partitions: Collection[TopicPartition]) -> Mapping[TopicPartition, int]: ...
    def send_offsets(self, offsets: Collection[GroupOffset], group_id: str, deadline: Deadline) -> None: ...
    def commit(self, deadline: Deadline) -> None: ...
    def abort(self, deadline: Deadline) -> None: ...
    def close(self) -> None: ...


class TokenRecords(Protocol):
    """The token topic of a query (`kafka.token_topic.TopicRecords`)."""

    @property
    def name(self) -> str:
        """Name of the topic."""

    @property
    def topic_id(self) -> str:
        """Kafka's id of the topic."""

    def partition_of(self, application_id: str) -> int:
        """Returns the partition that holds the record of a query."""

    def last(self, application_id: str, deadline: Deadline, *, certain: bool) -> TokenRecord | None:
        """Returns the newest record of a query (`kafka.token_topic.last`)."""


class Clients(Protocol):
    """Clients of the cluster that the sink writes to."""

    def producer(self, transactional_id: str) -> Producer:
        """Returns a new producer that is not yet initialised."""

    def group_offsets(
        self, group_id: str, certainly: Collection[TopicPartition], deadline: Deadline
    ) -> Mapping[TopicPartition, GroupOffset]:
        """Returns the committed offsets of a group; waits for open transactions (`GroupOffsets.fetch`)."""

    def group_members(self, group_id: str, deadline: Deadline) -> Sequence[str]:
        """Returns client id and host of each member of a group (`GroupOffsets.members`)."""

    def committed_now(
        self, group_id: str, certainly: Collection[TopicPartition], deadline: Deadline
    ) -> Mapping[TopicPartition, GroupOffset]:
        """Returns the currently committed offsets of a group; does not wait for open transactions."""

    def proved_offsets(
        self, group_id: str, partitions: Collection[TopicPartition], deadline: Deadline
    ) -> Mapping[TopicPartition, GroupOffset]:
        """Returns the currently committed offsets from a coordinator that knows of the open transaction.

        The transaction must have sent an offset of one of the partitions (`GroupOffsets.proved`).
        """

    def changelog_tail(self, tp: TopicPartition, start: int, deadline: Deadline) -> Tail:
        """Returns what a changelog partition holds from an offset on (`state.changelog.topic`)."""

    def token_records(self, name: str, deadline: Deadline) -> TokenRecords:
        """Checks the token topic and returns it (`kafka.token_topic.TopicRecords.checked`)."""


class StagedBatch(Protocol):
    """The staged rows of a batch. They were checked for completeness before the commit starts."""

    rows: int
    topics: Mapping[str, int]
    sealed_partitions: int

    @property
    def shards(self) -> Sequence[ShardReport]: ...

    def batches(self) -> Iterable[pa.RecordBatch]: ...
    def changes(self) -> Iterable[tuple[TopicPartition, pa.RecordBatch]]: ...


@dataclass
class ProducerSession:
    """What a process keeps between batches: the producer, and what Kafka held after its last commit.

    Attributes:
        producer: the initialised producer; None if there is none.
        held: what the group holds, read after the last initialisation and updated by each commit.
        group_id: the group of ``held``.
        run_id: Spark's id of the run that read ``held``.
        cluster: the cluster, as it was last listed.
        topic_ids: ids of topics, as they were last read.
        confirmed: whether the group coordinator that returned ``held`` has accepted an offset commit of this
            producer, which proves that its answer was not outdated.
        token_records: the token topic, as the last initialisation saw it; None if the query has none.
        looked_at: when this process last made sure that no other program uses the group, in seconds of
            `time.monotonic`.
    """

    producer: Producer | None = None
    held: Held | None = None
    group_id: str = ""
    run_id: str = ""
    cluster: Cluster = field(default_factory=Cluster)
    topic_ids: Mapping[str, str] = field(default_factory=dict)
    confirmed: bool = False
    token_records: TokenRecords | None = None
    looked_at: float = 0.0

    def drop(self) -> None:
        """Closes the producer. The next commit initialises a new one, which raises the epoch."""
        producer, self.producer, self.confirmed = self.producer, None, False
        if producer is not None:
            producer.close()


class Restage(Protocol):
    """Stages the rows of a batch again without those that a sink refuses."""

    def __call__(self, refusal: Refusal) -> tuple[StagedBatch, Sinks]:
        """Returns the rows of the batch without the refused ones, which become dead letters or are dropped.

        Raises:
            InvalidRecordError: if a refused row fails the batch.
            SinkFailedError: if the tasks did not keep the rows.
        """


@dataclass(frozen=True)
class CommitContext:
    """The inputs of the commit of one batch, the same for every try until a sink refuses rows.

    Attributes:
        request: the batch to commit, and how.
        staged: the rows of the batch.
        clients: clients of the sink's cluster.
        session: the producer that this process keeps for the transactional id.
        deadline: time limit of the whole commit.
        sinks: the sinks outside Kafka.
        identity_file: the identity file of the checkpoint; None if there is no checkpoint.
        restage: stages rows again; None if the batch has no sinks outside Kafka.
    """

    request: CommitRequest
    staged: StagedBatch
    clients: Clients
    session: ProducerSession
    deadline: Deadline
    sinks: Sinks
    identity_file: IdentityFile | None
    restage: Restage | None = None


@dataclass(frozen=True)
class Decision:
    """The verdict of one try to commit the batch, with the facts on which it is based.

    Attributes:
        producer: an initialised producer with no open transaction.
        batch: the batch with its offsets on the sink's cluster.
        own: the offsets of the batch on the sink's cluster, from which those of ``batch`` were taken.
        held: what Kafka holds of the query, as the verdict saw it.
        verdict: whether to write the batch.
        in_group: the committed offsets of the group itself. They differ from ``held`` if the token was found
            elsewhere.
    """

    producer: Producer
    batch: Batch
    own: OwnOffsets
    held: Held
    verdict: Verdict
    in_group: Mapping[TopicPartition, GroupOffset]
