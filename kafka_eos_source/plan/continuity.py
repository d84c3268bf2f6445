"""Decides whether the query can go on from its position, by comparison with what the brokers have now.

Two things can be wrong. Records between the position and the end of the log may be lost: topics or
partitions were deleted, created again or cut, or records were older than the retention. Or the checkpoint
is an old copy, and the query has committed higher offsets than those that the copy names.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, replace

from kafka_eos_source.errors import DataLossError, OperatorError, StateError
from kafka_eos_source.model import GroupOffset, Offsets, TopicPartition
from kafka_eos_source.protocol.offset_log import SourcePosition
from kafka_eos_source.protocol.token import Mark, Token, application_hash

_DROPPED, _CUT = "NO_LONGER_SUBSCRIBED", "LOG_WAS_CUT"


@dataclass(frozen=True)
class Loss:
    """One loss of records, or of a partition, since the query's last batch.

    Attributes:
        kind: ``PARTITIONS_GONE``, ``NO_LONGER_SUBSCRIBED``, ``TOPIC_RECREATED``, ``AGED_OUT``,
            ``NEW_PARTITION_NOT_AT_ZERO``, ``OFFSETS_WENT_BACK`` or ``LOG_WAS_CUT``.
        text: description that names partitions and offsets.
    """

    kind: str
    text: str


@dataclass(frozen=True)
class Reconciled:
    """Where the next batch starts, and what was lost.

    Attributes:
        starts: start offset of every partition that exists now.
        losses: empty if nothing was lost.
    """

    starts: dict[TopicPartition, int]
    losses: list[Loss]


def reconcile(
    position: Offsets,
    topic_ids: Mapping[str, str],
    partitions: Collection[TopicPartition],
    earliest: Offsets,
    latest: Offsets,
    current_ids: Mapping[str, str],
    subscribed: Callable[[TopicPartition], bool] = lambda _: True,
    cuts: Offsets | None = None,
) -> Reconciled:
    """Compares the position of the query with the partitions and offsets that exist now.

    Partitions that the query has not read before start at their earliest offset, as in Spark.

    Args:
        position: next offset to read per partition, after the last batch.
        topic_ids: topic ids (KIP-516) at that time.
        partitions: subscribed partitions that exist now.
        earliest: first offset of partitions that are new or whose topic was recreated. Other partitions may
            be missing; the task that reads such a partition reports it if its offsets are gone.
        latest: end of the log of every partition.
        current_ids: topic ids now.
        subscribed: returns whether the options include a partition, whether it exists or not. If they do not,
            the user removed it from the query.
        cuts: where logs were cut (`cut_logs`). The next batch starts there, because from there on the log has
            records that the query has not read, whatever their offsets.
    """
    losses: list[Loss] = []
    starts: dict[TopicPartition, int] = {}
    missing = sorted(set(position) - set(partitions))
    gone = [tp for tp in missing if subscribed(tp)]
    dropped = [tp for tp in missing if not subscribed(tp)]
    if gone:
        losses.append(Loss("PARTITIONS_GONE", f"{_list(gone)}: deleted from the cluster"))
    if dropped:
        losses.append(_no_longer_read(dropped))
    changed = recreated(topic_ids, current_ids)
    losses += [
        Loss("TOPIC_RECREATED", f"topic {topic!r} was deleted and recreated (its id changed)")
        for topic in sorted(changed)
    ]
    for tp in sorted(partitions):
        end, next_offset = latest[tp], position.get(tp)
        if next_offset is None or tp.topic in changed:
            starts[tp] = first = earliest[tp]
            if next_offset is None and position and first > 0:
                losses.append(
                    Loss(
                        "NEW_PARTITION_NOT_AT_ZERO",
                        f"{tp}: the partition is new, but starts at offset {first}",
                    )
                )
        elif cuts and tp in cuts:
            starts[tp] = cuts[tp]
            losses.append(
                Loss(
                    _CUT,
                    f"{tp}: the query is at offset {next_offset}, but the log was cut at offset {cuts[tp]}, "
                    "and its records from there on are others than those that the query has read (an unclean "
                    "leader election, or a lost or restored disk)",
                )
            )
        elif next_offset < earliest.get(tp, next_offset):
            starts[tp] = earliest[tp]
            losses.append(
                Loss("AGED_OUT", f"{tp}: offsets {next_offset} to {earliest[tp] - 1} no longer exist")
            )
        elif next_offset > end:
            starts[tp] = end
            losses.append(
                Loss(
                    "OFFSETS_WENT_BACK",
                    f"{tp}: the query is at offset {next_offset}, but the log ends at offset {end}",
                )
            )
        else:
            starts[tp] = next_offset
    return Reconciled(starts, losses)


def cut_logs(position: Offsets, epoch_ends: Offsets) -> dict[TopicPartition, int]:
    """Returns where logs were cut below the position of the query, for partitions to which that happened.

    The first leader epoch above that of the position begins where its leader's log ended when it was elected.
    An election loses no record that consumers have read, unless it is unclean. So if the later epoch begins
    below the position, records that the query has read are gone, and others took their offsets.

    Args:
        position: next offset to read per partition, after the last batch.
        epoch_ends: end of the position's leader epoch in the present leader's log, from OffsetForLeaderEpoch
            (KIP-320); -1 = the leader cannot tell, so nothing follows from it.
    """
    return {tp: end for tp, end in epoch_ends.items() if 0 <= end < position[tp]}


def recreated(topic_ids: Mapping[str, str], current_ids: Mapping[str, str]) -> set[str]:
    """Returns topics that were deleted and recreated: they have the same name and another id."""
    return {topic for topic, was in topic_ids.items() if topic in current_ids and current_ids[topic] != was}


def lost_since_planned(
    reads: Collection[TopicPartition], planned_ids: Mapping[str, str], current_ids: Mapping[str, str]
) -> list[Loss]:
    """Returns topics that were deleted or recreated after a batch was planned.

    The planned offsets are meaningless in a topic with another id, because it contains other records.

    Args:
        reads: partitions from which the batch reads records.
        planned_ids: topic ids when the batch was planned.
        current_ids: ids of the topics that exist now.
    """
    losses = []
    for topic in sorted({tp.topic for tp in reads} & set(planned_ids)):
        if topic not in current_ids:
            gone = [tp for tp in sorted(reads) if tp.topic == topic]
            losses.append(
                Loss(
                    "PARTITIONS_GONE",
                    f"{_list(gone)}: the topic was deleted after the batch was planned",
                )
            )
        elif current_ids[topic] != planned_ids[topic]:
            losses.append(
                Loss(
                    "TOPIC_RECREATED",
                    f"topic {topic!r} was deleted and recreated after the batch was planned (its id changed)",
                )
            )
    return losses


def _no_longer_read(partitions: Collection[TopicPartition]) -> Loss:
    return Loss(_DROPPED, f"{_list(partitions)}: no longer included in the options of the source")


def check_topics_of_checkpoint(position: Offsets, reads_topic: Callable[[str], bool]) -> None:
    """Checks that a source still reads a topic of its position in the checkpoint.

    Args:
        position: next offset to read per partition.
        reads_topic: returns whether the options of the source include a topic.

    Raises:
        DataLossError: if not: it is probably the checkpoint of another query.
    """
    if position and not any(reads_topic(tp.topic) for tp in position):
        raise data_loss([_no_longer_read(sorted(position))], other_topics=True)


def data_loss(
    losses: Collection[Loss],
    *,
    other_topics: bool = False,
    clusters: tuple[str | None, str | None] = (None, None),
) -> DataLossError:
    """Returns the error that ends a query with ``failOnDataLoss=true``.

    Args:
        losses: what was lost.
        other_topics: whether the source subscribes none of the topics of the checkpoint's position.
        clusters: ids of the cluster of the checkpoint's position and of the one that the source reads now.
    """
    kinds = {loss.kind for loss in losses}
    text = f"{'; '.join(f'{loss.kind}: {loss.text}' for loss in losses)} (failOnDataLoss=true)."
    former, now = clusters
    if former is not None and now is not None and former != now:
        return DataLossError(
            f"the checkpoint is that of another Kafka cluster: its offsets are of cluster {former!r}, and "
            f"the brokers belong to {now!r}. {text}",
            fix="correct kafka.bootstrap.servers. If the cluster is new on purpose, such as a development "
            "broker that did not keep its data ('kafka-eos broker --dir' does), start with a new checkpoint "
            "and a new state.dir.",
        )
    if other_topics:
        return DataLossError(
            "this is probably the checkpoint of another query: the source subscribes none of its topics. "
            + text,
            fix="check checkpointLocation, and the topics of the source. If the query is meant to read other "
            "topics from now on, restart with .option('failOnDataLoss', 'false'): records of the former "
            "topics that it has not read are then left out.",
        )
    otherwise = "Otherwise check the retention and the history of the topic."
    if _CUT in kinds:
        otherwise = (
            "It begins where the log was cut, and rows of the lost records stay in the output. Also check "
            "the brokers' disks and unclean.leader.election.enable, and whether producers have to send the "
            "lost records again."
        )
    elif _DROPPED in kinds:
        otherwise = "Otherwise add those topics to 'subscribe', 'subscribePattern' or 'assign' again."
    return DataLossError(
        text,
        fix="if this is expected, restart with .option('failOnDataLoss', 'false'), which continues with the "
        f"remaining records and without the lost ones. {otherwise}",
    )


def _list(partitions: Collection[TopicPartition]) -> str:
    return ", ".join(str(tp) for tp in partitions)


# -- An old copy of the checkpoint ----------------------------------------------------------------


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
