"""Groups in the state: the interface of the groupings, timed tables, and what a batch writes and emits.

Each side of the shuffle turns rows into *partial rows*, one for each group. A partial row consists of the key
columns, the columns that the grouping adds (their names begin with ``__``), and the states of the
aggregates. Partial rows of the same group are merged into one again.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import islice
from typing import Any, ClassVar

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from kafka_eos_source.errors import InvalidSchemaError
from kafka_eos_source.state.encoding import binary, layout
from kafka_eos_source.state.encoding.binary import Ints
from kafka_eos_source.state.encoding.describe import TableDescription
from kafka_eos_source.state.encoding.layout import KeyCodec, split_keys, timed_keys
from kafka_eos_source.state.model import BatchContext, StateAccess
from kafka_eos_source.state.shard_rows import record_event_times
from kafka_eos_source.state.vector.aggregation import Aggregation, Grouped
from kafka_eos_source.state.vector.versions import Version, VersionedRows, only_version

#: Numbers of the table with the values of the keys, of the timed table (window ends or due entries), and of
#: the timed table of results that are held back.
VALUES = 0x02
TIMES = 0x81
HELD = 0x82


class Declared:
    """A processor's declared attributes, which the driver pickles; a task computes the cached ones again."""

    def __getstate__(self) -> dict[str, Any]:
        """Returns the attributes except the cached properties."""
        return {
            name: value
            for name, value in vars(self).items()
            if not isinstance(getattr(type(self), name, None), cached_property)
        }


class Grouping(ABC):
    """Groups rows and merges them into the state. Each process creates its own instance.

    Args:
        keys: columns of the key.
        aggregation: the aggregates that are computed.
    """

    #: Columns of a partial row between the key and the states. With a window: the earliest event time (or the
    #: start of the pane), the latest event time, and the number of rows.
    extra: ClassVar[pa.Schema]
    #: Whether `update` accepts several partial rows of the same group.
    merges: ClassVar[bool] = False

    def __init__(self, keys: pa.Schema, aggregation: Aggregation) -> None:
        self.keys = keys
        self.aggregation = aggregation
        self.codec = KeyCodec(keys)
        self.partial = pa.schema([*keys, *self.extra, *aggregation.state])

    @property
    @abstractmethod
    def output(self) -> pa.Schema:
        """Columns of the emitted rows."""

    @property
    @abstractmethod
    def tables(self) -> dict[int, TableDescription]:
        """Descriptions of the tables in the store, by table number."""

    @property
    def details(self) -> dict[str, Any]:
        """What the store's description says about the grouping, besides the aggregates and the window."""
        return {}

    @abstractmethod
    def reduce_rows(self, rows: pa.RecordBatch) -> pa.RecordBatch:
        """Computes one partial row for each group of input rows."""

    @abstractmethod
    def merge_partials(self, partial: pa.RecordBatch) -> pa.RecordBatch:
        """Merges partial rows of the same group into one."""

    @property
    def entries_per_row(self) -> int:
        """Largest number of entries of the state that one partial row changes."""
        return 1

    def admit(self, partial: pa.RecordBatch, context: BatchContext) -> pa.RecordBatch:
        """Returns the partial rows that have an event time, and records their times in the context.

        Call it for all partial rows of a batch before `update`, which compares windows with these times. Rows
        without a time belong to no window: they are dropped and counted. A grouping without windows needs no
        times, and admits all rows.
        """
        if not len(self.extra):
            return partial
        _, (first, last, rows), _ = self.split(partial)
        if last.null_count:
            without = rows.filter(last.is_null())
            context.count("null_time_rows", int(binary.raw(without, np.int64).sum()))
            partial = partial.filter(last.is_valid())
            _, (first, last, rows), _ = self.split(partial)
        record_event_times(context, *(binary.raw(column, np.int64) for column in (first, last, rows)))
        return partial

    @abstractmethod
    def update(
        self, parts: Iterator[pa.RecordBatch], state: StateAccess, context: BatchContext, *, divided: bool
    ) -> Iterator[list[pa.Array]]:
        """Merges the partial rows of a batch into the state.

        Args:
            parts: partial rows that `admit` returned. All partial rows of a key are in one part, one for each
                group unless ``merges`` is set. Only one part has to fit into memory.
            state: state of the shard.
            context: the micro-batch.
            divided: whether there may be several parts, so that the changed keys do not fit into memory.

        Yields:
            Columns of ``output``.
        """

    @abstractmethod
    def read(self, table: int, keys: pa.BinaryArray, values: pa.BinaryArray) -> pa.Table:
        """Decodes entries of a table into columns, for readers of the state."""

    def read_held(self, keys: pa.BinaryArray) -> pa.Table:
        """Decodes the due entries of groups that are held back, for readers of the state."""
        entries = split_keys(keys)
        columns = [*self.codec.decode(entries.group_keys), pa.array(entries.times_ms)]
        return pa.Table.from_arrays(columns, schema=pa.schema([*self.keys, pa.field("due_ms", pa.int64())]))

    def key_arrays(self, rows: pa.RecordBatch) -> list[pa.Array]:
        """Returns the key columns of input rows."""
        return [rows.column(name) for name in self.keys.names]

    def split(self, partial: pa.RecordBatch) -> Grouped:
        """Splits partial rows into their key columns, extra columns and states."""
        columns = partial.columns
        first, second = len(self.keys), len(self.keys) + len(self.extra)
        return Grouped(columns[:first], columns[first:second], columns[second:])

    def batch(self, grouped: Grouped) -> pa.RecordBatch:
        """Builds partial rows from their columns; the inverse of `split`."""
        columns = [*grouped.keys, *grouped.extra, *grouped.states]
        return pa.RecordBatch.from_arrays(columns, schema=self.partial)


def key_columns(schema: pa.Schema, keys: Sequence[str]) -> pa.Schema:
    """Returns the fields of the key columns.

    Raises:
        InvalidSchemaError: if a key column is not in the schema.
    """
    for name in keys:
        if name not in schema.names:
            raise InvalidSchemaError(
                f"key column {name!r} is not among the columns of the rows.",
                fix=f"use one of the columns {', '.join(schema.names)}.",
            )
    return pa.schema([pa.field(name, schema.field(name).type) for name in keys])


def sort_by_store_key(
    store_keys: pa.BinaryArray, keys: list[pa.Array], states: list[pa.Array]
) -> tuple[pa.BinaryArray, list[pa.Array], list[pa.Array]]:
    """Sorts all columns by the key in the store, because sorted reads take half the time."""
    order = pc.sort_indices(store_keys)
    return (
        store_keys.take(order),
        [key.take(order) for key in keys],
        [column.take(order) for column in states],
    )


# -- timed tables: what is due by a time is at the start of a table that is ordered by time
#
# Windows keep their values in the timed table itself, under the time at which the window ends.
#
# Sessions and duplicates keep *due entries* in it. A due entry has no value; it only records when a group key
# must be checked again. Each group key has one, at or before the time when its first session or duplicate
# ends. The entry is moved when it comes due and not each time the key changes, so most changes of a key do
# not write to this table.

#: Entries, and bytes of their values, that are converted to arrays at a time.
SCAN_ROWS, SCAN_BYTES = 1 << 16, 16 << 20
#: Group keys whose values are read at a time. The more they are, the more of them share a block of the
#: database: 1.5 million sessions closed in 18 s with 65,000 at a time, and in 12 s with 262,000.
GROUP_KEYS = 1 << 18
#: Entries that are taken from a scan before their bytes are counted.
_STEP = 1 << 12


class DueEntries:
    """Entries of a timed table up to and including a time, in slices that fit into memory.

    The scan begins before the batch writes to the state, and does not see its writes. So the caller has to
    leave out the entries that the batch has changed. That takes less time than a scan that sees the writes,
    which must sort all of them.

    If the batch is divided by key, the keys that it changes do not fit into memory. The scan then begins with
    `slices`, after the batch has deleted or moved all entries that it changes.

    Args:
        state: state of the shard.
        table: number of the timed table.
        until_ms: ms since the epoch; None = no entry is due.
        divided: whether the batch is divided by key.
    """

    def __init__(self, state: StateAccess, table: int, until_ms: int | None, *, divided: bool) -> None:
        self._state = state
        self._table = table
        self._until_ms = until_ms
        self._begun = None if divided else self._scan()

    def slices(self) -> Iterator[tuple[pa.BinaryArray, pa.BinaryArray]]:
        """Yields the keys and values of the entries, in the order of time. Call it once."""
        rows = self._scan() if self._begun is None else self._begun
        taken: list[tuple[bytes, bytes]] = []
        size = 0
        while some := list(islice(rows, min(_STEP, SCAN_ROWS))):
            taken += some
            size += sum(len(value) for _, value in some)
            if len(taken) >= SCAN_ROWS or size >= SCAN_BYTES:
                yield _arrays(taken)
                taken, size = [], 0
        if taken:
            yield _arrays(taken)

    def group_keys(self) -> Iterator[pa.BinaryArray]:
        """Yields the group keys of some slices together, in the order of their bytes. Call it once."""
        waiting: list[pa.BinaryArray] = []
        count = 0
        for keys, _ in self.slices():
            waiting.append(split_keys(keys).group_keys)
            count += len(keys)
            if count >= GROUP_KEYS:
                yield _in_order(waiting)
                waiting, count = [], 0
        if waiting:
            yield _in_order(waiting)

    def _scan(self) -> Iterator[tuple[bytes, bytes]]:
        if self._until_ms is None:
            return iter(())
        return self._state.range(bytes([self._table]), layout.before(self._table, self._until_ms + 1))


def _arrays(entries: list[tuple[bytes, bytes]]) -> tuple[pa.BinaryArray, pa.BinaryArray]:
    keys, values = zip(*entries, strict=True)
    return pa.array(keys, pa.binary()), pa.array(values, pa.binary())


def _in_order(group_keys: list[pa.BinaryArray]) -> pa.BinaryArray:
    together = binary.concat(group_keys, pa.binary())
    return together.take(pc.sort_indices(together))


def first_after(state: StateAccess, table: int, after_ms: int) -> int | None:
    """Returns the time of the first entry after a time; None if there is none.

    Call it before the batch writes to the state, because a scan must sort the writes.
    """
    rows = state.range(layout.before(table, after_ms + 1), bytes([table + 1]))
    first = next(iter(rows), None)
    return None if first is None else int(split_keys(pa.array([first[0]], pa.binary())).times_ms[0])


def delete_keys(state: StateAccess, keys: pa.BinaryArray) -> None:
    """Deletes these keys from the state."""
    if len(keys):
        state.put_many(keys, pa.nulls(len(keys), pa.binary()))


def is_not_in(keys: pa.BinaryArray, others: pa.BinaryArray) -> pa.BooleanArray:
    """Returns for each key whether it is absent from ``others``."""
    return pc.invert(pc.is_in(keys, value_set=others))


def move_due(
    state: StateAccess,
    table: int,
    group_keys: pa.BinaryArray,
    old_ms: pa.Int64Array,
    new_ms: pa.Int64Array,
    rests: pa.BinaryArray | None = None,
) -> None:
    """Moves the due entries of group keys, which must be distinct, or distinct together with ``rests``.

    Args:
        state: state of the shard.
        table: number of the timed table.
        group_keys: the group keys.
        old_ms: time of each key's present entry; null = the key has none.
        new_ms: time of each key's new entry; null = the entry is only removed.
        rests: what follows each group key in the key of its entry; None = nothing.
    """
    for times, value in ((old_ms, None), (new_ms, b"")):
        has_entry = binary.valid(times)
        if bool(has_entry.any()):
            at = np.asarray(times.drop_null(), np.int64)
            has = pa.array(has_entry)
            rest = None if rests is None else rests.filter(has)
            keys = timed_keys(table, at, group_keys.filter(has), rest)
            state.put_many(keys, pa.repeat(pa.scalar(value, pa.binary()), len(keys)))


def next_entries(
    old_ms: pa.Int64Array, first_ms: Ints, present: NDArray[np.bool_], until_ms: int | None
) -> pa.Int64Array:
    """Returns the time at which each key's due entry belongs; null = the key needs none.

    Args:
        old_ms: time of each key's present entry; null = the key has none.
        first_ms: time when the first session or duplicate of the key ends.
        present: whether the key still has any.
        until_ms: entries up to this time are being processed now, so a kept entry must be later.
    """
    has = binary.valid(old_ms)
    old = np.asarray(old_ms.fill_null(0), np.int64)
    fired = np.zeros(len(old), np.bool_) if until_ms is None else old <= until_ms
    stays = has & ~fired & (old <= first_ms)
    return pa.array(np.where(stays, old, first_ms), mask=~present)


# -- emission: what a batch writes into the state, and the rows that it passes on
#
# on_update   the new result of each changed group
# changes     for each changed group: the result that was emitted before, marked `removed`, and the new one
# on_close    the result of each window that closes
#
# With a *limit*, the modes on_update and changes hold a changed group back, and emit its newest result once
# the limit has passed since the first change that was not emitted. The value of a group then also records
# what was emitted last and when the group is due, so both survive with the state, exactly once.

EMIT = ("on_update", "changes", "on_close")

_REMOVED = pa.field("removed", pa.bool_(), nullable=False)


@dataclass(frozen=True)
class Groups:
    """Groups of a batch with their new state. Each column has one element per group.

    Attributes:
        store_keys: keys of the groups in the store.
        place: columns that identify the group in the output: the key columns and the window.
        states: columns of `Aggregation.state`, including this batch.
        stored: columns of the stored values; null, or zero, for a group that has no value.
        had_value: whether the group has a stored value.
    """

    store_keys: pa.BinaryArray
    place: list[pa.Array]
    states: list[pa.Array]
    stored: list[pa.Array]
    had_value: pa.BooleanArray


class Emission:
    """Decides which groups of a batch are stored, deleted and emitted.

    Args:
        aggregation: the aggregates.
        versions: versions of the stored values, oldest first; None = only the declared one.
        emit: one of `EMIT`.
        limit_ms: how long a changed group is held back; None = not at all.

    Attributes:
        value: columns of a stored value.
        codec: codec of the stored values.
        on_close: whether only closed windows are emitted.
        emits_unchanged: whether a window may emit a result in a batch that closes but does not change it.
        limit_ms: the argument.
        output: columns of the emitted rows after those that identify the group.
        details: what the store's description says about the emission, if it affects the state.
        held_tables: description of the table of groups that are held back, if there is one.
    """

    def __init__(
        self, aggregation: Aggregation, versions: Sequence[Version] | None, emit: str, limit_ms: int | None
    ) -> None:
        self.on_close = emit == "on_close"
        self.limit_ms = limit_ms
        self.emits_unchanged = self.on_close or limit_ms is not None
        self._changes = emit == "changes"
        self._aggregation = aggregation
        self._marks_removed = not self.on_close and (self._changes or aggregation.removed is not None)
        held = [] if limit_ms is None else aggregation.held(changes=self._changes)
        self.value = pa.schema([*aggregation.state, *held])
        self.codec = VersionedRows(versions or only_version(self.value))
        self.output = pa.schema([*aggregation.results, *([_REMOVED] if self._marks_removed else [])])
        self.details: dict[str, Any] = {"emit": "changes"} if self._changes else {}
        self.held_tables: dict[int, TableDescription] = {}
        if limit_ms is not None:
            self.details["held"] = True
            self.held_tables[HELD] = TableDescription("held", encoding="due")

    def combined(
        self, store_keys: pa.BinaryArray, place: list[pa.Array], new: list[pa.Array], state: StateAccess
    ) -> Groups:
        """Returns groups with their stored states and new states combined.

        Args:
            store_keys: keys of the groups in the store, distinct and in order.
            place: columns that identify the groups in the output.
            new: states that this batch adds.
            state: state of the shard.

        Raises:
            AggregateLimitError: if an aggregate keeps too many values of a group.
        """
        groups = self.stored(store_keys, place, state.get_many(store_keys))
        is_new = not groups.had_value.true_count
        states = new if is_new else self._aggregation.combine(groups.states, new)
        return replace(groups, states=self._aggregation.settled(states))

    def stored(self, store_keys: pa.BinaryArray, place: list[pa.Array], values: pa.BinaryArray) -> Groups:
        """Returns groups as they are stored.

        Args:
            store_keys: keys of the groups in the store.
            place: columns that identify the groups in the output.
            values: stored values of the groups.
        """
        stored = self.codec.decode(values)
        return Groups(store_keys, place, self._states(stored), stored, values.is_valid())

    def current(self, groups: Groups) -> list[pa.Array]:
        """Returns the newest results of stored groups with their ``place``, for readers of the state."""
        lives = self._aggregation.lives(groups.states)
        place, states = groups.place, groups.states
        if lives is not None:  # a group without rows is stored until its last result has been removed
            place, states = _where(place, lives), _where(states, lives)
        return [*place, *self._aggregation.finish(states)]

    def _states(self, stored: list[pa.Array]) -> list[pa.Array]:
        """Returns the columns of `Aggregation.state` among those of a stored value."""
        return stored[: len(self._aggregation.state)]

    def settle(
        self,
        groups: Groups,
        state: StateAccess,
        closed: pa.BooleanArray | None,
        now_ms: int | None,
        *,
        changed: bool,
    ) -> Iterator[list[pa.Array]]:
        """Stores or deletes the groups, and yields the rows to emit.

        Args:
            groups: the groups.
            state: state of the shard.
            closed: which groups are windows that close with this batch; None = none of them.
            now_ms: time that due entries are compared with; set if there is a limit.
            changed: whether this batch changed the groups.

        Yields:
            Columns of the output; the row that removes a result precedes the row that replaces it.
        """
        if now_ms is not None:
            yield from self._settle_held(groups, state, closed, now_ms, changed=changed)
            return
        lives = self._aggregation.lives(groups.states)
        is_open = None if closed is None else pc.invert(closed)
        keeps = pc.and_(lives, is_open) if lives is not None and is_open is not None else is_open
        keeps = lives if keeps is None else keeps
        _store(state, groups.store_keys, self.codec, groups.states, keeps, groups.had_value)
        if not self.on_close and changed:
            before = self._aggregation.finish(self._states(groups.stored)) if self._changes else None
            yield from self._rows(groups.place, groups.states, lives, groups.had_value, before)
        elif self.on_close and closed is not None:
            emitted = pc.and_(closed, lives) if lives is not None else closed
            yield [*_where(groups.place, emitted), *self._aggregation.finish(_where(groups.states, emitted))]

    def _settle_held(
        self,
        groups: Groups,
        state: StateAccess,
        closed: pa.BooleanArray | None,
        now_ms: int,
        *,
        changed: bool,
    ) -> Iterator[list[pa.Array]]:
        assert self.limit_ms is not None
        due_before, emitted, *before = groups.stored[len(self._aggregation.state) :]
        due_ms = due_before.fill_null(now_ms + self.limit_ms) if changed else due_before
        fires = pc.less_equal(due_ms, now_ms).fill_null(False)
        if closed is not None:
            fires = pc.or_(fires, pc.and_(closed, due_ms.is_valid()))
        lives = self._aggregation.lives(groups.states)
        keeps = pa.array(np.ones(len(fires), np.bool_))
        if lives is not None:
            # A group without rows stays until the row that removes its last result is emitted.
            keeps = pc.or_(lives, pc.and_(emitted, pc.invert(fires)))
        if closed is not None:
            keeps = pc.and_(keeps, pc.invert(closed))
        due_after = pc.if_else(pc.or_(fires, pc.invert(keeps)), pa.scalar(None, pa.int64()), due_ms)
        values = [*groups.states, due_after, pc.or_(emitted, fires)]
        if self._changes:
            results = self._aggregation.finish(groups.states)
            values += [pc.if_else(fires, new, old) for new, old in zip(results, before, strict=True)]
        _store(state, groups.store_keys, self.codec, values, keeps, groups.had_value)
        self._move(state, groups, due_before, due_after)
        if pc.any(fires).as_py():
            yield from self._rows(
                _where(groups.place, fires),
                _where(groups.states, fires),
                None if lives is None else lives.filter(fires),
                emitted.filter(fires),
                _where(before, fires) if self._changes else None,
            )

    def _rows(
        self,
        place: list[pa.Array],
        states: list[pa.Array],
        lives: pa.BooleanArray | None,
        was_emitted: pa.BooleanArray,
        before: list[pa.Array] | None,
    ) -> Iterator[list[pa.Array]]:
        """Yields rows for groups: first those that remove earlier results, then the new results.

        Args:
            place: columns that identify the groups.
            states: the new states.
            lives: which groups have rows; None = all.
            was_emitted: which groups had a result before.
            before: those results; None = a row that removes a result has null instead.
        """
        results = self._aggregation.finish(states)
        if not self._marks_removed:
            yield [*place, *results]
            return
        removes = was_emitted
        if not self._changes:
            removes = pc.and_(removes, pc.invert(lives))
        number = pc.sum(removes).as_py()
        if number:
            old = (
                [pa.nulls(number, column.type) for column in results]
                if before is None
                else _where(before, removes)
            )
            yield [*_where(place, removes), *old, pa.repeat(pa.scalar(True), number)]
        if lives is not None:
            place, results = _where(place, lives), _where(results, lives)
        yield [*place, *results, pa.repeat(pa.scalar(False), len(place[0]))]

    def _move(self, state: StateAccess, groups: Groups, before: pa.Int64Array, after: pa.Int64Array) -> None:
        differs = pc.not_equal(before.fill_null(_NEVER), after.fill_null(_NEVER))
        if pc.any(differs).as_py():
            entries = split_keys(groups.store_keys.filter(differs))
            rests = None
            if entries.tables[0] == TIMES:
                rests = binary.from_matrix(entries.times_ms.astype(">i8").view(np.uint8).reshape(-1, 8))
            move_due(state, HELD, entries.group_keys, before.filter(differs), after.filter(differs), rests)


_NEVER = int(np.iinfo(np.int64).max)


def held_windows(keys: pa.BinaryArray) -> tuple[pa.BinaryArray, Ints]:
    """Returns the group keys and the ends in ms of the windows that due entries name."""
    entries = split_keys(keys)
    ends = binary.data(entries.rests)[: 8 * len(keys)].view(">i8").astype(np.int64)
    return entries.group_keys, ends


def _where(columns: list[pa.Array], mask: pa.BooleanArray) -> list[pa.Array]:
    return [column.filter(mask) for column in columns]


def _store(
    state: StateAccess,
    keys: pa.BinaryArray,
    codec: VersionedRows,
    columns: list[pa.Array],
    keeps: pa.BooleanArray | None,
    had_value: pa.BooleanArray,
) -> None:
    """Writes the values of the groups to keep, and deletes those of the others."""
    if keeps is None:
        state.put_many(keys, codec.encode(columns))
        return
    delete_keys(state, keys.filter(pc.and_(pc.invert(keeps), had_value)))
    kept = keys.filter(keeps)
    if len(kept):
        state.put_many(kept, codec.encode(_where(columns, keeps)))
