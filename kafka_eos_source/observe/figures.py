"""What is measured: the steps of a micro-batch, one record per micro-batch and source, and sums over a run.

All records are immutable. The process that commits makes a `BatchFigures` per micro-batch, and a
`WaitingCommit` while a commit stands still; the process that plans makes `SourceFigures`. Journals, views,
metrics and callbacks are made from them. Each is one JSON object (`observe.lines`).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from enum import Enum
from hashlib import blake2b
from typing import Any, TypeAlias

from kafka_eos_source.model import Offsets, TopicPartition
from kafka_eos_source.observe.lines import (
    Writer,
    all_rounded,
    from_line,
    groups,
    integer,
    integers,
    items,
    key,
    mapping,
    milliseconds,
    number,
    number_or_none,
    numbers,
    rounded,
    text,
    to_line,
)


class StepGroup(Enum):
    """What a person sees of the steps: few groups, in the order in which they happen."""

    TASKS = "tasks"
    VERIFY = "verify"
    DECIDE = "decide"
    WRITE = "write"
    COMMIT = "commit"
    SINKS = "sinks"
    RETRY = "retry"
    TIDY = "tidy"


class Step(Enum):
    """One step of a micro-batch. Those of the commit are in the table of moves (`commit.steps.MOVES`).

    ``TASKS`` lasts from the batch's entry in Spark's offset log to the call of the commit.

    Attributes:
        group: the group in which people see it.
        doing: what it does, for a reader who watches a query that stands still in it.
    """

    TASKS = "tasks", StepGroup.TASKS, "Spark runs the tasks of the batch"
    VERIFY = "verify", StepGroup.VERIFY, "verifying the staged rows"
    OPEN = "open", StepGroup.DECIDE, "checking the producer of the previous batch"
    INIT = "init", StepGroup.DECIDE, "initialising the transactional id"
    TOKEN = "token", StepGroup.DECIDE, "reading the token from Kafka"
    GENESIS = "genesis", StepGroup.DECIDE, "beginning the chain of tokens"
    CHECK = "check", StepGroup.WRITE, "checking the output topics"
    PREPARE = "prepare", StepGroup.SINKS, "sinks outside Kafka prepare the batch"
    RESTAGE = "restage", StepGroup.SINKS, "staging rows again without those that a sink refuses"
    BEGIN = "begin", StepGroup.WRITE, "beginning the transaction"
    PRODUCE = "produce", StepGroup.WRITE, "sending the records"
    FLUSH = "flush", StepGroup.WRITE, "waiting until the brokers acknowledge the records"
    OFFSETS = "offsets", StepGroup.COMMIT, "committing the offsets and the token"
    COMMIT = "commit", StepGroup.COMMIT, "waiting until Kafka commits the transaction"
    FINISH = "finish", StepGroup.SINKS, "sinks outside Kafka commit the batch"
    COMMITTED = "committed", StepGroup.TIDY, "ending the commit"
    SKIPPED = "skipped", StepGroup.TIDY, "ending the commit"
    LOST = "lost", StepGroup.RETRY, "pausing before the next try"
    TIDY = "tidy", StepGroup.TIDY, "deleting the staged rows"

    group: StepGroup
    doing: str

    # the defaults are for mypy, which takes a look-up by value for a call of this
    def __new__(cls, value: str, group: StepGroup = StepGroup.TIDY, doing: str = "") -> Step:
        step = object.__new__(cls)
        step._value_, step.group, step.doing = value, group, doing
        return step


def by_group(seconds: Mapping[str, float]) -> dict[StepGroup, float]:
    """Returns the duration of each group that took any time, in the order of the groups.

    Args:
        seconds: duration of each step, by the value of its `Step`. Unknown steps of later versions
            are left out.
    """
    known = {step.value: step.group for step in Step}
    found: dict[StepGroup, float] = {}
    for step, duration in seconds.items():
        if step in known and duration > 0:
            found[known[step]] = found.get(known[step], 0.0) + duration
    return {group: found[group] for group in StepGroup if group in found}


# -- a micro-batch ---------------------------------------------------------------------------------


class Outcome(Enum):
    """How the commit of a micro-batch ended."""

    COMMITTED = "committed"  #: this call committed it
    SKIPPED = "skipped"  #: Kafka already held it
    FAILED = "failed"  #: the call raised an error


class EventKind(Enum):
    """What happened to a commit besides its normal steps."""

    RETRIED = "retried"  #: a try failed, and the commit tries again
    ABORTED = "aborted"  #: a transaction was aborted
    FENCED = "fenced"  #: another producer took over the transactional id
    UNKNOWN = "unknown"  #: Kafka did not answer the request to commit
    REFUSED = "refused"  #: a sink refused rows, which become dead letters or are dropped
    HELD_BACK = "held_back"  #: Kafka has committed; a sink outside Kafka has not yet


@dataclass(frozen=True)
class Event:
    """Something that happened during a commit.

    Attributes:
        at: seconds since 1970.
        kind: what happened.
        text: the reason, without secrets.
    """

    at: float
    kind: EventKind
    text: str


@dataclass(frozen=True)
class SourceRead:
    """What a micro-batch read from one Kafka source.

    Attributes:
        position: identifies the end of the batch in this source; see `position_id`.
        offsets: number of offsets that the batch read, per topic: those of its records, and of control
            records and aborted records.
    """

    position: str
    offsets: Mapping[str, int]


def _value(member: Enum) -> Any:
    return member.value


def _four_digits(fraction: float) -> float:
    return round(fraction, 4)


def _texts(found: object) -> tuple[str, ...]:
    return tuple(map(text, items(found)))


def _sources_read(found: object) -> tuple[SourceRead, ...]:
    reads = map(mapping, items(found))
    return tuple(SourceRead(text(each["position"]), integers(each["offsets"])) for each in reads)


def _sources_as_json(reads: tuple[SourceRead, ...]) -> list[dict[str, Any]]:
    return [{"position": each.position, "offsets": dict(each.offsets)} for each in reads]


def _events(found: object) -> tuple[Event, ...]:
    return tuple(
        Event(number(at), EventKind(kind), text(what)) for at, kind, what in map(items, items(found))
    )


def _events_as_json(events: tuple[Event, ...]) -> list[list[Any]]:
    return [[milliseconds(each.at), each.kind.value, each.text] for each in events]


#: Numbers by name, per sink, operator or topic.
Groups: TypeAlias = Mapping[str, Mapping[str, float]]


@dataclass(frozen=True)
class BatchFigures:
    """One micro-batch whose commit has ended.

    Attributes:
        application_id: the transactional id.
        query_id, run_id, batch_id: Spark's ids.
        outcome: how the commit ended.
        began_at, ended_at: when the commit began and ended, in seconds since 1970.
        seconds: duration of each step, by the value of its `Step`, in seconds. Steps do not overlap.
        counts: numbers of this batch, by name:

            ``offsets_read``
                offsets that the batch read from Kafka sources
            ``records``
                records written to output topics
            ``dead_letters``, ``dropped``
                invalid rows that were written to the dead-letter topic, and that were dropped
            ``refused``
                how often a sink outside Kafka refused rows, so that tasks' rows were staged again
            ``changes``
                records written to changelog topics
            ``bytes``
                size of these records and changes as Arrow columns, before the client compresses them
            ``staged_bytes``
                size of the staged parts
            ``staging_ms``
                time that writing tasks spent on staging rows, summed over the tasks
            ``shards``
                shards of stateful operators that reported
            ``restores``, ``restored_records``, ``restore_ms``
                shards that were restored from their changelog, the records read, and the time that the
                shards needed, summed
            ``transactions``, ``committed``, ``aborted``
                transactions that were begun, committed and aborted. The genesis token has its own.
            ``retried``, ``fenced``, ``unknown``
                tries that failed and were repeated; of these, those that were fenced, and those after which
                the outcome was unknown
        sinks: per sink outside Kafka: ``rows``, ``prepared``, ``committed``, ``aborted``, ``recovered``
            (left prepared by an earlier process), ``retries``, ``prepare_seconds``, ``commit_seconds`` and
            ``held_back_seconds`` (how long Kafka had committed when the sink did).
        sources: what the batch read.
        sequence: sequence number of the committed token; None if nothing was committed.
        pressure: uncommitted state of the fullest shard as a fraction of its limit.
        processor_counts: what stateful processors counted over all batches, such as ``late_rows``.
        state: per stateful operator, by its changelog topic, sums over its shards: ``keys`` and ``bytes``
            (RocksDB's estimates before this batch), ``uncommitted_bytes`` (changes of this batch) and
            ``spilled_bytes`` (the part of them that went to disk).
        gauges: numbers of this batch that are not summed:

            ``tasks``, ``median_task_seconds``, ``longest_task_seconds``
                number of writing tasks, empty ones included, and how long they took, reading included
            ``queued_messages``
                most records that were waiting in the client of the committing producer
        topics: per output topic, ``records`` and ``bytes`` (of keys and values) of this batch. At most
            `MOST_TOPICS` are named; `with_totals` sums the others under `OTHER_TOPICS`.
        links: headers ``traceparent`` of some records, one per task at most.
        events: what happened, oldest first.
        error: why the commit failed; "" if it did not.
        writer: the committing process.
        totals: sums of ``counts`` over the batches of this run, this one included, and the number of
            ``batches``, ``skipped`` and ``failed``.
        sink_totals: sums of ``sinks`` over the batches of this run.
        topic_totals: sums of ``topics`` over the batches of this run.
        total_seconds: sums of ``seconds`` over the batches of this run.
        totals_since: when the first of these batches began, in seconds since 1970.
        runs: number of runs of the query that the journal has seen, this one included.
    """

    application_id: str = field(metadata=key("application", text))
    query_id: str = field(metadata=key("query", text))
    run_id: str = field(metadata=key("run", text))
    batch_id: int = field(metadata=key("batch", integer))
    outcome: Outcome = field(metadata=key("outcome", Outcome, _value))
    began_at: float = field(metadata=key("began", number, milliseconds))
    ended_at: float = field(metadata=key("ended", number, milliseconds))
    seconds: Mapping[str, float] = field(metadata=key("seconds", numbers, rounded))
    counts: Mapping[str, int] = field(metadata=key("counts", integers, dict))
    writer: Writer = field(metadata=key("writer", Writer.from_json, Writer.to_json))
    sinks: Groups = field(default_factory=dict, metadata=key("sinks", groups, all_rounded, brief=True))
    sources: tuple[SourceRead, ...] = field(
        default=(), metadata=key("sources", _sources_read, _sources_as_json, brief=True)
    )
    sequence: int | None = field(default=None, metadata=key("sequence", integer, brief=True))
    pressure: float = field(default=0.0, metadata=key("pressure", number, _four_digits, brief=True))
    processor_counts: Mapping[str, int] = field(
        default_factory=dict, metadata=key("processor_counts", integers, dict, brief=True)
    )
    state: Groups = field(default_factory=dict, metadata=key("state", groups, all_rounded, brief=True))
    gauges: Mapping[str, float] = field(
        default_factory=dict, metadata=key("gauges", numbers, rounded, brief=True)
    )
    topics: Groups = field(default_factory=dict, metadata=key("topics", groups, all_rounded, brief=True))
    links: tuple[str, ...] = field(default=(), metadata=key("links", _texts, list, brief=True))
    events: tuple[Event, ...] = field(
        default=(), metadata=key("events", _events, _events_as_json, brief=True)
    )
    error: str = field(default="", metadata=key("error", text, brief=True))
    totals: Mapping[str, int] = field(default_factory=dict, metadata=key("totals", integers, dict))
    sink_totals: Groups = field(
        default_factory=dict, metadata=key("sink_totals", groups, all_rounded, brief=True)
    )
    topic_totals: Groups = field(
        default_factory=dict, metadata=key("topic_totals", groups, all_rounded, brief=True)
    )
    total_seconds: Mapping[str, float] = field(
        default_factory=dict, metadata=key("total_seconds", numbers, rounded)
    )
    totals_since: float = field(default=0.0, metadata=key("since", number, milliseconds))
    runs: int = field(default=1, metadata=key("runs", integer))

    def to_json(self) -> str:
        """Returns the figures as one line."""
        return to_line(self, "batch")

    @classmethod
    def from_json(cls, line: str) -> BatchFigures | None:
        """Reads what `to_json` wrote; returns None if it is something else."""
        return from_line(cls, "batch", line)


@dataclass(frozen=True)
class WaitingCommit:
    """A commit that stands still: it has been in one step for a while, or pauses before its next try.

    Attributes:
        application_id: the transactional id.
        query_id, run_id, batch_id: Spark's ids.
        at: when this was written, in seconds since 1970.
        began_at: when the commit began.
        step: the value of the `Step` that it is in.
        step_since: since when it is in this step.
        reason: why it waits, without secrets; "" if that is not known.
        retried: how many tries have failed.
        writer: the committing process.
    """

    application_id: str = field(metadata=key("application", text))
    query_id: str = field(metadata=key("query", text))
    run_id: str = field(metadata=key("run", text))
    batch_id: int = field(metadata=key("batch", integer))
    at: float = field(metadata=key("at", number, milliseconds))
    began_at: float = field(metadata=key("began", number, milliseconds))
    step: str = field(metadata=key("step", text))
    step_since: float = field(metadata=key("since", number, milliseconds))
    reason: str = field(metadata=key("reason", text))
    retried: int = field(metadata=key("retried", integer))
    writer: Writer = field(metadata=key("writer", Writer.from_json, Writer.to_json))

    def to_json(self) -> str:
        """Returns the record as one line."""
        return to_line(self, "waiting")

    @classmethod
    def from_json(cls, line: str) -> WaitingCommit | None:
        """Reads what `to_json` wrote; returns None if it is something else."""
        return from_line(cls, "waiting", line)


# -- a source --------------------------------------------------------------------------------------


def _times(times: Mapping[str, float]) -> dict[str, float | None]:
    return {topic: milliseconds(each) for topic, each in times.items()}


def _nested(offsets: Offsets) -> dict[str, dict[str, int]]:
    nested: dict[str, dict[str, int]] = {}
    for tp, offset in offsets.items():
        nested.setdefault(tp.topic, {})[str(tp.partition)] = offset
    return nested


def _flat(found: object) -> dict[TopicPartition, int]:
    return {
        TopicPartition(topic, int(partition)): offset
        for topic, partitions in mapping(found).items()
        for partition, offset in integers(partitions).items()
    }


class SourceState(Enum):
    """What the source of a query does."""

    PLANNED = "planned"  #: it has planned a batch, which Spark now runs
    IDLE = "idle"  #: nothing to read, or not enough yet
    ASKING = "asking"  #: it has been waiting for an answer of the brokers
    STOPPED = "stopped"  #: the run of the query has ended


@dataclass(frozen=True)
class SourceFigures:
    """One source of a query, as its planner saw it.

    Attributes:
        at: when this was written, in seconds since 1970.
        writer: the planning process.
        state: what the source does.
        state_since: since when it does that.
        reason: what it waits for; "" if it only waits for records.
        application_id: option ``application.id``, or "" if the source does not know the query.
        name: what the source reads, for people.
        start: next offset to read per partition, at the end of the newest committed batch.
        planned: next offset to read per partition, at the end of the newest planned batch.
        latest: what readers can read up to, per partition, when the brokers were last asked.
        positions: `position_id` of the newest positions, oldest first, which connect a source to its query.
        behind_since: since when the oldest record after ``start`` has been available, in seconds since 1970,
            per topic that has such a record.
        behind_at_least: topics of which that record may have been available even before.
        hidden: number of offsets that open transactions hide from readers, per partition that has any.
        hidden_since: since when the source has seen that, without a pause, in seconds since 1970.
        retention_seconds: how long Kafka keeps the committed offsets, and with them the token, of a query
            that commits nothing (``offsets.retention.minutes``); None if that is not known.
    """

    at: float = field(metadata=key("at", number, milliseconds))
    writer: Writer = field(metadata=key("writer", Writer.from_json, Writer.to_json))
    state: SourceState = field(metadata=key("state", SourceState, _value))
    state_since: float = field(metadata=key("since", number, milliseconds))
    reason: str = field(default="", metadata=key("reason", text))
    application_id: str = field(default="", metadata=key("application", text))
    name: str = field(default="", metadata=key("name", text))
    start: Offsets = field(default_factory=dict, metadata=key("start", _flat, _nested))
    planned: Offsets = field(default_factory=dict, metadata=key("planned", _flat, _nested))
    latest: Offsets = field(default_factory=dict, metadata=key("latest", _flat, _nested))
    positions: tuple[str, ...] = field(default=(), metadata=key("positions", _texts, list))
    behind_since: Mapping[str, float] = field(
        default_factory=dict, metadata=key("behind_since", numbers, _times)
    )
    behind_at_least: tuple[str, ...] = field(default=(), metadata=key("behind_at_least", _texts, list))
    hidden: Offsets = field(default_factory=dict, metadata=key("hidden", _flat, _nested))
    hidden_since: float | None = field(
        default=None, metadata=key("hidden_since", number_or_none, milliseconds)
    )
    retention_seconds: float | None = field(default=None, metadata=key("retention", number_or_none))

    def to_json(self) -> str:
        """Returns the figures as one line."""
        return to_line(self, "source")

    @classmethod
    def from_json(cls, line: str) -> SourceFigures | None:
        """Reads what `to_json` wrote; returns None if it is something else."""
        return from_line(cls, "source", line)


def position_id(end: Offsets) -> str:
    """Returns a short text that identifies a position: the next offset to read of each partition.

    The source plans a position and does not know its query; the commit reads the position in the checkpoint.
    """
    text_of_all = ";".join(f"{tp.topic}-{tp.partition}:{offset}" for tp, offset in sorted(end.items()))
    return blake2b(text_of_all.encode(), digest_size=8).hexdigest()


# -- sums over the micro-batches of a run ----------------------------------------------------------

#: Most output topics whose figures have a name. The others are summed, so that metrics have few labels.
MOST_TOPICS = 50
#: Name of the others. No topic of Kafka can have it.
OTHER_TOPICS = "(other)"


def with_totals(figures: BatchFigures, last: BatchFigures | None) -> BatchFigures:
    """Returns the figures with the sums over the batches of this run, and with few names of topics.

    Args:
        figures: the batch that has ended.
        last: the batch before it; None if there is none.
    """
    runs = 1 if last is None else last.runs
    if last is not None and last.run_id != figures.run_id:
        runs, last = last.runs + 1, None
    counts = {**figures.counts, "batches": 1}
    if figures.outcome is not Outcome.COMMITTED:
        counts[figures.outcome.value] = 1
    topic_totals = bounded(figures.topics, {} if last is None else last.topic_totals)
    figures = replace(figures, topics=_named_as(figures.topics, topic_totals))
    if last is None:
        return replace(
            figures,
            totals=counts,
            sink_totals=dict(figures.sinks),
            topic_totals=topic_totals,
            total_seconds=dict(figures.seconds),
            totals_since=figures.began_at,
            runs=runs,
        )
    sinks = {
        name: summed(last.sink_totals.get(name, {}), figures.sinks.get(name, {}))
        for name in {**last.sink_totals, **figures.sinks}
    }
    return replace(
        figures,
        totals=summed(last.totals, counts),
        sink_totals=sinks,
        topic_totals=topic_totals,
        total_seconds=summed(last.total_seconds, figures.seconds),
        totals_since=last.totals_since,
        runs=runs,
    )


def newer(one: BatchFigures | None, other: BatchFigures | None) -> BatchFigures | None:
    """Returns the newer one of two batches of the same query; None if there is neither.

    Within a run, the one whose totals cover more batches is newer, whatever a clock that was set says.
    """
    if one is None or other is None:
        return other if one is None else one
    if one.run_id == other.run_id:
        is_later = other.totals.get("batches", 0) > one.totals.get("batches", 0)
    else:
        is_later = other.ended_at > one.ended_at
    return other if is_later else one


def bounded(
    topics: Mapping[str, Mapping[str, float]], before: Mapping[str, Mapping[str, float]] | None = None
) -> dict[str, dict[str, float]]:
    """Returns the sums of both per topic, with at most `MOST_TOPICS` names.

    A topic that was named before stays named. Of the others, those with the most records get the names that
    are left.

    Args:
        topics: records and bytes per topic of one batch.
        before: the sums before it.
    """
    found = {name: dict(each) for name, each in (before or {}).items()}
    for name in sorted(topics, key=lambda name: -topics[name].get("records", 0)):
        is_named = name in found or len(found.keys() - {OTHER_TOPICS}) < MOST_TOPICS
        kept = name if is_named else OTHER_TOPICS
        found[kept] = summed(found.get(kept, {}), topics[name])
    return found


def _named_as(
    topics: Mapping[str, Mapping[str, float]], named: Mapping[str, Mapping[str, float]]
) -> dict[str, dict[str, float]]:
    """Returns the figures by topic; those of topics without a name are summed under `OTHER_TOPICS`."""
    found: dict[str, dict[str, float]] = {}
    for name, each in topics.items():
        kept = name if name in named else OTHER_TOPICS
        found[kept] = summed(found.get(kept, {}), each)
    return found


def summed(before: Mapping[str, float], more: Mapping[str, float]) -> dict[str, Any]:
    """Returns the sums of both by name."""
    return {name: before.get(name, 0) + more.get(name, 0) for name in {**before, **more}}
