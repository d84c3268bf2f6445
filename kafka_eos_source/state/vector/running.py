"""Aggregation without windows: one value per key over all its rows, kept forever."""

from __future__ import annotations

from collections.abc import Iterator
from typing import ClassVar

import pyarrow as pa

from kafka_eos_source.state.encoding.describe import TableDescription
from kafka_eos_source.state.encoding.keys import keyed_keys, split_keys
from kafka_eos_source.state.model import BatchContext, StateAccess
from kafka_eos_source.state.vector.grouping import VALUES, Grouping, combine_with_stored, sort_by_store_key


class Running(Grouping):
    """Groups rows by key alone.

    Layout of the store::

        keyed 0x02 │ group key    →    version │ states
    """

    extra: ClassVar[pa.Schema] = pa.schema([])

    @property
    def output(self) -> pa.Schema:
        return pa.schema([*self.keys, *self.aggregation.results])

    @property
    def tables(self) -> dict[int, TableDescription]:
        return {VALUES: TableDescription("aggregates", self.aggregation.state)}

    def reduce_rows(self, rows: pa.RecordBatch) -> pa.RecordBatch:
        columns = {name: rows.column(name) for name in self.aggregation.columns}
        return self.batch(self.aggregation.aggregate_rows(self.key_arrays(rows), columns))

    def merge_partials(self, partial: pa.RecordBatch) -> pa.RecordBatch:
        keys, _, states = self.split(partial)
        return self.batch(self.aggregation.merge_states(keys, states))

    def update(
        self, partial: pa.RecordBatch, state: StateAccess, _context: BatchContext
    ) -> Iterator[list[pa.Array]]:
        if not partial.num_rows:
            return
        keys, _, new = self.split(partial)
        store_keys, keys, new = sort_by_store_key(keyed_keys(VALUES, self.codec.encode(keys)), keys, new)
        states, _ = combine_with_stored(state, store_keys, self.values, self.aggregation, new)
        state.put_many(store_keys, self.values.encode(states))
        yield [*keys, *self.aggregation.finish(states)]

    def read(self, _table: int, keys: pa.BinaryArray, values: pa.BinaryArray) -> pa.Table:
        columns = self.codec.decode(split_keys(keys).group_keys)
        results = self.aggregation.finish(self.values.decode(values))
        return pa.Table.from_arrays([*columns, *results], schema=self.output)
