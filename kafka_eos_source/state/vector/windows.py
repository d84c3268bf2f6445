"""Windows in event time: declarations, and which windows a moment belongs to.

Every window is ``[start, end)``. It is *open* while rows may change it, and closes when ``end + grace`` is
not later than the watermark, the largest event time of all shards: in the batches before, and in the
shard's own rows of this one. Rows of a closed window are late: they are dropped and counted. That is Kafka
Streams' rule (``KStreamWindowAggregate``: a window is expired when its end is not later than stream time
less grace), with one stream time for all partitions.

Event time counts in whole milliseconds, as Kafka's timestamps do. Windows are aligned to the epoch.
"""

from __future__ import annotations

import datetime as dt
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from kafka_eos_source.errors import InvalidOptionError, InvalidRecordError, InvalidSchemaError
from kafka_eos_source.option_values import duration_ms
from kafka_eos_source.state.encoding import binary, cells
from kafka_eos_source.state.encoding.binary import Ints

#: A time span: a `timedelta`, or text such as ``"90s"``, ``"5 minutes"``, ``"1 hour"``.
Duration = dt.timedelta | str

#: Event times beyond this many ms of the epoch (the year 146,000) are no times.
_LIMIT_MS = 1 << 52

_PER_UNIT = {"s": (1000, 1), "ms": (1, 1), "us": (1, 1000), "ns": (1, 1_000_000)}


@dataclass(frozen=True)
class Tumbling:
    """Windows of equal size, one every ``every_ms``: use `tumbling` or `hopping`."""

    on: str
    size_ms: int
    every_ms: int
    grace_ms: int
    offset_ms: int

    @property
    def pane_ms(self) -> int:
        """The longest span that lies wholly in, or out of, every window."""
        return math.gcd(self.size_ms, self.every_ms)

    def panes(self, times_ms: Ints) -> Ints:
        """The start of the pane that each moment is in."""
        return (times_ms - self.offset_ms) // self.pane_ms * self.pane_ms + self.offset_ms

    def starts(self, panes: Ints) -> tuple[Ints, Ints]:
        """The windows of panes.

        Returns: which pane, and the start of a window it is in; one pair for each window of each pane.
        """
        newest = (panes - self.offset_ms) // self.every_ms * self.every_ms + self.offset_ms
        if self.size_ms == self.every_ms:
            return np.arange(len(panes)), newest
        back = np.arange(-(-self.size_ms // self.every_ms)) * self.every_ms
        starts = newest[:, None] - back
        pane, which = np.nonzero(starts + self.size_ms > panes[:, None])
        return pane, starts[pane, which]

    def to_json(self) -> dict[str, Any]:
        """What the state depends on; grace may change from run to run."""
        return {"kind": "tumbling", "on": self.on, "size_ms": self.size_ms, "every_ms": self.every_ms,
                "offset_ms": self.offset_ms}  # fmt: skip


@dataclass(frozen=True)
class Session:
    """Rows of a key that are less than ``gap_ms`` apart: use `session`."""

    on: str
    gap_ms: int
    grace_ms: int

    def to_json(self) -> dict[str, Any]:
        """What the state depends on; grace may change from run to run."""
        return {"kind": "session", "on": self.on, "gap_ms": self.gap_ms}


Window = Tumbling | Session


def window_from_json(written: Mapping[str, Any]) -> Window:
    """The window of ``to_json``, without its grace."""
    parts = {name: value for name, value in written.items() if name != "kind"}
    if written["kind"] == "session":
        return Session(grace_ms=0, **parts)
    return Tumbling(grace_ms=0, **parts)


def tumbling(size: Duration, *, on: str, grace: Duration = "0s", offset: Duration = "0s") -> Tumbling:
    """Windows side by side.

    Args:
        size: of a window, 1 ms or more.
        on: the column of event time: timestamp, or int64 in ms since the epoch.
        grace: how long after its end a window still takes rows.
        offset: where windows begin, counted from the epoch: Spark's ``startTime``.

    Raises:
        InvalidOptionError: not a time span, or out of range.
    """
    span = milliseconds("size", size, at_least=1)
    return Tumbling(on, span, span, milliseconds("grace", grace), milliseconds("offset", offset))


def hopping(
    size: Duration, *, every: Duration, on: str, grace: Duration = "0s", offset: Duration = "0s"
) -> Tumbling:
    """Windows that overlap: one begins every ``every``, a row is in several. Otherwise as `tumbling`.

    Raises:
        InvalidOptionError: not a time span, or out of range; ``every`` is longer than ``size``.
    """
    span, step = milliseconds("size", size, at_least=1), milliseconds("every", every, at_least=1)
    if step > span:
        raise InvalidOptionError(
            f"windows of {span} ms, one every {step} ms: rows between them would be in none",
            fix="give 'every' a time that is not longer than 'size'",
        )
    return Tumbling(on, span, step, milliseconds("grace", grace), milliseconds("offset", offset))


def session(gap: Duration, *, on: str, grace: Duration = "0s") -> Session:
    """Windows that grow: from a row to ``gap`` after the last one; a row within it belongs to it.

    A row that falls between two sessions, less than ``gap`` from both, makes one of them. Two rows exactly
    ``gap`` apart are in two sessions, as in Spark's ``session_window`` (Kafka Streams, whose sessions end
    with their last row, still joins them).

    Raises:
        InvalidOptionError: not a time span, or out of range.
    """
    return Session(on, milliseconds("gap", gap, at_least=1), milliseconds("grace", grace))


_SPARK_UNITS = {"second": "s", "minute": "min", "hour": "h", "day": "d", "millisecond": "ms", "week": "w"}


def milliseconds(name: str, duration: Duration, *, at_least: int = 0) -> int:
    """A time span in ms.

    Raises:
        InvalidOptionError: it is none, or shorter than ``at_least``.
    """
    if isinstance(duration, dt.timedelta):
        found = duration // dt.timedelta(milliseconds=1)
    else:
        number, _, unit = duration.strip().lower().partition(" ")
        short = _SPARK_UNITS.get(unit.strip().removesuffix("s"), unit)
        found = 7 * duration_ms(name, f"{number}d") if short == "w" else duration_ms(name, f"{number}{short}")
    if not at_least <= found < _LIMIT_MS:
        raise InvalidOptionError(
            f"{name} is {duration!r}, expected {at_least} ms or more",
            fix=f"give {name!r} a time such as '500ms', '5 minutes' or '1 hour'",
        )
    return found


def check_time_column(schema: pa.Schema, name: str) -> pa.DataType:
    """The type of a column of event time.

    Raises:
        InvalidSchemaError: it is missing, or neither a timestamp nor int64.
    """
    if name not in schema.names:
        raise InvalidSchemaError(
            f"the column {name!r} of event time is missing", fix=f"the columns are {', '.join(schema.names)}"
        )
    type_ = schema.field(name).type
    if not (pa.types.is_timestamp(type_) or pa.types.is_int64(type_)):
        raise InvalidSchemaError(
            f"the column {name!r} of event time is {type_}, expected a timestamp, or int64 in ms",
            fix=f"cast {name!r} to timestamp",
        )
    return type_


def times_ms(column: pa.Array) -> tuple[Ints, NDArray[np.bool_]]:
    """Event times in ms since the epoch, rounded down, and which of them are not null.

    Raises:
        InvalidRecordError: a time that is beyond all calendars.
    """
    times = cells.raw(column, np.int64)
    if pa.types.is_timestamp(column.type):
        times_, divided = _PER_UNIT[column.type.unit]
        limit = _LIMIT_MS * divided // times_
    else:
        times_, divided, limit = 1, 1, _LIMIT_MS
    if len(times) and not -limit <= int(times.min()) <= int(times.max()) <= limit:
        raise InvalidRecordError(
            f"event times from {int(times.min())} to {int(times.max())} {column.type}: not all are dates",
            fix="filter such rows out, or set their event time to null, before the operator",
        )
    return times * times_ // divided, binary.valid(column)


def of_times_ms(times: Ints, type_: pa.DataType) -> pa.Array:
    """A column of event times of the type that the rows have."""
    if not pa.types.is_timestamp(type_):
        return pa.array(times, pa.int64())
    divided, times_ = _PER_UNIT[type_.unit]
    return pa.array(times * times_ // divided, pa.int64()).cast(type_)


def of_ms(times: Ints, is_valid: NDArray[np.bool_]) -> pa.Array:
    """Times in ms as an int64 column with nulls."""
    return pa.array(times, pa.int64(), mask=None if bool(is_valid.all()) else ~is_valid)
