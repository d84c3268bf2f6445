"""Kafka Streams' three shapes of state over one store: by key, by key and window, by key and session.

::

    key-value   keyed table t   key │ sub                  value
    window      keyed table t   key │ start (8)            value        timed table t+128   start, key
          "" session     keyed table t   key │ end (8) │ start (8)  value        timed table t+128   end, key
          │ start (8)    ""

Times are ms since the epoch, 8 bytes, big endian, sign flipped, so that bytes are in the order of time. The
timed table finds what is over without a look at every key. Keys are those of `layout`, so that a changelog
can be sharded anew; a table (1 to 127) belongs to one shape. All of it is staged and seen as the store's own
writes are.
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
    """A value for each key, or several in order of a *sub* key of theirs."""

    def __init__(self, state: StateAccess, table: int) -> None:
        self._state = state
        self._table = _checked(table)

    def get(self, key: bytes, sub: bytes = b"") -> bytes | None:
        return self._state.get(keyed(self._table, key, sub))

    def put(self, key: bytes, value: bytes | None, sub: bytes = b"") -> None:
        """None deletes."""
        self._state.put(keyed(self._table, key, sub), value)

    def put_if_absent(self, key: bytes, value: bytes, sub: bytes = b"") -> bytes | None:
        """What there was before, which stays if it is not None."""
        old = self.get(key, sub)
        if old is None:
            self.put(key, value, sub)
        return old

    def delete(self, key: bytes, sub: bytes = b"") -> bytes | None:
        """What there was."""
        old = self.get(key, sub)
        if old is not None:
            self.put(key, None, sub)
        return old

    def range(
        self, key: bytes, low: bytes = b"", high: bytes | None = None, *, reverse: bool = False
    ) -> Iterator[tuple[bytes, bytes]]:
        """Sub keys and values of one key; ``low`` included, ``high`` excluded, None = unbounded."""
        for entry, value in self._state.range(*_span(self._table, key, low, high), reverse=reverse):
            yield split(entry).rest, value

    def clear(self, key: bytes) -> None:
        """Deletes the key with all its sub keys."""
        low, high = _span(self._table, key, b"", None)
        self._state.delete_range(low, high)

    def all(self) -> Iterator[tuple[bytes, bytes, bytes]]:
        """Key, sub key and value of everything; keys of one length are in order."""
        for entry, value in self._state.prefix_scan(bytes([self._table])):
            found = split(entry)
            yield found.group_key, found.rest, value


class Window(NamedTuple):
    """One key's value in the window that begins at ``start_ms`` (included)."""

    key: bytes
    start_ms: int
    value: bytes


class WindowShape:
    """A value for each key and start of a window, as Kafka's `WindowStore`."""

    def __init__(self, state: StateAccess, table: int) -> None:
        self._state = state
        self._table = _checked(table)
        self._times = table + TIMED

    def put(self, key: bytes, start_ms: int, value: bytes | None) -> None:
        """None deletes."""
        entry = keyed(self._table, key, _time(start_ms))
        known = self._state.get(entry) is not None
        if known or value is not None:
            self._state.put(entry, value)
        if known != (value is not None):
            self._state.put(timed(self._times, start_ms, key), None if value is None else b"")

    def fetch(self, key: bytes, start_ms: int) -> bytes | None:
        return self._state.get(keyed(self._table, key, _time(start_ms)))

    def fetch_range(
        self, key: bytes, from_ms: int | None = None, to_ms: int | None = None, *, reverse: bool = False
    ) -> Iterator[Window]:
        """Windows of one key that begin from ``from_ms`` (included) to ``to_ms`` (excluded), in that
        order."""
        low = b"" if from_ms is None else _time(from_ms)
        high = None if to_ms is None else _time(to_ms)
        for entry, value in self._state.range(*_span(self._table, key, low, high), reverse=reverse):
            yield Window(key, _ms(split(entry).rest), value)

    def fetch_all(self, from_ms: int | None = None, to_ms: int | None = None) -> Iterator[Window]:
        """Windows of all keys that begin within the bounds, by time, then key."""
        low = bytes([self._times]) if from_ms is None else before(self._times, from_ms)
        for entry, _ in self._state.range(low, _end(self._times, to_ms)):
            found = split(entry)
            assert found.time_ms is not None
            value = self.fetch(found.group_key, found.time_ms)
            if value is not None:
                yield Window(found.group_key, found.time_ms, value)

    def expire(self, before_ms: int) -> list[Window]:
        """Deletes the windows that begin earlier, and tells which they were, by time."""
        windows = list(self.fetch_all(to_ms=before_ms))
        for window in windows:
            self.put(window.key, window.start_ms, None)
        return windows


class Session(NamedTuple):
    """One key's value from its first event to its last, both included."""

    key: bytes
    start_ms: int
    end_ms: int
    value: bytes


class SessionShape:
    """A value for each key and session, as Kafka's `SessionStore`."""

    def __init__(self, state: StateAccess, table: int) -> None:
        self._state = state
        self._table = _checked(table)
        self._times = table + TIMED

    def put(self, key: bytes, start_ms: int, end_ms: int, value: bytes | None) -> None:
        """None deletes.

        Raises:
            ValueError: it ends before it begins.
        """
        if end_ms < start_ms:
            raise ValueError(f"a session from {start_ms} to {end_ms} ms")
        entry = keyed(self._table, key, _time(end_ms) + _time(start_ms))
        known = self._state.get(entry) is not None
        if known or value is not None:
            self._state.put(entry, value)
        if known != (value is not None):
            index = timed(self._times, end_ms, key, _time(start_ms))
            self._state.put(index, None if value is None else b"")

    def remove(self, session: Session) -> None:
        self.put(session.key, session.start_ms, session.end_ms, None)

    def fetch(self, key: bytes, start_ms: int, end_ms: int) -> bytes | None:
        return self._state.get(keyed(self._table, key, _time(end_ms) + _time(start_ms)))

    def find(
        self, key: bytes, earliest_end_ms: int | None = None, latest_start_ms: int | None = None
    ) -> Iterator[Session]:
        """Sessions of one key that end at ``earliest_end_ms`` or later and begin at ``latest_start_ms`` or
        earlier.

        What an event at ``t`` joins, with a gap of ``g``: ``find(key, t - g, t + g)``. By end, then start.
        """
        low = b"" if earliest_end_ms is None else _time(earliest_end_ms)
        for entry, value in self._state.range(*_span(self._table, key, low, None)):
            rest = split(entry).rest
            session = Session(key, _ms(rest[8:]), _ms(rest[:8]), value)
            if latest_start_ms is None or session.start_ms <= latest_start_ms:
                yield session

    def ended(self, before_ms: int | None = None) -> Iterator[Session]:
        """Sessions of all keys that end earlier, by end; None = all."""
        for entry, _ in self._state.range(bytes([self._times]), _end(self._times, before_ms)):
            found = split(entry)
            assert found.time_ms is not None
            start_ms = _ms(found.rest)
            value = self.fetch(found.group_key, start_ms, found.time_ms)
            if value is not None:
                yield Session(found.group_key, start_ms, found.time_ms, value)

    def expire(self, before_ms: int) -> list[Session]:
        """Deletes the sessions that end earlier, and tells which they were, by end."""
        sessions = list(self.ended(before_ms))
        for session in sessions:
            self.remove(session)
        return sessions


def _checked(table: int) -> int:
    if not 1 <= table < TIMED:
        raise ValueError(f"table {table}; expected 1 to {TIMED - 1}")
    return table


def _span(table: int, key: bytes, low: bytes, high: bytes | None) -> tuple[bytes, bytes]:
    """Where the entries of one key are whose rest is from ``low`` (included) to ``high`` (excluded)."""
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
