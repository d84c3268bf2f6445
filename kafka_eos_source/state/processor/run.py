"""Runs a `StatefulProcessor` on one micro-batch of one shard, with the same order of calls as in Spark.

1. Call ``init``, and check the variables that it declares against the store (`registry`).
2. In the first batch, call ``handleInitialState`` for each row of the initial state.
3. Call ``handleInputRows`` once for each key that has rows, in order of arrival of the keys' first rows.
4. After the rows of *all* keys, call ``handleExpiredTimer`` for each timer that is due, earliest first. A
   timer that another handler deleted does not fire. A timer that is registered during this step waits for the
   next batch.
5. Remove the values whose time to live has ended, and call ``close``.

The calls never run concurrently. They all change the state in one overlay, so a failed batch changes nothing.

A batch has one *processing time*. Its *watermark* is the largest event time of the batches before, minus the
delay; as in Spark, it is never negative and never decreases. A row is late if its event time is not above the
watermark of the batch *before*, again as in Spark (the ``LateEvents`` watermark of SPARK-40925). So rows that
arrive in the same batch as the rows that advance the watermark are not late.
"""

from __future__ import annotations

import gc
import struct
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from copy import deepcopy
from dataclasses import dataclass
from itertools import islice
from typing import Any, get_args

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from pyspark.sql.streaming.stateful_processor import ExpiredTimerInfo, StatefulProcessor, TimerValues
from pyspark.sql.types import StructType

from kafka_eos_source.errors import InvalidOptionError, InvalidSchemaError
from kafka_eos_source.state.encoding import layout
from kafka_eos_source.state.encoding.binary import Ints
from kafka_eos_source.state.encoding.describe import META_KEY, META_TABLE
from kafka_eos_source.state.encoding.layout import TIMED, Entry
from kafka_eos_source.state.model import BatchContext, StateAccess
from kafka_eos_source.state.processor import registry
from kafka_eos_source.state.processor.handle import Phase, StatefulProcessorHandle, TimeMode
from kafka_eos_source.state.processor.registry import Registry
from kafka_eos_source.state.processor.rows import Groups, Key, KeyColumns, Output, RowStyle
from kafka_eos_source.state.processor.schema import arrow_schema
from kafka_eos_source.state.processor.variables import WINDOW_KEYS, KeyWindow
from kafka_eos_source.state.shard_rows import RowsByKey, record_event_times

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


# -- the steps of a batch


class ProcessorBatch:
    """One call of `StatefulProcessorRunner.process`.

    Args:
        processor: the processor, whose ``init`` was called with the handle.
        handle: handle of the processor, in phase CREATED.
        clock: times of the batch.
        columns: the grouping columns.
        output: collects the rows that the processor returns.
    """

    def __init__(
        self,
        processor: StatefulProcessor,
        handle: StatefulProcessorHandle,
        clock: Clock,
        columns: KeyColumns,
        output: Output,
    ) -> None:
        self._processor = processor
        self._handle = handle
        self._keys = handle.keys
        self._clock = clock
        self._columns = columns
        self._output = output

    def open(self, state: StateAccess, declared: Registry) -> None:
        """Binds the variables that ``init`` declared to their tables, and updates the store's registry.

        Raises:
            StateMismatchError: if the declared variables cannot read the stored state.
        """
        handle = self._handle
        stored = registry.read(state)
        now, dropped = registry.reconcile(stored, declared, handle.declarations, frozenset(handle.deleted))
        for variable in dropped:
            for table in (variable.table, variable.table | TIMED):
                state.delete_range(bytes([table]), bytes([table + 1]))
        if now != stored:
            state.put(META_KEY, now.description().to_json())
        handle.bind(now.variables, self._clock.now_ms)
        handle.move_to(Phase.INITIALIZED)

    def handle_initial(self, batches: list[pa.RecordBatch]) -> None:
        """Calls ``handleInitialState`` for each row (or frame) of the initial state."""
        if not batches:
            return
        handle = self._processor.handleInitialState
        for groups, start, end in self._windows(pa.Table.from_batches(batches)):
            for i, states in enumerate(self._columns.values(groups, start, end)):
                self._keys.section = self._keys.sections[i]
                for one in states:
                    handle(groups.keys[start + i], one, self._clock.values)

    def handle_rows(self, tables: Iterable[pa.Table]) -> Iterator[pa.RecordBatch]:
        """Calls ``handleInputRows`` for each key; yields the output.

        Args:
            tables: the rows; all rows of a key are in one table.
        """
        for table in tables:
            for groups, start, end in self._windows(table):
                rows = self._columns.values(groups, start, end)
                calls = zip(groups.keys[start:end], self._keys.sections, rows, strict=True)
                while self._handle_until_full(calls):
                    yield from self._output.take()
        self._handle.flush()
        self._handle.move_to(Phase.DATA_PROCESSED)

    def handle_timers(self) -> Iterator[pa.RecordBatch]:
        """Calls ``handleExpiredTimer`` for each timer that is due; yields the output."""
        if self._clock.due_ms is not None:
            due = self._handle.timers.due(self._clock.due_ms)
            while window := list(islice(due, WINDOW_KEYS)):
                yield from self._fire(window)
            self._handle.flush()
        self._handle.move_to(Phase.TIMER_PROCESSED)

    def finish(self, context: BatchContext) -> Iterator[pa.RecordBatch]:
        """Removes and counts expired values, requests the next batch, and yields the rest of the output."""
        removed = self._handle.sweep()
        if removed:
            context.count("expired_values", removed)
        due_ms = self._handle.due_ms()
        if due_ms is not None:
            context.request_batch_at(due_ms)
        yield from self._output.take()

    def close(self) -> None:
        """Calls the processor's ``close``, after success and after failure."""
        self._keys.section = None
        self._processor.close()
        self._handle.move_to(Phase.CLOSED)

    def _handle_until_full(self, calls: Iterator[tuple[Key, bytes, Iterator[Any]]]) -> bool:
        """Calls ``handleInputRows`` until the output is full or no key is left. True if it is full."""
        handle, keys, output, values = (
            self._processor.handleInputRows,
            self._keys,
            self._output,
            self._clock.values,
        )
        with _collector_paused():
            for key, keys.section, rows in calls:
                output.add(handle(key, rows, values), "handleInputRows")
                if output.is_full:
                    return True
        return False

    def _windows(self, table: pa.Table) -> Iterator[tuple[Groups, int, int]]:
        """Enters each window of the keys in this table; yields the groups and the window's range of keys."""
        if not table.num_rows:
            return
        groups = self._columns.group(table)
        for start, end in groups.windows():
            self._enter(groups.group_keys.slice(start, end - start))
            yield groups, start, end

    def _fire(self, window: list[Entry]) -> Iterator[pa.RecordBatch]:
        """Calls ``handleExpiredTimer`` for the timers of a window, unless they were deleted meanwhile."""
        keys, timers = self._keys, self._handle.timers
        position = {key: i for i, key in enumerate(dict.fromkeys(entry.group_key for entry in window))}
        group_keys = pa.array(list(position), pa.binary())
        self._enter(group_keys)
        key_values = self._columns.keys(group_keys)
        for entry in window:
            i, time_ms = position[entry.group_key], entry.time_ms or 0
            keys.section = keys.sections[i]
            if not timers.is_set(time_ms):
                continue  # a handler that ran before in this batch deleted it
            results = self._processor.handleExpiredTimer(
                key_values[i], self._clock.values, ExpiredTimerInfo(time_ms)
            )
            self._output.add(results, "handleExpiredTimer")
            timers.delete(time_ms)
            if self._output.is_full:
                yield from self._output.take()

    def _enter(self, group_keys: pa.BinaryArray) -> None:
        self._handle.flush()
        self._keys.enter(group_keys)


@contextmanager
def _collector_paused() -> Iterator[None]:
    """Disables Python's garbage collector inside the block, and restores its previous setting afterwards.

    The rows become thousands of short-lived objects. Every few hundred of them trigger a search for reference
    cycles that finds nothing; that took a third of the time of a count by key. Reference counting still frees
    the objects, and the search runs between windows and whenever an output batch is emitted.
    """
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


# -- the adapter that the driver creates

#: Yields the rows of the initial state that belong to this shard, with the grouping columns by name.
InitialState = Callable[[BatchContext], Iterator[pa.RecordBatch]]


class StatefulProcessorRunner:
    """Adapts a `StatefulProcessor` to `ShardProcessor`. The driver creates and pickles it for the tasks.

    Args:
        processor: the user's processor; must be picklable, as in Spark.
        key_schema: schema of the grouping columns, with their names in the input.
        input_schema: schema of the input rows; the processor receives all columns, as in Spark.
        output_schema: schema of the rows that the processor returns.
        time_mode: time mode of timers and times to live.
        event_time: timestamp column with the event time; required for "EventTime".
        delay_ms: how far the watermark lags behind the largest event time (Spark's ``withWatermark``).
        rows: "rows" for classes written for ``transformWithState``, "pandas" for those written for
            ``transformWithStateInPandas``.
        initial: reads the initial state; each shard calls it in its first batch. None for no initial state.
        timezone: time zone of the Spark session.

    Attributes:
        declared: the variables that ``init`` creates, as a new store would hold them.

    Raises:
        InvalidOptionError, InvalidSchemaError: if an argument is invalid, or contradicts another one.
        StatefulProcessorError: if ``init`` uses the handle in a way that Spark refuses.
    """

    def __init__(
        self,
        processor: StatefulProcessor,
        key_schema: StructType,
        input_schema: StructType,
        output_schema: StructType,
        *,
        time_mode: TimeMode = "None",
        event_time: str | None = None,
        delay_ms: int = 0,
        rows: RowStyle = "rows",
        initial: InitialState | None = None,
        timezone: str = "UTC",
    ) -> None:
        self.processor = processor
        self.time_mode = time_mode
        self._key_schema = key_schema
        self._event_time = event_time
        self._delay_ms = delay_ms
        self._style: RowStyle = rows
        self._initial = initial
        self._timezone = timezone
        self._key = arrow_schema(key_schema, timezone)
        self._input = arrow_schema(input_schema, timezone)
        self._output = arrow_schema(output_schema, timezone)
        self._check()
        self.declared = self._declared_by_init()

    @property
    def output(self) -> pa.Schema:
        """Arrow schema of the batches that `process` yields."""
        return self._output

    def process(
        self, batches: Iterator[pa.RecordBatch], state: StateAccess, context: BatchContext
    ) -> Iterator[pa.RecordBatch]:
        """Runs the steps in the docstring of this module on one micro-batch of this shard.

        Counts the metrics ``late_rows`` (dropped rows) and ``expired_values`` (removed values).

        Raises:
            StateMismatchError: if the declared variables cannot read the stored state.
            StatefulProcessorError, InvalidSchemaError: if the processor does what Spark refuses.
            Exception: whatever the processor raises.
        """
        clock = read_clock(state, context, self.time_mode, self._delay_ms)
        handle = StatefulProcessorHandle(self.time_mode, KeyWindow(state), context.batch_id)
        columns = KeyColumns(self._key, self._style)
        output = Output(self._output, self._style, self._timezone)
        batch = ProcessorBatch(self.processor, handle, clock, columns, output)
        self.processor.init(handle)
        try:
            batch.open(state, Registry(self._key_schema, self.time_mode, shards_by=context.shards_by))
            if context.first and self._initial is not None:
                batch.handle_initial(list(self._initial(context)))
            with RowsByKey([field.name for field in self._key]) as rows:
                self._gather(batches, rows, context, clock)
                yield from batch.handle_rows(pa.Table.from_batches(part) for part in rows.parts())
            yield from batch.handle_timers()
            yield from batch.finish(context)
        finally:
            batch.close()

    def _check(self) -> None:
        """Raises unless the arguments are valid and fit together."""
        if self.time_mode not in get_args(TimeMode):
            raise InvalidOptionError(
                f"time_mode is {self.time_mode!r}, expected one of {', '.join(get_args(TimeMode))}."
            )
        if self._style not in get_args(RowStyle):
            raise InvalidOptionError(
                f"style is {self._style!r}, expected one of {', '.join(get_args(RowStyle))}."
            )
        if self._delay_ms < 0:
            raise InvalidOptionError(
                f"delay, by which the watermark lags, is {self._delay_ms} ms; expected 0 or more."
            )
        KeyColumns(self._key, self._style)  # raises if a key column has an unsupported type
        names = self._input.names
        for field in self._key:
            if field.name not in names or self._input.field(field.name).type != field.type:
                raise InvalidSchemaError(
                    f"grouping column {field.name!r} of type {field.type} is not among the input columns "
                    f"{names}."
                )
        if self.time_mode == "EventTime" and self._event_time is None:
            raise InvalidOptionError(
                "time_mode is 'EventTime', but event_time does not name a column.",
                fix="set on=, the column with the event time, and grace= for late rows.",
            )
        if self._event_time is not None:
            if self._event_time not in names:
                raise InvalidSchemaError(
                    f"event time column {self._event_time!r} is not among the input columns {names}."
                )
            drop_late(self._input.empty_table(), self._event_time, None)

    def _declared_by_init(self) -> Registry:
        """Returns the variables that ``init`` declares.

        Calls ``init`` of a copy, because the processor itself must be pickled as the user created it.
        """
        copy: StatefulProcessor = deepcopy(self.processor)
        handle = StatefulProcessorHandle(self.time_mode, KeyWindow(), phase=Phase.PRE_INIT)
        copy.init(handle)
        copy.close()
        handle.move_to(Phase.CLOSED)
        declared = Registry(self._key_schema, self.time_mode)
        return registry.reconcile(None, declared, handle.declarations, frozenset())[0]

    def _gather(
        self, batches: Iterator[pa.RecordBatch], rows: RowsByKey, context: BatchContext, clock: Clock
    ) -> None:
        """Adds all rows of the shard that are not late to ``rows``; counts the late ones."""
        for batch in batches:
            on_time = pa.Table.from_batches([batch])
            if self._event_time is not None and batch.num_rows:
                on_time, times_ms = drop_late(on_time, self._event_time, clock.late_ms)
                record_event_times(context, times_ms)
            if on_time.num_rows < batch.num_rows:
                context.count("late_rows", batch.num_rows - on_time.num_rows)
            for part in on_time.to_batches():
                rows.add(part)
