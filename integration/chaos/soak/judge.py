"""Judges what one query did in one chunk: topics, external sinks and state, each against its input.

The offset log says which input each micro-batch read, and `workload` says what it must have written. The
judge compares this with what Kafka's Java consumer read, as a multiset and with the checker of histories
(`integration.support.checker`), which also judges the order per key and names torn transactions. A
second consumer (librdkafka) must have read the same. It supplies the topics, which Kafka's tool does not
print. Processes of `integration.chaos.loop` also record each of their attempts, and what each read, as it
happens; the checker judges this history too.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from integration.chaos.soak.workload import SOURCE, Batch, Carry, Query, Totals
from integration.support.checker import Findings, check
from integration.support.history import History, Operation, Phase, Poll, Record, Send, SourceRange, Txn
from kafka_eos_source.testing import verdict

#: Topic of a record that only the Java consumer saw.
_UNKNOWN = "?"


@dataclass(frozen=True)
class Printed:
    """A record as the Java consumer printed it."""

    partition: int
    offset: int
    key: str
    value: str


@dataclass(frozen=True)
class Seen:
    """What was found when a query had come to rest.

    Attributes:
        printed: output records that Kafka's Java consumer read, in its order.
        records: output records that librdkafka read.
        hidden: output partitions whose end a read_committed consumer cannot reach, because a transaction is
            open.
        sinks: values of the rows of each external sink.
        states: the state as each reader of it found it, by the reader's name.
        sequence: sequence number of the query's token in Kafka.
        history: what the processes of the query recorded about each of their attempts; None if they do not
            record anything, as Spark.
        now_ns: monotonic time.
    """

    printed: Sequence[Printed]
    records: Sequence[Record]
    hidden: Sequence[str] = ()
    sinks: Mapping[str, Sequence[str]] = field(default_factory=dict)
    states: Mapping[str, Mapping[str, Totals]] = field(default_factory=dict)
    sequence: int = 0
    history: History | None = None
    now_ns: int = 1


@dataclass
class Judgement:
    """The result for one query and chunk.

    Attributes:
        transactions: number of Kafka transactions, by the token.
        batches: number of micro-batches.
        rows: number of records that should have been written to Kafka.
        lost, doubled, foreign: output records that differ from that.
        invisible: lost records, while a transaction hides the end of an output partition.
        sink_rows: rows that should be in all external sinks together; `sink_faults` differ from that.
        state_keys: keys of state that were compared; `state_faults` differ.
        anomalies: what the checker of histories found, by name.
        readers_differ: records that only one of the two consumers saw.
        examples: some of all these, as text.
    """

    transactions: int = 0
    batches: int = 0
    rows: int = 0
    lost: int = 0
    doubled: int = 0
    foreign: int = 0
    invisible: int = 0
    sink_rows: int = 0
    sink_faults: int = 0
    state_keys: int = 0
    state_faults: int = 0
    readers_differ: int = 0
    anomalies: dict[str, int] = field(default_factory=dict)
    examples: list[str] = field(default_factory=list)

    @property
    def good(self) -> bool:
        """Whether everything is there exactly once."""
        wrong = (self.lost, self.doubled, self.foreign, self.invisible, self.sink_faults, self.state_faults)
        return not (any(wrong) or self.readers_differ or self.anomalies or self.examples)

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


def judge(
    query: Query, carry: Carry, batches: Sequence[Batch], source: Iterable[Record], seen: Seen
) -> tuple[Judgement, Carry]:
    """Judges one query in one chunk.

    Args:
        query: the query.
        carry: what the chunk before left.
        batches: the micro-batches of the chunk, from the offset log, in order.
        source: input records of the chunk, in the order of their offsets in each partition.
        seen: what was found.

    Returns:
        The result, and what the next chunk needs.
    """
    result = Judgement(batches=len(batches), transactions=seen.sequence - carry.sequence)
    totals, records = dict(carry.totals), list(source)
    txns = _transactions(query, carry, batches, records, totals, result)
    sends = [send for txn in txns for send in txn.sends]
    result.rows = len(sends)
    read = _with_topics(seen, result)
    _compare_output(sends, read, seen, result)
    _check_history(txns, read, result)
    if seen.history is not None:
        polls = (_poll([*read, *records], seen.now_ns),)
        own = tuple(each for each in seen.history.txns if each.what.batch_id >= carry.next_batch)
        _add_findings(check(replace(seen.history, txns=own, polls=polls)), result)
    _compare_sinks(query, sends, seen, result)
    for reader, state in seen.states.items():
        _compare_state(reader, totals, state, result)
    if result.transactions < sum(1 for txn in txns if txn.ranges):
        result.examples.append(
            f"{query.name}: {result.transactions} transactions by the token, {len(txns)} batches"
        )
    position = {**carry.position, **(batches[-1].ends if batches else {})}
    next_batch = batches[-1].batch_id + 1 if batches else carry.next_batch
    return result, Carry(next_batch, position, totals, seen.sequence)


def _transactions(
    query: Query,
    carry: Carry,
    batches: Sequence[Batch],
    source: Iterable[Record],
    totals: dict[str, Totals],
    result: Judgement,
) -> list[Txn]:
    """Computes what each micro-batch read and must have written."""
    inputs: dict[int, list[Record]] = defaultdict(list)
    for each in source:
        inputs[each.partition].append(each)
    at = dict.fromkeys(inputs, 0)
    position = dict(carry.position)
    found = []
    for expected_id, batch in enumerate(batches, carry.next_batch):
        if batch.batch_id != expected_id:
            result.examples.append(f"{query.name}: batch {expected_id} is missing in the offset log")
        read: list[Record] = []
        ranges = []
        for partition, end in sorted(batch.ends.items()):
            start = position.get(partition, 0)
            if end < start:
                result.examples.append(
                    f"{query.name}: batch {batch.batch_id} goes back to {end} in {partition}"
                )
            if end > start:
                ranges.append(SourceRange(SOURCE, partition, start, end))
            position[partition] = end
            rows = inputs.get(partition, [])
            first = at.get(partition, 0)
            last = first
            while last < len(rows) and rows[last].offset < end:
                last += 1
            at[partition] = last
            read += rows[first:last]
        found.append(Txn(query.name, batch.batch_id, tuple(ranges), sends=tuple(query.rows(read, totals))))
    unread = sum(len(rows) - at[partition] for partition, rows in inputs.items())
    if unread:
        result.examples.append(f"{query.name}: {unread} input records are in no batch")
        result.lost += unread
    return found


def _with_topics(seen: Seen, result: Judgement) -> list[Record]:
    """Adds topics to what Kafka's consumer printed, and counts what only one consumer saw."""
    other: dict[Printed, list[str]] = defaultdict(list)
    for each in seen.records:
        other[Printed(each.partition, each.offset, str(each.key), each.value)].append(each.topic)
    read = []
    for line in dict.fromkeys(seen.printed):  # a consumer that joins its group again reads records again
        topics = other.get(line)
        if topics:
            read.append(Record(topics.pop(), line.partition, line.offset, line.key, line.value))
        else:
            read.append(Record(_UNKNOWN, line.partition, line.offset, line.key, line.value))
            _differ(result, f"only the Java consumer saw {line}")
    for line, topics in other.items():
        for topic in topics:
            _differ(result, f"only librdkafka saw {line} of {topic}")
    return read


def _differ(result: Judgement, example: str) -> None:
    result.readers_differ += 1
    if result.readers_differ <= 3:
        result.examples.append(example)


def _compare_output(sends: Sequence[Send], read: Sequence[Record], seen: Seen, result: Judgement) -> None:
    found = verdict.judge((each.identity for each in sends), (each.identity for each in read))
    result.lost += found.missing
    result.doubled, result.foreign = found.doubled, found.foreign
    result.examples += found.examples
    if seen.hidden:
        result.invisible = max(1, found.missing)
        result.examples.append(f"an open transaction hides the end of {', '.join(seen.hidden)}")


def _check_history(txns: Sequence[Txn], read: Sequence[Record], result: Judgement) -> None:
    """Runs the checker of histories. All queries are at rest, so each batch took place."""
    operations = tuple(Operation("offset log", Phase.OK, None, None, txn) for txn in txns)
    _add_findings(check(History(txns=operations, polls=(_poll(read, 1),))), result)


def _poll(records: Sequence[Record], at_ns: int) -> Operation[Poll]:
    return Operation("consumer", Phase.OK, None, at_ns, Poll(tuple(records)))


def _add_findings(findings: Findings, result: Judgement) -> None:
    for anomaly, times in findings.counts.items():
        result.anomalies[anomaly.value] = result.anomalies.get(anomaly.value, 0) + times
        result.examples += findings.examples.get(anomaly, ())[:2]


def _compare_sinks(query: Query, sends: Sequence[Send], seen: Seen, result: Judgement) -> None:
    wanted = [each.value for each in sends]
    for sink in query.sinks:
        result.sink_rows += len(wanted)
        found = verdict.judge(wanted, seen.sinks.get(sink, ()))
        result.sink_faults += found.missing + found.doubled + found.foreign
        result.examples += [f"{sink}: {example}" for example in found.examples]


def _compare_state(
    reader: str, wanted: Mapping[str, Totals], found: Mapping[str, Totals], result: Judgement
) -> None:
    result.state_keys += len(wanted)
    for key in sorted({*wanted, *found}):
        if wanted.get(key) != found.get(key):
            result.state_faults += 1
            result.examples.append(f"{reader}: key {key} has {found.get(key)}, expected {wanted.get(key)}")


def total(judgements: Iterable[Mapping[str, Any]]) -> dict[str, int]:
    """Adds up the numbers of judgements, and counts all anomalies together."""
    sums: Counter[str] = Counter()
    for each in judgements:
        sums.update({name: number for name, number in each.items() if isinstance(number, int)})
        sums["anomalies"] += sum(each["anomalies"].values())
    return dict(sums)
