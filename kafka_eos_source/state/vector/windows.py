"""Declarations of event-time windows: for the driver, and in the descriptions of stores.

A window covers ``[start, end)``. It closes at the end of the first micro-batch in which ``end + grace`` is at
or before the watermark, or the largest event time of the shard's rows in this batch. Rows of a closed window
are late: the processor drops and counts them. Kafka Streams has the same rule (``KStreamWindowAggregate``: a
window expires when its end is at or before stream time minus grace), but its stream time is that of one
partition.

Event times have millisecond precision, as Kafka timestamps do. Windows are aligned to the epoch.
"""

from __future__ import annotations

import datetime as dt
import difflib
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from kafka_eos_source.errors import InvalidOptionError, InvalidRecordError, InvalidSchemaError
from kafka_eos_source.option_values import duration_ms
from kafka_eos_source.state.encoding import binary
from kafka_eos_source.state.encoding.binary import Ints

#: A time span: a `timedelta`, or text such as ``"90s"``, ``"5 minutes"`` or ``"1 hour"``.
Duration = dt.timedelta | str

#: Event times further than this many ms from the epoch (about 142,000 years) are refused.
_LIMIT_MS = 1 << 52

#: For each timestamp unit: the factor and the divisor that convert it to ms.
_PER_UNIT = {"s": (1000, 1), "ms": (1, 1), "us": (1, 1000), "ns": (1, 1_000_000)}


@dataclass(frozen=True)
class Tumbling:
    """Windows of equal size that begin every ``every_ms`` ms. Create them with `tumbling` or `hopping`."""

    on: str
    size_ms: int
    every_ms: int
    grace_ms: int
    offset_ms: int

    @property
    def pane_ms(self) -> int:
        """Length of a pane, the longest span that lies entirely inside or outside every window."""
        return math.gcd(self.size_ms, self.every_ms)

    def panes(self, times_ms: Ints) -> Ints:
        """Returns the start of the pane that contains each event time, in ms."""
        return (times_ms - self.offset_ms) // self.pane_ms * self.pane_ms + self.offset_ms

    def starts(self, panes: Ints) -> tuple[Ints, Ints]:
        """Finds the windows that contain each pane.

        Args:
            panes: starts of panes, in ms.

        Returns:
            For each pair of a pane and a window that contains it: the index of the pane, and the start of
            the window in ms.
        """
        newest = (panes - self.offset_ms) // self.every_ms * self.every_ms + self.offset_ms
        if self.size_ms == self.every_ms:
            return np.arange(len(panes)), newest
        back = np.arange(-(-self.size_ms // self.every_ms)) * self.every_ms
        starts = newest[:, None] - back
        pane, which = np.nonzero(starts + self.size_ms > panes[:, None])
        return pane, starts[pane, which]

    def to_json(self) -> dict[str, Any]:
        """Returns the parameters that the state depends on. ``grace`` may change from run to run."""
        return {"kind": "tumbling", "on": self.on, "size_ms": self.size_ms, "every_ms": self.every_ms,
                "offset_ms": self.offset_ms}  # fmt: skip


@dataclass(frozen=True)
class Session:
    """Sessions: rows of a key that are less than ``gap_ms`` ms apart. Create them with `session`."""

    on: str
    gap_ms: int
    grace_ms: int

    def to_json(self) -> dict[str, Any]:
        """Returns the parameters that the state depends on. ``grace`` may change from run to run."""
        return {"kind": "session", "on": self.on, "gap_ms": self.gap_ms}


Window = Tumbling | Session


def window_from_json(written: Mapping[str, Any]) -> Window:
    """Returns the window that ``to_json`` wrote, with a grace of 0."""
    parts = {name: value for name, value in written.items() if name != "kind"}
    if written["kind"] == "session":
        return Session(grace_ms=0, **parts)
    return Tumbling(grace_ms=0, **parts)


def tumbling(size: Duration, *, on: str, grace: Duration = "0s", offset: Duration = "0s") -> Tumbling:
    """Declares adjacent windows of equal size, so that each row belongs to exactly one.

    Args:
        size: length of a window, at least 1 ms. Time spans are a `timedelta` or text such as ``"90s"``.
        on: name of the event-time column: timestamp, or int64 in ms since the epoch.
        grace: how long after its end a window still accepts rows.
        offset: start of the windows relative to the epoch, as Spark's ``startTime``.

    Raises:
        InvalidOptionError: if a time span is malformed or out of range.

    Example::

        tumbling("1 hour", on="departed", grace="10 minutes")
    """
    span = milliseconds("size", size, at_least=1)
    return Tumbling(on, span, span, milliseconds("grace", grace), milliseconds("offset", offset))


def hopping(
    size: Duration, *, every: Duration, on: str, grace: Duration = "0s", offset: Duration = "0s"
) -> Tumbling:
    """Declares overlapping windows of equal size, so that each row may belong to several.

    Args:
        size: length of a window, at least 1 ms. Time spans are a `timedelta` or text such as ``"90s"``.
        every: interval between the starts of two windows: at least 1 ms, at most ``size``.
        on: name of the event-time column: timestamp, or int64 in ms since the epoch.
        grace: how long after its end a window still accepts rows.
        offset: start of the windows relative to the epoch, as Spark's ``startTime``.

    Raises:
        InvalidOptionError: if a time span is malformed or out of range, or ``every`` is longer than ``size``.

    Example::

        hopping("1 hour", every="5 minutes", on="departed")
    """
    span, step = milliseconds("size", size, at_least=1), milliseconds("every", every, at_least=1)
    if step > span:
        raise InvalidOptionError(
            f"windows of {span} ms that begin every {step} ms leave gaps, and rows in a gap would be lost.",
            fix="set 'every' to a time span that is at most as long as 'size'.",
        )
    return Tumbling(on, span, step, milliseconds("grace", grace), milliseconds("offset", offset))


def session(gap: Duration, *, on: str, grace: Duration = "0s") -> Session:
    """Declares sessions: windows from the first row of a key to ``gap`` after its last row.

    Rows of a key that are less than ``gap`` apart belong to one session. A row that is less than ``gap`` from
    two sessions joins them into one. Two rows that are exactly ``gap`` apart belong to different sessions, as
    in Spark's ``session_window``; Kafka Streams joins them.

    Args:
        gap: length of inactivity that ends a session, at least 1 ms. Time spans are a `timedelta` or text
            such as ``"90s"``.
        on: name of the event-time column: timestamp, or int64 in ms since the epoch.
        grace: how long after its end a session still accepts rows.

    Raises:
        InvalidOptionError: if a time span is malformed or out of range.

    Example::

        session("30 minutes", on="clicked", grace="5 minutes")
    """
    return Session(on, milliseconds("gap", gap, at_least=1), milliseconds("grace", grace))


_SPARK_UNITS = {"second": "s", "minute": "min", "hour": "h", "day": "d", "millisecond": "ms", "week": "w"}


def milliseconds(name: str, duration: Duration, *, at_least: int = 0) -> int:
    """Converts a time span to ms.

    Args:
        name: name of the argument, for the error.
        duration: the time span.
        at_least: smallest allowed value, ms.

    Raises:
        InvalidOptionError: if the time span is malformed, or shorter than ``at_least``.
    """
    if isinstance(duration, dt.timedelta):
        span_ms = duration // dt.timedelta(milliseconds=1)
    else:
        number, _, unit = duration.strip().lower().partition(" ")
        short = _SPARK_UNITS.get(unit.strip().removesuffix("s"), unit)
        if short == "w":
            span_ms = 7 * duration_ms(name, f"{number}d")
        else:
            span_ms = duration_ms(name, f"{number}{short}")
    if not at_least <= span_ms < _LIMIT_MS:
        raise InvalidOptionError(
            f"{name} is {duration!r}; expected a time span of {at_least} ms or more.",
            fix=f"set {name!r} to a time span such as '500ms', '5 minutes' or '1 hour'.",
        )
    return span_ms


def no_time_column(name: str, columns: Sequence[str]) -> InvalidSchemaError:
    """Returns the error for an event-time column that the rows do not have."""
    near = difflib.get_close_matches(name, columns, n=1)
    return InvalidSchemaError(
        f"the event-time column {name!r} is not among the columns of the rows.",
        fix=f"use {near[0]!r}." if near else f"use one of the columns {', '.join(columns)}.",
    )


def check_time_column(schema: pa.Schema, name: str) -> pa.DataType:
    """Returns the type of the event-time column.

    Raises:
        InvalidSchemaError: if the column is missing, or is neither timestamp nor int64.
    """
    if name not in schema.names:
        raise no_time_column(name, schema.names)
    type_ = schema.field(name).type
    if not (pa.types.is_timestamp(type_) or pa.types.is_int64(type_)):
        raise InvalidSchemaError(
            f"the event-time column {name!r} has type {type_}; expected timestamp, or int64 in ms.",
            fix=f"cast {name!r} to timestamp.",
        )
    return type_


def times_ms(column: pa.Array) -> tuple[Ints, NDArray[np.bool_]]:
    """Converts event times to ms since the epoch, rounded down.

    Args:
        column: event times as timestamp, or as int64 in ms since the epoch.

    Returns:
        The times in ms, and which of them are not null.

    Raises:
        InvalidRecordError: if a time is more than 2^52 ms from the epoch.
    """
    times = binary.raw(column, np.int64)
    if pa.types.is_timestamp(column.type):
        factor, divisor = _PER_UNIT[column.type.unit]
        limit = _LIMIT_MS * divisor // factor
    else:
        factor, divisor, limit = 1, 1, _LIMIT_MS
    if len(times) and not -limit <= int(times.min()) <= int(times.max()) <= limit:
        raise InvalidRecordError(
            f"the rows have event times from {int(times.min())} to {int(times.max())} ({column.type}); "
            f"expected times from {-limit} to {limit}.",
            fix="before the operator, filter such rows out or set their event time to null.",
        )
    return times * factor // divisor, binary.valid(column)


def times_from_ms(times: Ints, type_: pa.DataType) -> pa.Array:
    """Converts times in ms to a column of the given event-time type; the inverse of `times_ms`."""
    if not pa.types.is_timestamp(type_):
        return pa.array(times, pa.int64())
    divisor, factor = _PER_UNIT[type_.unit]
    return pa.array(times * factor // divisor, pa.int64()).cast(type_)


def ms_column(times: Ints, is_valid: NDArray[np.bool_]) -> pa.Array:
    """Converts times in ms to an int64 column with nulls."""
    return pa.array(times, pa.int64(), mask=None if bool(is_valid.all()) else ~is_valid)
