"""Initial state: rows of another frame, which the shards receive through Kafka before their first batch.

An operator knows no folder that all executors share, but they all reach Kafka. So the driver writes the rows,
exactly once, to a topic ``<application.id>-<store>-initial`` with one partition for each shard. The shards
read them in the first batch (``handleInitialState``); the resulting state is in the changelog from then on.
The topic may be deleted after the first batch.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import pyarrow as pa
import pyarrow.compute as pc

from kafka_eos_source.errors import InvalidOptionError, InvalidSchemaError
from kafka_eos_source.kafka.changelog_reader import ChangelogReader
from kafka_eos_source.kafka.config import admin_config
from kafka_eos_source.kafka.group import GroupOffsets
from kafka_eos_source.kafka.topic_admin import TopicAdmin
from kafka_eos_source.model import TopicPartition
from kafka_eos_source.protocol import packing
from kafka_eos_source.protocol.identity import group_of
from kafka_eos_source.protocol.token import Token
from kafka_eos_source.runtime.deadline import Deadline
from kafka_eos_source.state.changelog.committed import changelog_client
from kafka_eos_source.state.changelog.topic import changelog_name
from kafka_eos_source.state.model import BatchContext
from kafka_eos_source.state.operator.sharding import by_shard
from kafka_eos_source.state.options import StateOptions
from kafka_eos_source.state.shard_batches import SHARD

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

#: Approximate size of a record, which holds many rows; the default limit of brokers is 1 MiB.
_RECORD_BYTES = 256 << 10
#: Fix if the topic was deleted too early.
_IF_GONE = (
    "start the query with a new application.id and a new checkpoint; keep the topic until the first batch is "
    "committed."
)


@dataclass(frozen=True)
class InitialTopic:
    """Reads the rows of a shard's initial state in its first batch. Picklable.

    Attributes:
        kafka: librdkafka properties; not printed, because they may contain passwords.
        topic: the topic that `publish` wrote.
        timeout_ms: how long reading may take.
    """

    kafka: Mapping[str, str] = field(repr=False)
    topic: str
    timeout_ms: int

    def __call__(self, context: BatchContext) -> Iterator[pa.RecordBatch]:
        """Yields the rows of the shard's initial state.

        Raises:
            UnavailableError: if the topic is gone, or Kafka does not answer in time.
            DataLossError: if records of the topic were deleted.
            InvalidRecordError: if a record of the topic is damaged.
        """
        with changelog_client(self.kafka) as consumer:
            reader = ChangelogReader(consumer, TopicPartition(self.topic, context.shard))
            deadline = Deadline.after_ms(self.timeout_ms)
            _, end = reader.readable(deadline)
            for records in reader.read(0, end, deadline, if_gone=_IF_GONE, skips_deleted=False):
                for value in packing.values(records.values):
                    yield from packing.unpack_stream(value, f"topic {self.topic!r}")


def publish(
    rows: DataFrame,
    keys: Sequence[str],
    *,
    store: str,
    shards: int,
    options: StateOptions,
    user_options: Mapping[str, str],
) -> InitialTopic:
    """Writes the rows of an initial state, unless they are written or the query has committed.

    Args:
        rows: batch frame with the key columns.
        keys: names of the key columns, in grouping order.
        store: name of the operator's store.
        shards: number of the operator's shards.
        options: options of the operator; ``application.id`` is required.
        user_options: the same options as the user set them.

    Raises:
        InvalidOptionError: if ``application.id`` is not set.
        InvalidSchemaError: if the frame is streaming or lacks a key column.
        KafkaEosError: if the write fails.
    """
    application = options.application_id
    if application is None:
        raise InvalidOptionError(
            "an operator with an initial state needs the option 'application.id', which is not set.",
            fix="set the same application.id on the operator and on the sink.",
        )
    missing = [name for name in keys if name not in rows.columns]
    if rows.isStreaming or missing:
        defect = f"lacks the key columns {missing}" if missing else "is a streaming frame"
        raise InvalidSchemaError(
            f"the initial state {defect}; expected a batch frame with the columns {list(keys)}.",
            fix="read it with spark.read, and give its key columns the same names as in the stream.",
        )
    topic = f"{application}-{store}-initial"
    group = group_of(application, options.group_id)
    initial = InitialTopic(options.kafka, topic, options.timeout_ms)
    deadline = Deadline.after_ms(options.timeout_ms)
    if _has_committed(options, group, changelog_name(application, store), shards, deadline):
        return initial
    with TopicAdmin(options.kafka) as admin:
        if admin.shape(topic, deadline) is None:
            admin.create(topic, shards, options.replication_factor, {"retention.ms": "-1"}, deadline)
            admin.await_led(topic, deadline)
    kafka = {name: value for name, value in user_options.items() if name.lower().startswith("kafka.")}
    kafka = {name: value for name, value in kafka.items() if name.lower() != "kafka.group.id"}
    (
        by_shard(rows, keys, shards)
        .mapInArrow(_to_records, "value binary, partition int")
        .write.format("kafka-eos")
        .mode("append")
        .options(**kafka)
        .option("topic", topic)
        .option("txnAppId", f"{application}-{store}-initial")
        .option("txnVersion", "0")
        .save()
    )
    return initial


def _has_committed(
    options: StateOptions, group: str, changelog: str, shards: int, deadline: Deadline
) -> bool:
    """Whether a batch has committed state to the changelog."""
    partitions = [TopicPartition(changelog, shard) for shard in range(shards)]
    committed, _ = GroupOffsets(admin_config(options.kafka)).now(group, partitions, deadline)
    return any(tp in committed and Token.decode(committed[tp].metadata) is not None for tp in partitions)


def _to_records(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    """Packs the rows of each shard into records."""
    for batch in batches:
        shards = batch.column(SHARD)
        for shard in shards.unique():
            rows = batch.filter(pc.equal(shards, shard)).drop_columns([SHARD])
            slices = packing.slices(rows, _RECORD_BYTES)
            values = packing.column([packing.pack_stream(each) for each in slices])
            partition = pa.repeat(shard.cast(pa.int32()), len(values))
            yield pa.record_batch([values, partition], ["value", "partition"])
