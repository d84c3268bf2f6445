"""Selects the source offsets that a batch commits: those of Kafka sources on the sink's cluster."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from kafka_eos_source.model import Epochs, Offsets, TopicPartition
from kafka_eos_source.protocol.offset_log import LoggedOffsets, SourcePosition, is_kafka_offset_json


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

    Args:
        logged: entry of the batch in Spark's offset log.
        before: entry of the batch before it; None if there is none.
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
