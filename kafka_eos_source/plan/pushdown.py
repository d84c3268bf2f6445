"""Narrows the offset ranges of a batch read by Spark's filters on topic, partition, offset and timestamp.

It removes only offsets of records that the filters exclude, and Spark applies every filter again. An upper
bound on the timestamp removes nothing, because records are not necessarily in order of time.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from datetime import datetime
from typing import TYPE_CHECKING, Any

from kafka_eos_source.model import OffsetRange, TopicPartition

if TYPE_CHECKING:
    from pyspark.sql.datasource import Filter

#: Returns the first offset at or after a time in ms, per partition; None = no such record.
AtTime = Callable[[Mapping[TopicPartition, int]], Mapping[TopicPartition, int | None]]


def narrowed(ranges: Iterable[OffsetRange], filters: Iterable[Filter], at_time: AtTime) -> list[OffsetRange]:
    """Returns the ranges without offsets that the filters exclude.

    Args:
        ranges: offset ranges of the read.
        filters: Spark's filters, all of which a row must pass.
        at_time: asks the brokers; called only if a filter has a lower bound on the timestamp.
    """
    left = list(ranges)
    since_ms: int | None = None
    for each in filters:
        kind, column, value = type(each).__name__, _column(each), getattr(each, "value", None)
        if column == "partition":
            left = [one for one in left if _keeps(kind, one.tp.partition, value)]
        elif column == "topic":
            left = [one for one in left if _keeps(kind, one.tp.topic, value)]
        elif column == "offset" and isinstance(value, int):
            left = [_cut(one, kind, value) for one in left]
        elif column == "timestamp" and kind in _FROM and isinstance(value, datetime):
            at_ms = int(value.timestamp() * 1000)
            since_ms = at_ms if since_ms is None else max(since_ms, at_ms)
    if since_ms is not None:
        found = at_time({one.tp: since_ms for one in left})
        left = [_from(one, found.get(one.tp)) for one in left]
    return [one for one in left if one.size > 0]


_FROM = frozenset({"GreaterThan", "GreaterThanOrEqual", "EqualTo"})


def _column(each: Filter) -> str:
    attribute: tuple[str, ...] = getattr(each, "attribute", ())
    return attribute[0] if len(attribute) == 1 else ""


def _keeps(kind: str, have: Any, value: Any) -> bool:
    if kind == "EqualTo":
        return bool(have == value)
    if kind == "In":
        return have in value
    if kind == "GreaterThan":
        return bool(have > value)
    if kind == "GreaterThanOrEqual":
        return bool(have >= value)
    if kind == "LessThan":
        return bool(have < value)
    if kind == "LessThanOrEqual":
        return bool(have <= value)
    return True


def _cut(one: OffsetRange, kind: str, value: int) -> OffsetRange:
    start = {"GreaterThan": value + 1, "GreaterThanOrEqual": value, "EqualTo": value}.get(kind, one.start)
    end = {"LessThan": value, "LessThanOrEqual": value + 1, "EqualTo": value + 1}.get(kind, one.end)
    return OffsetRange(one.tp, max(one.start, start), min(one.end, end))


def _from(one: OffsetRange, first: int | None) -> OffsetRange:
    """Returns the range from offset ``first`` on; empty if no record is late enough (``first`` is None)."""
    return OffsetRange(one.tp, one.end if first is None else max(one.start, first), one.end)
