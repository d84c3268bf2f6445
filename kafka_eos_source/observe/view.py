"""Turns the figures of one query into what a person wants to see. Pure functions."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from datetime import datetime, timezone
from enum import Enum
from typing import Any

from kafka_eos_source.model import Offsets
from kafka_eos_source.observe.figures import (
    BatchFigures,
    Event,
    Outcome,
    SourceFigures,
    SourceState,
    Step,
    StepGroup,
    WaitingCommit,
    by_group,
    position_id,
)
from kafka_eos_source.observe.journal import QueryJournal
from kafka_eos_source.observe.lines import ProcessId
from kafka_eos_source.protocol.identity import is_series

#: Rates are computed over this many seconds.
RATE_SECONDS = 60.0
#: A query without a known source counts as running this long after its last batch.
_RUNNING_SECONDS = 10.0
_MOST_BATCHES = 60
#: Tasks that take longer than this are worth a word.
_LONG_SECONDS = 5.0
#: Bars are scaled so that nine in ten batches fit, with this much room.
_MOST_FIT, _ROOM = 0.9, 1.5
_SHORTEST_SECONDS = 1e-6


class Status(Enum):
    """What a query does."""

    RUNNING = "running"
    IDLE = "waiting for data"
    WAITING = "waiting"  #: for something other than data
    RETRYING = "retrying"
    FAILED = "failed"
    STOPPED = "stopped"
    ELSEWHERE = "not on this host"


@dataclass(frozen=True)
class TopicLag:
    """How far a query is behind in one topic that it reads.

    Attributes:
        offsets: number of offsets between the last committed batch and what readers can read.
        seconds: how long ago the oldest of them became available; 0 if there are none.
        at_least: whether it may have been longer ago.
        partitions: per partition, the number of offsets.
    """

    offsets: int
    seconds: float
    at_least: bool
    partitions: Mapping[int, int]


@dataclass(frozen=True)
class BatchView:
    """One micro-batch of the history.

    Attributes:
        batch_id: Spark's id.
        outcome: how its commit ended.
        ended_at: when, in seconds since 1970.
        seconds: duration of each group of steps.
        offsets_read, records, changes: see `BatchFigures.counts`.
        retried: number of tries that failed.
    """

    batch_id: int
    outcome: Outcome
    ended_at: float
    seconds: Mapping[StepGroup, float]
    offsets_read: int
    records: int
    changes: int
    retried: int

    @property
    def total_seconds(self) -> float:
        """Duration from the plan to the end of the commit."""
        return sum(self.seconds.values())


@dataclass(frozen=True)
class QueryView:
    """What is known about one query.

    Attributes:
        application_id: the transactional id; "" if it is not known.
        query_id, run_id: Spark's ids; "" if no batch was committed.
        at: when the view was made, in seconds since 1970.
        status: what the query does.
        status_since: since when, in seconds since 1970; None if that is not known.
        status_text: what it waits for, or why it failed; "" if there is nothing to say.
        read_per_second, records_per_second: offsets read and records written over the last minute.
        lag: per topic that the query reads. Empty if the host does not know the query's source.
        sources: what the sources read, for people.
        batches: the newest micro-batches, oldest first.
        totals: sums over this run; see `BatchFigures.totals`.
        totals_since: when the first of these batches began; None if there is none.
        sinks: sums per sink over this run.
        token_at: when the newest transaction was committed, in seconds since 1970; None if that is not known,
            and for a series of batch writes, which may be finished.
        sequence: sequence number of the newest token; None if that is not known.
        pressure: see `BatchFigures.pressure`.
        processor_counts: see `BatchFigures.processor_counts`.
        events: the newest events of all batches, oldest first.
    """

    application_id: str
    query_id: str
    run_id: str
    at: float
    status: Status
    status_since: float | None
    status_text: str
    read_per_second: float
    records_per_second: float
    lag: Mapping[str, TopicLag]
    sources: tuple[str, ...]
    batches: tuple[BatchView, ...]
    totals: Mapping[str, int]
    totals_since: float | None
    sinks: Mapping[str, Mapping[str, float]] = field(default_factory=dict)
    token_at: float | None = None
    sequence: int | None = None
    pressure: float = 0.0
    processor_counts: Mapping[str, int] = field(default_factory=dict)
    events: tuple[Event, ...] = ()

    @property
    def title(self) -> str:
        """The name of the query, for people."""
        return self.application_id or f"a query that reads {', '.join(self.sources)}"

    @property
    def total_lag(self) -> int | None:
        """Offsets behind in all topics; None if that is not known."""
        return sum(each.offsets for each in self.lag.values()) if self.lag else None

    def to_json(self) -> dict[str, Any]:
        """Returns the view as an object of JSON. Durations are in seconds, times are ISO 8601 in UTC."""
        found = asdict(self)
        found["status"] = self.status.value
        for name in ("at", "status_since", "totals_since", "token_at"):
            found[name] = None if found[name] is None else _iso(found[name])
        found["lag"] = {
            topic: {**asdict(each), "partitions": {str(p): n for p, n in each.partitions.items()}}
            for topic, each in self.lag.items()
        }
        found["batches"] = [
            {
                **asdict(each),
                "outcome": each.outcome.value,
                "ended_at": _iso(each.ended_at),
                "seconds": {group.value: round(spent, 6) for group, spent in each.seconds.items()},
            }
            for each in self.batches
        ]
        found["events"] = [
            {"at": _iso(each.at), "kind": each.kind.value, "text": each.text} for each in self.events
        ]
        return found


def view(
    journal: QueryJournal, now: float, is_alive: Callable[[ProcessId], bool] = ProcessId.is_alive
) -> QueryView:
    """Returns what the figures of one query show.

    Args:
        journal: the figures.
        now: present time in seconds since 1970.
        is_alive: whether a process of this host still runs.
    """
    newest = journal.batches[-1] if journal.batches else None
    committed = [each for each in journal.batches if each.outcome is not Outcome.FAILED]
    positions = {read.position for each in committed for read in each.sources}
    status, since, text = _status(journal, newest, positions, now, is_alive)
    run = [each for each in journal.batches if newest is not None and each.run_id == newest.run_id]
    # another query may have used the application.id before
    of_query = [each for each in journal.batches if newest is not None and each.query_id == newest.query_id]
    with_token = [each for each in journal.batches if each.sequence is not None]
    # nobody misses the token of a series of batch writes that is finished
    may_expire = with_token[-1:] if newest is not None and not is_series(newest.query_id) else []
    return QueryView(
        application_id=journal.application_id,
        query_id=newest.query_id if newest is not None else "",
        run_id=newest.run_id if newest is not None else "",
        at=now,
        status=status,
        status_since=since,
        status_text=text,
        read_per_second=_rate(run, "offsets_read", now),
        records_per_second=_rate(run, "records", now),
        lag=_lag(journal.sources, positions, now),
        sources=tuple(each.name for each in journal.sources),
        batches=tuple(map(_batch, of_query[-_MOST_BATCHES:])),
        totals=newest.totals if newest is not None else {},
        totals_since=newest.totals_since if newest is not None else None,
        sinks=newest.sink_totals if newest is not None else {},
        token_at=may_expire[-1].ended_at if may_expire else None,
        sequence=with_token[-1].sequence if with_token else None,
        pressure=newest.pressure if newest is not None else 0.0,
        processor_counts=newest.processor_counts if newest is not None else {},
        events=tuple(event for each in journal.batches for event in each.events)[-20:],
    )


def usual_longest(batches: Sequence[BatchView]) -> float:
    """Returns the duration to scale bars by, in seconds, so that one slow batch does not hide the others."""
    durations = sorted(each.total_seconds for each in batches)
    if not durations:
        return 1.0
    usual = durations[int(_MOST_FIT * (len(durations) - 1))]
    return max(_SHORTEST_SECONDS, min(durations[-1], _ROOM * usual))


def _status(
    journal: QueryJournal,
    newest: BatchFigures | None,
    positions: set[str],
    now: float,
    is_alive: Callable[[ProcessId], bool],
) -> tuple[Status, float | None, str]:
    """Returns the status, since when it holds, and a text."""
    waiting = journal.waiting
    is_current = waiting is not None and (newest is None or waiting.at > newest.ended_at)
    if waiting is not None and is_current and is_alive(waiting.writer.process):
        return _of_commit(waiting)
    live = [
        each
        for each in journal.sources
        if each.state is not SourceState.STOPPED and is_alive(each.writer.process)
    ]
    last_seen = max((each.at for each in journal.sources), default=0.0)
    if not live and journal.sources:
        if newest is not None and newest.outcome is Outcome.FAILED:
            return Status.FAILED, newest.ended_at, newest.error
        return Status.STOPPED, max(last_seen, newest.ended_at if newest is not None else 0.0), ""
    if not live:
        return _without_source(newest, now, is_alive)
    asking = [each for each in live if each.state is SourceState.ASKING]
    if asking:
        text = f"brokers do not answer the source: {asking[0].reason}".rstrip(": ")
        return Status.WAITING, min(each.state_since for each in asking), text
    planned = [
        each
        for each in live
        if each.state is SourceState.PLANNED and position_id(each.planned) not in positions
    ]
    if planned:
        since = min(each.state_since for each in planned)
        if newest is not None and newest.outcome is Outcome.FAILED and newest.ended_at > since:
            return Status.FAILED, newest.ended_at, newest.error
        seconds = now - since
        text = (
            f"Spark has run the tasks of a micro-batch for {seconds:.0f} s" if seconds > _LONG_SECONDS else ""
        )
        return Status.RUNNING, since, text
    reasons = [each for each in live if each.reason]
    if reasons:
        return Status.WAITING, min(each.state_since for each in reasons), reasons[0].reason
    if newest is not None and now - newest.ended_at < 1.0:
        return Status.RUNNING, None, ""
    since = max(max(each.state_since for each in live), newest.ended_at if newest is not None else 0.0)
    return Status.IDLE, since, ""


def _of_commit(waiting: WaitingCommit) -> tuple[Status, float, str]:
    steps = {step.value: step for step in Step}
    doing = steps[waiting.step].doing if waiting.step in steps else waiting.step
    text = f"batch {waiting.batch_id}: {doing}" + (f" ({waiting.reason})" if waiting.reason else "")
    if waiting.retried or waiting.step == Step.LOST.value:
        return Status.RETRYING, waiting.began_at, text
    return Status.WAITING, waiting.step_since, text


def _without_source(
    newest: BatchFigures | None, now: float, is_alive: Callable[[ProcessId], bool]
) -> tuple[Status, float | None, str]:
    """Returns the status of a query that reads no Kafka source of this package, or is not on this host."""
    if newest is None:
        return Status.STOPPED, None, ""
    if newest.outcome is Outcome.FAILED:
        return Status.FAILED, newest.ended_at, newest.error
    if not is_alive(newest.writer.driver):
        return Status.STOPPED, newest.ended_at, ""
    if now - newest.ended_at < _RUNNING_SECONDS:
        return Status.RUNNING, None, ""
    return Status.IDLE, newest.ended_at, ""


def _rate(run: Sequence[BatchFigures], name: str, now: float) -> float:
    """Returns how much was counted per second over the last minute of a run."""
    if not run:
        return 0.0
    before = [each for each in run if each.ended_at < now - RATE_SECONDS]
    base = (
        before[-1].totals.get(name, 0) if before else run[0].totals.get(name, 0) - run[0].counts.get(name, 0)
    )
    # a run that is younger than a minute is measured from its first batch
    begin = now - RATE_SECONDS if before else min(run[0].began_at - run[0].seconds.get("tasks", 0.0), now)
    return max(0, run[-1].totals.get(name, 0) - base) / max(1.0, now - begin)


def _lag(sources: Sequence[SourceFigures], positions: set[str], now: float) -> dict[str, TopicLag]:
    found: dict[str, TopicLag] = {}
    for source in sources:
        is_done = bool(source.planned) and position_id(source.planned) in positions
        committed: Offsets = source.planned if is_done else source.start
        partitions: dict[str, dict[int, int]] = {}
        for tp, end in source.latest.items():
            behind = max(0, end - committed.get(tp, end))
            partitions.setdefault(tp.topic, {})[tp.partition] = behind
        for topic, each in partitions.items():
            offsets = sum(each.values())
            since = source.behind_since.get(topic) if offsets else None
            found[topic] = TopicLag(
                offsets,
                0.0 if since is None else max(0.0, now - since),
                since is not None and topic in source.behind_at_least,
                each,
            )
    return found


def _batch(figures: BatchFigures) -> BatchView:
    return BatchView(
        batch_id=figures.batch_id,
        outcome=figures.outcome,
        ended_at=figures.ended_at,
        seconds=by_group(figures.seconds),
        offsets_read=figures.counts.get("offsets_read", 0),
        records=figures.counts.get("records", 0),
        changes=figures.counts.get("changes", 0),
        retried=figures.counts.get("retried", 0),
    )


def _iso(at: float) -> str:
    return datetime.fromtimestamp(at, timezone.utc).isoformat(timespec="milliseconds")
