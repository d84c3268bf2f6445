"""Reports of reading tasks: the commit accepts exactly those that cover the batch, each offset once."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace

import hypothesis.strategies as st
import pytest
from hypothesis import given

from kafka_eos_source.commit.report_checks import check_staged_reads
from kafka_eos_source.errors import KafkaEosError, StagedPartError, StagedReadError
from kafka_eos_source.model import OffsetRange, StagedRead, TopicPartition
from kafka_eos_source.plan.split import split
from kafka_eos_source.protocol.offset_log import LoggedOffsets, SourcePosition

TPS = [TopicPartition("t", number) for number in range(3)]


def logged(*positions: SourcePosition | None) -> LoggedOffsets:
    lines = {str(number): None if each is None else each.to_json() for number, each in enumerate(positions)}
    return LoggedOffsets(lines, "digest")


def reports(
    start: SourcePosition, end: SourcePosition, frame: str = "f", plan: str = "p", pieces: int = 4
) -> list[StagedRead]:
    """Returns the reports of a batch without faults, planned as the source does."""
    begins = {**start.end, **(end.start or {})}
    ranges = [OffsetRange(tp, begins[tp], until) for tp, until in end.end.items()]
    tasks = split(ranges, min_partitions=pieces) or [()]
    return [
        StagedRead(frame, plan, end.digest, number, len(tasks), f"{frame}-{plan}-{number}", task)
        for number, task in enumerate(tasks)
    ]


START = SourcePosition(dict.fromkeys(TPS, 5), dict.fromkeys(TPS, 5))
END = SourcePosition({TPS[0]: 9, TPS[1]: 5, TPS[2]: 100}, dict.fromkeys(TPS, 5))
NEXT = SourcePosition({TPS[0]: 9, TPS[1]: 50, TPS[2]: 101})


@st.composite
def batches(draw: st.DrawFn) -> tuple[SourcePosition, SourcePosition, list[StagedRead]]:
    begin = {tp: draw(st.integers(0, 5)) for tp in TPS}
    until = {tp: begin[tp] + draw(st.integers(0, 8)) for tp in TPS}
    until[TPS[0]] = max(until[TPS[0]], begin[TPS[0]] + 2)
    start, end = SourcePosition(begin), SourcePosition(until)
    return start, end, reports(start, end, pieces=draw(st.integers(1, 6)))


@given(batch=batches(), seed=st.integers(0, 1000))
def test_complete_reports_are_accepted_in_any_order(
    batch: tuple[SourcePosition, SourcePosition, list[StagedRead]], seed: int
) -> None:
    start, end, found = batch
    random.Random(seed).shuffle(found)
    check_staged_reads(found, 1, logged(end), logged(start))


@given(batch=batches(), data=st.data())
def test_a_lost_a_doubled_and_a_repeated_report_are_refused(
    batch: tuple[SourcePosition, SourcePosition, list[StagedRead]], data: st.DataObject
) -> None:
    start, end, found = batch
    at = data.draw(st.integers(0, len(found) - 1))
    for faulty, error, said in (
        ([*found[:at], *found[at + 1 :]], StagedReadError, "rows of batch 1 are lost"),
        ([*found, found[at]], StagedReadError, "the rows of batch 1 are doubled"),
        ([*found, replace(found[at], task_attempt_id="2")], StagedPartError, "two attempts of reading task"),
    ):
        with pytest.raises(error, match=said):
            check_staged_reads(faulty, 1, logged(end), logged(start))


@given(batch=batches(), data=st.data())
def test_no_other_offsets_than_those_of_the_batch_are_accepted(
    batch: tuple[SourcePosition, SourcePosition, list[StagedRead]], data: st.DataObject
) -> None:
    """Even if a plan counted its tasks correctly: the log decides which offsets the batch commits."""
    start, end, found = batch
    at = data.draw(st.sampled_from([number for number, each in enumerate(found) if each.ranges]))
    first, *others = found[at].ranges
    changed = data.draw(
        st.sampled_from(
            [
                replace(first, start=first.start + 1),
                replace(first, end=first.end - 1),
                replace(first, start=first.start - 1),
                replace(first, end=first.end + 1),
                replace(first, tp=TopicPartition("other", 0)),
            ]
        )
    )
    found[at] = replace(found[at], ranges=(changed, *others))
    with pytest.raises(StagedPartError, match="are not those of batch 1"):
        check_staged_reads(found, 1, logged(end), logged(start))


def refused(found: Sequence[StagedRead], end: LoggedOffsets, before: LoggedOffsets | None) -> KafkaEosError:
    with pytest.raises(KafkaEosError) as caught:
        check_staged_reads(found, 3, end, before)
    return caught.value


def test_batch_0_begins_where_its_entry_says() -> None:
    found = reports(START, END)
    check_staged_reads(found, 0, logged(END), None)
    late = [replace(each, ranges=each.ranges[1:]) if each.task == 0 else each for each in found]
    assert "are not those of batch" in str(refused(late, logged(END), None))


def test_a_frame_that_is_written_together_with_itself_is_refused() -> None:
    twice = [*reports(START, END, plan="p"), *reports(START, END, plan="q")]
    error = refused(twice, logged(END), None)
    assert isinstance(error, StagedReadError)
    assert "union or join with itself" in str(error)


def test_two_frames_of_one_topic_are_two_sources() -> None:
    """Both have read all records, and the query is meant to write them twice."""
    both = [*reports(START, END, "f"), *reports(START, END, "g")]
    check_staged_reads(both, 0, logged(END, END), None)
    assert "all reports of a source are missing" in str(refused(reports(START, END), logged(END, END), None))
    assert "another position" in str(refused(both, logged(END), None))


@pytest.mark.parametrize("swapped", [False, True])
def test_two_sources_of_one_topic_may_end_together_after_they_started_apart(swapped: bool) -> None:
    """Equal ends do not tell which report belongs to which source, but the ranges do."""
    tp = TPS[0]
    first, second, end = SourcePosition({tp: 8}), SourcePosition({tp: 9}), SourcePosition({tp: 12})
    f, g = reports(first, end, "f", pieces=2), reports(second, end, "g", pieces=2)
    both = [*g, *f] if swapped else [*f, *g]
    check_staged_reads(both, 3, logged(end, end), logged(first, second))
    same = [*f, *reports(first, end, "h", pieces=2)]
    for found in (same, same[::-1]):
        error = refused(found, logged(end, end), logged(first, second))
        assert isinstance(error, StagedPartError)
        assert f"the offsets of {tp} that reading tasks staged are not those of batch 3" in str(error)


@pytest.mark.parametrize("known_first", [False, True])
def test_a_frame_that_fits_two_sources_leaves_the_other_frame_its_only_one(known_first: bool) -> None:
    """A source of which the log before has no offset may have started anywhere."""
    tp = TPS[0]
    known, other, end = SourcePosition({tp: 8}), SourcePosition({tp: 9}), SourcePosition({tp: 12})
    f, g = reports(known, end, "f"), reports(other, end, "g")
    before = (known, None) if known_first else (None, known)
    for found in ([*f, *g], [*g, *f]):
        check_staged_reads(found, 3, logged(end, end), logged(*before))


def test_reports_of_another_batch_are_refused() -> None:
    assert "another position" in str(refused(reports(START, END), logged(NEXT), logged(END)))


@pytest.mark.parametrize(
    ("end", "before"),
    [
        (START, None),  # a new query without records
        (END, END),  # another source has new records
        (replace(END, start=None, tick=1), END),  # the batch only renews the token
        (replace(NEXT, jump=True), END),  # the batch skips what Kafka holds
        (None, None),  # the source has no offset yet
    ],
)
def test_a_source_that_reads_nothing_needs_no_report(
    end: SourcePosition | None, before: SourcePosition | None
) -> None:
    check_staged_reads([], 3, logged(end), None if before is None else logged(before))


def test_without_any_report_of_a_batch_with_records_its_rows_are_lost() -> None:
    text = str(refused([], logged(NEXT), logged(END)))
    assert "all reports of a source are missing" in text
    assert "lost a shuffle file. Fix: restart the query once" in text, "Spark may have lost them, not a step"


def test_a_new_partition_begins_where_the_entry_says() -> None:
    new = TopicPartition("t", 3)
    end = SourcePosition({**END.end, new: 7}, {new: 2})
    check_staged_reads(reports(END, end), 3, logged(end), logged(END))
    other = reports(END, replace(end, start={new: 3}))
    assert refused([replace(each, position=end.digest) for each in other], logged(end), logged(END))


def test_a_source_that_accepts_loss_may_skip_offsets_but_not_read_them_twice() -> None:
    end = replace(NEXT, lossy=True)
    complete = reports(END, end)
    shorter = [replace(each, ranges=()) for each in complete]
    check_staged_reads(shorter, 3, logged(end), logged(END))
    overlapping = [replace(each, ranges=complete[0].ranges) for each in complete]
    assert "are not those of batch" in str(refused(overlapping, logged(end), logged(END)))
    assert "rows of batch 3 are lost" in str(refused(complete[1:], logged(end), logged(END)))


def test_the_offsets_of_other_sources_do_not_matter() -> None:
    lines = {"0": END.to_json(), "1": "42", "2": '{"logOffset":3}', "3": None}
    check_staged_reads(reports(START, END), 0, LoggedOffsets(lines, "digest"), None)
