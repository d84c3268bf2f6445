"""Kafka Streams' kinds of store on top of one state: key-value, window and session.

::

    key-value   keyed table t   key │ sub                  value
    window      keyed table t   key │ start (8)            value        timed table t+128   start, key
          "" session     keyed table t   key │ end (8) │ start (8)  value        timed table t+128   end, key
          │ start (8)    ""

Times are ms since the epoch, 8 bytes, big endian, with the sign bit flipped, so that the order of bytes is
that of time. The timed table finds expired entries without reading every key. Keys follow `layout`, so that a
changelog can be moved to another number of shards. A table number (1 to 127) belongs to one shape. Writes are
staged like any other write of the store.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from typing import NamedTuple

from kafka_eos_source.state.layout import TIMED, before, keyed, split, timed, upper_bound
from kafka_eos_source.state.model import StateAccess

_TIME = struct.Struct(">Q")
_SIGN = 1 << 63


class KeyValueShape:
    """One value for each key, or several values for a key, ordered by a *sub* key."""

    def __init__(self, state: StateAccess, table: int) -> None:
        self._state = state
        self._table = _checked(table)

    def get(self, key: bytes, sub: bytes = b"") -> bytes | None:
        return self._state.get(keyed(self._table, key, sub))

    def put(self, key: bytes, value: bytes | None, sub: bytes = b"") -> None:
        """Stages a value; None deletes."""
        self._state.put(keyed(self._table, key, sub), value)

    def put_if_absent(self, key: bytes, value: bytes, sub: bytes = b"") -> bytes | None:
        """Stages the value if the key has none, and returns the value that it had."""
        old = self.get(key, sub)
        if old is None:
            self.put(key, value, sub)
        return old

    def delete(self, key: bytes, sub: bytes = b"") -> bytes | None:
        """Deletes the key, and returns the value that it had."""
        old = self.get(key, sub)
        if old is not None:
            self.put(key, None, sub)
        return old

    def range(
        self, key: bytes, low: bytes = b"", high: bytes | None = None, *, reverse: bool = False
    ) -> Iterator[tuple[bytes, bytes]]:
        """Yields sub keys and values of a key from ``low`` (included) to ``high`` (excluded)."""
        for entry, value in self._state.range(*_span(self._table, key, low, high), reverse=reverse):
            yield split(entry).rest, value

    def clear(self, key: bytes) -> None:
        """Deletes the key with all its sub keys."""
        low, high = _span(self._table, key, b"", None)
        self._state.delete_range(low, high)

    def all(self) -> Iterator[tuple[bytes, bytes, bytes]]:
        """Yields key, sub key and value of all entries; keys of the same length are in order."""
        for entry, value in self._state.prefix_scan(bytes([self._table])):
            found = split(entry)
            yield found.group_key, found.rest, value


class Window(NamedTuple):
    """Value of a key in the window that begins at ``start_ms`` (included)."""

    key: bytes
    start_ms: int
    value: bytes


class WindowShape:
    """One value for each key and window start, as in Kafka's `WindowStore`."""

    def __init__(self, state: StateAccess, table: int) -> None:
        self._state = state
        self._table = _checked(table)
        self._times = table + TIMED

    def put(self, key: bytes, start_ms: int, value: bytes | None) -> None:
        """Stages the value of a key in a window; None deletes."""
        entry = keyed(self._table, key, _time(start_ms))
        known = self._state.get(entry) is not None
        if known or value is not None:
            self._state.put(entry, value)
        if known != (value is not None):
            self._state.put(timed(self._times, start_ms, key), None if value is None else b"")

    def fetch(self, key: bytes, start_ms: int) -> bytes | None:
        """Returns the value of a key in the window that begins at ``start_ms``."""
        return self._state.get(keyed(self._table, key, _time(start_ms)))

    def fetch_range(
        self, key: bytes, from_ms: int | None = None, to_ms: int | None = None, *, reverse: bool = False
    ) -> Iterator[Window]:
        """Yields a key's windows that begin from ``from_ms`` (included) to ``to_ms``."""
        low = b"" if from_ms is None else _time(from_ms)
        high = None if to_ms is None else _time(to_ms)
        for entry, value in self._state.range(*_span(self._table, key, low, high), reverse=reverse):
            yield Window(key, _ms(split(entry).rest), value)

    def fetch_all(self, from_ms: int | None = None, to_ms: int | None = None) -> Iterator[Window]:
        """Yields the windows of all keys that begin within the bounds, ordered by time, then key."""
        low = bytes([self._times]) if from_ms is None else before(self._times, from_ms)
        for entry, _ in self._state.range(low, _end(self._times, to_ms)):
            found = split(entry)
            assert found.time_ms is not None
            value = self.fetch(found.group_key, found.time_ms)
            if value is not None:
                yield Window(found.group_key, found.time_ms, value)

    def expire(self, before_ms: int) -> list[Window]:
        """Deletes and returns the windows that begin before ``before_ms``, ordered by time."""
        windows = list(self.fetch_all(to_ms=before_ms))
        for window in windows:
            self.put(window.key, window.start_ms, None)
        return windows


class Session(NamedTuple):
    """Value of a key for the session from its first to its last event, both included."""

    key: bytes
    start_ms: int
    end_ms: int
    value: bytes


class SessionShape:
    """One value for each key and session, as in Kafka's `SessionStore`."""

    def __init__(self, state: StateAccess, table: int) -> None:
        self._state = state
        self._table = _checked(table)
        self._times = table + TIMED

    def put(self, key: bytes, start_ms: int, end_ms: int, value: bytes | None) -> None:
        """Stages the value of a key for a session; None deletes.

        Raises:
            ValueError: if the session ends before it begins.
        """
        if end_ms < start_ms:
            raise ValueError(f"a session cannot last from {start_ms} to {end_ms} ms.")
        entry = keyed(self._table, key, _time(end_ms) + _time(start_ms))
        known = self._state.get(entry) is not None
        if known or value is not None:
            self._state.put(entry, value)
        if known != (value is not None):
            index = timed(self._times, end_ms, key, _time(start_ms))
            self._state.put(index, None if value is None else b"")

    def remove(self, session: Session) -> None:
        """Deletes a session."""
        self.put(session.key, session.start_ms, session.end_ms, None)

    def fetch(self, key: bytes, start_ms: int, end_ms: int) -> bytes | None:
        """Returns the value of a key for the session with these bounds."""
        return self._state.get(keyed(self._table, key, _time(end_ms) + _time(start_ms)))

    def find(
        self, key: bytes, earliest_end_ms: int | None = None, latest_start_ms: int | None = None
    ) -> Iterator[Session]:
        """Yields the sessions of a key that overlap a time span, ordered by end, then start.

        With a gap of ``g``, an event at ``t`` joins the sessions that ``find(key, t - g, t + g)`` yields.

        Args:
            key: the key.
            earliest_end_ms: sessions that end before are left out; None = no bound.
            latest_start_ms: sessions that begin later are left out; None = no bound.
        """
        low = b"" if earliest_end_ms is None else _time(earliest_end_ms)
        for entry, value in self._state.range(*_span(self._table, key, low, None)):
            rest = split(entry).rest
            session = Session(key, _ms(rest[8:]), _ms(rest[:8]), value)
            if latest_start_ms is None or session.start_ms <= latest_start_ms:
                yield session

    def ended(self, before_ms: int | None = None) -> Iterator[Session]:
        """Yields the sessions that end before ``before_ms`` (None = all), ordered by end."""
        for entry, _ in self._state.range(bytes([self._times]), _end(self._times, before_ms)):
            found = split(entry)
            assert found.time_ms is not None
            start_ms = _ms(found.rest)
            value = self.fetch(found.group_key, start_ms, found.time_ms)
            if value is not None:
                yield Session(found.group_key, start_ms, found.time_ms, value)

    def expire(self, before_ms: int) -> list[Session]:
        """Deletes and returns the sessions that end before ``before_ms``, ordered by end."""
        sessions = list(self.ended(before_ms))
        for session in sessions:
            self.remove(session)
        return sessions


def _checked(table: int) -> int:
    if not 1 <= table < TIMED:
        raise ValueError(f"the state has no table {table}; expected 1 to {TIMED - 1}.")
    return table


def _span(table: int, key: bytes, low: bytes, high: bytes | None) -> tuple[bytes, bytes]:
    """Returns the key range of a key's entries from ``low`` (included) to ``high``."""
    own = keyed(table, key)
    if high is not None:
        return own + low, own + high
    end = upper_bound(own)
    assert end is not None  # its first byte is below 0x80
    return own + low, end


def _end(table: int, to_ms: int | None) -> bytes | None:
    return upper_bound(bytes([table])) if to_ms is None else before(table, to_ms)


def _time(time_ms: int) -> bytes:
    return _TIME.pack(time_ms + _SIGN)


def _ms(time: bytes) -> int:
    (number,) = _TIME.unpack(time)
    return int(number) - _SIGN
