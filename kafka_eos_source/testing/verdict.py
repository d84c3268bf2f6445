"""The verdict on an exactly-once run: what should be there against what is."""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Iterable
from dataclasses import dataclass


@dataclass(frozen=True)
class Verdict:
    """How two multisets of events differ.

    Attributes:
        expected: events that should be in the output.
        found: records that are.
        missing: expected, and not found as often.
        doubled: found more often than expected, once or more.
        foreign: found, and never expected (a wrong value is one missing and one foreign).
        examples: some of what is wrong, for people.
    """

    expected: int
    found: int
    missing: int
    doubled: int
    foreign: int
    examples: tuple[str, ...] = ()

    @property
    def exactly_once(self) -> bool:
        return not (self.missing or self.doubled or self.foreign)


def judge(expected: Iterable[Hashable], found: Iterable[Hashable], examples: int = 5) -> Verdict:
    """Compares what a read_committed reader found with what was computed without Kafka."""
    wanted, seen = Counter(expected), Counter(found)
    missing = wanted - seen
    surplus = seen - wanted
    doubled = {event: times for event, times in surplus.items() if event in wanted}
    foreign = {event: times for event, times in surplus.items() if event not in wanted}
    said = [f"missing: {event}" for event in list(missing)[:examples]]
    said += [f"doubled: {event}" for event in list(doubled)[:examples]]
    said += [f"foreign: {event}" for event in list(foreign)[:examples]]
    return Verdict(
        expected=wanted.total(),
        found=seen.total(),
        missing=missing.total(),
        doubled=sum(doubled.values()),
        foreign=sum(foreign.values()),
        examples=tuple(said),
    )
