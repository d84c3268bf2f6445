"""Reading a store from outside its owner, as of one moment (KIP-892): in other threads and other processes.

All views show committed data. KIP-892's *read_uncommitted* has no counterpart: what is staged lives in the
memory of a task, which ends with its micro-batch, and no other code runs in that process for users.
"""

from __future__ import annotations

import shutil
import tempfile
import threading
from abc import ABC, abstractmethod
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType, TracebackType
from typing import TypeVar

import pyarrow as pa

from kafka_eos_source.errors import (
    NotUpToBoundError,
    StateCorruptedError,
    StateError,
    StateMismatchError,
)
from kafka_eos_source.model import TopicPartition
from kafka_eos_source.state.encoding.layout import upper_bound
from kafka_eos_source.state.model import BatchRecord, PendingBatch, StoreIdentity
from kafka_eos_source.state.store import durable, files
from kafka_eos_source.state.store.durable import PendingHeader, StoreMetadata, read_headers, read_overlay
from kafka_eos_source.state.store.files import has_owner, is_owned_elsewhere, owner_of, rewritten
from kafka_eos_source.state.store.opening import check_version, open_frozen
from kafka_eos_source.state.store.overlay import MISSING, Missing, Overlay, merge
from kafka_eos_source.state.store.rocksdb import Cursor, Scan, Scans, StoreConfig


class Reads(ABC):
    """What every store and view reads, in terms of `range` and of the metadata of the last commit."""

    @abstractmethod
    def range(self, low: bytes | None = None, high: bytes | None = None, *, reverse: bool = False) -> Scan:
        """Returns the pairs as they are now, in key order.

        Args:
            low: smallest key; None = unbounded.
            high: end of the range (excluded); None = unbounded.
            reverse: from the last to the first pair.
        """

    def prefix_scan(self, prefix: bytes) -> Scan:
        """Returns the pairs whose key begins with ``prefix``, in key order."""
        return self.range(prefix, upper_bound(prefix))

    def all(self) -> Scan:
        """Returns all pairs in key order."""
        return self.range()

    @abstractmethod
    def _committed(self) -> StoreMetadata:
        """Returns the metadata of the last commit."""

    def next_offset(self, tp: TopicPartition) -> int | None:
        """Returns the changelog offset from which to continue; None if it is not recorded."""
        return self._committed().offsets.get(tp)

    def last_batch(self) -> BatchRecord | None:
        """Returns the micro-batch whose state the committed data is."""
        return self._committed().batch


_View = TypeVar("_View", bound="StateView")


class StateView(Reads):
    """Read-only access to a store as of one moment; a context manager.

    While a view is open, RocksDB cannot free the disk space of what it shows.

    Args:
        metadata: of the commit that the view shows.
        cursor: the data of that commit.
        overlay: changes on top of it: those of an attempt that the commit token names. Only one thread may
            then read the view. None = only the committed data.
    """

    def __init__(self, metadata: StoreMetadata, cursor: Cursor, overlay: Overlay | None = None) -> None:
        self._metadata = metadata
        self._cursor = cursor
        self._overlay = overlay
        self._scans = Scans()
        self._lock = threading.Lock()

    def get(self, key: bytes) -> bytes | None:
        """Returns the value of a key, or None.

        Raises:
            StoreClosedError: if the view or its store is closed.
        """
        value = MISSING if self._overlay is None else self._overlay.get(key)
        return self._cursor.get(key) if isinstance(value, Missing) else value

    def get_many(self, keys: pa.BinaryArray) -> pa.BinaryArray:
        """Returns the value of each key, null for a missing key."""
        return pa.array([self.get(key) for key in keys.to_pylist()], pa.binary())

    def range(self, low: bytes | None = None, high: bytes | None = None, *, reverse: bool = False) -> Scan:
        if low is not None and high is not None and low >= high:
            return self._scans.track(iter(()))
        pairs = self._cursor.scan(low, high, reverse=reverse)
        if self._overlay is not None:
            staged = self._overlay.scan(low, high, reverse=reverse)
            pairs = merge(staged, pairs, self._overlay.ranges, reverse=reverse)
        return self._scans.track(pairs)

    def _committed(self) -> StoreMetadata:
        return self._metadata

    def close(self) -> None:
        """Closes the view and its scans. May be called again."""
        with self._lock:
            self._scans.close()
            self._cursor.close()

    def __enter__(self: _View) -> _View:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


# ---------------------------------------- reading a store that another process has open


class CommittedReader(StateView):
    """Committed data of a store as of opening, or of the last `refresh`. It takes no lock.

    `TransactionalStateStore.open_read_only` creates it. Another process can read the owner's commits because
    they are in RocksDB's log; if the owner is writing to the log, the reader ends with the last whole commit.

    Raises:
        StateCorruptedError, StateFormatError: as `TransactionalStateStore.open`.
        StateError: if the folder has no store.
        StateLockedError: if the owner rewrote its files during every try to read them.
        NotUpToBoundError: if the store is being restored; ask again later.
    """

    identity: StoreIdentity

    def __init__(self, path: Path) -> None:
        if not check_version(path) or not (path / "db" / "CURRENT").exists():
            raise StateError(f"there is no state store in {path}.", fix="correct the path.")
        self.path = path
        self._logs = Path(tempfile.mkdtemp(prefix="kafka-eos-reader-"))
        try:
            self._open()
        except BaseException:
            shutil.rmtree(self._logs, ignore_errors=True)
            raise

    def refresh(self) -> None:
        """Reads the newest commit and closes open scans; raises what the constructor raises."""
        self._release()
        self._open()

    def close(self) -> None:
        """Closes the reader, its scans and views. May be called again."""
        self._release()
        shutil.rmtree(self._logs, ignore_errors=True)

    def pending(self) -> list[PendingBatch]:
        """Returns the attempts whose changes are pending, in the order of batches."""
        return [header.batch for header in read_headers(self._database)]

    def promoted(self, record: BatchRecord, changelog_offsets: Mapping[TopicPartition, int]) -> StateView:
        """Returns the data as it will be once the owner promotes a pending attempt.

        Kafka holds the attempt already.

        Args:
            record: the attempt, as in `TransactionalStateStore.promote`.
            changelog_offsets: end of the changelog that includes the attempt's changes, by partition.

        Raises:
            StateMismatchError: if that attempt is not pending.
            StateCorruptedError: if its rows are missing or cannot be decoded.
            StateLockedError: if the owner promoted or dropped the attempt since this reader was opened. Call
                `refresh` and try again.
        """
        wanted, headers = record.task_attempt_id, read_headers(self._database)
        header = next((each for each in headers if each.batch.record.task_attempt_id == wanted), None)
        if header is None:
            raise StateMismatchError(
                f"the store {self.path} has no pending changes of batch {record.batch_id}, attempt {wanted}.",
                fix="read again: its owner may have promoted them meanwhile.",
            )
        try:
            overlay = self._resources.enter_context(
                read_overlay(self._database, header, self.path, StoreConfig(), self._logs)
            )
        except (StateError, StateCorruptedError) as error:
            # Rows on disk stay until the owner has removed the header, and are no damage afterwards.
            if self._is_still_pending(header):
                raise
            raise rewritten(self.path / "db") from error
        metadata = replace(
            self._metadata,
            batch=record,
            offsets=MappingProxyType({**self._metadata.offsets, **changelog_offsets}),
        )
        cursor = self._database.cursor()
        view = StateView(metadata, cursor, overlay)
        self._promoted.append(view)
        return view

    def _is_still_pending(self, header: PendingHeader) -> bool:
        """Returns whether an attempt is pending now, and not only when this reader was opened."""
        database = open_frozen(self.path / "db", self._logs)
        try:
            now = [(each.id, each.spill_id) for each in read_headers(database)]
            return (header.id, header.spill_id) in now
        finally:
            database.close()

    def _release(self) -> None:
        for view in self._promoted:
            view.close()
        self._resources.close()
        super().close()
        self._database.close()

    def _open(self) -> None:
        self._promoted: list[StateView] = []
        self._resources = ExitStack()
        self._database = open_frozen(self.path / "db", self._logs)
        try:
            metadata = durable.decode_metadata(self._database.scan(family="offsets"))
            self.identity = _checked_identity(self.path, metadata)
            super().__init__(metadata, self._database.cursor())
        except BaseException:
            self._database.close()
            raise


def _checked_identity(path: Path, metadata: durable.StoreMetadata) -> StoreIdentity:
    if metadata.identity is None:
        raise StateCorruptedError(
            f"the store {path} does not record which state it holds.", fix=files.RESTORE_FIX
        )
    if metadata.restoring:
        raise _unfinished(path, metadata)
    return metadata.identity


def _unfinished(path: Path, metadata: durable.StoreMetadata) -> NotUpToBoundError:
    """Returns the error for a store whose data is between two batches."""
    database, owner = path / "db", owner_of(path / "db")
    what = "restored" if metadata.applying is None else "changed by a large batch, step by step"
    message = f"the store {path} is being {what}"
    if has_owner(database):
        return NotUpToBoundError(f"{message} by {owner}.", fix="ask again when that has finished.")
    if is_owned_elsewhere(database):
        return NotUpToBoundError(
            f"{message}. {owner.capitalize()} had it open last, and did not close it.",
            fix="ask again later. If that process has ended, start the query, which finishes it.",
        )
    return NotUpToBoundError(
        f"{message}, but the process that began that has ended.",
        fix="start the query, which finishes it when it opens the store; or set kafka.bootstrap.servers, and "
        "state.dir not, to read the changelog.",
    )
