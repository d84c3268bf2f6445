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
    TracedStep,
)
from kafka_eos_source.observe.journal import QueryJournal
from kafka_eos_source.observe.lines import ProcessId
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


def counts_of(labels: Mapping[str, str]) -> Callable[[Query], Values]:
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
        and waiting.step == TracedStep.FINISH.value
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
        meaning: what it says, in one sentence.
        values: computes its values.
    """

    name: str
    kind: Kind
    unit: str
    labels: tuple[str, ...]
    meaning: str
    values: Callable[[Query], Values]

    @property
    def prometheus_name(self) -> str:
        """Name after OpenTelemetry's rules for Prometheus: unit and ``_total`` are appended."""
        unit = {"s": "_seconds", "By": "_bytes", "1": "_ratio"}
        name = self.name.replace(".", "_") + unit.get(self.unit, "")
        return name + "_total" if self.kind is Kind.COUNTER else name


_C, _G = Kind.COUNTER, Kind.GAUGE

METRICS: tuple[Metric, ...] = (
    # the query
    Metric(
        "kafka_eos.query.status",
        _G,
        "",
        ("status",),
        "1 for the present status of the query, 0 for the others.",
        status,
    ),
    Metric(
        "kafka_eos.query.failed",
        _G,
        "",
        ("condition", "action"),
        "1 while the newest run has ended with an error. `action` says who acts: `operator`, `restart`, `retry`, or `unknown` for errors of others.",
        failed,
    ),
    Metric(
        "kafka_eos.query.standstill",
        _G,
        "s",
        (),
        "How long the query has had something to do and has committed nothing. 0 if it has stopped.",
        standstill,
    ),
    Metric(
        "kafka_eos.query.run.start.time",
        _G,
        "s",
        (),
        "When the first micro-batch of the present run began, in seconds since 1970. It changes with each restart.",
        run_start,
    ),
    Metric(
        "kafka_eos.query.runs",
        _C,
        "{run}",
        (),
        "Runs of the query that have reached a commit, since this host knows the query.",
        runs,
    ),
    # the source
    Metric(
        "kafka_eos.source.offsets",
        _C,
        "{offset}",
        (),
        "Offsets that committed micro-batches read: records, control records and aborted records.",
        total("offsets_read"),
    ),
    Metric(
        "kafka_eos.source.lag",
        _G,
        "{offset}",
        (TOPIC, PARTITION),
        "Offsets between the last committed micro-batch and what readers can read; `records-lag` of Kafka Streams.",
        lag,
    ),
    Metric(
        "kafka_eos.source.lag.time",
        _G,
        "s",
        (TOPIC,),
        "How long ago the oldest record that is not committed yet became available. 0 if there is none.",
        lag_seconds,
    ),
    Metric(
        "kafka_eos.source.hidden.time",
        _G,
        "s",
        (),
        "How long the source has seen that an open transaction of another producer hides records.",
        hidden,
    ),
    # micro-batches
    Metric(
        "kafka_eos.batches",
        _C,
        "{batch}",
        ("outcome",),
        "Micro-batches by outcome: `committed`, `skipped` (Kafka already held them), `failed`.",
        batches,
    ),
    Metric(
        "kafka_eos.batch.duration",
        _G,
        "s",
        (),
        "Duration of the newest micro-batch, from its plan to the end of its commit.",
        batch_duration,
    ),
    Metric(
        "kafka_eos.batch.step.duration",
        _G,
        "s",
        ("step",),
        "Duration of each step of the newest micro-batch. Steps do not overlap.",
        steps,
    ),
    Metric(
        "kafka_eos.batch.step.time",
        _C,
        "s",
        ("step",),
        "Time spent in each step, summed over the micro-batches of the run.",
        step_totals,
    ),
    Metric(
        "kafka_eos.batch.end.time",
        _G,
        "s",
        (),
        "When the newest micro-batch ended, in seconds since 1970.",
        batch_end,
    ),
    Metric(
        "kafka_eos.batch.staged",
        _C,
        "By",
        (),
        "Size of the rows that tasks staged for commits.",
        total("staged_bytes"),
    ),
    Metric(
        "kafka_eos.batch.staging.time",
        _C,
        "s",
        (),
        "Time that writing tasks spent on staging rows, summed over the tasks.",
        milliseconds("staging_ms"),
    ),
    Metric(
        "kafka_eos.batch.tasks",
        _G,
        "{task}",
        (),
        "Writing tasks of the newest micro-batch, also those without rows.",
        gauges({"": "tasks"}),
    ),
    Metric(
        "kafka_eos.batch.task.duration",
        _G,
        "s",
        ("statistic",),
        "How long these tasks took, reading included: `median` and `longest`. If they differ much, the input is skewed.",
        gauges({"median": "median_task_seconds", "longest": "longest_task_seconds"}),
    ),
    # transactions
    Metric(
        "messaging.client.sent.messages",
        _C,
        "{message}",
        (),
        "Records written to output topics by committed transactions, and by tasks with `at_least_once`.",
        total("records"),
    ),
    Metric(
        "kafka_eos.topic.sent.records",
        _C,
        "{record}",
        (TOPIC,),
        f"These records per output topic, and those of the dead-letter topic. From the {MOST_TOPICS + 1}st topic of a run on, they are counted as `{OTHER_TOPICS}`.",
        topic("records"),
    ),
    Metric(
        "kafka_eos.topic.sent.size",
        _C,
        "By",
        (TOPIC,),
        "Size of the keys and values of these records.",
        topic("bytes"),
    ),
    Metric(
        "kafka_eos.producer.queue",
        _G,
        "{message}",
        (),
        "Most records that waited in the client of the committing producer in the newest micro-batch. If that is `kafka.queue.buffering.max.messages`, brokers are slower than the query.",
        gauges({"": "queued_messages"}),
    ),
    Metric(
        "kafka_eos.invalid.records",
        _C,
        "{record}",
        ("action",),
        "Invalid rows by what became of them: `dead_lettered` or `dropped`; `dropped-records-total` of Kafka Streams.",
        counts_of({"dead_lettered": "dead_letters", "dropped": "dropped"}),
    ),
    Metric(
        "kafka_eos.sent.size",
        _C,
        "By",
        (),
        "Size of the committed records and state changes as Arrow columns, before the client compresses them.",
        total("bytes"),
    ),
    Metric(
        "kafka_eos.transactions",
        _C,
        "{transaction}",
        ("outcome",),
        "Transactions `begun`, `committed` and `aborted`, and commits `retried`, of these `fenced` and of `unknown` outcome.",
        counts_of(
            {
                "begun": "transactions",
                "committed": "committed",
                "aborted": "aborted",
                "retried": "retried",
                "fenced": "fenced",
                "unknown": "unknown",
            }
        ),
    ),
    Metric(
        "kafka_eos.token.age",
        _G,
        "s",
        (),
        "Time since the newest token was committed. Kafka deletes it after `offsets.retention.minutes` without a commit.",
        token_age,
    ),
    Metric("kafka_eos.token.sequence", _G, "", (), "Sequence number of the newest token.", token_sequence),
    Metric(
        "kafka_eos.token.expiry",
        _G,
        "s",
        (),
        "How long Kafka still keeps the newest token if nothing is committed (`offsets.retention.minutes`). An idle source asks the brokers for it.",
        token_expiry,
    ),
    # state
    Metric(
        "kafka_eos.state.keys",
        _G,
        "{key}",
        ("operator",),
        "Keys in the state of an operator, as RocksDB estimates them; `num-keys` of Kafka Streams. The operator is named by its changelog topic.",
        state("keys"),
    ),
    Metric(
        "kafka_eos.state.size",
        _G,
        "By",
        ("operator",),
        "Size of the state of an operator on disk and in memory.",
        state("bytes"),
    ),
    Metric(
        "kafka_eos.state.uncommitted.size",
        _G,
        "By",
        ("operator",),
        "Size of the state changes of the newest micro-batch.",
        state("uncommitted_bytes"),
    ),
    Metric(
        "kafka_eos.state.spilled.size",
        _G,
        "By",
        ("operator",),
        "State changes of the newest micro-batch that went to disk, because they did not fit into memory.",
        state("spilled_bytes"),
    ),
    Metric(
        "kafka_eos.state.restores",
        _C,
        "{shard}",
        (),
        "Shards that were restored from their changelog.",
        total("restores"),
    ),
    Metric(
        "kafka_eos.state.restored.records",
        _C,
        "{record}",
        (),
        "Records that restores read; `restore-total` of Kafka Streams.",
        total("restored_records"),
    ),
    Metric(
        "kafka_eos.state.restore.duration",
        _C,
        "s",
        (),
        "Time that shards spent on restores.",
        restore_seconds,
    ),
    Metric(
        "kafka_eos.state.changelog.records",
        _C,
        "{record}",
        (),
        "Records written to changelog topics.",
        total("changes"),
    ),
    Metric(
        "kafka_eos.state.uncommitted",
        _G,
        "1",
        (),
        "Uncommitted state of the fullest shard as a fraction of its limit.",
        pressure,
    ),
    Metric(
        "kafka_eos.state.processor.rows",
        _C,
        "{row}",
        ("name",),
        "What stateful processors count over all micro-batches, such as `late_rows`; `dropped-records-total` of Kafka Streams.",
        processor_counts,
    ),
    # sinks outside Kafka
    Metric("kafka_eos.sink.rows", _C, "{row}", ("sink",), "Rows that the sink took.", sink("rows")),
    Metric(
        "kafka_eos.sink.transactions",
        _C,
        "{transaction}",
        ("sink", "outcome"),
        "Transactions of the sink: `prepared`, `committed`, `aborted`, and `recovered` (left prepared by an earlier process).",
        sink_transactions,
    ),
    Metric(
        "kafka_eos.sink.retries",
        _C,
        "{call}",
        ("sink",),
        "Calls of the sink that were repeated.",
        sink("retries"),
    ),
    Metric(
        "kafka_eos.sink.prepare.duration",
        _C,
        "s",
        ("sink",),
        "Time spent in the sink's `prepare`.",
        sink("prepare_seconds"),
    ),
    Metric(
        "kafka_eos.sink.commit.duration",
        _C,
        "s",
        ("sink",),
        "Time spent in the sink's `commit`.",
        sink("commit_seconds"),
    ),
    Metric(
        "kafka_eos.sink.held_back.duration",
        _C,
        "s",
        ("sink",),
        "How long Kafka had committed when the sink did, summed over micro-batches.",
        sink("held_back_seconds"),
    ),
    Metric(
        "kafka_eos.sink.held_back.time",
        _G,
        "s",
        (),
        "How long a micro-batch that Kafka has committed has been waiting for a sink at this moment. 0 if none is.",
        held_back,
    ),
)


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
