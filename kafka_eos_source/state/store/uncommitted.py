"""The uncommitted half of a store: staged writes, their thread, their limit, and their form as changes.

Kafka Streams commits early when its buffer is full (KIP-892). A micro-batch cannot: Spark records its offsets
before it runs, and it is one transaction. So writes beyond the limit go to disk (`spill`), and the size of a
batch is limited by the disk alone. The stores of a process share the limit.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable, Iterator, Mapping
from itertools import islice
from pathlib import Path
from weakref import WeakSet

import pyarrow as pa

from kafka_eos_source.errors import StateError
from kafka_eos_source.runtime import failpoints
from kafka_eos_source.state.store import ownership
from kafka_eos_source.state.store.config import StoreConfig
from kafka_eos_source.state.store.overlay import Overlay, StagedPair, slices
from kafka_eos_source.state.store.spill import SpilledRows

#: Schema of changes: of a changelog's records, and of pending changes. A null value deletes the key.
CHANGES = pa.schema([("key", pa.binary()), ("value", pa.binary())])

#: Largest number of rows and of bytes in one batch of changes.
_CHANGE_ROWS, _CHANGE_BYTES = 65_536, 4 << 20


class _Sharing:
    """The stores of this process that have staged writes; each may stage an equal share of the limit."""

    def __init__(self) -> None:
        self.stores = 1
        self._writing: WeakSet[UncommittedWrites] = WeakSet()
        self._lock = threading.Lock()

    def join(self, writes: UncommittedWrites) -> None:
        with self._lock:
            self._writing.add(writes)
            self.stores = len(self._writing)

    def leave(self, writes: UncommittedWrites) -> None:
        with self._lock:
            self._writing.discard(writes)
            self.stores = max(1, len(self._writing))


_sharing = _Sharing()


class UncommittedWrites:
    """Staged writes of the current transaction, which one thread stages.

    Args:
        store: its name, for error messages.
        path: the store's folder, for writes that go to disk.
        config: of the store.

    Attributes:
        overlay: the writes.
    """

    def __init__(self, store: str, path: Path, config: StoreConfig) -> None:
        self.overlay = Overlay()
        self._store = store
        self._path = path
        self._config = config
        self._max_bytes = config.uncommitted_max_bytes
        self._spilled: SpilledRows | None = None
        self._thread = 0

    @property
    def spill_id(self) -> str:
        """Name of the writes on disk; "" if all writes are in memory."""
        return "" if self._spilled is None else self._spilled.id

    def owned_by_this_thread(self) -> bool:
        """Returns whether this thread staged the first write of the transaction."""
        return self._thread == threading.get_ident()

    def claim(self) -> None:
        """Makes this thread the only one that may stage writes until the transaction ends.

        Raises:
            StateError: if another thread has staged writes in this transaction.
        """
        if self._thread:
            raise StateError(
                f"two threads stage writes in one transaction of store {self._store}.",
                fix="write from one thread; other threads read through view().",
            )
        self._thread = threading.get_ident()
        _sharing.join(self)

    def exceeds_share(self) -> bool:
        """Returns whether the writes in memory exceed this store's share of the limit."""
        return self.overlay.bytes * _sharing.stores > self._max_bytes != -1

    def spill(self) -> None:
        """Moves the writes in memory to disk, where only this transaction reads them.

        Raises:
            StateError: if the disk is full or fails. The writes stay in memory then.
        """
        overlay = self.overlay
        if not overlay.rows:
            return
        if self._spilled is None:
            self._spilled = SpilledRows.create(self._path, self._config)
        failpoints.reach("state.before_spill")
        self._spilled.add(overlay.rows, overlay.bytes)
        failpoints.reach("state.after_spill")
        overlay.spilled = self._spilled
        overlay.forget_rows()

    def seal(self) -> str:
        """Moves all writes to disk and makes them durable. Returns the name of the writes on disk.

        The caller writes this name into the store's database, and then calls `hand_over`.
        """
        self.spill()
        assert self._spilled is not None
        self._spilled.seal()
        return self._spilled.id

    def hand_over(self) -> None:
        """Ends the transaction, but keeps its writes on disk, because the database names them now."""
        self._spilled = None
        self.clear()

    def clear(self) -> None:
        """Ends the transaction, whose writes were committed or are discarded.

        A process that was forked from the store's owner leaves the files of the transaction to the owner.
        """
        self.overlay = Overlay()
        self._thread = 0
        _sharing.leave(self)
        spilled, self._spilled = self._spilled, None
        if spilled is not None and not ownership.was_forked():
            spilled.remove()


def changes_of_pairs(pairs: Iterable[StagedPair]) -> Iterator[pa.RecordBatch]:
    """Yields writes as batches of `CHANGES` of a few MB each, without holding more than one batch of them."""
    for some in slices(pairs, _CHANGE_ROWS, _CHANGE_BYTES):
        yield from change_batches(dict(some))


def delete_batches(keys: Iterator[bytes]) -> Iterator[pa.RecordBatch]:
    """Yields deletes of the keys as batches of `CHANGES`."""
    while some := list(islice(keys, _CHANGE_ROWS)):
        yield from change_batches(dict.fromkeys(some))


def change_batches(rows: Mapping[bytes, bytes | None]) -> Iterator[pa.RecordBatch]:
    """Yields rows as batches of `CHANGES` of a few MB each; a value of None deletes the key."""
    keys, values = list(rows), list(rows.values())
    for at in range(0, len(keys), _CHANGE_ROWS):
        yield from _divided(keys[at : at + _CHANGE_ROWS], values[at : at + _CHANGE_ROWS])


def _divided(keys: list[bytes], values: list[bytes | None]) -> Iterator[pa.RecordBatch]:
    """Halves the rows until each part is small enough for one batch."""
    size = sum(map(len, keys)) + sum(map(len, filter(None, values)))
    if len(keys) > 1 and size > _CHANGE_BYTES:
        half = len(keys) // 2
        yield from _divided(keys[:half], values[:half])
        yield from _divided(keys[half:], values[half:])
    else:
        columns = [pa.array(keys, pa.binary()), pa.array(values, pa.binary())]
        yield pa.record_batch(columns, schema=CHANGES)
