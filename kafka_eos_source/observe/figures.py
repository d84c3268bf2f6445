"""What is measured of a micro-batch: one immutable record per batch, and one per commit that stands still.

Journals, views, metrics and callbacks are made from these records and those of `observe.source_figures`. Each
is one JSON object (`observe.lines`).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

from kafka_eos_source.observe.decode import integer, integers, items, mapping, number, numbers, text
from kafka_eos_source.observe.lines import VERSION, parsed, rounded, to_line
from kafka_eos_source.observe.process import Writer
from kafka_eos_source.runtime.json_input import SHAPE_ERRORS


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
        seconds: duration of each step, by the value of its `Step`, in seconds. Steps do not overlap.
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
        step: the value of the `Step` that it is in.
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
