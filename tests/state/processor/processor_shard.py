"""Runs one shard of an operator with a `StatefulProcessor` on successive batches, without Spark."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import pyarrow as pa
from pyspark import cloudpickle
from pyspark.sql.streaming import StatefulProcessor
from pyspark.sql.types import StructType

from kafka_eos_source.state.encoding import layout
from kafka_eos_source.state.model import BatchContext, StateAccess
from kafka_eos_source.state.processor import registry
from kafka_eos_source.state.processor.rows import StateEntry, read_entries
from kafka_eos_source.state.processor.run import StatefulProcessorRunner
from kafka_eos_source.state.processor.schema import arrow_schema, as_struct
from tests.state.store.model_state import ModelState


def runner(
    processor: StatefulProcessor, *, key: str, columns: str, output: str, **options: Any
) -> StatefulProcessorRunner:
    """Returns a runner whose schemas are written as DDL."""
    schemas = [as_struct(text, "the test's rows") for text in (key, columns, output)]
    return StatefulProcessorRunner(processor, *schemas, **options)


class Shard:
    """Runs batches like the operator: pickles the runner for each task, and keeps the event time."""

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
        """Returns the processor's output for these rows, split into this number of Arrow batches."""
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
        """Returns all entries of the store, as a reader of state sees them."""
        stored = registry.read(self.state)
        assert stored is not None
        return list(read_entries(stored, self.state.range()))

    def values(self, variable: str) -> dict[Any, Any]:
        """Returns the state of each key in a variable: a row, a list of rows or a dict of rows."""
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


def scan_table(state: StateAccess, byte: int) -> Iterator[tuple[bytes, bytes]]:
    """Returns all keys and values of a table."""
    return state.range(bytes([byte]), bytes([byte + 1]) if byte < 0xFF else None)


def variables_in(state: StateAccess) -> tuple[registry.VariableInfo, ...]:
    """Returns the variables in a store, by table."""
    stored = registry.read(state)
    return () if stored is None else stored.variables


def check_indexes(shard: Shard) -> None:
    """Asserts that each value with a time to live has one index entry, and each timer its two entries."""
    state = shard.state
    for variable in variables_in(state):
        if not variable.ttl:
            continue
        index = variable.table | layout.TIMED
        entries = [layout.split(key) for key, _ in scan_table(state, index)]
        kept = [(layout.split(key), value) for key, value in scan_table(state, variable.table)]
        expected = [
            (entry.group_key, entry.rest, value[:8])
            for entry, value in kept
            if variable.kind != "list" or entry.rest
        ]
        found = [(e.group_key, e.rest, layout.before(index, e.time_ms or 0)[1:]) for e in entries]
        assert sorted(found) == sorted(expected)
    by_key = [layout.split(key) for key, _ in scan_table(state, 0x7F)]
    by_time = [layout.split(key) for key, _ in scan_table(state, 0xFF)]
    assert sorted((e.group_key, e.rest) for e in by_key) == sorted(
        (e.group_key, layout.before(0xFF, e.time_ms or 0)[1:]) for e in by_time
    )


class Custom(StatefulProcessor):
    """A processor that calls the functions of a test."""

    def __init__(self, init: Any, handle_rows: Any = None, close: Any = None) -> None:
        self._init, self._handle_rows, self._close = init, handle_rows, close

    def init(self, handle: Any) -> None:
        self.handle = handle
        self.asked = not hasattr(handle.keys, "state")  # on the driver, which only asks for the variables
        self.state = self._init(handle)

    def handleInputRows(self, key: Any, rows: Any, timerValues: Any) -> Any:
        return self._handle_rows(self, key, rows, timerValues) if self._handle_rows else iter([])

    def close(self) -> None:
        if self._close:
            self._close(self)


def custom(init: Any, handle_rows: Any = None, close: Any = None, **options: Any) -> Shard:
    """Returns a shard with a processor that calls these functions."""
    names = {"key": "k LONG", "columns": "k LONG, n LONG", "output": "k LONG, n LONG", **options}
    return Shard(runner(Custom(init, handle_rows, close), **names), names["columns"])


def nothing(handle: Any) -> None:
    """An ``init`` that creates no state."""


def with_state(shard: Shard, state: StateAccess) -> Shard:
    """Returns the shard with the state that another shard wrote."""
    shard.state = state
    return shard
