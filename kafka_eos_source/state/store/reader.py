"""Reading a store that another process has open."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType

from kafka_eos_source.errors import (
    NotUpToBoundError,
    StateCorruptedError,
    StateError,
    StateMismatchError,
)
from kafka_eos_source.model import TopicPartition
from kafka_eos_source.state.model import BatchRecord, PendingBatch, StoreIdentity
from kafka_eos_source.state.store import files, records
from kafka_eos_source.state.store.config import StoreConfig
from kafka_eos_source.state.store.files import is_owned_elsewhere, owner_of
from kafka_eos_source.state.store.folder import check_version
from kafka_eos_source.state.store.frozen import rewritten
from kafka_eos_source.state.store.opening import open_frozen
from kafka_eos_source.state.store.ownership import has_owner
from kafka_eos_source.state.store.pending import PendingHeader, read_headers, read_overlay
from kafka_eos_source.state.store.scans import Cursor
from kafka_eos_source.state.store.views import CommittedView, PromotedView, StateView


class CommittedReader(CommittedView):
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
        cursor = Cursor(self._database.cursor())
        view = PromotedView(metadata, cursor, overlay)
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
            metadata = records.decode_metadata(self._database.scan(family="offsets"))
            self.identity = _checked_identity(self.path, metadata)
            super().__init__(metadata, Cursor(self._database.cursor()))
        except BaseException:
            self._database.close()
            raise


def _checked_identity(path: Path, metadata: records.StoreMetadata) -> StoreIdentity:
    if metadata.identity is None:
        raise StateCorruptedError(
            f"the store {path} does not record which state it holds.", fix=files.RESTORE_FIX
        )
    if metadata.restoring:
        raise _unfinished(path, metadata)
    return metadata.identity


def _unfinished(path: Path, metadata: records.StoreMetadata) -> NotUpToBoundError:
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
