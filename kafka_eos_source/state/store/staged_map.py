"""Reads and staged writes of a store's owner."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from itertools import chain, islice
from pathlib import Path

import pyarrow as pa
import pyarrow.compute as pc

from kafka_eos_source.errors import StoreClosedError
from kafka_eos_source.state.model import StoreIdentity
from kafka_eos_source.state.store.durable import DurableState
from kafka_eos_source.state.store.overlay import MISSING, Missing, Overlay, merge, unstaged_keys
from kafka_eos_source.state.store.reads import Reads
from kafka_eos_source.state.store.records import StoreMetadata
from kafka_eos_source.state.store.rocksdb import translate
from kafka_eos_source.state.store.scans import Scan, Scans
from kafka_eos_source.state.store.uncommitted import (
    UncommittedWrites,
    change_batches,
    changes_of_pairs,
    delete_batches,
)

#: Keys that `get_many` and `put_many` turn into Python objects at a time.
_KEYS_PER_SLICE = 1 << 16
#: A range with at most this many keys is deleted key by key. RocksDB slows down with the number of deleted
#: ranges, and a processor that clears the list of each group would leave one range per group.
_SMALL_RANGE = 128


class StagedMap(Reads):
    """An ordered map of bytes to bytes whose writes are staged.

    Reads see the staged writes. `TransactionalStateStore` commits them.

    Args:
        path: the store's folder.
        identity: which state this is.
        uncommitted: the staged writes.
        durable: the committed data.
    """

    def __init__(
        self, path: Path, identity: StoreIdentity, uncommitted: UncommittedWrites, durable: DurableState
    ) -> None:
        self.path = path
        self.identity = identity
        self._uncommitted = uncommitted
        self._durable = durable
        self._lock = threading.RLock()
        self._open = True
        self._scans = Scans()

    @property
    def name(self) -> str:
        """Name of the store within its query."""
        return self.identity.store

    @property
    def is_open(self) -> bool:
        return self._open

    # ------------------------------------------------------------------ reads

    def get(self, key: bytes) -> bytes | None:
        """Returns the value of a key, or None."""
        overlay = self._uncommitted.overlay
        value = overlay.rows.get(key, MISSING)  # as `overlay.get`, without a call for the most frequent case
        if not isinstance(value, Missing):
            return value
        if (overlay.spilled or overlay.ranges) and not isinstance(value := overlay.get(key), Missing):
            return value
        value = self._durable.recent.get(key, MISSING)
        if not isinstance(value, Missing):
            return value
        try:
            return self._durable.database.get(key)
        except Exception as error:
            raise translate(error, self.path) from error

    def get_many(self, keys: pa.BinaryArray) -> pa.BinaryArray:
        """Returns the value of each key, null for a missing key. Keys may repeat."""
        self._check_open()
        if len(keys) > _KEYS_PER_SLICE:
            parts = range(0, len(keys), _KEYS_PER_SLICE)
            return pa.concat_arrays([self.get_many(keys.slice(at, _KEYS_PER_SLICE)) for at in parts])
        wanted: list[bytes] = keys.to_pylist()
        values = self._uncommitted.overlay.get_many(wanted, self._durable.recent)
        if MISSING in values:
            missing = [key for key, value in zip(wanted, values, strict=True) if value is MISSING]
            base = iter(self._durable.database.get_many(missing))
            values = [next(base) if value is MISSING else value for value in values]
        return pa.array(values, pa.binary())

    def range(self, low: bytes | None = None, high: bytes | None = None, *, reverse: bool = False) -> Scan:
        self._check_open()
        if low is not None and high is not None and low >= high:
            return self._scans.track(iter(()))
        with self._lock:
            staged = self._uncommitted.overlay.scan(low, high, reverse=reverse)
            first, rest = self._durable.database.begin_scan(low, high, reverse=reverse)
            ranges = self._uncommitted.overlay.ranges
        base = chain(first, rest) if rest else iter(first)
        if staged or ranges:
            base = merge(staged, base, ranges, reverse=reverse)
        return self._scans.track(base, rest)

    def approximate_committed_size(self) -> tuple[int, int]:
        """Returns RocksDB's estimates of the number of keys, and of the bytes in files and memory."""
        self._check_open()
        size = self._durable.database.property
        return size("estimate-num-keys"), size("total-sst-files-size") + size("cur-size-all-mem-tables")

    # ------------------------------------------------------------------ staged writes

    def put(self, key: bytes, value: bytes | None) -> None:
        """Stages a write; a value of None deletes.

        Beyond ``statestore.uncommitted.max.bytes``, the staged writes go to disk.

        Raises:
            StateError: if they have to go to disk, and it is full or fails.
        """
        if key is None:
            raise ValueError("the key is None.")
        self._claim()
        self._uncommitted.overlay.put(key, value)
        if self._uncommitted.exceeds_share():
            self._spill()

    def put_all(self, pairs: Sequence[tuple[bytes, bytes | None]]) -> None:
        """Stages all pairs, or none if a key is None."""
        if any(key is None for key, _ in pairs):
            raise ValueError("a key is None; nothing was staged.")
        self._put_lists([key for key, _ in pairs], [value for _, value in pairs])

    def put_many(self, keys: pa.BinaryArray, values: pa.BinaryArray) -> None:
        """Stages many writes; a null value deletes. The last value of a repeated key counts."""
        if keys.null_count:
            raise ValueError(f"{keys.null_count} keys are null; nothing was staged.")
        if len(keys) != len(values):
            raise ValueError(f"there are {len(keys)} keys and {len(values)} values; nothing was staged.")
        self._claim()
        for at in range(0, len(keys), _KEYS_PER_SLICE):
            part = keys.slice(at, _KEYS_PER_SLICE), values.slice(at, _KEYS_PER_SLICE)
            self._put_lists(part[0].to_pylist(), part[1].to_pylist(), _payload_bytes(*part))

    def delete(self, key: bytes) -> None:
        """Stages the delete of a key."""
        self.put(key, None)

    def delete_range(self, low: bytes, high: bytes | None) -> None:
        """Stages the delete of all keys from ``low`` to ``high`` (excluded; None = the end)."""
        self._claim()
        if low is None:
            raise ValueError("the low key of a range is None; b'' deletes from the first key on.")
        if high is not None and low >= high:
            return
        overlay = self._uncommitted.overlay
        known = [key for key, _ in islice(self._durable.database.scan(low, high), _SMALL_RANGE + 1)]
        if overlay.spilled is not None:
            on_disk = overlay.spilled.scan(low, high, reverse=False)
            known += [key for key, _ in islice(on_disk, _SMALL_RANGE + 1)]
        with self._lock:
            if len(known) > _SMALL_RANGE:
                overlay.delete_range(low, high)
            else:
                overlay.drop(low, high)
                overlay.put_many(known, [None] * len(known))
        if self._uncommitted.exceeds_share():
            self._spill()

    def approximate_num_uncommitted_bytes(self) -> int:
        """Returns the memory of staged writes, in bytes as `overlay` counts them, without those on disk."""
        self._check_open()
        return self._uncommitted.overlay.bytes

    def staged_bytes(self) -> tuple[int, int]:
        """Returns the size of all staged writes, and of those on disk, in bytes as `overlay` counts them."""
        self._check_open()
        overlay = self._uncommitted.overlay
        return overlay.size_bytes, overlay.size_bytes - overlay.bytes

    def staged_changes(self) -> Iterator[pa.RecordBatch]:
        """Yields the staged writes as changelog records.

        The columns are ``key`` and ``value`` (null = deleted). Each key occurs once; a deleted range becomes
        a delete of each key in it. A batch has a few MB.
        """
        self._check_open()
        return self._changes(self._uncommitted.overlay)

    def _changes(self, overlay: Overlay) -> Iterator[pa.RecordBatch]:
        """Yields staged or pending writes as `staged_changes` does."""
        yield from self._range_deletes(overlay)
        if overlay.spilled is None:
            yield from change_batches(overlay.rows)
        else:
            yield from changes_of_pairs(overlay.scan(None, None, reverse=False))

    def _range_deletes(self, overlay: Overlay) -> Iterator[pa.RecordBatch]:
        """Yields a delete of each key of the database in the deleted ranges for which nothing is staged."""
        for low, high in overlay.ranges.spans:
            first, rest = self._durable.database.begin_scan(low, high)
            base = self._scans.track(chain(first, rest or ()), rest)
            yield from delete_batches(unstaged_keys(base, overlay.scan(low, high, reverse=False)))

    def _put_lists(
        self, keys: list[bytes], values: list[bytes | None], payload_bytes: int | None = None
    ) -> None:
        self._claim()
        self._uncommitted.overlay.put_many(keys, values, payload_bytes)
        if self._uncommitted.exceeds_share():
            self._spill()

    def _spill(self) -> None:
        """Moves the staged writes to disk; readers of other threads see them there."""
        with self._lock:
            self._uncommitted.spill()

    def _claim(self) -> None:
        """Makes the thread of the first staged write the only writer until commit or rollback."""
        if not self._uncommitted.owned_by_this_thread():
            self._check_open()
            self._uncommitted.claim()

    def _committed(self) -> StoreMetadata:
        self._check_open()
        return self._durable.metadata

    def _check_open(self) -> None:
        if not self._open:
            raise StoreClosedError(f"store {self.name} in {self.path} is closed.")


def _payload_bytes(*columns: pa.Array) -> int | None:
    """Returns the number of bytes of all keys and values; None if Arrow cannot tell for one of the types."""
    if not all(pa.types.is_binary(column.type) for column in columns):
        return None
    return sum(pc.sum(pc.binary_length(column)).as_py() or 0 for column in columns)
