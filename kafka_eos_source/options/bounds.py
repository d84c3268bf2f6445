"""What to read, where to start and where to stop: options that only together mean something."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from kafka_eos_source import option_values as values
from kafka_eos_source.errors import InvalidOptionError
from kafka_eos_source.model import TopicPartition


@dataclass(frozen=True)
class Subscription:
    """What to read. ``kind``: ``subscribe``, ``subscribePattern`` or ``assign``."""

    kind: str
    topics: tuple[str, ...] = ()
    pattern: str = ""
    partitions: tuple[TopicPartition, ...] = ()

    def has_topic(self, topic: str) -> bool:
        """Whether partitions of the topic can belong."""
        if self.kind == "subscribePattern":
            return re.search(self.pattern, topic) is not None
        return topic in (self.topics or {tp.topic for tp in self.partitions})

    def has(self, tp: TopicPartition) -> bool:
        """Whether the partition belongs, if it exists."""
        return tp in self.partitions if self.kind == "assign" else self.has_topic(tp.topic)


@dataclass(frozen=True)
class Bound:
    """Where to start or stop.

    Attributes:
        kind: ``earliest``, ``latest``, ``group``, ``offsets``, ``timestamps`` or ``timestamp``.
        offsets: per partition; -1 latest, -2 earliest (kind ``offsets``).
        topic_defaults: the same for whole topics; ``*`` = for all that are not named.
        timestamps_ms: per partition (kind ``timestamps``).
        timestamp_ms: for all (kind ``timestamp``).
        no_match: when no record is at or after the time: ``error`` or ``latest``.
        option: by which it was said.
    """

    kind: str
    offsets: Mapping[TopicPartition, int] = field(default_factory=dict)
    topic_defaults: Mapping[str, int] = field(default_factory=dict)
    timestamps_ms: Mapping[TopicPartition, int] = field(default_factory=dict)
    timestamp_ms: int | None = None
    no_match: str = "error"
    option: str = field(default="startingOffsets", compare=False)

    def default_of(self, topic: str) -> int | None:
        """For partitions of a topic that are not named; None = they must be."""
        return self.topic_defaults.get(topic, self.topic_defaults.get(values.OTHERS))


def subscription(found: Mapping[str, Any]) -> Subscription:
    """Exactly one of the three options.

    Raises:
        InvalidOptionError: none or several are set.
    """
    names = ("subscribe", "subscribePattern", "assign")
    stated = [name for name in names if found[name] is not None]
    if not stated:
        raise InvalidOptionError(
            f"nothing to read: none of {', '.join(names)} is set; expected exactly one.",
            fix="set .option('subscribe', 'topic').",
        )
    if len(stated) > 1:
        said = " and ".join(repr(name) for name in stated)
        raise InvalidOptionError(
            f"{said} are set; expected exactly one of {', '.join(names)}.",
            fix="keep one of them; a pattern such as 'a|b' or a list 'a,b' can name several topics.",
        )
    value = found[stated[0]]
    return Subscription(
        stated[0],
        topics=value if stated[0] == "subscribe" else (),
        pattern=value if stated[0] == "subscribePattern" else "",
        partitions=value if stated[0] == "assign" else (),
    )


def starting(found: Mapping[str, Any], *, streaming: bool, has_group: bool) -> Bound:
    """Where a query without a checkpoint begins. One time wins over times, those over offsets (as in Spark).

    Raises:
        InvalidOptionError: the offsets are malformed or cannot be a start.
    """
    no_match = found["startingOffsetsByTimestampStrategy"]
    if found["startingTimestamp"] is not None:
        return Bound(
            "timestamp",
            timestamp_ms=found["startingTimestamp"],
            no_match=no_match,
            option="startingTimestamp",
        )
    if found["startingOffsetsByTimestamp"] is not None:
        return Bound(
            "timestamps",
            timestamps_ms=found["startingOffsetsByTimestamp"],
            no_match=no_match,
            option="startingOffsetsByTimestamp",
        )
    bound = _offsets(
        "startingOffsets",
        found["startingOffsets"] or ("latest" if streaming else "earliest"),
        ("earliest", "latest", "group") if streaming else ("earliest", "group"),
    )
    if bound.kind == "group" and not has_group:
        raise values.invalid(
            "startingOffsets", "group", "a group to go with it", "set 'kafka.group.id' or 'application.id'."
        )
    if not streaming and values.LATEST in (*bound.offsets.values(), *bound.topic_defaults.values()):
        raise values.invalid(
            "startingOffsets",
            found["startingOffsets"],
            "no -1 or latest on a batch read: it would be empty",
            "give offsets, or -2 for the earliest.",
        )
    return bound


def ending(found: Mapping[str, Any]) -> Bound:
    """Where a batch read stops.

    Raises:
        InvalidOptionError: the offsets are malformed or cannot be an end.
    """
    if found["endingTimestamp"] is not None:
        return Bound(
            "timestamp", timestamp_ms=found["endingTimestamp"], no_match="latest", option="endingTimestamp"
        )
    if found["endingOffsetsByTimestamp"] is not None:
        return Bound(
            "timestamps",
            timestamps_ms=found["endingOffsetsByTimestamp"],
            no_match="latest",
            option="endingOffsetsByTimestamp",
        )
    bound = _offsets("endingOffsets", found["endingOffsets"] or "latest", ("latest",))
    if values.EARLIEST in (*bound.offsets.values(), *bound.topic_defaults.values()):
        raise values.invalid(
            "endingOffsets",
            found["endingOffsets"],
            "no -2 or earliest: nothing would be read",
            "give offsets, or -1 for the latest.",
        )
    return bound


def _offsets(name: str, value: str, words: Iterable[str]) -> Bound:
    if value.strip().lower() in words:
        return Bound(value.strip().lower(), option=name)
    if not value.strip().startswith("{"):
        raise values.invalid(name, value, f"{', '.join(words)}, or JSON such as " + '{"topic":{"0":23}}')
    by_partition, by_topic = values.offsets(name, value)
    return Bound("offsets", offsets=by_partition, topic_defaults=by_topic, option=name)


def check_names(what: Subscription, bound: Bound) -> None:
    """What a bound names must be what is read, as far as that is known without a broker.

    For batch reads: of a stream's start it is asked when it is used, which is not with a checkpoint.

    Raises:
        InvalidOptionError: it names something else, or leaves something out.
    """
    if bound.kind not in ("offsets", "timestamps"):
        return
    named = set(bound.offsets) | set(bound.timestamps_ms)
    topics = {tp.topic for tp in named} | {each for each in bound.topic_defaults if each != values.OTHERS}
    for topic in sorted(topics):
        if not what.has_topic(topic):
            raise InvalidOptionError(
                f"option {bound.option!r} names the topic {topic!r}; {what.kind!r} does not have it.",
                fix=f"take it out of {bound.option!r}, or read it.",
            )
    missing = [each for each in what.topics if each not in topics and bound.default_of(each) is None]
    if missing:
        raise InvalidOptionError(
            f"option {bound.option!r} names no partition of {', '.join(map(repr, missing))}; expected "
            "those of every topic that is read.",
            fix=_COMPLETE,
        )
    wanted = {tp for tp in what.partitions if tp in named or bound.default_of(tp.topic) is None}
    if what.kind == "assign" and named != wanted:
        shown = [", ".join(str(tp) for tp in sorted(each)) or "none" for each in (named, wanted)]
        raise InvalidOptionError(
            f"option {bound.option!r} names the partitions {shown[0]}; 'assign' has {shown[1]}.",
            fix=f"name exactly the assigned partitions. {_COMPLETE}",
        )


_COMPLETE = 'In offsets, {"topic":"earliest"} stands for a whole topic and {"*":"latest"} for all not named.'


def check_order(start: Bound, end: Bound) -> None:
    """A start past its end that can be seen without a broker; others are found when the read is planned.

    Raises:
        InvalidOptionError: naming both, as Spark's ``UNRESOLVED_START_OFFSET_GREATER_THAN_END_OFFSET``.
    """
    named = (set(start.offsets), set(end.offsets))
    if start.kind == end.kind == "offsets" and not (start.topic_defaults or end.topic_defaults):
        lone = sorted(named[0] ^ named[1])
        if lone:
            raise InvalidOptionError(
                f"only one of {start.option!r} and {end.option!r} names {', '.join(map(str, lone))}.",
                fix=f"name the same partitions in both. {_COMPLETE}",
            )
    pairs = [
        *((str(tp), at, end.offsets.get(tp)) for tp, at in start.offsets.items()),
        *((str(tp), at, end.timestamps_ms.get(tp)) for tp, at in start.timestamps_ms.items()),
        *(
            [("every partition", start.timestamp_ms, end.timestamp_ms)]
            if start.timestamp_ms is not None
            else []
        ),
    ]
    for what, starts, ends in pairs:
        if ends is not None and 0 <= ends < starts:
            raise InvalidOptionError(
                f"option {start.option!r} starts {what} at {starts}, {end.option!r} ends it at {ends}.",
                fix="let each partition end at or after its start.",
            )
