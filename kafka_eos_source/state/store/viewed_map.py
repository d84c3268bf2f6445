"""Views of a store, which threads other than its owner's may read."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from weakref import WeakSet

from kafka_eos_source.errors import NotUpToBoundError
from kafka_eos_source.state.model import StoreIdentity
from kafka_eos_source.state.store.config import StoreConfig
from kafka_eos_source.state.store.durable import DurableState
from kafka_eos_source.state.store.scans import Cursor
from kafka_eos_source.state.store.staged_map import StagedMap
from kafka_eos_source.state.store.uncommitted import UncommittedWrites
from kafka_eos_source.state.store.views import CommittedView, StateView


class ViewedMap(StagedMap):
    """A `StagedMap` with views of its committed data.

    Args:
        path, identity, uncommitted, durable: as in `StagedMap`.
        config: settings of the store.
    """

    def __init__(
        self,
        path: Path,
        identity: StoreIdentity,
        config: StoreConfig,
        uncommitted: UncommittedWrites,
        durable: DurableState,
    ) -> None:
        super().__init__(path, identity, uncommitted, durable)
        self.config = config
        self._views: WeakSet[StateView] = WeakSet()

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
            view = CommittedView(metadata, Cursor(self._durable.database.cursor()))
            self._views.add(view)
        try:
            yield view
        finally:
            view.close()

    def _close_views(self) -> None:
        for view in list(self._views):
            view.close()
