"""What is gone between where the query stands and what the brokers still have."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass

from kafka_eos_source.errors import DataLossError
from kafka_eos_source.model import Offsets, TopicPartition


@dataclass(frozen=True)
class Loss:
    """One thing that is not as the query left it. ``text`` names partition and offsets."""

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
) -> Reconciled:
    """Compares where the query stands with what is there.

    Partitions that the query has not seen start at their earliest offset, as in Spark.

    Args:
        position: next offset to read, per partition, as the last batch left it.
        topic_ids: topic ids (KIP-516) then.
        partitions: what is subscribed now.
        earliest: first offset there is; needed for partitions that are new or made anew. For others it may
            be left out: a task that finds its offsets gone says so itself.
        latest: end of the log, for all.
        current_ids: topic ids now.
    """
    losses: list[Loss] = []
    starts: dict[TopicPartition, int] = {}
    gone = sorted(set(position) - set(partitions))
    if gone:
        losses.append(
            Loss("PARTITIONS_GONE", f"{_list(gone)}: read before, now deleted or no longer subscribed")
        )
    anew = remade(topic_ids, current_ids)
    losses += [
        Loss("TOPIC_RECREATED", f"topic {topic!r} was deleted and made anew (its id changed)")
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
    """Topics that were deleted and made anew: same name, another id."""
    return {topic for topic, was in topic_ids.items() if topic in current_ids and current_ids[topic] != was}


def data_loss(losses: Collection[Loss]) -> DataLossError:
    """The error for ``failOnDataLoss=true``."""
    return DataLossError(
        f"{'; '.join(f'{loss.kind}: {loss.text}' for loss in losses)} (failOnDataLoss=true).",
        fix="if that is expected, restart with .option('failOnDataLoss', 'false'), which goes on with what "
        "is there; else look at the topic's retention and history.",
    )


def _list(partitions: Collection[TopicPartition]) -> str:
    return ", ".join(str(tp) for tp in partitions)
