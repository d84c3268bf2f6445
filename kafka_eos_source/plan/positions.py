"""Resolves a bound of the options, such as ``earliest`` or a time, to an offset for each partition."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field

from kafka_eos_source.errors import InvalidOptionError
from kafka_eos_source.model import Offsets, TopicPartition
from kafka_eos_source.option_values import EARLIEST, LATEST
from kafka_eos_source.options.checked import Bound


@dataclass(frozen=True)
class BrokerOffsets:
    """Offsets that the brokers reported for the partitions to read.

    Attributes:
        earliest: first offset of the log.
        latest: end of the log; the last stable offset (LSO) with ``isolation.level=read_committed``.
        at_time: first offset at or after the requested time; None = no such record.
        committed: committed offsets of the consumer group.
    """

    earliest: Offsets
    latest: Offsets
    at_time: Mapping[TopicPartition, int | None] = field(default_factory=dict)
    committed: Offsets = field(default_factory=dict)


def times(bound: Bound, partitions: Collection[TopicPartition]) -> dict[TopicPartition, int]:
    """Returns the time (ms since 1970) to look up for each partition; empty if the bound is not a time.

    Raises:
        InvalidOptionError: if the option does not name exactly the partitions that exist.
    """
    if bound.kind == "timestamp" and bound.timestamp_ms is not None:
        return dict.fromkeys(partitions, bound.timestamp_ms)
    if bound.kind == "timestamps":
        _check_covers(bound, bound.timestamps_ms, partitions)
        return dict(bound.timestamps_ms)
    return {}


def resolve(
    bound: Bound, partitions: Collection[TopicPartition], known: BrokerOffsets
) -> dict[TopicPartition, int]:
    """Returns the offset of every partition.

    Args:
        bound: where to start or stop.
        partitions: subscribed partitions that exist now.
        known: offsets from the brokers, with `at_time` for times and `committed` for ``group``.

    Raises:
        InvalidOptionError: if the option does not name exactly the partitions that exist, or no record is at
            or after the time and the strategy is ``error``.
    """
    if bound.kind == "offsets":
        _check_covers(bound, bound.offsets, partitions)
    return {tp: _offset(bound, tp, known) for tp in partitions}


def _offset(bound: Bound, tp: TopicPartition, known: BrokerOffsets) -> int:
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
        f"option {bound.option!r} starts {tp} at time {at_ms} (ms since 1970), but the partition has no "
        "record at or after that time.",
        fix="set an earlier time, or startingOffsetsByTimestampStrategy=latest to start such partitions at "
        "their end.",
    )


def _check_covers(
    bound: Bound, named: Collection[TopicPartition], partitions: Collection[TopicPartition]
) -> None:
    """Checks that an option names exactly the partitions that exist, as Spark does, or whole topics.

    Raises:
        InvalidOptionError: if partitions are missing, or do not exist.
    """
    missing = {tp for tp in partitions if tp not in named and bound.default_of(tp.topic) is None}
    extra = set(named) - set(partitions)
    if missing or extra:
        raise InvalidOptionError(
            f"option {bound.option!r} must name exactly the partitions to read (missing: {_list(missing)}; "
            f"unknown: {_list(extra)}).",
            fix='name all partitions, or use {"topic":"earliest"} for a whole topic and {"*":"latest"} for '
            "all topics that are not named."
            if bound.kind == "offsets"
            else "name all partitions, or set one time for all with startingTimestamp or endingTimestamp.",
        )


def _list(partitions: Collection[TopicPartition]) -> str:
    return ", ".join(str(tp) for tp in sorted(partitions)) or "none"
