"""Reading a store that another process has open."""

from __future__ import annotations

import shutil
import tempfile
from pathlib import Path

from kafka_eos_source.errors import NotUpToBoundError, StateCorruptedError, StateError
from kafka_eos_source.state import records
from kafka_eos_source.state.database import Database
from kafka_eos_source.state.folder import check_version
from kafka_eos_source.state.model import StoreIdentity
from kafka_eos_source.state.views import CommittedView, Cursor


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
        """The data as it is now. Scans that are open are closed. Raises: as the constructor."""
        self._scans.close()
        self._cursor.close()
        self._database.close()
        self._read()

    def close(self) -> None:
        """Idempotent."""
        super().close()
        self._database.close()
        shutil.rmtree(self._logs, ignore_errors=True)

    def _read(self) -> None:
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
