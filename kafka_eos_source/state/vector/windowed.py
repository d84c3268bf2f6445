"""Aggregates in windows of fixed size: one value for each key and window, until the window closes."""

from __future__ import annotations

from collections.abc import Generator, Iterator
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
from kafka_eos_source.state.vector.grouping import TIMES, Grouping, closed_until, in_order, seen, stored
from kafka_eos_source.state.vector.windows import Tumbling, of_ms, of_times_ms, times_ms


class Windowed(Grouping):
    """Tumbling and hopping windows.

    ::

        timed 0x81 │ end of the window │ group key    →    version │ states

    The table is in the order of time, so that what closes is a range at its start, found and deleted
    without a look at any other window, and needs no index of its own.

    Partial rows are of *panes*: the longest spans that no window cuts. A hopping window's rows are merged
    into panes first, and only then counted in each of the windows they are in.
    """

    extra: ClassVar[pa.Schema] = pa.schema(
        [
            pa.field("__pane_ms", pa.int64()),
            pa.field("__seen_ms", pa.int64()),
            pa.field("__rows", pa.int64(), nullable=False),
        ]
    )

    def __init__(
        self, keys: pa.Schema, aggregation: Aggregation, window: Tumbling, time: pa.DataType, emit: str
    ) -> None:
        super().__init__(keys, aggregation)
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

    def of_rows(self, rows: pa.RecordBatch) -> pa.RecordBatch:
        times, is_valid = times_ms(rows.column(self._window.on))
        columns = {name: rows.column(name) for name in self.aggregation.columns}
        extra = [(of_ms(times, is_valid), "max", NO_NULLS_ONLY), (None, "count_all", None)]
        keys = [*self.columns(rows), of_ms(self._window.panes(times), is_valid)]
        groups, more, states = self.aggregation.of_rows(keys, columns, extra)
        return pa.RecordBatch.from_arrays([*groups, *more, *states], schema=self.partial)

    def of_partials(self, partial: pa.RecordBatch) -> pa.RecordBatch:
        keys, (panes, latest, counts), states = self.split(partial)
        extra = [(latest, "max", NO_NULLS_ONLY), (counts, "sum", ZERO_FOR_NULLS)]
        groups, more, merged = self.aggregation.of_states([*keys, panes], states, extra)
        return pa.RecordBatch.from_arrays([*groups, *more, *merged], schema=self.partial)

    def update(
        self, partial: pa.RecordBatch, state: StateAccess, context: BatchContext
    ) -> Iterator[list[pa.Array]]:
        panes = _with_time(partial, context)
        seen(context, cells.raw(panes.column("__seen_ms"), np.int64))
        until_ms = closed_until(context, self._window.grace_ms)
        over = due.due(state, TIMES, until_ms)
        keys, starts, new = self._windows(panes, context)
        changed = pa.array([], pa.binary())
        if len(starts):
            changed = yield from self._merge(keys, starts, new, until_ms, state)
        for places, values in over:
            rest = due.without(places, changed)
            places, values = places.filter(rest), values.filter(rest)
            due.delete(state, places)
            if self._on_close:
                yield self._stored(places, values)

    def _windows(
        self, panes: pa.RecordBatch, context: BatchContext
    ) -> tuple[list[pa.Array], Ints, list[pa.Array]]:
        """What the panes add to each open window: keys, starts, states."""
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
            groups, _, states = self.aggregation.of_states([*keys, pa.array(starts)], states)
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
        """Merges what windows have come to into the state, and takes out those that closed.

        Returns: the places of these; they were in the state only if they had been there before.
        """
        places = timed_keys(TIMES, starts + self._window.size_ms, self.codec.encode(keys))
        places, [begins, *keys], new = in_order(places, [pa.array(starts), *keys], new)
        ends = cells.raw(begins, np.int64) + self._window.size_ms
        states, before = stored(state, places, self.values, self.aggregation, new)
        closed = pa.array(np.zeros(len(ends), np.bool_) if until_ms is None else ends <= until_ms)
        gone = places.filter(closed)
        if len(gone):
            due.delete(state, places.filter(pc.and_(closed, before.is_valid())))
            kept = pc.invert(closed)
            values = self.values.encode([column.filter(kept) for column in states])
            state.put_many(places.filter(kept), values)
        else:
            state.put_many(places, self.values.encode(states))
        if not self._on_close:
            yield self._row(keys, ends, states)
        elif len(gone):
            only = ends[np.asarray(closed)]
            yield self._row(
                [key.filter(closed) for key in keys], only, [column.filter(closed) for column in states]
            )
        return gone

    def _stored(self, places: pa.BinaryArray, values: pa.BinaryArray) -> list[pa.Array]:
        entries = split_keys(places)
        return self._row(self.codec.decode(entries.group_keys), entries.times_ms, self.values.decode(values))

    def _row(self, keys: list[pa.Array], ends: Ints, states: list[pa.Array]) -> list[pa.Array]:
        begins = of_times_ms(ends - self._window.size_ms, self._time)
        return [*keys, begins, of_times_ms(ends, self._time), *self.aggregation.finish(states)]

    def read(self, _table: int, keys: pa.BinaryArray, values: pa.BinaryArray) -> pa.Table:
        return pa.Table.from_arrays(self._stored(keys, values), schema=self.output)


def _with_time(partial: pa.RecordBatch, context: BatchContext) -> pa.RecordBatch:
    """Partial rows that have a time; rows without one are in no window, and counted."""
    times = partial.column(partial.schema.get_field_index("__seen_ms"))
    if not times.null_count:
        return partial
    none = times.is_null()
    context.count("null_time_rows", int(cells.raw(partial.column("__rows").filter(none), np.int64).sum()))
    return partial.filter(times.is_valid())


def _is_range(pane: Ints) -> bool:
    return bool((pane == np.arange(len(pane))).all())
