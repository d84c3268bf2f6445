"""Every metric, declared once: name, type, unit, labels, meaning, and how it follows from the figures.

Prometheus, OpenTelemetry and ``docs/metrics.md`` are made from this table. Names follow the rules of
OpenTelemetry: words are separated by dots, units are not part of the name, and Kafka's topics and partitions
are the attributes ``messaging.destination.name`` and ``messaging.destination.partition.id``.

``python -m kafka_eos_source.observe.metrics`` writes the table of ``docs/metrics.md``.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from enum import Enum
from pathlib import Path

from kafka_eos_source import errors
from kafka_eos_source.observe.figures import (
    MOST_TOPICS,
    OTHER_TOPICS,
    BatchFigures,
    Outcome,
    SourceState,
    Step,
)
from kafka_eos_source.observe.journal import QueryJournal
from kafka_eos_source.observe.lines import ProcessId
from kafka_eos_source.observe.view import QueryView, Status, view

_CONDITION = re.compile(r"^\[(KAFKA_EOS[A-Z_.]*)\]")

#: The values of a metric: one per combination of labels, in the order of `Metric.labels`.
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


# -- how values follow from the figures -------------------------------------------------------------


def number(what: Callable[[Query], float | None]) -> Callable[[Query], Values]:
    """Makes the values of a metric without labels: one number, or none where it is not known."""

    def values(query: Query) -> Values:
        found = what(query)
        if found is not None:
            yield (), found

    return values


def of_newest(what: Callable[[BatchFigures], float | None]) -> Callable[[Query], Values]:
    """Makes the values of a metric without labels from the newest micro-batch."""
    return number(lambda query: None if query.newest is None else what(query.newest))


def by_name(what: Callable[[Query], Mapping[str, float]]) -> Callable[[Query], Values]:
    """Makes the values of a metric with one label: a number per value of the label."""
    return lambda query: (((name,), found) for name, found in what(query).items())


def by_name_of_newest(what: Callable[[BatchFigures], Mapping[str, float]]) -> Callable[[Query], Values]:
    """Makes the values of a metric with one label from the newest micro-batch."""
    return by_name(lambda query: {} if query.newest is None else what(query.newest))


def total(name: str) -> Callable[[Query], Values]:
    """Makes the values of a metric that is a count, summed over this run."""
    return number(lambda query: query.view.totals.get(name, 0) if query.view.totals else None)


def gauge(name: str) -> Callable[[Query], Values]:
    """Makes the values of a metric that is one of `BatchFigures.gauges`."""
    return of_newest(lambda batch: batch.gauges.get(name))


def _task_seconds(batch: BatchFigures) -> Mapping[str, float]:
    names = {"median": "median_task_seconds", "longest": "longest_task_seconds"}
    return {label: batch.gauges[name] for label, name in names.items() if name in batch.gauges}


def _invalid(query: Query) -> Mapping[str, float]:
    totals = query.view.totals
    if not totals:
        return {}
    return {"dead_lettered": totals.get("dead_letters", 0), "dropped": totals.get("dropped", 0)}


def _transactions(query: Query) -> Mapping[str, float]:
    totals = query.view.totals
    if not totals:
        return {}
    outcomes = ("committed", "aborted", "retried", "fenced", "unknown")
    return {"begun": totals.get("transactions", 0), **{name: totals.get(name, 0) for name in outcomes}}


def _batches(query: Query) -> Mapping[str, float]:
    totals = query.view.totals
    if not totals:
        return {}
    skipped, failed = totals.get("skipped", 0), totals.get("failed", 0)
    return {
        Outcome.COMMITTED.value: totals.get("batches", 0) - skipped - failed,
        Outcome.SKIPPED.value: skipped,
        Outcome.FAILED.value: failed,
    }


def _sinks(name: str) -> Callable[[Query], Mapping[str, float]]:
    return lambda query: {sink: counts.get(name, 0) for sink, counts in query.view.sinks.items()}


def _sink_transactions(query: Query) -> Values:
    for sink, counts in query.view.sinks.items():
        for outcome in ("prepared", "committed", "aborted", "recovered"):
            yield (sink, outcome), counts.get(outcome, 0)


def _topics(name: str) -> Callable[[Query], Mapping[str, float]]:
    return lambda query: {
        topic: counts.get(name, 0)
        for topic, counts in (query.newest.topic_totals.items() if query.newest is not None else ())
    }


def _state(name: str) -> Callable[[Query], Mapping[str, float]]:
    return lambda query: {
        operator: measured.get(name, 0)
        for operator, measured in (query.newest.state.items() if query.newest is not None else ())
    }


def _staging_seconds(query: Query) -> float | None:
    totals = query.view.totals
    return totals["staging_ms"] / 1000 if "staging_ms" in totals else None


def _restore_seconds(query: Query) -> float | None:
    totals = query.view.totals
    return totals.get("restore_ms", 0) / 1000 if totals.get("shards") else None


def _pressure(query: Query) -> float | None:
    return query.view.pressure if query.view.totals.get("shards") else None


def _held_back(query: Query) -> float | None:
    waiting = query.journal.waiting
    if waiting is None:
        return None if query.newest is None else 0.0
    is_held = waiting.step == Step.FINISH.value and query.view.status in (
        Status.WAITING,
        Status.RETRYING,
    )
    return max(0.0, query.view.at - waiting.step_since) if is_held else 0.0


def _lag(query: Query) -> Values:
    for topic, lag in query.view.lag.items():
        for partition, offsets in lag.partitions.items():
            yield (topic, str(partition)), offsets


def _lag_seconds(query: Query) -> Mapping[str, float]:
    return {topic: lag.seconds for topic, lag in query.view.lag.items()}


def _status(query: Query) -> Mapping[str, float]:
    return {
        status.value.replace(" ", "_"): float(query.view.status is status)
        for status in Status
        if status is not Status.ELSEWHERE
    }


def _standstill(query: Query) -> float:
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
        return 0.0
    return max(0.0, min(behind, shown.at - done)) if done else behind


def _failed(query: Query) -> Values:
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


def _hidden(query: Query) -> float | None:
    if not query.journal.sources:
        return None
    since = [
        each.hidden_since
        for each in query.journal.sources
        if each.hidden_since is not None and each.state is not SourceState.STOPPED
    ]
    is_over = query.view.status in (Status.STOPPED, Status.FAILED)
    return max(0.0, query.view.at - min(since)) if since and not is_over else 0.0


def _token_age(query: Query) -> float | None:
    return None if query.view.token_at is None else max(0.0, query.view.at - query.view.token_at)


def _token_expiry(query: Query) -> float | None:
    kept = [each.retention_seconds for each in query.journal.sources if each.retention_seconds is not None]
    age = _token_age(query)
    return min(kept) - age if kept and age is not None else None


# -- the table -------------------------------------------------------------------------------------

#: The label that each metric has: the option ``application.id``.
APPLICATION = "kafka_eos.application.id"
TOPIC = "messaging.destination.name"
PARTITION = "messaging.destination.partition.id"


class Kind(Enum):
    """Type of a metric, with Prometheus's word for it."""

    COUNTER = "counter"  #: only grows within one run of the query; a new run begins at 0
    GAUGE = "gauge"


@dataclass(frozen=True)
class Metric:
    """One metric.

    Attributes:
        name: name after OpenTelemetry's rules.
        kind: its type.
        unit: unit after UCUM, such as ``s`` or ``{record}``.
        labels: names of its attributes, besides `APPLICATION`.
        values: computes its values.
        meaning: what it says, in one sentence.
    """

    name: str
    kind: Kind
    unit: str
    labels: tuple[str, ...]
    values: Callable[[Query], Values]
    meaning: str

    @property
    def prometheus_name(self) -> str:
        """Name after OpenTelemetry's rules for Prometheus: unit and ``_total`` are appended."""
        unit = {"s": "_seconds", "By": "_bytes", "1": "_ratio"}
        name = self.name.replace(".", "_") + unit.get(self.unit, "")
        return name + "_total" if self.kind is Kind.COUNTER else name


_C, _G = Kind.COUNTER, Kind.GAUGE

# fmt: off
METRICS: tuple[Metric, ...] = (
    # the query
    Metric("kafka_eos.query.status", _G, "", ("status",), by_name(_status),
           "1 for the present status of the query, 0 for the others."),
    Metric("kafka_eos.query.failed", _G, "", ("condition", "action"), _failed,
           "1 while the newest run has ended with an error. `action` says who acts: `operator`, `restart`, `retry`, or `unknown` for errors of others."),
    Metric("kafka_eos.query.standstill", _G, "s", (), number(_standstill),
           "How long the query has had something to do and has committed nothing. 0 if it has stopped."),
    Metric("kafka_eos.query.run.start.time", _G, "s", (), number(lambda query: query.view.totals_since),
           "When the first micro-batch of the present run began, in seconds since 1970. It changes with each restart."),
    Metric("kafka_eos.query.runs", _C, "{run}", (), of_newest(lambda batch: batch.runs),
           "Runs of the query that have reached a commit, since this host knows the query."),
    # the source
    Metric("kafka_eos.source.offsets", _C, "{offset}", (), total("offsets_read"),
           "Offsets that committed micro-batches read: records, control records and aborted records."),
    Metric("kafka_eos.source.lag", _G, "{offset}", (TOPIC, PARTITION), _lag,
           "Offsets between the last committed micro-batch and what readers can read; `records-lag` of Kafka Streams."),
    Metric("kafka_eos.source.lag.time", _G, "s", (TOPIC,), by_name(_lag_seconds),
           "How long ago the oldest record that is not committed yet became available. 0 if there is none."),
    Metric("kafka_eos.source.hidden.time", _G, "s", (), number(_hidden),
           "How long the source has seen that an open transaction of another producer hides records."),
    # micro-batches
    Metric("kafka_eos.batches", _C, "{batch}", ("outcome",), by_name(_batches),
           "Micro-batches by outcome: `committed`, `skipped` (Kafka already held them), `failed`."),
    Metric("kafka_eos.batch.duration", _G, "s", (), of_newest(lambda batch: sum(batch.seconds.values())),
           "Duration of the newest micro-batch, from its plan to the end of its commit."),
    Metric("kafka_eos.batch.step.duration", _G, "s", ("step",), by_name_of_newest(lambda batch: batch.seconds),
           "Duration of each step of the newest micro-batch. Steps do not overlap."),
    Metric("kafka_eos.batch.step.time", _C, "s", ("step",), by_name_of_newest(lambda batch: batch.total_seconds),
           "Time spent in each step, summed over the micro-batches of the run."),
    Metric("kafka_eos.batch.end.time", _G, "s", (), of_newest(lambda batch: batch.ended_at),
           "When the newest micro-batch ended, in seconds since 1970."),
    Metric("kafka_eos.batch.staged", _C, "By", (), total("staged_bytes"),
           "Size of the rows that tasks staged for commits."),
    Metric("kafka_eos.batch.staging.time", _C, "s", (), number(_staging_seconds),
           "Time that writing tasks spent on staging rows, summed over the tasks."),
    Metric("kafka_eos.batch.tasks", _G, "{task}", (), gauge("tasks"),
           "Writing tasks of the newest micro-batch, also those without rows."),
    Metric("kafka_eos.batch.task.duration", _G, "s", ("statistic",), by_name_of_newest(_task_seconds),
           "How long these tasks took, reading included: `median` and `longest`. If they differ much, the input is skewed."),
    # transactions
    Metric("messaging.client.sent.messages", _C, "{message}", (), total("records"),
           "Records written to output topics by committed transactions, and by tasks with `at_least_once`."),
    Metric("kafka_eos.topic.sent.records", _C, "{record}", (TOPIC,), by_name(_topics("records")),
           f"These records per output topic, and those of the dead-letter topic. From the {MOST_TOPICS + 1}st topic of a run on, they are counted as `{OTHER_TOPICS}`."),
    Metric("kafka_eos.topic.sent.size", _C, "By", (TOPIC,), by_name(_topics("bytes")),
           "Size of the keys and values of these records."),
    Metric("kafka_eos.producer.queue", _G, "{message}", (), gauge("queued_messages"),
           "Most records that waited in the client of the committing producer in the newest micro-batch. If that is `kafka.queue.buffering.max.messages`, brokers are slower than the query."),
    Metric("kafka_eos.invalid.records", _C, "{record}", ("action",), by_name(_invalid),
           "Invalid rows by what became of them: `dead_lettered` or `dropped`; `dropped-records-total` of Kafka Streams."),
    Metric("kafka_eos.sent.size", _C, "By", (), total("bytes"),
           "Size of the committed records and state changes as Arrow columns, before the client compresses them."),
    Metric("kafka_eos.transactions", _C, "{transaction}", ("outcome",), by_name(_transactions),
           "Transactions `begun`, `committed` and `aborted`, and commits `retried`, of these `fenced` and of `unknown` outcome."),
    Metric("kafka_eos.token.age", _G, "s", (), number(_token_age),
           "Time since the newest token was committed. Kafka deletes it after `offsets.retention.minutes` without a commit."),
    Metric("kafka_eos.token.sequence", _G, "", (), number(lambda query: query.view.sequence),
           "Sequence number of the newest token."),
    Metric("kafka_eos.token.expiry", _G, "s", (), number(_token_expiry),
           "How long Kafka still keeps the newest token if nothing is committed (`offsets.retention.minutes`). An idle source asks the brokers for it."),
    # state
    Metric("kafka_eos.state.keys", _G, "{key}", ("operator",), by_name(_state("keys")),
           "Keys in the state of an operator, as RocksDB estimates them; `num-keys` of Kafka Streams. The operator is named by its changelog topic."),
    Metric("kafka_eos.state.size", _G, "By", ("operator",), by_name(_state("bytes")),
           "Size of the state of an operator on disk and in memory."),
    Metric("kafka_eos.state.uncommitted.size", _G, "By", ("operator",), by_name(_state("uncommitted_bytes")),
           "Size of the state changes of the newest micro-batch."),
    Metric("kafka_eos.state.spilled.size", _G, "By", ("operator",), by_name(_state("spilled_bytes")),
           "State changes of the newest micro-batch that went to disk, because they did not fit into memory."),
    Metric("kafka_eos.state.restores", _C, "{shard}", (), total("restores"),
           "Shards that were restored from their changelog."),
    Metric("kafka_eos.state.restored.records", _C, "{record}", (), total("restored_records"),
           "Records that restores read; `restore-total` of Kafka Streams."),
    Metric("kafka_eos.state.restore.duration", _C, "s", (), number(_restore_seconds),
           "Time that shards spent on restores."),
    Metric("kafka_eos.state.changelog.records", _C, "{record}", (), total("changes"),
           "Records written to changelog topics."),
    Metric("kafka_eos.state.uncommitted", _G, "1", (), number(_pressure),
           "Uncommitted state of the fullest shard as a fraction of its limit."),
    Metric("kafka_eos.state.processor.rows", _C, "{row}", ("name",), by_name(lambda query: query.view.processor_counts),
           "What stateful processors count over all micro-batches, such as `late_rows`; `dropped-records-total` of Kafka Streams."),
    # sinks outside Kafka
    Metric("kafka_eos.sink.rows", _C, "{row}", ("sink",), by_name(_sinks("rows")),
           "Rows that the sink took."),
    Metric("kafka_eos.sink.transactions", _C, "{transaction}", ("sink", "outcome"), _sink_transactions,
           "Transactions of the sink: `prepared`, `committed`, `aborted`, and `recovered` (left prepared by an earlier process)."),
    Metric("kafka_eos.sink.retries", _C, "{call}", ("sink",), by_name(_sinks("retries")),
           "Calls of the sink that were repeated."),
    Metric("kafka_eos.sink.prepare.duration", _C, "s", ("sink",), by_name(_sinks("prepare_seconds")),
           "Time spent in the sink's `prepare`."),
    Metric("kafka_eos.sink.commit.duration", _C, "s", ("sink",), by_name(_sinks("commit_seconds")),
           "Time spent in the sink's `commit`."),
    Metric("kafka_eos.sink.held_back.duration", _C, "s", ("sink",), by_name(_sinks("held_back_seconds")),
           "How long Kafka had committed when the sink did, summed over micro-batches."),
    Metric("kafka_eos.sink.held_back.time", _G, "s", (), number(_held_back),
           "How long a micro-batch that Kafka has committed has been waiting for a sink at this moment. 0 if none is."),
)
# fmt: on


# -- the table of the documentation ----------------------------------------------------------------

BEGIN, END = "<!-- table of metrics: begin -->\n", "<!-- table of metrics: end -->\n"


def table() -> str:
    """Returns the Markdown table of all metrics."""
    rows = [
        f"| `{each.prometheus_name}` | `{each.name}` | {each.kind.value} | "
        f"{each.unit and f'`{each.unit}`'} | "
        f"{', '.join(f'`{label}`' for label in each.labels)} | {each.meaning} |"
        for each in METRICS
    ]
    head = [
        "| in Prometheus | in OpenTelemetry | type | unit | labels | meaning |",
        "|---|---|---|---|---|---|",
    ]
    return "\n".join([f"Each metric also has the label `{APPLICATION}`.", "", *head, *rows]) + "\n"


def with_table(page: str) -> str:
    """Returns the page with the present table."""
    before, _, rest = page.partition(BEGIN)
    _, _, after = rest.partition(END)
    return before + BEGIN + "\n" + table() + "\n" + END + after


if __name__ == "__main__":
    path = Path(__file__).parents[2] / "docs" / "metrics.md"
    path.write_text(with_table(path.read_text(encoding="utf-8")), encoding="utf-8")
