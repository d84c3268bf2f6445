"""A state store that commits data and changelog offsets together, or not at all (KIP-892).

::

    put, delete …            commit, promote
    ───────────▶  overlay  ─────────────────▶  data + offsets + batch, one WriteBatch
                  (memory, spill)                 ▲
                    │                             │
                    └──▶  pending (batch, attempt) ┘   when the token says that this attempt is in Kafka

One owner writes, from one thread at a time. It sees its own staged writes in every read; nobody else does.
Other threads read through `view`, other processes through `open_read_only`. A replayed batch needs no
special case, because the store records which batch its data belongs to.

`uncommitted` is the staged half of a store, and `durable` the committed half. Writes that exceed the memory
are on disk. They are too many for one WriteBatch, so *applying* writes them to the data in steps that end
after a crash before anybody reads.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from dataclasses import replace
from itertools import chain, islice
from pathlib import Path
from types import TracebackType
from typing import NoReturn
from weakref import WeakSet

import pyarrow as pa
import pyarrow.compute as pc

from kafka_eos_source.errors import NotUpToBoundError, StateError, StoreClosedError
from kafka_eos_source.model import TopicPartition
from kafka_eos_source.runtime import failpoints
from kafka_eos_source.state.model import BatchRecord, PendingBatch, StoreIdentity
from kafka_eos_source.state.store import opening
from kafka_eos_source.state.store.database import Database
from kafka_eos_source.state.store.durable import (
    Applying,
    DurableState,
    PendingHeader,
    StoreMetadata,
    add_attempt,
    find_promotable,
    next_metadata,
    read_headers,
    read_overlay,
    read_rows,
    remove_attempt,
)
from kafka_eos_source.state.store.files import freeze
from kafka_eos_source.state.store.overlay import MISSING, Missing, Overlay, Ranges, merge, unstaged_keys
from kafka_eos_source.state.store.rocksdb import Scan, Scans, StoreConfig, translate
from kafka_eos_source.state.store.uncommitted import (
    SpilledRows,
    UncommittedWrites,
    change_batches,
    changes_of_pairs,
    remove_spills,
)
from kafka_eos_source.state.store.views import CommittedReader, Reads, StateView

#: Keys that `get_many` and `put_many` turn into Python objects at a time.
_KEYS_PER_SLICE = 1 << 16
#: A range with at most this many keys is deleted key by key. RocksDB slows down with the number of deleted
#: ranges, and a processor that clears the list of each group would leave one range per group.
_SMALL_RANGE = 128


class TransactionalStateStore(Reads):
    """State of one shard: an ordered map of bytes to bytes with atomic commits.

    `open` creates the object, which is a context manager. Every method raises `StoreClosedError` once the
    store is closed, by `close` or by a failed write. The class satisfies `model.StateAccess`.

    Attributes:
        path: the store's folder.
        identity: which state this is.
        config: settings of the store.
    """

    def __init__(self, path: Path, database: Database, metadata: StoreMetadata, config: StoreConfig) -> None:
        assert metadata.identity is not None
        self.path = path
        self.identity = metadata.identity
        self.config = config
        self._uncommitted = UncommittedWrites(self.name, path, config)
        self._durable = DurableState(path, database, metadata, config, on_failed_write=self._shut_down)
        self._lock = threading.RLock()
        self._open = True
        self._scans = Scans()
        self._views: WeakSet[StateView] = WeakSet()

    # ------------------------------------------------------------------ lifecycle

    @classmethod
    def open(
        cls, path: str | os.PathLike[str], identity: StoreIdentity, config: StoreConfig | None = None
    ) -> TransactionalStateStore:
        """Opens the store in the folder ``path``, or creates it there.

        Args:
            path: the store's folder.
            identity: which state it holds, or will hold.
            config: settings; None = the defaults.

        Raises:
            StateLockedError: if another process still has it open after ``config.lock_timeout_ms``.
            StateMismatchError: if it holds other state; nothing was changed.
            StateFormatError: if a newer release wrote it; nothing was changed.
            StateCorruptedError: if it is damaged, its offsets are lost, or its changelog topic was deleted
                and created again. Call `set_aside` or `destroy`, open it again and restore it.
            StateError: if the disk fails, or this process was forked from one that had opened a store.
        """
        config = config or StoreConfig()
        where = Path(path)
        database, metadata = opening.open_store(where, identity, config)
        store = cls(where, database, metadata, config)
        if metadata.applying is not None:
            try:
                store._finish_applying(metadata.applying)
            except BaseException:
                store._shut_down()
                raise
        return store

    @staticmethod
    def open_read_only(path: str | os.PathLike[str]) -> CommittedReader:
        """Opens the last commit of a store for reading, even while its owner has it open.

        Raises:
            StateCorruptedError, StateFormatError: as `open`.
            StateError: if the folder has no store.
            StateLockedError: if the owner rewrote its files during every try to read them.
            NotUpToBoundError: if the store is being restored.
        """
        return CommittedReader(Path(path))

    @staticmethod
    def set_aside(path: str | os.PathLike[str]) -> Path | None:
        """Renames a damaged store to ``<path>.corrupt-<ms>``.

        Stores of this path that were set aside earlier are removed. A crash at any time leaves nothing that
        looks like a store.

        Returns:
            The new path; None if there was no store.

        Raises:
            StateLockedError: if any process has the store open.
            StateError: if a store of this path was set aside within the last ten minutes; nothing was
                renamed.
        """
        return opening.set_aside(Path(path))

    @staticmethod
    def destroy(path: str | os.PathLike[str]) -> None:
        """Removes a store, if there is one.

        A crash at any time leaves nothing that looks like a store.

        Raises:
            StateLockedError: if any process has the store open.
        """
        opening.destroy(Path(path))

    def close(self) -> None:
        """Discards staged writes and closes the store, its views and scans. Never commits."""
        with self._lock:
            if not self._open:
                return
            self._shut_down()
            opening.mark_closed(self._durable.database)

    def __enter__(self) -> TransactionalStateStore:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _shut_down(self) -> None:
        self._open = False
        for view in list(self._views):
            view.close()
        self._scans.close()
        self._uncommitted.clear()
        self._durable.close()

    def _check_open(self) -> None:
        if not self._open:
            raise StoreClosedError(f"store {self.name} in {self.path} is closed.")

    @property
    def name(self) -> str:
        """Name of the store within its query."""
        return self.identity.store

    @property
    def is_open(self) -> bool:
        return self._open

    @property
    def partition(self) -> int:
        """Number of the shard, and of its changelog partition."""
        return self.identity.shard

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

    def _committed(self) -> StoreMetadata:
        self._check_open()
        return self._durable.metadata

    @property
    def last_commit_ms(self) -> int:
        """Time of the last write to the data, ms since the epoch; 0 = never."""
        return self._durable.metadata.saved_ms

    @property
    def restoring(self) -> bool:
        """Whether a restore began and did not finish, so that the data is between two batches."""
        return self._durable.metadata.restoring

    @contextmanager
    def view(self) -> Iterator[StateView]:
        """Gives a view of the committed data as of one moment, which any thread may read.

        Raises:
            NotUpToBoundError: if the store is being restored.
        """
        with self._lock:
            self._check_open()
            metadata = self._durable.metadata
            if metadata.restoring:
                raise NotUpToBoundError(
                    f"store {self.name} is being restored.", fix="ask again when the restore is finished."
                )
            view = StateView(metadata, self._durable.database.cursor())
            self._views.add(view)
        try:
            yield view
        finally:
            view.close()

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

    def put_many(self, keys: pa.BinaryArray, values: pa.BinaryArray) -> None:
        """Stages many writes; a null value deletes. The last value of a repeated key counts."""
        if keys.null_count:
            raise ValueError(f"{keys.null_count} keys are null; nothing was staged.")
        if len(keys) != len(values):
            raise ValueError(f"there are {len(keys)} keys and {len(values)} values; nothing was staged.")
        self._claim()
        for at in range(0, len(keys), _KEYS_PER_SLICE):
            part = keys.slice(at, _KEYS_PER_SLICE), values.slice(at, _KEYS_PER_SLICE)
            self._uncommitted.overlay.put_many(
                part[0].to_pylist(), part[1].to_pylist(), _payload_bytes(*part)
            )
            if self._uncommitted.exceeds_share():
                self._spill()

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

    def _claim(self) -> None:
        """Makes the thread of the first staged write the only writer until commit or rollback."""
        if not self._uncommitted.owned_by_this_thread():
            self._check_open()
            self._uncommitted.claim()

    def _spill(self) -> None:
        """Moves the staged writes to disk; readers of other threads see them there."""
        with self._lock:
            self._uncommitted.spill()

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
            gone = unstaged_keys(base, overlay.scan(low, high, reverse=False))
            yield from changes_of_pairs((key, None) for key in gone)

    def rollback(self) -> None:
        """Discards the staged writes."""
        self._check_open()
        with self._lock:
            self._uncommitted.clear()

    def _check_nothing_staged(self, method: str) -> None:
        self._check_open()
        if not self._uncommitted.overlay.empty:
            raise StateError(
                f"{method}() of store {self.name} was called while writes are staged.",
                fix=f"commit or roll back first; call {method}() before the writes of a batch.",
            )

    # ------------------------------------------------------------------ commit

    def commit(
        self,
        changelog_offsets: Mapping[TopicPartition, int],
        *,
        batch: BatchRecord | None = None,
        forget_offsets: bool = False,
    ) -> None:
        """Makes staged writes and changelog offsets durable and visible, all or nothing.

        Args:
            changelog_offsets: the offset *after* the last changelog record of the staged writes, by
                partition.
            batch: the micro-batch that made the writes.
            forget_offsets: remove all changelog offsets, so that the store is restored from the beginning.

        Raises:
            ValueError: if there is no offset, or an offset is None or negative. Nothing was written.
            OffsetWentBackError: if an offset is lower than the one stored. Nothing was written.
            StateError, StateCorruptedError: if the write failed. The store is closed, and the staged writes
                are lost.
        """
        self._check_open()
        metadata = next_metadata(
            self.name,
            self._durable.metadata,
            changelog_offsets,
            batch,
            forget_offsets=forget_offsets,
        )
        with self._lock:
            writes, overlay = self._durable.database.new_batch(), self._uncommitted.overlay
            metadata = replace(metadata, restoring=False)
            if overlay.spilled is None:
                self._durable.apply(writes, overlay.rows, overlay.ranges, overlay.bytes, metadata)
                self._uncommitted.clear()
            else:
                spill_id = self._uncommitted.seal()
                self._begin_applying(spill_id, overlay.ranges, metadata)
                self._uncommitted.hand_over()
                self._apply_spilled(spill_id, metadata, ())

    def restore_chunk(
        self,
        keys: pa.BinaryArray,
        values: pa.BinaryArray,
        changelog_offsets: Mapping[TopicPartition, int],
        *,
        batch: BatchRecord | None = None,
        done: bool | None = None,
    ) -> None:
        """Writes records of the changelog to the data, with the offset to continue from.

        A big chunk is written as a file of sorted rows, which is on disk before the offset. If the process is
        killed in between, data is ahead of its offset, and reading the same records again changes nothing.

        Args:
            keys: keys of the records. The last value of a repeated key counts.
            values: their values; null deletes the key.
            changelog_offsets: as in `commit`; may repeat the stored ones.
            batch: the micro-batch whose state the data is after this chunk.
            done: whether the data is the state of a batch after this chunk, or between two batches. None =
                it is if ``batch`` is given; a chunk without rows leaves it as it is.

        Raises:
            ValueError, OffsetWentBackError, StateError, StateCorruptedError: as `commit`.
        """
        self._check_nothing_staged("restore_chunk")
        with self._lock:
            self._durable.restore(self.name, keys, values, changelog_offsets, batch, done)

    def freeze(self, target: Path) -> None:
        """Links the database into ``target``, with the committed data of this moment and nothing else.

        The owner may continue at once: what it writes later does not reach ``target``. Tables that RocksDB is
        still writing are linked, too, but the manifest in ``target`` does not name them; see `files.freeze`.

        Args:
            target: an existing, empty folder on the same file system.

        Raises:
            StateError: if writes are staged or pending, or the data is between two batches. A copy must
                never hold changes that no token has confirmed.
            StateLockedError: if a flush or a compaction changed the files meanwhile. Call again, with
                another empty folder.
            OSError: if the files cannot be linked.
        """
        self._check_nothing_staged("freeze")
        metadata = self._durable.metadata
        if metadata.restoring or metadata.applying is not None or self._headers():
            raise StateError(
                f"freeze() of store {self.name} was called while changes are pending or being restored.",
                fix="promote or drop the pending changes first.",
            )
        freeze(self.path / "db", target, copy_logs=True)

    # ------------------------------------------------------------------ pending batches

    def persist_pending(self, record: BatchRecord) -> list[pa.RecordBatch] | None:
        """Moves the staged writes to disk as pending changes of a task attempt.

        The data does not change. Pending changes of the same attempt are replaced.

        Args:
            record: the batch and attempt.

        Returns:
            The changes, as from `staged_changes`; None if they exceed the memory, so that only
            `pending_changes` has them.

        Raises:
            StateError, StateCorruptedError: as `commit`.
        """
        self._check_open()
        with self._lock:
            overlay = self._uncommitted.overlay
            header = PendingHeader(
                PendingBatch(record, self._durable.metadata.batch, overlay.size_bytes),
                overlay.ranges,
            )
            if overlay.spilled is not None:
                header = replace(header, spill_id=self._uncommitted.seal())
                failpoints.reach("state.after_seal")
            writes, others = self._durable.database.new_batch(), []
            for old in self._headers():
                if old.id == header.id:
                    remove_attempt(writes, old)
                else:
                    others.append(old)
            changes = [] if header.spill_id else list(change_batches(overlay.rows))
            add_attempt(writes, header, changes)
            self._durable.write(writes)
            if header.spill_id:
                self._uncommitted.hand_over()
            else:
                changes = [*self._range_deletes(overlay), *changes]
                self._uncommitted.clear()
            self._remove_spills([*others, header])
        return None if header.spill_id else changes

    def pending_changes(self, record: BatchRecord) -> Iterator[pa.RecordBatch]:
        """Yields the changes of a pending attempt as `staged_changes` did, from disk.

        Only a few MB of them are in memory at a time.

        Args:
            record: the attempt; it was computed on the committed state.

        Raises:
            StateMismatchError: if that attempt is not pending, or was computed on other state.
        """
        header = find_promotable(self.name, self._headers(), record, self._durable.metadata)
        with read_overlay(self._durable.database, header, self.path, self.config) as overlay:
            yield from self._changes(overlay)

    def pending(self) -> list[PendingBatch]:
        """Returns the attempts whose changes are pending, in the order of batches."""
        return [header.batch for header in self._headers()]

    def promote(self, record: BatchRecord, changelog_offsets: Mapping[TopicPartition, int]) -> None:
        """Applies the pending changes of the attempt that Kafka holds.

        The pending changes of all other attempts are dropped.

        Args:
            record: the attempt. Its event time may be later than the one that was made pending.
            changelog_offsets: as in `commit`.

        Raises:
            StateMismatchError: if that attempt is not pending, or was computed on other state. Nothing was
                changed.
            ValueError, OffsetWentBackError, StateError, StateCorruptedError: as `commit`.
        """
        self._check_nothing_staged("promote")
        durable, headers = self._durable, self._headers()
        header = find_promotable(self.name, headers, record, durable.metadata)
        metadata = next_metadata(self.name, durable.metadata, changelog_offsets, record)
        with self._lock:
            if header.spill_id:
                self._begin_applying(header.spill_id, header.ranges, metadata)
                self._apply_spilled(header.spill_id, metadata, headers)
                return
            writes, rows = durable.database.new_batch(), read_rows(durable.database, header)
            for any_header in headers:
                remove_attempt(writes, any_header)
            durable.apply(writes, rows, header.ranges, header.batch.size_bytes, metadata)
            self._remove_spills(())

    def drop_pending(self, except_attempts: Sequence[str] = ()) -> None:
        """Drops the pending changes of all attempts except those named, and what dead attempts spilled."""
        headers = self._headers()
        kept = [each for each in headers if each.batch.record.task_attempt_id in except_attempts]
        with self._lock:
            if len(kept) < len(headers):
                writes = self._durable.database.new_batch()
                for header in headers:
                    if header not in kept:
                        remove_attempt(writes, header)
                self._durable.write(writes)
            self._remove_spills(kept)

    def _headers(self) -> list[PendingHeader]:
        self._check_open()
        return read_headers(self._durable.database)

    def _remove_spills(self, kept: Iterable[PendingHeader]) -> None:
        """Removes spilled rows that neither these attempts nor the running transaction own."""
        remove_spills(self.path, keep={self._uncommitted.spill_id, *(each.spill_id for each in kept)})

    # ------------------------------------------------------------------ large batches

    def _begin_applying(self, spill_id: str, ranges: Ranges, target: StoreMetadata) -> None:
        """Records durably that spilled rows are being written to the data; deletes the ranges.

        crash before ⇒ the attempt is still pending. crash after ⇒ `open` continues with `_apply_spilled`.
        """
        applying = Applying(spill_id, target.offsets, target.batch)
        self._durable.begin_applying(ranges, applying)
        failpoints.reach("state.apply_began")

    def _finish_applying(self, applying: Applying) -> None:
        """Finishes what another process began, before anybody reads."""
        target = replace(
            self._durable.metadata,
            offsets=applying.offsets,
            batch=applying.batch,
            restoring=False,
            applying=None,
        )
        self._apply_spilled(applying.spill_id, target, self._headers())

    def _apply_spilled(self, spill_id: str, target: StoreMetadata, headers: Iterable[PendingHeader]) -> None:
        """Writes spilled rows to the data, then the metadata, and removes all pending attempts.

        crash in between ⇒ `open` calls this again; writing the same rows twice changes nothing.
        """
        try:
            with closing(SpilledRows.open(self.path, spill_id, self.config)) as spilled:
                self._durable.apply_sorted(spilled.scan(None, None, reverse=False))
            failpoints.reach("state.apply_written")
            writes = self._durable.database.new_batch()
            for header in headers:
                remove_attempt(writes, header)
            self._durable.end_applying(writes, target)
        except BaseException:
            self._shut_down()  # the data is between two batches, so nobody may read it
            raise
        failpoints.reach("state.apply_ended")
        self._remove_spills(self._headers())


class StateHandle:
    """The part of a store that a processor may use. Committing is refused, as in Kafka Streams (KIP-1035)."""

    def __init__(self, store: TransactionalStateStore) -> None:
        # The store's own methods, because a second call for each key would be slow.
        self.get = store.get
        self.put = store.put
        self.delete = store.delete
        self.delete_range = store.delete_range
        self.range = store.range
        self.prefix_scan = store.prefix_scan
        self.get_many = store.get_many
        self.put_many = store.put_many

    def commit(self, *_args: object, **_named: object) -> NoReturn:
        raise _refused("commit")

    def rollback(self) -> NoReturn:
        raise _refused("rollback")

    def close(self) -> NoReturn:
        raise _refused("close")


def _refused(method: str) -> StateError:
    return StateError(
        f"{method}() of a state store was called by a processor.",
        fix="remove the call: the operator commits the state in the transaction of the micro-batch.",
    )


def _payload_bytes(*columns: pa.Array) -> int | None:
    """Returns the number of bytes of all keys and values; None if Arrow cannot tell for one of the types."""
    if not all(pa.types.is_binary(column.type) for column in columns):
        return None
    return sum(pc.sum(pc.binary_length(column)).as_py() or 0 for column in columns)
