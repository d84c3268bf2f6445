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
from kafka_eos_source.state.store import records
from kafka_eos_source.state.store.config import StoreConfig
from kafka_eos_source.state.store.database import Database
from kafka_eos_source.state.store.folder import check_version
from kafka_eos_source.state.store.pending import read_headers, read_overlay
from kafka_eos_source.state.store.scans import Cursor
from kafka_eos_source.state.store.spill import is_removed
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
            StateCorruptedError: if its rows cannot be decoded.
        """
        wanted, headers = record.task_attempt_id, read_headers(self._database)
        header = next((each for each in headers if each.batch.record.task_attempt_id == wanted), None)
        if header is None or is_removed(self.path, header.spill_id):
            raise StateMismatchError(
                f"the store {self.path} has no pending changes of batch {record.batch_id}, attempt {wanted}.",
                fix="read again: its owner may have promoted them meanwhile.",
            )
        overlay = self._resources.enter_context(
            read_overlay(self._database, header, self.path, StoreConfig(), self._logs)
        )
        metadata = replace(
            self._metadata,
            batch=record,
            offsets=MappingProxyType({**self._metadata.offsets, **changelog_offsets}),
        )
        cursor = Cursor(self._database.cursor())
        view = PromotedView(metadata, cursor, overlay)
        self._promoted.append(view)
        return view

    def _release(self) -> None:
        for view in self._promoted:
            view.close()
        self._resources.close()
        super().close()
        self._database.close()

    def _open(self) -> None:
        self._promoted: list[StateView] = []
        self._resources = ExitStack()
        self._database = Database.open_read_only(self.path / "db", self._logs)
        try:
            metadata = records.decode(self._database.scan(family="offsets"))
            self.identity = _checked_identity(self.path, metadata)
            super().__init__(metadata, Cursor(self._database.cursor()))
        except BaseException:
            self._database.close()
            raise


def _checked_identity(path: Path, metadata: records.StoreMetadata) -> StoreIdentity:
    if metadata.identity is None:
        raise StateCorruptedError(
            f"the store {path} does not record which state it holds.", fix=records.RESTORE_FIX
        )
    if metadata.applying is not None:
        raise NotUpToBoundError(
            f"the owner of the store {path} is applying the changes of a large batch.",
            fix="ask again when it has finished.",
        )
    if metadata.restoring:
        raise NotUpToBoundError(
            f"the store {path} is being restored.", fix="ask again when the restore is finished."
        )
    return metadata.identity
