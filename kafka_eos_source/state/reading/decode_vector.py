"""Decodes the state of the vectorised processors to columns; aggregates appear as their current results."""

from __future__ import annotations

from collections.abc import Iterator

import pyarrow as pa

from kafka_eos_source.state.encoding.describe import Description
from kafka_eos_source.state.reading.decode import Decoder, struct_of
from kafka_eos_source.state.vector.processor import decode_state

#: Columns that belong to the key in addition to the grouping columns.
_WINDOW_COLUMNS = ("window_start", "window_end")


class VectorDecoder(Decoder):
    """Decodes one table: ``key`` holds the grouping columns and the window, ``value`` all other columns.

    A table without other columns has no ``value``.

    Raises:
        StateMismatchError: if this version does not know the kind of the store.
    """

    def __init__(self, description: Description, table: int) -> None:
        super().__init__(description)
        self.table = table
        self._description = description
        empty = pa.array([], pa.binary())
        fields = self._read(empty, empty).schema
        own = len(description.key)
        is_key = [n < own or field.name in _WINDOW_COLUMNS for n, field in enumerate(fields)]
        parts = [[n for n, of_key in enumerate(is_key) if of_key is side] for side in (True, False)]
        self._parts = [part for part in parts if part]
        self.schema = pa.schema(
            [
                pa.field(name, pa.struct([fields.field(n).with_nullable(True) for n in part]))
                for name, part in zip(("key", "value"), self._parts, strict=False)
            ]
        )

    def _read(self, keys: pa.BinaryArray, values: pa.BinaryArray) -> pa.Table:
        return decode_state(self._description, keys, values)[self._description.tables[self.table].name]

    def _decode(self, keys: pa.BinaryArray, values: pa.BinaryArray) -> Iterator[pa.RecordBatch]:
        for batch in self._read(keys, values).combine_chunks().to_batches():
            columns = [
                struct_of([batch.column(n) for n in part], field)
                for part, field in zip(self._parts, self.schema, strict=True)
            ]
            yield pa.RecordBatch.from_arrays(columns, schema=self.schema)
