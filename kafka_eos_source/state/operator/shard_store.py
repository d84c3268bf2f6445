"""Opens the store of a shard at the state of a committed batch, from the nearest place that has it.

Tasks, reads of the changelog and ``kafka-eos state restore`` use this one path::

    local store ──────────usable────────────┐
      │ none, not usable, or far behind     ▼
      └──▶ newest snapshot that fits ──▶ rest of the changelog ──▶ state of the batch
             │ none                         ▲
             └──▶ empty store ──────────────┘
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable, Collection
from contextlib import ExitStack, closing, nullcontext
from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path

from kafka_eos_source.errors import InvalidOptionError
from kafka_eos_source.model import TopicPartition
from kafka_eos_source.runtime import failpoints
from kafka_eos_source.runtime.deadline import Deadline
from kafka_eos_source.runtime.file_systems import without_secrets
from kafka_eos_source.state.changelog.recovery import (
    Reason,
    Restored,
    RestoreProgress,
    WipeNeeded,
    open_restored,
    plan_restore,
)
from kafka_eos_source.state.changelog.restore import ChangelogSource, restore
from kafka_eos_source.state.model import BatchRecord, Owner, PendingBatch, StoreIdentity
from kafka_eos_source.state.snapshots.download import downloaded, install
from kafka_eos_source.state.snapshots.storage import Manifest, SnapshotStorage
from kafka_eos_source.state.store.rocksdb import StoreConfig
from kafka_eos_source.state.store.transactional import TransactionalStateStore

#: Reads the changelog into the store, up to an offset; None = to its end.
ReadChangelog = Callable[[int | None], Restored | WipeNeeded]

NOTHING_READ = Restored(0, 0, Reason.NONE, 0.0)


def open_shard_store(
    path: str | os.PathLike[str],
    identity: StoreIdentity,
    config: StoreConfig,
    source: ChangelogSource,
    bring: Callable[[TransactionalStateStore, ReadChangelog], Restored | WipeNeeded],
    *,
    end: int | None,
    deadline: Deadline,
    progress: RestoreProgress,
    delete_retention_ms: int | None,
    snapshots: SnapshotUse | None = None,
    end_transaction: Callable[[Deadline], None] | None = None,
    accepted_start: int = 0,
) -> tuple[TransactionalStateStore, Restored]:
    """Opens the store of a shard and brings it to a committed state; replaces unusable state, once.

    Args:
        path: folder of the store.
        identity: which state it is.
        config: of the store.
        source: reader of the shard's changelog partition.
        bring: brings the open store to the state, usually by `bring_to_batch`. It is called again with
            another store if that one cannot be used.
        end: committed offset of the partition; None = there is no token, so no snapshot can be checked.
        deadline: for the answers of the brokers. It begins again when a snapshot may have been downloaded.
        progress: updated while the changelog is read; says whether the store began with a snapshot.
        delete_retention_ms: ``delete.retention.ms`` of the changelog topic; None = state of any age is used.
        snapshots: from where a store may begin; None = not from snapshots.
        end_transaction, accepted_start: as in `restore`.

    Returns:
        The open store without pending changes, and what was read.

    Raises:
        KafkaEosError: as `open_restored` and `restore` raise it; the store is closed then.
    """
    tp = TopicPartition(identity.changelog_topic, identity.shard)
    owner = Owner(identity.application_id, identity.store, identity.shards)

    def log_start() -> int:
        return source.readable(deadline)[0]

    found: ShardSnapshots | None = None
    if snapshots is not None and end is not None and identity.topic_id:
        found = ShardSnapshots(snapshots, Path(path), identity, end, log_start, delete_retention_ms)
    with nullcontext() if found is None else closing(found):

        def bring_store(store: TransactionalStateStore) -> Restored | WipeNeeded:
            limit = deadline

            def read(until: int | None) -> Restored | WipeNeeded:
                nonlocal limit
                if found is not None:
                    replaced = found.replaces(store.next_offset(tp))
                    if replaced is not None:
                        return replaced
                    # The download may have used up the deadline. Reading the changelog gets the full time.
                    limit = Deadline.after_seconds(deadline.budget_seconds)
                return restore(
                    store,
                    tp,
                    until,
                    source,
                    owner=owner,
                    deadline=limit,
                    progress=progress,
                    end_transaction=end_transaction,
                    delete_retention_ms=delete_retention_ms,
                    accepted_start=accepted_start,
                    has_snapshots=found is not None,
                )

            outcome = bring(store, read)
            if isinstance(outcome, Restored):
                store.drop_pending()
            return outcome

        install = None if found is None else found.install
        return open_restored(path, identity, config, bring_store, progress, install)


def bring_to_batch(
    store: TransactionalStateStore, tp: TopicPartition, batch: BatchRecord, end: int, read: ReadChangelog
) -> tuple[Action, Restored | WipeNeeded]:
    """Brings a store to the state of a committed batch with the cheapest action.

    Args:
        store: the store of a shard.
        tp: the shard's partition of the changelog.
        batch: batch and task attempt that the token names.
        end: committed offset of the partition.
        read: reads the changelog into the store, up to an offset.
    """
    local = LocalState(store.last_batch(), store.next_offset(tp), store.pending())
    action = shard_action(local, batch, end)
    if action is Action.PROMOTE:
        store.promote(batch, {tp: end})
        failpoints.reach("state.after_promote")
        return action, NOTHING_READ
    outcome: Restored | WipeNeeded = NOTHING_READ
    if action is Action.CATCH_UP:
        outcome = read(end)
        if isinstance(outcome, WipeNeeded):
            return action, outcome
        failpoints.reach("state.after_restore")
    if store.last_batch() != batch:
        store.commit({tp: end}, batch=batch)
    return action, outcome


# -- how a database reaches the state that a batch starts from: pure functions
#
# The token on the shard's changelog partition names the batch and the task attempt that the changelog ends
# with. Only the token is authoritative: the local database is a copy that may be behind, may hold pending
# batches, or may be gone.


class Action(Enum):
    """How the local state reaches the state that the token names."""

    READY = "ready"  #: the local state is that state
    PROMOTE = "promote"  #: the pending batch that the token names becomes the state
    CATCH_UP = "catch up"  #: read the changelog from the store's offset to the token's


@dataclass(frozen=True)
class LocalState:
    """What the shard's database holds.

    Attributes:
        batch: batch of the state; None if the store is empty.
        next_offset: offset in the changelog up to which the state was read; None if unknown.
        pending: changes of task attempts that may or may not have been committed.
    """

    batch: BatchRecord | None = None
    next_offset: int | None = None
    pending: Collection[PendingBatch] = ()


def shard_action(local: LocalState, batch: BatchRecord, end: int) -> Action:
    """Returns how the shard's database reaches the state that the batch starts from.

    Args:
        local: what the database holds.
        batch: batch and task attempt that the token on the changelog partition names.
        end: committed offset of the changelog partition.
    """
    attempt = batch.task_attempt_id
    if local.batch is not None and local.batch.task_attempt_id == attempt:
        return Action.READY
    if any(each.record.task_attempt_id == attempt and each.base == local.batch for each in local.pending):
        return Action.PROMOTE
    # The store has everything that is committed below `end`: other attempts at this offset changed nothing.
    if local.batch is not None and local.next_offset == end:
        return Action.READY
    return Action.CATCH_UP


# -- snapshots, with the newest of which that fits a store may begin

_log = logging.getLogger(__name__)

#: A local store that is at least this many offsets behind may be replaced by a snapshot. Reading them takes
#: about a second.
_FAR_BEHIND = 1_000_000
#: Bytes of a snapshot that are downloaded in the time of reading one record of the changelog.
_BYTES_PER_RECORD = 100


@dataclass(frozen=True)
class SnapshotUse:
    """How a process uses the snapshots of a shard.

    Attributes:
        location: option ``state.snapshot.location``.
        timeout_ms: how long a download may take. It is tried once: the changelog has all of the state.
        only_reads: whether nothing is removed from the storage, not even a file that turns out to be damaged.
    """

    location: str = field(repr=False)  # may have a password
    timeout_ms: int
    only_reads: bool = False


class ShardSnapshots:
    """The snapshots from which a shard's store may begin; for one call of `shard_store.open_shard_store`.

    A snapshot fits if reading the rest of the changelog makes it the committed state, by the same rules as a
    local store (`restore_plan`): its offset lies between the start of the log and the committed offset, and
    it is young enough to have missed no delete.

    Args:
        use: where they are.
        path: folder of the shard's store.
        identity: of the store.
        end: committed offset of the shard's changelog partition, from the token.
        log_start: returns the first offset of that partition.
        delete_retention_ms: of the changelog topic.
    """

    def __init__(
        self,
        use: SnapshotUse,
        path: Path,
        identity: StoreIdentity,
        end: int,
        log_start: Callable[[], int],
        delete_retention_ms: int | None,
    ) -> None:
        self._use = use
        self._path = path
        self._identity = identity
        self._end = end
        self._log_start = log_start
        self._delete_retention_ms = delete_retention_ms
        self._resources = ExitStack()
        self._ready: Path | None = None
        self._was_tried = False

    def install(self) -> bool:
        """Puts the newest snapshot that fits in the place of the store, which does not exist."""
        with self._resources:
            if not self._was_tried:
                self._download(0)
            ready, self._ready = self._ready, None
            return ready is not None and install(ready, self._path)

    def replaces(self, next_offset: int | None) -> WipeNeeded | None:
        """Decides whether a snapshot should take the place of a local store that is far behind.

        The snapshot is downloaded and checked before the store is given up.

        Args:
            next_offset: changelog offset of the local store.
        """
        if next_offset is None or self._was_tried or self._end - next_offset < _FAR_BEHIND:
            return None
        self._download(next_offset)
        if self._ready is None:
            return None
        return WipeNeeded(Reason.SNAPSHOT, f"it is {self._end - next_offset:,} offsets behind its changelog")

    def close(self) -> None:
        """Removes what was downloaded and not used."""
        self._resources.close()

    def _download(self, than: int) -> None:
        """Downloads the newest snapshot that fits, if it is worth more than a store at offset ``than``."""
        self._was_tried = True
        log_start = self._log_start()
        began = time.monotonic()
        deadline = Deadline.after_ms(self._use.timeout_ms)

        def refusal(manifest: Manifest) -> str | None:
            plan = plan_restore(
                manifest.next_offset,
                manifest.batch,
                log_start,
                self._end,
                now_ms=int(time.time() * 1000),
                delete_retention_ms=self._delete_retention_ms,
                saved_ms=manifest.created_ms,
            )
            if isinstance(plan, WipeNeeded):
                return plan.why
            if than and manifest.size_bytes > (manifest.next_offset - than) * _BYTES_PER_RECORD:
                return (
                    f"reading the changelog from offset {than} takes less time than downloading its "
                    f"{manifest.size_bytes / 1e6:.0f} MB"
                )
            return None

        try:
            storage = SnapshotStorage(self._use.location, self._identity, only_reads=self._use.only_reads)
            found = self._resources.enter_context(
                downloaded(storage, self._path, self._identity, refusal, deadline)
            )
        except (InvalidOptionError, OSError) as error:
            # The driver could open the location. Without snapshots, a restore only takes longer.
            _log.warning("no snapshot in %s can be used: %s", without_secrets(self._use.location), error)
            return
        if found is None:
            return
        manifest, self._ready = found
        _log.info(
            "shard %s: downloaded the snapshot at changelog offset %d of %d, %.1f MB in %.1f s",
            TopicPartition(self._identity.changelog_topic, self._identity.shard),
            manifest.next_offset,
            self._end,
            manifest.size_bytes / 1e6,
            time.monotonic() - began,
        )
