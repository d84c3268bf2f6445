"""Values that expire: when, and how they are found then.

A value with a time to live begins with the time at which it expires (8 bytes, as a timed key writes it), and
has an entry, without value, in the timed table that goes with its variable's. The two always agree: whoever
overwrites or removes a value moves or removes its entry. What has expired is hidden from reads at once, and
removed by the sweep at the end of a batch. "Now" is the time of the batch, so that a batch that is computed
again comes to the same (Spark: `TTLState`, `StateTTL.isExpired`).
"""

from __future__ import annotations

from itertools import islice

import pyarrow as pa

from kafka_eos_source.state import layout
from kafka_eos_source.state.model import StateAccess

#: Most values that one sweep removes, so that a wave of expiries does not fill a batch's memory. The rest
#: stays hidden and is removed by the next batches.
SWEEP_VALUES = 100_000

#: Bytes of the time that values begin with.
EXPIRY_BYTES = 8


class ExpiryIndex:
    """The expiries of one variable's values.

    Args:
        state: of the shard.
        table: byte of the variable's table.
        now_ms: time of the batch.
        ttl_ms: how long a value lives from the batch that writes it.

    Attributes:
        expiry: what values begin with that are written in this batch.
    """

    def __init__(self, state: StateAccess, table: int, now_ms: int, ttl_ms: int) -> None:
        self._state = state
        self._table = table
        self._index = table | layout.TIMED
        self._prefix = bytes([self._index])
        self._now_ms = now_ms
        self._now = layout.before(self._index, now_ms)[1:]
        self.expiry = layout.before(self._index, now_ms + ttl_ms)[1:]
        self._changes: dict[bytes, bytes | None] = {}

    def is_live(self, value: bytes) -> bool:
        """Whether a value has not expired; at its very expiry it has."""
        return value[:EXPIRY_BYTES] > self._now

    def wrote(self, old: bytes | None, section: bytes, rest: bytes = b"") -> None:
        """A value that begins with `expiry` takes the place of ``old`` (None = there was none)."""
        if old is None:
            self._changes[self._prefix + self.expiry + section + rest] = b""
        elif old[:EXPIRY_BYTES] != self.expiry:
            self._changes[self._prefix + old[:EXPIRY_BYTES] + section + rest] = None
            self._changes[self._prefix + self.expiry + section + rest] = b""

    def removed(self, old: bytes, section: bytes, rest: bytes = b"") -> None:
        """The value ``old`` is gone."""
        self._changes[self._prefix + old[:EXPIRY_BYTES] + section + rest] = None

    def flush(self) -> None:
        """Hand the changes to the store."""
        if self._changes:
            keys = pa.array(list(self._changes), pa.binary())
            self._state.put_many(keys, pa.array(list(self._changes.values()), pa.binary()))
            self._changes.clear()

    def sweep(self) -> list[layout.Entry]:
        """Remove values that have expired, `SWEEP_VALUES` at most, soonest first.

        Returns: the entries of the index of what was removed.
        """
        due = self._state.range(self._prefix, layout.before(self._index, self._now_ms + 1))
        keys = [key for key, _ in islice(due, SWEEP_VALUES)]
        entries = [layout.split(key) for key in keys]
        if keys:
            keys += [layout.keyed(self._table, entry.group_key, entry.rest) for entry in entries]
            self._state.put_many(pa.array(keys, pa.binary()), pa.nulls(len(keys), pa.binary()))
        return entries
