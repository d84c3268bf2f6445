"""Combines what the readers of a run saw into one log per partition, and finds contradictions in it.

A log may have gaps, because control records and aborted records take offsets that no read_committed reader
sees. So whether a reader skipped a record is judged by what other readers saw there.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import TypeAlias

from kafka_eos_source.testing.findings import Anomaly, Finding
from kafka_eos_source.testing.history import READ_COMMITTED, History, Identity, Record

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
