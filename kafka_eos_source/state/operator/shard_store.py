"""Opens the store of a shard at the state of a committed batch, from the nearest place that has it.

Tasks, reads of the changelog and ``kafka-eos state restore`` use this one path::

    local store ──────────usable────────────┐
      │ none, not usable, or far behind     ▼
      └──▶ newest snapshot that fits ──▶ rest of the changelog ──▶ state of the batch
             │ none                         ▲
             └──▶ empty store ──────────────┘
"""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

from kafka_eos_source.model import TopicPartition
from kafka_eos_source.runtime import failpoints
from kafka_eos_source.runtime.deadline import Deadline
from kafka_eos_source.state.changelog.recovery import (
    Reason,
    Restored,
    RestoreProgress,
    WipeNeeded,
    open_restored,
)
from kafka_eos_source.state.changelog.restore import ChangelogSource, restore
from kafka_eos_source.state.model import BatchRecord, Owner, StoreIdentity
from kafka_eos_source.state.operator.shard_action import Action, LocalState, shard_action
from kafka_eos_source.state.operator.shard_snapshots import SnapshotUse, snapshots_of
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

    with snapshots_of(snapshots, Path(path), identity, end, log_start, delete_retention_ms) as found:

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
