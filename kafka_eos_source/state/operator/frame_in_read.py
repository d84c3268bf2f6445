"""Adds a stateful operator to a source, whose tasks run it (``shards="partitions"``). Runs on the driver."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from pyspark.sql.pandas.types import from_arrow_schema

from kafka_eos_source.errors import InvalidOptionError, InvalidSchemaError
from kafka_eos_source.in_read.frame import Lineage, lineage
from kafka_eos_source.kafka.admin import SourceAdmin
from kafka_eos_source.kafka.config import admin_config
from kafka_eos_source.options.checked import ReadOptions
from kafka_eos_source.options.parse import parse_read
from kafka_eos_source.options.table import OPERATOR_IN_READ
from kafka_eos_source.spark.pickled import to_bytes
from kafka_eos_source.state.changelog.topic import changelog_name
from kafka_eos_source.state.model import ShardProcessor, ShardsBy
from kafka_eos_source.state.operator.in_read import OperatorInRead
from kafka_eos_source.state.operator.task import Operator, ensure_changelog
from kafka_eos_source.state.options import parse_state

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

_NUMBER_INSTEAD = "pass a number of shards instead, so that the rows are shuffled by key."


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
            "a stateful operator has shards='partitions' on Spark Connect, whose client cannot see which "
            "source the frame reads.",
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
        timezone=str(frame.sparkSession.conf.get("spark.sql.session.timeZone")),
    )
    own = {f"{OPERATOR_IN_READ}{name}": str(value) for name, value in options.items()}
    return source.read(step, frame.sparkSession, own)


def _record_keys(source: Lineage, keys: Sequence[str]) -> tuple[str, ...]:
    """Returns the grouping columns that hold the record's key, and so must not be null.

    Raises:
        InvalidSchemaError: if equal values of the grouping columns can be in several partitions.
    """
    of_source = {each.name: each.source for each in source.columns.columns}
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
