"""The steps of a shard's micro-batch: calls the processor's methods in the order that `run` describes."""

from __future__ import annotations

import gc
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from itertools import islice
from typing import Any

import pyarrow as pa
from pyspark.sql.streaming.stateful_processor import ExpiredTimerInfo, StatefulProcessor

from kafka_eos_source.state.encoding.describe import META_KEY
from kafka_eos_source.state.encoding.layout import TIMED, Entry
from kafka_eos_source.state.model import BatchContext, StateAccess
from kafka_eos_source.state.processor import registry
from kafka_eos_source.state.processor.clock import Clock
from kafka_eos_source.state.processor.handle import Phase, StatefulProcessorHandle
from kafka_eos_source.state.processor.output import Output
from kafka_eos_source.state.processor.registry import Registry
from kafka_eos_source.state.processor.rows import Groups, Key, KeyColumns
from kafka_eos_source.state.processor.window import WINDOW_KEYS


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
