"""Judges the history of a run, in the way of Jepsen's checker for Kafka (``jepsen.tests.kafka``).

`verdict` compares a run with its expected output. This module needs no expected output; it compares the
operations with each other: acknowledged values must be read; values of failed transactions must not; a
transaction is read completely or not at all; all readers see one log; and the transactions of a query read
its source without gap and overlap.

A transaction took place if it was acknowledged, or if its outcome is unknown and one of its values was read.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import defaultdict
from collections.abc import Callable, Iterator
from itertools import chain
from typing import TypeAlias

from kafka_eos_source.testing.findings import Anomaly, Finding, Findings, tally
from kafka_eos_source.testing.history import History, Identity, Phase
from kafka_eos_source.testing.observed import Observed, observe, show
from kafka_eos_source.testing.replays import Transaction, transactions

__all__ = ["Anomaly", "Findings", "check"]

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
