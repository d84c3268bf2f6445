"""The part of an aggregation that depends on windows: how rows are grouped, what is stored under which keys.

Rows become *partial* rows, one for each group, on either side of the shuffle: the columns of the key, what
the grouping adds (``__…``), and the states of the aggregates. Partial rows of the same group become one
again.
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
from kafka_eos_source.state.encoding.rows import RowCodec
from kafka_eos_source.state.model import BatchContext, StateAccess
from kafka_eos_source.state.vector.aggregation import Aggregation, Grouped

#: First byte of every value: the version of how it is encoded.
VALUE_VERSION = b"\x01"

#: The table of keys' values, and that of what is due or ends at a time.
VALUES = 0x02
TIMES = 0x81


class Grouping(ABC):
    """One way of grouping. Made once in each process that uses it.

    Args:
        keys: columns of the key.
        aggregation: what is computed.
    """

    #: Columns of a partial row between the key and the states.
    extra: ClassVar[pa.Schema]
    #: Whether `update` takes partial rows as they come, a group more than once.
    merges: ClassVar[bool] = False

    def __init__(self, keys: pa.Schema, aggregation: Aggregation) -> None:
        self.keys = keys
        self.aggregation = aggregation
        self.codec = KeyCodec(keys)
        self.values = RowCodec(aggregation.state, lead=VALUE_VERSION)
        self.partial = pa.schema([*keys, *self.extra, *aggregation.state])

    @property
    @abstractmethod
    def output(self) -> pa.Schema:
        """Columns that are emitted."""

    @property
    @abstractmethod
    def tables(self) -> dict[int, TableDescription]:
        """What is stored."""

    @abstractmethod
    def of_rows(self, rows: pa.RecordBatch) -> pa.RecordBatch:
        """Partial rows of rows."""

    @abstractmethod
    def of_partials(self, partial: pa.RecordBatch) -> pa.RecordBatch:
        """One partial row for each group."""

    @abstractmethod
    def update(
        self, partial: pa.RecordBatch, state: StateAccess, context: BatchContext
    ) -> Iterator[list[pa.Array]]:
        """Merges partial rows, one for each group unless ``merges``, into the state.

        Yields: columns of ``output``.
        """

    @abstractmethod
    def read(self, table: int, keys: pa.BinaryArray, values: pa.BinaryArray) -> pa.Table:
        """What is stored in a table, as columns: for who looks at the state."""

    def columns(self, rows: pa.RecordBatch) -> list[pa.Array]:
        """Those of the key."""
        return [rows.column(name) for name in self.keys.names]

    def split(self, partial: pa.RecordBatch) -> Grouped:
        """The columns of partial rows."""
        columns = partial.columns
        first, second = len(self.keys), len(self.keys) + len(self.extra)
        return Grouped(columns[:first], columns[first:second], columns[second:])

    def batch(self, grouped: Grouped) -> pa.RecordBatch:
        """Partial rows of columns."""
        columns = [*grouped.keys, *grouped.extra, *grouped.states]
        return pa.RecordBatch.from_arrays(columns, schema=self.partial)


def key_columns(schema: pa.Schema, keys: Sequence[str]) -> pa.Schema:
    """The columns of a key.

    Raises:
        InvalidSchemaError: there is no such column, or none is named.
    """
    for name in keys:
        if name not in schema.names:
            raise InvalidSchemaError(
                f"key column {name!r}: there is no such column",
                fix=f"the columns are {', '.join(schema.names)}",
            )
    return pa.schema([pa.field(name, schema.field(name).type) for name in keys])


def without_made(declared: object) -> dict[str, Any]:
    """The attributes of an object without those that are made of others when they are needed, for pickle."""
    return {
        name: value
        for name, value in vars(declared).items()
        if not isinstance(getattr(type(declared), name, None), cached_property)
    }


def in_order(
    places: pa.BinaryArray, keys: list[pa.Array], states: list[pa.Array]
) -> tuple[pa.BinaryArray, list[pa.Array], list[pa.Array]]:
    """All in the order of places in the store: it finds them twice as fast, and writes them faster too."""
    order = pc.sort_indices(places)
    return places.take(order), [key.take(order) for key in keys], [column.take(order) for column in states]


def stored(
    state: StateAccess, keys: pa.BinaryArray, codec: RowCodec, aggregation: Aggregation, new: list[pa.Array]
) -> tuple[list[pa.Array], pa.BinaryArray]:
    """The states stored under keys, combined with new ones.

    Returns: the states, and the values that were there; null where there were none.
    """
    values = state.get_many(keys)
    if values.null_count == len(values):
        return new, values
    return aggregation.combine(codec.decode(values), new), values


def seen(context: BatchContext, times_ms: Ints) -> None:
    """Tells the largest event time of this shard's rows."""
    if len(times_ms):
        largest = int(times_ms.max())
        known = context.seen_event_time_ms
        context.seen_event_time_ms = largest if known is None else max(known, largest)


def closed_until(context: BatchContext, grace_ms: int) -> int | None:
    """Windows that end then or earlier are closed when the batch is done.

    It counts what this shard saw in the batch: the watermark of the next batch is not less, so no row can be
    taken by those windows any more, and their results need not wait for it.
    """
    times = [time for time in (context.event_time_ms, context.seen_event_time_ms) if time is not None]
    return max(times) - grace_ms if times else None
