"""The uncommitted half of a store: staged writes, their thread, and their limit.

Kafka Streams commits early when its buffer is full (KIP-892). A micro-batch cannot: Spark records its offsets
before it runs, and it is one transaction. So over the limit the driver makes the *next* batch smaller, and
over a multiple of the limit the batch fails with an error that says how much smaller it must be.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Iterator, Mapping
from itertools import islice

import pyarrow as pa

from kafka_eos_source.errors import StateError, UncommittedBytesError
from kafka_eos_source.state.store.overlay import Overlay

#: Schema of changes: of a changelog's records, and of pending changes. A null value deletes the key.
CHANGES = pa.schema([("key", pa.binary()), ("value", pa.binary())])

#: Largest number of rows and of bytes in one batch of changes.
_CHANGE_ROWS, _CHANGE_BYTES = 65_536, 4 << 20


class UncommittedWrites:
    """Staged writes of the current transaction, which one thread stages.

    Args:
        store: its name, for error messages.
        max_bytes: ``statestore.uncommitted.max.bytes``; -1 = no limit.
        hard_limit_factor: staging more than this factor times ``max_bytes`` is an error.

    Attributes:
        overlay: the writes.
        discarded: how many transactions were discarded; an uncommitted view of such a transaction is invalid.
    """

    def __init__(self, store: str, max_bytes: int, hard_limit_factor: int) -> None:
        self.overlay = Overlay()
        self.discarded = 0
        self._store = store
        self._thread = 0
        self._max_bytes = max_bytes
        self._hard_limit = None if max_bytes == -1 else max_bytes * hard_limit_factor

    @property
    def empty(self) -> bool:
        return not (self.overlay.rows or self.overlay.ranges)

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

    def check_size(self) -> None:
        """Raises `UncommittedBytesError` if more is staged than the hard limit."""
        if self._hard_limit is not None and self.overlay.bytes > self._hard_limit:
            factor = max(2, math.ceil(self.overlay.bytes / self._max_bytes))
            raise UncommittedBytesError(
                f"store {self._store} has staged {self.overlay.bytes} bytes in one micro-batch; "
                f"statestore.uncommitted.max.bytes is {self._max_bytes}, and a batch fails above "
                f"{self._hard_limit}.",
                fix=f"make micro-batches at least {factor} times smaller (maxOffsetsPerTrigger), or raise "
                "statestore.uncommitted.max.bytes.",
            )

    def clear(self) -> None:
        """Ends the transaction after its writes were committed."""
        self.overlay = Overlay()
        self._thread = 0

    def discard(self) -> None:
        """Ends the transaction without a commit, which invalidates uncommitted views of it."""
        self.clear()
        self.discarded += 1


def delete_batches(keys: Iterator[bytes]) -> Iterator[pa.RecordBatch]:
    """Yields deletes of the keys as batches of `CHANGES`."""
    while some := list(islice(keys, _CHANGE_ROWS)):
        yield from change_batches(dict.fromkeys(some))


def change_batches(rows: Mapping[bytes, bytes | None]) -> Iterator[pa.RecordBatch]:
    """Yields rows as batches of `CHANGES` of a few MB each; a value of None deletes the key."""
    return _split(list(rows), list(rows.values()))


def _split(keys: list[bytes], values: list[bytes | None]) -> Iterator[pa.RecordBatch]:
    """Halves the rows until each part is small enough for one batch."""
    if not keys:
        return
    size = sum(map(len, keys)) + sum(map(len, filter(None, values)))
    if len(keys) > 1 and (len(keys) > _CHANGE_ROWS or size > _CHANGE_BYTES):
        half = len(keys) // 2
        yield from _split(keys[:half], values[:half])
        yield from _split(keys[half:], values[half:])
    else:
        columns = [pa.array(keys, pa.binary()), pa.array(values, pa.binary())]
        yield pa.record_batch(columns, schema=CHANGES)
