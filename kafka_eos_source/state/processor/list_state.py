"""List state: a list of rows per key. An append writes only the new elements and the list's head."""

from __future__ import annotations

import struct
from collections.abc import Iterable, Iterator

from pyspark.sql.streaming import stateful_processor as spark

from kafka_eos_source.errors import StatefulProcessorError
from kafka_eos_source.state.encoding import layout
from kafka_eos_source.state.processor.codec import Value
from kafka_eos_source.state.processor.registry import VariableInfo
from kafka_eos_source.state.processor.variable import Variable, illegal_value
from kafka_eos_source.state.processor.window import PointTable

_HEAD = struct.Struct(">QQ")
_POSITION = struct.Struct(">Q")
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
        section = self._section()
        if self._heads.read(section) is None:
            return False
        return self._expiries is None or any(self._is_live(value) for _, value in self._elements(section))

    def get(self) -> Iterator[Value]:
        """Returns the elements at the time of the call, in list order."""
        section = self._section()
        head = self._heads.read(section)
        if head is None:
            return iter(())
        position, count = _HEAD.unpack(head)
        if self._expiries is None and count <= _FEW:
            get, prefix = self._keys.state.get, self._prefix + section
            values = [get(prefix + _POSITION.pack(at)) for at in range(position - count, position)]
            # Decoding b"" raises: an element of the list is missing.
            return iter([self._decode(value or b"") for value in values])
        elements = self._elements(section)
        return iter([self._unpack(value) for _, value in elements if self._is_live(value)])

    def put(self, newState: list[Value]) -> None:
        """Replaces the list."""
        values = self._packed(newState)
        section = self._section()
        self._clear(section)
        self._append(section, 0, 0, values)

    def appendValue(self, newState: Value) -> None:
        """Appends one row."""
        self.appendList([newState])

    def appendList(self, newState: list[Value]) -> None:
        """Appends rows; at least one is required."""
        values = self._packed(newState)
        section = self._section()
        head = self._heads.read(section)
        position, count = _HEAD.unpack(head) if head is not None else (0, 0)
        self._append(section, position, count, values)

    def clear(self) -> None:
        """Removes all elements."""
        self._clear(self._section())

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
            rest = _POSITION.pack(position + offset)
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
                delete(prefix + _POSITION.pack(at))
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
