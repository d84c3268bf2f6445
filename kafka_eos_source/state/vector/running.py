"""Aggregation without windows: one value per key over all its rows, kept forever."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, ClassVar

import pyarrow as pa

from kafka_eos_source.state.encoding.describe import TableDescription
from kafka_eos_source.state.encoding.layout import keyed_keys, split_keys
from kafka_eos_source.state.model import BatchContext, StateAccess
from kafka_eos_source.state.vector import due
from kafka_eos_source.state.vector.aggregation import Aggregation
from kafka_eos_source.state.vector.emission import Emission, Groups, held_table, read_held
from kafka_eos_source.state.vector.grouping import (
    HELD,
    VALUES,
    Grouping,
    combine_with_stored,
    sort_by_store_key,
)


class ByKey(Grouping):
    """Groups rows by key alone; the base of both ways to emit the results.

    Layout of the store (a timed entry exists only for a result that is held back)::

        keyed 0x02 │ group key           →    version │ states [ │ due │ what was emitted ]
        timed 0x82 │ due │ group key     →    (empty)
    """

    extra: ClassVar[pa.Schema] = pa.schema([])

    def __init__(self, keys: pa.Schema, aggregation: Aggregation, emission: Emission) -> None:
        super().__init__(keys, aggregation)
        self._emission = emission

    @property
    def output(self) -> pa.Schema:
        return pa.schema([*self.keys, *self._emission.output])

    @property
    def tables(self) -> dict[int, TableDescription]:
        return {VALUES: TableDescription("aggregates", self._emission.value), **held_table(self._emission)}

    @property
    def details(self) -> dict[str, Any]:
        return self._emission.details()

    def reduce_rows(self, rows: pa.RecordBatch) -> pa.RecordBatch:
        columns = {name: rows.column(name) for name in self.aggregation.columns}
        return self.batch(self.aggregation.aggregate_rows(self.key_arrays(rows), columns))

    def merge_partials(self, partial: pa.RecordBatch) -> pa.RecordBatch:
        keys, _, states = self.split(partial)
        return self.batch(self.aggregation.merge_states(keys, states))

    def read(self, table: int, keys: pa.BinaryArray, values: pa.BinaryArray) -> pa.Table:
        if table == HELD:
            return read_held(self.codec, self.keys, keys)
        groups = self._emission.stored(keys, self.codec.decode(split_keys(keys).group_keys), values)
        fields = [*self.keys, *self.aggregation.results]
        return pa.Table.from_arrays(self._emission.current(groups), schema=pa.schema(fields))

    def _combined(self, partial: pa.RecordBatch, state: StateAccess) -> Groups:
        """Returns the groups of partial rows with their new states."""
        keys, _, new = self.split(partial)
        store_keys = keyed_keys(VALUES, self.codec.encode(keys))
        store_keys, keys, new = sort_by_store_key(store_keys, keys, new)
        combined = combine_with_stored(state, store_keys, self._emission.codec, self.aggregation, new)
        return Groups(store_keys, keys, *combined)


class Running(ByKey):
    """Emits each changed result in the batch that changes it."""

    def update(
        self,
        parts: Iterator[pa.RecordBatch],
        state: StateAccess,
        _context: BatchContext,
        *,
        divided: bool,  # noqa: ARG002  nothing is due, so nothing depends on it
    ) -> Iterator[list[pa.Array]]:
        for partial in parts:
            groups = self._combined(partial, state)
            yield from self._emission.settle(groups, state, None, None, changed=True)


class HeldRunning(ByKey):
    """Holds changed results back in processing time.

    `update` does something without rows too, because a result may be due.
    """

    def update(
        self, parts: Iterator[pa.RecordBatch], state: StateAccess, context: BatchContext, *, divided: bool
    ) -> Iterator[list[pa.Array]]:
        now_ms = context.time_ms
        waiting = due.DueEntries(state, HELD, now_ms, divided=divided)
        first_ms = due.first_after(state, HELD, now_ms)
        if first_ms is not None:
            context.request_batch_at(first_ms)
        changed = pa.array([], pa.binary())
        for partial in parts:
            if self._emission.limit_ms is not None:
                context.request_batch_at(now_ms + self._emission.limit_ms)
            groups = self._combined(partial, state)
            yield from self._emission.settle(groups, state, None, now_ms, changed=True)
            if not divided:
                changed = split_keys(groups.store_keys).group_keys
        for group_keys in waiting.group_keys():
            group_keys = group_keys.filter(due.is_not_in(group_keys, changed))
            if not len(group_keys):
                continue
            store_keys = keyed_keys(VALUES, group_keys)
            place, values = self.codec.decode(group_keys), state.get_many(store_keys)
            groups = self._emission.stored(store_keys, place, values)
            yield from self._emission.settle(groups, state, None, now_ms, changed=False)
