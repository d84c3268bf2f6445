"""Map state: a map of rows per key."""

from __future__ import annotations

from collections.abc import Iterator

from pyspark.sql import types as t
from pyspark.sql.streaming import stateful_processor as spark

from kafka_eos_source.state.processor.codec import StructCodec, Value, make_row
from kafka_eos_source.state.processor.registry import VariableInfo
from kafka_eos_source.state.processor.variable import Variable, illegal_value


class MapState(Variable, spark.MapState):
    """Implements Spark's `MapState`."""

    def bind(self, info: VariableInfo, now_ms: int, ttl_ms: int | None) -> None:
        super().bind(info, now_ms, ttl_ms)
        self._map_keys = StructCodec(info.map_key or t.StructType())

    def exists(self) -> bool:
        """Whether the map has an entry that has not expired."""
        section = self._section()
        scan = self._keys.state.prefix_scan(self._prefix + section)
        return any(self._is_live(value) for _, value in scan)

    def getValue(self, key: Value) -> Value | None:
        """Returns the row of a map key, with field names as in Spark; None if it has no row."""
        section = self._section()
        value = self._keys.state.get(self._prefix + section + self._map_key(key))
        if value is None or not self._is_live(value):
            return None
        return make_row(self._names, self._unpack(value))

    def containsKey(self, key: Value) -> bool:
        """Whether a map key has a row that has not expired."""
        section = self._section()
        value = self._keys.state.get(self._prefix + section + self._map_key(key))
        return value is not None and self._is_live(value)

    def updateValue(self, key: Value, value: Value) -> None:
        """Writes the row of a map key; its time to live starts now."""
        section, rest = self._section(), self._map_key(key)
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
        self._remove(self._section(), self._map_key(key))

    def clear(self) -> None:
        """Removes all entries."""
        section = self._section()
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
        return [(rest, value) for rest, value in self._entries(self._section()) if self._is_live(value)]

    def _entries(self, section: bytes) -> list[tuple[bytes, bytes]]:
        prefix = self._prefix + section
        start = len(prefix)
        return [(key[start:], value) for key, value in self._keys.state.prefix_scan(prefix)]
