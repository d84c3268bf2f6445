"""What is measured: one immutable record per micro-batch, per waiting commit, and per look at the source.

Journals, views, metrics and callbacks are made from these records. Each is one JSON object with a version and
a kind. A reader skips objects that it does not know, and ignores keys that it does not know.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum
from hashlib import blake2b
from typing import Any

from kafka_eos_source.model import Offsets, TopicPartition
from kafka_eos_source.observe.decode import integer, integers, items, mapping, number, numbers, text
from kafka_eos_source.observe.process import Writer

#: Version of the JSON. A change that a reader of this version would misunderstand gets the next number.
VERSION = 1

_SECONDS_DIGITS = 6


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
        offsets: number of offsets that the batch read, per topic: its records, and what takes up offsets
            besides (control records, aborted records).
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
            ``changes``
                records written to changelog topics
            ``staged_bytes``
                size of the staged parts
            ``shards``
                shards of stateful operators that reported
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
        events: what happened, oldest first.
        error: why the commit failed; "" if it did not.
        writer: the committing process.
        totals: sums of ``counts`` over the batches of this run, this one included, and the number of
            ``batches``, ``skipped`` and ``failed``.
        sink_totals: sums of ``sinks`` over the batches of this run.
        totals_since: when the first of these batches began, in seconds since 1970.
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
    events: tuple[Event, ...] = ()
    error: str = ""
    totals: Mapping[str, int] = field(default_factory=dict)
    sink_totals: Mapping[str, Mapping[str, float]] = field(default_factory=dict)
    totals_since: float = 0.0

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
            "seconds": _rounded(self.seconds),
            "counts": dict(self.counts),
            "writer": self.writer.to_json(),
            "totals": dict(self.totals),
            "since": round(self.totals_since, 3),
        }
        if self.sinks:
            found["sinks"] = {name: _rounded(each) for name, each in self.sinks.items()}
        if self.sink_totals:
            found["sink_totals"] = {name: _rounded(each) for name, each in self.sink_totals.items()}
        if self.sources:
            found["sources"] = [{"position": each.position, "offsets": each.offsets} for each in self.sources]
        if self.sequence is not None:
            found["sequence"] = self.sequence
        if self.pressure:
            found["pressure"] = round(self.pressure, 4)
        if self.processor_counts:
            found["processor_counts"] = dict(self.processor_counts)
        if self.events:
            found["events"] = [[round(each.at, 3), each.kind.value, each.text] for each in self.events]
        if self.error:
            found["error"] = self.error
        return _line(found)

    @classmethod
    def from_json(cls, line: str) -> BatchFigures | None:
        """Reads one line; returns None if it is damaged, of another kind or of a later version."""
        found = _parsed(line, "batch")
        try:
            return None if found is None else cls._from(found)
        except (ValueError, KeyError, TypeError):
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
            events=tuple(
                Event(number(at), EventKind(kind), text(what))
                for at, kind, what in map(items, items(found.get("events", [])))
            ),
            error=text(found.get("error", "")),
            totals=integers(found["totals"]),
            sink_totals=_sinks(found.get("sink_totals", {})),
            totals_since=number(found["since"]),
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
        return _line(
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
        found = _parsed(line, "waiting")
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
        except (ValueError, KeyError, TypeError):
            return None


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

    def to_json(self) -> str:
        """Returns the figures as one line."""
        return _line(
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
            }
        )

    @classmethod
    def from_json(cls, line: str) -> SourceFigures | None:
        """Reads what `to_json` wrote; returns None if it is something else."""
        found = _parsed(line, "source")
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
                )
            )
        except (ValueError, KeyError, TypeError):
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


def summed(before: Mapping[str, float], more: Mapping[str, float]) -> dict[str, Any]:
    """Returns the sums of both by name."""
    return {name: before.get(name, 0) + more.get(name, 0) for name in {**before, **more}}


def _line(found: Mapping[str, Any]) -> str:
    return json.dumps(found, separators=(",", ":"))


def _parsed(line: str, kind: str) -> Mapping[str, Any] | None:
    """Returns the JSON object of this kind and version in a line; None if there is none."""
    try:
        found = json.loads(line)
    except (ValueError, RecursionError):
        return None
    is_known = isinstance(found, dict) and found.get("v") == VERSION and found.get("kind") == kind
    return found if is_known else None


def _rounded(seconds: Mapping[str, float]) -> dict[str, float]:
    return {
        name: each if isinstance(each, int) else round(each, _SECONDS_DIGITS)
        for name, each in seconds.items()
    }


def _sinks(found: object) -> dict[str, dict[str, float]]:
    return {name: numbers(each) for name, each in mapping(found).items()}


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
