"""A stateful query that counts rows per key, and a check of each of its intermediate results.

Each output row holds the key, its count after the batch, and the number of rows in the batch. The output
alone therefore shows a lost, doubled or reordered batch, and state that was applied twice or not at all.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
from pyspark.sql import DataFrame, functions

from integration.support.alarm import Alarm
from integration.support.kafka import Record
from kafka_eos_source.protocol.packing import CHANGELOG
from kafka_eos_source.runtime import failpoints
from kafka_eos_source.spark.operator_frame import spark_frame
from kafka_eos_source.state import aggregates as agg
from kafka_eos_source.state import shard_rows, transform, tumbling
from kafka_eos_source.state.aggregates import Aggregate
from kafka_eos_source.state.encoding import layout
from kafka_eos_source.state.model import BatchContext, StateAccess
from kafka_eos_source.state.operator.frame import grouping, with_operator
from kafka_eos_source.state.vector import groups, processor
from kafka_eos_source.state.vector.processor import AggregateProcessor

_COUNTS = 1


class RunningCounts:
    """A minimal processor that counts rows per key, so that tests exercise the operator itself."""

    output = pa.schema([("key", pa.binary()), ("value", pa.string())])

    def process(
        self, batches: Iterator[pa.RecordBatch], state: StateAccess, context: BatchContext
    ) -> Iterator[pa.RecordBatch]:
        seen: Counter[bytes] = Counter()
        for batch in batches:
            counted = pc.value_counts(batch.column("key").cast(pa.binary()))
            for each in counted.to_pylist():
                seen[each["values"]] += each["counts"]
        failpoints.reach("test.within_process")
        keys, values = [], []
        for key, more in sorted(seen.items()):
            entry = layout.keyed(_COUNTS, key)
            before = int(state.get(entry) or 0)
            state.put(entry, str(before + more).encode())
            keys.append(key)
            values.append(f"{before + more} +{more}")
        if keys:
            yield pa.record_batch([pa.array(keys), pa.array(values)], schema=self.output)


class ChangingAggregates:
    """Computes aggregates that change from run to run; the values of the output rows are JSON.

    Args:
        names: names in `AGGREGATES`, in the order of the results; ``a=b`` is the aggregate ``b`` under the
            name ``a``. ``wide`` widens the type of the input.
    """

    AGGREGATES: Mapping[str, Aggregate] = {
        "rows": agg.count(),
        "bytes": agg.sum("size"),
        "longest": agg.max("size"),
    }
    output = pa.schema([("key", pa.binary()), ("value", pa.string())])

    def __init__(self, names: Sequence[str]) -> None:
        self._size = pa.int64() if "wide" in names else pa.int32()
        aggregates = {
            name.partition("=")[0]: self.AGGREGATES[name.rpartition("=")[2]]
            for name in names
            if name != "wide"
        }
        self._inner = AggregateProcessor(
            pa.schema([("key", pa.binary()), ("size", self._size)]), ["key"], aggregates
        )

    def process(
        self, batches: Iterator[pa.RecordBatch], state: StateAccess, context: BatchContext
    ) -> Iterator[pa.RecordBatch]:
        sized = (
            pa.record_batch({"key": keys, "size": pc.binary_length(keys).cast(self._size)})
            for keys in (batch.column("key").cast(pa.binary()) for batch in batches)
        )
        for results in self._inner.process(sized, state, context):
            failpoints.reach("test.within_process")
            values = [json.dumps(row) for row in results.drop_columns(["key"]).to_pylist()]
            yield pa.record_batch([results.column("key"), pa.array(values)], schema=self.output)


class ClosedWindows:
    """Counts rows by key in windows of a second, and emits each window when it closes.

    A key ends with the event time of its rows in ms: ``k07@12000``. Only a few rows are in memory at a time.
    """

    output = pa.schema([("key", pa.binary()), ("value", pa.string())])

    def __init__(self) -> None:
        shard_rows.MOST_ROWS, processor.KEYED_ROWS, groups.SCAN_ROWS = 20, 10, 10
        self._inner = AggregateProcessor(
            pa.schema([("key", pa.string()), ("time", pa.int64())]),
            ["key"],
            {"rows": agg.count()},
            window=tumbling("1 second", on="time", grace="20 seconds"),
            emit="on_close",
        )

    def process(
        self, batches: Iterator[pa.RecordBatch], state: StateAccess, context: BatchContext
    ) -> Iterator[pa.RecordBatch]:
        timed = (
            pa.record_batch(
                {"key": keys, "time": pc.list_element(pc.split_pattern(keys, "@"), 1).cast("int64")}
            )
            for batch in batches
            for at in range(0, batch.num_rows, 5)
            for keys in (batch.column("key").cast(pa.string()).slice(at, 5),)
        )
        for closed in self._inner.process(timed, state, context):
            failpoints.reach("test.within_process")
            keys, rows = closed.column("key"), closed.column("rows")
            columns = [keys.cast(pa.binary()), rows.cast(pa.string())]
            yield pa.RecordBatch.from_arrays(columns, schema=self.output)


def check_changing_aggregates(wanted: Mapping[str, int], found: Sequence[Record]) -> None:
    """Checks that each key's rows were counted without a gap, and that ``bytes`` counts from its beginning.

    Args:
        wanted: number of input rows of each key.
        found: the committed output records, ordered within each partition. All keys are equally long.
    """
    at: dict[str, int] = {}
    before_bytes: dict[str, int] = {}
    for record in found:
        key, results = (record.key or b"").decode(), json.loads(record.value or b"{}")
        rows = results["renamed" if "renamed" in results else "rows"]
        assert rows > at.get(key, 0), f"key {key!r} was at {at.get(key, 0)}, then {results}"
        if "bytes" in results:
            assert key in before_bytes or key in at, f"key {key!r} has no rows of before the change"
            since = before_bytes.setdefault(key, at.get(key, 0))
            assert results["bytes"] == len(key) * (rows - since), (
                f"key {key!r}, {since} rows before: {results}"
            )
            assert results.get("longest", len(key)) == len(key), results
        at[key] = rows
    assert at == dict(wanted)
    assert before_bytes.keys() == wanted.keys(), "every key was changed"


def running_counts(
    frame: DataFrame, options: Mapping[str, str], *, store: str = "counts", shards: int = 2
) -> DataFrame:
    """Counts the rows of ``frame`` by its column ``key``; returns the columns that the sink expects."""
    rows, keys = grouping(frame, "key")
    return with_operator(rows, keys, RunningCounts(), store=store, shards=shards, options=options)


def check_running_counts(wanted: Mapping[str, int], found: Sequence[Record]) -> None:
    """Checks that every key was counted up without a gap, from zero to all of its rows.

    Args:
        wanted: number of input rows of each key.
        found: the committed output records, ordered within each partition.
    """
    at: dict[str, int] = {}
    for record in found:
        key = (record.key or b"").decode()
        count, _, more = (record.value or b"").decode().partition(" +")
        assert at.get(key, 0) + int(more) == int(count), (
            f"key {key!r} was at {at.get(key, 0)}, then {record.value!r}"
        )
        at[key] = int(count)
    assert at == dict(wanted)


def apply(frame: DataFrame, spec: Mapping[str, Any]) -> DataFrame:
    """Applies the ``state`` part of a driver's spec.

    It is ``{"options": …, "shards": 2, "drop": "column"}``. ``steps`` applies `steps_of_a_user`, with the
    value ``"where of Spark"`` so that rows with state changes get lost. With ``"alarm_ms"``, an `Alarm` takes
    the place of the running counts.
    """
    if "alarm_ms" in spec:
        return transform(
            frame.groupBy("key"),
            Alarm(spec["alarm_ms"]),
            "key binary, value string",
            options=spec["options"],
            shards=spec.get("shards", 2),
            time_mode="ProcessingTime",
        )
    result = running_counts(frame, spec["options"], shards=spec.get("shards", 2))
    if spec.get("drop") == "column":
        return spark_frame(result).drop(CHANGELOG)
    if "steps" in spec:
        return steps_of_a_user(result, where_of_spark=spec["steps"] == "where of Spark")
    return result


def steps_of_a_user(counted: DataFrame, *, where_of_spark: bool = False) -> DataFrame:
    """Returns running counts after steps that know nothing of state changes; the rows are the same as before.

    Args:
        counted: result of `running_counts`.
        where_of_spark: whether the filter is that of Spark itself, which drops rows with state changes.
    """
    frame = (
        counted.selectExpr("key AS k", "split(value, ' ')[0] AS count", "split(value, ' ')[1] AS more")
        .where("count > 0")
        .withColumnRenamed("more", "m")
        .withColumn("other", functions.lit(1))
        .select("k", functions.col("count"), "m")
        .dropna()
        .drop("none")
        .toDF("key", "count", "more")
        .selectExpr("key", "concat(count, ' ', more) AS value")
    )
    return (spark_frame(frame) if where_of_spark else frame).where("value IS NOT NULL")
