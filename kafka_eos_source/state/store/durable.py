"""The half of a store that is on the disk: the data, and what is recorded of it, always written together."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pyarrow as pa

from kafka_eos_source.errors import KafkaEosError
from kafka_eos_source.model import TopicPartition
from kafka_eos_source.state.model import BatchRecord
from kafka_eos_source.state.store import records
from kafka_eos_source.state.store.advance import advanced
from kafka_eos_source.state.store.config import StoreConfig
from kafka_eos_source.state.store.database import Database, Writes
from kafka_eos_source.state.store.key_order import in_key_order
from kafka_eos_source.state.store.overlay import Ranges
from kafka_eos_source.state.store.records import Committed

#: What was committed last stays in memory for reading up to this size.
_RECENT_BYTES = 64 << 20
#: From here on a chunk of a restore is quicker as a file of sorted rows than as a batch.
_INGEST_ROWS = 20_000


class Durable:
    """Of one store.

    Args:
        path: the store's folder.
        database: open, and this one's from now on.
        committed: what its records say.
        config: the store's.
        lost: called when a write failed, before that is raised: what is on the disk is known only by opening
            it again.

    Attributes:
        database: for reading.
        committed: what the records say.
        recent: what was written last.
    """

    def __init__(
        self,
        path: Path,
        database: Database,
        committed: Committed,
        config: StoreConfig,
        lost: Callable[[], None],
    ) -> None:
        self.database = database
        self.committed = committed
        self.recent: dict[bytes, bytes | None] = {}
        self._path = path
        self._config = config
        self._lost = lost

    def close(self) -> None:
        self.recent = {}
        self.database.close()

    def change(
        self, writes: Writes, rows: dict[bytes, bytes | None], ranges: Ranges, size_bytes: int, to: Committed
    ) -> None:
        """Writes a transaction: ranges are deleted before rows are put; a row of None is a delete.

        Args:
            writes: what else is to be written with it.
            size_bytes: of the rows, in memory. Few of them stay there for reading, since a batch often asks
                for what the one before it changed: for 100,000 keys that saves 0.15 s of looking them up.
            to: what the records will say.
        """
        for low, high in ranges.spans:
            end = self.database.behind_all() if high is None else high
            if low < end:
                writes.delete_range("data", low, end)
        writes.rows(rows)
        self._record(writes, to)
        self.recent = rows if size_bytes <= _RECENT_BYTES else {}

    def restore(
        self,
        store: str,
        keys: pa.BinaryArray,
        values: pa.BinaryArray,
        offsets: Mapping[TopicPartition, int],
        batch: BatchRecord | None,
        done: bool | None,
    ) -> None:
        """As `TransactionalStateStore.restore_chunk`."""
        committed = advanced(store, self.committed, offsets, {}, batch)
        if len(keys) != len(values):
            raise ValueError(f"{len(keys)} keys and {len(values)} values")
        if done is None:
            done = batch is not None or (not len(keys) and not self.committed.restoring)
        writes = self.database.batch()
        self.recent = {}
        if len(keys) < _INGEST_ROWS:
            writes.rows(dict(zip(keys.to_pylist(), values.to_pylist(), strict=True)))
        else:
            if not self.committed.restoring:
                self._record(self.database.batch(), replace(self.committed, restoring=True))
            ordered = in_key_order(keys, values)
            with self._or_lost():
                self.database.ingest(*ordered, self._path / "restore.sst", self._config)
        self._record(writes, replace(committed, restoring=not done))

    def write(self, writes: Writes) -> None:
        """What the records say stays the same.

        Raises:
            StateError, StateCorruptedError: it failed; the store is closed.
        """
        with self._or_lost():
            self.database.write(writes, sync=self._config.wal_sync)

    def _record(self, writes: Writes, committed: Committed) -> None:
        """Writes, and only then believes it."""
        batch_ms = committed.batch.time_ms if committed.batch else 0
        now_ms = int(time.time() * 1000)
        committed = replace(committed, saved_ms=min(now_ms, batch_ms) if batch_ms > 0 else now_ms)
        puts, gone = records.encode(self.committed, committed)
        for key, value in puts:
            writes.put("offsets", key, value)
        for key in gone:
            writes.delete("offsets", key)
        self.write(writes)
        self.committed = committed

    @contextmanager
    def _or_lost(self) -> Iterator[None]:
        try:
            yield
        except KafkaEosError:
            self._lost()
            raise
