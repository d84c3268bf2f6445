"""Entries of a store as columns, by what the store says of itself: nothing of the query is needed.

Columns are named as those of Spark's own ``statestore`` reader: ``key`` and ``value``, structs; of lists and
maps ``list_element``, or ``user_map_key`` and ``user_map_value``; of timers ``expiration_timestamp_ms``. A
table whose keys have more than the grouping columns (windows) has that in ``key`` too, behind them.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from kafka_eos_source.errors import InvalidOptionError, InvalidSchemaError
from kafka_eos_source.state import layout
from kafka_eos_source.state.encoding import cells
from kafka_eos_source.state.encoding.describe import Description, TableDescription
from kafka_eos_source.state.encoding.keys import KeyCodec, split_keys
from kafka_eos_source.state.store.overlay import Pair

#: Entries that become one Arrow batch.
BATCH_ROWS = 10_000

#: Encodings of tables that only say where to look in others.
_INDEXES = frozenset({"due"})


@dataclass(frozen=True)
class Choice:
    """What of a store is wanted.

    Attributes:
        variable: name of a state variable, or of a table; None = the only one there is.
        timers: the registered timers instead.
        flatten: a row for each element of a list or entry of a map; else one for each key.
    """

    variable: str | None = None
    timers: bool = False
    flatten: bool = True


class Decoder(ABC):
    """One table of a store as columns.

    Attributes:
        schema: of what `batches` yields.
        table: byte of the table.
    """

    schema: pa.Schema
    table: int

    def __init__(self, description: Description) -> None:
        self._keys = KeyCodec(description.key)

    @property
    def span(self) -> tuple[bytes, bytes | None]:
        """Where the table lies: start included, end excluded."""
        low = bytes([self.table])
        return low, layout.upper_bound(low)

    @property
    def by_time(self) -> bool:
        """Whether it is ordered by time first, then by key."""
        return self.table > layout.TIMED

    @property
    def in_order(self) -> bool:
        """Whether its entries lie in the order of the key's values: if that is one column of fixed width."""
        (first, *others) = self._keys.schema
        return not (self.by_time or others or cells.is_variable(first.type))

    def columns(self, key: Any) -> list[pa.Array]:
        """One key as columns of one row.

        Args:
            key: a value, a tuple of as many as there are grouping columns, or a dict by their names.

        Raises:
            InvalidSchemaError: it is no key of this store.
        """
        fields = self._keys.schema
        if isinstance(key, dict):
            if set(key) != set(fields.names):
                raise _no_key(key, fields)
            values: Sequence[Any] = [key[name] for name in fields.names]
        else:
            values = key if isinstance(key, tuple) else (key,)
        if len(values) != len(fields):
            raise _no_key(key, fields)
        try:
            return [pa.array([value], field.type) for value, field in zip(values, fields, strict=True)]
        except (pa.ArrowException, TypeError, ValueError, OverflowError) as error:
            raise _no_key(key, fields) from error

    def group_key(self, columns: Sequence[pa.Array]) -> bytes:
        """The group key of one row."""
        encoded: bytes = self._keys.encode(columns)[0].as_py()
        return encoded

    def batches(self, pairs: Iterator[Pair]) -> Iterator[pa.RecordBatch]:
        """The entries of the table as columns, in their order; none is empty."""
        while chunk := list(islice(pairs, BATCH_ROWS)):
            keys, values = zip(*chunk, strict=True)
            yield from self._decode(pa.array(keys, pa.binary()), pa.array(values, pa.binary()))

    def of_key(self, group_key: bytes, pairs: Iterator[Pair]) -> Iterator[Pair]:
        """Those entries that are of this group key, where they do not lie together."""
        wanted = pa.scalar(group_key, pa.binary())
        while chunk := list(islice(pairs, BATCH_ROWS)):
            entries = split_keys(pa.array([key for key, _ in chunk], pa.binary()))
            for index in pc.indices_nonzero(pc.equal(entries.group_keys, wanted)).to_pylist():
                yield chunk[index]

    @abstractmethod
    def _decode(self, keys: pa.BinaryArray, values: pa.BinaryArray) -> Iterator[pa.RecordBatch]: ...


def struct_of(columns: Sequence[pa.Array], field: pa.Field) -> pa.Array:
    """Columns as one of structs, which is never null."""
    fields = [field.type.field(index) for index in range(field.type.num_fields)]
    cast = [column.cast(each.type) for column, each in zip(columns, fields, strict=True)]
    return pa.StructArray.from_arrays(cast, fields=fields)


def is_data(table: TableDescription) -> bool:
    """Whether it is more than an index of another table."""
    return table.encoding not in _INDEXES and table.details.get("kind") not in ("index", "timers")


def chosen(description: Description, choice: Choice, tables: dict[int, TableDescription]) -> int:
    """The table that is meant.

    Raises:
        InvalidOptionError: there is no such variable, or several and none was named.
    """
    names = {table.name: byte for byte, table in tables.items()}
    if choice.variable is None and len(names) == 1:
        return next(iter(names.values()))
    if choice.variable in names:
        return names[choice.variable]
    what = "is not set" if choice.variable is None else f"is {choice.variable!r}"
    there = ", ".join(sorted(names)) or "none"
    raise InvalidOptionError(
        f"stateVarName {what}; a store of kind {description.kind!r} has: {there}.",
        fix="name one of them." if names else "read it with raw=true.",
    )


def _no_key(key: object, fields: pa.Schema) -> InvalidSchemaError:
    wanted = ", ".join(f"{field.name} {field.type}" for field in fields)
    return InvalidSchemaError(
        f"{key!r} is no key of this store; expected values of: {wanted}.",
        fix="give one value, a tuple in that order, or a dict by these names.",
    )
