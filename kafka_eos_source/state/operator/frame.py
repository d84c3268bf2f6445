"""Adds a stateful operator to a streaming DataFrame: after a shuffle, or in the tasks of the source.

Runs on the driver. Tasks do not import this module.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

import pyarrow as pa
from pyspark.sql import functions
from pyspark.sql.pandas.types import from_arrow_schema

from kafka_eos_source.errors import InvalidOptionError, InvalidSchemaError
from kafka_eos_source.in_read.lineage import Lineage, lineage
from kafka_eos_source.kafka.admin import SourceAdmin
from kafka_eos_source.kafka.config import admin_config
from kafka_eos_source.kafka.group import GroupOffsets
from kafka_eos_source.kafka.topic_admin import TopicAdmin
from kafka_eos_source.model import TopicPartition
from kafka_eos_source.options.checked import ReadOptions
from kafka_eos_source.options.parse import parse_read
from kafka_eos_source.options.table import KEYED, OPERATOR_IN_READ
from kafka_eos_source.protocol.identity import group_of
from kafka_eos_source.protocol.packing import CHANGELOG
from kafka_eos_source.protocol.token import Token
from kafka_eos_source.runtime.deadline import Deadline
from kafka_eos_source.spark.operator_frame import (
    Senders,
    operator_frame,
    senders_of,
    spark_frame,
    spark_grouping,
)
from kafka_eos_source.spark.pickled import to_bytes
from kafka_eos_source.spark.session import disable_adaptive_streaming, time_zone, warn_of_large_batches
from kafka_eos_source.spark.worker import task_begins
from kafka_eos_source.state.changelog.topic import changelog_name
from kafka_eos_source.state.model import ShardProcessor, ShardsBy
from kafka_eos_source.state.operator.in_read import OperatorInRead
from kafka_eos_source.state.operator.task import (
    InitialTopic,
    Operator,
    ensure_changelog,
    pack_initial,
)
from kafka_eos_source.state.options import StateOptions, parse_state
from kafka_eos_source.state.shard_rows import (
    BATCH_TIME,
    PACKED_BATCH,
    PACKED_SCHEMA,
    ROUTE,
    SHARD,
    pack,
    pack_past_packets,
)

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, GroupedData

_log = logging.getLogger(__name__)

#: Number of shards of an operator without the argument ``shards``.
DEFAULT_SHARDS = 4
#: Value of the argument ``shards`` for one shard per partition of the input (`operator.in_read`).
PARTITIONS: Literal["partitions"] = "partitions"
#: Number of shards, None for `DEFAULT_SHARDS`, or `PARTITIONS`.
Shards: TypeAlias = int | Literal["partitions"] | None


def grouping(rows: DataFrame | GroupedData, key: str | Sequence[str] | None) -> tuple[DataFrame, list[str]]:
    """Returns the frame, with Spark's own methods, and the names of its key columns.

    Args:
        rows: ``df.groupBy(…)`` by columns of the frame, or the frame itself with ``key``.
        key: name or names of the key columns.

    Raises:
        InvalidSchemaError: if the frame is not streaming, there is no key, or the frame lacks a key column.
    """
    rows = spark_grouping(rows)
    frame: Any = getattr(rows, "_df", rows)
    if frame is not rows:
        if key is not None:
            raise InvalidSchemaError(
                "the key is specified twice: by groupBy() and by the argument 'key'.", fix="remove 'key'."
            )
        keys = list(rows.count().columns[:-1])  # type: ignore[union-attr]
    else:
        keys = [key] if isinstance(key, str) else list(key or ())
    missing = [name for name in keys if name not in frame.columns]
    if missing or not keys:
        raise InvalidSchemaError(
            "a stateful operator needs key columns; "
            + (f"the frame lacks {missing}" if missing else "neither groupBy() nor 'key' names one")
            + f"; the frame has the columns {frame.columns}.",
            fix="leave window() out of groupBy, and pass window=tumbling('1 minute', on='timestamp') to "
            "aggregate (hopping and session are the others)."
            if {"window", "session_window"} & {*missing}
            else "group by columns of the frame; for an expression, use withColumn(name, expression) before "
            "groupBy(name).",
        )
    if not frame.isStreaming:
        raise InvalidSchemaError(
            "a stateful operator needs a streaming DataFrame, because its state commits with a micro-batch.",
            fix="read with spark.readStream; in a batch query, use groupBy().agg().",
        )
    return spark_frame(frame), keys


def with_store(frame: DataFrame, store: str) -> Senders:
    """Returns what sends packets before an operator, and the operator itself.

    Args:
        frame: what `grouping` returned.
        store: name of the operator's store.

    Raises:
        InvalidOptionError: if an operator before it has the same store.
    """
    before = senders_of(frame)
    if store in before.stores:
        raise InvalidOptionError(
            f"two stateful operators of the query have the store {store!r}; expected a name of its own for "
            "each, because both would write to one changelog.",
            fix="set another name with the argument 'store' on the new one of them.",
        )
    return before + Senders((store,))


def with_operator(
    frame: DataFrame,
    keys: Sequence[str],
    processor: ShardProcessor,
    *,
    store: str,
    shards: Shards,
    options: Mapping[str, str],
    packed_schema: pa.Schema | None = None,
    combines: bool = False,
    has_event_times: bool = False,
    senders: Senders | None = None,
) -> DataFrame:
    """Returns the operator's result: the processor's columns, and `CHANGELOG`, which the sink needs.

    The methods of the result keep this column and its rows (`spark.operator_frame`).

    With `PARTITIONS` shards, the tasks of the source run the operator (`operator.in_read`). Otherwise it runs
    after a shuffle, and this function disables adaptive execution for the session's streaming queries
    (`disable_adaptive_streaming`).

    Args:
        frame: streaming frame with rows or packed batches.
        keys: columns whose Spark hash decides the shard.
        processor: processes the rows and the state of each shard.
        store: name of the store within the query.
        shards: number of shards; None for `DEFAULT_SHARDS`; or `PARTITIONS`.
        options: options of the operator, as ``docs/options.md`` lists them.
        packed_schema: schema of the rows in packed batches; None if the frame consists of ordinary rows.
        combines: whether the tasks of the source combine rows before they meet the state.
        has_event_times: whether the rows have an event time, which is then compared with Spark's time of the
            micro-batch; with `PARTITIONS` shards, with the time at which the shard's task began.
        senders: what `with_store` returned.

    Raises:
        InvalidOptionError: if an option or the number of shards is invalid.
        StateMismatchError, ChangelogError, UnavailableError: if ``application.id`` is set and the changelog
            topic is unsuitable or unreachable. Without ``application.id``, the first task checks the topic.
        KafkaEosError: as `with_operator_in_read`.
    """
    if shards == PARTITIONS:
        read = with_operator_in_read(frame, keys, processor, store=store, options=options, combines=combines)
        return operator_frame(read, senders=senders or Senders((store,)))
    checked = parse_state(options)
    count = shard_count(shards)
    if checked.application_id is not None:
        ensure_changelog(checked, changelog_name(checked.application_id, store), count)
    disable_adaptive_streaming(frame.sparkSession)
    warn_of_large_batches(frame.sparkSession, "a stateful operator")
    operator = Operator(processor, store, count, checked, packed_schema)

    def run(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        return operator(batches)

    if has_event_times:
        # In a streaming query, this is the time that Spark's offset log holds for the batch.
        frame = frame.withColumn(BATCH_TIME, functions.current_timestamp())
    result = by_shard(frame, keys, count).mapInArrow(run, from_arrow_schema(operator.output))
    return operator_frame(result, count, senders or Senders((store,)))


def shard_count(shards: Shards) -> int:
    """Returns the number of shards of an operator.

    Raises:
        InvalidOptionError: if it is not a whole number of 1 or more.
    """
    count: object = DEFAULT_SHARDS if shards is None else shards
    if not isinstance(count, int) or isinstance(count, bool) or count < 1:
        raise InvalidOptionError(
            f"shards is {shards!r}; expected a whole number, 1 or more, or {PARTITIONS!r}.",
            fix=f"omit it, or set it to {DEFAULT_SHARDS}.",
        )
    return count


def by_shard(rows: DataFrame, keys: Sequence[str], shards: int) -> DataFrame:
    """Returns the rows, each in the Spark partition of its shard, with the shard in the column `SHARD`.

    Spark's hash decides the shard. ``repartition`` uses the same hash (``HashPartitioning``), so the number
    of the partition is the number of the shard.

    Args:
        rows: rows, or packed batches (`state.shard_rows`), which already contain their shard.
        keys: the key columns, in grouping order.
        shards: number of shards.
    """
    if PACKED_BATCH in rows.columns:
        # ROUTE stays in the frame: adaptive execution replaces a projection over an empty shuffle by an empty
        # relation, and the operator would then run for no shard.
        return rows.repartition(shards, ROUTE)
    columns = [functions.col(f"`{name}`") for name in keys]
    shard = functions.pmod(functions.hash(*columns), functions.lit(shards))
    return rows.withColumn(SHARD, shard).repartition(shards, *columns)


def combine_partitions(
    frame: DataFrame, combine: Any, schema: pa.Schema, keys: Sequence[str], shards: int
) -> DataFrame:
    """Combines rows in each input partition before the shuffle; returns a frame of packed batches.

    Args:
        frame: streaming frame.
        combine: turns Arrow batches of rows into Arrow batches of ``schema``, with one row for each key.
        schema: schema of the combined rows.
        keys: columns that decide the shard.
        shards: number of shards.
    """
    has_packets = CHANGELOG in frame.columns
    output = PACKED_SCHEMA.append(pa.field(CHANGELOG, pa.binary())) if has_packets else PACKED_SCHEMA

    def run(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        task_begins()
        if has_packets:
            return pack_past_packets(combine, batches, schema, keys, shards)
        return pack(combine(batches), schema, keys, shards)

    return frame.mapInArrow(run, from_arrow_schema(output))


# -- an operator that the tasks of the source run (shards="partitions")

_NUMBER_INSTEAD = "pass a number of shards instead, so that the rows are shuffled by key."


def chosen_shards(frame: DataFrame, keys: Sequence[str], shards: Shards) -> Shards:
    """Returns the argument ``shards``, or `PARTITIONS` if it is None and the source says that this is safe.

    It is safe if the rows come directly from a source with the option `KEYED`, and its key or its partition
    is a grouping column. With Spark Connect, no operator runs in the read.

    Args:
        frame: the columns that the operator uses.
        keys: the grouping columns.
        shards: argument of the operator.
    """
    source = lineage(frame, frame.columns) if shards is None and hasattr(frame, "_jdf") else None
    if source is None:
        return shards
    grouped = {source.columns.column_of_source(name) for name in keys}
    if not grouped & {"key", "partition"}:
        return None
    if any(name.lower() == KEYED and value.lower() == "true" for name, value in source.options.items()):
        return PARTITIONS
    _log.info(
        "the operator groups by %s and shuffles its rows; if all producers choose the partition by the "
        "record's key, the option %s=true of the source avoids that, also as keyed=True of App.read",
        ", ".join(keys),
        KEYED,
    )
    return None


def with_operator_in_read(
    frame: DataFrame,
    keys: Sequence[str],
    processor: ShardProcessor,
    *,
    store: str,
    options: Mapping[str, str],
    combines: bool = False,
) -> DataFrame:
    """Returns the result of an operator that the tasks of the source run, with a shard for each partition.

    Args:
        frame: streaming frame whose columns come directly from the source.
        keys: the grouping columns.
        processor: processes the rows and the state of each shard.
        store: name of the store within the query.
        options: options of the operator, as ``docs/options.md`` lists them.
        combines: whether the processor's ``partial`` combines the rows of a shard first.

    Raises:
        InvalidSchemaError: if a column does not come directly from the source, or neither the record's key
            nor its partition is a grouping column.
        InvalidOptionError: if the source does not name its topics, or an option is invalid.
        UnavailableError: if a topic does not exist, or no broker answers.
        StateMismatchError, ChangelogError: if ``application.id`` is set and the changelog topic is
            unsuitable.
    """
    checked = parse_state(options)
    if not hasattr(frame, "_jdf"):
        raise InvalidSchemaError(
            "a stateful operator has shards='partitions' on Spark Connect, whose client does not know how "
            "many tasks run at the same time.",
            fix=_NUMBER_INSTEAD,
        )
    source = lineage(frame, frame.columns)
    if source is None:
        raise InvalidSchemaError(
            "a stateful operator has shards='partitions', but its frame is not only a source "
            f"format('kafka-eos') with columns ({', '.join(frame.columns)}) that are selected, renamed, or "
            "cast(… as string). The tasks that read run the operator, so there can be no other step between "
            "them, such as where() or withWatermark().",
            fix="do the other steps in the operator or after it; or " + _NUMBER_INSTEAD,
        )
    record_keys = _record_keys(source, keys)
    shards = _partitions(parse_read(source.options, streaming=True))
    if checked.application_id is not None:
        ensure_changelog(
            checked, changelog_name(checked.application_id, store), shards, ShardsBy.INPUT_PARTITION
        )
    step = OperatorInRead(
        columns=source.columns,
        result=from_arrow_schema(Operator(processor, store, shards, checked).output),
        processor=to_bytes(
            processor,
            f"the stateful operator of store {store!r}",
            fix="create clients, files and locks in the processor's init(), not outside of it.",
        ),
        combines=combines,
        record_keys=record_keys,
        store=store,
        shards=shards,
        parallelism=frame.sparkSession.sparkContext.defaultParallelism,
        timezone=time_zone(frame.sparkSession),
    )
    own = {f"{OPERATOR_IN_READ}{name}": str(value) for name, value in options.items()}
    return operator_frame(source.read(step, frame.sparkSession, own))


def _record_keys(source: Lineage, keys: Sequence[str]) -> tuple[str, ...]:
    """Returns the grouping columns that hold the record's key, and so must not be null.

    Raises:
        InvalidSchemaError: if equal values of the grouping columns can be in several partitions.
    """
    of_source = {name: source.columns.column_of_source(name) for name in keys}
    if any(of_source[name] == "partition" for name in keys):
        return ()  # then each partition has groups of its own
    found = tuple(name for name in keys if of_source[name] == "key")
    if not found:
        raise InvalidSchemaError(
            f"a stateful operator with shards='partitions' groups by {', '.join(keys)}; expected the column "
            "'key' of the source among them. Kafka's producers choose the partition by the key, so rows with "
            "equal values of other columns are in several partitions.",
            fix=f"group by the column 'key' (or by 'key' and others); or {_NUMBER_INSTEAD}",
        )
    return found


def _partitions(options: ReadOptions) -> int:
    """Returns the number of partitions that each topic of a source has.

    Raises:
        InvalidOptionError: if the source does not name its topics, or divides partitions among tasks, or the
            topics have different numbers of partitions.
        UnavailableError: if a topic does not exist, or no broker answers.
        AuthorizationError: if the principal may not describe a topic.
    """
    for name, value in (
        ("minPartitions", options.min_partitions),
        ("maxRecordsPerPartition", options.max_records_per_partition),
    ):
        if value is not None:
            raise InvalidOptionError(
                f"the source has the option {name!r} (value {value}), but a stateful operator with "
                "shards='partitions' needs each partition in one task.",
                fix=f"remove {name!r}, or {_NUMBER_INSTEAD}",
            )
    subscription = options.subscription
    if subscription.kind != "subscribe":
        raise InvalidOptionError(
            f"the source has the option {subscription.kind!r}, but a stateful operator with "
            "shards='partitions' needs 'subscribe', because its number of shards is that of the partitions.",
            fix=f"name the topics with 'subscribe'; or {_NUMBER_INSTEAD}",
        )
    admin = SourceAdmin(
        admin_config(options.kafka),
        options.isolation_level,
        options.fetch_num_retries,
        options.fetch_retry_interval_ms,
    )
    try:
        found = admin.named(subscription.topics).partitions
    finally:
        admin.close()
    counts = {topic: sum(each.topic == topic for each in found) for topic in {each.topic for each in found}}
    if len(set(counts.values())) > 1:
        raise InvalidOptionError(
            "a stateful operator has shards='partitions', but its topics have different numbers of "
            f"partitions: {', '.join(f'{topic} {count}' for topic, count in sorted(counts.items()))}. A key "
            "would be in different partitions of them.",
            fix=_NUMBER_INSTEAD,
        )
    return next(iter(counts.values()))


# -- initial state: rows of another frame, which the shards receive through Kafka before their first batch
#
# An operator knows no folder that all executors share, but they all reach Kafka. So the driver writes the
# rows, exactly once, to a topic <application.id>-<store>-initial with one partition for each shard. The
# shards read them in the first batch (`handleInitialState`); the resulting state is in the changelog from
# then on. The topic may be deleted after the first batch.


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
        .mapInArrow(pack_initial, "value binary, partition int")
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
