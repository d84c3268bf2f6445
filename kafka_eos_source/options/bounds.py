"""Subscription and bounds of a read: what to read, where to start and where to stop."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from kafka_eos_source import option_values as values
from kafka_eos_source.errors import InvalidOptionError


def _subscription(values_of: Mapping[str, Any]) -> Subscription:
    """Returns the subscription from the one of its three options that is set.

    Raises:
        InvalidOptionError: if none of the options is set, or more than one.
    """
    names = ("subscribe", "subscribePattern", "assign")
    given = [name for name in names if values_of[name] is not None]
    if not given:
        raise InvalidOptionError(
            f"no topic to read: expected exactly one of the options {', '.join(names)}, but none is set.",
            fix="set .option('subscribe', 'topic').",
        )
    if len(given) > 1:
        raise InvalidOptionError(
            f"the options {' and '.join(map(repr, given))} are set together; expected exactly one of "
            f"{', '.join(names)}.",
            fix="keep one of them. To read several topics, use a list 'a,b' or a pattern 'a|b'.",
        )
    kind = given[0]
    value = values_of[kind]
    return Subscription(
        kind,
        topics=value if kind == "subscribe" else (),
        pattern=value if kind == "subscribePattern" else "",
        partitions=value if kind == "assign" else (),
    )


def _starting(values_of: Mapping[str, Any], *, streaming: bool, has_group: bool) -> Bound:
    """Returns where a query without a checkpoint starts.

    As in Spark, ``startingTimestamp`` takes precedence over ``startingOffsetsByTimestamp``, and that over
    ``startingOffsets``.

    Args:
        values_of: value of each option.
        streaming: whether the read is a stream.
        has_group: whether a consumer group is known, for ``startingOffsets=group``.

    Raises:
        InvalidOptionError: if the offsets are malformed or a read cannot start there.
    """
    no_match = values_of["startingOffsetsByTimestampStrategy"]
    if values_of["startingTimestamp"] is not None:
        return Bound(
            "timestamp",
            timestamp_ms=values_of["startingTimestamp"],
            no_match=no_match,
            option="startingTimestamp",
        )
    if values_of["startingOffsetsByTimestamp"] is not None:
        return Bound(
            "timestamps",
            timestamps_ms=values_of["startingOffsetsByTimestamp"],
            no_match=no_match,
            option="startingOffsetsByTimestamp",
        )
    bound = _offsets(
        "startingOffsets",
        values_of["startingOffsets"] or ("latest" if streaming else "earliest"),
        ("earliest", "latest", "group") if streaming else ("earliest", "group"),
    )
    if bound.kind == "group" and not has_group:
        raise values.invalid(
            "startingOffsets",
            "group",
            "a consumer group to be set as well",
            "set 'kafka.group.id' or 'application.id'.",
        )
    if not streaming and values.LATEST in (*bound.offsets.values(), *bound.topic_defaults.values()):
        raise values.invalid(
            "startingOffsets",
            values_of["startingOffsets"],
            "offsets other than -1 (latest), with which a batch read would be empty",
            "set an offset, or -2 for the earliest one.",
        )
    return bound


def _ending(values_of: Mapping[str, Any]) -> Bound:
    """Returns where a batch read stops.

    Raises:
        InvalidOptionError: if the offsets are malformed or a read cannot stop there.
    """
    if values_of["endingTimestamp"] is not None:
        return Bound(
            "timestamp",
            timestamp_ms=values_of["endingTimestamp"],
            no_match="latest",
            option="endingTimestamp",
        )
    if values_of["endingOffsetsByTimestamp"] is not None:
        return Bound(
            "timestamps",
            timestamps_ms=values_of["endingOffsetsByTimestamp"],
            no_match="latest",
            option="endingOffsetsByTimestamp",
        )
    bound = _offsets("endingOffsets", values_of["endingOffsets"] or "latest", ("latest",))
    if values.EARLIEST in (*bound.offsets.values(), *bound.topic_defaults.values()):
        raise values.invalid(
            "endingOffsets",
            values_of["endingOffsets"],
            "offsets other than -2 (earliest), with which nothing would be read",
            "set an offset, or -1 for the latest one.",
        )
    return bound


def _offsets(name: str, value: str, words: Iterable[str]) -> Bound:
    if value.strip().lower() in words:
        return Bound(value.strip().lower(), option=name)
    if not value.strip().startswith("{"):
        raise values.invalid(name, value, f"{', '.join(words)} or JSON such as " + '{"topic":{"0":23}}')
    by_partition, by_topic = values.offsets(name, value)
    return Bound("offsets", offsets=by_partition, topic_defaults=by_topic, option=name)


def _check_names(what: Subscription, bound: Bound) -> None:
    """Checks that a bound names the topics and partitions of the subscription, without asking a broker.

    Only batch reads are checked here. A stream checks its start when it uses it, which it does not do if
    there is a checkpoint.

    Raises:
        InvalidOptionError: if the bound names anything else, or leaves a topic or partition out.
    """
    if bound.kind not in ("offsets", "timestamps"):
        return
    named = set(bound.offsets) | set(bound.timestamps_ms)
    topics = {tp.topic for tp in named} | {each for each in bound.topic_defaults if each != values.OTHERS}
    for topic in sorted(topics):
        if not what.has_topic(topic):
            raise InvalidOptionError(
                f"option {bound.option!r} names the topic {topic!r}, which option {what.kind!r} does not "
                "include.",
                fix=f"remove the topic from {bound.option!r}, or add it to {what.kind!r}.",
            )
    missing = [each for each in what.topics if each not in topics and bound.default_of(each) is None]
    if missing:
        raise InvalidOptionError(
            f"option {bound.option!r} names no partition of {', '.join(map(repr, missing))}; expected all "
            "partitions of every topic to read.",
            fix=f"add the missing partitions. {_COMPLETE}",
        )
    wanted = {tp for tp in what.partitions if tp in named or bound.default_of(tp.topic) is None}
    if what.kind == "assign" and named != wanted:
        shown = [", ".join(str(tp) for tp in sorted(each)) or "none" for each in (named, wanted)]
        raise InvalidOptionError(
            f"option {bound.option!r} names the partitions {shown[0]}, but option 'assign' has {shown[1]}.",
            fix=f"name the same partitions in both options. {_COMPLETE}",
        )


_COMPLETE = (
    'In offsets, {"topic":"earliest"} covers a whole topic, and {"*":"latest"} all topics that are not named.'
)


def _check_order(start: Bound, end: Bound) -> None:
    """Checks that no partition starts after its end, as far as the options alone show that.

    The planner finds the other cases when it knows the offsets of the partitions.

    Raises:
        InvalidOptionError: if a partition starts after its end, or only one option names it; the equivalent
            of Spark's ``UNRESOLVED_START_OFFSET_GREATER_THAN_END_OFFSET``.
    """
    named = (set(start.offsets), set(end.offsets))
    if start.kind == end.kind == "offsets" and not (start.topic_defaults or end.topic_defaults):
        lone = sorted(named[0] ^ named[1])
        if lone:
            raise InvalidOptionError(
                f"only one of the options {start.option!r} and {end.option!r} names the partition(s) "
                f"{', '.join(map(str, lone))}; expected both to name them.",
                fix=f"name the same partitions in both options. {_COMPLETE}",
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
                f"option {start.option!r} starts {what} at {starts}, but option {end.option!r} ends it at "
                f"{ends}.",
                fix="set an end that is not before the start.",
            )
