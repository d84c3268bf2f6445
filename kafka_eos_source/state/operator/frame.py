"""Adds a stateful operator to a streaming DataFrame. Runs on the driver."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

import pyarrow as pa
from pyspark.sql import functions
from pyspark.sql.pandas.types import from_arrow_schema

from kafka_eos_source.errors import InvalidOptionError, InvalidSchemaError
from kafka_eos_source.protocol.packing import CHANGELOG
from kafka_eos_source.spark.session import disable_adaptive_streaming, warn_of_large_batches
from kafka_eos_source.spark.worker import task_begins
from kafka_eos_source.state.changelog.topic import changelog_name
from kafka_eos_source.state.model import ShardProcessor
from kafka_eos_source.state.operator.frame_in_read import with_operator_in_read
from kafka_eos_source.state.operator.sharding import by_shard
from kafka_eos_source.state.operator.task import Operator, ensure_changelog, split_packets
from kafka_eos_source.state.options import parse_state
from kafka_eos_source.state.shard_batches import BATCH_TIME, PACKED_SCHEMA, pack, routed

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, GroupedData

#: Number of shards of an operator without the argument ``shards``.
DEFAULT_SHARDS = 4
#: Value of the argument ``shards`` for one shard per partition of the input (`operator.in_read`).
PARTITIONS: Literal["partitions"] = "partitions"
#: Number of shards, None for `DEFAULT_SHARDS`, or `PARTITIONS`.
Shards: TypeAlias = int | Literal["partitions"] | None


def grouping(rows: DataFrame | GroupedData, key: str | Sequence[str] | None) -> tuple[DataFrame, list[str]]:
    """Returns the frame and the names of its key columns.

    Args:
        rows: ``df.groupBy(…)`` by columns of the frame, or the frame itself with ``key``.
        key: name or names of the key columns.

    Raises:
        InvalidSchemaError: if the frame is not streaming, there is no key, or the frame lacks a key column.
    """
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
            fix="group by columns of the frame; for an expression, use withColumn(name, expression) before "
            "groupBy(name).",
        )
    if not frame.isStreaming:
        raise InvalidSchemaError(
            "a stateful operator needs a streaming DataFrame, because its state commits with a micro-batch.",
            fix="read with spark.readStream; in a batch query, use groupBy().agg().",
        )
    return frame, keys


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
) -> DataFrame:
    """Returns the operator's result: the processor's columns, and `CHANGELOG`, which the sink needs.

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

    Raises:
        InvalidOptionError: if an option or the number of shards is invalid.
        StateMismatchError, ChangelogError, UnavailableError: if ``application.id`` is set and the changelog
            topic is unsuitable or unreachable. Without ``application.id``, the first task checks the topic.
        KafkaEosError: as `with_operator_in_read`.
    """
    if shards == PARTITIONS:
        return with_operator_in_read(frame, keys, processor, store=store, options=options, combines=combines)
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
    return by_shard(frame, keys, count).mapInArrow(run, from_arrow_schema(operator.output))


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
        packets_before: list[pa.Array] = []

        def rows() -> Iterable[pa.RecordBatch]:
            for batch in batches:
                data, packets = split_packets(batch)
                if len(packets):
                    packets_before.append(packets)
                yield data

        for each in pack(combine(rows()), schema, keys, shards):
            packets = [pa.nulls(each.num_rows, pa.binary())] if has_packets else []
            yield pa.RecordBatch.from_arrays([*each.columns, *packets], schema=output)
        for packets in packets_before:
            empty = routed(pa.nulls(len(packets), pa.binary()), [0] * len(packets), shards)
            yield pa.RecordBatch.from_arrays([*empty.columns, packets], schema=output)

    return frame.mapInArrow(run, from_arrow_schema(output))
