"""Decodes entries of a store to columns, without the query's code.

A decoder needs only the description that the store contains. Columns have the names of Spark's ``statestore``
reader: the structs ``key`` and ``value``; ``list_element`` for lists; ``user_map_key`` and ``user_map_value``
for maps; ``expiration_timestamp_ms`` for timers. The columns of a window are part of ``key``, after the
grouping columns. Aggregates appear as their current results. Values of a ``StatefulProcessor`` that have
expired but are not deleted yet appear too; ``ttlExpirationMs`` is their time of expiry.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from datetime import timezone
from itertools import islice
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from pyspark.sql import types as t

from kafka_eos_source.errors import InvalidOptionError, InvalidSchemaError
from kafka_eos_source.state.encoding import binary, layout
from kafka_eos_source.state.encoding.describe import Description, TableDescription
from kafka_eos_source.state.encoding.layout import KeyCodec, split_keys
from kafka_eos_source.state.processor.registry import TIMERS, Registry, VariableInfo
from kafka_eos_source.state.processor.rows import StateEntry, read_entries
from kafka_eos_source.state.processor.schema import arrow_schema
from kafka_eos_source.state.store.overlay import Pair

#: Number of entries that are decoded to one Arrow batch.
BATCH_ROWS = 10_000

#: Encodings of tables that are only an index of another table.
_INDEXES = frozenset({"due"})


@dataclass(frozen=True)
class Selection:
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


def _is_data(table: TableDescription) -> bool:
    """Returns whether a table holds data, and not only an index of another table or timers."""
    return table.encoding not in _INDEXES and table.details.get("kind") not in ("index", "timers")


def _selected_table(description: Description, selection: Selection) -> int:
    """Returns the number of the chosen table.

    Args:
        description: description of the store.
        selection: the part of the store that the reader asks for.

    Raises:
        InvalidOptionError: if the store has no such variable; or it has several, and none was named.
    """
    names = {table.name: byte for byte, table in description.tables.items() if _is_data(table)}
    if selection.variable is None and len(names) == 1:
        return next(iter(names.values()))
    if selection.variable in names:
        return names[selection.variable]
    what = "is not set" if selection.variable is None else f"is {selection.variable!r}"
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


def decoder(description: Description, selection: Selection) -> Decoder:
    """Returns the decoder of the chosen table.

    Raises:
        InvalidOptionError: if the store has no such variable; or it has several, and none was named.
        StateFormatError, StateMismatchError: if another version of kafka-eos wrote the store.
    """
    if description.kind == "stateful-processor":
        return _processor_decoder(description, selection)
    if selection.timers:
        raise InvalidOptionError(
            f"readRegisteredTimers is set, but a store of kind {description.kind!r} has no timers.",
            fix="remove the option.",
        )
    return _Vector(description, _selected_table(description, selection))


# ------------------------------------------------------------------ state of the vectorised operators

#: Columns that belong to the key in addition to the grouping columns.
_WINDOW_COLUMNS = ("window_start", "window_end")


class _Vector(Decoder):
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
        from kafka_eos_source.state.vector.processor import decode_state  # imports all vectorised operators

        return decode_state(self._description, keys, values)[self._description.tables[self.table].name]

    def _decode(self, keys: pa.BinaryArray, values: pa.BinaryArray) -> Iterator[pa.RecordBatch]:
        for batch in self._read(keys, values).combine_chunks().to_batches():
            columns = [
                struct_of([batch.column(n) for n in part], field)
                for part, field in zip(self._parts, self.schema, strict=True)
            ]
            yield pa.RecordBatch.from_arrays(columns, schema=self.schema)


# ------------------------------------------------------------------ state of a StatefulProcessor
#
# Spark defines the columns in `StateStoreColumnFamilySchemaUtils` and `SchemaUtil.generateSchemaForStateVar`.

_Convert = Callable[[Any], Any]


def _processor_decoder(description: Description, selection: Selection) -> Decoder:
    """Returns the decoder of a variable, or of the timers.

    Raises:
        InvalidOptionError: if the store has no such variable or no timers.
    """
    registry = Registry.from_description(description)
    if selection.timers:
        if TIMERS not in description.tables:
            raise InvalidOptionError(
                "readRegisteredTimers is set, but a processor with timeMode 'None' has no timers.",
                fix="remove the option.",
            )
        return _Timers(description, registry)
    table = _selected_table(description, selection)
    variable = next(each for each in registry.variables if each.table == table)
    if selection.flatten or variable.kind == "value":
        return _Entries(description, registry, variable)
    return _Collections(description, registry, variable)


class _Entries(Decoder):
    """Decodes one row per value, element of a list or entry of a map."""

    def __init__(self, description: Description, registry: Registry, variable: VariableInfo) -> None:
        super().__init__(description)
        self._registry = registry
        self.table = variable.table
        self._is_list = variable.kind == "list"
        value = _Rows(variable.value, ttl=variable.ttl)
        #: For each column after the key: its name, the function that reads it from an entry, and its type.
        self._columns: list[tuple[str, _Convert, pa.DataType]] = []
        if variable.map_key is not None:
            of_key = _Rows(variable.map_key, ttl=False)
            self._columns.append(("user_map_key", lambda entry: of_key.row(entry.map_key), of_key.type))
        name = {"value": "value", "list": "list_element", "map": "user_map_value"}[variable.kind]
        self._columns.append((name, value.of_entry, value.type))
        self.schema = pa.schema(
            [
                pa.field("key", pa.struct(list(description.key))),
                *(pa.field(name, type_) for name, _, type_ in self._columns),
            ]
        )

    def _decode(self, keys: pa.BinaryArray, values: pa.BinaryArray) -> Iterator[pa.RecordBatch]:
        group_keys, entries = self._entries(keys, values)
        if entries:
            columns = [
                pa.array([read(entry) for entry in entries], type_) for _, read, type_ in self._columns
            ]
            yield self._batch(group_keys, columns)

    def _entries(
        self, keys: pa.BinaryArray, values: pa.BinaryArray
    ) -> tuple[pa.BinaryArray, list[StateEntry]]:
        """Parses the entries; returns them with their group keys, without the heads of lists."""
        split = split_keys(keys)
        group_keys = split.group_keys
        if self._is_list:
            group_keys = group_keys.filter(pa.array(np.diff(binary.offsets(split.rests)) > 0))
        pairs = zip(keys.to_pylist(), values.to_pylist(), strict=True)
        return group_keys, list(read_entries(self._registry, pairs))

    def _batch(self, group_keys: pa.BinaryArray, columns: list[pa.Array]) -> pa.RecordBatch:
        key = struct_of(self._keys.decode(group_keys), self.schema.field("key"))
        return pa.RecordBatch.from_arrays([key, *columns], schema=self.schema)


class _Collections(_Entries):
    """Decodes one row per key, with the array ``list_value`` or the map ``map_value``."""

    def __init__(self, description: Description, registry: Registry, variable: VariableInfo) -> None:
        super().__init__(description, registry, variable)
        types = [type_ for _, _, type_ in self._columns]
        whole = (
            pa.field("list_value", pa.list_(types[0]))
            if self._is_list
            else pa.field("map_value", pa.map_(types[0], types[1]))
        )
        self.schema = pa.schema([self.schema.field("key"), whole])

    def batches(self, pairs: Iterator[Pair]) -> Iterator[pa.RecordBatch]:
        for chunk in _whole_keys(pairs):
            keys, values = zip(*chunk, strict=True)
            yield from self._decode(pa.array(keys, pa.binary()), pa.array(values, pa.binary()))

    def _decode(self, keys: pa.BinaryArray, values: pa.BinaryArray) -> Iterator[pa.RecordBatch]:
        group_keys, entries = self._entries(keys, values)
        collected: dict[bytes, list[Any]] = {}
        for group_key, entry in zip(group_keys.to_pylist(), entries, strict=True):
            row = tuple(read(entry) for _, read, _ in self._columns)
            collected.setdefault(group_key, []).append(row[0] if self._is_list else row)
        if collected:
            column = pa.array(list(collected.values()), self.schema.field(1).type)
            yield self._batch(pa.array(list(collected), pa.binary()), [column])


class _Timers(Decoder):
    """Decodes one row per timer."""

    def __init__(self, description: Description, registry: Registry) -> None:
        super().__init__(description)
        self.table = TIMERS
        self._registry = registry
        self.schema = pa.schema(
            [
                pa.field("key", pa.struct(list(description.key))),
                pa.field("expiration_timestamp_ms", pa.int64()),
            ]
        )

    def _decode(self, keys: pa.BinaryArray, values: pa.BinaryArray) -> Iterator[pa.RecordBatch]:
        pairs = zip(keys.to_pylist(), values.to_pylist(), strict=True)
        times = [entry.expiry_ms for entry in read_entries(self._registry, pairs)]
        of_key = self._keys.decode(split_keys(keys).group_keys)
        key = struct_of(of_key, self.schema.field("key"))
        yield pa.RecordBatch.from_arrays([key, pa.array(times, pa.int64())], schema=self.schema)


class _Rows:
    """Converts rows of a variable to values that Arrow accepts."""

    def __init__(self, schema: t.StructType, *, ttl: bool) -> None:
        self._convert = _converter(schema)
        self._ttl = ttl
        row = pa.struct(list(arrow_schema(schema)))
        self.type = pa.struct([("value", row), ("ttlExpirationMs", pa.int64())]) if ttl else row

    def row(self, value: Any) -> Any:
        return self._convert(value)

    def of_entry(self, entry: StateEntry) -> Any:
        row = self._convert(entry.value)
        return {"value": row, "ttlExpirationMs": entry.expiry_ms} if self._ttl else row


def _converter(type_: t.DataType) -> _Convert:
    """Returns a function that converts Spark's Python values to values that Arrow accepts.

    Structs become dicts, maps become lists of pairs, and timestamps get their time zone.
    """
    if isinstance(type_, t.StructType):
        names = type_.names
        fields = [_converter(field.dataType) for field in type_.fields]

        def struct(row: Any) -> Any:
            if row is None:
                return None
            return {name: field(value) for name, field, value in zip(names, fields, tuple(row), strict=True)}

        return struct
    if isinstance(type_, t.ArrayType):
        element = _converter(type_.elementType)
        return lambda values: None if values is None else [element(value) for value in values]
    if isinstance(type_, t.MapType):
        of_key, of_value = _converter(type_.keyType), _converter(type_.valueType)
        return lambda values: (
            None if values is None else [(of_key(k), of_value(v)) for k, v in values.items()]
        )
    if isinstance(type_, t.TimestampType):  # the value is naive and in the local time zone
        return lambda value: None if value is None else value.astimezone(timezone.utc)
    return lambda value: value


def _whole_keys(pairs: Iterator[Pair]) -> Iterator[list[Pair]]:
    """Yields the entries in chunks that never split the entries of one group key."""
    chunk: list[Pair] = []
    for more in iter(lambda: list(islice(pairs, BATCH_ROWS)), []):
        chunk += more
        last = layout.split(chunk[-1][0]).group_key
        if layout.split(chunk[0][0]).group_key == last:
            continue
        end = len(chunk)
        while layout.split(chunk[end - 1][0]).group_key == last:
            end -= 1
        yield chunk[:end]
        chunk = chunk[end:]
    if chunk:
        yield chunk
