"""Judges an exactly-once run by comparing its output with the expected output."""

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


@dataclass(frozen=True)
class OrderVerdict:
    """How the sequences of values per key differ.

    Attributes:
        keys: number of keys, expected or found.
        wrong: number of keys whose values differ from the expected sequence.
        examples: some of the differences, as text.
    """

    keys: int
    wrong: int
    examples: tuple[str, ...] = ()

    @property
    def in_order(self) -> bool:
        """Whether every key has the expected sequence."""
        return not self.wrong


def judge_order(
    expected: Mapping[_K, Sequence[Hashable]], found: Mapping[_K, Sequence[Hashable]], examples: int = 5
) -> OrderVerdict:
    """Compares, key by key, the found values with the expected ones, including their order."""
    keys = [*expected, *(key for key in found if key not in expected)]
    wrong = 0
    texts: list[str] = []
    for key in keys:
        wanted, seen = list(expected.get(key, ())), list(found.get(key, ()))
        if wanted == seen:
            continue
        wrong += 1
        if len(texts) < examples:
            same = takewhile(lambda pair: pair[0] == pair[1], zip(wanted, seen, strict=False))
            at = sum(1 for _ in same)
            texts.append(f"key {key!r}, value {at}: expected {_at(wanted, at)}, found {_at(seen, at)}")
    return OrderVerdict(keys=len(keys), wrong=wrong, examples=tuple(texts))


def _at(values: Sequence[Hashable], at: int) -> str:
    return repr(values[at]) if at < len(values) else "the end"
