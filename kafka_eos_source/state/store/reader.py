"""Reading a store that another process has open."""

from __future__ import annotations

import shutil
import tempfile
import threading
from collections.abc import Mapping
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
from kafka_eos_source.state.store import kept, records
from kafka_eos_source.state.store.database import Database
from kafka_eos_source.state.store.folder import check_version
from kafka_eos_source.state.store.overlay import Overlay
from kafka_eos_source.state.store.views import CommittedView, Cursor, StateView, UncommittedView


class CommittedReader(CommittedView):
    """The committed data of a store at the moment of opening, or of the last `refresh`. Takes no lock.

    Made by `TransactionalStateStore.open_read_only`. Works because commits are in RocksDB's log, which
    another process can read; a log that is written to at the same time ends for it with the last whole
    commit.

    Raises:
        StateCorruptedError, StateFormatError: as `TransactionalStateStore.open`.
        StateError: there is no store.
        NotUpToBoundError: it is being restored; ask again.
    """

    identity: StoreIdentity

    def __init__(self, path: Path) -> None:
        if not check_version(path) or not (path / "db" / "CURRENT").exists():
            raise StateError(f"no store in {path}")
        self.path = path
        self._logs = Path(tempfile.mkdtemp(prefix="kafka-eos-reader-"))
        try:
            self._read()
        except BaseException:
            shutil.rmtree(self._logs, ignore_errors=True)
            raise

    def refresh(self) -> None:
        """The data as it is now. Scans and views that are open are closed. Raises: as the constructor."""
        self._let_go()
        self._read()

    def close(self) -> None:
        """Idempotent."""
        self._let_go()
        shutil.rmtree(self._logs, ignore_errors=True)

    def pending(self) -> list[PendingBatch]:
        """The attempts that are kept beside the data, by batch."""
        return [header.batch for header in kept.headers(self._database)]

    def promoted(self, record: BatchRecord, changelog_offsets: Mapping[TopicPartition, int]) -> StateView:
        """The data as it will be once the owner promotes this attempt, which is in Kafka already.

        Args:
            record: of that attempt, as `TransactionalStateStore.promote` takes it.
            changelog_offsets: where the changelog ends with it.

        Raises:
            StateMismatchError: that attempt is not kept.
            StateCorruptedError: its rows are not readable.
        """
        header = next(
            (h for h in kept.headers(self._database) if h.batch.record.attempt == record.attempt), None
        )
        if header is None:
            raise StateMismatchError(
                f"the store {self.path} keeps no changes of batch {record.batch_id}, attempt {record.attempt}"
            )
        overlay = Overlay()
        for low, high in header.ranges.spans:
            overlay.delete_range(low, high)
        rows = kept.rows(self._database, header)
        overlay.put_many(list(rows), list(rows.values()))
        committed = self._committed
        position = {**committed.position, **header.position}
        committed = replace(
            committed,
            batch=record,
            offsets=MappingProxyType({**committed.offsets, **changelog_offsets}),
            position=MappingProxyType(position),
        )
        view = UncommittedView(
            committed,
            Cursor(self._database.cursor()),
            overlay,
            lambda: committed.position,
            lambda: None,
            threading.RLock(),
        )
        self._promoted.append(view)
        return view

    def _let_go(self) -> None:
        for view in self._promoted:
            view.close()
        super().close()
        self._database.close()

    def _read(self) -> None:
        self._promoted: list[StateView] = []
        self._database = Database.open_read_only(self.path / "db", self._logs)
        try:
            committed = records.decode(self._database.scan(family="offsets"))
            self.identity = _readable(self.path, committed)
            super().__init__(committed, Cursor(self._database.cursor()))
        except BaseException:
            self._database.close()
            raise


def _readable(path: Path, committed: records.Committed) -> StoreIdentity:
    if committed.identity is None:
        raise StateCorruptedError(f"the store {path} does not say whose it is")
    if committed.restoring:
        raise NotUpToBoundError(f"the store {path} is being restored", fix="ask again")
    return committed.identity
