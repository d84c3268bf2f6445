"""Applies a user's function to batches of rows and to the state of their keys, in Arrow columns."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from kafka_eos_source.errors import InvalidSchemaError
from kafka_eos_source.state.encoding import binary
from kafka_eos_source.state.encoding.describe import Description, TableDescription
from kafka_eos_source.state.encoding.layout import KeyCodec, keyed_keys, numbered_in_order
from kafka_eos_source.state.model import BatchContext, StateAccess
from kafka_eos_source.state.shard_rows import record_event_times
from kafka_eos_source.state.vector.arrays import chunks, conform, output_batches
from kafka_eos_source.state.vector.groups import (
    VALUES,
    Declared,
    key_columns,
)
from kafka_eos_source.state.vector.versions import VersionedRows, agree, versions_of
from kafka_eos_source.state.vector.windows import check_time_column, times_ms


@dataclass(frozen=True)
class KeyedBatch:
    """Argument of a user's function: a batch of rows and the state of their keys.

    ``rows`` has one entry per input row; ``keys`` and ``state`` have one entry per distinct key.

    Attributes:
        rows: the input rows with all columns, in the order in which they arrived.
        keys: the distinct keys of the rows (the key columns), in any order.
        key_of_row: int64, one per row: index of the row's key in ``keys`` and in ``state``, from 0.
        state: struct with the declared state columns, one per key; null = the key has no state yet.
        batch_id: Spark's id of the micro-batch.
        time_ms: processing time of the micro-batch, ms since the epoch; equal in all calls of a micro-batch.
        event_time_ms: largest event time of all shards in the previous micro-batches, ms since the epoch;
            None = no row had one yet, or the operator has no event-time column.

    Example: a function that numbers the rows of each key from 1 on::

        def number_rows(batch: KeyedBatch):
            key = batch.key_of_row.to_numpy()
            before = batch.state.field("n").fill_null(0).to_numpy()
            in_batch = pd.Series(key).groupby(key).cumcount().to_numpy()
            output = batch.rows.append_column("n", pa.array(before[key] + in_batch + 1))
            after = before + np.bincount(key, minlength=len(before))
            return output, pa.StructArray.from_arrays([pa.array(after)], names=["n"])
    """

    rows: pa.RecordBatch
    keys: pa.RecordBatch
    key_of_row: pa.Int64Array
    state: pa.StructArray
    batch_id: int
    time_ms: int
    event_time_ms: int | None


#: A user's function. It returns the output rows (None = no rows) and a struct with the new state of each key,
#: in the order of `KeyedBatch.keys`; null deletes the state of the key.
Function = Callable[[KeyedBatch], tuple[pa.RecordBatch | pa.Table | None, pa.StructArray]]


class FunctionProcessor(Declared):
    """Calls a user's function with batches of rows and the state of their keys.

    It implements `state.model.ShardProcessor`; `apply` creates it for a streaming
    DataFrame.

    Each call receives up to about 500,000 rows. If a key has rows in two calls of a micro-batch, the second
    call receives the state that the first one returned. The function must have no other effect than its
    return values, because Spark may run a task twice and only one of the runs counts.

    Layout of the store::

        keyed 0x02 │ group key    →    version │ state columns (`encoding.binary`)

    Args:
        schema: columns of the input rows.
        keys: names of the key columns.
        function: the user's function; cloudpickle must be able to pickle it.
        output: columns of the rows that the function returns.
        state: columns of the state of a key: bool, int8 to int64, float, double, decimal, string, binary,
            date or timestamp.
        event_time: name of the column whose largest value is the watermark; None = no watermark.
        version: version of the state; change it when the meaning of the state columns changes. The operator
            then refuses older state.

    Raises:
        InvalidSchemaError: if a column is missing or has an unsupported type, or the state has no columns.

    Example (`number_rows` is in `KeyedBatch`)::

        rows = pa.schema([("sensor", pa.string())])
        counter = pa.schema([("n", pa.int64())])
        FunctionProcessor(rows, ["sensor"], number_rows, output=pa.schema([*rows, *counter]), state=counter)
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
            raise InvalidSchemaError("the state has no columns.", fix="declare at least one state column.")
        self._codec.encode([pa.array([], field.type) for field in self._keys])
        VersionedRows(versions_of(self.description)).encode([pa.array([], field.type) for field in state])

    @property
    def output(self) -> pa.Schema:
        """Columns of the rows that the function returns."""
        return self._output

    @cached_property
    def description(self) -> Description:
        """Description of the state as declared."""
        tables = {VALUES: TableDescription("state", self._state)}
        return Description("function", self._keys, tables, {"version": self._version})

    def process(
        self, batches: Iterator[pa.RecordBatch], state: StateAccess, context: BatchContext
    ) -> Iterator[pa.RecordBatch]:
        """Yields the rows that the function returns for this shard's micro-batch.

        Args:
            batches: all rows of this shard in this micro-batch.
            state: state of this shard.
            context: the micro-batch.

        Raises:
            InvalidSchemaError: if the function returned columns other than those declared, or a number of
                states that differs from the number of keys.
            StateMismatchError: if an earlier version of the query wrote a state that cannot be continued.
        """
        codec = VersionedRows(versions_of(agree(state, self.description, context)))
        for rows in chunks(batches, self._schema):
            if self._event_time is not None:
                times, is_valid = times_ms(rows.column(self._event_time))
                record_event_times(context, times[is_valid])
            yield from self._call(rows, state, context, codec)

    def _call(
        self, rows: pa.RecordBatch, state: StateAccess, context: BatchContext, codec: VersionedRows
    ) -> Iterator[pa.RecordBatch]:
        number, group_keys = numbered_in_order(
            self._codec.encode([rows.column(name) for name in self._keys.names])
        )
        places = keyed_keys(VALUES, group_keys)
        stored = state.get_many(places)
        returned, new = self._function(
            KeyedBatch(
                rows,
                pa.RecordBatch.from_arrays(self._codec.decode(group_keys), schema=self._keys),
                pa.array(number),
                self._decode_state(stored, codec),
                context.batch_id,
                context.time_ms,
                context.event_time_ms,
            )
        )
        values = self._encode_state(new, len(group_keys), codec)
        same = pc.or_(pc.equal(stored, values).fill_null(False), pc.and_(stored.is_null(), values.is_null()))
        changed = pc.invert(same)
        state.put_many(places.filter(changed), values.filter(changed))
        if returned is not None:
            parts = returned.to_batches() if isinstance(returned, pa.Table) else [returned]
            for part in parts:
                yield from output_batches(self._output, conform(part, self._output).columns)

    def _decode_state(self, stored: pa.BinaryArray, codec: VersionedRows) -> pa.StructArray:
        columns = codec.decode(stored)
        mask = pa.array(~binary.valid(stored))
        return pa.StructArray.from_arrays(columns, fields=list(self._state), mask=mask)

    def _encode_state(self, new: pa.StructArray, keys: int, codec: VersionedRows) -> pa.BinaryArray:
        if isinstance(new, pa.ChunkedArray):
            new = binary.concat(new.chunks, new.type)
        if not isinstance(new, pa.StructArray) or len(new) != keys:
            what = f"{len(new)} states" if isinstance(new, pa.StructArray) else type(new).__name__
            raise InvalidSchemaError(
                f"the function returned {what} for {keys} keys.",
                fix="return a StructArray with one state per row of KeyedBatch.keys; null deletes a state.",
            )
        present = new.filter(new.is_valid())
        rows = pa.RecordBatch.from_struct_array(present)
        values = codec.encode(conform(rows, self._state).columns)
        if not new.null_count:
            return values
        place = np.cumsum(binary.valid(new)) - 1
        return values.take(pa.array(place, mask=~binary.valid(new)))

    @cached_property
    def _codec(self) -> KeyCodec:
        return KeyCodec(self._keys)
