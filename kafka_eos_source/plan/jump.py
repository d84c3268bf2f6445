"""Decides whether a source with an old checkpoint can continue from the query's committed offsets."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import replace

from kafka_eos_source.errors import OperatorError, StateError
from kafka_eos_source.model import GroupOffset, Offsets, TopicPartition
from kafka_eos_source.protocol.offset_log import SourcePosition
from kafka_eos_source.protocol.token import Mark, Token, application_hash


def is_comparable(
    start: SourcePosition,
    partitions: Collection[TopicPartition],
    topic_ids: Mapping[str, str],
    cluster_id: str | None,
) -> bool:
    """Returns whether the position is on the same topics, so that it can be compared with committed offsets.

    Args:
        start: position in the checkpoint.
        partitions: partitions that the source reads now.
        topic_ids: ids of their topics now.
        cluster_id: id of the cluster that the source reads now.
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
) -> SourcePosition | None:
    """Returns where the source continues if its checkpoint is an old copy.

    A partition without a committed offset keeps its start. A partition that was added to a topic after the
    checkpoint was copied starts at its committed offset.

    Args:
        start: position in the checkpoint; comparable (`is_comparable`).
        committed: committed offsets of the partitions that the source reads now.
        topic_ids: ids of their topics now.
        application_id: the application that must have committed the offsets, as their marks show.

    Returns:
        The checkpoint's position with other ends. None if no committed offset is higher than in the
        checkpoint; or if one is lower, was committed by another application, or is on a topic that the
        checkpoint does not contain.
    """
    if not _same_topics(start, committed, topic_ids):
        return None
    ours = application_hash(application_id)
    ahead = False
    for tp, held in committed.items():
        if _application_of(held) != ours:
            return None
        read_to = start.end.get(tp)
        if read_to is not None and held.offset < read_to:
            return None
        if read_to is None and Token.decode(held.metadata) is not None:
            return None  # probably the anchor, whose offset is no position unless the query reads it
        ahead |= read_to is None or held.offset > read_to
    if not ahead:
        return None
    kept = {tp: epoch for tp, epoch in start.epochs.items() if tp not in committed}
    return replace(
        start,
        end={**start.end, **{tp: held.offset for tp, held in committed.items()}},
        epochs={**kept, **{tp: held.epoch for tp, held in committed.items() if held.epoch >= 0}},
    )


def holds_batch(ends: Offsets, committed: Mapping[TopicPartition, GroupOffset], application_id: str) -> bool:
    """Returns whether the application has committed the end of a batch, or more, in each of its partitions.

    Args:
        ends: end of the batch in each partition of which it reads records.
        committed: committed offsets of these partitions.
        application_id: the application that must have committed them, as their marks show.
    """
    ours = application_hash(application_id)
    return all(
        tp in committed and committed[tp].offset >= until and _application_of(committed[tp]) == ours
        for tp, until in ends.items()
    )


def _same_topics(
    start: SourcePosition, partitions: Collection[TopicPartition], topic_ids: Mapping[str, str]
) -> bool:
    """Returns whether the position contains the topics of these partitions, with their current ids."""
    return all(start.topic_ids.get(topic) == topic_ids[topic] for topic in {tp.topic for tp in partitions})


def _application_of(held: GroupOffset) -> str | None:
    """Returns the hash of the application in the offset's mark; None if there is no mark that can be read."""
    try:
        mark = Mark.decode(held.metadata)
    except (OperatorError, StateError):  # the sink reports a mark that cannot be read
        return None
    return None if mark is None else mark.application
