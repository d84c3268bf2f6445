"""What a checker of histories can find, and how it says so."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from enum import Enum
from typing import NamedTuple


class Anomaly(Enum):
    """What may not be in a history."""

    INCONSISTENT_OFFSET = "inconsistent offsets"  #: one offset, several records
    DUPLICATE = "duplicates"  #: one value at several offsets of a topic, or read twice by a transaction
    FOREIGN_READ = "foreign reads"  #: a value that nobody sent there, in a topic whose writers are recorded
    ABORTED_READ = "aborted reads"  #: a value of a transaction that failed, or of an attempt not taken
    PRECOMMITTED_READ = "precommitted reads"  #: a value read before its transaction began, or within it
    LOST_WRITE = "lost writes"  #: a value that was acknowledged and is not read
    TORN_TRANSACTION = "torn transactions"  #: nobody knows how it ended, and part of it is read
    KEY_ORDER = "key order"  #: values of a key in another order than they were sent
    NONMONOTONIC_POLL = "non-monotonic polls"  #: a reader that went back, or stood still
    POLL_SKIP = "poll skips"  #: a reader that passed over what others read there
    SOURCE_RANGE = "source ranges"  #: a gap or an overlap between transactions, or a read outside


class Finding(NamedTuple):
    """One case of an anomaly."""

    anomaly: Anomaly
    example: str


@dataclass(frozen=True)
class Findings:
    """What is wrong with a history, and how much there was to judge.

    Attributes:
        transactions: batches; one that was tried again counts once.
        replays: attempts beyond the first ones.
        took_place: transactions that did, as far as can be known.
        sent: values of those.
        read: values that readers saw, each once.
        faults: injected.
        counts: cases of each anomaly that there is.
        examples: some of them, for people.
    """

    transactions: int
    replays: int
    took_place: int
    sent: int
    read: int
    faults: int
    counts: Mapping[Anomaly, int] = field(default_factory=dict)
    examples: Mapping[Anomaly, tuple[str, ...]] = field(default_factory=dict)

    @property
    def ok(self) -> bool:
        return not self.counts

    def __str__(self) -> str:
        rows = [
            f"{label:<22}{count:>10,}"
            for label, count in (
                ("transactions", self.transactions),
                ("replays", self.replays),
                ("took place", self.took_place),
                ("values sent", self.sent),
                ("values read", self.read),
                ("faults", self.faults),
            )
        ]
        for anomaly in Anomaly:
            rows.append(f"{anomaly.value:<22}{self.counts.get(anomaly, 0):>10,}")
            rows += [f"  {example}" for example in self.examples.get(anomaly, ())]
        return "\n".join(rows)


def tally(
    found: Iterable[Finding], most_examples: int
) -> tuple[dict[Anomaly, int], dict[Anomaly, tuple[str, ...]]]:
    """Counts cases, and keeps the first examples of each."""
    counts: Counter[Anomaly] = Counter()
    examples: dict[Anomaly, list[str]] = defaultdict(list)
    for anomaly, example in found:
        counts[anomaly] += 1
        if counts[anomaly] <= most_examples:
            examples[anomaly].append(example)
    return dict(counts), {anomaly: tuple(each) for anomaly, each in examples.items()}
