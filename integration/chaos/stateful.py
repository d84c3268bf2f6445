"""The loop with a stateful operator that counts rows by value, in `SHARDS` tasks."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping
from typing import Any

import pyarrow as pa
from pyspark.sql.pandas.types import from_arrow_schema
from pyspark.sql.types import BinaryType, StringType, StructField, StructType

from integration.chaos.loop import Run
from integration.support.alarm import Alarm
from integration.support.stateful import ChangingAggregates, ClosedWindows, RunningCounts
from kafka_eos_source.state.encoding.layout import shards_of
from kafka_eos_source.state.model import ShardProcessor
from kafka_eos_source.state.operator.task import SHARD, Operator
from kafka_eos_source.state.options import parse_state
from kafka_eos_source.state.processor.run import StatefulProcessorRunner

STORE, SHARDS = "counts", 2


class StatefulRun(Run):
    """A run with a stateful operator between source and sink.

    As in Spark, rows are routed to their shards, and the operator produces its rows while the sink consumes
    them.

    Args:
        spec: a spec of `Run`. ``state`` holds the operator's options. With ``drops_state``, a filter behind
            the operator drops the rows without a value, which carry the state. ``shards`` is the number of
            shards, ``store`` the name of the store. With ``alarm_ms``, the operator emits the count of each
            value once, this long after its first row, by a timer. With ``aggregates``, names of
            `ChangingAggregates`, it computes these instead; with ``windows``, it is `ClosedWindows`.
    """

    def __init__(self, spec: Mapping[str, Any], stop: threading.Event) -> None:
        super().__init__(spec, stop)
        self._drops_state = spec.get("drops_state", False)
        self._shards = spec.get("shards", SHARDS)
        store = spec.get("store", STORE)
        self._operator = Operator(_processor(spec), store, self._shards, parse_state(spec["state"]))
        self._written: StructType = from_arrow_schema(self._operator.output)

    def _tasks(self, start: Any, end: Any, read: list[pa.RecordBatch]) -> Iterator[Iterator[pa.RecordBatch]]:
        found = [batch.column("value") for rows in super()._tasks(start, end, read) for batch in rows]
        keys = pa.concat_arrays([pa.array([], pa.binary()), *found])
        placed = shards_of([keys], self._shards)
        for shard in range(self._shards):
            yield self._counted(keys.filter(pa.array(placed == shard)), shard)

    def _counted(self, keys: pa.BinaryArray, shard: int) -> Iterator[pa.RecordBatch]:
        number = pa.array([shard] * len(keys), pa.int32())
        for batch in self._operator([pa.record_batch({"key": keys, SHARD: number})]):
            yield batch.filter(batch.column("value").is_valid()) if self._drops_state else batch


def _processor(spec: Mapping[str, Any]) -> ShardProcessor:
    if "aggregates" in spec:
        return ChangingAggregates(spec["aggregates"])
    if spec.get("windows"):
        return ClosedWindows()
    if "alarm_ms" not in spec:
        return RunningCounts()
    key = StructType([StructField("key", BinaryType())])
    output = StructType([*key, StructField("value", StringType())])
    return StatefulProcessorRunner(Alarm(spec["alarm_ms"]), key, key, output, time_mode="ProcessingTime")
