"""The search for refused rows finds what a system refuses that gets the rows one by one, with fewer tries."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kafka_eos_source.runtime.deadline import Deadline
from kafka_eos_source.sinks.contract import RowRefusal
from kafka_eos_source.sinks.division import Division, DivisionLimitError, RangeRefusal

_LATER = Deadline.after_seconds(3600)


class Unique:
    """A system that refuses a value for the second time, and negative ones; it writes ranges or nothing.

    Attributes:
        written: the values that it has, in the order in which they were written.
        tries: the ranges that were tried.
    """

    def __init__(self, values: list[int], hints: list[int | None] | None = None) -> None:
        self.values = values
        self.hints = hints
        self.written: list[int] = []
        self.tries: list[tuple[int, int]] = []

    def __call__(self, start: int, stop: int) -> RangeRefusal | None:
        self.tries.append((start, stop))
        written = list(self.written)
        for at, value in enumerate(self.values[start:stop]):
            if value < 0 or value in written:
                hint = at if self.hints is None else self.hints[len(self.tries) % len(self.hints)]
                return RangeRefusal(RowRefusal(str(value)), hint)
            written.append(value)
        self.written = written
        return None


def one_by_one(values: list[int]) -> list[int]:
    system = Unique(values)
    return [at for at in range(len(values)) if system(at, at + 1) is not None]


_HINTS = st.none() | st.lists(st.none() | st.integers(-3, 30), min_size=1, max_size=5)


@given(st.lists(st.integers(-2, 12), max_size=40), _HINTS, st.booleans())
def test_the_first_of_rows_that_exclude_each_other_stays(
    values: list[int], hints: list[int | None] | None, known: bool
) -> None:
    system, division = Unique(values, hints), Division(_LATER)
    refuses = known and bool(one_by_one(values))
    division.run(len(values), system, lambda at: 100 + at, refuses=refuses)
    assert sorted(division.refused) == [100 + at for at in one_by_one(values)]
    assert system.written == [each for at, each in enumerate(values) if 100 + at not in division.refused]
    assert all(each.why == str(values[at - 100]) for at, each in division.refused.items())


@pytest.mark.parametrize("hints", [None, [None]], ids=["the system names rows", "it names none"])
@pytest.mark.parametrize("refused", [1, 10, 100])
def test_the_number_of_tries_is_bounded(refused: int, hints: list[int | None] | None) -> None:
    rows = 10_000
    bad = {(7919 * each) % rows for each in range(refused)}
    system, division = Unique([-1 if at in bad else at for at in range(rows)], hints), Division(_LATER)
    division.run(rows, system, lambda at: at)
    assert set(division.refused) == bad
    per_row = 4 if hints is None else 2 * math.log2(rows / refused) + 2
    assert len(system.tries) <= per_row * refused + 2 * math.log2(rows)
    assert sum(stop - start for start, stop in system.tries) <= (6 if hints is None else 8) * rows


@pytest.mark.parametrize("hints", [None, [None]], ids=["the system names rows", "it names none"])
def test_a_search_stops_when_it_has_enough(hints: list[int | None] | None) -> None:
    system, division = Unique([-1] * 10_000, hints), Division(_LATER, enough=3)
    division.run(10_000, system, lambda at: at)
    assert sorted(division.refused) == [0, 1, 2]
    assert len(system.tries) < 40
    division.run(5, system, lambda at: 10_000 + at)
    assert len(division.refused) == 3, "the next batch is not searched"


def test_several_batches_are_one_search() -> None:
    division = Division(_LATER)
    for number, values in enumerate([[1, 2, -1], [3], [-1, 4]]):
        division.run(len(values), Unique(values), lambda at, n=number: 10 * n + at)  # type: ignore[misc]
    assert sorted(division.refused) == [2, 20]


@pytest.mark.parametrize("limit", ["tries", "time"])
def test_a_search_that_takes_too_long_says_what_it_found(limit: str) -> None:
    division = Division(_LATER, most_tries=5) if limit == "tries" else Division(Deadline.after_seconds(-1))
    with pytest.raises(DivisionLimitError) as error:
        division.run(100, Unique([-1] * 100), lambda at: at)
    assert len(error.value.refused) < 5
    assert (0 in error.value.refused) is (limit == "tries")
    assert not error.value.suffices
    division.enough = 10
    with pytest.raises(DivisionLimitError) as error:
        division.run(100, Unique([-1] * 100), lambda at: at)
    assert error.value.suffices is (limit == "tries"), "if at least one row was found"


def test_a_range_that_is_refused_only_together_is_written_row_by_row() -> None:
    def attempt(start: int, stop: int) -> RangeRefusal | None:
        return RangeRefusal(RowRefusal("two"), 1) if stop - start > 1 else None

    division = Division(_LATER)
    division.run(9, attempt, lambda at: at, refuses=True)
    assert division.refused == {}


def test_half_of_the_time_is_left_to_what_comes_after_the_search() -> None:
    assert Division.within(Deadline.after_seconds(100)).deadline.remaining_seconds() < 51
