"""Limits how many offsets of the backlog the next batch reads."""

from __future__ import annotations

from collections.abc import Mapping

from kafka_eos_source.model import Offsets, TopicPartition


def backlog(starts: Offsets, ends: Offsets) -> int:
    """Returns the number of offsets that wait to be read, over all partitions."""
    return sum(max(0, end - starts.get(tp, end)) for tp, end in ends.items())


def rate_limit(starts: Offsets, ends: Offsets, limit: int, turn: int = 0) -> dict[TopicPartition, int]:
    """Returns the ends of a batch of at most ``limit`` offsets, shared in proportion to the backlog.

    Spark does the same, but rounds shares below 1 up, and therefore exceeds the limit if many partitions have
    a small backlog. Here, shares are rounded down and partitions take turns: the rest goes one by one to
    partitions that got nothing, then to those with the largest remainders.

    Args:
        starts: where the batch begins.
        ends: where the log of the same partitions ends.
        limit: maximum number of offsets in the batch, at least 1.
        turn: a number that grows from batch to batch.

    Returns:
        An end for every partition of ``ends``. Together they are ``min(limit, backlog)`` offsets after the
        starts.
    """
    sizes = {tp: max(0, ends[tp] - starts.get(tp, ends[tp])) for tp in sorted(ends)}
    total = sum(sizes.values())
    if total <= limit:
        return {tp: max(end, starts.get(tp, end)) for tp, end in ends.items()}
    taken = {tp: limit * size // total for tp, size in sizes.items()}
    for tp in _in_turn(sizes, taken, limit, total, turn)[: limit - sum(taken.values())]:
        taken[tp] += 1
    return {tp: starts.get(tp, ends[tp]) + taken[tp] for tp in ends}


def _in_turn(
    sizes: Mapping[TopicPartition, int],
    taken: Mapping[TopicPartition, int],
    limit: int,
    total: int,
    turn: int,
) -> list[TopicPartition]:
    """Returns the partitions that get one more offset each, in order of precedence."""
    without = [tp for tp, size in sizes.items() if size and not taken[tp]]
    rest = [tp for tp, size in sizes.items() if taken[tp] < size and taken[tp]]
    left = limit - sum(taken.values())
    if without:
        first = turn * left % len(without)
        without = without[first:] + without[:first]
    return without + sorted(rest, key=lambda tp: -(limit * sizes[tp] % total))


def should_wait(
    waiting: int, min_offsets: int | None, since_last_ms: float | None, max_delay_ms: int
) -> bool:
    """Returns whether the source waits for more offsets before the next batch.

    Args:
        waiting: number of offsets in the backlog.
        min_offsets: option ``minOffsetsPerTrigger``; None = never wait.
        since_last_ms: time since the last batch of this run; None for the first batch, which never waits.
        max_delay_ms: option ``maxTriggerDelay``.
    """
    return (
        min_offsets is not None
        and waiting < min_offsets
        and since_last_ms is not None
        and since_last_ms < max_delay_ms
    )
