"""Restores local databases to what Kafka holds, before their query starts.

A shard's own task does the same, on the same path (`open_shard_store`). The command prepares a machine in
advance, so that the first batch does not wait. The query must not run on this machine, because only one
process can own a database.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import dataclass
from pathlib import Path

from kafka_eos_source.kafka.reader import ChangelogReader
from kafka_eos_source.runtime.deadline import Deadline
from kafka_eos_source.state.changelog.recovery import Restored, RestoreProgress, WipeNeeded
from kafka_eos_source.state.changelog.topic import changelog_client
from kafka_eos_source.state.model import BatchRecord
from kafka_eos_source.state.operator.shard_store import (
    Action,
    ReadChangelog,
    bring_to_batch,
    open_shard_store,
)
from kafka_eos_source.state.reading.stores import Changelog, Cut
from kafka_eos_source.state.store.rocksdb import StoreConfig
from kafka_eos_source.state.store.transactional import TransactionalStateStore

#: How long to wait for the lock of a database. A running query holds it for the duration of a batch.
_LOCK_MS = 2_000


@dataclass(frozen=True)
class RestoredShard:
    """One shard that now has the state that Kafka holds.

    Attributes:
        batch_id: the batch whose state it has.
        snapshot_offset: changelog offset of the snapshot with which it began; None = not with a snapshot.
        records: number of changelog records that were read.
        wiped: why the old database was discarded; None = it was not.
        promoted: whether its pending batch was the committed one, so that nothing had to be read.
        ms: how long reading took, in ms.
    """

    shard: int
    batch_id: int
    snapshot_offset: int | None
    records: int
    wiped: str | None
    promoted: bool
    ms: float


def restore_shards(
    root: str | Path, changelog: Changelog, cut: Cut, shards: Collection[int], deadline: Deadline
) -> Iterator[RestoredShard]:
    """Restores the shards one after another. After a crash, the same call continues.

    Args:
        root: the state directory.
        changelog: changelog of the store.
        cut: the committed end of each shard. Shards without a committed batch are skipped.
        shards: numbers of the shards.
        deadline: its budget limits each single wait for the brokers.

    Raises:
        StateLockedError: if the query runs on this machine.
        AuthorizationError: if the principal may not read the topic or its configuration.
        KafkaEosError: as `recovery.open_restored` and `restore` raise it.
    """
    retention_ms = changelog.delete_retention_ms(deadline)
    for shard in sorted(shards):
        batch = cut.batches[shard]
        if batch is not None:
            path = cut.identity(shard).folder(root)
            yield _restore_shard(path, changelog, cut, shard, batch, retention_ms, deadline)


def _restore_shard(
    path: Path,
    changelog: Changelog,
    cut: Cut,
    shard: int,
    batch: BatchRecord,
    delete_retention_ms: int,
    deadline: Deadline,
) -> RestoredShard:
    tp, end = cut.tp(shard), cut.ends[shard]
    progress = RestoreProgress(tp)
    promoted = False

    def bring(store: TransactionalStateStore, read: ReadChangelog) -> Restored | WipeNeeded:
        nonlocal promoted
        action, outcome = bring_to_batch(store, tp, batch, end, read)
        promoted = promoted or action is Action.PROMOTE
        return outcome

    with changelog_client(changelog.kafka) as consumer:
        store, restored = open_shard_store(
            path,
            cut.identity(shard),
            StoreConfig(lock_timeout_ms=_LOCK_MS),
            ChangelogReader(consumer, tp),
            bring,
            end=end,
            deadline=deadline,
            progress=progress,
            delete_retention_ms=delete_retention_ms,
            snapshots=changelog.snapshots(deadline, only_reads=False),
            accepted_start=batch.log_start,
        )
    store.close()
    return RestoredShard(
        shard,
        batch.batch_id,
        progress.snapshot_offset,
        restored.records,
        None if progress.wiped is None else progress.wiped.value,
        promoted,
        restored.ms,
    )
