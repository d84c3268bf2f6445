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
from operator import add
from typing import Any

from kafka_eos_source.model import Offsets, TopicPartition
from kafka_eos_source.observe.lines import (
    VERSION,
    Writer,
    integer,
    integers,
    items,
    mapping,
    number,
    numbers,
    parsed,
    rounded,
    text,
    to_line,
)
from kafka_eos_source.runtime.json_input import SHAPE_ERRORS


class TracedStep(Enum):
    """One step of a micro-batch. The steps of the commit have the values of `commit.steps.Step`."""

    TASKS = "tasks"  #: Spark plans the batch and runs its tasks: from its offset log entry to the commit call
    VERIFY = "verify"  #: the commit reads the checkpoint and verifies the staged parts
    OPEN = "open"
    INIT = "init"
    TOKEN = "token"
    GENESIS = "genesis"
    CHECK = "check"
    PREPARE = "prepare"
    BEGIN = "begin"
    PRODUCE = "produce"
    FLUSH = "flush"
    OFFSETS = "offsets"
    COMMIT = "commit"
    FINISH = "finish"
    COMMITTED = "committed"
    SKIPPED = "skipped"
    LOST = "lost"
    TIDY = "tidy"  #: deletes the staged parts, in the staging folder and in the sinks


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


GROUPS: Mapping[TracedStep, StepGroup] = {
    TracedStep.TASKS: StepGroup.TASKS,
    TracedStep.VERIFY: StepGroup.VERIFY,
    TracedStep.OPEN: StepGroup.DECIDE,
    TracedStep.INIT: StepGroup.DECIDE,
    TracedStep.TOKEN: StepGroup.DECIDE,
    TracedStep.GENESIS: StepGroup.DECIDE,
    TracedStep.CHECK: StepGroup.WRITE,
    TracedStep.PREPARE: StepGroup.SINKS,
    TracedStep.BEGIN: StepGroup.WRITE,
    TracedStep.PRODUCE: StepGroup.WRITE,
    TracedStep.FLUSH: StepGroup.WRITE,
    TracedStep.OFFSETS: StepGroup.COMMIT,
    TracedStep.COMMIT: StepGroup.COMMIT,
    TracedStep.FINISH: StepGroup.SINKS,
    TracedStep.COMMITTED: StepGroup.TIDY,
    TracedStep.SKIPPED: StepGroup.TIDY,
    TracedStep.LOST: StepGroup.RETRY,
    TracedStep.TIDY: StepGroup.TIDY,
}

#: What each step does, for a reader who watches a query that stands still in it.
DOING: Mapping[TracedStep, str] = {
    TracedStep.TASKS: "Spark runs the tasks of the batch",
    TracedStep.VERIFY: "verifying the staged rows",
    TracedStep.OPEN: "checking the producer of the previous batch",
    TracedStep.INIT: "initialising the transactional id",
    TracedStep.TOKEN: "reading the token from Kafka",
    TracedStep.GENESIS: "beginning the chain of tokens",
    TracedStep.CHECK: "checking the output topics",
    TracedStep.PREPARE: "sinks outside Kafka prepare the batch",
    TracedStep.BEGIN: "beginning the transaction",
    TracedStep.PRODUCE: "sending the records",
    TracedStep.FLUSH: "waiting until the brokers acknowledge the records",
    TracedStep.OFFSETS: "committing the offsets and the token",
    TracedStep.COMMIT: "waiting until Kafka commits the transaction",
    TracedStep.FINISH: "sinks outside Kafka commit the batch",
    TracedStep.COMMITTED: "ending the commit",
    TracedStep.SKIPPED: "ending the commit",
    TracedStep.LOST: "pausing before the next try",
    TracedStep.TIDY: "deleting the staged rows",
}


def by_group(seconds: Mapping[str, float]) -> dict[StepGroup, float]:
    """Returns the duration of each group that took any time, in the order of the groups.

    Args:
        seconds: duration of each step, by the value of its `TracedStep`. Unknown steps of later versions
            are left out.
    """
    known = {step.value: group for step, group in GROUPS.items()}
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


@dataclass(frozen=True)
class BatchFigures:
    """One micro-batch whose commit has ended.

    Attributes:
        application_id: the transactional id.
        query_id, run_id, batch_id: Spark's ids.
        outcome: how the commit ended.
        began_at, ended_at: when the commit began and ended, in seconds since 1970.
        seconds: duration of each step, by the value of its `TracedStep`, in seconds. Steps do not overlap.
        counts: numbers of this batch, by name:

            ``offsets_read``
                offsets that the batch read from Kafka sources
            ``records``
                records written to output topics
            ``dead_letters``, ``dropped``
                invalid rows that were written to the dead-letter topic, and that were dropped
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
            `totals.MOST_TOPICS` are named; `totals.with_totals` sums the others under `totals.OTHER_TOPICS`.
        links: headers ``traceparent`` of some records, one per task at most.
        events: what happened, oldest first.
        error: why the commit failed; "" if it did not.
        writer: the committing process.
        totals: sums of ``counts`` over the batches of this run, this one included, and the number of
            ``batches``, ``skipped`` and ``failed``.
        sink_totals: sums of ``sinks`` over the batches of this run.
        topic_totals: sums of ``topics`` over the batches of this run.
        total_seconds: sums of ``seconds`` over the batches of this run.
        durations: number of batches of this run that took at most so many seconds, for each of
            `totals.DURATION_BOUNDS`.
        totals_since: when the first of these batches began, in seconds since 1970.
        runs: number of runs of the query that the journal has seen, this one included.
    """

    application_id: str
    query_id: str
    run_id: str
    batch_id: int
    outcome: Outcome
    began_at: float
    ended_at: float
    seconds: Mapping[str, float]
    counts: Mapping[str, int]
    writer: Writer
    sinks: Mapping[str, Mapping[str, float]] = field(default_factory=dict)
    sources: tuple[SourceRead, ...] = ()
    sequence: int | None = None
    pressure: float = 0.0
    processor_counts: Mapping[str, int] = field(default_factory=dict)
    state: Mapping[str, Mapping[str, float]] = field(default_factory=dict)
    gauges: Mapping[str, float] = field(default_factory=dict)
    topics: Mapping[str, Mapping[str, float]] = field(default_factory=dict)
    links: tuple[str, ...] = ()
    events: tuple[Event, ...] = ()
    error: str = ""
    totals: Mapping[str, int] = field(default_factory=dict)
    sink_totals: Mapping[str, Mapping[str, float]] = field(default_factory=dict)
    topic_totals: Mapping[str, Mapping[str, float]] = field(default_factory=dict)
    total_seconds: Mapping[str, float] = field(default_factory=dict)
    durations: tuple[int, ...] = ()
    totals_since: float = 0.0
    runs: int = 1

    def to_json(self) -> str:
        """Returns the figures as one line."""
        found: dict[str, Any] = {
            "v": VERSION,
            "kind": "batch",
            "application": self.application_id,
            "query": self.query_id,
            "run": self.run_id,
            "batch": self.batch_id,
            "outcome": self.outcome.value,
            "began": round(self.began_at, 3),
            "ended": round(self.ended_at, 3),
            "seconds": rounded(self.seconds),
            "counts": dict(self.counts),
            "writer": self.writer.to_json(),
            "totals": dict(self.totals),
            "total_seconds": rounded(self.total_seconds),
            "durations": list(self.durations),
            "since": round(self.totals_since, 3),
            "runs": self.runs,
        }
        if self.sinks:
            found["sinks"] = {name: rounded(each) for name, each in self.sinks.items()}
        if self.sink_totals:
            found["sink_totals"] = {name: rounded(each) for name, each in self.sink_totals.items()}
        if self.sources:
            found["sources"] = [{"position": each.position, "offsets": each.offsets} for each in self.sources]
        if self.sequence is not None:
            found["sequence"] = self.sequence
        if self.pressure:
            found["pressure"] = round(self.pressure, 4)
        if self.processor_counts:
            found["processor_counts"] = dict(self.processor_counts)
        if self.state:
            found["state"] = {name: rounded(each) for name, each in self.state.items()}
        if self.gauges:
            found["gauges"] = rounded(self.gauges)
        if self.topics:
            found["topics"] = {name: dict(each) for name, each in self.topics.items()}
        if self.topic_totals:
            found["topic_totals"] = {name: dict(each) for name, each in self.topic_totals.items()}
        if self.links:
            found["links"] = list(self.links)
        if self.events:
            found["events"] = [[round(each.at, 3), each.kind.value, each.text] for each in self.events]
        if self.error:
            found["error"] = self.error
        return to_line(found)

    @classmethod
    def from_json(cls, line: str) -> BatchFigures | None:
        """Reads one line; returns None if it is damaged, of another kind or of a later version."""
        found = parsed(line, "batch")
        try:
            return None if found is None else cls._from(found)
        except SHAPE_ERRORS:
            return None

    @classmethod
    def _from(cls, found: Mapping[str, Any]) -> BatchFigures:
        return cls(
            application_id=text(found["application"]),
            query_id=text(found["query"]),
            run_id=text(found["run"]),
            batch_id=integer(found["batch"]),
            outcome=Outcome(found["outcome"]),
            began_at=number(found["began"]),
            ended_at=number(found["ended"]),
            seconds=numbers(found["seconds"]),
            counts=integers(found["counts"]),
            writer=Writer.from_json(mapping(found["writer"])),
            sinks=_sinks(found.get("sinks", {})),
            sources=tuple(
                SourceRead(text(each["position"]), integers(each["offsets"]))
                for each in map(mapping, items(found.get("sources", [])))
            ),
            sequence=integer(found["sequence"]) if "sequence" in found else None,
            pressure=number(found.get("pressure", 0)),
            processor_counts=integers(found.get("processor_counts", {})),
            state=_sinks(found.get("state", {})),
            gauges=numbers(found.get("gauges", {})),
            topics=_sinks(found.get("topics", {})),
            topic_totals=_sinks(found.get("topic_totals", {})),
            links=tuple(map(text, items(found.get("links", [])))),
            events=tuple(
                Event(number(at), EventKind(kind), text(what))
                for at, kind, what in map(items, items(found.get("events", [])))
            ),
            error=text(found.get("error", "")),
            totals=integers(found["totals"]),
            sink_totals=_sinks(found.get("sink_totals", {})),
            total_seconds=numbers(found.get("total_seconds", {})),
            durations=tuple(map(integer, items(found.get("durations", [])))),
            totals_since=number(found["since"]),
            runs=integer(found.get("runs", 1)),
        )


@dataclass(frozen=True)
class WaitingCommit:
    """A commit that stands still: it has been in one step for a while, or pauses before its next try.

    Attributes:
        application_id: the transactional id.
        query_id, run_id, batch_id: Spark's ids.
        at: when this was written, in seconds since 1970.
        began_at: when the commit began.
        step: the value of the `TracedStep` that it is in.
        step_since: since when it is in this step.
        reason: why it waits, without secrets; "" if that is not known.
        retried: how many tries have failed.
        writer: the committing process.
    """

    application_id: str
    query_id: str
    run_id: str
    batch_id: int
    at: float
    began_at: float
    step: str
    step_since: float
    reason: str
    retried: int
    writer: Writer

    def to_json(self) -> str:
        """Returns the record as one line."""
        return to_line(
            {
                "v": VERSION,
                "kind": "waiting",
                "application": self.application_id,
                "query": self.query_id,
                "run": self.run_id,
                "batch": self.batch_id,
                "at": round(self.at, 3),
                "began": round(self.began_at, 3),
                "step": self.step,
                "since": round(self.step_since, 3),
                "reason": self.reason,
                "retried": self.retried,
                "writer": self.writer.to_json(),
            }
        )

    @classmethod
    def from_json(cls, line: str) -> WaitingCommit | None:
        """Reads what `to_json` wrote; returns None if it is something else."""
        found = parsed(line, "waiting")
        try:
            return (
                None
                if found is None
                else cls(
                    application_id=text(found["application"]),
                    query_id=text(found["query"]),
                    run_id=text(found["run"]),
                    batch_id=integer(found["batch"]),
                    at=number(found["at"]),
                    began_at=number(found["began"]),
                    step=text(found["step"]),
                    step_since=number(found["since"]),
                    reason=text(found["reason"]),
                    retried=integer(found["retried"]),
                    writer=Writer.from_json(mapping(found["writer"])),
                )
            )
        except SHAPE_ERRORS:
            return None


def _sinks(found: object) -> dict[str, dict[str, float]]:
    return {name: numbers(each) for name, each in mapping(found).items()}


# -- a source --------------------------------------------------------------------------------------


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
        planned_at: when the newest batch was planned, in seconds since 1970; None if none was.
        positions: `position_id` of the newest positions, oldest first, which connect a source to its query.
        behind_since: since when the oldest record after ``start`` has been available, in seconds since 1970,
            per topic that has such a record.
        behind_at_least: topics of which that record may have been available even before.
        hidden: number of offsets that open transactions hide from readers, per partition that has any.
        hidden_since: since when the source has seen that, without a pause, in seconds since 1970.
        retention_seconds: how long Kafka keeps the committed offsets, and with them the token, of a query
            that commits nothing (``offsets.retention.minutes``); None if that is not known.
    """

    at: float
    writer: Writer
    state: SourceState
    state_since: float
    reason: str = ""
    application_id: str = ""
    name: str = ""
    start: Offsets = field(default_factory=dict)
    planned: Offsets = field(default_factory=dict)
    latest: Offsets = field(default_factory=dict)
    planned_at: float | None = None
    positions: tuple[str, ...] = ()
    behind_since: Mapping[str, float] = field(default_factory=dict)
    behind_at_least: tuple[str, ...] = ()
    hidden: Offsets = field(default_factory=dict)
    hidden_since: float | None = None
    retention_seconds: float | None = None

    def to_json(self) -> str:
        """Returns the figures as one line."""
        return to_line(
            {
                "v": VERSION,
                "kind": "source",
                "at": round(self.at, 3),
                "writer": self.writer.to_json(),
                "state": self.state.value,
                "since": round(self.state_since, 3),
                "reason": self.reason,
                "application": self.application_id,
                "name": self.name,
                "start": _nested(self.start),
                "planned": _nested(self.planned),
                "latest": _nested(self.latest),
                "planned_at": None if self.planned_at is None else round(self.planned_at, 3),
                "positions": list(self.positions),
                "behind_since": {topic: round(each, 3) for topic, each in self.behind_since.items()},
                "behind_at_least": list(self.behind_at_least),
                "hidden": _nested(self.hidden),
                "hidden_since": None if self.hidden_since is None else round(self.hidden_since, 3),
                "retention": self.retention_seconds,
            }
        )

    @classmethod
    def from_json(cls, line: str) -> SourceFigures | None:
        """Reads what `to_json` wrote; returns None if it is something else."""
        found = parsed(line, "source")
        try:
            return (
                None
                if found is None
                else cls(
                    at=number(found["at"]),
                    writer=Writer.from_json(mapping(found["writer"])),
                    state=SourceState(found["state"]),
                    state_since=number(found["since"]),
                    reason=text(found["reason"]),
                    application_id=text(found["application"]),
                    name=text(found["name"]),
                    start=_flat(found["start"]),
                    planned=_flat(found["planned"]),
                    latest=_flat(found["latest"]),
                    planned_at=None if found["planned_at"] is None else number(found["planned_at"]),
                    positions=tuple(map(text, items(found["positions"]))),
                    behind_since=numbers(found["behind_since"]),
                    behind_at_least=tuple(map(text, items(found["behind_at_least"]))),
                    hidden=_flat(found.get("hidden", {})),
                    hidden_since=_number_or_none(found.get("hidden_since")),
                    retention_seconds=_number_or_none(found.get("retention")),
                )
            )
        except SHAPE_ERRORS:
            return None

    def lag(self, committed: Offsets) -> dict[str, int]:
        """Returns per topic how many offsets of the source are behind ``latest``."""
        found: dict[str, int] = {}
        for tp, end in self.latest.items():
            if tp in committed:
                found[tp.topic] = found.get(tp.topic, 0) + max(0, end - committed[tp])
        return found


def position_id(end: Offsets) -> str:
    """Returns a short text that identifies a position: the next offset to read of each partition.

    The source plans a position and does not know its query; the commit reads the position in the checkpoint.
    """
    text_of_all = ";".join(f"{tp.topic}-{tp.partition}:{offset}" for tp, offset in sorted(end.items()))
    return blake2b(text_of_all.encode(), digest_size=8).hexdigest()


def _number_or_none(found: object) -> float | None:
    return None if found is None else number(found)


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


# -- sums over the micro-batches of a run ----------------------------------------------------------

#: Bounds of the histogram `BatchFigures.durations`, in seconds. Longer batches are in no bound.
DURATION_BOUNDS = (0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 300.0)

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
    took = sum(figures.seconds.values())
    durations = tuple(int(took <= bound) for bound in DURATION_BOUNDS)
    if last is None:
        return replace(
            figures,
            totals=counts,
            sink_totals=dict(figures.sinks),
            topic_totals=topic_totals,
            total_seconds=dict(figures.seconds),
            durations=durations,
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
        durations=tuple(map(add, durations, last.durations or [0] * len(durations))),
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
