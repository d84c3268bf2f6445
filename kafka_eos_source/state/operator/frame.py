"""From a streaming DataFrame to one with a stateful operator in it. Runs on the driver."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import pyarrow as pa
from pyspark.sql.pandas.types import from_arrow_schema

from kafka_eos_source.errors import InvalidOptionError, InvalidSchemaError
from kafka_eos_source.protocol.packet import CHANGELOG
from kafka_eos_source.spark.worker import task_begins
from kafka_eos_source.state.changelog.topic import changelog_name
from kafka_eos_source.state.model import ShardProcessor
from kafka_eos_source.state.operator.sharding import by_shard
from kafka_eos_source.state.operator.task import Operator, look_at_changelog, split_packets
from kafka_eos_source.state.options import parse_state
from kafka_eos_source.state.packed_batches import PARCELS, pack, parcel_rows

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, GroupedData

#: Shards of an operator that does not say how many.
SHARDS = 4


def grouping(rows: DataFrame | GroupedData, key: str | Sequence[str] | None) -> tuple[DataFrame, list[str]]:
    """The frame and the names of its key columns.

    Args:
        rows: ``df.groupBy(…)`` by columns of the frame, or the frame itself with ``key``.
        key: a column or several.

    Raises:
        InvalidSchemaError: it is not streaming, has no key, or not these columns.
    """
    frame: Any = getattr(rows, "_df", rows)
    if frame is not rows:
        if key is not None:
            raise InvalidSchemaError("key is given twice: by groupBy and by 'key'.", fix="leave out 'key'.")
        keys = list(rows.count().columns[:-1])  # type: ignore[union-attr]
    else:
        keys = [key] if isinstance(key, str) else list(key or ())
    missing = [name for name in keys if name not in frame.columns]
    if missing or not keys:
        raise InvalidSchemaError(
            f"a stateful operator needs key columns; {missing or 'none'} of {keys} "
            f"{'are not' if missing else 'were named'} among {frame.columns}.",
            fix="group by columns of the frame: withColumn(name, expression) before groupBy(name).",
        )
    if not frame.isStreaming:
        raise InvalidSchemaError(
            "a stateful operator needs a streaming DataFrame: its state commits with a micro-batch.",
            fix="read with spark.readStream; for a batch, use groupBy().agg().",
        )
    return frame, keys


def with_operator(
    frame: DataFrame,
    keys: Sequence[str],
    processor: ShardProcessor,
    *,
    store: str,
    shards: int | None,
    options: Mapping[str, str],
    parcel: pa.Schema | None = None,
) -> DataFrame:
    """The frame behind the operator: the processor's columns, and `CHANGELOG`, which the sink needs.

    Args:
        frame: streaming; rows, or parcels of them.
        keys: columns that decide the shard, by Spark's own hash.
        processor: what is done.
        store: name of the store within the query.
        shards: how many; None = `SHARDS`.
        options: of the operator, as ``docs/options.md`` lists them.
        parcel: schema of the rows in parcels; None = they come as they are.

    Raises:
        InvalidOptionError: an option, or the number of shards.
        StateMismatchError, ChangelogError, UnavailableError: of the changelog topic, if ``application.id`` is
            given; else it is looked at by the first task.
    """
    checked = parse_state(options)
    count = shard_count(shards)
    if checked.application_id is not None:
        look_at_changelog(checked, changelog_name(checked.application_id, store), count)
    operator = Operator(processor, store, count, checked, parcel)

    def run(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        return operator(batches)

    return by_shard(frame, keys, count).mapInArrow(run, from_arrow_schema(operator.output))


def shard_count(shards: int | None) -> int:
    """Of an operator. Raises: InvalidOptionError: less than one."""
    count = SHARDS if shards is None else shards
    if count < 1:
        raise InvalidOptionError(
            f"shards is {shards}; expected 1 or more.", fix="leave it out, or set it to 4."
        )
    return count


def combined(
    frame: DataFrame, combine: Any, schema: pa.Schema, keys: Sequence[str], shards: int
) -> DataFrame:
    """The frame with its rows combined before they travel, one for each key and input partition, in parcels.

    Args:
        frame: streaming.
        combine: from Arrow batches of rows to Arrow batches of ``schema``.
        schema: of the combined rows.
        keys: columns that decide the shard.
        shards: how many.
    """
    carries = CHANGELOG in frame.columns
    full = PARCELS.append(pa.field(CHANGELOG, pa.binary())) if carries else PARCELS

    def run(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        task_begins()
        before: list[pa.Array] = []

        def rows() -> Iterable[pa.RecordBatch]:
            for batch in batches:
                kept, packets = split_packets(batch)
                if len(packets):
                    before.append(packets)
                yield kept

        for each in pack(combine(rows()), schema, keys, shards):
            packets = [pa.nulls(each.num_rows, pa.binary())] if carries else []
            yield pa.RecordBatch.from_arrays([*each.columns, *packets], schema=full)
        for packets in before:
            nothing = parcel_rows([None] * len(packets), [0] * len(packets), shards)
            yield pa.RecordBatch.from_arrays([*nothing.columns, packets], schema=full)

    return frame.mapInArrow(run, from_arrow_schema(full))
