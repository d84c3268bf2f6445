"""Timers: when ``handleExpiredTimer`` is to be called, for which key.

::

    keyed(TIMERS, key, time)          → nothing    what listTimers reads
    timed(TIMERS + 0x80, time, key)   → nothing    what is due, earliest first

A timer is a key and a time: to register one twice is to register it once, as in Spark (`TimerStateImpl`). One
that lies in the past is due in the batch that registers it (SPARK-56566).
"""

from __future__ import annotations

import operator
from collections.abc import Iterator

from kafka_eos_source.errors import StatefulProcessorError
from kafka_eos_source.state import layout
from kafka_eos_source.state.processor.registry import TIMERS
from kafka_eos_source.state.processor.window import KeyWindow

_BY_TIME = TIMERS | layout.TIMED
_KEYED = bytes([TIMERS])
_LIMIT = 1 << 63


class Timers:
    """The timers of a shard; what it registers and lists are those of the key whose handler runs."""

    def __init__(self, keys: KeyWindow) -> None:
        self._keys = keys

    def register(self, time_ms: int) -> None:
        """Set a timer for the current key.

        Raises:
            StatefulProcessorError: the time is no integer of 64 bits.
        """
        section = self._keys.current()
        by_time = _before(time_ms)
        self._keys.state.put(_KEYED + section + by_time[1:], b"")
        self._keys.state.put(by_time + section, b"")

    def delete(self, time_ms: int) -> None:
        """Remove a timer of the current key; one that is not there is none the less."""
        section = self._keys.current()
        by_time = _before(time_ms)
        self._keys.state.delete(_KEYED + section + by_time[1:])
        self._keys.state.delete(by_time + section)

    def is_set(self, time_ms: int) -> bool:
        """Whether the current key has this timer."""
        return self._keys.state.get(_KEYED + self._keys.current() + _before(time_ms)[1:]) is not None

    def times_ms(self) -> list[int]:
        """The times of the current key's timers, earliest first."""
        prefix = _KEYED + self._keys.current()
        entries = self._keys.state.prefix_scan(prefix)
        # What follows the key is written as `layout` writes the time of a timed key.
        return [int.from_bytes(key[len(prefix) :], "big") - _LIMIT for key, _ in entries]

    def due(self, until_ms: int) -> Iterator[layout.Entry]:
        """Timers of all keys up to this time (included), earliest first, as they are now."""
        end = layout.before(_BY_TIME, until_ms + 1)
        return (layout.split(key) for key, _ in self._keys.state.range(bytes([_BY_TIME]), end))


def _before(time_ms: int) -> bytes:
    """The beginning of the timed keys of this time."""
    try:
        time_ms = operator.index(time_ms)
    except TypeError as error:
        raise _no_time(time_ms) from error
    if not -_LIMIT <= time_ms < _LIMIT:
        raise _no_time(time_ms)
    return layout.before(_BY_TIME, time_ms)


def _no_time(time_ms: object) -> StatefulProcessorError:
    return StatefulProcessorError(
        f"a timer at {time_ms!r}, expected milliseconds since the epoch", fix="give an int of 64 bits"
    )
