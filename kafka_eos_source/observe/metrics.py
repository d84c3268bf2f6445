"""Every metric, declared once: name, type, unit, labels, meaning, and how it follows from the figures.

Prometheus, OpenTelemetry and ``docs/metrics.md`` are made from this table. Names follow the rules of
OpenTelemetry: words are separated by dots, units are not part of the name, and Kafka's topics and partitions
are the attributes ``messaging.destination.name`` and ``messaging.destination.partition.id``.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum

from kafka_eos_source.observe import metric_values as values
from kafka_eos_source.observe.figures import MOST_TOPICS, OTHER_TOPICS
from kafka_eos_source.observe.metric_values import Query, Values

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
        values.status,
    ),
    Metric(
        "kafka_eos.query.failed",
        _G,
        "",
        ("condition", "action"),
        "1 while the newest run has ended with an error. `action` says who acts: `operator`, `restart`, `retry`, or `unknown` for errors of others.",
        values.failed,
    ),
    Metric(
        "kafka_eos.query.standstill",
        _G,
        "s",
        (),
        "How long the query has had something to do and has committed nothing. 0 if it has stopped.",
        values.standstill,
    ),
    Metric(
        "kafka_eos.query.run.start.time",
        _G,
        "s",
        (),
        "When the first micro-batch of the present run began, in seconds since 1970. It changes with each restart.",
        values.run_start,
    ),
    Metric(
        "kafka_eos.query.runs",
        _C,
        "{run}",
        (),
        "Runs of the query that have reached a commit, since this host knows the query.",
        values.runs,
    ),
    # the source
    Metric(
        "kafka_eos.source.offsets",
        _C,
        "{offset}",
        (),
        "Offsets that committed micro-batches read: records, control records and aborted records.",
        values.total("offsets_read"),
    ),
    Metric(
        "kafka_eos.source.lag",
        _G,
        "{offset}",
        (TOPIC, PARTITION),
        "Offsets between the last committed micro-batch and what readers can read; `records-lag` of Kafka Streams.",
        values.lag,
    ),
    Metric(
        "kafka_eos.source.lag.time",
        _G,
        "s",
        (TOPIC,),
        "How long ago the oldest record that is not committed yet became available. 0 if there is none.",
        values.lag_seconds,
    ),
    Metric(
        "kafka_eos.source.hidden.time",
        _G,
        "s",
        (),
        "How long the source has seen that an open transaction of another producer hides records.",
        values.hidden,
    ),
    # micro-batches
    Metric(
        "kafka_eos.batches",
        _C,
        "{batch}",
        ("outcome",),
        "Micro-batches by outcome: `committed`, `skipped` (Kafka already held them), `failed`.",
        values.batches,
    ),
    Metric(
        "kafka_eos.batch.duration",
        _G,
        "s",
        (),
        "Duration of the newest micro-batch, from its plan to the end of its commit.",
        values.batch_duration,
    ),
    Metric(
        "kafka_eos.batch.step.duration",
        _G,
        "s",
        ("step",),
        "Duration of each step of the newest micro-batch. Steps do not overlap.",
        values.steps,
    ),
    Metric(
        "kafka_eos.batch.step.time",
        _C,
        "s",
        ("step",),
        "Time spent in each step, summed over the micro-batches of the run.",
        values.step_totals,
    ),
    Metric(
        "kafka_eos.batch.end.time",
        _G,
        "s",
        (),
        "When the newest micro-batch ended, in seconds since 1970.",
        values.batch_end,
    ),
    Metric(
        "kafka_eos.batch.staged",
        _C,
        "By",
        (),
        "Size of the rows that tasks staged for commits.",
        values.total("staged_bytes"),
    ),
    Metric(
        "kafka_eos.batch.staging.time",
        _C,
        "s",
        (),
        "Time that writing tasks spent on staging rows, summed over the tasks.",
        values.milliseconds("staging_ms"),
    ),
    Metric(
        "kafka_eos.batch.tasks",
        _G,
        "{task}",
        (),
        "Writing tasks of the newest micro-batch, also those without rows.",
        values.gauges({"": "tasks"}),
    ),
    Metric(
        "kafka_eos.batch.task.duration",
        _G,
        "s",
        ("statistic",),
        "How long these tasks took, reading included: `median` and `longest`. If they differ much, the input is skewed.",
        values.gauges({"median": "median_task_seconds", "longest": "longest_task_seconds"}),
    ),
    # transactions
    Metric(
        "messaging.client.sent.messages",
        _C,
        "{message}",
        (),
        "Records written to output topics by committed transactions, and by tasks with `at_least_once`.",
        values.total("records"),
    ),
    Metric(
        "kafka_eos.topic.sent.records",
        _C,
        "{record}",
        (TOPIC,),
        f"These records per output topic, and those of the dead-letter topic. From the {MOST_TOPICS + 1}st topic of a run on, they are counted as `{OTHER_TOPICS}`.",
        values.topic("records"),
    ),
    Metric(
        "kafka_eos.topic.sent.size",
        _C,
        "By",
        (TOPIC,),
        "Size of the keys and values of these records.",
        values.topic("bytes"),
    ),
    Metric(
        "kafka_eos.producer.queue",
        _G,
        "{message}",
        (),
        "Most records that waited in the client of the committing producer in the newest micro-batch. If that is `kafka.queue.buffering.max.messages`, brokers are slower than the query.",
        values.gauges({"": "queued_messages"}),
    ),
    Metric(
        "kafka_eos.invalid.records",
        _C,
        "{record}",
        ("action",),
        "Invalid rows by what became of them: `dead_lettered` or `dropped`; `dropped-records-total` of Kafka Streams.",
        values.totals({"dead_lettered": "dead_letters", "dropped": "dropped"}),
    ),
    Metric(
        "kafka_eos.sent.size",
        _C,
        "By",
        (),
        "Size of the committed records and state changes as Arrow columns, before the client compresses them.",
        values.total("bytes"),
    ),
    Metric(
        "kafka_eos.transactions",
        _C,
        "{transaction}",
        ("outcome",),
        "Transactions `begun`, `committed` and `aborted`, and commits `retried`, of these `fenced` and of `unknown` outcome.",
        values.totals(
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
        values.token_age,
    ),
    Metric(
        "kafka_eos.token.sequence", _G, "", (), "Sequence number of the newest token.", values.token_sequence
    ),
    Metric(
        "kafka_eos.token.expiry",
        _G,
        "s",
        (),
        "How long Kafka still keeps the newest token if nothing is committed (`offsets.retention.minutes`). An idle source asks the brokers for it.",
        values.token_expiry,
    ),
    # state
    Metric(
        "kafka_eos.state.keys",
        _G,
        "{key}",
        ("operator",),
        "Keys in the state of an operator, as RocksDB estimates them; `num-keys` of Kafka Streams. The operator is named by its changelog topic.",
        values.state("keys"),
    ),
    Metric(
        "kafka_eos.state.size",
        _G,
        "By",
        ("operator",),
        "Size of the state of an operator on disk and in memory.",
        values.state("bytes"),
    ),
    Metric(
        "kafka_eos.state.uncommitted.size",
        _G,
        "By",
        ("operator",),
        "Size of the state changes of the newest micro-batch.",
        values.state("uncommitted_bytes"),
    ),
    Metric(
        "kafka_eos.state.spilled.size",
        _G,
        "By",
        ("operator",),
        "State changes of the newest micro-batch that went to disk, because they did not fit into memory.",
        values.state("spilled_bytes"),
    ),
    Metric(
        "kafka_eos.state.restores",
        _C,
        "{shard}",
        (),
        "Shards that were restored from their changelog.",
        values.total("restores"),
    ),
    Metric(
        "kafka_eos.state.restored.records",
        _C,
        "{record}",
        (),
        "Records that restores read; `restore-total` of Kafka Streams.",
        values.total("restored_records"),
    ),
    Metric(
        "kafka_eos.state.restore.duration",
        _C,
        "s",
        (),
        "Time that shards spent on restores.",
        values.restore_seconds,
    ),
    Metric(
        "kafka_eos.state.changelog.records",
        _C,
        "{record}",
        (),
        "Records written to changelog topics.",
        values.total("changes"),
    ),
    Metric(
        "kafka_eos.state.uncommitted",
        _G,
        "1",
        (),
        "Uncommitted state of the fullest shard as a fraction of its limit.",
        values.pressure,
    ),
    Metric(
        "kafka_eos.state.processor.rows",
        _C,
        "{row}",
        ("name",),
        "What stateful processors count over all micro-batches, such as `late_rows`; `dropped-records-total` of Kafka Streams.",
        values.processor_counts,
    ),
    # sinks outside Kafka
    Metric("kafka_eos.sink.rows", _C, "{row}", ("sink",), "Rows that the sink took.", values.sink("rows")),
    Metric(
        "kafka_eos.sink.transactions",
        _C,
        "{transaction}",
        ("sink", "outcome"),
        "Transactions of the sink: `prepared`, `committed`, `aborted`, and `recovered` (left prepared by an earlier process).",
        values.sink_transactions,
    ),
    Metric(
        "kafka_eos.sink.retries",
        _C,
        "{call}",
        ("sink",),
        "Calls of the sink that were repeated.",
        values.sink("retries"),
    ),
    Metric(
        "kafka_eos.sink.prepare.duration",
        _C,
        "s",
        ("sink",),
        "Time spent in the sink's `prepare`.",
        values.sink("prepare_seconds"),
    ),
    Metric(
        "kafka_eos.sink.commit.duration",
        _C,
        "s",
        ("sink",),
        "Time spent in the sink's `commit`.",
        values.sink("commit_seconds"),
    ),
    Metric(
        "kafka_eos.sink.held_back.duration",
        _C,
        "s",
        ("sink",),
        "How long Kafka had committed when the sink did, summed over micro-batches.",
        values.sink("held_back_seconds"),
    ),
    Metric(
        "kafka_eos.sink.held_back.time",
        _G,
        "s",
        (),
        "How long a micro-batch that Kafka has committed has been waiting for a sink at this moment. 0 if none is.",
        values.held_back,
    ),
)
