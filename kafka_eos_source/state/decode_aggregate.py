"""State of `vector` aggregates as columns: results as they would be emitted now, not what is kept of them."""

from __future__ import annotations

from collections.abc import Iterator

import pyarrow as pa

from kafka_eos_source.state.decode import Decoder, struct_of
from kafka_eos_source.state.describe import Description
from kafka_eos_source.state.vector.processor import of_description

#: Behind the grouping columns: which of a key's windows.
_OF_WINDOW = ("window_start", "window_end")


class AggregateDecoder(Decoder):
    """The aggregates of a store: ``key`` is the grouping columns, and the window; ``value`` the results."""

    def __init__(self, description: Description, table: int) -> None:
        super().__init__(description)
        self.table = table
        self._grouping = of_description(description)
        nothing = pa.array([], pa.binary())
        found = self._grouping.read(table, nothing, nothing).schema
        own = len(description.key)
        is_key = [n < own or field.name in _OF_WINDOW for n, field in enumerate(found)]
        self._parts = [[n for n, of_key in enumerate(is_key) if of_key is side] for side in (True, False)]
        self.schema = pa.schema(
            [
                pa.field(name, pa.struct([found.field(n).with_nullable(True) for n in part]))
                for name, part in zip(("key", "value"), self._parts, strict=True)
            ]
        )

    def _decode(self, keys: pa.BinaryArray, values: pa.BinaryArray) -> Iterator[pa.RecordBatch]:
        rows = self._grouping.read(self.table, keys, values)
        for batch in rows.combine_chunks().to_batches():
            columns = [
                struct_of([batch.column(n) for n in part], field, batch.num_rows)
                for part, field in zip(self._parts, self.schema, strict=True)
            ]
            yield pa.RecordBatch.from_arrays(columns, schema=self.schema)
