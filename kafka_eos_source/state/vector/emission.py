"""What an aggregation writes for the groups of a batch: into the state, and as rows for the next step.

=============  =========================================================================================
mode           rows that a batch emits
=============  =========================================================================================
on_update      the new result of each changed group
changes        for each changed group: the result that was emitted before, marked ``removed``, and the
               new result
on_close       the result of each window that closes
=============  =========================================================================================

With a *limit*, the modes ``on_update`` and ``changes`` hold a changed group back, and emit its newest result
once the limit has passed since the first change that was not emitted. The value of a group then also records
what was emitted last and when the group is due, so both survive with the state, exactly once.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from kafka_eos_source.state.encoding import binary
from kafka_eos_source.state.encoding.binary import Ints
from kafka_eos_source.state.encoding.describe import TableDescription
from kafka_eos_source.state.encoding.keys import KeyCodec, split_keys
from kafka_eos_source.state.model import StateAccess
from kafka_eos_source.state.vector import due
from kafka_eos_source.state.vector.aggregation import Aggregation
from kafka_eos_source.state.vector.grouping import HELD, TIMES
from kafka_eos_source.state.vector.versions import Version, VersionedRows, only_version

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
        self._details = details_of(emit, limit_ms)

    @property
    def output(self) -> pa.Schema:
        """Columns of the emitted rows after those that identify the group."""
        return pa.schema([*self._aggregation.results, *([_REMOVED] if self._marks_removed else [])])

    def stored(self, store_keys: pa.BinaryArray, place: list[pa.Array], values: pa.BinaryArray) -> Groups:
        """Returns groups as they are stored.

        Args:
            store_keys: keys of the groups in the store.
            place: columns that identify the groups in the output.
            values: stored values of the groups.
        """
        stored = self.codec.decode(values)
        return Groups(store_keys, place, self.states(stored), stored, values.is_valid())

    def current(self, groups: Groups) -> list[pa.Array]:
        """Returns the newest results of stored groups with their ``place``, for readers of the state."""
        lives = self._aggregation.lives(groups.states)
        place, states = groups.place, groups.states
        if lives is not None:  # a group without rows is stored until its last result has been removed
            place, states = _where(place, lives), _where(states, lives)
        return [*place, *self._aggregation.finish(states)]

    def states(self, stored: list[pa.Array]) -> list[pa.Array]:
        """Returns the columns of `Aggregation.state` among those of a stored value."""
        return stored[: len(self._aggregation.state)]

    def details(self) -> dict[str, Any]:
        """Returns what the store's description says about the emission, if it affects the state."""
        return self._details

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
            before = self._aggregation.finish(self.states(groups.stored)) if self._changes else None
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
            due.move_due(
                state, HELD, entries.group_keys, before.filter(differs), after.filter(differs), rests
            )


_NEVER = int(np.iinfo(np.int64).max)


def details_of(emit: str, limit_ms: int | None) -> dict[str, Any]:
    """Returns what a store's description says about the emission, if it affects the state."""
    details: dict[str, Any] = {"emit": "changes"} if emit == "changes" else {}
    return details if limit_ms is None else {**details, "held": True}


def held_table(emission: Emission) -> dict[int, TableDescription]:
    """Returns the description of the table of groups that are held back, if there is one."""
    return {} if emission.limit_ms is None else {HELD: TableDescription("held", encoding="due")}


def read_held(codec: KeyCodec, key: pa.Schema, keys: pa.BinaryArray) -> pa.Table:
    """Decodes the due entries of groups that are held back, for readers of the state."""
    entries = split_keys(keys)
    columns = [*codec.decode(entries.group_keys), pa.array(entries.times_ms)]
    return pa.Table.from_arrays(columns, schema=pa.schema([*key, pa.field("due_ms", pa.int64())]))


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
    due.delete_keys(state, keys.filter(pc.and_(pc.invert(keeps), had_value)))
    kept = keys.filter(keeps)
    if len(kept):
        state.put_many(kept, codec.encode(_where(columns, keeps)))
