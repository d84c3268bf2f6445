"""Spark's state variables and timers on a shard's store, for the key whose handler runs.

::

    value   keyed(table, key)             → row
    list    keyed(table, key)             → position of the next element (8) │ number of elements (8)
            keyed(table, key, position)   → row
    map     keyed(table, key, map key)    → row
    timers  keyed(TIMERS, key, time)      → empty    the timers of a key, for listTimers
            timed(TIMERS | 0x80, time, key) → empty  the timers of all keys, earliest first

If a variable has a time to live, the time of expiry precedes each row. ``init`` creates variables; when it
has returned, they are *bound* to their tables.

A processor is called key by key, but the store is read and written for a *window* of some thousand keys at
once (`KeyWindow`). The first read of a variable fetches its value for every key of the window, with one
`get_many`. When the window ends, one `put_many` writes the changes.
"""

from __future__ import annotations

import operator
import struct
from collections.abc import Iterable, Iterator
from itertools import islice

import pyarrow as pa
from pyspark.sql import types as t
from pyspark.sql.streaming import stateful_processor as spark

from kafka_eos_source.errors import StatefulProcessorError
from kafka_eos_source.state.encoding import layout
from kafka_eos_source.state.encoding.layout import keyed_keys
from kafka_eos_source.state.model import StateAccess
from kafka_eos_source.state.processor.codec import StructCodec, Value, VersionedCodec, make_row
from kafka_eos_source.state.processor.registry import TIMERS, VariableInfo

#: Number of keys in a window: large enough to share the cost of a call, small enough to fit into memory.
WINDOW_KEYS = 4096


class KeyWindow:
    """The keys of the window, and the key whose handler runs.

    Attributes:
        state: state of the shard; not set on the driver, which has no keys.
        group_keys: the distinct group keys of the window, encoded by `KeyCodec`.
        sections: for each key, its length and the key: the part of a `layout` key after the table byte.
        section: section of the key whose handler runs; None if no handler runs.
    """

    state: StateAccess

    def __init__(self, state: StateAccess | None = None) -> None:
        if state is not None:
            self.state = state
        self.group_keys: pa.BinaryArray = pa.array([], pa.binary())
        self.sections: list[bytes] = []
        self.section: bytes | None = None

    def enter(self, group_keys: pa.BinaryArray) -> None:
        """Starts a window of these keys. Requires that all tables are flushed."""
        self.group_keys = group_keys
        self.sections = [key[1:] for key in keyed_keys(1, group_keys).to_pylist()]
        self.section = None

    def current(self) -> bytes:
        """Returns the section of the key whose handler runs.

        Raises:
            StatefulProcessorError: if no handler runs, as in ``init`` or ``close``.
        """
        if self.section is None:
            raise StatefulProcessorError(
                "IMPLICIT_KEY_NOT_FOUND: state or a timer was used outside a handler, where there is no key.",
                fix="create state variables in init(), and use them in handleInputRows(), "
                "handleExpiredTimer() and handleInitialState() only.",
            )
        return self.section


class PointTable:
    """A table with at most one value per group key, read and written one window at a time.

    Args:
        keys: the window of keys.
        table: byte of the table.
    """

    def __init__(self, keys: KeyWindow, table: int) -> None:
        self._keys = keys
        self._table = table
        self._prefix = bytes([table])
        self._values: dict[bytes, bytes | None] = {}
        self._written: dict[bytes, None] = {}  # ordered, so that all task attempts write the same

    def read(self, section: bytes) -> bytes | None:
        """Returns the value of a key of the window; None if it has no value."""
        try:
            return self._values[section]
        except KeyError:
            self._fetch()
            return self._values[section]

    def write(self, section: bytes, value: bytes | None) -> None:
        """Sets the value of a key of the window; None removes it."""
        self._values[section] = value
        self._written[section] = None

    def flush(self) -> None:
        """Writes the changes to the store, and clears the cached values."""
        if self._written:
            keys = [self._prefix + section for section in self._written]
            values = [self._values[section] for section in self._written]
            self._keys.state.put_many(pa.array(keys, pa.binary()), pa.array(values, pa.binary()))
        self._values.clear()
        self._written.clear()

    def _fetch(self) -> None:
        keys = self._keys
        stored = keys.state.get_many(keyed_keys(self._table, keys.group_keys)).to_pylist()
        fetched = dict(zip(keys.sections, stored, strict=True))
        fetched.update(self._values)  # values that were written before the first read
        self._values = fetched


# -- times to live
#
# A value with a time to live begins with its time of expiry (8 bytes, encoded as in a timed key), and has an
# index entry without a value in the timed table that belongs to the variable's table. Value and entry always
# agree: code that overwrites or removes a value also moves or removes its entry. Reads hide expired values at
# once; the sweep at the end of a batch removes them. "Now" is the time of the batch, so a batch that is
# computed again yields the same result (in Spark: `TTLState`, `StateTTL.isExpired`).

#: Most values that one sweep removes, because the removals of a batch are kept in memory. The other expired
#: values stay hidden, and the next batches remove them.
SWEEP_VALUES = 100_000

#: Longest time that an idle query keeps expired values. It then runs at most one batch per minute for them.
SWEEP_DELAY_MS = 60_000

#: Size in bytes of the time of expiry at the start of a value.
EXPIRY_BYTES = 8
_SIGN = 1 << 63


def time_of(encoded: bytes) -> int:
    """Returns a time in ms that is encoded as in a timed key."""
    return int.from_bytes(encoded, "big") - _SIGN


class ExpiryIndex:
    """The times of expiry of one variable's values.

    Args:
        state: state of the shard.
        table: byte of the variable's table.
        now_ms: processing time of the batch.
        ttl_ms: time to live, counted from the batch that writes a value.

    Attributes:
        expiry: encoded time of expiry of the values that this batch writes.
    """

    def __init__(self, state: StateAccess, table: int, now_ms: int, ttl_ms: int) -> None:
        self._state = state
        self._table = table
        self._index = table | layout.TIMED
        self._prefix = bytes([self._index])
        self._now_ms = now_ms
        self._ttl_ms = ttl_ms
        self._now = layout.before(self._index, now_ms)[1:]
        self.expiry = layout.before(self._index, now_ms + ttl_ms)[1:]
        self._changes: dict[bytes, bytes | None] = {}

    def is_live(self, value: bytes) -> bool:
        """Whether a value has not expired. A value expires exactly at its time of expiry."""
        return value[:EXPIRY_BYTES] > self._now

    def wrote(self, old: bytes | None, section: bytes, rest: bytes = b"") -> None:
        """Records that a value with `expiry` replaces ``old``; None if there was no value."""
        if old is None:
            self._changes[self._prefix + self.expiry + section + rest] = b""
        elif old[:EXPIRY_BYTES] != self.expiry:
            self._changes[self._prefix + old[:EXPIRY_BYTES] + section + rest] = None
            self._changes[self._prefix + self.expiry + section + rest] = b""

    def removed(self, old: bytes, section: bytes, rest: bytes = b"") -> None:
        """Records that the value ``old`` was removed."""
        self._changes[self._prefix + old[:EXPIRY_BYTES] + section + rest] = None

    def flush(self) -> None:
        """Writes the changes of the index to the store."""
        if self._changes:
            keys = pa.array(list(self._changes), pa.binary())
            self._state.put_many(keys, pa.array(list(self._changes.values()), pa.binary()))
            self._changes.clear()

    def next_sweep_ms(self) -> int | None:
        """Returns when a sweep is worth a batch of its own; None if the variable has no values.

        Expired values only take up space, because reads hide them. So a sweep waits for a tenth of the time
        to live, but at most `SWEEP_DELAY_MS`, and removes everything that has expired meanwhile.
        """
        expiry_ms = layout.earliest_ms(self._state, self._index)
        return None if expiry_ms is None else expiry_ms + min(self._ttl_ms // 10, SWEEP_DELAY_MS)

    def sweep(self) -> list[layout.Entry]:
        """Removes expired values, at most `SWEEP_VALUES`, earliest expiry first.

        Returns:
            The index entries of the removed values.
        """
        due = self._state.range(self._prefix, layout.before(self._index, self._now_ms + 1))
        keys = [key for key, _ in islice(due, SWEEP_VALUES)]
        entries = [layout.split(key) for key in keys]
        if keys:
            keys += [layout.keyed(self._table, entry.group_key, entry.rest) for entry in entries]
            self._state.put_many(pa.array(keys, pa.binary()), pa.nulls(len(keys), pa.binary()))
        return entries


# -- variables


class Variable:
    """A state variable of any kind.

    Args:
        name: name of the variable.
        keys: the window of keys.
    """

    def __init__(self, name: str, keys: KeyWindow) -> None:
        self.name = name
        self._keys = keys
        self._expiries: ExpiryIndex | None = None

    def bind(self, info: VariableInfo, now_ms: int, ttl_ms: int | None) -> None:
        """Binds the variable to the table that the registry assigned, for one batch.

        Args:
            info: table and schemas of the variable.
            now_ms: processing time of the batch.
            ttl_ms: time to live; None if values do not expire.
        """
        self._prefix = bytes([info.table])
        codec = VersionedCodec(info.schemas)
        self._names, self._encode, self._decode = codec.names, codec.encode, codec.decode
        if ttl_ms is not None:
            self._expiries = ExpiryIndex(self._keys.state, info.table, now_ms, ttl_ms)

    def flush(self) -> None:
        """Writes the changes to the keys of this window to the store."""
        if self._expiries is not None:
            self._expiries.flush()

    def sweep(self) -> int:
        """Removes expired values and returns how many. Requires that all changes are flushed."""
        return 0 if self._expiries is None else len(self._expiries.sweep())

    def next_sweep_ms(self) -> int | None:
        """Returns when a batch must remove expired values; None if no value expires."""
        return None if self._expiries is None else self._expiries.next_sweep_ms()

    def _pack(self, row: Value) -> bytes:
        """Returns the row as this batch stores it, with its time of expiry if it has one."""
        if row is None:
            raise illegal_value("NULL_VALUE", self.name, "None")
        data = self._encode(row)
        return data if self._expiries is None else self._expiries.expiry + data

    def _unpack(self, value: bytes) -> Value:
        return self._decode(value if self._expiries is None else value[EXPIRY_BYTES:])

    def _is_live(self, value: bytes) -> bool:
        return self._expiries is None or self._expiries.is_live(value)


def illegal_value(condition: str, name: str, what: str) -> StatefulProcessorError:
    """Returns the error that Spark's `StateStoreErrors` defines for a value that state cannot hold."""
    return StatefulProcessorError(
        f"ILLEGAL_STATE_STORE_VALUE.{condition}: {what} cannot be written to state variable {name!r}.",
        fix="write at least one row; to remove state, use clear().",
    )


class ValueState(Variable, spark.ValueState):
    """Implements Spark's `ValueState`."""

    def bind(self, info: VariableInfo, now_ms: int, ttl_ms: int | None) -> None:
        super().bind(info, now_ms, ttl_ms)
        self._values = PointTable(self._keys, info.table)
        self._read, self._write = self._values.read, self._values.write

    def flush(self) -> None:
        self._values.flush()
        super().flush()

    def exists(self) -> bool:
        """Whether the key has a row that has not expired."""
        section = self._keys.current()
        value = self._read(section)
        return value is not None and self._is_live(value)

    def get(self) -> Value | None:
        """Returns the row; None if the key has no row."""
        section = self._keys.section or self._keys.current()  # saves a call on the hot path
        value = self._read(section)
        if value is None:
            return None
        if self._expiries is None:  # the hot path needs as few calls as possible
            return self._decode(value)
        return self._unpack(value) if self._expiries.is_live(value) else None

    def update(self, newValue: Value) -> None:
        """Writes the row; its time to live starts now."""
        section = self._keys.section or self._keys.current()
        value = self._pack(newValue)
        if self._expiries is not None:
            self._expiries.wrote(self._read(section), section)
        self._write(section, value)

    def clear(self) -> None:
        """Removes the row."""
        section = self._keys.current()
        if self._expiries is not None:
            old = self._read(section)
            if old is not None:
                self._expiries.removed(old, section)
        self._write(section, None)


_HEAD = struct.Struct(">QQ")
POSITION = struct.Struct(">Q")
_FEW = 8  # up to this many elements, single reads are faster than a scan


class ListState(Variable, spark.ListState):
    """Implements Spark's `ListState`."""

    def bind(self, info: VariableInfo, now_ms: int, ttl_ms: int | None) -> None:
        super().bind(info, now_ms, ttl_ms)
        self._heads = PointTable(self._keys, info.table)

    def flush(self) -> None:
        self._heads.flush()
        super().flush()

    def sweep(self) -> int:
        if self._expiries is None:
            return 0
        removed = self._expiries.sweep()
        removed_of_key: dict[bytes, int] = {}
        for entry in removed:
            removed_of_key[entry.group_key] = removed_of_key.get(entry.group_key, 0) + 1
        state = self._keys.state
        for group_key, count in removed_of_key.items():
            key = layout.keyed(self._prefix[0], group_key)
            head = state.get(key)
            if head is None:
                raise StatefulProcessorError(
                    f"list state {self.name!r} is damaged: key {group_key!r} has elements but no list head."
                )
            position, total = _HEAD.unpack(head)
            state.put(key, _HEAD.pack(position, total - count) if total > count else None)
        return len(removed)

    def exists(self) -> bool:
        """Whether the list has an element that has not expired."""
        section = self._keys.current()
        if self._heads.read(section) is None:
            return False
        return self._expiries is None or any(self._is_live(value) for _, value in self._elements(section))

    def get(self) -> Iterator[Value]:
        """Returns the elements at the time of the call, in list order."""
        section = self._keys.current()
        head = self._heads.read(section)
        if head is None:
            return iter(())
        position, count = _HEAD.unpack(head)
        if self._expiries is None and count <= _FEW:
            get, prefix = self._keys.state.get, self._prefix + section
            values = [get(prefix + POSITION.pack(at)) for at in range(position - count, position)]
            # Decoding b"" raises: an element of the list is missing.
            return iter([self._decode(value or b"") for value in values])
        elements = self._elements(section)
        return iter([self._unpack(value) for _, value in elements if self._is_live(value)])

    def put(self, newState: list[Value]) -> None:
        """Replaces the list."""
        values = self._packed(newState)
        section = self._keys.current()
        self._clear(section)
        self._append(section, 0, 0, values)

    def appendValue(self, newState: Value) -> None:
        """Appends one row."""
        self.appendList([newState])

    def appendList(self, newState: list[Value]) -> None:
        """Appends rows; at least one is required."""
        values = self._packed(newState)
        section = self._keys.current()
        head = self._heads.read(section)
        position, count = _HEAD.unpack(head) if head is not None else (0, 0)
        self._append(section, position, count, values)

    def clear(self) -> None:
        """Removes all elements."""
        self._clear(self._keys.current())

    def _packed(self, rows: Iterable[Value]) -> list[bytes]:
        if rows is None:
            raise illegal_value("NULL_VALUE", self.name, "None")
        values = [self._pack(row) for row in rows]
        if not values:
            raise illegal_value("EMPTY_LIST_VALUE", self.name, "an empty list")
        return values

    def _append(self, section: bytes, position: int, count: int, values: list[bytes]) -> None:
        put = self._keys.state.put
        prefix = self._prefix + section
        for offset, value in enumerate(values):
            rest = POSITION.pack(position + offset)
            put(prefix + rest, value)
            if self._expiries is not None:
                self._expiries.wrote(None, section, rest)
        self._heads.write(section, _HEAD.pack(position + len(values), count + len(values)))

    def _clear(self, section: bytes) -> None:
        head = self._heads.read(section)
        if head is None:
            return
        delete = self._keys.state.delete
        prefix = self._prefix + section
        if self._expiries is None:  # without expiry, the positions have no gaps
            position, count = _HEAD.unpack(head)
            for at in range(position - count, position):
                delete(prefix + POSITION.pack(at))
        else:
            for rest, value in self._elements(section):
                delete(prefix + rest)
                self._expiries.removed(value, section, rest)
        self._heads.write(section, None)

    def _elements(self, section: bytes) -> list[tuple[bytes, bytes]]:
        """Returns position and value of each element, including expired ones."""
        prefix = self._prefix + section
        start = len(prefix)
        entries = self._keys.state.prefix_scan(prefix)
        return [(key[start:], value) for key, value in entries if len(key) > start]


class MapState(Variable, spark.MapState):
    """Implements Spark's `MapState`."""

    def bind(self, info: VariableInfo, now_ms: int, ttl_ms: int | None) -> None:
        super().bind(info, now_ms, ttl_ms)
        self._map_keys = StructCodec(info.map_key or t.StructType())

    def exists(self) -> bool:
        """Whether the map has an entry that has not expired."""
        section = self._keys.current()
        scan = self._keys.state.prefix_scan(self._prefix + section)
        return any(self._is_live(value) for _, value in scan)

    def getValue(self, key: Value) -> Value | None:
        """Returns the row of a map key, with field names as in Spark; None if it has no row."""
        section = self._keys.current()
        value = self._keys.state.get(self._prefix + section + self._map_key(key))
        if value is None or not self._is_live(value):
            return None
        return make_row(self._names, self._unpack(value))

    def containsKey(self, key: Value) -> bool:
        """Whether a map key has a row that has not expired."""
        section = self._keys.current()
        value = self._keys.state.get(self._prefix + section + self._map_key(key))
        return value is not None and self._is_live(value)

    def updateValue(self, key: Value, value: Value) -> None:
        """Writes the row of a map key; its time to live starts now."""
        section, rest = self._keys.current(), self._map_key(key)
        packed = self._pack(value)
        at = self._prefix + section + rest
        if self._expiries is not None:
            self._expiries.wrote(self._keys.state.get(at), section, rest)
        self._keys.state.put(at, packed)

    def iterator(self) -> Iterator[tuple[Value, Value]]:
        """Returns the map keys and rows at the time of the call, in no particular order."""
        return iter([(self._map_keys.decode(rest), self._unpack(value)) for rest, value in self._live()])

    def keys(self) -> Iterator[Value]:
        """Returns the map keys at the time of the call."""
        return iter([self._map_keys.decode(rest) for rest, _ in self._live()])

    def values(self) -> Iterator[Value]:
        """Returns the rows at the time of the call."""
        return iter([self._unpack(value) for _, value in self._live()])

    def removeKey(self, key: Value) -> None:
        """Removes a map key and its row."""
        self._remove(self._keys.current(), self._map_key(key))

    def clear(self) -> None:
        """Removes all entries."""
        section = self._keys.current()
        for rest, _ in self._entries(section):
            self._remove(section, rest)

    def _remove(self, section: bytes, rest: bytes) -> None:
        at = self._prefix + section + rest
        if self._expiries is not None:
            old = self._keys.state.get(at)
            if old is not None:
                self._expiries.removed(old, section, rest)
        self._keys.state.delete(at)

    def _map_key(self, key: Value) -> bytes:
        if key is None:
            raise illegal_value("NULL_VALUE", self.name, "None as a map key")
        return self._map_keys.encode(key)

    def _live(self) -> list[tuple[bytes, bytes]]:
        return [(rest, value) for rest, value in self._entries(self._keys.current()) if self._is_live(value)]

    def _entries(self, section: bytes) -> list[tuple[bytes, bytes]]:
        prefix = self._prefix + section
        start = len(prefix)
        return [(key[start:], value) for key, value in self._keys.state.prefix_scan(prefix)]


# -- timers
#
# A key and a time identify a timer, so registering it twice has no further effect, as in Spark
# (`TimerStateImpl`). A timer in the past is due in the batch that registers it (SPARK-56566).

_BY_TIME = TIMERS | layout.TIMED
_KEYED = bytes([TIMERS])


class Timers:
    """The timers of a shard. Timers are registered and listed for the key whose handler runs."""

    def __init__(self, keys: KeyWindow) -> None:
        self._keys = keys

    def register(self, time_ms: int) -> None:
        """Registers a timer for the current key.

        Raises:
            StatefulProcessorError: if the time is not a 64-bit integer.
        """
        section = self._keys.current()
        by_time = _time_prefix(time_ms)
        self._keys.state.put(_KEYED + section + by_time[1:], b"")
        self._keys.state.put(by_time + section, b"")

    def delete(self, time_ms: int) -> None:
        """Deletes a timer of the current key; does nothing if the key has no such timer."""
        section = self._keys.current()
        by_time = _time_prefix(time_ms)
        self._keys.state.delete(_KEYED + section + by_time[1:])
        self._keys.state.delete(by_time + section)

    def is_set(self, time_ms: int) -> bool:
        """Whether the current key has this timer."""
        return self._keys.state.get(_KEYED + self._keys.current() + _time_prefix(time_ms)[1:]) is not None

    def times_ms(self) -> list[int]:
        """Returns the times of the current key's timers, earliest first."""
        prefix = _KEYED + self._keys.current()
        entries = self._keys.state.prefix_scan(prefix)
        return [time_of(key[len(prefix) :]) for key, _ in entries]

    def due(self, until_ms: int) -> Iterator[layout.Entry]:
        """Returns the timers of all keys up to this time (inclusive), earliest first, as of the call."""
        end = layout.before(_BY_TIME, until_ms + 1)
        return (layout.split(key) for key, _ in self._keys.state.range(bytes([_BY_TIME]), end))

    def earliest_ms(self) -> int | None:
        """Returns the time of the earliest timer of all keys; None if there is none."""
        return layout.earliest_ms(self._keys.state, _BY_TIME)


def _time_prefix(time_ms: int) -> bytes:
    """Returns the prefix of the timed keys with this time.

    Raises:
        StatefulProcessorError: if the time is not a 64-bit integer.
    """
    try:
        time_ms = operator.index(time_ms)
    except TypeError as error:
        raise _invalid_time(time_ms) from error
    if not -_SIGN <= time_ms < _SIGN:
        raise _invalid_time(time_ms)
    return layout.before(_BY_TIME, time_ms)


def _invalid_time(time_ms: object) -> StatefulProcessorError:
    return StatefulProcessorError(
        f"the time of a timer is {time_ms!r}, expected milliseconds since the epoch.",
        fix="pass a 64-bit int.",
    )
