"""Timers: for which key and when ``handleExpiredTimer`` is called.

::

    keyed(TIMERS, key, time)          → empty    the timers of a key, for listTimers
    timed(TIMERS + 0x80, time, key)   → empty    the timers of all keys, earliest first

A key and a time identify a timer, so registering it twice has no further effect, as in Spark
(`TimerStateImpl`). A timer in the past is due in the batch that registers it (SPARK-56566).
"""

from __future__ import annotations

import operator
from collections.abc import Iterator

from kafka_eos_source.errors import StatefulProcessorError
from kafka_eos_source.state.encoding import layout
from kafka_eos_source.state.processor.registry import TIMERS
from kafka_eos_source.state.processor.window import KeyWindow

_BY_TIME = TIMERS | layout.TIMED
_KEYED = bytes([TIMERS])
_LIMIT = 1 << 63


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
        # The time is encoded as in a timed key of `layout`.
        return [int.from_bytes(key[len(prefix) :], "big") - _LIMIT for key, _ in entries]

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
    if not -_LIMIT <= time_ms < _LIMIT:
        raise _invalid_time(time_ms)
    return layout.before(_BY_TIME, time_ms)


def _invalid_time(time_ms: object) -> StatefulProcessorError:
    return StatefulProcessorError(
        f"the time of a timer is {time_ms!r}, expected milliseconds since the epoch.",
        fix="pass a 64-bit int.",
    )
