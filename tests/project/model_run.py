"""Generates correct runs with batches, kills, replays and concurrent readers, to test the history checker.

Each mutation breaks such a run in one place and returns the finding that the checker must report.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from itertools import count
from random import Random

from integration.support.checker import Anomaly
from integration.support.history import (
    READ_COMMITTED,
    READ_UNCOMMITTED,
    Fault,
    History,
    Operation,
    Phase,
    Poll,
    Record,
    Send,
    SourceRange,
    Txn,
)

#: Batch id for the transactions that feed the source.
FEED = -1

#: How a try at a batch ends: its phase, whether its records are committed, whether its driver has died.
FATES = {
    "committed": (Phase.OK, True, False),
    "failed": (Phase.FAIL, False, False),
    "fenced": (Phase.FAIL, False, True),
    "unknown, aborted": (Phase.INFO, False, False),
    "unknown, committed": (Phase.INFO, True, False),
    "killed before the commit": (None, False, True),
    "killed after the commit": (None, True, True),
}


@dataclass
class Entry:
    """A record in the log of the output."""

    record: Record
    batch_id: int
    committed: bool
    written_ns: int
    decided_ns: int


@dataclass
class Run:
    """Everything that happened in a run, except what readers saw."""

    txns: list[Operation[Txn]] = field(default_factory=list)
    logs: dict[int, list[Entry]] = field(default_factory=lambda: defaultdict(list))
    polls: list[Operation[Poll]] = field(default_factory=list)
    faults: list[Operation[Fault]] = field(default_factory=list)
    end_ns: int = 0

    @property
    def history(self) -> History:
        return History(
            tuple(sorted(self.txns, key=lambda each: each.time_ns)),
            tuple(sorted(self.polls, key=lambda each: each.time_ns)),
            tuple(self.faults),
        )

    def entries(self) -> list[Entry]:
        return [entry for log in self.logs.values() for entry in log]

    def outcome(self, batch_id: int) -> Phase:
        phases = {each.phase for each in self.txns if each.what.batch_id == batch_id}
        return next(each for each in (Phase.OK, Phase.INFO, Phase.FAIL) if each in phases)


def batches(random: Random) -> Iterator[Txn]:
    """Plans micro-batches over a source whose offsets have gaps; each key is in one partition."""
    keys = [f"k{i}" for i in range(random.randint(1, 5))]
    sources, targets = random.randint(1, 3), random.randint(1, 3)
    position: dict[int, int] = {partition: random.randint(0, 5) for partition in range(sources)}
    last: dict[str, int] = dict.fromkeys(keys, 0)
    names_partitions = random.random() < 0.5
    for batch_id in range(random.randint(1, 6)):
        ranges, reads = [], []
        for partition in range(sources):
            start = position[partition]
            for _ in range(random.randint(0, 4)):
                mine = [key for i, key in enumerate(keys) if i % sources == partition]
                if mine and random.random() < 0.8:
                    key = random.choice(mine)
                    last[key] += 1
                    reads.append(Record("in", partition, position[partition], key, f"{key}:{last[key]}"))
                position[partition] += 1  # an offset without a record: a control record or an aborted record
            ranges.append(SourceRange("in", partition, start, position[partition]))
        kept = [record for record in reads if random.random() < 0.9]  # the query filters some rows
        sends = [
            Send("out", int(each.key[1:]) % targets if names_partitions else None, each.key, each.value)
            for each in kept
            if each.key is not None
        ]
        yield Txn("app", batch_id, tuple(ranges), tuple(reads), tuple(sends), "run")


def write(random: Random, *, finish: bool) -> Run:
    """Generates the driver's part of a run; ``finish`` retries until the last batch is acknowledged."""
    run = Run()
    clock, drivers = count(1000, 1000), count()
    process = f"driver-{next(drivers)}"
    targets = random.randint(1, 3)
    planned = list(batches(random))
    if random.random() < 0.5:
        run.txns.append(_feed([record for txn in planned for record in txn.reads or ()]))
    for txn in planned:
        visible = False
        for patience in reversed(range(5)):
            fate = random.choice(list(FATES)) if patience and random.random() < 0.5 else "committed"
            phase, commits, gone = FATES[fate]
            invoked_ns = next(clock)
            if not visible:
                partial = random.randint(0, len(txn.sends)) if not commits else len(txn.sends)
                _append(run, txn, partial, targets, commits, next(clock), next(clock))
                visible = commits
            elif phase is Phase.FAIL:
                phase = Phase.OK  # the driver finds the token of an earlier try
            completed_ns = next(clock) if phase is not None else None
            if fate == "fenced" and phase is Phase.FAIL and completed_ns is not None:
                completed_ns += (
                    random.randint(0, 30) * 1000 + 1 + txn.batch_id
                )  # a zombie that reports its outcome late
            run.txns.append(Operation(process, phase or Phase.INFO, invoked_ns, completed_ns, txn))
            if gone:
                now_ns = next(clock)
                run.faults.append(Operation("soak", Phase.INFO, None, now_ns, Fault("kill driver")))
                process = f"driver-{next(drivers)}"
            if phase is Phase.OK or (not finish and txn is planned[-1] and random.random() < 0.5):
                break
    run.end_ns = next(clock) + 100_000
    return run


def _feed(records: list[Record]) -> Operation[Txn]:
    """Generates the transactions that wrote the source's records."""
    sends = tuple(Send("in", each.partition, each.key, each.value) for each in records)
    return Operation("feeder", Phase.OK, 1, 2, Txn("feeder", FEED, sends=sends))


def _append(
    run: Run, txn: Txn, sent: int, targets: int, committed: bool, written_ns: int, decided_ns: int
) -> None:
    touched = set()
    for send in txn.sends[:sent]:
        partition = send.partition
        if partition is None:
            partition = sum(map(ord, send.key or "")) % targets
        touched.add(partition)
        log = run.logs[partition]
        record = Record("out", partition, _next(log), send.key, send.value)
        log.append(Entry(record, txn.batch_id, committed, written_ns, decided_ns))
    for partition in touched:  # the control record
        run.logs[partition].append(
            Entry(
                Record("", partition, _next(run.logs[partition]), None, ""),
                FEED,
                False,
                decided_ns,
                decided_ns,
            )
        )


def _next(log: list[Entry]) -> int:
    return log[-1].record.offset + 1 if log else 0


def read(random: Random, run: Run) -> Run:
    """Generates the readers' part of a run: some read during it, and at least one reads everything."""
    unique = count(1)
    for number in range(random.randint(1, 3)):
        isolation = READ_UNCOMMITTED if number and random.random() < 0.3 else READ_COMMITTED
        position: dict[int, int] = defaultdict(int)
        times = sorted(random.randint(0, run.end_ns // 1000) for _ in range(random.randint(0, 6)))
        for at in times:
            at_ns = at * 1000 + next(unique) % 1000
            _poll(run, f"reader-{number}", isolation, position, at_ns, random.randint(0, 8))
        if number and random.random() < 0.5:
            continue  # this reader is killed before the end
        at_ns = run.end_ns + next(unique) % 1000
        while any(position[partition] < len(log) for partition, log in run.logs.items()):
            at_ns += 1000
            _poll(run, f"reader-{number}", isolation, position, at_ns, random.randint(1, 8))
    return run


def _poll(run: Run, process: str, isolation: str, position: dict[int, int], at_ns: int, at_most: int) -> None:
    records = []
    for partition, log in sorted(run.logs.items()):
        for entry in log[position[partition] : position[partition] + at_most]:
            if at_ns <= (entry.decided_ns if isolation == READ_COMMITTED else entry.written_ns):
                break
            position[partition] += 1
            if entry.record.topic and (entry.committed or isolation == READ_UNCOMMITTED):
                records.append(entry.record)
    run.polls.append(Operation(process, Phase.OK, None, at_ns, Poll(tuple(records), isolation)))


#: Breaks a run and returns the finding that must be reported; None if the run offers no place for it.
Mutation = Callable[[Random, Run], "set[Anomaly] | None"]


def drop_one(random: Random, run: Run) -> set[Anomaly] | None:
    """Removes an acknowledged record."""
    some = [entry for entry in run.entries() if entry.committed and run.outcome(entry.batch_id) is Phase.OK]
    if not some:
        return None
    _remove(run, [random.choice(some)])
    return {Anomaly.LOST_WRITE}


def tear(random: Random, run: Run) -> set[Anomaly] | None:
    """Removes some records of a transaction, but not all."""
    of_batch = defaultdict(list)
    for entry in run.entries():
        if entry.committed:
            of_batch[entry.batch_id].append(entry)
    some = [batch for batch, entries in of_batch.items() if len(entries) > 1]
    if not some:
        return None
    batch = random.choice(some)
    _remove(run, random.sample(of_batch[batch], random.randint(1, len(of_batch[batch]) - 1)))
    return {Anomaly.LOST_WRITE if run.outcome(batch) is Phase.OK else Anomaly.TORN_TRANSACTION}


def double_one(random: Random, run: Run) -> set[Anomaly] | None:
    """Adds a second copy of a record anywhere."""
    some = [entry for entry in run.entries() if entry.committed]
    if not some:
        return None
    entry = random.choice(some)
    log = run.logs[random.choice(list(run.logs))]
    again = entry.record._replace(partition=log[0].record.partition, offset=_next(log))
    log.append(replace(entry, record=again, written_ns=run.end_ns, decided_ns=run.end_ns))
    return {Anomaly.DUPLICATE}


def swap_two(random: Random, run: Run) -> set[Anomaly] | None:
    """Swaps two records of a key."""
    of_key = defaultdict(list)
    for entry in run.entries():
        if entry.committed:
            of_key[entry.record.key].append(entry)
    some = [entries for entries in of_key.values() if len(entries) > 1]
    if not some:
        return None
    one, other = random.sample(random.choice(some), 2)
    one.record, other.record = (
        one.record._replace(value=other.record.value),
        other.record._replace(value=one.record.value),
    )
    return {Anomaly.KEY_ORDER}


def show_aborted(random: Random, run: Run) -> set[Anomaly] | None:
    """Shows readers the aborted records of a try. A later try may have written them again."""
    there = {entry.record.value for entry in run.entries() if entry.committed}
    some = [
        entry
        for entry in run.entries()
        if entry.record.topic
        and not entry.committed
        and (run.outcome(entry.batch_id) is Phase.FAIL or entry.record.value in there)
    ]
    if not some:
        return None
    entry = random.choice(some)
    entry.committed = True
    return {Anomaly.DUPLICATE if entry.record.value in there else Anomaly.ABORTED_READ}


def _moved(random: Random, run: Run, by: int) -> set[Anomaly] | None:
    some = sorted({each.what.batch_id for each in run.txns if each.phase is Phase.OK} - {0, FEED})
    if not some:
        return None
    batch_id = random.choice(some)
    for index, each in enumerate(run.txns):
        if each.what.batch_id == batch_id:
            topic, partition, start, end = each.what.ranges[0]
            ranges = (SourceRange(topic, partition, start + by, max(end, start + by)), *each.what.ranges[1:])
            run.txns[index] = replace(each, what=replace(each.what, ranges=ranges))
    return {Anomaly.SOURCE_RANGE}


def overlap(random: Random, run: Run) -> set[Anomaly] | None:
    """Lets a transaction read again what the one before it read."""
    return _moved(random, run, -1)


def gap(random: Random, run: Run) -> set[Anomaly] | None:
    """Lets a transaction start at another offset than the one where its predecessor stopped."""
    return _moved(random, run, 1)


def _remove(run: Run, entries: list[Entry]) -> None:
    for log in run.logs.values():
        log[:] = [entry for entry in log if not any(entry is each for each in entries)]


WRITTEN_WRONG: tuple[Mutation, ...] = (drop_one, tear, double_one, swap_two, show_aborted, overlap, gap)


def _by_partition(run: Run) -> dict[int, list[tuple[int, int]]]:
    """Returns, by partition, poll and place, what `reader-0` and at least one other reader saw."""
    seen = defaultdict(list)
    for number, each in enumerate(list(run.polls)):
        if each.process == "reader-0":
            run.polls.append(replace(each, process="witness"))
            for index, record in enumerate(each.what.records):
                seen[record.partition].append((number, index))
    return seen


def _change(run: Run, number: int, change: Callable[[list[Record]], object]) -> None:
    records = list(run.polls[number].what.records)
    change(records)
    run.polls[number] = replace(
        run.polls[number], what=replace(run.polls[number].what, records=tuple(records))
    )


def skip(random: Random, run: Run) -> set[Anomaly] | None:
    """Lets a reader skip a record that another one saw."""
    some = [places[1:-1] for places in _by_partition(run).values() if len(places) > 2]
    if not some:
        return None
    number, index = random.choice(random.choice(some))
    _change(run, number, lambda records: records.pop(index))
    return {Anomaly.POLL_SKIP}


def go_back(random: Random, run: Run) -> set[Anomaly] | None:
    """Lets a reader see a record twice."""
    some = [places for places in _by_partition(run).values() if places]
    if not some:
        return None
    number, index = random.choice(random.choice(some))
    again = run.polls[number].what.records[index]
    last = max(n for n, each in enumerate(run.polls) if each.process == "reader-0")
    _change(run, last, lambda records: records.append(again))
    return {Anomaly.NONMONOTONIC_POLL}


def disagree(random: Random, run: Run) -> set[Anomaly] | None:
    """Lets two readers see different values at one offset."""
    some = [places for places in _by_partition(run).values() if places]
    if not some:
        return None
    number, index = random.choice(random.choice(some))
    other = run.polls[number].what.records[index]._replace(value="another")
    _change(run, number, lambda records: records.__setitem__(index, other))
    return {Anomaly.INCONSISTENT_OFFSET}


READ_WRONG: tuple[Mutation, ...] = (skip, go_back, disagree)
