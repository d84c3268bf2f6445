"""What is due by time: a timed table, read from its start.

Two uses. Rows that are *kept* in the timed table itself, under the time at which they end (windows). And
*entries* without a value that only say when to look at a group key (sessions, duplicates): each key has
one, at a time not later than the first thing that is due of it. It is moved when it fires, and not each
time that the key changes: most changes then cost no write to this table.
"""

from __future__ import annotations

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

#: Rows of a scan that become one array.
SCAN_ROWS = 1 << 16

_NOTHING = b""


def due(state: StateAccess, table: int, until_ms: int | None) -> list[tuple[pa.BinaryArray, pa.BinaryArray]]:
    """What a timed table has up to and including ``until_ms``: keys and values, in the order of time.

    Asked for before a batch writes anything: a scan of a store sorts what is staged, which takes longer
    than to tell afterwards which of the rows the batch has changed.
    """
    if until_ms is None:
        return []
    rows = state.range(bytes([table]), layout.before(table, until_ms + 1))
    found = []
    while some := list(islice(rows, SCAN_ROWS)):
        keys, values = zip(*some, strict=True)
        found.append((pa.array(keys, pa.binary()), pa.array(values, pa.binary())))
    return found


def due_keys(state: StateAccess, table: int, until_ms: int | None) -> pa.BinaryArray:
    """The group keys of the entries up to and including ``until_ms``, in their own order."""
    found = [split_keys(keys).group_keys for keys, _ in due(state, table, until_ms)]
    group_keys = binary.concat(found, pa.binary())
    return group_keys.take(pc.sort_indices(group_keys))


def delete(state: StateAccess, keys: pa.BinaryArray) -> None:
    """Deletes many."""
    if len(keys):
        state.put_many(keys, pa.nulls(len(keys), pa.binary()))


def without(keys: pa.BinaryArray, others: pa.BinaryArray) -> pa.BooleanArray:
    """Which of the keys are not among others."""
    return pc.invert(pc.is_in(keys, value_set=others))


def move(
    state: StateAccess, table: int, group_keys: pa.BinaryArray, old_ms: pa.Int64Array, new_ms: pa.Int64Array
) -> None:
    """Moves the entries of group keys, which must be distinct.

    Args:
        old_ms: when their entry is, null where there is none.
        new_ms: when it is to be, null where there is to be none.
    """
    for times, put in ((old_ms, False), (new_ms, True)):
        some = binary.valid(times)
        if bool(some.any()):
            at = np.asarray(times.drop_null(), np.int64)
            keys = timed_keys(table, at, group_keys.filter(pa.array(some)))
            value = pa.scalar(_NOTHING if put else None, pa.binary())
            state.put_many(keys, pa.repeat(value, len(keys)))


def moved(
    old_ms: pa.Int64Array, first_ms: Ints, present: NDArray[np.bool_], until_ms: int | None
) -> pa.Int64Array:
    """When the entry of each key is to be.

    Args:
        old_ms: when it is, null where there is none.
        first_ms: when something of the key is due first.
        present: whether anything of it is left.
        until_ms: what is due up to this time is being taken: an entry must be later.
    """
    has = binary.valid(old_ms)
    old = np.asarray(old_ms.fill_null(0), np.int64)
    fired = np.zeros(len(old), np.bool_) if until_ms is None else old <= until_ms
    stays = has & ~fired & (old <= first_ms)
    return pa.array(np.where(stays, old, first_ms), mask=~present)
