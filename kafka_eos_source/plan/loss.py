"""What was lost between the query's position, or a planned batch, and what the brokers still have."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass

from kafka_eos_source.errors import DataLossError
from kafka_eos_source.model import Offsets, TopicPartition

_DROPPED = "NO_LONGER_SUBSCRIBED"


@dataclass(frozen=True)
class Loss:
    """One thing that is not as the query left it.

    Attributes:
        kind: ``PARTITIONS_GONE``, ``NO_LONGER_SUBSCRIBED``, ``TOPIC_RECREATED``, ``AGED_OUT``,
            ``NEW_PARTITION_NOT_AT_ZERO`` or ``OFFSETS_WENT_BACK``.
        text: names partitions and offsets.
    """

    kind: str
    text: str


@dataclass(frozen=True)
class Reconciled:
    """Where to go on.

    Attributes:
        starts: a start for every partition there is now.
        losses: what was found on the way; empty = nothing is lost.
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
    belongs: Callable[[TopicPartition], bool] = lambda _: True,
) -> Reconciled:
    """Compares where the query stands with what is there.

    Partitions that the query has not seen start at their earliest offset, as in Spark.

    Args:
        position: next offset to read, per partition, as the last batch left it.
        topic_ids: topic ids (KIP-516) then.
        partitions: what is subscribed now.
        earliest: where partitions begin that are new or were created again. Other partitions may be
            missing: a task that finds its offsets gone reports it.
        latest: end of the log, for all.
        current_ids: topic ids now.
        belongs: whether a partition, deleted or not, is among what the options name: one that is not was
            dropped by the user, and nothing is lost of it.
    """
    losses: list[Loss] = []
    starts: dict[TopicPartition, int] = {}
    missing = sorted(set(position) - set(partitions))
    gone = [tp for tp in missing if belongs(tp)]
    dropped = [tp for tp in missing if not belongs(tp)]
    if gone:
        losses.append(Loss("PARTITIONS_GONE", f"{_list(gone)}: read before, now deleted"))
    if dropped:
        losses.append(
            Loss(_DROPPED, f"{_list(dropped)}: read before, no longer among what the options name to be read")
        )
    anew = remade(topic_ids, current_ids)
    losses += [
        Loss("TOPIC_RECREATED", f"topic {topic!r} was deleted and created again (its id changed)")
        for topic in sorted(anew)
    ]
    for tp in sorted(partitions):
        end, stood = latest[tp], position.get(tp)
        if stood is None or tp.topic in anew:
            starts[tp] = first = earliest[tp]
            if stood is None and position and first > 0:
                losses.append(Loss("NEW_PARTITION_NOT_AT_ZERO", f"{tp} is new and starts at offset {first}"))
        elif stood < earliest.get(tp, stood):
            starts[tp] = earliest[tp]
            losses.append(Loss("AGED_OUT", f"{tp}: offsets {stood} to {earliest[tp] - 1} are gone"))
        elif stood > end:
            starts[tp] = end
            losses.append(
                Loss("OFFSETS_WENT_BACK", f"{tp}: the query stands at {stood}, the log ends at {end}")
            )
        else:
            starts[tp] = stood
    return Reconciled(starts, losses)


def remade(topic_ids: Mapping[str, str], current_ids: Mapping[str, str]) -> set[str]:
    """Topics that were deleted and created again: they have another id under the same name."""
    return {topic for topic, was in topic_ids.items() if topic in current_ids and current_ids[topic] != was}


def lost_since_planned(
    reads: Collection[TopicPartition], planned_ids: Mapping[str, str], current_ids: Mapping[str, str]
) -> list[Loss]:
    """Topics that were deleted, and perhaps created again, after a batch was planned.

    The offsets of the batch mean nothing in a topic of another id: the records there are other records.

    Args:
        reads: partitions of which the batch reads something.
        planned_ids: topic ids when the batch was planned.
        current_ids: ids of the topics that exist now.
    """
    losses = []
    for topic in sorted({tp.topic for tp in reads} & set(planned_ids)):
        if topic not in current_ids:
            gone = [tp for tp in sorted(reads) if tp.topic == topic]
            losses.append(
                Loss("PARTITIONS_GONE", f"{_list(gone)}: the topic was deleted after the batch was planned")
            )
        elif current_ids[topic] != planned_ids[topic]:
            losses.append(
                Loss(
                    "TOPIC_RECREATED",
                    f"topic {topic!r} was deleted and created again after the batch was planned (its id "
                    "changed)",
                )
            )
    return losses


def data_loss(losses: Collection[Loss]) -> DataLossError:
    """The error for ``failOnDataLoss=true``."""
    look = "else look at the topic's retention and history."
    if any(loss.kind == _DROPPED for loss in losses):
        look = "else name those topics again, in 'subscribe', 'subscribePattern' or 'assign'."
    return DataLossError(
        f"{'; '.join(f'{loss.kind}: {loss.text}' for loss in losses)} (failOnDataLoss=true).",
        fix="if that is expected, restart with .option('failOnDataLoss', 'false'), which goes on with what "
        f"is there; {look}",
    )


def _list(partitions: Collection[TopicPartition]) -> str:
    return ", ".join(str(tp) for tp in partitions)
