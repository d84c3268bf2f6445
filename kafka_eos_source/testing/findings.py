"""The anomalies that the checker of histories can find, and how it reports them."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from enum import Enum
from typing import NamedTuple


class Anomaly(Enum):
    """Something that must not occur in a history."""

    INCONSISTENT_OFFSET = "inconsistent offsets"  #: one offset, several records
    DUPLICATE = "duplicates"  #: one value at several offsets of a topic, or read twice by a transaction
    FOREIGN_READ = "foreign reads"  #: a value never sent to this topic, whose writers are all recorded
    ABORTED_READ = "aborted reads"  #: a value of a failed transaction, or of a discarded attempt
    PRECOMMITTED_READ = "precommitted reads"  #: a value read before its transaction began, or within it
    LOST_WRITE = "lost writes"  #: a value that was acknowledged but not read
    TORN_TRANSACTION = "torn transactions"  #: the outcome is unknown, and only a part was read
    KEY_ORDER = "key order"  #: values of a key in another order than they were sent
    NONMONOTONIC_POLL = "non-monotonic polls"  #: a reader went back, or read an offset twice
    POLL_SKIP = "poll skips"  #: a reader skipped records that others read
    SOURCE_RANGE = "source ranges"  #: a gap or an overlap between transactions, or a read outside


class Finding(NamedTuple):
    """One occurrence of an anomaly."""

    anomaly: Anomaly
    example: str


@dataclass(frozen=True)
class Findings:
    """The result of the checker, and how much it judged.

    Attributes:
        transactions: number of batches; a retried batch counts once.
        replays: number of attempts after the first ones.
        took_place: number of transactions that took place, as far as known.
        sent: number of values that these sent.
        read: number of distinct values that readers saw.
        faults: number of injected faults.
        counts: occurrences of each anomaly that was found.
        examples: some of the occurrences, as text.
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
        """Whether no anomaly was found."""
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
    """Counts the occurrences, and keeps the first examples of each anomaly."""
    counts: Counter[Anomaly] = Counter()
    examples: dict[Anomaly, list[str]] = defaultdict(list)
    for anomaly, example in found:
        counts[anomaly] += 1
        if counts[anomaly] <= most_examples:
            examples[anomaly].append(example)
    return dict(counts), {anomaly: tuple(each) for anomaly, each in examples.items()}
