"""Whether a source with an old checkpoint can continue from the offsets that Kafka holds for its query."""

from __future__ import annotations

from collections.abc import Collection, Mapping

from kafka_eos_source.errors import OperatorError, StateError
from kafka_eos_source.model import GroupOffset, Offsets, TopicPartition
from kafka_eos_source.protocol.source_position import SourcePosition
from kafka_eos_source.protocol.token import Mark, application_hash


def is_comparable(
    start: SourcePosition,
    partitions: Collection[TopicPartition],
    topic_ids: Mapping[str, str],
    cluster_id: str | None,
) -> bool:
    """Whether the position is one on these very topics, so that committed offsets can be compared with it.

    Args:
        start: where the checkpoint stands.
        partitions: what the source reads now.
        topic_ids: their topics' ids now.
        cluster_id: of the cluster that it reads now.
    """
    return (
        start.cluster_id is not None
        and start.cluster_id == cluster_id
        and set(start.end) <= set(partitions)
        and _same_topics(start, start.end, topic_ids)
    )


def jump_target(
    start: SourcePosition,
    committed: Mapping[TopicPartition, GroupOffset],
    topic_ids: Mapping[str, str],
    application_id: str,
) -> Offsets | None:
    """Where the source continues if its checkpoint is an old copy.

    A partition that the group does not hold keeps its start. A partition that was added to a topic after the
    checkpoint was copied is taken over from the group.

    Args:
        start: where the checkpoint stands; comparable (`is_comparable`).
        committed: what the group holds of the partitions that the source reads now.
        topic_ids: their topics' ids now.
        application_id: the application whose marks the offsets must carry.

    Returns:
        The offsets; None if the checkpoint is not behind, or if some offset was not committed by this
        application, is lower than the checkpoint's, or belongs to a topic that the checkpoint does not know.
    """
    if not _same_topics(start, committed, topic_ids):
        return None
    ours = application_hash(application_id)
    ahead = False
    for tp, held in committed.items():
        if _application(held) != ours:
            return None
        stood = start.end.get(tp)
        if stood is not None and held.offset < stood:
            return None
        ahead |= stood is None or held.offset > stood
    if not ahead:
        return None
    return {**start.end, **{tp: held.offset for tp, held in committed.items()}}


def _same_topics(
    start: SourcePosition, partitions: Collection[TopicPartition], topic_ids: Mapping[str, str]
) -> bool:
    """Whether the position knows the topics of these partitions, and none was created again since then."""
    return all(start.topic_ids.get(topic) == topic_ids[topic] for topic in {tp.topic for tp in partitions})


def _application(held: GroupOffset) -> str | None:
    """Whose mark the offset carries; None = nobody's, or one that this version cannot read."""
    try:
        mark = Mark.decode(held.metadata)
    except (OperatorError, StateError):  # the sink reports it
        return None
    return None if mark is None else mark.application
