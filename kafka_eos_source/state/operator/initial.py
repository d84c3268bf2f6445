"""State that is there before the first batch: rows of another frame, handed to the shards through Kafka.

Executors share no folder that an operator knows of, but they share Kafka. So the rows are written, exactly
once, to a topic ``<application.id>-<store>-initial`` with a partition for each shard; the shards read them in
the first batch (``handleInitialState``), and what that makes of them is in the changelog from then on. The
topic may be deleted after the first batch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import pyarrow as pa
import pyarrow.compute as pc

from kafka_eos_source.errors import InvalidOptionError, InvalidSchemaError
from kafka_eos_source.kafka.changelog_reader import ChangelogReader
from kafka_eos_source.kafka.config import admin_config
from kafka_eos_source.kafka.failure import unreachable
from kafka_eos_source.kafka.group import GroupOffsets
from kafka_eos_source.kafka.topic_admin import TopicAdmin
from kafka_eos_source.model import TopicPartition
from kafka_eos_source.protocol.ipc import to_stream
from kafka_eos_source.protocol.token import Token
from kafka_eos_source.runtime.deadline import Deadline
from kafka_eos_source.state.changelog.committed import changelog_client
from kafka_eos_source.state.changelog.topic import changelog_name
from kafka_eos_source.state.model import BatchContext
from kafka_eos_source.state.operator.sharding import by_shard
from kafka_eos_source.state.options import StateOptions
from kafka_eos_source.state.packed_batches import SHARD

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

#: A record holds many rows; brokers take 1 MiB.
_RECORD_BYTES = 256 << 10
_WAIT_SECONDS = 0.2


@dataclass(frozen=True)
class InitialTopic:
    """The rows of one shard's initial state, read in its first batch. Picklable.

    Attributes:
        kafka: librdkafka properties; may hold passwords, so not printed.
        group_id: of the query.
        topic: see the module.
        timeout_ms: how long Kafka may be silent.
    """

    kafka: Mapping[str, str] = field(repr=False)
    group_id: str
    topic: str
    timeout_ms: int

    def __call__(self, context: BatchContext) -> Iterator[pa.RecordBatch]:
        """Raises: UnavailableError: the topic is gone, or Kafka did not answer in time."""
        with changelog_client(self.kafka, self.group_id) as consumer:
            reader = ChangelogReader(consumer, TopicPartition(self.topic, context.shard))
            deadline = Deadline.after_ms(self.timeout_ms)
            at, end = reader.readable(deadline)
            reader.start(at)
            while at < end:
                pulled = reader.take(_WAIT_SECONDS, end)
                if pulled.records is not None:
                    for value in pulled.records.values.to_pylist():
                        yield from pa.ipc.open_stream(value)
                    at = pulled.records.position
                at = max(at, pulled.log_end or 0)
                if at < end and deadline.expired:
                    raise unreachable(
                        self.kafka.get("bootstrap.servers", ""),
                        self.timeout_ms,
                        f"initial state in topic {self.topic!r}: {reader.last_complaint}",
                    )


def publish(
    rows: DataFrame,
    keys: Sequence[str],
    *,
    store: str,
    shards: int,
    options: StateOptions,
    own: Mapping[str, str],
) -> InitialTopic:
    """Writes the rows of an initial state, unless they are there or the query has left its first batch.

    Args:
        rows: a batch frame with the key columns.
        keys: their names, in the order in which the stream is grouped.
        store, shards: of the operator.
        options: of the operator; needs ``application.id``.
        own: the same, as the user gave them.

    Raises:
        InvalidOptionError: no ``application.id``.
        InvalidSchemaError: a streaming frame, or one without the key columns.
        KafkaEosError: of the write.
    """
    application = options.application_id
    if application is None:
        raise InvalidOptionError(
            "an initial state needs a name before the query has one: option 'application.id' is not set.",
            fix="set it on the operator and, the same, on the sink.",
        )
    missing = [name for name in keys if name not in rows.columns]
    if rows.isStreaming or missing:
        found = f"lacks the keys {missing}" if missing else "is a streaming frame"
        raise InvalidSchemaError(
            f"the initial state {found}; expected a batch frame with the columns {list(keys)}.",
            fix="name its key columns as those of the stream.",
        )
    topic = f"{application}-{store}-initial"
    group = options.group_id or application
    initial = InitialTopic(options.kafka, group, topic, options.timeout_ms)
    deadline = Deadline.after_ms(options.timeout_ms)
    if _has_begun(options, group, changelog_name(application, store), shards, deadline):
        return initial
    with TopicAdmin(options.kafka) as admin:
        if admin.shape(topic, deadline) is None:
            admin.create(topic, shards, options.replication_factor, {"retention.ms": "-1"}, deadline)
            admin.await_led(topic, deadline)
    kafka = {name: value for name, value in own.items() if name.lower().startswith("kafka.")}
    kafka = {name: value for name, value in kafka.items() if name.lower() != "kafka.group.id"}
    (
        by_shard(rows, keys, shards)
        .mapInArrow(_packed(), "value binary, partition int")
        .write.format("kafka-eos")
        .mode("append")
        .options(**kafka)
        .option("topic", topic)
        .option("txnAppId", f"{application}-{store}-initial")
        .option("txnVersion", "0")
        .save()
    )
    return initial


def _has_begun(options: StateOptions, group: str, changelog: str, shards: int, deadline: Deadline) -> bool:
    partitions = [TopicPartition(changelog, shard) for shard in range(shards)]
    found, _ = GroupOffsets(admin_config(options.kafka)).now(group, partitions, deadline)
    return any(tp in found and Token.decode(found[tp].metadata) is not None for tp in partitions)


def _packed() -> Callable[[Iterator[pa.RecordBatch]], Iterator[pa.RecordBatch]]:
    def run(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        for batch in batches:
            shards = batch.column(SHARD)
            for shard in shards.unique():
                rows = batch.filter(pc.equal(shards, shard)).drop_columns([SHARD])
                step = max(1, _RECORD_BYTES * rows.num_rows // max(1, rows.nbytes))
                chunks = (rows.slice(at, step) for at in range(0, rows.num_rows, step))
                values = [to_stream(each).to_pybytes() for each in chunks]
                yield pa.record_batch(
                    [pa.array(values, pa.binary()), pa.repeat(shard.cast(pa.int32()), len(values))],
                    ["value", "partition"],
                )

    return run
