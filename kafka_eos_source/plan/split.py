"""Decides how much of the backlog the next batch reads, and divides its offset ranges into tasks."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from kafka_eos_source.errors import StateMismatchError
from kafka_eos_source.model import OTHER_INPUT, OffsetRange, Offsets, ShardRanges, TopicPartition

#: Partitions share a task up to this many offsets in total. A task with its first fetch takes 0.05 s to
#: start. Processing 20,000 records (0.5 s of CPU time for JSON) is worth a task of its own.
OFFSETS_SHARED = 20_000
#: A larger partition is divided into tasks of at most this many offsets.
OFFSETS_PER_TASK = 250_000
#: Opening and closing a shard's state takes about as long as processing this many records.
_OFFSETS_PER_SHARD = 4_000

Task = tuple[OffsetRange, ...]


def split(
    ranges: Iterable[OffsetRange],
    *,
    min_partitions: int | None = None,
    max_records_per_partition: int | None = None,
) -> list[Task]:
    """Returns tasks that together read every offset of ``ranges`` once; empty ranges are dropped.

    With one of the options, the pieces are those of Spark (``KafkaOffsetRangeCalculator``), one per task.
    Without, small ranges share a task and large ones are divided, because starting a task for each partition,
    as Spark does, can take longer than reading a small batch.

    Args:
        ranges: ranges to read.
        min_partitions: option ``minPartitions``.
        max_records_per_partition: option ``maxRecordsPerPartition``.
    """
    full = sorted((each for each in ranges if each.size > 0), key=lambda each: each.tp)
    if max_records_per_partition is not None:
        full = [piece for each in full for piece in _cut(each, -(-each.size // max_records_per_partition))]
    if min_partitions is not None:
        full = _at_least(full, min_partitions)
    if min_partitions is not None or max_records_per_partition is not None:
        return [(each,) for each in full]
    return _shared(full)


def split_by_shard(
    ranges: Iterable[OffsetRange], shards: int, parallelism: int
) -> list[tuple[ShardRanges, ...]]:
    """Returns tasks that together run every shard of an operator once (``shards="partitions"``).

    Each shard has a task of its own, if Spark can run all of them at the same time. Otherwise neighbours
    share tasks, of which each has about the same share of the work.

    Args:
        ranges: ranges to read; partition ``p`` of each topic belongs to shard ``p``.
        shards: number of shards.
        parallelism: number of tasks that Spark runs at the same time.

    Raises:
        StateMismatchError: if there is a partition without a shard.
    """
    ranges = list(ranges)
    largest = max((each.tp for each in ranges), key=lambda tp: tp.partition, default=None)
    if largest is not None and largest.partition >= shards:
        raise other_partitions(largest.topic, largest.partition + 1, shards)
    of_shard: list[list[OffsetRange]] = [[] for _ in range(shards)]
    for each in sorted(ranges, key=lambda each: each.tp):
        if each.size > 0:
            of_shard[each.tp.partition].append(each)
    if shards <= parallelism:
        return [((shard, tuple(own)),) for shard, own in enumerate(of_shard)]
    costs = [_OFFSETS_PER_SHARD + sum(each.size for each in own) for own in of_shard]
    total = sum(costs)
    tasks = min(shards, max(parallelism, -(-total // OFFSETS_SHARED)))  # more tasks if there is much to read
    found: list[list[ShardRanges]] = [[] for _ in range(tasks)]
    before = 0
    for shard, (own, cost) in enumerate(zip(of_shard, costs, strict=True)):
        found[(2 * before + cost) * tasks // (2 * total)].append((shard, tuple(own)))
        before += cost
    return [tuple(task) for task in found if task]


def other_partitions(topic: str, partitions: int, shards: int) -> StateMismatchError:
    """Returns the error for a topic with another number of partitions, to which producers send other keys."""
    return StateMismatchError(
        f"the input topic {topic!r} has {partitions} partitions, but the operator has {shards} shards, one "
        "for each partition that the topic had when the query was defined (shards='partitions'). Somebody "
        "added partitions, or created the topic again, so records of a key may now be in another partition "
        "than those before, where the key has no state.",
        fix=OTHER_INPUT,
    )


def _shared(ranges: list[OffsetRange]) -> list[Task]:
    """Returns tasks of which each reads one large range, or several small ones."""
    tasks: list[Task] = []
    shared: list[OffsetRange] = []
    room = OFFSETS_SHARED
    for each in ranges:
        for piece in _cut(each, -(-each.size // OFFSETS_PER_TASK)):
            if piece.size > OFFSETS_SHARED:
                tasks.append((piece,))
                continue
            if piece.size > room:
                tasks.append(tuple(shared))
                shared, room = [], OFFSETS_SHARED
            shared.append(piece)
            room -= piece.size
    return [*tasks, tuple(shared)] if shared else tasks


def _at_least(ranges: list[OffsetRange], min_partitions: int) -> list[OffsetRange]:
    """Returns at least ``min_partitions`` pieces, computed as in Spark.

    Ranges are divided in proportion to their size. Those whose share is one piece stay whole, and the
    remaining pieces are shared among the others.
    """
    if len(ranges) >= min_partitions:
        return ranges
    total = sum(each.size for each in ranges)
    whole = [each for each in ranges if _share(each, total, min_partitions) == 1]
    rest = [each for each in ranges if _share(each, total, min_partitions) != 1]
    left = max(min_partitions - len(whole), 1)
    rest_total = sum(each.size for each in rest)
    cut = [piece for each in rest for piece in _cut(each, _share(each, rest_total, left))]
    return sorted([*whole, *cut], key=lambda each: (each.tp, each.start))


def _share(each: OffsetRange, total: int, pieces: int) -> int:
    # rounds halves up, like math.round in Scala
    return max(int(each.size / total * pieces + 0.5), 1)


def _cut(each: OffsetRange, pieces: int) -> list[OffsetRange]:
    """Divides a range by integer division of the rest, as Spark does; the last piece gets the remainder."""
    found = []
    start = each.start
    for left in range(pieces, 0, -1):
        end = start + (each.end - start) // left
        if end > start:
            found.append(OffsetRange(each.tp, start, end, each.epoch))
        start = end
    return found


# -- The size of a batch --------------------------------------------------------------------------


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
