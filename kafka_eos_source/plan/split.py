"""Ranges of a batch, dealt out to tasks."""

from __future__ import annotations

from collections.abc import Iterable

from kafka_eos_source.model import OffsetRange

#: Partitions share a task up to this many offsets. A task and its first fetch take 0.05 s to start; what the
#: query does with 20,000 records (JSON: 0.5 s of a core) is worth a core of its own.
OFFSETS_SHARED = 20_000
#: A partition is cut into tasks of at most this many offsets, whatever the query does with them.
OFFSETS_PER_TASK = 250_000

Task = tuple[OffsetRange, ...]


def split(
    ranges: Iterable[OffsetRange],
    *,
    min_partitions: int | None = None,
    max_records_per_partition: int | None = None,
) -> list[Task]:
    """Tasks that together read every offset of ``ranges`` once; empty ranges are dropped.

    With an option the pieces are Spark's (``KafkaOffsetRangeCalculator``), one a task. Without one, small
    ranges share a task and large ones are cut: a task per partition, as Spark has it, costs more to start
    than a small batch takes to read.
    """
    full = sorted((each for each in ranges if each.size > 0), key=lambda each: each.tp)
    if max_records_per_partition is not None:
        full = [piece for each in full for piece in _cut(each, -(-each.size // max_records_per_partition))]
    if min_partitions is not None:
        full = _at_least(full, min_partitions)
    if min_partitions is not None or max_records_per_partition is not None:
        return [(each,) for each in full]
    return _packed(full)


def _packed(ranges: list[OffsetRange]) -> list[Task]:
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
    """Spark's: pieces in proportion to size; whole ranges are set aside, the others dealt again."""
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
    # Scala's math.round: halves go up
    return max(int(each.size / total * pieces + 0.5), 1)


def _cut(each: OffsetRange, pieces: int) -> list[OffsetRange]:
    """By integer division of what remains, so that the last piece takes the remainder."""
    found = []
    start = each.start
    for left in range(pieces, 0, -1):
        end = start + (each.end - start) // left
        if end > start:
            found.append(OffsetRange(each.tp, start, end))
        start = end
    return found
