"""Judges an exactly-once run by comparing its output with the expected output."""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Iterable
from dataclasses import dataclass


@dataclass(frozen=True)
class Verdict:
    """How two multisets of events differ.

    Attributes:
        expected: number of events that should be in the output.
        found: number of records in the output.
        missing: events found less often than expected.
        doubled: expected events found more often than expected.
        foreign: events found but not expected (a wrong value counts as one missing and one foreign event).
        examples: some of the differences, as text.
    """

    expected: int
    found: int
    missing: int
    doubled: int
    foreign: int
    examples: tuple[str, ...] = ()

    @property
    def exactly_once(self) -> bool:
        """Whether the output is exactly what was expected."""
        return not (self.missing or self.doubled or self.foreign)


def judge(expected: Iterable[Hashable], found: Iterable[Hashable], examples: int = 5) -> Verdict:
    """Compares what a read_committed reader found with what was computed without Kafka."""
    wanted, seen = Counter(expected), Counter(found)
    missing = wanted - seen
    surplus = seen - wanted
    doubled = {event: times for event, times in surplus.items() if event in wanted}
    foreign = {event: times for event, times in surplus.items() if event not in wanted}
    texts = [f"missing: {event}" for event in list(missing)[:examples]]
    texts += [f"doubled: {event}" for event in list(doubled)[:examples]]
    texts += [f"foreign: {event}" for event in list(foreign)[:examples]]
    return Verdict(
        expected=wanted.total(),
        found=seen.total(),
        missing=missing.total(),
        doubled=sum(doubled.values()),
        foreign=sum(foreign.values()),
        examples=tuple(texts),
    )
