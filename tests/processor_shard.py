"""One shard of an operator with a `StatefulProcessor`, batch after batch, without Spark."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pyarrow as pa
from model_state import ModelState
from pyspark import cloudpickle
from pyspark.sql.streaming import StatefulProcessor
from pyspark.sql.types import StructType

from kafka_eos_source.state.model import BatchContext, StateAccess
from kafka_eos_source.state.processor import registry
from kafka_eos_source.state.processor.arrow import arrow_schema
from kafka_eos_source.state.processor.ddl import as_struct
from kafka_eos_source.state.processor.entries import StateEntry, read_entries
from kafka_eos_source.state.processor.run import StatefulProcessorRunner


def runner(
    processor: StatefulProcessor, *, key: str, columns: str, output: str, **options: Any
) -> StatefulProcessorRunner:
    """A runner with its schemas written as DDL."""
    schemas = [as_struct(text, "the test's rows") for text in (key, columns, output)]
    return StatefulProcessorRunner(processor, *schemas, **options)


class Shard:
    """Runs batches as the operator does: pickles the runner to each task, keeps event time between them."""

    def __init__(
        self, runner: StatefulProcessorRunner, input_ddl: str, state: StateAccess | None = None
    ) -> None:
        self.state: StateAccess = ModelState() if state is None else state
        self.pickled = cloudpickle.dumps(runner)
        self.input: StructType = as_struct(input_ddl, "the test's rows")
        self.batch_id = -1
        self.event_time_ms: int | None = None
        self.context = BatchContext(-1, 0, 1, True, 0)

    def batch(
        self, rows: Sequence[Sequence[Any]] = (), time_ms: int = 0, parts: int = 1
    ) -> list[tuple[Any, ...]]:
        """What the processor returns for these rows, which come in so many Arrow batches."""
        self.batch_id += 1
        self.context = BatchContext(self.batch_id, 0, 1, self.batch_id == 0, time_ms, self.event_time_ms)
        size = -(-len(rows) // parts) or 1
        batches = [self.arrow(rows[i : i + size]) for i in range(0, len(rows), size)]
        runner = cloudpickle.loads(self.pickled)
        results = list(runner.process(iter(batches), self.state, self.context))
        seen = [self.event_time_ms, self.context.seen_event_time_ms]
        self.event_time_ms = max((time for time in seen if time is not None), default=None)
        for result in results:
            assert result.schema == runner.output
        return [tuple(row.values()) for result in results for row in result.to_pylist()]

    def arrow(self, rows: Sequence[Sequence[Any]]) -> pa.RecordBatch:
        schema = arrow_schema(self.input)
        columns = list(zip(*rows, strict=True)) or [()] * len(schema)
        arrays = [pa.array(column, field.type) for column, field in zip(columns, schema, strict=True)]
        return pa.RecordBatch.from_arrays(arrays, schema=schema)

    def entries(self) -> list[StateEntry]:
        """All that the store holds, as a reader of state sees it."""
        stored = registry.read(self.state)
        assert stored is not None
        return list(read_entries(stored, self.state.range()))

    def values(self, variable: str) -> dict[Any, Any]:
        """What each key holds in a variable: a row, a list of rows or a dict of them."""
        held: dict[Any, Any] = {}
        for entry in self.entries():
            if entry.variable != variable:
                continue
            if entry.map_key is not None:
                held.setdefault(entry.key, {})[entry.map_key] = entry.value
            elif entry.position is not None:
                held.setdefault(entry.key, []).append(entry.value)
            else:
                held[entry.key] = entry.value
        return held
