"""Decodes the entries of a store to Python values, for readers that do not run the processor.

The store and its changelog have the same keys and values, so this works for both.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Iterator
from itertools import islice
from typing import Any, NamedTuple

import pyarrow as pa

from kafka_eos_source.state.encoding import layout
from kafka_eos_source.state.processor.arrow import arrow_schema
from kafka_eos_source.state.processor.codec import StructCodec, Value
from kafka_eos_source.state.processor.evolution import VersionedCodec
from kafka_eos_source.state.processor.registry import TIMERS, Registry, VariableInfo
from kafka_eos_source.state.processor.rows import KeyColumns
from kafka_eos_source.state.processor.ttl import EXPIRY_BYTES

TIMER_NAME = "$timers"
_BATCH = 4096
_SIGN = 1 << 63
_POSITION = struct.Struct(">Q")


class StateEntry(NamedTuple):
    """One row of a variable, or one timer.

    Attributes:
        variable: name of the variable; `TIMER_NAME` for a timer.
        key: values of the grouping columns.
        map_key: key in a map state; None otherwise.
        position: position in a list state, increasing in list order; None otherwise.
        value: the row; () for a timer.
        expiry_ms: when the row expires or the timer fires, in ms since the epoch; None for never.
    """

    variable: str
    key: tuple[Any, ...]
    map_key: Value | None
    position: int | None
    value: Value
    expiry_ms: int | None


def read_entries(registry: Registry, pairs: Iterable[tuple[bytes, bytes]]) -> Iterator[StateEntry]:
    """Yields the rows and timers among these keys and values, in their order, and skips all other entries.

    This includes expired rows that are not removed yet: compare ``expiry_ms`` with the time of the batch.

    Raises:
        StatefulProcessorError: if a value is not a row of its variable.
    """
    readers = {variable.table: _Reader(variable) for variable in registry.variables}
    columns = KeyColumns(arrow_schema(registry.key), "rows")
    pairs = iter(pairs)
    while batch := list(islice(pairs, _BATCH)):
        entries = [
            (entry, value)
            for entry, value in ((layout.split(key), value) for key, value in batch if key[0])
            if entry.table == TIMERS or (entry.table in readers and readers[entry.table].is_row(entry))
        ]
        keys = columns.keys(pa.array([entry.group_key for entry, _ in entries], pa.binary()))
        for key, (entry, value) in zip(keys, entries, strict=True):
            if entry.table == TIMERS:
                yield StateEntry(TIMER_NAME, key, None, None, (), int.from_bytes(entry.rest, "big") - _SIGN)
            else:
                yield readers[entry.table].read(key, entry, value)


class _Reader:
    """Decodes the entries of one variable."""

    def __init__(self, variable: VariableInfo) -> None:
        self._variable = variable
        self._codec = VersionedCodec(variable.schemas)
        self._map_keys = None if variable.map_key is None else StructCodec(variable.map_key)

    def is_row(self, entry: layout.Entry) -> bool:
        """Whether the entry is a row, and not the head of a list."""
        return self._variable.kind != "list" or bool(entry.rest)

    def read(self, key: tuple[Any, ...], entry: layout.Entry, value: bytes) -> StateEntry:
        expiry_ms = None
        if self._variable.ttl:
            expiry_ms = int.from_bytes(value[:EXPIRY_BYTES], "big") - _SIGN
            value = value[EXPIRY_BYTES:]
        map_key = None if self._map_keys is None else self._map_keys.decode(entry.rest)
        position = _POSITION.unpack(entry.rest)[0] if self._variable.kind == "list" else None
        return StateEntry(self._variable.name, key, map_key, position, self._codec.decode(value), expiry_ms)
