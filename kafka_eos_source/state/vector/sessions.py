"""Aggregation in sessions: one value holds all open sessions of a key, until they close."""

from __future__ import annotations

from collections.abc import Generator, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from kafka_eos_source.state.encoding import binary
from kafka_eos_source.state.encoding.binary import Ints
from kafka_eos_source.state.encoding.describe import TableDescription
from kafka_eos_source.state.encoding.layout import keyed_keys, numbered, numbered_in_order, split_keys
from kafka_eos_source.state.model import BatchContext, StateAccess
from kafka_eos_source.state.shard_rows import closed_until
from kafka_eos_source.state.vector.aggregation import Aggregation, Grouped
from kafka_eos_source.state.vector.arrays import NO_NULLS_ONLY, ZERO_FOR_NULLS
from kafka_eos_source.state.vector.groups import (
    TIMES,
    VALUES,
    DueEntries,
    Grouping,
    is_not_in,
    move_due,
    next_entries,
)
from kafka_eos_source.state.vector.versions import Version, VersionedLists, only_version
from kafka_eos_source.state.vector.windows import Session, ms_column, times_from_ms, times_ms


def join_spans(keys: Ints, starts: Ints, ends: Ints) -> Ints:
    """Joins spans ``[start, end)`` of the same key that overlap, directly or through others.

    Args:
        keys: number of the key of each span, from 0.
        starts: start of each span.
        ends: end of each span, later than its start.

    Returns:
        For each span the number of its session, from 0, in the order of keys and starts.
    """
    if not len(keys):
        return np.zeros(0, np.int64)
    lowest = int(starts.min())
    span = int(ends.max()) - lowest + 1
    if (int(keys.max()) + 1) * span >= 1 << 62:
        # The spans are too far apart for the axis below, so replace the times by their ranks.
        distinct, ranks = np.unique(np.concatenate([starts, ends]), return_inverse=True)
        starts, ends = ranks[: len(keys)], ranks[len(keys) :]
        lowest, span = 0, len(distinct)
    # Place the keys one after another on one axis, so that no span reaches into the part of the next key.
    starts = keys * span + (starts - lowest)
    ends = keys * span + (ends - lowest)
    order = np.argsort(starts)
    reached = np.maximum.accumulate(ends[order])
    begins = np.concatenate([[True], starts[order][1:] >= reached[:-1]])
    session = np.empty(len(order), np.int64)
    session[order] = np.cumsum(begins) - 1
    return session


_Mask = NDArray[np.bool_]


@dataclass
class _Sessions:
    """Sessions of several keys, one array element per session.

    Attributes:
        key: number of the session's key.
        first_ms: event time of the session's first row.
        last_ms: event time of the session's last row.
        states: columns of `Aggregation.state`.
    """

    key: Ints
    first_ms: Ints
    last_ms: Ints
    states: list[pa.Array]

    def __len__(self) -> int:
        return len(self.key)

    def where(self, mask: _Mask) -> _Sessions:
        """Returns the sessions for which the mask is true."""
        selected = pa.array(mask)
        states = [column.filter(selected) for column in self.states]
        return _Sessions(self.key[mask], self.first_ms[mask], self.last_ms[mask], states)

    def followed_by(self, other: _Sessions) -> _Sessions:
        """Returns these sessions followed by the others."""
        return _Sessions(
            np.concatenate([self.key, other.key]),
            np.concatenate([self.first_ms, other.first_ms]),
            np.concatenate([self.last_ms, other.last_ms]),
            [pa.concat_arrays(pair) for pair in zip(self.states, other.states, strict=True)],
        )


class Sessionized(Grouping):
    """Groups rows by key and session.

    Layout of the store::

        keyed 0x02 │ group key           →    list of: first │ last │ states    (`versions`)
        timed 0x81 │ time │ group key    →    (empty)

    A key has few open sessions, so one value holds them all. A batch reads and writes the value of each of
    its keys once, however many sessions it joins. The timed table holds due entries, which record when the
    sessions of a key must be checked again (see `groups`).

    A partial row is a session too: one of the rows of a single input partition. Partial rows are joined by
    the same rule as rows.
    """

    merges: ClassVar[bool] = True  # `update` joins the partial rows and the stored sessions in one step
    extra: ClassVar[pa.Schema] = pa.schema(
        [
            pa.field("__first_ms", pa.int64()),
            pa.field("__last_ms", pa.int64()),
            pa.field("__rows", pa.int64(), nullable=False),
        ]
    )

    def __init__(
        self,
        keys: pa.Schema,
        aggregation: Aggregation,
        versions: Sequence[Version] | None,
        window: Session,
        time: pa.DataType,
        emit: str,
    ) -> None:
        super().__init__(keys, aggregation)
        self._window = window
        self._time = time
        self._on_close = emit == "on_close"
        self._changes = emit == "changes"
        span = [pa.field(name, pa.int64(), nullable=False) for name in ("first_ms", "last_ms")]
        self._lists = VersionedLists(span, versions or only_version(aggregation.state))

    @property
    def output(self) -> pa.Schema:
        window = [pa.field("window_start", self._time), pa.field("window_end", self._time)]
        removed = [] if self._on_close else [pa.field("removed", pa.bool_(), nullable=False)]
        return pa.schema([*self.keys, *window, *self.aggregation.results, *removed])

    @property
    def tables(self) -> dict[int, TableDescription]:
        return {
            VALUES: TableDescription("sessions", self._lists.schema, encoding="lists"),
            TIMES: TableDescription("due", encoding="due"),
        }

    @property
    def details(self) -> dict[str, Any]:
        return {"emit": "changes"} if self._changes else {}

    # -- partial rows

    def reduce_rows(self, rows: pa.RecordBatch) -> pa.RecordBatch:
        times, is_valid = times_ms(rows.column(self._window.on))
        columns = {name: rows.column(name) for name in self.aggregation.columns}
        number, group_keys = numbered(self.codec.encode(self.key_arrays(rows)))
        session = self._join_parts(number, times, times, is_valid)
        moments = ms_column(times, is_valid)
        extra = [
            (pa.array(number), "min", NO_NULLS_ONLY),
            (moments, "min", NO_NULLS_ONLY),
            (moments, "max", NO_NULLS_ONLY),
            (None, "count_all", None),
        ]
        return self._partial(group_keys, self.aggregation.aggregate_rows([session], columns, extra))

    def merge_partials(self, partial: pa.RecordBatch) -> pa.RecordBatch:
        keys, (first, last, counts), states = self.split(partial)
        number, group_keys = numbered(self.codec.encode(keys))
        begins, ends = binary.raw(first, np.int64), binary.raw(last, np.int64)
        session = self._join_parts(number, begins, ends, binary.valid(first))
        extra = [
            (pa.array(number), "min", NO_NULLS_ONLY),
            (first, "min", NO_NULLS_ONLY),
            (last, "max", NO_NULLS_ONLY),
            (counts, "sum", ZERO_FOR_NULLS),
        ]
        return self._partial(group_keys, self.aggregation.merge_states([session], states, extra))

    def _join_parts(self, number: Ints, first: Ints, last: Ints, is_valid: _Mask) -> pa.Array:
        # Rows without a time form a separate session per key, which `update` drops and counts.
        key = np.where(is_valid, number, number + len(number))
        return pa.array(join_spans(key, first, last + self._window.gap_ms))

    def _partial(self, group_keys: pa.BinaryArray, grouped: Grouped) -> pa.RecordBatch:
        number, *extra = grouped.extra
        return self.batch(Grouped(self.codec.decode(group_keys.take(number)), extra, grouped.states))

    # -- state

    def update(
        self, parts: Iterator[pa.RecordBatch], state: StateAccess, context: BatchContext, *, divided: bool
    ) -> Iterator[list[pa.Array]]:
        until_ms = closed_until(context, self._window.grace_ms)
        closing = DueEntries(state, TIMES, until_ms, divided=divided)
        changed = pa.array([], pa.binary())
        for partial in parts:
            merged = yield from self._merge(partial, until_ms, state, context)
            changed = changed if divided else merged
        for group_keys in closing.group_keys():
            group_keys = group_keys.filter(is_not_in(group_keys, changed))
            if len(group_keys):
                yield from self._close(group_keys, until_ms, state)

    def _merge(
        self, partial: pa.RecordBatch, until_ms: int | None, state: StateAccess, context: BatchContext
    ) -> Generator[list[pa.Array], None, pa.BinaryArray]:
        """Joins new sessions with the stored ones, emits results, and deletes the sessions that close.

        Returns:
            Group keys of the new sessions.
        """
        keys, (first, last, counts), states = self.split(partial)
        number, group_keys = numbered_in_order(self.codec.encode(keys))
        new = _Sessions(number, binary.raw(first, np.int64), binary.raw(last, np.int64), states)
        old, due_ms = self._load(group_keys, state)
        watermark = context.watermark_ms(self._window.grace_ms)
        # A session that is closed by the watermark accepts no rows, even if it is still in the state.
        was_closed = self._is_closed(old, watermark)
        open_before = old.where(~was_closed)
        joined, has_new, replaced, late = self._join(
            open_before, new, binary.raw(counts, np.int64), watermark
        )
        if late:
            context.count("late_rows", late)
        closes = self._is_closed(joined, until_ms)
        self._store(group_keys, joined.where(~closes), due_ms, until_ms, state)
        if self._on_close:
            yield self._result(group_keys, old.where(was_closed).followed_by(joined.where(closes)))
        else:
            yield self._result(group_keys, open_before.where(replaced), removed=True)
            yield self._result(group_keys, joined.where(has_new))
        return group_keys

    def _join(
        self, old: _Sessions, new: _Sessions, counts: Ints, watermark: int | None
    ) -> tuple[_Sessions, _Mask, _Mask, int]:
        """Joins stored sessions and new ones.

        Args:
            old: stored sessions that are still open.
            new: sessions of this batch.
            counts: number of rows of each new session.
            watermark: ms since the epoch; None = no row had an event time yet.

        Returns:
            The joined sessions without late ones; which of them have new rows; which of the old sessions are
            replaced: those with another first or last row now, or in mode "changes" those with new rows; and
            the number of late rows.
        """
        both = old.followed_by(new)
        session = join_spans(both.key, both.first_ms, both.last_ms + self._window.gap_ms)
        is_of_batch = np.arange(len(both)) >= len(old)
        rows = np.concatenate([np.zeros(len(old), np.int64), counts])
        extra = [
            (pa.array(both.key), "min", NO_NULLS_ONLY),
            (pa.array(both.first_ms), "min", NO_NULLS_ONLY),
            (pa.array(both.last_ms), "max", NO_NULLS_ONLY),
            (pa.array(is_of_batch.astype(np.int64)), "max", NO_NULLS_ONLY),
            (pa.array(rows), "sum", NO_NULLS_ONLY),
        ]
        (number,), more, states = self.aggregation.merge_states([pa.array(session)], both.states, extra)
        order = np.argsort(binary.raw(number, np.int64))
        key, first, last, has_new, rows = (binary.raw(column, np.int64)[order] for column in more)
        joined = _Sessions(key, first, last, [column.take(pa.array(order)) for column in states])
        now = session[: len(old)]
        replaced = (first[now] != old.first_ms) | (last[now] != old.last_ms)
        if self._changes:
            replaced = has_new[now] == 1
        # The old sessions are all open, so a closed session consists of new rows only, which are late.
        late = self._is_closed(joined, watermark)
        return joined.where(~late), has_new[~late] == 1, replaced, int(rows[late].sum())

    def _close(
        self, group_keys: pa.BinaryArray, until_ms: int | None, state: StateAccess
    ) -> Iterator[list[pa.Array]]:
        """Closes the ended sessions of keys whose due entry was reached, and moves the entries."""
        stored, due_ms = self._load(group_keys, state)
        closes = self._is_closed(stored, until_ms)
        self._store(group_keys, stored.where(~closes), due_ms, until_ms, state)
        if self._on_close and bool(closes.any()):
            yield self._result(group_keys, stored.where(closes))

    def _load(self, group_keys: pa.BinaryArray, state: StateAccess) -> tuple[_Sessions, pa.Int64Array]:
        """Reads the stored sessions of keys, and the time of each key's due entry."""
        due_ms, counts, columns = self._lists.decode(state.get_many(keyed_keys(VALUES, group_keys)))
        first, last, *states = columns
        key = np.repeat(np.arange(len(counts)), counts)
        return _Sessions(key, binary.raw(first, np.int64), binary.raw(last, np.int64), states), due_ms

    def _store(
        self,
        group_keys: pa.BinaryArray,
        kept: _Sessions,
        due_ms: pa.Int64Array,
        until_ms: int | None,
        state: StateAccess,
    ) -> None:
        """Writes the open sessions of keys, which are in the order of the keys, and moves the due entries."""
        counts = np.bincount(kept.key, minlength=len(group_keys))
        ends = kept.last_ms + self._window.gap_ms
        first_end = np.full(len(group_keys), np.iinfo(np.int64).max)
        np.minimum.at(first_end, kept.key, ends)
        entry = next_entries(due_ms, first_end, counts > 0, until_ms)
        columns = [pa.array(kept.first_ms), pa.array(kept.last_ms), *kept.states]
        values = self._lists.encode(np.asarray(entry.fill_null(0), np.int64), counts, columns)
        state.put_many(keyed_keys(VALUES, group_keys), values)
        differs = pc.not_equal(entry.fill_null(-1), due_ms.fill_null(-1))
        differs = pc.or_(differs, pc.not_equal(entry.is_null(), due_ms.is_null()))
        move_due(state, TIMES, group_keys.filter(differs), due_ms.filter(differs), entry.filter(differs))

    def _is_closed(self, checked: _Sessions, until_ms: int | None) -> _Mask:
        if until_ms is None:
            return np.zeros(len(checked), np.bool_)
        return checked.last_ms + self._window.gap_ms <= until_ms

    # -- output

    def _result(
        self, group_keys: pa.BinaryArray, emitted: _Sessions, *, removed: bool = False
    ) -> list[pa.Array]:
        """Returns the output columns of sessions; ``removed`` marks rows that retract earlier ones."""
        keys = self.codec.decode(group_keys.take(pa.array(emitted.key)))
        span = self._span(emitted)
        results = self.aggregation.finish(emitted.states)
        if self._on_close:
            return [*keys, *span, *results]
        if removed and not self._changes:
            results = [pa.nulls(len(emitted), column.type) for column in results]
        return [*keys, *span, *results, pa.repeat(pa.scalar(removed), len(emitted))]

    def _span(self, of: _Sessions) -> list[pa.Array]:
        ends = of.last_ms + self._window.gap_ms
        return [times_from_ms(of.first_ms, self._time), times_from_ms(ends, self._time)]

    def read(self, table: int, keys: pa.BinaryArray, values: pa.BinaryArray) -> pa.Table:
        entries = split_keys(keys)
        columns = self.codec.decode(entries.group_keys)
        if table == TIMES:
            names = [*self.keys, pa.field("due", self._time)]
            return pa.Table.from_arrays(
                [*columns, times_from_ms(entries.times_ms, self._time)], schema=pa.schema(names)
            )
        _, counts, (first, last, *states) = self._lists.decode(values)
        key = np.repeat(np.arange(len(counts)), counts)
        stored = _Sessions(key, binary.raw(first, np.int64), binary.raw(last, np.int64), states)
        index = pa.array(key)
        arrays = [
            *(column.take(index) for column in columns),
            *self._span(stored),
            *self.aggregation.finish(states),
        ]
        window = [pa.field("window_start", self._time), pa.field("window_end", self._time)]
        return pa.Table.from_arrays(
            arrays, schema=pa.schema([*self.keys, *window, *self.aggregation.results])
        )
