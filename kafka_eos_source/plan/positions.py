"""From what the user asked and what the brokers know to offsets, partition by partition."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field

from kafka_eos_source.errors import InvalidOptionError
from kafka_eos_source.model import Offsets, TopicPartition
from kafka_eos_source.option_values import EARLIEST, LATEST
from kafka_eos_source.options.bounds import Bound


@dataclass(frozen=True)
class Known:
    """What the brokers said about the partitions to be read.

    Attributes:
        earliest: first offset still there.
        latest: end of the log; the last stable offset for committed reads.
        at_time: first offset at or after the time asked for; None = no such record.
        committed: offsets of the consumer group.
    """

    earliest: Offsets
    latest: Offsets
    at_time: Mapping[TopicPartition, int | None] = field(default_factory=dict)
    committed: Offsets = field(default_factory=dict)


def times(bound: Bound, partitions: Collection[TopicPartition]) -> dict[TopicPartition, int]:
    """The time (ms since 1970) to look up for each partition; empty when the bound is none of time.

    Raises:
        InvalidOptionError: the times do not name exactly the partitions.
    """
    if bound.kind == "timestamp" and bound.timestamp_ms is not None:
        return dict.fromkeys(partitions, bound.timestamp_ms)
    if bound.kind == "timestamps":
        _check_covers(bound, bound.timestamps_ms, partitions)
        return dict(bound.timestamps_ms)
    return {}


def resolve(bound: Bound, partitions: Collection[TopicPartition], known: Known) -> dict[TopicPartition, int]:
    """The offset of every partition.

    Args:
        bound: where to start or stop.
        partitions: what is subscribed now.
        known: what the brokers said; `Known.at_time` for bounds of time, `Known.committed` for ``group``.

    Raises:
        InvalidOptionError: the offsets do not name exactly the partitions, or no record is at or after the
            time and the strategy is ``error``.
    """
    if bound.kind == "offsets":
        _check_covers(bound, bound.offsets, partitions)
    return {tp: _one(bound, tp, known) for tp in partitions}


def _one(bound: Bound, tp: TopicPartition, known: Known) -> int:
    if bound.kind == "earliest":
        return known.earliest[tp]
    if bound.kind == "latest":
        return known.latest[tp]
    if bound.kind == "group":
        return known.committed.get(tp, known.earliest[tp])
    if bound.kind == "offsets":
        offset = bound.offsets.get(tp, bound.default_of(tp.topic))
        if offset is None or offset == EARLIEST:
            return known.earliest[tp]
        return known.latest[tp] if offset == LATEST else offset
    found = known.at_time.get(tp)
    if found is not None:
        return found
    if bound.no_match == "latest":
        return known.latest[tp]
    at_ms = bound.timestamp_ms if bound.kind == "timestamp" else bound.timestamps_ms[tp]
    raise InvalidOptionError(
        f"option {bound.option!r}: no record of {tp} is at or after the starting time {at_ms} (ms since "
        "1970).",
        fix="set startingOffsetsByTimestampStrategy=latest to start such partitions at their end.",
    )


def _check_covers(
    bound: Bound, named: Collection[TopicPartition], partitions: Collection[TopicPartition]
) -> None:
    """As Spark: the JSON names exactly the partitions there are. A whole topic may be named instead."""
    missing = {tp for tp in partitions if tp not in named and bound.default_of(tp.topic) is None}
    extra = set(named) - set(partitions)
    if missing or extra:
        raise InvalidOptionError(
            f"option {bound.option!r} must name exactly the partitions that are read: "
            f"missing {_list(missing)}; not there {_list(extra)}.",
            fix='name them all; in offsets, {"topic":"earliest"} stands for a whole topic and {"*":"latest"} '
            "for all not named."
            if bound.kind == "offsets"
            else "name them all, or give one time for all.",
        )


def _list(partitions: Collection[TopicPartition]) -> str:
    return ", ".join(str(tp) for tp in sorted(partitions)) or "none"
