"""The loop with a stateful operator in its tasks: one shard, which counts rows by their value."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping
from typing import Any

import pyarrow as pa
from pyspark.sql.pandas.types import from_arrow_schema
from pyspark.sql.types import StructType

from integration.chaos.loop import Run
from integration.support.stateful import RunningCounts
from kafka_eos_source.state.operator.task import SHARD, Operator
from kafka_eos_source.state.options import parse_state

STORE = "counts"


class StatefulRun(Run):
    """As Spark runs it: the operator's rows are made while the sink takes them.

    Args:
        spec: of `Run`.
        options: of the operator.
        drops_state: a filter behind the operator keeps the rows with a value only.
    """

    def __init__(
        self, spec: Mapping[str, Any], options: Mapping[str, str], *, drops_state: bool = False
    ) -> None:
        super().__init__(spec, threading.Event())
        self._drops_state = drops_state
        self._operator = Operator(RunningCounts(), STORE, 1, parse_state(options))
        self._written: StructType = from_arrow_schema(self._operator.output)

    def _rows(self, task: Any, read: list[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        def counted() -> Iterator[pa.RecordBatch]:
            for batch in super(StatefulRun, self)._rows(task, read):
                shard = pa.array([0] * len(batch), pa.int32())
                yield pa.record_batch({"key": batch.column("value"), SHARD: shard})

        for batch in self._operator(counted()):
            yield batch.filter(batch.column("value").is_valid()) if self._drops_state else batch
