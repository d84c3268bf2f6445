"""Base class of the decoders, which turn entries of a store into columns without the query's code.

A decoder needs only the description that the store contains. Columns have the names of Spark's ``statestore``
reader: the structs ``key`` and ``value``; ``list_element`` for lists; ``user_map_key`` and
``user_map_value`` for maps; ``expiration_timestamp_ms`` for timers. The columns of a window are part of
``key``, after the grouping columns.
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
from kafka_eos_source.state.encoding import binary, layout
from kafka_eos_source.state.encoding.describe import Description, TableDescription
from kafka_eos_source.state.encoding.layout import KeyCodec, split_keys
from kafka_eos_source.state.store.overlay import Pair

#: Number of entries that are decoded to one Arrow batch.
BATCH_ROWS = 10_000

#: Encodings of tables that are only an index of another table.
_INDEXES = frozenset({"due"})


@dataclass(frozen=True)
class Choice:
    """The part of a store that a reader asks for.

    Attributes:
        variable: name of a state variable or table; None = the only one of the store.
        timers: read the registered timers instead of a variable.
        flatten: return one row per element of a list or entry of a map, instead of one row per key.
    """

    variable: str | None = None
    timers: bool = False
    flatten: bool = True


class Decoder(ABC):
    """Decodes one table of a store.

    Attributes:
        schema: columns of the batches that `batches` yields.
        table: number of the table, which is the first byte of its keys.
    """

    schema: pa.Schema
    table: int

    def __init__(self, description: Description) -> None:
        self._keys = KeyCodec(description.key)

    @property
    def span(self) -> tuple[bytes, bytes | None]:
        """Range of the table's keys: start (inclusive) and end (exclusive)."""
        low = bytes([self.table])
        return low, layout.upper_bound(low)

    @property
    def by_time(self) -> bool:
        """Whether the table is ordered by time first and by key second."""
        return self.table > layout.TIMED

    @property
    def in_order(self) -> bool:
        """Whether the table is ordered by the values of its key, which must be one column of fixed width."""
        (first, *others) = self._keys.schema
        return not (self.by_time or others or binary.is_variable(first.type))

    def key_columns(self, key: Any) -> list[pa.Array]:
        """Converts one key to columns with one row.

        Args:
            key: a value, a tuple with one value per grouping column, or a dict by the names of the columns.

        Raises:
            InvalidSchemaError: if the key does not fit the grouping columns of the store.
        """
        fields = self._keys.schema
        if isinstance(key, dict):
            if set(key) != set(fields.names):
                raise _invalid_key(key, fields)
            values: Sequence[Any] = [key[name] for name in fields.names]
        else:
            values = key if isinstance(key, tuple) else (key,)
        if len(values) != len(fields):
            raise _invalid_key(key, fields)
        try:
            return [pa.array([value], field.type) for value, field in zip(values, fields, strict=True)]
        except (pa.ArrowException, TypeError, ValueError, OverflowError) as error:
            raise _invalid_key(key, fields) from error

    def group_key(self, columns: Sequence[pa.Array]) -> bytes:
        """Encodes key columns with one row as a group key."""
        encoded: bytes = self._keys.encode(columns)[0].as_py()
        return encoded

    def batches(self, pairs: Iterator[Pair]) -> Iterator[pa.RecordBatch]:
        """Decodes entries of the table to batches, in their order; never an empty batch."""
        while chunk := list(islice(pairs, BATCH_ROWS)):
            keys, values = zip(*chunk, strict=True)
            yield from self._decode(pa.array(keys, pa.binary()), pa.array(values, pa.binary()))

    def filter_by_key(self, group_key: bytes, pairs: Iterator[Pair]) -> Iterator[Pair]:
        """Yields the entries of one group key, from a table that is ordered by time."""
        wanted = pa.scalar(group_key, pa.binary())
        while chunk := list(islice(pairs, BATCH_ROWS)):
            entries = split_keys(pa.array([key for key, _ in chunk], pa.binary()))
            for index in pc.indices_nonzero(pc.equal(entries.group_keys, wanted)).to_pylist():
                yield chunk[index]

    @abstractmethod
    def _decode(self, keys: pa.BinaryArray, values: pa.BinaryArray) -> Iterator[pa.RecordBatch]: ...


def struct_of(columns: Sequence[pa.Array], field: pa.Field) -> pa.Array:
    """Combines columns into one column of structs that are never null."""
    fields = [field.type.field(index) for index in range(field.type.num_fields)]
    cast = [column.cast(each.type) for column, each in zip(columns, fields, strict=True)]
    return pa.StructArray.from_arrays(cast, fields=fields)


def is_data(table: TableDescription) -> bool:
    """Returns whether a table holds data, and not only an index of another table or timers."""
    return table.encoding not in _INDEXES and table.details.get("kind") not in ("index", "timers")


def choose_table(description: Description, choice: Choice, tables: dict[int, TableDescription]) -> int:
    """Returns the number of the chosen table.

    Args:
        description: description of the store.
        choice: the part of the store that the reader asks for.
        tables: tables to choose from, by number.

    Raises:
        InvalidOptionError: if the store has no such variable; or it has several, and none was named.
    """
    names = {table.name: byte for byte, table in tables.items()}
    if choice.variable is None and len(names) == 1:
        return next(iter(names.values()))
    if choice.variable in names:
        return names[choice.variable]
    what = "is not set" if choice.variable is None else f"is {choice.variable!r}"
    variables = ", ".join(sorted(names)) or "none"
    raise InvalidOptionError(
        f"stateVarName {what}; the variables of this store (of kind {description.kind!r}) are: {variables}.",
        fix="set stateVarName to one of them." if names else "read the store with raw=true.",
    )


def _invalid_key(key: object, fields: pa.Schema) -> InvalidSchemaError:
    expected = ", ".join(f"{field.name} {field.type}" for field in fields)
    return InvalidSchemaError(
        f"{key!r} is not a key of this store; expected values of: {expected}.",
        fix="pass one value, a tuple in that order, or a dict by these names.",
    )
