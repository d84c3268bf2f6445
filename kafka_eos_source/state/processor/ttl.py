"""Times to live: when values expire, and an index by time of expiry.

A value with a time to live begins with its time of expiry (8 bytes, encoded as in a timed key), and has an
index entry without a value in the timed table that belongs to the variable's table. Value and entry always
agree: code that overwrites or removes a value also moves or removes its entry. Reads hide expired values at
once; the sweep at the end of a batch removes them. "Now" is the time of the batch, so a batch that is
computed again yields the same result (in Spark: `TTLState`, `StateTTL.isExpired`).
"""

from __future__ import annotations

from itertools import islice

import pyarrow as pa

from kafka_eos_source.state.encoding import layout
from kafka_eos_source.state.model import StateAccess

#: Most values that one sweep removes, because the removals of a batch are kept in memory. The other expired
#: values stay hidden, and the next batches remove them.
SWEEP_VALUES = 100_000

#: Longest time that an idle query keeps expired values. It then runs at most one batch per minute for them.
SWEEP_DELAY_MS = 60_000

#: Size in bytes of the time of expiry at the start of a value.
EXPIRY_BYTES = 8


class ExpiryIndex:
    """The times of expiry of one variable's values.

    Args:
        state: state of the shard.
        table: byte of the variable's table.
        now_ms: processing time of the batch.
        ttl_ms: time to live, counted from the batch that writes a value.

    Attributes:
        expiry: encoded time of expiry of the values that this batch writes.
    """

    def __init__(self, state: StateAccess, table: int, now_ms: int, ttl_ms: int) -> None:
        self._state = state
        self._table = table
        self._index = table | layout.TIMED
        self._prefix = bytes([self._index])
        self._now_ms = now_ms
        self._ttl_ms = ttl_ms
        self._now = layout.before(self._index, now_ms)[1:]
        self.expiry = layout.before(self._index, now_ms + ttl_ms)[1:]
        self._changes: dict[bytes, bytes | None] = {}

    def is_live(self, value: bytes) -> bool:
        """Whether a value has not expired. A value expires exactly at its time of expiry."""
        return value[:EXPIRY_BYTES] > self._now

    def wrote(self, old: bytes | None, section: bytes, rest: bytes = b"") -> None:
        """Records that a value with `expiry` replaces ``old``; None if there was no value."""
        if old is None:
            self._changes[self._prefix + self.expiry + section + rest] = b""
        elif old[:EXPIRY_BYTES] != self.expiry:
            self._changes[self._prefix + old[:EXPIRY_BYTES] + section + rest] = None
            self._changes[self._prefix + self.expiry + section + rest] = b""

    def removed(self, old: bytes, section: bytes, rest: bytes = b"") -> None:
        """Records that the value ``old`` was removed."""
        self._changes[self._prefix + old[:EXPIRY_BYTES] + section + rest] = None

    def flush(self) -> None:
        """Writes the changes of the index to the store."""
        if self._changes:
            keys = pa.array(list(self._changes), pa.binary())
            self._state.put_many(keys, pa.array(list(self._changes.values()), pa.binary()))
            self._changes.clear()

    def next_sweep_ms(self) -> int | None:
        """Returns when a sweep is worth a batch of its own; None if the variable has no values.

        Expired values only take up space, because reads hide them. So a sweep waits for a tenth of the time
        to live, but at most `SWEEP_DELAY_MS`, and removes everything that has expired meanwhile.
        """
        expiry_ms = layout.earliest_ms(self._state, self._index)
        return None if expiry_ms is None else expiry_ms + min(self._ttl_ms // 10, SWEEP_DELAY_MS)

    def sweep(self) -> list[layout.Entry]:
        """Removes expired values, at most `SWEEP_VALUES`, earliest expiry first.

        Returns:
            The index entries of the removed values.
        """
        due = self._state.range(self._prefix, layout.before(self._index, self._now_ms + 1))
        keys = [key for key, _ in islice(due, SWEEP_VALUES)]
        entries = [layout.split(key) for key in keys]
        if keys:
            keys += [layout.keyed(self._table, entry.group_key, entry.rest) for entry in entries]
            self._state.put_many(pa.array(keys, pa.binary()), pa.nulls(len(keys), pa.binary()))
        return entries
