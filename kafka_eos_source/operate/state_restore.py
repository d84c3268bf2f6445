"""Databases brought to what Kafka holds before their query starts, so that its first batch waits for nothing.

A shard's own task does the same; this is for a machine that is made ready, or for looking into a restore. The
query must not run on this machine: a database has one owner.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import dataclass
from pathlib import Path

from kafka_eos_source.kafka.changelog_reader import ChangelogReader
from kafka_eos_source.runtime.deadline import Deadline
from kafka_eos_source.state.batch_record import token_of
from kafka_eos_source.state.changelog.committed import changelog_client
from kafka_eos_source.state.changelog.recovery import open_restored
from kafka_eos_source.state.changelog.restore import Restored, restore
from kafka_eos_source.state.changelog.restore_plan import Reason, WipeNeeded
from kafka_eos_source.state.changelog.restore_progress import RestoreProgress
from kafka_eos_source.state.model import BatchRecord
from kafka_eos_source.state.operator.shard_action import Action, LocalState, shard_action
from kafka_eos_source.state.reading.cut import Changelog, Cut
from kafka_eos_source.state.store.config import StoreConfig
from kafka_eos_source.state.store.transactional import TransactionalStateStore

#: A query that runs keeps its databases open for the time of a batch.
_LOCK_MS = 2_000

_NOTHING_READ = Restored(0, 0, Reason.NONE, 0.0)


@dataclass(frozen=True)
class Brought:
    """One shard, at what Kafka holds.

    Attributes:
        batch_id: that it is at.
        records: of the changelog that were read.
        wiped: why what was there had to be put away; None = it had not.
        promoted: its pending batch was the one that Kafka names.
        ms: how long reading took.
    """

    shard: int
    batch_id: int
    records: int
    wiped: str | None
    promoted: bool
    ms: float


def bring(
    root: str | Path, changelog: Changelog, cut: Cut, shards: Collection[int], deadline: Deadline
) -> Iterator[Brought]:
    """Restores or promotes each shard, one after another. Killed at any point, the same call goes on.

    Args:
        root: the state directory.
        cut: of this changelog. Shards without a committed batch are passed over.
        deadline: its budget is for each wait for the brokers.

    Raises:
        StateLockedError: the query runs here.
        KafkaEosError: as `recovery.open_restored` and `restore`.
    """
    for shard in sorted(shards):
        batch = cut.batches[shard]
        if batch is not None:
            yield _one(cut.identity(shard).folder(root), changelog, cut, shard, batch, deadline)


def _one(
    path: Path, changelog: Changelog, cut: Cut, shard: int, batch: BatchRecord, deadline: Deadline
) -> Brought:
    tp, end = cut.tp(shard), cut.ends[shard]
    progress = RestoreProgress(tp)
    promoted = False
    with changelog_client(changelog.kafka, changelog.group_id) as consumer:

        def to_the_cut(store: TransactionalStateStore) -> Restored | WipeNeeded:
            nonlocal promoted
            local = LocalState(store.last_batch(), store.next_offset(tp), store.pending())
            action = shard_action(local, token_of(batch), end)
            outcome: Restored | WipeNeeded = _NOTHING_READ
            if action is Action.PROMOTE:
                store.promote(batch, {tp: end})
                promoted = True
            elif action is Action.CATCH_UP:
                source = ChangelogReader(consumer, tp)
                outcome = restore(store, tp, end, source, deadline=deadline, progress=progress)
            if isinstance(outcome, Restored):
                if store.last_batch() != batch:
                    store.commit({tp: end}, batch=batch)
                store.drop_pending()
            return outcome

        config = StoreConfig(lock_timeout_ms=_LOCK_MS)
        store, restored = open_restored(path, cut.identity(shard), config, to_the_cut, progress)
    store.close()
    wiped = None if progress.wiped is None else progress.wiped.value
    return Brought(shard, batch.batch_id, restored.records, wiped, promoted, restored.ms)
