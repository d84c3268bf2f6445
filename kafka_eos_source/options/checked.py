"""Checked, typed options of a source or sink, as the rest of the package uses them.

`options.parse` creates these records on the driver. They are pickled to the tasks, which therefore do not
import the option tables.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from itertools import chain
from typing import TYPE_CHECKING

from kafka_eos_source.model import TopicPartition
from kafka_eos_source.option_values import OTHERS
from kafka_eos_source.secrets import Secrets

if TYPE_CHECKING:
    from kafka_eos_source.sinks.specs import SinkSpec


@dataclass(frozen=True)
class Subscription:
    """Topics or partitions to read.

    Attributes:
        kind: name of the option that was set: ``subscribe``, ``subscribePattern`` or ``assign``.
        topics: value of ``subscribe``.
        pattern: value of ``subscribePattern``.
        partitions: value of ``assign``.
    """

    kind: str
    topics: tuple[str, ...] = ()
    pattern: str = ""
    partitions: tuple[TopicPartition, ...] = ()

    def __str__(self) -> str:
        """Returns what is read, for people."""
        if self.kind == "subscribePattern":
            return f"topics that match {self.pattern}"
        return ", ".join(self.topics or sorted({tp.topic for tp in self.partitions}))

    def has_topic(self, topic: str) -> bool:
        """Returns whether the subscription can include partitions of the topic."""
        if self.kind == "subscribePattern":
            return re.search(self.pattern, topic) is not None
        return topic in (self.topics or {tp.topic for tp in self.partitions})

    def has(self, tp: TopicPartition) -> bool:
        """Returns whether the subscription includes the partition if it exists."""
        return tp in self.partitions if self.kind == "assign" else self.has_topic(tp.topic)


@dataclass(frozen=True)
class Bound:
    """Where a read starts or stops.

    Attributes:
        kind: ``earliest``, ``latest``, ``group``, ``offsets``, ``timestamps`` or ``timestamp``.
        offsets: offset per partition; -1 = latest, -2 = earliest (kind ``offsets``).
        topic_defaults: offset for all partitions of a topic; ``*`` = all topics that are not named.
        timestamps_ms: time per partition (kind ``timestamps``).
        timestamp_ms: time for all partitions (kind ``timestamp``).
        no_match: what to do if no record is at or after the time: ``error`` or ``latest``.
        option: name of the option that sets this bound.
    """

    kind: str
    offsets: Mapping[TopicPartition, int] = field(default_factory=dict)
    topic_defaults: Mapping[str, int] = field(default_factory=dict)
    timestamps_ms: Mapping[TopicPartition, int] = field(default_factory=dict)
    timestamp_ms: int | None = None
    no_match: str = "error"
    option: str = field(default="startingOffsets", compare=False)

    def default_of(self, topic: str) -> int | None:
        """Returns the offset for unnamed partitions of the topic; None if they must be named."""
        return self.topic_defaults.get(topic, self.topic_defaults.get(OTHERS))


@dataclass(frozen=True)
class ReadOptions:
    """Checked options of a source; fields are named after the options.

    ``kafka`` contains librdkafka properties of a consumer, without ``group.id``. It may contain passwords and
    is therefore excluded from the repr. ``step_in_read`` contains a step of the query for the tasks to run
    (`in_read.step.step_in_read` returns it); None if there is none. ``sink`` contains the options of the sink
    for which the tasks stage their rows; None if they do not. ``operator`` contains the options of the
    stateful operator that the tasks run, as the user set them; None if they run none.
    """

    subscription: Subscription
    starting: Bound
    ending: Bound
    max_offsets_per_trigger: int | None
    min_offsets_per_trigger: int | None
    max_trigger_delay_ms: int
    token_renewal_interval_ms: int
    timer_batch_interval_ms: int
    metrics_port: int | None
    metrics_host: str
    rolled_back_checkpoint: str
    min_partitions: int | None
    max_records_per_partition: int | None
    fail_on_data_loss: bool
    skip_damaged: Mapping[TopicPartition, tuple[int, ...]]
    most_decompressed_bytes: int
    include_headers: bool
    header_names: str
    columns: tuple[str, ...] | None
    step_in_read: str | None
    sql_memory_bytes: int
    isolation_level: str
    application_id: str | None
    group_id: str | None
    fetch_num_retries: int
    fetch_retry_interval_ms: int
    poll_timeout_ms: int
    push_filters: bool
    kafka: Mapping[str, str] = field(repr=False)
    sink: WriteOptions | None = None
    operator: Mapping[str, str] | None = field(default=None, repr=False)


@dataclass(frozen=True)
class WriteOptions:
    """Checked options of a sink; fields are named after the options.

    ``kafka`` contains librdkafka properties of a producer as the user set them. It may contain passwords and
    is therefore excluded from the repr.
    """

    topic: str | None
    application_id: str | None
    group_id: str | None
    guarantee: str
    checkpoint_location: str | None
    staging_location: str | None
    staging_inline_bytes: int
    include_timestamp: bool
    txn_app_id: str | None
    txn_version: int | None
    missing_token: str
    foreign_query: str
    moved_offsets: str
    moved_checkpoint: str
    static_tables: Mapping[str, str]
    changed_table: str
    commit_timeout_ms: int
    source_cluster: str
    anchor_topic: str | None
    kafka: Mapping[str, str] = field(repr=False)
    query_name: str | None = None
    token_topic: str | None = None
    on_invalid_record: str = "fail"
    dead_letter_topic: str | None = None
    all_records_bad: str = "fail"
    header_names: str = "replace"
    sinks: tuple[SinkSpec, ...] = ()

    @property
    def secrets(self) -> Secrets:
        """The secrets of all options."""
        return Secrets.of(self.kafka) | Secrets(
            frozenset(chain(*(each.secret_values for each in self.sinks)))
        )
