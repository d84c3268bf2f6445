"""Timed tables: finds what is due by a time, by reading a table that is ordered by time from its start.

A timed table is used in two ways:

* Windows keep their values in the timed table itself, under the time at which the window ends.
* Sessions and duplicates keep *due entries* in it. A due entry has no value; it only records when a group
  key must be checked again. Each group key has one, at or before the time when its first session or
  duplicate ends. The entry is moved when it comes due and not each time the key changes, so most changes
  of a key do not write to this table.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from kafka_eos_source.state import layout
from kafka_eos_source.state.encoding import binary
from kafka_eos_source.state.encoding.binary import Ints
from kafka_eos_source.state.encoding.keys import split_keys, timed_keys
from kafka_eos_source.state.model import StateAccess

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
