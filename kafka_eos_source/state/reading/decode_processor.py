"""Decodes variables and timers of a ``StatefulProcessor`` to the columns of Spark's ``statestore`` reader.

The result includes values that have expired but are not deleted yet; ``ttlExpirationMs`` is their time of
expiry. Spark defines the columns in `StateStoreColumnFamilySchemaUtils` and
`SchemaUtil.generateSchemaForStateVar`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from datetime import timezone
from itertools import islice
from typing import Any

import numpy as np
import pyarrow as pa
from pyspark.sql import types as t

from kafka_eos_source.errors import InvalidOptionError
from kafka_eos_source.state.encoding import binary, layout
from kafka_eos_source.state.encoding.describe import Description
from kafka_eos_source.state.encoding.layout import split_keys
from kafka_eos_source.state.processor.registry import TIMERS, Registry, VariableInfo
from kafka_eos_source.state.processor.rows import StateEntry, read_entries
from kafka_eos_source.state.processor.schema import arrow_schema
from kafka_eos_source.state.reading.decode import (
    BATCH_ROWS,
    Choice,
    Decoder,
    choose_table,
    is_data,
    struct_of,
)
from kafka_eos_source.state.store.overlay import Pair

_Convert = Callable[[Any], Any]


def processor_decoder(description: Description, choice: Choice) -> Decoder:
    """Returns the decoder of a variable, or of the timers.

    Raises:
        InvalidOptionError: if the store has no such variable or no timers.
    """
    registry = Registry.from_description(description)
    if choice.timers:
        if TIMERS not in description.tables:
            raise InvalidOptionError(
                "readRegisteredTimers is set, but a processor with timeMode 'None' has no timers.",
                fix="remove the option.",
            )
        return _Timers(description, registry)
    tables = {byte: table for byte, table in description.tables.items() if is_data(table)}
    table = choose_table(description, choice, tables)
    variable = next(each for each in registry.variables if each.table == table)
    if choice.flatten or variable.kind == "value":
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
