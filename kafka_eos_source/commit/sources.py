"""Which offsets of a batch belong into the sink's consumer group: those of Kafka sources on its cluster."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from kafka_eos_source.model import Offsets, TopicPartition
from kafka_eos_source.protocol.offset_log import LoggedOffsets
from kafka_eos_source.protocol.source_position import SourcePosition, is_kafka_offset_json


@dataclass(frozen=True)
class SourceRange:
    """What one source of the batch read.

    Attributes:
        end: next offset to read, per partition; None = not a Kafka source.
        start: first offset read, None = not known (the first batch of Spark's own source).
        cluster_id: of the cluster read; None = the source does not say (Spark's own).
        topic_ids: ids (KIP-516) of the topics that were read; empty if the source does not say.
        jump: whether this batch passes over the range instead of reading it.
        lossy: whether the user accepts that records of this source are lost.
        same_topics: whether no topic was created again between the start and the end of the range. Otherwise
            the offsets at its start and those of the consumer group belong to another topic.
    """

    end: Offsets | None
    start: Offsets | None = None
    cluster_id: str | None = None
    topic_ids: Mapping[str, str] = field(default_factory=dict)
    jump: bool = False
    lossy: bool = False
    same_topics: bool = True


def ranges(logged: LoggedOffsets, before: LoggedOffsets | None) -> list[SourceRange]:
    """The sources of a batch, from its entry in Spark's offset log and that of the batch before it."""
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
        # a source that has nothing new is logged as before, with the jump of an earlier batch
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
            )
        )
    return found


@dataclass(frozen=True)
class OwnOffsets:
    """The offsets of a batch on the sink's cluster.

    Attributes:
        ends: to be committed. A partition read by two sources counts as read up to the lower end.
        starts: where the batch started; None = not known for some source.
        comparable: whether these are all sources of the batch, no partition is read by two of them, and no
            topic was created again, so that offsets alone identify the batch.
        topic_ids: ids of the topics that were read, as far as the sources say.
        lossy_topics: topics of whose records the user accepts a loss.
        jumped: partitions of the sources that jump in this batch.
        shared: partitions that several of the sources read.
    """

    ends: Offsets
    starts: Offsets | None
    comparable: bool
    topic_ids: Mapping[str, str] = field(default_factory=dict)
    lossy_topics: frozenset[str] = frozenset()
    jumped: frozenset[TopicPartition] = frozenset()
    shared: frozenset[TopicPartition] = frozenset()


def on_cluster(
    sources: Sequence[SourceRange], cluster_id: str, topics: Mapping[str, int], source_cluster: str
) -> OwnOffsets:
    """Selects the sources that read the cluster which the sink writes.

    Args:
        sources: of the batch.
        cluster_id: of the sink's cluster.
        topics: its topics, with their number of partitions.
        source_cluster: option ``source.cluster``: ``same`` or ``other`` for sources that do not say;
            ``auto`` takes them for the same cluster's when it has all their topics.
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
    )


def _is_own(source: SourceRange, cluster_id: str, topics: Mapping[str, int], source_cluster: str) -> bool:
    if source.end is None:
        return False
    if source.cluster_id is not None:
        return source.cluster_id == cluster_id
    if source_cluster == "auto":
        return all(tp.topic in topics for tp in source.end)
    return source_cluster == "same"
