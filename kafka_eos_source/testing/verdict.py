"""The verdict on an exactly-once run: what should be there against what is."""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import takewhile
from typing import TypeVar

_K = TypeVar("_K", bound=Hashable)


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


@dataclass(frozen=True)
class OrderVerdict:
    """How the sequences of keys differ.

    Attributes:
        keys: expected or found.
        wrong: keys whose values are not those expected, in the order expected.
        examples: some of what is wrong, for people.
    """

    keys: int
    wrong: int
    examples: tuple[str, ...] = ()

    @property
    def in_order(self) -> bool:
        return not self.wrong


def judge_order(
    expected: Mapping[_K, Sequence[Hashable]], found: Mapping[_K, Sequence[Hashable]], examples: int = 5
) -> OrderVerdict:
    """Compares, key by key, the values found with those expected: the same ones in the same order."""
    keys = [*expected, *(key for key in found if key not in expected)]
    wrong = 0
    said: list[str] = []
    for key in keys:
        wanted, seen = list(expected.get(key, ())), list(found.get(key, ()))
        if wanted == seen:
            continue
        wrong += 1
        if len(said) < examples:
            same = takewhile(lambda pair: pair[0] == pair[1], zip(wanted, seen, strict=False))
            at = sum(1 for _ in same)
            said.append(f"key {key!r}, value {at}: expected {_at(wanted, at)}, found {_at(seen, at)}")
    return OrderVerdict(keys=len(keys), wrong=wrong, examples=tuple(said))


def _at(values: Sequence[Hashable], at: int) -> str:
    return repr(values[at]) if at < len(values) else "the end"
