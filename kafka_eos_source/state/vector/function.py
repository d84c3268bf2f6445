"""A user's own function from rows and the state of their keys to output and new state, in columns."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from kafka_eos_source.errors import InvalidSchemaError
from kafka_eos_source.state.encoding import binary
from kafka_eos_source.state.encoding.describe import Description, TableDescription, describe
from kafka_eos_source.state.encoding.keys import KeyCodec, keyed_keys, numbered_in_order
from kafka_eos_source.state.encoding.rows import RowCodec
from kafka_eos_source.state.model import BatchContext, StateAccess
from kafka_eos_source.state.vector.grouping import VALUE_VERSION, VALUES, key_columns, seen, without_made
from kafka_eos_source.state.vector.intake import chunks, conform, output
from kafka_eos_source.state.vector.windows import check_time_column, times_ms


@dataclass(frozen=True)
class KeyedBatch:
    """What a function is called with: many rows, and the state of their keys.

    Attributes:
        rows: in the order in which they came, all columns.
        keys: the distinct keys of the rows, in no order that matters; the key's columns.
        key_of_row: for each row the place of its key in ``keys`` and ``state``, from 0.
        state: the state of each key; null = it has none.
        batch_id: Spark's.
        time_ms: processing time of the micro-batch, ms since the epoch: the same for all calls in it.
        event_time_ms: largest event time that any shard saw in the batches before; None = none, or no column
            of event time was named.
    """

    rows: pa.RecordBatch
    keys: pa.RecordBatch
    key_of_row: pa.Int64Array
    state: pa.StructArray
    batch_id: int
    time_ms: int
    event_time_ms: int | None


#: Gives the output rows (None = no rows), and the new state of each key, in the order of keys; null = none.
Function = Callable[[KeyedBatch], tuple[pa.RecordBatch | pa.Table | None, pa.StructArray]]


class FunctionProcessor:
    """Calls a function with rows and the state of their keys (`state.model.ShardProcessor`).

    The function is called with some hundred thousand rows at a time. A key whose rows are in two calls of a
    micro-batch finds in the second what the first left. Nothing but its return values may last: a task may
    run twice, and of two runs of a batch one counts.

    ::

        keyed 0x02 │ group key    →    version │ row of the state's columns (`rows`)

    Args:
        schema: of the rows.
        keys: columns of the key.
        function: importable, or such that cloudpickle takes it.
        output: columns that the function gives.
        state: columns of the state of a key: bool, int8 to int64, float, double, decimal, string, binary,
            date, timestamp.
        event_time: a column whose largest value makes the watermark; None = there is none.
        version: part of the fingerprint: change it when the same columns get another meaning.

    Raises:
        InvalidSchemaError: a column is missing, or of a type that does not fit.
    """

    def __init__(
        self,
        schema: pa.Schema,
        keys: Sequence[str],
        function: Function,
        *,
        output: pa.Schema,
        state: pa.Schema,
        event_time: str | None = None,
        version: str = "1",
    ) -> None:
        self._schema = schema
        self._keys = key_columns(schema, keys)
        self._function = function
        self._output = output
        self._state = state
        self._event_time = event_time
        self._version = version
        if event_time is not None:
            check_time_column(schema, event_time)
        if not len(state):
            raise InvalidSchemaError("the state has no columns", fix="name one at least")
        self._codec.encode([pa.array([], field.type) for field in self._keys])
        self._values.encode([pa.array([], field.type) for field in state])

    @property
    def output(self) -> pa.Schema:
        """Columns that the function gives."""
        return self._output

    @cached_property
    def schema(self) -> str:
        """Fingerprint of how keys and values are encoded."""
        return self.description.fingerprint()

    @cached_property
    def description(self) -> Description:
        """What the store says of itself."""
        tables = {VALUES: TableDescription("state", self._state)}
        return Description("function", self._keys, tables, {"version": self._version})

    def process(
        self, batches: Iterator[pa.RecordBatch], state: StateAccess, context: BatchContext
    ) -> Iterator[pa.RecordBatch]:
        """Rows of this shard in this micro-batch, in; what the function gives, out.

        Raises:
            InvalidSchemaError: the function gave columns that are not those declared, or as many states as
                there are no keys.
        """
        describe(state, self.description)
        for rows in chunks(batches, self._schema):
            if self._event_time is not None:
                times, is_valid = times_ms(rows.column(self._event_time))
                seen(context, times[is_valid])
            yield from self._call(rows, state, context)

    def _call(
        self, rows: pa.RecordBatch, state: StateAccess, context: BatchContext
    ) -> Iterator[pa.RecordBatch]:
        number, group_keys = numbered_in_order(
            self._codec.encode([rows.column(name) for name in self._keys.names])
        )
        places = keyed_keys(VALUES, group_keys)
        stored = state.get_many(places)
        emitted, new = self._function(
            KeyedBatch(
                rows,
                pa.RecordBatch.from_arrays(self._codec.decode(group_keys), schema=self._keys),
                pa.array(number),
                self._struct(stored),
                context.batch_id,
                context.time_ms,
                context.event_time_ms,
            )
        )
        values = self._bytes(new, len(group_keys))
        same = pc.or_(pc.equal(stored, values).fill_null(False), pc.and_(stored.is_null(), values.is_null()))
        changed = pc.invert(same)
        state.put_many(places.filter(changed), values.filter(changed))
        if emitted is not None:
            parts = emitted.to_batches() if isinstance(emitted, pa.Table) else [emitted]
            for part in parts:
                yield from output(self._output, conform(part, self._output).columns)

    def _struct(self, stored: pa.BinaryArray) -> pa.StructArray:
        columns = self._values.decode(stored)
        mask = pa.array(~binary.valid(stored))
        return pa.StructArray.from_arrays(columns, fields=list(self._state), mask=mask)

    def _bytes(self, new: pa.StructArray, keys: int) -> pa.BinaryArray:
        if isinstance(new, pa.ChunkedArray):
            new = binary.concat(new.chunks, new.type)
        if not isinstance(new, pa.StructArray) or len(new) != keys:
            what = f"{len(new)} states" if isinstance(new, pa.StructArray) else type(new).__name__
            raise InvalidSchemaError(
                f"the function gave {what} for {keys} keys",
                fix="give a StructArray with a row for each of KeyedBatch.keys; null = no state",
            )
        present = new.filter(new.is_valid())
        rows = pa.RecordBatch.from_struct_array(present)
        values = self._values.encode(conform(rows, self._state).columns)
        if not new.null_count:
            return values
        place = np.cumsum(binary.valid(new)) - 1
        return values.take(pa.array(place, mask=~binary.valid(new)))

    @cached_property
    def _codec(self) -> KeyCodec:
        return KeyCodec(self._keys)

    @cached_property
    def _values(self) -> RowCodec:
        return RowCodec(self._state, lead=VALUE_VERSION)

    def __getstate__(self) -> dict[str, Any]:
        """What is declared: the rest is made of it where it is needed."""
        return without_made(self)
