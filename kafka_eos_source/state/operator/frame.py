"""From a streaming DataFrame to one with a stateful operator in it. Runs on the driver."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import pyarrow as pa
from pyspark.sql.pandas.types import from_arrow_schema

from kafka_eos_source.errors import InvalidOptionError, InvalidSchemaError
from kafka_eos_source.state.changelog.topic import changelog_name
from kafka_eos_source.state.model import ShardProcessor
from kafka_eos_source.state.operator.sharding import by_shard
from kafka_eos_source.state.operator.task import Operator, look_at_changelog, split_packets
from kafka_eos_source.state.options import parse_state
from kafka_eos_source.state.packet import CHANGELOG

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
) -> DataFrame:
    """The frame behind the operator: the processor's columns, and `CHANGELOG`, which the sink needs.

    Args:
        frame: streaming.
        keys: columns that decide the shard, by Spark's own hash.
        processor: what is done.
        store: name of the store within the query.
        shards: how many; None = `SHARDS`.
        options: of the operator, as ``docs/options.md`` lists them.

    Raises:
        InvalidOptionError: an option, or the number of shards.
        StateMismatchError, ChangelogError, UnavailableError: of the changelog topic, if ``application.id`` is
            given; else it is looked at by the first task.
    """
    checked = parse_state(options)
    count = SHARDS if shards is None else shards
    if count < 1:
        raise InvalidOptionError(
            f"shards is {shards}; expected 1 or more.", fix="leave it out, or set it to 4."
        )
    if checked.application_id is not None:
        look_at_changelog(checked, changelog_name(checked.application_id, store), count)
    operator = Operator(processor, store, count, checked)

    def run(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        return operator(batches)

    return by_shard(frame, keys, count).mapInArrow(run, from_arrow_schema(operator.output))


def combined(frame: DataFrame, combine: Any, schema: pa.Schema) -> DataFrame:
    """The frame with its rows combined before they travel: one row for each key and input partition.

    Args:
        frame: streaming.
        combine: from Arrow batches of rows to Arrow batches of ``schema``.
        schema: of the combined rows.
    """
    carries = CHANGELOG in frame.columns
    fields = [field.with_nullable(True) for field in schema]
    full = pa.schema([*fields, pa.field(CHANGELOG, pa.binary())]) if carries else pa.schema(fields)

    def run(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        before: list[pa.Array] = []

        def rows() -> Iterable[pa.RecordBatch]:
            for batch in batches:
                kept, packets = split_packets(batch)
                if len(packets):
                    before.append(packets)
                yield kept

        for each in combine(rows()):
            columns = [each.column(field.name).cast(field.type) for field in fields]
            if carries:
                columns.append(pa.nulls(each.num_rows, pa.binary()))
            yield pa.RecordBatch.from_arrays(columns, schema=full)
        for packets in before:
            nulls = [pa.nulls(len(packets), field.type) for field in fields]
            yield pa.RecordBatch.from_arrays([*nulls, packets], schema=full)

    return frame.mapInArrow(run, from_arrow_schema(full))
