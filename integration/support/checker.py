"""Judges the history of a run, in the way of Jepsen's checker for Kafka (``jepsen.tests.kafka``).

`testing.verdict` compares a run with its expected output. This module needs no expected output; it compares
the operations with each other: acknowledged values must be read; values of failed transactions must not; a
transaction is read completely or not at all; all readers see one log; and the transactions of a query read
its source without gap and overlap.

A transaction took place if it was acknowledged, or if its outcome is unknown and one of its values was read.

A log may have gaps, because control records and aborted records take offsets that no read_committed reader
sees. So whether a reader skipped a record is judged by what other readers saw there.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections import Counter, defaultdict
from collections.abc import Callable, Container, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from enum import Enum
from itertools import chain
from typing import NamedTuple, TypeAlias

from integration.support.history import READ_COMMITTED, History, Identity, Operation, Phase, Record, Txn


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


# -- what the readers saw, as one log per partition ------------------------------------------------

#: Topic and partition. A plain tuple instead of a `TopicPartition`, because there are millions of them.
_Partition: TypeAlias = tuple[str, int]
Log: TypeAlias = dict[int, Identity]


@dataclass(frozen=True)
class Observed:
    """What the readers saw.

    Attributes:
        logs: each partition's values by offset, as read_committed readers and transactions saw them.
        offsets: the offsets of each log, ascending.
        seen_ns: every value, with the time at which the first read of it ended; inf = unknown.
        places: topic, partition and offset of the first occurrence of each value. A value that was only seen
            at an offset where another value had been seen before has no place.
        findings: contradictions in all this, whoever wrote the values.
    """

    logs: dict[_Partition, Log]
    offsets: dict[_Partition, list[int]]
    seen_ns: dict[Identity, float]
    places: dict[Identity, tuple[str, int, int]]
    findings: tuple[Finding, ...]


def observe(history: History) -> Observed:
    """Combines what all readers saw."""
    findings: list[Finding] = []
    logs: dict[_Partition, Log] = defaultdict(dict)
    seen_ns: dict[Identity, float] = {}
    for at_ns, records in _committed_reads(history):
        findings += _enter(logs, seen_ns, records, at_ns)
    offsets = {partition: sorted(log) for partition, log in logs.items()}
    places: dict[Identity, tuple[str, int, int]] = {}
    for (topic, partition), log in sorted(logs.items()):
        for offset in offsets[topic, partition]:
            first = places.setdefault(log[offset], (topic, partition, offset))
            if first != (topic, partition, offset):
                where = f"{topic}-{first[1]}@{first[2]} and {topic}-{partition}@{offset}"
                findings.append(Finding(Anomaly.DUPLICATE, f"{where}: {show(log[offset])}"))
    findings += _pollers(history, READ_COMMITTED, offsets, logs)
    uncommitted = {each.what.isolation for each in history.polls} - {READ_COMMITTED}
    if uncommitted:
        everything = defaultdict(dict, {partition: dict(log) for partition, log in logs.items()})
        for poll in history.polls:
            if poll.what.isolation in uncommitted:
                findings += _enter(everything, {}, poll.what.records, math.inf)
        all_offsets = {partition: sorted(log) for partition, log in everything.items()}
        for isolation in uncommitted:
            findings += _pollers(history, isolation, all_offsets, everything)
    return Observed(dict(logs), offsets, seen_ns, places, tuple(findings))


def show(identity: Identity) -> str:
    """Returns a value as text for a finding."""
    return f"{identity[2]!r} of key {identity[1]!r}"


def _committed_reads(history: History) -> list[tuple[float, tuple[Record, ...]]]:
    """Returns what read_committed readers and transactions read, sorted by the end of the read."""
    reads: list[tuple[float, tuple[Record, ...]]] = []
    for poll in history.polls:
        if poll.what.isolation == READ_COMMITTED:
            reads.append((math.inf if poll.completed_ns is None else poll.completed_ns, poll.what.records))
    for txn in history.txns:
        if txn.what.reads:
            reads.append((math.inf if txn.completed_ns is None else txn.completed_ns, txn.what.reads))
    return sorted(reads, key=lambda read: read[0])


def _enter(
    logs: dict[_Partition, Log], seen_ns: dict[Identity, float], records: Iterable[Record], at_ns: float
) -> Iterator[Finding]:
    """Adds records to the logs; yields those that contradict them."""
    for topic, partition, offset, key, value in records:
        identity = (topic, key, value)
        known = logs[topic, partition].setdefault(offset, identity)
        if known is identity:
            seen_ns.setdefault(identity, at_ns)
        elif known != identity:
            seen_ns.setdefault(identity, at_ns)
            both = f"{topic}-{partition}@{offset}: {show(known)}, {show(identity)}"
            yield Finding(Anomaly.INCONSISTENT_OFFSET, both)


def _pollers(
    history: History, isolation: str, offsets: dict[_Partition, list[int]], logs: dict[_Partition, Log]
) -> Iterator[Finding]:
    """Every reader must go through the log of a partition record by record, wherever it starts."""
    places: dict[tuple[str, str, int], int] = {}
    for poll in history.polls:
        if poll.what.isolation != isolation:
            continue
        process = poll.process
        for topic, partition, offset, _, _ in poll.what.records:
            log = offsets[topic, partition]
            last = places.get((process, topic, partition))
            if last is None:
                place = bisect_left(log, offset)
            else:
                place = last + 1
                if place == len(log) or log[place] != offset:
                    place = bisect_left(log, offset)
                    where = f"{process}, {topic}-{partition}: {offset} after {log[last]}"
                    if place <= last:
                        yield Finding(Anomaly.NONMONOTONIC_POLL, where)
                    else:
                        skipped = logs[topic, partition][log[last + 1]]
                        yield Finding(Anomaly.POLL_SKIP, f"{where}, without {show(skipped)}")
            places[process, topic, partition] = place


# -- all attempts at a micro-batch, as one transaction ---------------------------------------------


@dataclass(frozen=True)
class Transaction:
    """All attempts at one batch.

    Attributes:
        query, batch_id: identify the batch.
        outcome: ok if one attempt was ok; else unknown if one attempt's outcome is unknown, because a later
            attempt that failed does not show what the earlier one did; else failed.
        attempts: number of attempts.
        invoked_ns: when the first attempt began; None = not recorded.
        completed_ns: when the end was known: of the first attempt that was ok, else of the last attempt; None
            if the end of an attempt is unknown.
        txn: what it reads and writes.
        discarded: values that other attempts meant to write and `txn` does not; nobody may ever read them.
    """

    query: str
    batch_id: int
    outcome: Phase
    attempts: int
    invoked_ns: int | None
    completed_ns: int | None
    txn: Txn
    discarded: frozenset[Identity] = frozenset()

    def __str__(self) -> str:
        return f"batch {self.batch_id} of {self.query}"


def transactions(history: History, seen: Container[Identity]) -> list[Transaction]:
    """Returns the transactions of a run, by query and batch id.

    Args:
        history: history of the run.
        seen: values that readers saw. If attempts write different rows (a query that is not deterministic),
            the attempt of which readers saw most is the one that took place.
    """
    by_batch: dict[tuple[str, int], list[Operation[Txn]]] = defaultdict(list)
    for each in history.txns:
        by_batch[each.what.query, each.what.batch_id].append(each)
    return [_merge(attempts, seen) for _, attempts in sorted(by_batch.items())]


def _merge(attempts: list[Operation[Txn]], seen: Container[Identity]) -> Transaction:
    phases = {each.phase for each in attempts}
    outcome = next(each for each in (Phase.OK, Phase.INFO, Phase.FAIL) if each in phases)
    txn, discarded = _what_took_place(attempts, outcome, seen)
    return Transaction(
        query=txn.query,
        batch_id=txn.batch_id,
        outcome=outcome,
        attempts=len(attempts),
        invoked_ns=_least([each.invoked_ns for each in attempts]),
        completed_ns=_completed_ns(attempts, outcome),
        txn=txn,
        discarded=discarded,
    )


def _what_took_place(
    attempts: list[Operation[Txn]], outcome: Phase, seen: Container[Identity]
) -> tuple[Txn, frozenset[Identity]]:
    """Returns the attempt that took place, and the values that only other attempts would have written."""
    txn = next(each.what for each in attempts if each.phase is outcome)
    if all(each.what.sends == txn.sends for each in attempts):
        return txn, frozenset()
    possible = [each.what for each in attempts if each.phase is not Phase.FAIL] or [txn]
    txn = max(possible, key=lambda each: (sum(send.identity in seen for send in each.sends), len(each.sends)))
    intended = {send.identity for each in attempts for send in each.what.sends}
    return txn, frozenset(intended.difference(send.identity for send in txn.sends))


def _completed_ns(attempts: list[Operation[Txn]], outcome: Phase) -> int | None:
    ends = [each.completed_ns for each in attempts if each.phase is outcome]
    least = _least(ends)
    if outcome is Phase.OK or least is None:
        return least
    return max(end for end in ends if end is not None)


def _least(times_ns: list[int | None]) -> int | None:
    """Returns the earliest time; None if one of the times is unknown."""
    known = [each for each in times_ns if each is not None]
    return min(known) if known and len(known) == len(times_ns) else None


# -- the checks ------------------------------------------------------------------------------------

#: The transaction that sent a value, and the value's position in it.
_Senders: TypeAlias = dict[Identity, tuple[Transaction, int]]


def check(
    history: History,
    *,
    final: bool = True,
    order: Callable[[str], int] | None = None,
    examples: int = 5,
) -> Findings:
    """Judges a history. The time is linear, except for sorting offsets.

    Args:
        history: see `history.read_history`.
        final: whether the readers have read to the end, so that all acknowledged values must have been read.
            Otherwise, only the values before the last read value of their key must.
        order: returns the position of a value among those of its key, if the values themselves show it.
            Otherwise the order in which they were sent counts, by batch id and within the batch.
        examples: how many examples of each anomaly are kept.
    """
    observed = observe(history)
    known = transactions(history, observed.seen_ns)
    senders = _senders(known)
    happened = [each for each in known if _took_place(each, observed, senders)]
    counts, kept = tally(
        chain(
            observed.findings,
            _what_was_read(observed, known, senders),
            _what_was_written(observed, happened, senders, final),
            _key_order(observed, senders, order),
            _ranges(known, happened, final),
            _source_reads(observed, happened, senders),
        ),
        examples,
    )
    return Findings(
        transactions=len(known),
        replays=sum(each.attempts - 1 for each in known),
        took_place=len(happened),
        sent=sum(len(each.txn.sends) for each in happened),
        read=len(observed.seen_ns),
        faults=len(history.faults),
        counts=counts,
        examples=kept,
    )


def _senders(known: list[Transaction]) -> _Senders:
    """Returns the sender of each value.

    If several transactions sent it (another query reads the same range again), prefers an acknowledged one.
    """
    senders: _Senders = {}
    for outcome in (Phase.FAIL, Phase.INFO, Phase.OK):
        for each in known:
            if each.outcome is outcome:
                for index, (topic, _, key, value) in enumerate(each.txn.sends):
                    senders[topic, key, value] = each, index
    return senders


def _took_place(each: Transaction, observed: Observed, senders: _Senders) -> bool:
    if each.outcome is Phase.INFO:
        sent = (send.identity for send in each.txn.sends)
        return any(value in observed.seen_ns and senders[value][0] is each for value in sent)
    return each.outcome is Phase.OK


def _what_was_read(observed: Observed, known: list[Transaction], senders: _Senders) -> Iterator[Finding]:
    """Every read value was sent by a transaction that had begun and did not fail."""
    recorded = {topic for topic, _, _ in senders}
    discarded = frozenset().union(*(each.discarded for each in known))
    for value, at_ns in observed.seen_ns.items():
        sender, index = senders.get(value, (None, 0))
        if sender is None:
            if value in discarded:
                yield Finding(Anomaly.ABORTED_READ, f"{value[0]}: {show(value)}, of a discarded attempt")
            elif value[0] in recorded:
                yield Finding(Anomaly.FOREIGN_READ, f"{value[0]}: {show(value)}")
        elif sender.outcome is Phase.FAIL:
            yield Finding(Anomaly.ABORTED_READ, f"{value[0]}: {show(value)}, {sender}")
        elif sender.invoked_ns is not None and at_ns < sender.invoked_ns:
            yield Finding(Anomaly.PRECOMMITTED_READ, f"{value[0]}: {show(value)}, before {sender} began")
        elif value in observed.places:
            found, asked = observed.places[value][1], sender.txn.sends[index].partition
            if asked not in (None, found):
                where = f"in partition {found}, sent to {asked}"
                yield Finding(Anomaly.FOREIGN_READ, f"{value[0]}: {show(value)}, {where}")


def _what_was_written(
    observed: Observed, happened: list[Transaction], senders: _Senders, final: bool
) -> Iterator[Finding]:
    """Every value of a transaction that took place was read."""
    last_read: dict[tuple[str, str | None, str], tuple[int, int]] = {}
    if not final:
        for value in observed.seen_ns:
            if value in senders:
                sender, index = senders[value]
                key = (value[0], value[1], sender.query)
                last_read[key] = max(last_read.get(key, (-1, -1)), (sender.batch_id, index))
    for each in happened:
        missing = []
        for index, send in enumerate(each.txn.sends):
            value = send.identity
            if value in observed.seen_ns or senders[value][0] is not each:
                continue
            last = last_read.get((send.topic, send.key, each.query), (-1, -1))
            if final or (send.key is not None and (each.batch_id, index) < last):
                missing.append(value)
        if each.outcome is Phase.OK:
            yield from (Finding(Anomaly.LOST_WRITE, f"{v[0]}: {show(v)}, {each}") for v in missing)
        elif missing:
            some = f"{len(missing)} of {len(each.txn.sends)} values were not read, such as {show(missing[0])}"
            yield Finding(Anomaly.TORN_TRANSACTION, f"{each}: {some}")


def _key_order(
    observed: Observed, senders: _Senders, order: Callable[[str], int] | None
) -> Iterator[Finding]:
    """The log has the values of a key in the order in which they were sent.

    Of duplicates, only the first one counts.
    """
    recorded = {topic for topic, _, _ in senders}
    for (topic, partition), log in observed.logs.items():
        if order is None and topic not in recorded:
            continue
        last: dict[tuple[str, str], tuple[tuple[int, int], str]] = {}
        for offset in observed.offsets[topic, partition]:
            _, key, value = identity = log[offset]
            if key is None or observed.places[identity] != (topic, partition, offset):
                continue
            if order is not None:
                series, place = (key, ""), (order(value), 0)
            elif identity in senders:
                sender, index = senders[identity]
                series, place = (key, sender.query), (sender.batch_id, index)
            else:
                continue
            before = last.get(series)
            if before is not None and place < before[0]:
                where = f"{topic}-{partition}@{offset}, key {key!r}"
                yield Finding(Anomaly.KEY_ORDER, f"{where}: {value!r} after {before[1]!r}")
            last[series] = place, value


def _ranges(known: list[Transaction], happened: list[Transaction], final: bool) -> Iterator[Finding]:
    """Each transaction of a query begins to read where the one before it stopped.

    A transaction whose outcome is unknown, and whose values do not show it either, may have taken place or
    not.
    """
    certain = {(each.query, each.batch_id) for each in happened}
    stops: dict[tuple[str, str, int], set[int]] = {}
    for each in known:
        surely = (each.query, each.batch_id) in certain
        if not surely and (each.outcome is Phase.FAIL or (final and each.txn.sends)):
            continue
        for topic, partition, start, end in each.txn.ranges:
            source = each.query, topic, partition
            possible = stops.get(source, {start})
            if surely and start not in possible:
                what = "a gap" if start > max(possible) else "an overlap"
                where = f"{topic}-{partition}, {each}: starts at {start}, the previous one stopped at"
                yield Finding(Anomaly.SOURCE_RANGE, f"{where} {max(possible)}: {what}")
            if end < start:
                yield Finding(Anomaly.SOURCE_RANGE, f"{topic}-{partition}, {each}: from {start} to {end}")
            if surely:
                stops[source] = {end}
            elif start in possible:
                stops[source] = possible | {end}


def _source_reads(observed: Observed, happened: list[Transaction], senders: _Senders) -> Iterator[Finding]:
    """A transaction reads exactly its ranges, each record once, and no value that it sends itself."""
    for each in happened:
        if each.txn.reads is None:
            continue
        read: dict[tuple[str, int], list[int]] = defaultdict(list)
        for record in each.txn.reads:
            read[record.topic, record.partition].append(record.offset)
            if record.identity in senders and senders[record.identity][0] is each:
                what = f"{record.topic}: {show(record.identity)}, by {each} itself"
                yield Finding(Anomaly.PRECOMMITTED_READ, what)
        within: dict[tuple[str, int], set[int]] = defaultdict(set)
        for topic, partition, start, end in each.txn.ranges:
            log = observed.offsets.get((topic, partition), [])
            within[topic, partition].update(log[bisect_left(log, start) : bisect_left(log, end)])
        for topic, partition in read.keys() | within.keys():
            where = f"{topic}-{partition}, {each}"
            got, due = read[topic, partition], within[topic, partition]
            distinct = set(got)
            if len(distinct) < len(got):
                yield Finding(Anomaly.DUPLICATE, f"{where}: {len(got) - len(distinct)} records read twice")
            if distinct - due:
                outside = min(distinct - due)
                yield Finding(Anomaly.SOURCE_RANGE, f"{where}: offset {outside} is outside its range")
            if due - distinct:
                yield Finding(Anomaly.POLL_SKIP, f"{where}: skipped offset {min(due - distinct)}")
