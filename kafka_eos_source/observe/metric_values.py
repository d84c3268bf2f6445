"""Computes the values of the metrics from the figures of one query. Pure functions."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass

from kafka_eos_source import errors
from kafka_eos_source.observe.figures import BatchFigures, Outcome
from kafka_eos_source.observe.journal import QueryJournal
from kafka_eos_source.observe.process import ProcessId
from kafka_eos_source.observe.source_figures import SourceState
from kafka_eos_source.observe.steps import Step
from kafka_eos_source.observe.view import QueryView, Status, view

_CONDITION = re.compile(r"^\[(KAFKA_EOS[A-Z_.]*)\]")

#: The values of a metric: one per combination of labels, in the order of `metrics.Metric.labels`.
Values = Iterator[tuple[tuple[str, ...], float]]


@dataclass(frozen=True)
class Query:
    """What one query looks like at the moment of a scrape.

    Attributes:
        journal: everything that this host knows about the query.
        view: what that means now.
    """

    journal: QueryJournal
    view: QueryView

    @property
    def newest(self) -> BatchFigures | None:
        """The newest micro-batch; None if there is none."""
        return self.journal.batches[-1] if self.journal.batches else None


def query_of(
    journal: QueryJournal, now: float, is_alive: Callable[[ProcessId], bool] = ProcessId.is_alive
) -> Query:
    """Returns what a query looks like at a time, in seconds since 1970."""
    return Query(journal, view(journal, now, is_alive))


def total(*names: str) -> Callable[[Query], Values]:
    """Returns a function that yields the total of a count over this run."""

    def values(query: Query) -> Values:
        for name in names:
            if query.view.totals:
                yield (), query.view.totals.get(name, 0)

    return values


def totals(labels: Mapping[str, str]) -> Callable[[Query], Values]:
    """Returns a function that yields totals: by the value of the label, the name of the count."""

    def values(query: Query) -> Values:
        if query.view.totals:
            for label, name in labels.items():
                yield (label,), query.view.totals.get(name, 0)

    return values


def batches(query: Query) -> Values:
    """Yields the number of micro-batches by outcome."""
    totals = query.view.totals
    if totals:
        skipped, failed = totals.get("skipped", 0), totals.get("failed", 0)
        yield (Outcome.COMMITTED.value,), totals.get("batches", 0) - skipped - failed
        yield (Outcome.SKIPPED.value,), skipped
        yield (Outcome.FAILED.value,), failed


def sink(name: str) -> Callable[[Query], Values]:
    """Returns a function that yields one sum per sink."""

    def values(query: Query) -> Values:
        for sink, counts in query.view.sinks.items():
            yield (sink,), counts.get(name, 0)

    return values


def sink_transactions(query: Query) -> Values:
    """Yields the number of transactions of each sink by outcome."""
    for sink, counts in query.view.sinks.items():
        for outcome in ("prepared", "committed", "aborted", "recovered"):
            yield (sink, outcome), counts.get(outcome, 0)


def topic(name: str) -> Callable[[Query], Values]:
    """Returns a function that yields one sum per output topic."""

    def values(query: Query) -> Values:
        for topic, counts in query.newest.topic_totals.items() if query.newest is not None else ():
            yield (topic,), counts.get(name, 0)

    return values


def gauges(labels: Mapping[str, str]) -> Callable[[Query], Values]:
    """Returns a function that yields numbers of the newest batch: by the label's value, their names.

    An empty value stands for no label.
    """

    def values(query: Query) -> Values:
        for label, name in labels.items():
            if query.newest is not None and name in query.newest.gauges:
                yield (label,) if label else (), query.newest.gauges[name]

    return values


def milliseconds(name: str) -> Callable[[Query], Values]:
    """Returns a function that yields a total of milliseconds, in seconds."""

    def values(query: Query) -> Values:
        if name in query.view.totals:
            yield (), query.view.totals[name] / 1000

    return values


def held_back(query: Query) -> Values:
    """Yields how long a committed micro-batch has been waiting for a sink."""
    waiting = query.journal.waiting
    if query.newest is None and waiting is None:
        return
    is_held = (
        waiting is not None
        and waiting.step == Step.FINISH.value
        and query.view.status in (Status.WAITING, Status.RETRYING)
    )
    yield (), max(0.0, query.view.at - waiting.step_since) if is_held and waiting is not None else 0.0


def lag(query: Query) -> Values:
    """Yields the offsets behind, per partition."""
    for topic, lag in query.view.lag.items():
        for partition, offsets in lag.partitions.items():
            yield (topic, str(partition)), offsets


def lag_seconds(query: Query) -> Values:
    """Yields the age of the oldest record that is not committed, per topic."""
    for topic, lag in query.view.lag.items():
        yield (topic,), lag.seconds


def status(query: Query) -> Values:
    """Yields 1 for the present status and 0 for the others."""
    for status in Status:
        if status is not Status.ELSEWHERE:
            yield (status.value.replace(" ", "_"),), float(query.view.status is status)


def standstill(query: Query) -> Values:
    """Yields how long the query has had something to do and has committed nothing."""
    shown = query.view
    stopped = shown.status in (Status.STOPPED, Status.FAILED)
    begins = [each.at for each in query.journal.sources] if not shown.batches else []
    done = max(
        (each.ended_at for each in query.journal.batches if each.outcome is not Outcome.FAILED), default=0.0
    )
    behind = max((each.seconds for each in shown.lag.values()), default=0.0)
    waiting = query.journal.waiting
    if shown.status in (Status.WAITING, Status.RETRYING) and waiting is not None:
        behind = max(behind, shown.at - waiting.began_at)
    if stopped or not (query.journal.batches or begins or waiting):
        yield (), 0.0
        return
    yield (), max(0.0, min(behind, shown.at - done)) if done else behind


def failed(query: Query) -> Values:
    """Yields 1 if the newest run has failed, with the error's condition and who acts."""
    if query.view.status is Status.FAILED:
        found = _CONDITION.match(query.view.status_text)
        condition = found[1] if found else "unknown"
        yield (condition, action_of(condition)), 1.0


def action_of(condition: str) -> str:
    """Returns who acts on an error: ``operator``, ``restart``, ``retry``; ``unknown`` for foreign errors."""
    for base, action in (
        (errors.OperatorError, "operator"),
        (errors.RestartQueryError, "restart"),
        (errors.KafkaEosError, "retry"),
    ):
        if condition in {each.condition for each in _with_subclasses(base)}:
            return action
    return "unknown"


def _with_subclasses(base: type[errors.KafkaEosError]) -> Iterable[type[errors.KafkaEosError]]:
    yield base
    for each in base.__subclasses__():
        yield from _with_subclasses(each)


def hidden(query: Query) -> Values:
    """Yields how long an open transaction has hidden records from the query's sources."""
    if query.journal.sources:
        since = [
            each.hidden_since
            for each in query.journal.sources
            if each.hidden_since is not None and each.state is not SourceState.STOPPED
        ]
        is_over = query.view.status in (Status.STOPPED, Status.FAILED)
        yield (), max(0.0, query.view.at - min(since)) if since and not is_over else 0.0


def steps(query: Query) -> Values:
    """Yields the duration of each step of the newest micro-batch."""
    if query.newest is not None:
        for step, seconds in query.newest.seconds.items():
            yield (step,), seconds


def step_totals(query: Query) -> Values:
    """Yields the time spent in each step, summed over the micro-batches of this run."""
    if query.newest is not None:
        for step, seconds in query.newest.total_seconds.items():
            yield (step,), seconds


def runs(query: Query) -> Values:
    """Yields how many runs of the query the journal has seen."""
    if query.newest is not None:
        yield (), query.newest.runs


def token_expiry(query: Query) -> Values:
    """Yields how long Kafka still keeps the newest token if nothing is committed."""
    kept = [each.retention_seconds for each in query.journal.sources if each.retention_seconds is not None]
    if kept and query.view.token_at is not None:
        yield (), min(kept) - max(0.0, query.view.at - query.view.token_at)


def state(name: str) -> Callable[[Query], Values]:
    """Returns a function that yields what the shards of each operator measured."""

    def values(query: Query) -> Values:
        for operator, measured in query.newest.state.items() if query.newest is not None else ():
            yield (operator,), measured.get(name, 0)

    return values


def restore_seconds(query: Query) -> Values:
    """Yields the time that shards spent on restores."""
    if query.view.totals.get("shards"):
        yield (), query.view.totals.get("restore_ms", 0) / 1000


def batch_end(query: Query) -> Values:
    """Yields when the newest micro-batch ended."""
    if query.newest is not None:
        yield (), query.newest.ended_at


def run_start(query: Query) -> Values:
    """Yields when the first micro-batch of this run began."""
    if query.view.totals_since is not None:
        yield (), query.view.totals_since


def batch_duration(query: Query) -> Values:
    """Yields the duration of the newest micro-batch."""
    if query.newest is not None:
        yield (), sum(query.newest.seconds.values())


def token_age(query: Query) -> Values:
    """Yields the time since the newest token was committed."""
    if query.view.token_at is not None:
        yield (), max(0.0, query.view.at - query.view.token_at)


def token_sequence(query: Query) -> Values:
    """Yields the sequence number of the newest token."""
    if query.view.sequence is not None:
        yield (), query.view.sequence


def pressure(query: Query) -> Values:
    """Yields the fraction of the limit that the fullest shard's uncommitted state takes."""
    if query.view.totals.get("shards"):
        yield (), query.view.pressure


def processor_counts(query: Query) -> Values:
    """Yields what stateful processors count."""
    for name, number in query.view.processor_counts.items():
        yield (name,), number
