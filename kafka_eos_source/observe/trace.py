"""Measures one micro-batch while it is committed: durations by step, numbers, and what happened.

The commit tells its trace where it is; that costs microseconds. At the end the trace makes one `BatchFigures`
and passes it to its observers. A thread of the process looks at running traces once per second. If one stands
still in a step, the observers learn which step that is and why, so that others can see what a query waits
for. Observers may fail or be slow to answer questions of their own: no error of theirs reaches the commit.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from statistics import median
from typing import Protocol

from kafka_eos_source.model import TaskFigures
from kafka_eos_source.observe.background import guarded
from kafka_eos_source.observe.figures import (
    BatchFigures,
    Event,
    EventKind,
    Outcome,
    SourceRead,
    Step,
    WaitingCommit,
    bounded,
    summed,
)
from kafka_eos_source.observe.lines import this_writer
from kafka_eos_source.runtime.json_input import parse_json

#: A commit that has been in one step for this long counts as one that stands still.
SLOW_SECONDS = 1.0
#: Most events of one commit that are kept. The counts include all.
_MOST_EVENTS = 20
_LONGEST_TEXT = 300
#: Most traces of records that the span of a batch is linked to.
_MOST_LINKS = 16
#: The watching thread waits for the next commit this long before it sleeps until it is woken.
_WATCHES_FOR_SECONDS = 30.0


class Observer(Protocol):
    """Receives what a trace measures."""

    def finished(self, figures: BatchFigures) -> None:
        """Receives the figures of a micro-batch whose commit has ended."""

    def waits(self, commit: WaitingCommit) -> None:
        """Receives, about once per second, that a commit stands still. Called by another thread."""

    def proceeds(self) -> None:
        """Learns that the commit of the last `waits` has ended."""


@dataclass(frozen=True)
class Subject:
    """The micro-batch that is measured.

    Attributes:
        application_id: the transactional id.
        query_id, run_id, batch_id: Spark's ids.
    """

    application_id: str
    query_id: str
    run_id: str
    batch_id: int


@dataclass
class SinkCounts:
    """Figures of one sink in one micro-batch; see `BatchFigures.sinks`."""

    rows: int = 0
    prepared: int = 0
    committed: int = 0
    aborted: int = 0
    recovered: int = 0
    retries: int = 0
    prepare_seconds: float = 0.0
    commit_seconds: float = 0.0
    held_back_seconds: float = 0.0


@dataclass(frozen=True)
class _Now:
    """The present step. One object, so that another thread reads a consistent state."""

    step: Step
    since: float
    reason: str = ""


@dataclass
class _Outcome:
    sequence: int | None = None
    pressure: float = 0.0
    processor_counts: Mapping[str, int] = field(default_factory=dict)
    state: Mapping[str, Mapping[str, float]] = field(default_factory=dict)
    topics: Mapping[str, Mapping[str, float]] = field(default_factory=dict)
    links: tuple[str, ...] = ()


class Trace:
    """The figures of one micro-batch while it is committed. Used by one thread.

    Args:
        observers: receive the figures. Without observers, nothing leaves the trace.
        clock: returns seconds of a monotonic clock.
        wall_clock: returns seconds since 1970.
    """

    def __init__(
        self,
        observers: Sequence[Observer] = (),
        clock: Callable[[], float] = time.monotonic,
        wall_clock: Callable[[], float] = time.time,
    ) -> None:
        self._observers = observers
        self._clock = clock
        self._wall_clock = wall_clock
        self._began = clock()
        self._began_at = wall_clock()
        self._now = _Now(Step.VERIFY, self._began)
        self._seconds: dict[str, float] = {}
        self._counts: dict[str, int] = {}
        self._gauges: dict[str, float] = {}
        self._sinks: dict[str, SinkCounts] = {}
        self._events: list[Event] = []
        self._outcome = _Outcome()
        self._subject: Subject | None = None
        self._planned_at: float | None = None
        self._sources: tuple[SourceRead, ...] = ()
        self._complaint: Callable[[], str] | None = None
        self._lock = threading.Lock()  # between the watching thread and the end of the commit
        self._has_ended = False
        self._told_to_wait = False

    # -- what the commit reports -------------------------------------------------------------------

    def begin(self, subject: Subject) -> None:
        """Names the micro-batch, after which observers may learn about it."""
        self._subject = subject
        if self._observers:
            guarded(partial(_watch.add, self))

    def planned(self, at: float | None, sources: tuple[SourceRead, ...]) -> None:
        """Adds when Spark planned the batch, and what the batch reads.

        Args:
            at: seconds since 1970; None if that is not known, or if an earlier run planned the batch.
            sources: what the batch reads.
        """
        self._planned_at, self._sources = at, sources

    def enter(self, step: Step) -> None:
        """Ends the present step, and enters another one."""
        now, present = self._clock(), self._now
        self._add(present.step, now - present.since)
        self._now = _Now(step, now)

    def count(self, **numbers: int) -> None:
        """Adds to the numbers of the batch; `BatchFigures.counts` lists the names."""
        for name, more in numbers.items():
            self._counts[name] = self._counts.get(name, 0) + more

    def gauge(self, **numbers: float) -> None:
        """Sets numbers of the batch that are not summed; `BatchFigures.gauges` lists the names."""
        self._gauges.update(numbers)

    def tasks(self, measured: Sequence[TaskFigures]) -> None:
        """Adds what the writing tasks measured.

        Args:
            measured: one per task, and one per part with dead letters.
        """
        topics: dict[str, dict[str, float]] = {}
        for each in measured:
            for topic, (records, size) in each.topics.items():
                topics[topic] = summed(topics.get(topic, {}), {"records": records, "bytes": size})
        self._outcome.topics = topics
        self._outcome.links = tuple(each.traceparent for each in measured if each.traceparent)[:_MOST_LINKS]
        durations = [each.seconds for each in measured if each.seconds]
        self.count(staging_ms=round(1000 * sum(each.staging_seconds for each in measured)))
        if durations:
            self.gauge(
                tasks=len(durations),
                median_task_seconds=median(durations),
                longest_task_seconds=max(durations),
            )

    def sink(self, name: str) -> SinkCounts:
        """Returns the figures of a sink outside Kafka, for the caller to change."""
        return self._sinks.setdefault(name, SinkCounts())

    def committed(self, sequence: int) -> None:
        """Counts a transaction that Kafka has committed, with the sequence number of its token."""
        self._outcome.sequence = sequence
        self.count(committed=1)

    def state(
        self,
        pressure: float,
        processor_counts: Mapping[str, int],
        operators: Mapping[str, Mapping[str, float]],
    ) -> None:
        """Adds what the shards of stateful operators reported; see the attributes of `BatchFigures`.

        Args:
            pressure: of the fullest shard.
            processor_counts: sums over all shards.
            operators: `BatchFigures.state`.
        """
        self._outcome.pressure, self._outcome.processor_counts = pressure, processor_counts
        self._outcome.state = operators

    def happened(self, kind: EventKind, text: str) -> None:
        """Counts an event, and keeps its text (which must not hold secrets).

        A commit that is retried for hours keeps its first and its newest events.
        """
        if kind is not EventKind.HELD_BACK:
            self.count(**{kind.value: 1})
        if len(self._events) == _MOST_EVENTS:
            del self._events[_MOST_EVENTS // 2]
        self._events.append(Event(self._wall_clock(), kind, text[:_LONGEST_TEXT]))

    def waiting(self, reason: str) -> None:
        """Names the reason why the present step takes long. The next step has none."""
        now = self._now
        self._now = _Now(now.step, now.since, reason[:_LONGEST_TEXT])

    def explained_by(self, complaint: Callable[[], str]) -> None:
        """Names a function that returns why a step without a reason may take long; "" if it does not know.

        The watching thread calls it.
        """
        self._complaint = complaint

    def finish(self, outcome: Outcome, error: str = "") -> None:
        """Ends the trace, and passes the figures to its observers. Does not raise."""
        self.enter(self._now.step)
        with self._lock:
            self._has_ended = True
        _watch.remove(self)
        if self._subject is None:
            return
        figures = guarded(partial(self._figures, self._subject, outcome, error))
        for observer in self._observers:
            if figures is not None:
                guarded(partial(observer.finished, figures))
            if self._told_to_wait:
                guarded(lambda observer=observer: observer.proceeds())  # type: ignore[misc]

    # -- what the watching thread does -------------------------------------------------------------

    def report_if_slow(self) -> None:
        """Tells the observers if the commit stands still."""
        now, subject = self._now, self._subject
        in_step = self._clock() - now.since
        if subject is None or in_step < SLOW_SECONDS:
            return
        reason = now.reason
        if not reason and self._complaint is not None:
            reason = self._complaint()[:_LONGEST_TEXT]
        events = tuple(self._events)
        if not reason and events:
            reason = events[-1].text
        at = self._wall_clock()
        commit = WaitingCommit(
            subject.application_id,
            subject.query_id,
            subject.run_id,
            subject.batch_id,
            at,
            self._began_at,
            now.step.value,
            at - in_step,
            reason,
            self._counts.get("retried", 0),
            this_writer(),
        )
        with self._lock:
            if not self._has_ended:
                self._told_to_wait = True
                for each in self._observers:
                    each.waits(commit)

    # -- inside ------------------------------------------------------------------------------------

    def _add(self, step: Step, seconds: float) -> None:
        self._seconds[step.value] = self._seconds.get(step.value, 0.0) + seconds

    def _figures(self, subject: Subject, outcome: Outcome, error: str) -> BatchFigures:
        seconds, counts = dict(self._seconds), dict(self._counts)
        if outcome is Outcome.COMMITTED:
            counts["offsets_read"] = sum(sum(each.offsets.values()) for each in self._sources)
        is_replay = outcome is Outcome.SKIPPED  # Spark planned it in an earlier run
        if self._planned_at is not None and self._planned_at <= self._began_at and not is_replay:
            seconds = {Step.TASKS.value: self._began_at - self._planned_at, **seconds}
        return BatchFigures(
            application_id=subject.application_id,
            query_id=subject.query_id,
            run_id=subject.run_id,
            batch_id=subject.batch_id,
            outcome=outcome,
            began_at=self._began_at,
            ended_at=self._began_at + self._clock() - self._began,
            seconds=seconds,
            counts=counts,
            writer=this_writer(),
            sinks={name: _set(each) for name, each in self._sinks.items()},
            sources=self._sources,
            sequence=self._outcome.sequence,
            pressure=self._outcome.pressure,
            processor_counts=self._outcome.processor_counts,
            state=self._outcome.state,
            gauges=dict(self._gauges),
            topics=self._outcome.topics,
            links=self._outcome.links,
            events=tuple(self._events),
            error=error[:_LONGEST_TEXT],
        )


@contextmanager
def traced(trace: Trace, concealed: Callable[[str], str]) -> Iterator[None]:
    """Ends the trace as failed if the block raises; the block itself ends it otherwise.

    Args:
        trace: the trace.
        concealed: removes secrets from a text.
    """
    try:
        yield
    except BaseException as error:
        trace.finish(Outcome.FAILED, concealed(str(error)) or type(error).__name__)
        raise


def _set(counts: SinkCounts) -> dict[str, float]:
    return {name: value for name, value in vars(counts).items() if value}


class _Watch:
    """The thread that looks at the running traces of this process once per second."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._running: set[Trace] = set()
        self._pid = 0
        self._sleeps = False

    def add(self, trace: Trace) -> None:
        """Watches a trace until `remove`."""
        with self._changed:
            self._running.add(trace)
            if self._pid != os.getpid():  # the first trace, or a fork, which has no threads
                self._running, self._sleeps = {trace}, False
                # raises if the process may not have another thread; the next commit tries again
                threading.Thread(target=self._watch, name="kafka-eos-observe", daemon=True).start()
                self._pid = os.getpid()
            elif self._sleeps:
                self._changed.notify()

    def remove(self, trace: Trace) -> None:
        """Ends watching a trace."""
        with self._changed:
            self._running.discard(trace)

    def _watch(self) -> None:
        idle_since = time.monotonic()
        while True:
            with self._changed:
                self._changed.wait(SLOW_SECONDS)
                if self._running:
                    idle_since = time.monotonic()
                elif time.monotonic() - idle_since > _WATCHES_FOR_SECONDS:
                    self._sleeps = True
                    while not self._running:
                        self._changed.wait()
                    self._sleeps = False
                running = tuple(self._running)
            for trace in running:
                guarded(trace.report_if_slow)


_watch = _Watch()


def _replace_watch() -> None:
    """Gives a fork its own watch: another thread may have held the lock of the old one."""
    global _watch
    _watch = _Watch()


os.register_at_fork(after_in_child=_replace_watch)


# -- the log of micro-batches ----------------------------------------------------------------------

_log = logging.getLogger("kafka_eos_source.batches")


class BatchLog:
    """Logs each micro-batch whose commit has ended: an `Observer`."""

    def finished(self, figures: BatchFigures) -> None:
        """Logs the figures at level INFO, or WARNING if the commit failed."""
        level = logging.WARNING if figures.error else logging.INFO
        text = f"batch {figures.batch_id} of {figures.application_id}: {figures.outcome.value}"
        figures = replace(figures, topics=bounded(figures.topics))
        _log.log(level, text, extra={"batch": parse_json(figures.to_json())})

    def waits(self, commit: WaitingCommit) -> None:
        """Ignores that a commit stands still; `Journal` writes it down."""

    def proceeds(self) -> None:
        """Ignores the end of that."""
