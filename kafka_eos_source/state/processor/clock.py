"""The times of a batch, which decide which timers fire and which rows are late.

A batch has one *processing time*. Its *watermark* is the largest event time of the batches before, minus the
delay; as in Spark, it is never negative and never decreases. A row is late if its event time is not above the
watermark of the batch *before*, again as in Spark (the ``LateEvents`` watermark of SPARK-40925). So rows that
arrive in the same batch as the rows that advance the watermark are not late.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from pyspark.sql.streaming.stateful_processor import TimerValues

from kafka_eos_source.errors import InvalidSchemaError
from kafka_eos_source.state.encoding import layout
from kafka_eos_source.state.encoding.binary import Ints
from kafka_eos_source.state.encoding.describe import META_TABLE
from kafka_eos_source.state.model import BatchContext, StateAccess

_WATERMARK_KEY = layout.keyed(META_TABLE, b"", b"watermark")
_MS = struct.Struct(">q")
_US_PER_MS = 1000


@dataclass(frozen=True)
class Clock:
    """Times of one batch, in ms since the epoch.

    Attributes:
        now_ms: processing time.
        values: times that the handlers receive; -1 for a time that is unknown in this time mode.
        due_ms: timers up to this time (inclusive) fire; None if the time mode has no timers.
        late_ms: rows up to this event time (inclusive) are late; None if no row is late.
    """

    now_ms: int
    values: TimerValues
    due_ms: int | None
    late_ms: int | None


def read_clock(state: StateAccess, context: BatchContext, time_mode: str, delay_ms: int) -> Clock:
    """Returns the times of this batch. In mode "EventTime", stores its watermark for the next batch."""
    now_ms = context.time_ms
    if time_mode == "None":
        return Clock(now_ms, TimerValues(-1, -1), None, None)
    if time_mode == "ProcessingTime":
        return Clock(now_ms, TimerValues(now_ms, -1), now_ms, None)
    stored = state.get(_WATERMARK_KEY)
    late_ms = None if stored is None else int(_MS.unpack(stored)[0])
    watermark_ms = max(context.watermark_ms(delay_ms) or 0, late_ms or 0)
    if watermark_ms != late_ms:
        state.put(_WATERMARK_KEY, _MS.pack(watermark_ms))
    return Clock(now_ms, TimerValues(now_ms, watermark_ms), watermark_ms, late_ms)


def drop_late(table: pa.Table, event_time: str, late_ms: int | None) -> tuple[pa.Table, Ints]:
    """Removes the late rows. Rows without an event time are never late.

    Returns:
        The other rows, and the event times of all rows that have one, in ms, rounded down.

    Raises:
        InvalidSchemaError: if the event time column is not a timestamp.
    """
    column = table.column(event_time)
    if not pa.types.is_timestamp(column.type):
        raise InvalidSchemaError(
            f"event time column {event_time!r} is {column.type}, expected a timestamp.",
            fix="cast the column to a timestamp before the operator.",
        )
    times_us = column.cast(pa.timestamp("us", column.type.tz), safe=False).cast(pa.int64())
    if late_ms is not None:
        late = pc.less_equal(times_us, late_ms * _US_PER_MS).fill_null(False)
        if pc.any(late).as_py():
            table = table.filter(pc.invert(late))
    return table, np.asarray(times_us.drop_null(), np.int64) // _US_PER_MS
