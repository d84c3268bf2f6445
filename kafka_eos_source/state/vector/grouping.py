"""Interface of the groupings: how rows are grouped, with or without windows, and how state is stored.

Each side of the shuffle turns rows into *partial rows*, one for each group. A partial row consists of the key
columns, the columns that the grouping adds (their names begin with ``__``), and the states of the
aggregates. Partial rows of the same group are merged into one again.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from functools import cached_property
from typing import Any, ClassVar, NamedTuple

import pyarrow as pa
import pyarrow.compute as pc

from kafka_eos_source.errors import InvalidSchemaError
from kafka_eos_source.state.encoding.describe import TableDescription
from kafka_eos_source.state.encoding.layout import KeyCodec
from kafka_eos_source.state.model import BatchContext, StateAccess
from kafka_eos_source.state.vector.aggregation import Aggregation, Grouped
from kafka_eos_source.state.vector.versions import VersionedRows

#: First byte of the values of operators whose values have only one version (`versions`).
VALUE_VERSION = b"\x01"

#: Numbers of the table with the values of the keys, of the timed table (window ends or due entries), and of
#: the timed table of results that are held back.
VALUES = 0x02
TIMES = 0x81
HELD = 0x82


class Grouping(ABC):
    """Groups rows and merges them into the state. Each process creates its own instance.

    Args:
        keys: columns of the key.
        aggregation: the aggregates that are computed.
    """

    #: Columns of a partial row between the key and the states.
    extra: ClassVar[pa.Schema]
    #: Whether `update` accepts several partial rows of the same group.
    merges: ClassVar[bool] = False

    def __init__(self, keys: pa.Schema, aggregation: Aggregation) -> None:
        self.keys = keys
        self.aggregation = aggregation
        self.codec = KeyCodec(keys)
        self.partial = pa.schema([*keys, *self.extra, *aggregation.state])

    @property
    @abstractmethod
    def output(self) -> pa.Schema:
        """Columns of the emitted rows."""

    @property
    @abstractmethod
    def tables(self) -> dict[int, TableDescription]:
        """Descriptions of the tables in the store, by table number."""

    @property
    def details(self) -> dict[str, Any]:
        """What the store's description says about the grouping, besides the aggregates and the window."""
        return {}

    @abstractmethod
    def reduce_rows(self, rows: pa.RecordBatch) -> pa.RecordBatch:
        """Computes one partial row for each group of input rows."""

    @abstractmethod
    def merge_partials(self, partial: pa.RecordBatch) -> pa.RecordBatch:
        """Merges partial rows of the same group into one."""

    @property
    def entries_per_row(self) -> int:
        """Largest number of entries of the state that one partial row changes."""
        return 1

    def admit(self, partial: pa.RecordBatch, context: BatchContext) -> pa.RecordBatch:  # noqa: ARG002
        """Returns the partial rows that have an event time, and records their times in the context.

        Call it for all partial rows of a batch before `update`, which compares windows with these times. A
        grouping without windows needs no times, and admits all rows.
        """
        return partial

    @abstractmethod
    def update(
        self, parts: Iterator[pa.RecordBatch], state: StateAccess, context: BatchContext, *, divided: bool
    ) -> Iterator[list[pa.Array]]:
        """Merges the partial rows of a batch into the state.

        Args:
            parts: partial rows that `admit` returned. All partial rows of a key are in one part, one for each
                group unless ``merges`` is set. Only one part has to fit into memory.
            state: state of the shard.
            context: the micro-batch.
            divided: whether there may be several parts, so that the changed keys do not fit into memory.

        Yields:
            Columns of ``output``.
        """

    @abstractmethod
    def read(self, table: int, keys: pa.BinaryArray, values: pa.BinaryArray) -> pa.Table:
        """Decodes entries of a table into columns, for readers of the state."""

    def key_arrays(self, rows: pa.RecordBatch) -> list[pa.Array]:
        """Returns the key columns of input rows."""
        return [rows.column(name) for name in self.keys.names]

    def split(self, partial: pa.RecordBatch) -> Grouped:
        """Splits partial rows into their key columns, extra columns and states."""
        columns = partial.columns
        first, second = len(self.keys), len(self.keys) + len(self.extra)
        return Grouped(columns[:first], columns[first:second], columns[second:])

    def batch(self, grouped: Grouped) -> pa.RecordBatch:
        """Builds partial rows from their columns; the inverse of `split`."""
        columns = [*grouped.keys, *grouped.extra, *grouped.states]
        return pa.RecordBatch.from_arrays(columns, schema=self.partial)


def key_columns(schema: pa.Schema, keys: Sequence[str]) -> pa.Schema:
    """Returns the fields of the key columns.

    Raises:
        InvalidSchemaError: if a key column is not in the schema.
    """
    for name in keys:
        if name not in schema.names:
            raise InvalidSchemaError(
                f"key column {name!r} is not among the columns of the rows.",
                fix=f"use one of the columns {', '.join(schema.names)}.",
            )
    return pa.schema([pa.field(name, schema.field(name).type) for name in keys])


def without_cached(declared: object) -> dict[str, Any]:
    """Returns the attributes of an object except its cached properties, for pickling."""
    return {
        name: value
        for name, value in vars(declared).items()
        if not isinstance(getattr(type(declared), name, None), cached_property)
    }


def sort_by_store_key(
    store_keys: pa.BinaryArray, keys: list[pa.Array], states: list[pa.Array]
) -> tuple[pa.BinaryArray, list[pa.Array], list[pa.Array]]:
    """Sorts all columns by the key in the store, because sorted reads take half the time."""
    order = pc.sort_indices(store_keys)
    return (
        store_keys.take(order),
        [key.take(order) for key in keys],
        [column.take(order) for column in states],
    )


class Combined(NamedTuple):
    """States of groups after this batch, and what was stored before it.

    Attributes:
        states: columns of `Aggregation.state`.
        stored: columns of the stored values; null, or zero, for a group without a value.
        had_value: whether the group has a stored value.
    """

    states: list[pa.Array]
    stored: list[pa.Array]
    had_value: pa.BooleanArray


def combine_with_stored(
    state: StateAccess,
    keys: pa.BinaryArray,
    codec: VersionedRows,
    aggregation: Aggregation,
    new: list[pa.Array],
) -> Combined:
    """Combines the stored states of keys with new states.

    Args:
        state: state of the shard.
        keys: distinct keys in the store.
        codec: codec of the values, whose first columns are the states.
        aggregation: the aggregates.
        new: states that this batch adds, in the order of ``keys``.
    """
    values = state.get_many(keys)
    stored = codec.decode(values)
    if values.null_count == len(values):
        return Combined(new, stored, values.is_valid())
    return Combined(aggregation.combine(stored[: len(new)], new), stored, values.is_valid())
