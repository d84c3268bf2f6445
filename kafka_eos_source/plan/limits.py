"""How much of what waits goes into the next batch."""

from __future__ import annotations

from collections.abc import Mapping

from kafka_eos_source.model import Offsets, TopicPartition


def backlog(starts: Offsets, ends: Offsets) -> int:
    """Offsets that wait, over all partitions."""
    return sum(max(0, end - starts.get(tp, end)) for tp, end in ends.items())


def rate_limit(starts: Offsets, ends: Offsets, limit: int, turn: int = 0) -> dict[TopicPartition, int]:
    """Ends of a batch of at most ``limit`` offsets, shared in proportion to what waits (as in Spark).

    Spark rounds shares below 1 up, and so exceeds the limit when many partitions hold little. Here they
    take turns: what rounding down leaves goes one by one to the partitions that got nothing, then to the
    largest remainders.

    Args:
        starts: where the batch begins.
        ends: where the log ends, for the same partitions.
        limit: most offsets in the batch, at least 1.
        turn: a number that grows from batch to batch.

    Returns:
        An end for every partition of ``ends``; their sum is ``min(limit, backlog)`` past the starts.
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
    """Who gets one of the offsets that rounding left, in order."""
    without = [tp for tp, size in sizes.items() if size and not taken[tp]]
    rest = [tp for tp, size in sizes.items() if taken[tp] < size and taken[tp]]
    left = limit - sum(taken.values())
    if without:
        first = turn * left % len(without)
        without = without[first:] + without[:first]
    return without + sorted(rest, key=lambda tp: -(limit * sizes[tp] % total))


def held_back(waiting: int, min_offsets: int | None, since_last_ms: float | None, max_delay_ms: int) -> bool:
    """Whether to wait for more (``minOffsetsPerTrigger``, ``maxTriggerDelay``).

    Args:
        waiting: offsets that wait.
        min_offsets: the option; None = never wait.
        since_last_ms: since the last batch of this run; None = there was none, and the first never waits.
        max_delay_ms: the longest wait.
    """
    return (
        min_offsets is not None
        and waiting < min_offsets
        and since_last_ms is not None
        and since_last_ms < max_delay_ms
    )
