"""Planning of a batch: start positions, limits, the split into tasks, and detection of data loss."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kafka_eos_source.errors import InvalidOptionError
from kafka_eos_source.model import OffsetRange, TopicPartition
from kafka_eos_source.options.checked import Bound
from kafka_eos_source.plan.continuity import data_loss, reconcile
from kafka_eos_source.plan.source import BrokerOffsets, resolve, times
from kafka_eos_source.plan.split import (
    OFFSETS_PER_TASK,
    OFFSETS_SHARED,
    backlog,
    rate_limit,
    should_wait,
    split,
)

A, B, C = TopicPartition("t", 0), TopicPartition("t", 1), TopicPartition("u", 0)
KNOWN = BrokerOffsets(earliest={A: 2, B: 0, C: 5}, latest={A: 20, B: 30, C: 5}, committed={A: 11})


# -- positions


@pytest.mark.parametrize(
    ("bound", "expected"),
    [
        (Bound("earliest"), {A: 2, B: 0}),
        (Bound("latest"), {A: 20, B: 30}),
        (Bound("group"), {A: 11, B: 0}),
        (Bound("offsets", offsets={A: -2, B: -1}), {A: 2, B: 30}),
        (Bound("offsets", offsets={A: 7, B: 8}), {A: 7, B: 8}),
        (Bound("offsets", topic_defaults={"t": -1}), {A: 20, B: 30}),
        (Bound("offsets", offsets={A: 7}, topic_defaults={"t": -1}), {A: 7, B: 30}),
    ],
)
def test_a_start_option_is_resolved_to_offsets(bound: Bound, expected: dict[TopicPartition, int]) -> None:
    assert resolve(bound, [A, B], KNOWN) == expected


def test_start_timestamps_are_per_partition_or_global() -> None:
    assert times(Bound("timestamp", timestamp_ms=5), [A, B]) == {A: 5, B: 5}
    assert times(Bound("timestamps", timestamps_ms={A: 5, B: 6}), [A, B]) == {A: 5, B: 6}
    assert times(Bound("latest"), [A]) == {}


def test_a_start_timestamp_without_a_record_is_an_error_or_the_end_of_the_log() -> None:
    known = BrokerOffsets(KNOWN.earliest, KNOWN.latest, at_time={A: 9, B: None})
    with pytest.raises(InvalidOptionError, match=r"starts t-1 at time 77 .* no record at or after"):
        resolve(Bound("timestamp", timestamp_ms=77), [A, B], known)
    bound = Bound("timestamps", timestamps_ms={A: 1, B: 2}, no_match="latest")
    assert resolve(bound, [A, B], known) == {A: 9, B: 30}


@pytest.mark.parametrize(
    ("offsets", "message"),
    [({A: 1}, "missing: t-1; unknown: none"), ({A: 1, B: 1, C: 1}, "missing: none; unknown: u-0")],
)
def test_start_offsets_must_name_exactly_the_partitions_that_are_read(
    offsets: dict[TopicPartition, int], message: str
) -> None:
    with pytest.raises(InvalidOptionError, match=message):
        resolve(Bound("offsets", offsets=offsets), [A, B], KNOWN)
    with pytest.raises(InvalidOptionError, match=message):
        times(Bound("timestamps", timestamps_ms=offsets), [A, B])


# -- limits

_LOGS = st.dictionaries(
    st.builds(TopicPartition, st.sampled_from("ab"), st.integers(0, 9)),
    st.tuples(st.integers(0, 2**62), st.integers(0, 1000)),
    min_size=1,
)


@given(_LOGS, st.integers(1, 3000), st.integers(0, 100))
def test_a_limited_batch_has_exactly_the_permitted_size(
    logs: dict[TopicPartition, tuple[int, int]], limit: int, turn: int
) -> None:
    starts = {tp: start for tp, (start, _) in logs.items()}
    ends = {tp: start + size for tp, (start, size) in logs.items()}
    limited = rate_limit(starts, ends, limit, turn)
    assert set(limited) == set(ends)
    assert all(starts[tp] <= limited[tp] <= ends[tp] for tp in ends)
    assert backlog(starts, limited) == min(limit, backlog(starts, ends))


@given(st.integers(1, 30), st.integers(1, 10))
def test_no_partition_starves(small: int, limit: int) -> None:
    """One partition with endless records does not keep the others from being read."""
    starts = {TopicPartition("s", n): 0 for n in range(small)}
    ends = dict.fromkeys(starts, 1)
    big = TopicPartition("z", 0)
    starts[big], ends[big] = 0, 10**9
    for turn in range(2 * small * limit + 10):
        starts = rate_limit(starts, ends, limit, turn)
    assert all(starts[tp] == 1 for tp in starts if tp != big)


def test_a_limit_is_shared_in_proportion_to_the_backlogs() -> None:
    assert rate_limit({A: 0, B: 100}, {A: 10, B: 130}, 20) == {A: 5, B: 115}
    assert rate_limit({A: 5}, {A: 10}, 2**63 - 1) == {A: 10}


def test_a_batch_waits_for_the_minimum_or_the_delay() -> None:
    assert should_wait(5, 10, 100.0, 1000)
    assert not should_wait(10, 10, 100.0, 1000)
    assert not should_wait(5, 10, 1000.0, 1000)
    assert not should_wait(5, 10, None, 1000)
    assert not should_wait(5, None, 100.0, 1000)


# -- split


def cuts(ranges: list[tuple[int, int]], **options: int) -> list[list[int]]:
    """Returns the edges of each range's pieces; each piece is one task."""
    whole = [OffsetRange(TopicPartition("t", n), *each) for n, each in enumerate(ranges)]
    tasks = split(whole, **options)
    edges: dict[int, list[int]] = {}
    for (piece,) in tasks:
        edges.setdefault(piece.tp.partition, [piece.start]).append(piece.end)
    return [edges[n] for n in sorted(edges)]


@pytest.mark.parametrize(
    ("minimum", "ranges", "expected"),
    [
        (4, [(1, 5)], [[1, 2, 3, 4, 5]]),
        (4, [(1, 5), (1, 21)], [[1, 5], [1, 7, 14, 21]]),
        (4, [(1, 1), (1, 21)], [[1, 6, 11, 16, 21]]),
        (4, [(1, 2), (1, 1001)], [[1, 2], [1, 334, 667, 1001]]),
        (3, [(1, 11)], [[1, 4, 7, 11]]),
        (6, [(0, 10), (0, 10), (0, 1)], [[0, 3, 6, 10], [0, 3, 6, 10], [0, 1]]),
        (1, [(0, 10), (0, 10)], [[0, 10], [0, 10]]),
    ],
)
def test_min_partitions_splits_as_spark_does(
    minimum: int, ranges: list[tuple[int, int]], expected: list[list[int]]
) -> None:
    assert cuts(ranges, min_partitions=minimum) == expected


@pytest.mark.parametrize(
    ("sizes", "minimum", "pieces"),
    [
        ((10000, 15000, 20000), 9, (2, 3, 4)),
        ((500, 12000, 15001), 6, (1, 2, 3)),
        ((1, 1, 10000), 6, (1, 1, 4)),
    ],
)
def test_min_partitions_splits_in_proportion_to_size(
    sizes: tuple[int, ...], minimum: int, pieces: tuple[int, ...]
) -> None:
    found = cuts([(0, size) for size in sizes], min_partitions=minimum)
    assert tuple(len(edges) - 1 for edges in found) == pieces


def test_max_records_per_partition_splits_as_spark_does() -> None:
    assert cuts([(1, 5)], max_records_per_partition=4) == [[1, 5]]
    assert cuts([(1, 6)], max_records_per_partition=4) == [[1, 3, 6]]
    found = cuts([(1, 40), (1, 50), (1, 60)], max_records_per_partition=20)
    assert [len(edges) - 1 for edges in found] == [2, 3, 3]
    assert cuts([(1, 40)], max_records_per_partition=20, min_partitions=4) == [[1, 10, 20, 30, 40]]


_RANGES = st.lists(st.tuples(st.integers(0, 10**6), st.integers(-5, 3 * OFFSETS_PER_TASK)), max_size=8)


@given(_RANGES, st.none() | st.integers(1, 40), st.none() | st.integers(1000, 10**6))
def test_every_offset_is_read_once(
    spans: list[tuple[int, int]], minimum: int | None, maximum: int | None
) -> None:
    ranges = [
        OffsetRange(TopicPartition("t", n), start, start + size) for n, (start, size) in enumerate(spans)
    ]
    tasks = split(ranges, min_partitions=minimum, max_records_per_partition=maximum)
    pieces: dict[TopicPartition, list[OffsetRange]] = {}
    for task in tasks:
        assert task
        for piece in task:
            assert piece.size > 0
            assert maximum is None or piece.size <= maximum
            pieces.setdefault(piece.tp, []).append(piece)
        if minimum is None and maximum is None:
            most = OFFSETS_PER_TASK if len(task) == 1 else OFFSETS_SHARED
            assert sum(piece.size for piece in task) <= most
    for each in ranges:
        own = pieces.pop(each.tp, [])
        assert (own[0].start, own[-1].end) == (each.start, each.end) if own else each.size <= 0
        assert all(left.end == right.start for left, right in pairwise(own))
    assert not pieces


def test_a_small_batch_of_many_partitions_is_one_task() -> None:
    ranges = [OffsetRange(TopicPartition("t", n), 0, 10) for n in range(50)]
    assert len(split(ranges)) == 1


def test_large_partitions_have_a_task_each_and_very_large_ones_several() -> None:
    small = [OffsetRange(TopicPartition("t", n), 0, size) for n, size in enumerate((30_000, 5, 40_000, 10))]
    assert split(small) == [(small[0],), (small[2],), (small[1], small[3])]
    assert cuts([(0, 600_000)]) == [[0, 200_000, 400_000, 600_000]]


# -- loss


def test_offsets_within_the_log_are_not_a_loss() -> None:
    found = reconcile({A: 5, B: 6}, {"t": "id"}, [A, B], {A: 0, B: 6}, {A: 5, B: 9}, {"t": "id"})
    assert found.starts == {A: 5, B: 6}
    assert found.losses == []


@pytest.mark.parametrize(
    ("position", "topic_ids", "partitions", "kind", "starts"),
    [
        ({A: 1}, {}, [A], "AGED_OUT", {A: 2}),
        ({A: 50}, {}, [A], "OFFSETS_WENT_BACK", {A: 20}),
        ({A: 5, B: 3}, {}, [A], "PARTITIONS_GONE", {A: 5}),
        ({A: 5}, {}, [A, C], "NEW_PARTITION_NOT_AT_ZERO", {A: 5, C: 5}),
        ({A: 5}, {"t": "old"}, [A], "TOPIC_RECREATED", {A: 2}),
    ],
)
def test_each_kind_of_data_loss_is_detected(
    position: dict[TopicPartition, int],
    topic_ids: dict[str, str],
    partitions: list[TopicPartition],
    kind: str,
    starts: dict[TopicPartition, int],
) -> None:
    found = reconcile(position, topic_ids, partitions, KNOWN.earliest, KNOWN.latest, {"t": "new"})
    assert [loss.kind for loss in found.losses] == [kind]
    assert found.starts == starts
    assert kind in str(data_loss(found.losses))
    assert "failOnDataLoss" in data_loss(found.losses).fix


def test_a_topic_that_the_user_removed_is_distinguished_from_a_deleted_one() -> None:
    found = reconcile({A: 5, B: 3, C: 5}, {}, [A], {}, KNOWN.latest, {}, lambda tp: tp.topic == "t")
    assert [(loss.kind, loss.text.split(":")[0]) for loss in found.losses] == [
        ("PARTITIONS_GONE", "t-1"),
        ("NO_LONGER_SUBSCRIBED", "u-0"),
    ]
    assert found.starts == {A: 5}
    assert "'subscribe'" in data_loss(found.losses).fix


_STATES = st.dictionaries(
    st.builds(TopicPartition, st.sampled_from("tu"), st.integers(0, 4)),
    st.tuples(st.none() | st.integers(0, 30), st.none() | st.tuples(st.integers(0, 20), st.integers(0, 20))),
)


@given(
    _STATES,
    st.sampled_from([{}, {"t": "1"}, {"t": "1", "u": "1"}]),
    st.sampled_from([{}, {"t": "1", "u": "2"}]),
)
def test_no_offset_is_skipped_without_a_reported_loss(
    states: dict[TopicPartition, tuple[int | None, tuple[int, int] | None]],
    ids_then: dict[str, str],
    ids_now: dict[str, str],
) -> None:
    """A batch starts where the query stood, unless a reported loss names the partition or topic."""
    position = {tp: stood for tp, (stood, _) in states.items() if stood is not None}
    logs = {tp: (low, low + size) for tp, (_, log) in states.items() if log for low, size in [log]}
    earliest, latest = ({tp: log[n] for tp, log in logs.items()} for n in (0, 1))
    found = reconcile(position, ids_then, list(logs), earliest, latest, ids_now)
    said = " ".join(loss.text for loss in found.losses)
    assert set(found.starts) == set(logs)
    for tp, start in found.starts.items():
        assert earliest[tp] <= start <= latest[tp]
        if tp not in position:
            assert start == earliest[tp]
            new = f"{tp}: the partition is new"
            assert start == 0 or not position or new in said or f"topic {tp.topic!r}" in said
        elif start != position[tp]:
            assert f"{tp}:" in said or f"topic {tp.topic!r}" in said
    assert all(str(tp) in said for tp in set(position) - set(logs))


def test_a_new_partition_that_starts_at_zero_is_not_a_loss() -> None:
    found = reconcile({A: 5}, {}, [A, B], KNOWN.earliest, KNOWN.latest, {})
    assert found.starts == {A: 5, B: 0}
    assert found.losses == []
