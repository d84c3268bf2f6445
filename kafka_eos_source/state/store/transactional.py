"""A store whose data and changelog offsets are committed together, or not at all (KIP-892).

::

    put, delete …            commit, promote
    ───────────▶  overlay  ─────────────────▶  data + offsets + position + batch, one WriteBatch
                    │                             ▲
                    └──▶  pending (batch, attempt) ┘   when the token says that this attempt is in Kafka

One owner writes, from one thread at a time; it sees its own writes in every read, nobody else does. Others
read through `view` (other threads) or `open_read_only` (other processes). A replayed batch is no event here:
which batch the data is of is part of the data. `staged` is the half in memory, `durable` that on the disk.

In the store's folder: ``db/`` (RocksDB), ``VERSION``, ``owner`` (who has it open), ``.checkpoint``.
"""

from __future__ import annotations

import os
import threading
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from itertools import chain
from pathlib import Path
from types import TracebackType
from weakref import WeakSet

import pyarrow as pa

from kafka_eos_source.errors import (
    NotUpToBoundError,
    StateError,
    StoreClosedError,
    ViewInvalidatedError,
)
from kafka_eos_source.model import TopicPartition
from kafka_eos_source.state.layout import upper_bound
from kafka_eos_source.state.model import BatchRecord, PendingBatch, StoreIdentity
from kafka_eos_source.state.store import folder, kept
from kafka_eos_source.state.store.advance import advanced, furthest, promotable
from kafka_eos_source.state.store.changes import key_batches, row_batches
from kafka_eos_source.state.store.checkpoint_file import write_checkpoint
from kafka_eos_source.state.store.config import Isolation, StoreConfig, check_isolation
from kafka_eos_source.state.store.database import Database
from kafka_eos_source.state.store.durable import Durable
from kafka_eos_source.state.store.limits import UncommittedBudget
from kafka_eos_source.state.store.metrics import StoreMetrics
from kafka_eos_source.state.store.overlay import MISSING, Missing, merge
from kafka_eos_source.state.store.pending import Header
from kafka_eos_source.state.store.reader import CommittedReader
from kafka_eos_source.state.store.records import Committed, Offsets
from kafka_eos_source.state.store.rocks_errors import translate
from kafka_eos_source.state.store.scans import Scan, Scans
from kafka_eos_source.state.store.staged import Staged
from kafka_eos_source.state.store.views import (
    CommittedView,
    Cursor,
    StateView,
    UncommittedView,
    check_bound,
    last_offset,
)

#: Up to so many keys a range is deleted key by key: RocksDB slows down with the number of ranges deleted,
#: and a processor that clears the list of each group would leave one for each.
_SMALL_RANGE = 128


class TransactionalStateStore:
    """One shard's state. Made by `open`; also a context manager. Satisfies `model.StateAccess`.

    Every method raises `StoreClosedError` once the store is closed, by `close` or by a failed write.
    """

    #: As Kafka's `StateStore`: it keeps what it has, and its own changelog offsets.
    persistent = True
    manages_offsets = True

    def __init__(self, path: Path, database: Database, committed: Committed, config: StoreConfig) -> None:
        assert committed.identity is not None
        self.path = path
        self.identity: StoreIdentity = committed.identity
        self.config = config
        self._staged = Staged(self.identity.store)
        self._durable = Durable(path, database, committed, config, self._shut)
        self._lock = threading.RLock()
        self._open = True
        self._scans = Scans()
        self._views: WeakSet[StateView] = WeakSet()
        self._metrics = StoreMetrics()
        self._budget = UncommittedBudget(config.uncommitted_max_bytes, config.hard_limit_factor)
        self._budget.join(self)

    # ------------------------------------------------------------------ lifecycle

    @classmethod
    def open(
        cls, path: str | os.PathLike[str], identity: StoreIdentity, config: StoreConfig | None = None
    ) -> TransactionalStateStore:
        """Opens the store in the folder ``path``, or makes a new one there.

        Raises:
            StateLockedError: another owner has it and kept it for ``config.lock_timeout_ms``.
            StateMismatchError: it is the state of something else; nothing was changed.
            StateFormatError: a newer release wrote it; nothing was changed.
            StateCorruptedError: it is damaged, its offsets are lost, or its changelog topic is another one by
                now. Closed again: `set_aside`, open anew and restore.
            StateError: the disk fails; or this process was forked from one that had a store open.
        """
        config = config or StoreConfig()
        where = Path(path)
        database, committed = folder.open_store(where, identity, config)
        return cls(where, database, committed, config)

    @staticmethod
    def open_read_only(path: str | os.PathLike[str]) -> CommittedReader:
        """For another process than the owner's: the committed data as it is now. `refresh` for a later state.

        Raises:
            StateCorruptedError, StateFormatError: as `open`.
            StateError: there is no store.
        """
        return CommittedReader(Path(path))

    @staticmethod
    def set_aside(path: str | os.PathLike[str]) -> Path | None:
        """Moves a damaged store to ``<path>.corrupt-<ms>``, keeping only the newest such one, and says where.

        None = there was nothing. Safe against a kill at any time.

        Raises:
            StateLockedError: somebody has it open.
            StateError: it was damaged within the last ten minutes already; nothing was moved.
        """
        return folder.set_aside(Path(path))

    @staticmethod
    def destroy(path: str | os.PathLike[str]) -> None:
        """Removes a store. Idempotent; safe against a kill at any time.

        Raises:
            StateLockedError: somebody has it open.
        """
        folder.destroy(Path(path))

    @property
    def name(self) -> str:
        return self.identity.store

    @property
    def partition(self) -> int:
        return self.identity.shard

    @property
    def is_open(self) -> bool:
        return self._open

    def close(self) -> None:
        """Drops what is staged, closes views and scans, lets the files go. Never commits. Idempotent."""
        with self._lock:
            if not self._open:
                return
            try:
                write_checkpoint(self.path, self._durable.committed.offsets)
            finally:
                self._shut()
            folder.closed(self.path)

    def __enter__(self) -> TransactionalStateStore:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _shut(self) -> None:
        self._open = False
        self._budget.leave(self)
        for view in list(self._views):
            view.close()
        self._scans.close()
        self._staged.end()
        self._durable.close()

    # ------------------------------------------------------------------ the owner's reads

    def get(self, key: bytes) -> bytes | None:
        overlay = self._staged.overlay
        value = overlay.rows.get(key, MISSING)
        if not isinstance(value, Missing):
            return value
        if overlay.ranges and overlay.ranges.covers(key):
            return None
        value = self._durable.recent.get(key, MISSING)
        if not isinstance(value, Missing):
            return value
        try:
            return self._durable.database.get(key)
        except Exception as error:
            raise translate(error, self.path) from error

    def get_many(self, keys: pa.BinaryArray) -> pa.BinaryArray:
        """The value of each key, null where there is none. Keys may repeat."""
        self._check_open()
        wanted: list[bytes] = keys.to_pylist()
        found = self._staged.overlay.look_up(wanted, self._durable.recent)
        if MISSING in found:
            missing = [key for key, value in zip(wanted, found, strict=True) if value is MISSING]
            base = iter(self._durable.database.get_each(missing))
            found = [next(base) if value is MISSING else value for value in found]
        return pa.array(found, pa.binary())

    def range(self, low: bytes | None = None, high: bytes | None = None, *, reverse: bool = False) -> Scan:
        """Pairs in the order of keys, as they are now; ``low`` included, ``high`` excluded."""
        self._check_open()
        if low is not None and high is not None and low >= high:
            return self._scans.track(iter(()))
        with self._lock:
            staged = self._staged.overlay.slice(low, high, reverse=reverse)
            first, rest = self._durable.database.scan_first(low, high, reverse=reverse)
            ranges = self._staged.overlay.ranges
        base = chain(first, rest) if rest else iter(first)
        if staged or ranges:
            base = merge(staged, base, ranges, reverse=reverse)
        return self._scans.track(base, rest)

    def reverse_range(self, low: bytes | None = None, high: bytes | None = None) -> Scan:
        """The same pairs as `range`, from the last to the first."""
        return self.range(low, high, reverse=True)

    def prefix_scan(self, prefix: bytes) -> Scan:
        """Pairs whose key begins with ``prefix``."""
        return self.range(prefix, upper_bound(prefix))

    def all(self) -> Scan:
        return self.range()

    def approximate_num_entries(self) -> int:
        """RocksDB's estimate, and what is staged."""
        self._check_open()
        staged = sum(1 if value is not None else -1 for value in self._staged.overlay.rows.values())
        return max(0, self._durable.database.property("estimate-num-keys") + staged)

    # ------------------------------------------------------------------ the owner's writes, all staged

    def put(self, key: bytes, value: bytes | None) -> None:
        """Stages a write; a value of None deletes.

        Raises:
            UncommittedBytesError: the batch stages more than may be in memory.
        """
        if key is None:
            raise ValueError("a key of None")
        self._own()
        self._staged.overlay.put(key, value)
        self._staged.check_size()

    def put_all(self, pairs: Sequence[tuple[bytes, bytes | None]]) -> None:
        """Stages all of them, or none if one has no key."""
        if any(key is None for key, _ in pairs):
            raise ValueError("a key of None; nothing was staged")
        self._put_lists([key for key, _ in pairs], [value for _, value in pairs])

    def put_many(self, keys: pa.BinaryArray, values: pa.BinaryArray) -> None:
        """Stages many writes; a null value deletes. Of a key that repeats, the last value counts."""
        if keys.null_count:
            raise ValueError(f"{keys.null_count} keys are null; nothing was staged")
        self._put_lists(keys.to_pylist(), values.to_pylist())

    def put_if_absent(self, key: bytes, value: bytes | None) -> bytes | None:
        """Stages the value unless there is one, which is returned."""
        old = self.get(key)
        if old is None:
            self.put(key, value)
        return old

    def delete(self, key: bytes) -> None:
        self.put(key, None)

    def delete_range(self, low: bytes, high: bytes | None) -> None:
        """Stages the delete of all keys from ``low`` (included) to ``high`` (excluded; None = the end)."""
        self._own()
        if low is None:
            raise ValueError("a range that begins with None")
        if high is not None and low >= high:
            return
        few: list[bytes] = []
        base = self._durable.database.scan(low, high)
        for key, _ in base:
            few.append(key)
            if len(few) > _SMALL_RANGE:
                break
        overlay = self._staged.overlay
        with self._lock:
            if len(few) > _SMALL_RANGE:
                overlay.delete_range(low, high)
            else:
                overlay.drop(low, high)
                overlay.put_many(few, [None] * len(few))
        self._staged.check_size()

    def stage_position(self, position: Mapping[TopicPartition, int]) -> None:
        """Notes the largest input offset that the staged writes reflect (KIP-796); committed with them."""
        self._own()
        with self._lock:
            self._staged.reflect(position)

    def approximate_num_uncommitted_bytes(self) -> int:
        """Memory that the next commit frees; 0 after commit, rollback and open. See `overlay`."""
        self._check_open()
        return self._staged.overlay.bytes

    @property
    def commit_requested(self) -> bool:
        """More is staged than this store's share of ``statestore.uncommitted.max.bytes``."""
        return self._staged.over_share

    def set_share(self, soft_bytes: int | None, hard_bytes: int | None) -> None:
        """By the `UncommittedBudget` that this store takes part in."""
        self._staged.limit(soft_bytes, hard_bytes)

    def use_budget(self, budget: UncommittedBudget) -> None:
        """Shares ``statestore.uncommitted.max.bytes`` with the other stores of ``budget`` from now on."""
        self._budget.leave(self)
        self._budget = budget
        budget.join(self)

    def rollback(self) -> None:
        """Drops what is staged. Nothing is read or written."""
        self._check_open()
        with self._lock:
            self._staged.withdraw()
        self._metrics.count("rollback-total")

    def flush(self) -> None:
        """Deprecated by KIP-892, and does nothing: only a commit makes writes durable."""
        warnings.warn("flush does nothing; commit makes writes durable", DeprecationWarning, stacklevel=2)

    def _put_lists(self, keys: list[bytes], values: list[bytes | None]) -> None:
        self._own()
        self._staged.overlay.put_many(keys, values)
        self._staged.check_size()

    def _own(self) -> None:
        """The thread that stages first is the writer, until commit or rollback."""
        if not self._staged.is_mine():
            self._check_open()
            self._staged.own()

    def _check_nothing_staged(self, what_follows: str) -> None:
        self._check_open()
        if not self._staged.empty:
            raise StateError(f"store {self.name}: writes are staged; {what_follows}")

    # ------------------------------------------------------------------ commit

    def commit(
        self,
        changelog_offsets: Mapping[TopicPartition, int],
        *,
        position: Mapping[TopicPartition, int] | None = None,
        batch: BatchRecord | None = None,
        forget_offsets: bool = False,
    ) -> None:
        """Makes what is staged, and how far the changelog is in it, durable and visible: all or nothing.

        Args:
            changelog_offsets: the offset *after* the last changelog record of what is staged, by partition.
            position: largest input offsets, besides those of `stage_position`.
            batch: the micro-batch that this is.
            forget_offsets: forget all offsets: the store will be restored from the beginning.

        Raises:
            ValueError: no offsets, or one that is None or negative. Nothing was written.
            OffsetWentBackError: an offset is lower than the one stored. Nothing was written.
            StateError, StateCorruptedError: the write failed; the store is closed, what is staged is gone.
        """
        self._check_open()
        committed = advanced(
            self.name,
            self._durable.committed,
            changelog_offsets,
            furthest(self._staged.position, position or {}),
            batch,
            forget_offsets=forget_offsets,
        )
        with self._lock, self._metrics.commits.time():
            writes, overlay = self._durable.database.batch(), self._staged.overlay
            to = replace(committed, restoring=False)
            self._durable.change(writes, overlay.rows, overlay.ranges, overlay.bytes, to)
            self._staged.end()

    def committed_offset(self, tp: TopicPartition) -> int | None:
        """Offset of the last changelog record in the data; None = none."""
        self._check_open()
        return last_offset(self._durable.committed.offsets, tp)

    def next_offset(self, tp: TopicPartition) -> int | None:
        """The changelog offset to go on from; None = not recorded."""
        self._check_open()
        return self._durable.committed.offsets.get(tp)

    def last_batch(self) -> BatchRecord | None:
        """The micro-batch whose state the data is."""
        self._check_open()
        return self._durable.committed.batch

    def committed_position(self) -> Offsets:
        """Largest input offset of each partition in the committed data (KIP-796)."""
        self._check_open()
        return self._durable.committed.position

    def position(self) -> Offsets:
        """The same with what is staged."""
        self._check_open()
        return furthest(self._durable.committed.position, self._staged.position)

    @property
    def last_commit_ms(self) -> int:
        """When the data was last written, ms since the epoch; 0 = never."""
        return self._durable.committed.saved_ms

    @property
    def restoring(self) -> bool:
        """A restore was begun and not finished: the data is between two batches."""
        return self._durable.committed.restoring

    def is_too_old(self, now_ms: int) -> bool:
        """Deletes since the last commit may be compacted away in the changelog: restore from its beginning
        rather than from the stored offset (KIP-1259), unless the stored offset is the end already."""
        limit = self.config.max_age_ms
        return limit != -1 and 0 < self._durable.committed.saved_ms < now_ms - limit

    # ------------------------------------------------------------------ pending batches

    def staged_changes(self) -> Iterator[pa.RecordBatch]:
        """What the staged writes come to, for the changelog: columns ``key``, ``value`` (null = deleted).

        A key comes once; a deleted range comes as the keys that were in it. Batches of a few MB.
        """
        self._check_open()
        overlay = self._staged.overlay
        for low, high in overlay.ranges.spans:
            first, rest = self._durable.database.scan_first(low, high)
            base = self._scans.track(chain(first, rest or ()), rest)
            yield from key_batches(key for key, _ in base if key not in overlay.rows)
        yield from row_batches(overlay.rows)

    def persist_pending(self, record: BatchRecord) -> None:
        """Keeps what is staged under its batch and attempt; the data is not touched, the overlay is empty
        then.

        Raises:
            StateError, StateCorruptedError: as `commit`.
        """
        self._check_open()
        with self._lock:
            overlay = self._staged.overlay
            header = Header(
                PendingBatch(record, self._durable.committed.batch, overlay.bytes),
                self._staged.position,
                overlay.ranges,
            )
            writes = self._durable.database.batch()
            for old in self._headers():
                if old.id == header.id:
                    kept.drop(writes, old)
            kept.keep(writes, header, row_batches(overlay.rows))
            self._durable.write(writes)
            self._staged.withdraw()

    def pending(self) -> list[PendingBatch]:
        """The attempts that are kept, by batch."""
        return [header.batch for header in self._headers()]

    def promote(
        self,
        record: BatchRecord,
        changelog_offsets: Mapping[TopicPartition, int],
        position: Mapping[TopicPartition, int] | None = None,
    ) -> None:
        """Applies the pending attempt that is in Kafka, with its offsets, and drops all pending ones.

        Args:
            record: of that attempt; its event time may be later than when it was kept.
            changelog_offsets, position: as `commit`.

        Raises:
            StateMismatchError: that attempt is not kept, or was made on other state than this. Nothing was
            done.
            ValueError, OffsetWentBackError, StateError, StateCorruptedError: as `commit`.
        """
        self._check_nothing_staged("promote comes before the batch's own")
        durable, headers = self._durable, self._headers()
        header = promotable(self.name, headers, record, durable.committed)
        positions = furthest(header.position, position or {})
        committed = advanced(self.name, durable.committed, changelog_offsets, positions, record)
        with self._lock, self._metrics.commits.time():
            writes, rows = durable.database.batch(), kept.rows(durable.database, header)
            for any_header in headers:
                kept.drop(writes, any_header)
            durable.change(writes, rows, header.ranges, header.batch.size_bytes, committed)

    def drop_pending(self, except_attempts: Sequence[str] = ()) -> None:
        """Drops the pending attempts but those named."""
        headers = [h for h in self._headers() if h.batch.record.attempt not in except_attempts]
        if not headers:
            return
        with self._lock:
            writes = self._durable.database.batch()
            for header in headers:
                kept.drop(writes, header)
            self._durable.write(writes)

    def _headers(self) -> list[Header]:
        self._check_open()
        return kept.headers(self._durable.database)

    # ------------------------------------------------------------------ restore

    def restore_chunk(
        self,
        keys: pa.BinaryArray,
        values: pa.BinaryArray,
        changelog_offsets: Mapping[TopicPartition, int],
        *,
        batch: BatchRecord | None = None,
        done: bool | None = None,
    ) -> None:
        """Records of the changelog, straight into the data, with the offset to go on from.

        Of a key that repeats the last counts; null deletes. A big chunk goes in as a file of sorted rows, on
        the disk before the offset is written: a kill in between leaves data ahead of its offset, which the
        same records, read again, do not change.

        Args:
            changelog_offsets: as `commit`; may be the stored one again.
            batch: the micro-batch whose state the data is after this chunk.
            done: the data is the state of a batch now, not between two. By default when ``batch`` is given;
                a chunk without rows changes nothing about it.

        Raises:
            ValueError, OffsetWentBackError, StateError, StateCorruptedError: as `commit`.
        """
        self._check_nothing_staged("a restore comes before them")
        with self._lock:
            self._durable.restore(self.name, keys, values, changelog_offsets, batch, done)
        self._metrics.count("restore-records-total", len(keys))

    # ------------------------------------------------------------------ views, metrics

    @contextmanager
    def view(
        self,
        isolation: Isolation | None = None,
        *,
        at_least: Mapping[TopicPartition, int] | None = None,
    ) -> Iterator[StateView]:
        """What others may read, from any thread: one moment, for as long as the view is open.

        Args:
            isolation: ``read_committed`` or ``read_uncommitted``; by default ``config.query_isolation``.
            at_least: input offsets (KIP-796) that the state must reflect.

        Raises:
            NotUpToBoundError: it does not reflect them yet; or it is being restored. Ask again.
        """
        level = isolation or self.config.query_isolation
        check_isolation(level)
        with self._lock:
            self._check_open()
            if self._durable.committed.restoring:
                raise NotUpToBoundError(f"store {self.name} is being restored", fix="ask again")
            uncommitted = level == "read_uncommitted"
            check_bound(self.position() if uncommitted else self._durable.committed.position, at_least)
            cursor = Cursor(self._durable.database.cursor())
            view: StateView
            if uncommitted:
                view = UncommittedView(
                    self._durable.committed,
                    cursor,
                    self._staged.overlay,
                    self.position,
                    self._still(self._staged.generation),
                    self._lock,
                )
            else:
                view = CommittedView(self._durable.committed, cursor)
            self._views.add(view)
        try:
            yield view
        finally:
            view.close()

    def metrics(self) -> dict[str, float]:
        """Numbers under KIP-892's names: ``commit-rate``, ``commit-latency-avg``, ``uncommitted-bytes`` …"""
        self._check_open()
        return {
            **self._metrics.numbers(),
            "uncommitted-bytes": float(self._staged.overlay.bytes),
            "uncommitted-entries": float(len(self._staged.overlay)),
            "last-commit-ms": float(self._durable.committed.saved_ms),
            **{name: float(self._durable.database.property(name)) for name in _PROPERTIES},
        }

    def _still(self, generation: int) -> Callable[[], None]:
        def check() -> None:
            if not self._open:
                raise StoreClosedError(f"store {self.name} is closed")
            if self._staged.generation != generation:
                raise ViewInvalidatedError(
                    "what this read_uncommitted view showed was rolled back",
                    fix="take a new view",
                )

        return check

    def _check_open(self) -> None:
        if not self._open:
            raise StoreClosedError(f"store {self.name} of {self.path} is closed")


_PROPERTIES = ("estimate-num-keys", "cur-size-all-mem-tables", "total-sst-files-size", "block-cache-usage")
