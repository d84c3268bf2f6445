"""Aggregation in windows of fixed size: one value per key and window, kept until the window closes."""

from __future__ import annotations

from collections.abc import Generator, Iterator, Sequence
from typing import ClassVar

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from kafka_eos_source.state.encoding import cells
from kafka_eos_source.state.encoding.binary import Ints
from kafka_eos_source.state.encoding.describe import TableDescription
from kafka_eos_source.state.encoding.keys import split_keys, timed_keys
from kafka_eos_source.state.model import BatchContext, StateAccess
from kafka_eos_source.state.vector import due
from kafka_eos_source.state.vector.aggregation import Aggregation
from kafka_eos_source.state.vector.group import NO_NULLS_ONLY, ZERO_FOR_NULLS
from kafka_eos_source.state.vector.grouping import (
    TIMES,
    Grouping,
    closed_until,
    combine_with_stored,
    record_event_times,
    sort_by_store_key,
)
from kafka_eos_source.state.vector.versions import Version
from kafka_eos_source.state.vector.windows import Tumbling, ms_column, times_from_ms, times_ms


class Windowed(Grouping):
    """Groups rows by key and by tumbling or hopping window.

    Layout of the store::

        timed 0x81 │ end of the window │ group key    →    version │ states

    The table is ordered by time, so the windows that close are a range at its start. The processor finds and
    deletes them without reading any other window, and without an index.

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
        versions: Sequence[Version] | None,
        window: Tumbling,
        time: pa.DataType,
        emit: str,
    ) -> None:
        super().__init__(keys, aggregation, versions)
        self._window = window
        self._time = time
        self._on_close = emit == "on_close"

    @property
    def output(self) -> pa.Schema:
        window = [pa.field("window_start", self._time), pa.field("window_end", self._time)]
        return pa.schema([*self.keys, *window, *self.aggregation.results])

    @property
    def tables(self) -> dict[int, TableDescription]:
        return {TIMES: TableDescription("windows", self.aggregation.state, details={"time": "window_end"})}

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

    def update(
        self, partial: pa.RecordBatch, state: StateAccess, context: BatchContext
    ) -> Iterator[list[pa.Array]]:
        panes = _drop_rows_without_time(partial, context)
        record_event_times(context, cells.raw(panes.column("__seen_ms"), np.int64))
        until_ms = closed_until(context, self._window.grace_ms)
        closing = due.due(state, TIMES, until_ms)
        keys, starts, new = self._windows(panes, context)
        closed = pa.array([], pa.binary())
        if len(starts):
            closed = yield from self._merge(keys, starts, new, until_ms, state)
        for store_keys, values in closing:
            unchanged = due.is_not_in(store_keys, closed)
            store_keys, values = store_keys.filter(unchanged), values.filter(unchanged)
            due.delete(state, store_keys)
            if self._on_close:
                yield self._decode(store_keys, values)

    def _windows(
        self, panes: pa.RecordBatch, context: BatchContext
    ) -> tuple[list[pa.Array], Ints, list[pa.Array]]:
        """Computes what the panes add to each open window; counts and drops late rows.

        Returns:
            Key columns, starts in ms, and states of the windows.
        """
        window = self._window
        keys, (begins, _, counts), states = self.split(panes)
        pane, starts = window.starts(cells.raw(begins, np.int64))
        watermark = context.watermark_ms(window.grace_ms)
        late = np.zeros(len(starts), np.bool_) if watermark is None else starts + window.size_ms <= watermark
        if bool(late.any()):
            context.count("late_rows", int(cells.raw(counts, np.int64)[pane[late]].sum()))
            pane, starts = pane[~late], starts[~late]
        if len(pane) != len(panes) or not _is_range(pane):
            index = pa.array(pane)
            keys, states = [key.take(index) for key in keys], [column.take(index) for column in states]
        if window.size_ms != window.every_ms:
            groups, _, states = self.aggregation.merge_states([*keys, pa.array(starts)], states)
            *keys, begins = groups
            starts = cells.raw(begins, np.int64)
        return keys, starts, states

    def _merge(
        self,
        keys: list[pa.Array],
        starts: Ints,
        new: list[pa.Array],
        until_ms: int | None,
        state: StateAccess,
    ) -> Generator[list[pa.Array], None, pa.BinaryArray]:
        """Merges windows into the state, emits results, and deletes the windows that close.

        Returns:
            Keys in the store of the windows that this batch changed and closed.
        """
        store_keys = timed_keys(TIMES, starts + self._window.size_ms, self.codec.encode(keys))
        store_keys, [begins, *keys], new = sort_by_store_key(store_keys, [pa.array(starts), *keys], new)
        ends = cells.raw(begins, np.int64) + self._window.size_ms
        states, before = combine_with_stored(state, store_keys, self.values, self.aggregation, new)
        is_closed = pa.array(np.zeros(len(ends), np.bool_) if until_ms is None else ends <= until_ms)
        closed = store_keys.filter(is_closed)
        if len(closed):
            due.delete(state, store_keys.filter(pc.and_(is_closed, before.is_valid())))
            is_open = pc.invert(is_closed)
            values = self.values.encode([column.filter(is_open) for column in states])
            state.put_many(store_keys.filter(is_open), values)
        else:
            state.put_many(store_keys, self.values.encode(states))
        if not self._on_close:
            yield self._result(keys, ends, states)
        elif len(closed):
            yield self._result(
                [key.filter(is_closed) for key in keys],
                ends[np.asarray(is_closed)],
                [column.filter(is_closed) for column in states],
            )
        return closed

    def _decode(self, store_keys: pa.BinaryArray, values: pa.BinaryArray) -> list[pa.Array]:
        entries = split_keys(store_keys)
        return self._result(
            self.codec.decode(entries.group_keys), entries.times_ms, self.values.decode(values)
        )

    def _result(self, keys: list[pa.Array], ends: Ints, states: list[pa.Array]) -> list[pa.Array]:
        begins = times_from_ms(ends - self._window.size_ms, self._time)
        return [*keys, begins, times_from_ms(ends, self._time), *self.aggregation.finish(states)]

    def read(self, _table: int, keys: pa.BinaryArray, values: pa.BinaryArray) -> pa.Table:
        return pa.Table.from_arrays(self._decode(keys, values), schema=self.output)


def _drop_rows_without_time(partial: pa.RecordBatch, context: BatchContext) -> pa.RecordBatch:
    """Drops and counts partial rows without an event time, which belong to no window."""
    times = partial.column(partial.schema.get_field_index("__seen_ms"))
    if not times.null_count:
        return partial
    none = times.is_null()
    context.count("null_time_rows", int(cells.raw(partial.column("__rows").filter(none), np.int64).sum()))
    return partial.filter(times.is_valid())


def _is_range(pane: Ints) -> bool:
    return bool((pane == np.arange(len(pane))).all())
