"""Aggregation by key, over all rows of the key, and by key and window of fixed size."""

from __future__ import annotations

from collections.abc import Generator, Iterator
from typing import Any, ClassVar

import numpy as np
import pyarrow as pa

from kafka_eos_source.state.encoding import binary
from kafka_eos_source.state.encoding.binary import Ints
from kafka_eos_source.state.encoding.describe import TableDescription
from kafka_eos_source.state.encoding.layout import keyed_keys, split_keys, timed_keys
from kafka_eos_source.state.model import BatchContext, StateAccess
from kafka_eos_source.state.shard_rows import closed_until
from kafka_eos_source.state.vector.aggregation import Aggregation
from kafka_eos_source.state.vector.arrays import NO_NULLS_ONLY, ZERO_FOR_NULLS
from kafka_eos_source.state.vector.groups import (
    HELD,
    TIMES,
    VALUES,
    DueEntries,
    Emission,
    Grouping,
    Groups,
    delete_keys,
    first_after,
    held_windows,
    is_not_in,
    sort_by_store_key,
)
from kafka_eos_source.state.vector.windows import Tumbling, ms_column, times_from_ms, times_ms


class ByKey(Grouping):
    """Groups rows by key alone. Results that are held back become due in processing time.

    Layout of the store (a timed entry exists only for a result that is held back)::

        keyed 0x02 │ group key           →    version │ states [ │ due │ what was emitted ]
        timed 0x82 │ due │ group key     →    (empty)
    """

    extra: ClassVar[pa.Schema] = pa.schema([])

    def __init__(self, keys: pa.Schema, aggregation: Aggregation, emission: Emission) -> None:
        super().__init__(keys, aggregation)
        self._emission = emission

    @property
    def output(self) -> pa.Schema:
        return pa.schema([*self.keys, *self._emission.output])

    @property
    def tables(self) -> dict[int, TableDescription]:
        return {VALUES: TableDescription("aggregates", self._emission.value), **self._emission.held_tables}

    @property
    def details(self) -> dict[str, Any]:
        return self._emission.details

    def reduce_rows(self, rows: pa.RecordBatch) -> pa.RecordBatch:
        columns = {name: rows.column(name) for name in self.aggregation.columns}
        return self.batch(self.aggregation.aggregate_rows(self.key_arrays(rows), columns))

    def merge_partials(self, partial: pa.RecordBatch) -> pa.RecordBatch:
        keys, _, states = self.split(partial)
        return self.batch(self.aggregation.merge_states(keys, states))

    def read(self, table: int, keys: pa.BinaryArray, values: pa.BinaryArray) -> pa.Table:
        if table == HELD:
            return self.read_held(keys)
        groups = self._emission.stored(keys, self.codec.decode(split_keys(keys).group_keys), values)
        fields = [*self.keys, *self.aggregation.results]
        return pa.Table.from_arrays(self._emission.current(groups), schema=pa.schema(fields))

    def update(
        self, parts: Iterator[pa.RecordBatch], state: StateAccess, context: BatchContext, *, divided: bool
    ) -> Iterator[list[pa.Array]]:
        limit_ms = self._emission.limit_ms
        now_ms = None if limit_ms is None else context.time_ms
        waiting = DueEntries(state, HELD, now_ms, divided=divided)
        first_ms = None if now_ms is None else first_after(state, HELD, now_ms)
        if first_ms is not None:
            context.request_batch_at(first_ms)
        changed = pa.array([], pa.binary())
        for partial in parts:
            if limit_ms is not None:
                context.request_batch_at(context.time_ms + limit_ms)
            keys, _, new = self.split(partial)
            store_keys = keyed_keys(VALUES, self.codec.encode(keys))
            store_keys, keys, new = sort_by_store_key(store_keys, keys, new)
            groups = self._emission.combined(store_keys, keys, new, state)
            yield from self._emission.settle(groups, state, None, now_ms, changed=True)
            if limit_ms is not None and not divided:
                changed = split_keys(store_keys).group_keys
        # A result may be due although the batch has no rows.
        for group_keys in waiting.group_keys():
            group_keys = group_keys.filter(is_not_in(group_keys, changed))
            if not len(group_keys):
                continue
            store_keys = keyed_keys(VALUES, group_keys)
            place, values = self.codec.decode(group_keys), state.get_many(store_keys)
            groups = self._emission.stored(store_keys, place, values)
            yield from self._emission.settle(groups, state, None, now_ms, changed=False)


# -- windows of fixed size: one value per key and window, kept until the window closes


class Windowed(Grouping):
    """Groups rows by key and by tumbling or hopping window.

    Layout of the store::

        timed 0x81 │ end of the window │ group key       →    version │ states [ │ due │ what was emitted ]
        timed 0x82 │ due │ group key │ end of the window →    (empty)

    The first table is ordered by time, so the windows that close are a range at its start. The processor
    finds and deletes them without reading any other window, and without an index. The second table exists
    only if results are held back (see `groups`).

    A partial row belongs to a *pane*, which is the longest span that lies entirely inside or outside every
    window. The rows of hopping windows are merged into panes first, and the panes are then added to each of
    their windows.
    """

    extra: ClassVar[pa.Schema] = pa.schema(
        [
            pa.field("__pane_ms", pa.int64()),
            pa.field("__seen_ms", pa.int64()),
            pa.field("__rows", pa.int64(), nullable=False),
        ]
    )

    def __init__(
        self,
        keys: pa.Schema,
        aggregation: Aggregation,
        window: Tumbling,
        time: pa.DataType,
        emission: Emission,
    ) -> None:
        super().__init__(keys, aggregation)
        self._window = window
        self._time = time
        self._emission = emission

    @property
    def output(self) -> pa.Schema:
        return pa.schema([*self._place, *self._emission.output])

    @property
    def tables(self) -> dict[int, TableDescription]:
        windows = TableDescription("windows", self._emission.value, details={"time": "window_end"})
        return {TIMES: windows, **self._emission.held_tables}

    @property
    def details(self) -> dict[str, Any]:
        return self._emission.details

    @property
    def _place(self) -> list[pa.Field]:
        """Columns that identify a window in the output."""
        return [*self.keys, pa.field("window_start", self._time), pa.field("window_end", self._time)]

    def reduce_rows(self, rows: pa.RecordBatch) -> pa.RecordBatch:
        times, is_valid = times_ms(rows.column(self._window.on))
        columns = {name: rows.column(name) for name in self.aggregation.columns}
        extra = [(ms_column(times, is_valid), "max", NO_NULLS_ONLY), (None, "count_all", None)]
        keys = [*self.key_arrays(rows), ms_column(self._window.panes(times), is_valid)]
        groups, more, states = self.aggregation.aggregate_rows(keys, columns, extra)
        return pa.RecordBatch.from_arrays([*groups, *more, *states], schema=self.partial)

    def merge_partials(self, partial: pa.RecordBatch) -> pa.RecordBatch:
        keys, (panes, latest, counts), states = self.split(partial)
        extra = [(latest, "max", NO_NULLS_ONLY), (counts, "sum", ZERO_FOR_NULLS)]
        groups, more, merged = self.aggregation.merge_states([*keys, panes], states, extra)
        return pa.RecordBatch.from_arrays([*groups, *more, *merged], schema=self.partial)

    @property
    def entries_per_row(self) -> int:
        return -(-self._window.size_ms // self._window.every_ms)

    def update(
        self, parts: Iterator[pa.RecordBatch], state: StateAccess, context: BatchContext, *, divided: bool
    ) -> Iterator[list[pa.Array]]:
        until_ms = closed_until(context, self._window.grace_ms)
        now_ms = None
        if self._emission.limit_ms is not None:
            now_ms = closed_until(context, 0)
            if now_ms is None:  # no event time counts yet; the first that does is usually close to this one
                now_ms = context.time_ms
        closing = DueEntries(state, TIMES, until_ms, divided=divided)
        waiting = DueEntries(state, HELD, now_ms, divided=divided)
        changed = pa.array([], pa.binary())
        for panes in parts:
            keys, starts, new = self._windows(panes, context)
            if len(starts):
                merged = yield from self._merge(keys, starts, new, until_ms, now_ms, state)
                changed = changed if divided else merged
        yield from self._close(closing, changed, now_ms, state)
        yield from self._emit_held(waiting, changed, until_ms, now_ms, state)

    def _close(
        self, closing: DueEntries, changed: pa.BinaryArray, now_ms: int | None, state: StateAccess
    ) -> Iterator[list[pa.Array]]:
        """Deletes the windows that close unchanged by this batch; emits their results if needed."""
        for store_keys, values in closing.slices():
            unchanged = is_not_in(store_keys, changed)
            store_keys, values = store_keys.filter(unchanged), values.filter(unchanged)
            if not self._emission.emits_unchanged:
                delete_keys(state, store_keys)
                continue
            groups = self._stored(store_keys, values)
            closed = pa.array(np.ones(len(groups.store_keys), np.bool_))
            yield from self._emission.settle(groups, state, closed, now_ms, changed=False)

    def _emit_held(
        self,
        waiting: DueEntries,
        changed: pa.BinaryArray,
        until_ms: int | None,
        now_ms: int | None,
        state: StateAccess,
    ) -> Iterator[list[pa.Array]]:
        """Emits the results that are due, of open windows that this batch did not change."""
        for held, _ in waiting.slices():
            group_keys, ends = held_windows(held)
            store_keys = timed_keys(TIMES, ends, group_keys)
            if until_ms is not None:
                store_keys = store_keys.filter(pa.array(ends > until_ms))
            store_keys = store_keys.filter(is_not_in(store_keys, changed))
            groups = self._stored(store_keys, state.get_many(store_keys))
            yield from self._emission.settle(groups, state, None, now_ms, changed=False)

    def _windows(
        self, panes: pa.RecordBatch, context: BatchContext
    ) -> tuple[list[pa.Array], Ints, list[pa.Array]]:
        """Computes what the panes add to each open window; counts and drops late rows.

        Returns:
            Key columns, starts in ms, and states of the windows.
        """
        window = self._window
        keys, (begins, _, counts), states = self.split(panes)
        pane, starts = window.starts(binary.raw(begins, np.int64))
        watermark = context.watermark_ms(window.grace_ms)
        late = np.zeros(len(starts), np.bool_) if watermark is None else starts + window.size_ms <= watermark
        if bool(late.any()):
            context.count("late_rows", int(binary.raw(counts, np.int64)[pane[late]].sum()))
            pane, starts = pane[~late], starts[~late]
        if len(pane) != len(panes) or not _is_range(pane):
            index = pa.array(pane)
            keys, states = [key.take(index) for key in keys], [column.take(index) for column in states]
        if window.size_ms != window.every_ms:
            groups, _, states = self.aggregation.merge_states([*keys, pa.array(starts)], states)
            *keys, begins = groups
            starts = binary.raw(begins, np.int64)
        return keys, starts, states

    def _merge(
        self,
        keys: list[pa.Array],
        starts: Ints,
        new: list[pa.Array],
        until_ms: int | None,
        now_ms: int | None,
        state: StateAccess,
    ) -> Generator[list[pa.Array], None, pa.BinaryArray]:
        """Merges windows into the state, emits results, and deletes the windows that close.

        Returns:
            Keys in the store of the windows that this batch changed: those that close; or all, if results are
            held back.
        """
        store_keys = timed_keys(TIMES, starts + self._window.size_ms, self.codec.encode(keys))
        store_keys, [begins, *keys], new = sort_by_store_key(store_keys, [pa.array(starts), *keys], new)
        ends = binary.raw(begins, np.int64) + self._window.size_ms
        is_closed = np.zeros(len(ends), np.bool_) if until_ms is None else ends <= until_ms
        closed = pa.array(is_closed) if bool(is_closed.any()) else None
        groups = self._emission.combined(store_keys, self._window_columns(keys, ends), new, state)
        yield from self._emission.settle(groups, state, closed, now_ms, changed=True)
        return store_keys if now_ms is not None else store_keys.filter(pa.array(is_closed))

    def _stored(self, store_keys: pa.BinaryArray, values: pa.BinaryArray) -> Groups:
        entries = split_keys(store_keys)
        place = self._window_columns(self.codec.decode(entries.group_keys), entries.times_ms)
        return self._emission.stored(store_keys, place, values)

    def _window_columns(self, keys: list[pa.Array], ends: Ints) -> list[pa.Array]:
        """Returns the columns that identify windows in the output."""
        begins = times_from_ms(ends - self._window.size_ms, self._time)
        return [*keys, begins, times_from_ms(ends, self._time)]

    def read(self, table: int, keys: pa.BinaryArray, values: pa.BinaryArray) -> pa.Table:
        if table == HELD:
            return self.read_held(keys)
        fields = [*self._place, *self.aggregation.results]
        current = self._emission.current(self._stored(keys, values))
        return pa.Table.from_arrays(current, schema=pa.schema(fields))


def _is_range(pane: Ints) -> bool:
    return bool((pane == np.arange(len(pane))).all())
