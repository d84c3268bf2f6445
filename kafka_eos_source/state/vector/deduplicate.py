"""The first row of each key, once: for ever, or within a time."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from functools import cached_property
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from kafka_eos_source.errors import InvalidOptionError
from kafka_eos_source.state.encoding import binary, cells
from kafka_eos_source.state.encoding.binary import Ints
from kafka_eos_source.state.encoding.describe import Description, TableDescription, describe
from kafka_eos_source.state.encoding.keys import KeyCodec, keyed_keys, numbered, numbered_in_order
from kafka_eos_source.state.encoding.rows import RowCodec
from kafka_eos_source.state.model import BatchContext, StateAccess
from kafka_eos_source.state.vector import due
from kafka_eos_source.state.vector.grouping import (
    TIMES,
    VALUE_VERSION,
    VALUES,
    key_columns,
    seen,
    without_made,
)
from kafka_eos_source.state.vector.intake import chunks, output
from kafka_eos_source.state.vector.windows import Duration, check_time_column, milliseconds, times_ms

#: What is kept of a key within a time: when its last row passed, and when its entry in the table of times is.
_PASSED = pa.schema([pa.field(name, pa.int64(), nullable=False) for name in ("passed_ms", "due_ms")])


class DeduplicateProcessor:
    """Rows whose key has not come before (`state.model.ShardProcessor`), all columns of them.

    Without ``within`` a key is kept for ever. With it, a row is a duplicate when it comes after another row
    of its key that passed, and its event time is less than ``within`` after that one's. Rows of one
    micro-batch are taken in the order of event time. Keys are forgotten when nothing can be a duplicate of
    them any more; rows that are earlier than the watermark (the largest event time of all shards in the
    batches before, less ``grace``) might be duplicates of something forgotten, and are dropped and counted,
    as in Spark's ``dropDuplicatesWithinWatermark``.

    ::

        keyed 0x02 │ group key           →    version [ │ passed │ due ]
        timed 0x81 │ time │ group key    →    nothing                        (`due`; only within a time)

    Args:
        schema: of the rows.
        keys: columns that tell which rows are the same.
        within: how far apart in event time duplicates are at most; None = any time.
        on: the column of event time: timestamp, or int64 in ms since the epoch. Needed with ``within``.
        grace: how much earlier than the newest row a row may come.

    Raises:
        InvalidSchemaError: a column is missing, or of a type that does not fit.
        InvalidOptionError: ``within`` without ``on``, or no time spans.
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
                f"within is {within!r} and on is {on!r}, expected both or none",
                fix="name the column of event time with 'on', and with 'within' how long a key is kept",
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
        """The columns of the rows."""
        return self._schema

    @property
    def partial_schema(self) -> pa.Schema:
        """The columns of the rows."""
        return self._schema

    @cached_property
    def schema(self) -> str:
        """Fingerprint of how keys and values are encoded. Grace and ``within`` may change."""
        return self.description.fingerprint()

    @cached_property
    def description(self) -> Description:
        """What the store says of itself."""
        if self._on is None:
            return Description("deduplicate", self._keys, {VALUES: TableDescription("keys")})
        tables = {VALUES: TableDescription("keys", _PASSED), TIMES: TableDescription("due", encoding="due")}
        return Description("deduplicate", self._keys, tables)

    def partial(self, batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        """Rows of one input partition, before the shuffle, without those that are surely duplicates.

        Within a time those are the rows with the same key and event time. Others may be needed: what they
        would be duplicates of may be a duplicate itself.
        """
        for rows in chunks(batches, self._schema):
            columns = [rows.column(name) for name in self._keys.names]
            if self._on is None:
                number, _ = numbered(self._codec.encode(columns))
            else:
                schema = pa.schema([*self._keys, pa.field("", rows.schema.field(self._on).type)])
                number, _ = numbered(KeyCodec(schema).encode([*columns, rows.column(self._on)]))
            yield from output(self._schema, rows.take(pa.array(_firsts(number))).columns)

    def process(
        self, batches: Iterator[pa.RecordBatch], state: StateAccess, context: BatchContext
    ) -> Iterator[pa.RecordBatch]:
        """Rows of this shard in this micro-batch, in; those that are no duplicates, out, in their order."""
        describe(state, self.description)
        if self._on is not None:
            self._forget(state, context.watermark_ms(self._grace_ms))
        for rows in chunks(batches, self._schema):
            passed = (
                self._first(rows, state) if self._on is None else self._within(rows, self._on, state, context)
            )
            yield from output(self._schema, rows.take(pa.array(passed)).columns)

    def _first(self, rows: pa.RecordBatch, state: StateAccess) -> Ints:
        number, group_keys = numbered_in_order(
            self._codec.encode([rows.column(name) for name in self._keys.names])
        )
        places = keyed_keys(VALUES, group_keys)
        new = ~binary.valid(state.get_many(places))
        added = places.filter(pa.array(new))
        state.put_many(added, pa.repeat(pa.scalar(VALUE_VERSION, pa.binary()), len(added)))
        return np.sort(_firsts(number)[new])

    def _within(self, rows: pa.RecordBatch, on: str, state: StateAccess, context: BatchContext) -> Ints:
        within_ms = self._within_ms or 0
        times, is_valid = times_ms(rows.column(on))
        seen(context, times[is_valid])
        watermark = context.watermark_ms(self._grace_ms)
        late = is_valid & (times < watermark) if watermark is not None else np.zeros(len(times), np.bool_)
        for metric, some in (("late_rows", late), ("null_time_rows", ~is_valid)):
            if bool(some.any()):
                context.count(metric, int(some.sum()))
        own = np.flatnonzero(is_valid & ~late)
        columns = [rows.column(name).take(pa.array(own)) for name in self._keys.names]
        number, group_keys = numbered_in_order(self._codec.encode(columns))
        places = keyed_keys(VALUES, group_keys)
        stored = state.get_many(places)
        known = binary.valid(stored)
        before, entry = (cells.raw(column, np.int64) for column in self._values.decode(stored))
        # From when on a row of the key passes.
        floor = np.where(known, before + within_ms, np.iinfo(np.int64).min)
        passed, floor = _passing(number, times[own], floor, within_ms)
        last = floor - within_ms
        changed = np.zeros(len(floor), np.bool_)
        changed[number[passed]] = True
        keys = group_keys.filter(pa.array(changed))
        old = pa.array(entry, mask=~known).filter(pa.array(changed))
        new = due.moved(old, floor[changed], np.ones(len(keys), np.bool_), None)
        state.put_many(places.filter(pa.array(changed)), self._values.encode([pa.array(last[changed]), new]))
        first = old.is_null()
        due.move(state, TIMES, keys.filter(first), old.filter(first), new.filter(first))
        return np.asarray(own[np.sort(passed)], np.int64)

    def _forget(self, state: StateAccess, until_ms: int | None) -> None:
        """Deletes the keys that no row can be a duplicate of, as all that are earlier are late."""
        group_keys = due.due_keys(state, TIMES, until_ms)
        if len(group_keys) and until_ms is not None:
            places = keyed_keys(VALUES, group_keys)
            last, entry = self._values.decode(state.get_many(places))
            ends = cells.raw(last, np.int64) + (self._within_ms or 0)
            kept = ends > until_ms
            values = self._values.encode([last, pa.array(ends)])
            state.put_many(places, pc.if_else(pa.array(kept), values, pa.scalar(None, pa.binary())))
            due.move(state, TIMES, group_keys, entry, pa.array(ends, mask=~kept))

    @cached_property
    def _codec(self) -> KeyCodec:
        return KeyCodec(self._keys)

    @cached_property
    def _values(self) -> RowCodec:
        return RowCodec(_PASSED, lead=VALUE_VERSION)

    def __getstate__(self) -> dict[str, Any]:
        """What is declared: the rest is made of it where it is needed."""
        return without_made(self)


def _firsts(number: Ints) -> Ints:
    """Where each number comes first, given numbers from 0."""
    firsts = np.zeros(int(number.max()) + 1 if len(number) else 0, np.int64)
    firsts[number[::-1]] = np.arange(len(number))[::-1]
    return firsts


def _passing(number: Ints, times: Ints, floor: Ints, within_ms: int) -> tuple[NDArray[Any], Ints]:
    """The rows that pass, a key's in the order of time: each one lifts its key's floor.

    One round for each time that a key passes; all keys at once in a round.

    Args:
        number: of the key of each row.
        times: of the rows.
        floor: of each key, the time from which on a row passes.

    Returns: the rows, and the floors after them.
    """
    order = np.lexsort((times, number))
    number, times, floor = number[order], times[order], floor.copy()
    distinct = np.unique(times)
    # Key and time as one number, in the order of rows, to look up the first row of a key from a time on.
    step = len(distinct) + 1
    rank = number * step + np.searchsorted(distinct, times)
    ends = np.searchsorted(number, np.arange(len(floor)), side="right")
    keys = np.arange(len(floor))
    found: list[NDArray[Any]] = []
    while len(keys):
        at = np.searchsorted(rank, keys * step + np.searchsorted(distinct, floor[keys]))
        some = at < ends[keys]
        keys, at = keys[some], at[some]
        floor[keys] = times[at] + within_ms
        found.append(order[at])
    return np.concatenate(found) if found else np.zeros(0, np.int64), floor
