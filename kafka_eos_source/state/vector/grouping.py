"""Interface of the groupings: how rows are grouped, with or without windows, and how state is stored.

Each side of the shuffle turns rows into *partial rows*, one for each group. A partial row consists of the key
columns, the columns that the grouping adds (their names begin with ``__``), and the states of the
aggregates. Partial rows of the same group are merged into one again.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from functools import cached_property
from typing import Any, ClassVar

import pyarrow as pa
import pyarrow.compute as pc

from kafka_eos_source.errors import InvalidSchemaError
from kafka_eos_source.state.encoding.binary import Ints
from kafka_eos_source.state.encoding.describe import TableDescription
from kafka_eos_source.state.encoding.keys import KeyCodec
from kafka_eos_source.state.model import BatchContext, StateAccess
from kafka_eos_source.state.vector.aggregation import Aggregation, Grouped
from kafka_eos_source.state.vector.versions import Version, VersionedRows, only_version

#: First byte of the values of operators whose values have only one version (`versions`).
VALUE_VERSION = b"\x01"

#: Numbers of the table with the values of the keys, and of the timed table (window ends or due entries).
VALUES = 0x02
TIMES = 0x81


class Grouping(ABC):
    """Groups rows and merges them into the state. Each process creates its own instance.

    Args:
        keys: columns of the key.
        aggregation: the aggregates that are computed.
        versions: versions of the stored values, oldest first; the newest one holds these aggregates. None =
            the values have only one version.
    """

    #: Columns of a partial row between the key and the states.
    extra: ClassVar[pa.Schema]
    #: Whether `update` accepts several partial rows of the same group.
    merges: ClassVar[bool] = False

    def __init__(self, keys: pa.Schema, aggregation: Aggregation, versions: Sequence[Version] | None) -> None:
        self.keys = keys
        self.aggregation = aggregation
        self.codec = KeyCodec(keys)
        self.versions = versions or only_version(aggregation.state)
        self.values = VersionedRows(self.versions)
        self.partial = pa.schema([*keys, *self.extra, *aggregation.state])

    @property
    @abstractmethod
    def output(self) -> pa.Schema:
        """Columns of the emitted rows."""

    @property
    @abstractmethod
    def tables(self) -> dict[int, TableDescription]:
        """Descriptions of the tables in the store, by table number."""

    @abstractmethod
    def reduce_rows(self, rows: pa.RecordBatch) -> pa.RecordBatch:
        """Computes one partial row for each group of input rows."""

    @abstractmethod
    def merge_partials(self, partial: pa.RecordBatch) -> pa.RecordBatch:
        """Merges partial rows of the same group into one."""

    @abstractmethod
    def update(
        self, partial: pa.RecordBatch, state: StateAccess, context: BatchContext
    ) -> Iterator[list[pa.Array]]:
        """Merges partial rows into the state.

        Args:
            partial: partial rows, one for each group unless ``merges`` is set.
            state: state of the shard.
            context: the micro-batch.

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


def combine_with_stored(
    state: StateAccess,
    keys: pa.BinaryArray,
    codec: VersionedRows,
    aggregation: Aggregation,
    new: list[pa.Array],
) -> tuple[list[pa.Array], pa.BinaryArray]:
    """Combines the stored states of keys with new states.

    Args:
        state: state of the shard.
        keys: distinct keys in the store.
        codec: codec of the values.
        aggregation: the aggregates.
        new: states that this batch adds, in the order of ``keys``.

    Returns:
        The combined states, and the values that were stored before; null = the key had no value.
    """
    values = state.get_many(keys)
    if values.null_count == len(values):
        return new, values
    return aggregation.combine(codec.decode(values), new), values


def record_event_times(context: BatchContext, times_ms: Ints) -> None:
    """Records the largest event time of this shard's rows in the context of the batch."""
    if len(times_ms):
        largest = int(times_ms.max())
        known = context.seen_event_time_ms
        context.seen_event_time_ms = largest if known is None else max(known, largest)


def closed_until(context: BatchContext, grace_ms: int) -> int | None:
    """Returns the time up to which windows are closed at the end of the batch; None = no window closes.

    The event times that this shard saw in the running batch count. The watermark of the next batch is at
    least as late, so no later row can fall into these windows, and their results can be emitted now.

    Args:
        context: the micro-batch.
        grace_ms: how long a window accepts rows after its end.

    Returns:
        Milliseconds since the epoch. A window that ends at this time or earlier is closed.
    """
    times = [time for time in (context.event_time_ms, context.seen_event_time_ms) if time is not None]
    return max(times) - grace_ms if times else None
