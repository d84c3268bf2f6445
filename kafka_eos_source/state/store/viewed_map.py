"""Views of a store, which threads other than its owner's may read."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from weakref import WeakSet

from kafka_eos_source.errors import NotUpToBoundError, ViewInvalidatedError
from kafka_eos_source.model import TopicPartition
from kafka_eos_source.state.model import StoreIdentity
from kafka_eos_source.state.store.config import Isolation, StoreConfig, check_isolation
from kafka_eos_source.state.store.durable import DurableState
from kafka_eos_source.state.store.scans import Cursor
from kafka_eos_source.state.store.staged_map import StagedMap
from kafka_eos_source.state.store.uncommitted import UncommittedWrites
from kafka_eos_source.state.store.views import CommittedView, StateView, UncommittedView, check_bound


class ViewedMap(StagedMap):
    """A `StagedMap` with views of its committed or staged data.

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
    def view(
        self,
        isolation: Isolation | None = None,
        *,
        at_least: Mapping[TopicPartition, int] | None = None,
    ) -> Iterator[StateView]:
        """Gives a view of the store as of one moment, which any thread may read.

        Args:
            isolation: ``read_committed`` or ``read_uncommitted``; None = ``config.query_isolation``.
            at_least: input offset that the committed data must reflect, by partition (KIP-796).

        Raises:
            NotUpToBoundError: if the data does not reflect these offsets yet, or the store is being restored.
            InvalidOptionError: if the isolation level does not exist.
        """
        level = isolation or self.config.query_isolation
        check_isolation(level)
        with self._lock:
            self._check_open()
            metadata = self._durable.metadata
            if metadata.restoring:
                raise NotUpToBoundError(
                    f"store {self.name} is being restored.", fix="ask again when the restore is finished."
                )
            check_bound(metadata.position, at_least)
            cursor = Cursor(self._durable.database.cursor())
            view: StateView
            if level == "read_uncommitted":
                uncommitted = self._uncommitted
                check_valid = self._validity_check(uncommitted.discarded)
                view = UncommittedView(metadata, cursor, uncommitted.overlay, check_valid, self._lock)
            else:
                view = CommittedView(metadata, cursor)
            self._views.add(view)
        try:
            yield view
        finally:
            view.close()

    def _validity_check(self, discarded: int) -> Callable[[], None]:
        """Returns the check of an uncommitted view; ``discarded`` is the count at its start."""

        def check() -> None:
            self._check_open()
            if self._uncommitted.discarded != discarded:
                raise ViewInvalidatedError(
                    f"the writes that a read_uncommitted view of store {self.name} showed were rolled back, "
                    "or were committed from disk.",
                    fix="open a new view.",
                )

        return check

    def _close_views(self) -> None:
        for view in list(self._views):
            view.close()
