"""Deduplication: passes the first row of each key, once and for all or once per span of event time."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from functools import cached_property
from types import TracebackType
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from kafka_eos_source.errors import InvalidOptionError
from kafka_eos_source.state.encoding import binary
from kafka_eos_source.state.encoding.binary import Ints, RowCodec
from kafka_eos_source.state.encoding.describe import Description, TableDescription
from kafka_eos_source.state.encoding.layout import KeyCodec, keyed_keys, numbered, numbered_in_order
from kafka_eos_source.state.model import BatchContext, StateAccess
from kafka_eos_source.state.shard_rows import RowsByKey, RowsFile, record_event_times, temporary_files
from kafka_eos_source.state.vector.arrays import chunks, concat_batches, output_batches
from kafka_eos_source.state.vector.groups import (
    TIMES,
    VALUES,
    Declared,
    DueEntries,
    key_columns,
    move_due,
    next_entries,
)
from kafka_eos_source.state.vector.versions import agree
from kafka_eos_source.state.vector.windows import Duration, check_time_column, milliseconds, times_ms

#: Columns of the rows that are compared within the batch: group key, event time, and position in the batch.
_TIMED = pa.schema([("key", pa.binary()), ("time_ms", pa.int64()), ("position", pa.int64())])

#: First byte of the values, which have only one version.
_VALUE_VERSION = b"\x01"

#: Value of a key when ``within`` is set: event time of its newest row that passed, and time of its due entry.
_PASSED = pa.schema([pa.field(name, pa.int64(), nullable=False) for name in ("passed_ms", "due_ms")])


class DeduplicateProcessor(Declared):
    """Passes the first row of each key, with all its columns, and drops the duplicates.

    It implements `state.model.ShardProcessor`; `deduplicate` creates it for a streaming
    DataFrame.

    Without ``within``, the state keeps every key forever. With ``within``, a row is a duplicate if an
    earlier row of its key passed and its own event time is less than ``within`` after the event time of that
    row. The rows of one micro-batch are processed in the order of event time, so their order of arrival
    decides only which of several rows with equal key and equal event time passes. Meanwhile, a shard's rows
    after the first 500,000 are in temporary files, and each row takes one bit of memory.

    With ``within``, a key is deleted once no later row can be its duplicate. The watermark is the largest
    event time of all shards in the previous batches, minus ``grace``. A row before the watermark might be a
    duplicate of a deleted key, so it is dropped and counted as ``late_rows``, as in Spark's
    ``dropDuplicatesWithinWatermark``. A row without an event time is dropped and counted as
    ``null_time_rows``.

    Layout of the store (a timed entry exists only with ``within``; see `groups`)::

        keyed 0x02 │ group key           →    version [ │ passed │ due ]
        timed 0x81 │ time │ group key    →    (empty)

    Args:
        schema: columns of the input rows.
        keys: names of the columns that identify duplicates.
        within: maximum span of event time between duplicates; None = unlimited.
        on: name of the event-time column: timestamp, or int64 in ms since the epoch. Required with
            ``within``.
        grace: how much earlier than the newest row a row may be.

    Raises:
        InvalidSchemaError: if a column is missing or has an unsupported type.
        InvalidOptionError: if only one of ``within`` and ``on`` is set, or a time span is invalid.

    Example::

        schema = pa.schema([("payment_id", pa.string()), ("time", pa.timestamp("us", "UTC"))])
        DeduplicateProcessor(schema, ["payment_id"], within="1 day", on="time", grace="1 hour")
    """

    def __init__(
        self,
        schema: pa.Schema,
        keys: Sequence[str],
        *,
        within: Duration | None = None,
        on: str | None = None,
        grace: Duration = "0s",
    ) -> None:
        if (within is None) != (on is None):
            raise InvalidOptionError(
                f"within is {within!r} and on is {on!r}; expected both or neither.",
                fix="set 'on' to the event-time column and 'within' to a time span such as '1 day', or "
                "remove both.",
            )
        self._schema = schema
        self._keys = key_columns(schema, keys)
        self._on = on
        self._within_ms = None if within is None else milliseconds("within", within, at_least=1)
        self._grace_ms = milliseconds("grace", grace)
        if on is not None:
            check_time_column(schema, on)
        self._codec.encode([pa.array([], field.type) for field in self._keys])

    @property
    def output(self) -> pa.Schema:
        """Columns of the emitted rows: those of the input rows."""
        return self._schema

    @property
    def partial_schema(self) -> pa.Schema:
        """Columns of the rows that `partial` yields: those of the input rows."""
        return self._schema

    @cached_property
    def description(self) -> Description:
        """Description of the state; ``grace`` and the length of ``within`` do not affect it."""
        if self._on is None:
            return Description("deduplicate", self._keys, {VALUES: TableDescription("keys")})
        tables = {VALUES: TableDescription("keys", _PASSED), TIMES: TableDescription("due", encoding="due")}
        return Description("deduplicate", self._keys, tables)

    def partial(self, batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        """Drops the rows of one input partition that are certainly duplicates. Runs before the shuffle.

        With ``within``, only rows with equal key and equal event time are certain duplicates. Any other row
        may be needed, because the row that it seems to duplicate may turn out to be a duplicate itself.

        Args:
            batches: rows of one input partition.
        """
        for rows in chunks(batches, self._schema):
            columns = [rows.column(name) for name in self._keys.names]
            if self._on is None:
                number, _ = numbered(self._codec.encode(columns))
            else:
                schema = pa.schema([*self._keys, pa.field("", rows.schema.field(self._on).type)])
                number, _ = numbered(KeyCodec(schema).encode([*columns, rows.column(self._on)]))
            yield from output_batches(self._schema, rows.take(pa.array(_first_positions(number))).columns)

    def process(
        self, batches: Iterator[pa.RecordBatch], state: StateAccess, context: BatchContext
    ) -> Iterator[pa.RecordBatch]:
        """Yields the rows of this shard's micro-batch that are not duplicates, in their order of arrival.

        Args:
            batches: all rows of this shard in this micro-batch.
            state: state of this shard.
            context: the micro-batch; late rows and rows without a time are counted in it.

        Raises:
            StateMismatchError: if an earlier version of the query wrote a state that cannot be continued.
        """
        agree(state, self.description, context)
        if self._on is None:
            for rows in chunks(batches, self._schema):
                yield from self._taken(rows, self._pass_new_keys(rows, state))
            return
        self._delete_expired(state, context.watermark_ms(self._grace_ms))
        # The last row may be the earliest, so all rows are read before the first one passes. Otherwise, the
        # output would depend on how the shuffle happened to deliver the rows.
        with HeldChunks(self._schema) as held, RowsByKey(["key"]) as timed:
            count = 0
            for rows in chunks(batches, self._schema):
                own, times = self._on_time(rows, self._on, context)
                keys = self._codec.encode([rows.column(name).take(own) for name in self._keys.names])
                positions = pa.array(np.arange(count, count + len(own)))
                timed.add(pa.RecordBatch.from_arrays([keys, pa.array(times), positions], schema=_TIMED))
                held.add(rows if len(own) == rows.num_rows else rows.take(own))
                count += len(own)
            passed = Positions(count)
            for part in timed.parts():
                passed.add(self._pass_within(concat_batches(part), state))
            for rows, first in held.with_first_positions():
                yield from self._taken(rows, passed.between(first, first + rows.num_rows))

    def _taken(self, rows: pa.RecordBatch, positions: Ints) -> Iterator[pa.RecordBatch]:
        return output_batches(self._schema, rows.take(pa.array(positions)).columns)

    def _pass_new_keys(self, rows: pa.RecordBatch, state: StateAccess) -> Ints:
        """Adds the new keys to the state; returns the positions of their first rows."""
        number, group_keys = numbered_in_order(
            self._codec.encode([rows.column(name) for name in self._keys.names])
        )
        places = keyed_keys(VALUES, group_keys)
        new = ~binary.valid(state.get_many(places))
        added = places.filter(pa.array(new))
        state.put_many(added, pa.repeat(pa.scalar(_VALUE_VERSION, pa.binary()), len(added)))
        return np.sort(_first_positions(number)[new])

    def _on_time(self, rows: pa.RecordBatch, on: str, context: BatchContext) -> tuple[pa.Array, Ints]:
        """Returns positions and event times (ms) of the rows that may pass; counts the others."""
        times, is_valid = times_ms(rows.column(on))
        record_event_times(context, times[is_valid])
        watermark = context.watermark_ms(self._grace_ms)
        late = is_valid & (times < watermark) if watermark is not None else np.zeros(len(times), np.bool_)
        for metric, dropped in (("late_rows", late), ("null_time_rows", ~is_valid)):
            if bool(dropped.any()):
                context.count(metric, int(dropped.sum()))
        own = np.flatnonzero(is_valid & ~late)
        return pa.array(own), times[own]

    def _pass_within(self, timed: pa.RecordBatch, state: StateAccess) -> Ints:
        """Updates the times of keys in the state; returns the positions of the rows that pass.

        Args:
            timed: columns of `_TIMED`, of all rows of these keys in the batch.
            state: state of the shard.
        """
        within_ms = self._within_ms or 0
        group_keys, *columns = timed.columns
        times, positions = (binary.raw(column, np.int64) for column in columns)
        number, group_keys = numbered_in_order(group_keys)
        places = keyed_keys(VALUES, group_keys)
        stored = state.get_many(places)
        known = binary.valid(stored)
        before, entry = (binary.raw(column, np.int64) for column in self._values.decode(stored))
        # For each key, the earliest event time at which a row passes.
        floor = np.where(known, before + within_ms, np.iinfo(np.int64).min)
        passed, floor = _passing(number, times, floor, within_ms)
        last = floor - within_ms
        changed = np.zeros(len(floor), np.bool_)
        changed[number[passed]] = True
        keys = group_keys.filter(pa.array(changed))
        old = pa.array(entry, mask=~known).filter(pa.array(changed))
        new = next_entries(old, floor[changed], np.ones(len(keys), np.bool_), None)
        state.put_many(places.filter(pa.array(changed)), self._values.encode([pa.array(last[changed]), new]))
        first = old.is_null()
        move_due(state, TIMES, keys.filter(first), old.filter(first), new.filter(first))
        return np.asarray(positions[passed], np.int64)

    def _delete_expired(self, state: StateAccess, until_ms: int | None) -> None:
        """Deletes the keys whose duplicates would all be earlier than ``until_ms``, and so late."""
        if until_ms is None:
            return
        for group_keys in DueEntries(state, TIMES, until_ms, divided=False).group_keys():
            places = keyed_keys(VALUES, group_keys)
            last, entry = self._values.decode(state.get_many(places))
            ends = binary.raw(last, np.int64) + (self._within_ms or 0)
            kept = ends > until_ms
            values = self._values.encode([last, pa.array(ends)])
            state.put_many(places, pc.if_else(pa.array(kept), values, pa.scalar(None, pa.binary())))
            move_due(state, TIMES, group_keys, entry, pa.array(ends, mask=~kept))

    @cached_property
    def _codec(self) -> KeyCodec:
        return KeyCodec(self._keys)

    @cached_property
    def _values(self) -> RowCodec:
        return RowCodec(_PASSED, lead=_VALUE_VERSION)


def _first_positions(number: Ints) -> Ints:
    """Returns the position of the first occurrence of each number from 0 to the largest."""
    firsts = np.zeros(int(number.max()) + 1 if len(number) else 0, np.int64)
    firsts[number[::-1]] = np.arange(len(number))[::-1]
    return firsts


def _passing(number: Ints, times: Ints, floor: Ints, within_ms: int) -> tuple[NDArray[Any], Ints]:
    """Finds the rows that are no duplicates, given the time from which each key may pass again.

    A row that passes raises this time, the *floor* of its key.

    The rows of a key are considered in the order of event time. Each round of the loop finds the next row
    that passes for all keys at once, so the number of rounds is the largest number of rows of one key that
    pass.

    Args:
        number: number of the key of each row.
        times: event time of each row, ms.
        floor: for each key, the event time from which on a row passes, ms.
        within_ms: how far a row that passes raises the floor above its own event time.

    Returns:
        Positions of the rows that pass, and the new floors.
    """
    order = np.lexsort((times, number))
    number, times, floor = number[order], times[order], floor.copy()
    distinct = np.unique(times)
    # One sorted number for key and time, so that a binary search finds a key's first row from a time on.
    step = len(distinct) + 1
    rank = number * step + np.searchsorted(distinct, times)
    ends = np.searchsorted(number, np.arange(len(floor)), side="right")
    keys = np.arange(len(floor))
    passing: list[NDArray[Any]] = []
    while len(keys):
        at = np.searchsorted(rank, keys * step + np.searchsorted(distinct, floor[keys]))
        has_row = at < ends[keys]
        keys, at = keys[has_row], at[has_row]
        floor[keys] = times[at] + within_ms
        passing.append(order[at])
    return np.concatenate(passing) if passing else np.zeros(0, np.int64), floor


# -- rows that wait for the second pass


class HeldChunks:
    """Chunks of rows: one in memory, further ones in a temporary file. A context manager.

    Most micro-batches have one chunk per shard, and need no file. The file has no name, so no other process
    can open it, and it disappears with this process.

    Args:
        schema: columns of the rows.
    """

    def __init__(self, schema: pa.Schema) -> None:
        self._schema = schema
        self._first: pa.RecordBatch | None = None
        self._further: RowsFile | None = None

    def __enter__(self) -> HeldChunks:
        return self

    def __exit__(
        self, _type: type[BaseException] | None, _value: BaseException | None, _trace: TracebackType | None
    ) -> None:
        if self._further is not None:
            self._further.close()

    def add(self, rows: pa.RecordBatch) -> None:
        """Holds a chunk.

        Raises:
            UnavailableError: if the temporary folder is full or not writable.
        """
        if self._first is None:
            self._first = rows
            return
        with temporary_files():
            if self._further is None:
                self._further = RowsFile(self._schema)
            self._further.add(rows)

    def with_first_positions(self) -> Iterator[tuple[pa.RecordBatch, int]]:
        """Yields the chunks in order, each with the position of its first row among all rows. Call it once.

        Raises:
            UnavailableError: if the temporary file cannot be written or read.
        """
        if self._first is None:
            return
        yield self._first, 0
        if self._further is None:
            return
        first, self._first = self._first.num_rows, None  # frees the memory
        for rows in self._further.read():
            yield rows, first
            first += rows.num_rows


class Positions:
    """A set of positions of rows, which takes one bit per row.

    Args:
        rows: number of rows.
    """

    def __init__(self, rows: int) -> None:
        self._bits = np.zeros(-(-rows // 8), np.uint8)

    def add(self, positions: Ints) -> None:
        """Adds positions in any order, each at most once."""
        if not len(positions):
            return
        positions = np.sort(positions)
        byte, bit = positions >> 3, np.left_shift(1, positions & 7).astype(np.uint8)
        firsts = np.flatnonzero(np.diff(byte, prepend=-1))
        self._bits[byte[firsts]] |= np.bitwise_or.reduceat(bit, firsts)

    def between(self, start: int, end: int) -> Ints:
        """Returns the positions from ``start`` to ``end`` (excluded), in order and relative to ``start``."""
        first = start >> 3
        bits = np.unpackbits(self._bits[first : -(-end // 8)], bitorder="little")
        return np.flatnonzero(bits[start - 8 * first : end - 8 * first])
