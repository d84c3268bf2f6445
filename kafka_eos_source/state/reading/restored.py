"""Restores shards to databases in a temporary folder, as of one cut of their changelog.

A shard begins with its newest snapshot on shared storage if the caller names the storage, and with an empty
database otherwise.

Compaction keeps the newest value of each key. So a read up to a committed offset misses a key if a later
batch changes the key while the read runs, and the broker compacts both values before the read reaches the
older one. If no batch is committed during the read, this cannot happen, because the broker does not compact
open transactions. This gives two checks::

    read to the committed offset ──▶ was a batch committed meanwhile? ──no──▶ the read is exact
      ▲                                │yes
      └── newest committed offset ◀────┤ (a `StateQuery`, for some rounds; each reads only what is new)
                                       │
                                       └──▶ does the log still have the batch record before the offset?
                                              ├─yes──▶ compaction has not passed the next batch record
                                              └─no───▶ ChangelogCompactedError

The batch record is a witness: every batch writes its key anew, so compaction removes it together with the
values that the next batch replaced. It misses one case: the compacted segment ends within the next batch,
whose own batch record comes last.
"""

from __future__ import annotations

import logging
import shutil
import tempfile
import time
from collections.abc import Collection
from contextlib import ExitStack
from functools import cached_property
from pathlib import Path

import pyarrow as pa
import pyarrow.compute as pc

from kafka_eos_source.errors import AuthorizationError, ChangelogCompactedError, ChangelogError
from kafka_eos_source.kafka.fetch import RangeConsumer
from kafka_eos_source.kafka.reader import ChangelogReader
from kafka_eos_source.model import TopicPartition
from kafka_eos_source.runtime.deadline import Deadline
from kafka_eos_source.state.changelog.recovery import (
    MAX_AGE,
    MAX_AGE_AT_END,
    Restored,
    RestoreProgress,
    WipeNeeded,
)
from kafka_eos_source.state.changelog.restore import restore
from kafka_eos_source.state.changelog.topic import CommittedShard, changelog_client
from kafka_eos_source.state.model import Owner
from kafka_eos_source.state.operator.shard_store import ReadChangelog, bring_to_batch, open_shard_store
from kafka_eos_source.state.reading.cut import Changelog, Cut
from kafka_eos_source.state.reading.snapshot import ShardState, Snapshot
from kafka_eos_source.state.store.rocksdb import StoreConfig
from kafka_eos_source.state.store.transactional import TransactionalStateStore

_log = logging.getLogger(__name__)

#: How often a read goes on to the newest committed offset before it relies on batch records.
_ROUNDS = 3
#: How often it does so if the batch records are gone.
_MOST_ROUNDS = 10
#: Reads that take longer may have missed deletes, if ``delete.retention.ms`` is short as well.
_LONG_READ_SECONDS = 60.0


class ChangelogCopy:
    """Databases in a temporary folder that follow a changelog. A snapshot shows them as of one cut.

    The disk must have room for the state. The memory is that of one store, whatever the size of the state.

    Args:
        changelog: the changelog.
        deadline: its budget limits each wait for the brokers, and not the whole restore.
    """

    def __init__(self, changelog: Changelog, deadline: Deadline) -> None:
        self._changelog = changelog
        self._budget_seconds = deadline.budget_seconds
        self._stores: dict[int, TransactionalStateStore] = {}
        self._cut: Cut | None = None
        self._cut_at = 0.0
        self._folder = Path(tempfile.mkdtemp(prefix="kafka-eos-state-read-"))
        self._resources = ExitStack()
        self._resources.callback(shutil.rmtree, self._folder, ignore_errors=True)

    def close(self) -> None:
        """Closes the databases, which ends their snapshots, and deletes the folder. May be called again."""
        self._resources.close()

    def can_continue(self, cut: Cut) -> bool:
        """Returns whether reading only what is new leads to the state at the cut.

        It does not if the topic was created again, or if the copy is so old that the changelog may have lost
        deletes since.
        """
        of = self._cut
        if of is None or (of.topic_id, of.shards) != (cut.topic_id, cut.shards):
            return False
        if any(cut.ends[shard] < of.ends[shard] for shard in self._stores):
            return False
        retention_ms = self._delete_retention_ms
        return retention_ms is not None and 1000 * (time.time() - self._cut_at) < MAX_AGE * retention_ms

    def follow(self, cut: Cut, shards: Collection[int]) -> None:
        """Restores shards up to the cut.

        Raises:
            ChangelogError: if the changelog lost records, or records from which the copy would continue.
            ChangelogCompactedError: if this process was suspended for longer than deletes are kept.
            UnavailableError, AuthorizationError: as `restore` describes.
            StateError: if the disk is full or fails.
        """
        at = time.time()
        for shard in sorted(shards):
            store = self._stores.get(shard)
            if store is None:
                self._stores[shard] = self._resources.enter_context(self._open(cut, shard))
            else:
                self._catch_up(store, cut, shard)
        self._cut, self._cut_at = cut, at

    def show(self, shards: Collection[int]) -> Snapshot:
        """Returns a snapshot of these shards as of the last cut. It stays the same while the copy goes on."""
        assert self._cut is not None
        cut = self._cut
        with ExitStack() as stack:
            states: dict[int, ShardState] = {}
            for shard in sorted(shards):
                view = stack.enter_context(self._stores[shard].view())
                states[shard] = ShardState(shard, view, cut.batches[shard])
            return Snapshot(cut.identity(0), states, stack.pop_all())

    def cut_now(self) -> Cut:
        """Returns the committed offsets as they are now."""
        return self._changelog.cut(self._deadline())

    def check_not_compacted(self, cut: Cut, shards: Collection[int]) -> None:
        """Checks that compaction removed nothing below the cut while the shards were read.

        Raises:
            ChangelogCompactedError: if it did.
            UnavailableError, AuthorizationError: if Kafka does not answer, or refuses access.
        """
        for shard in sorted(shards):
            tp, end = cut.tp(shard), cut.ends[shard]
            if not end:
                continue
            with changelog_client(self._changelog.kafka) as consumer:
                now = CommittedShard(consumer, self._changelog.group_id, tp).offset(self._deadline())
                if now is not None and now.offset == end:
                    continue
                if not self._has_batch_record(consumer, tp, end, cut.owner):
                    raise ChangelogCompactedError(
                        f"the broker compacted {tp} while offsets 0 to {end - 1} were read: later batches "
                        "replaced values in that range, and older values were removed before they were read.",
                        fix="read again; or read the databases (state.dir), or set min.compaction.lag.ms of "
                        "the changelog topic to more than a read takes.",
                    )

    def _open(self, cut: Cut, shard: int) -> TransactionalStateStore:
        """Returns a new store of the shard with the state at the cut."""
        tp, end, batch = cut.tp(shard), cut.ends[shard], cut.batches[shard]
        began = time.time()
        snapshots = self._changelog.snapshots(self._deadline(), only_reads=True)
        retention_ms = None
        if snapshots is not None:
            retention_ms = self._delete_retention_ms
            snapshots = None if retention_ms is None else snapshots

        def bring(store: TransactionalStateStore, read: ReadChangelog) -> Restored | WipeNeeded:
            return read(end) if batch is None else bring_to_batch(store, tp, batch, end, read)[1]

        with changelog_client(self._changelog.kafka) as consumer:
            store, _ = open_shard_store(
                self._folder / str(shard),
                cut.identity(shard),
                StoreConfig(),
                ChangelogReader(consumer, tp),
                bring,
                end=None if batch is None else end,
                deadline=self._deadline(),
                progress=RestoreProgress(tp),
                delete_retention_ms=retention_ms,
                snapshots=snapshots,
                accepted_start=cut.log_start(shard),
            )
        if retention_ms is None:  # otherwise the restore has noticed it, and has begun again
            try:
                self._check_not_suspended(tp, began)
            except BaseException:
                store.close()
                raise
        return store

    def _catch_up(self, store: TransactionalStateStore, cut: Cut, shard: int) -> None:
        tp, end = cut.tp(shard), cut.ends[shard]
        with changelog_client(self._changelog.kafka) as consumer:
            # The store was complete at the last cut, so `can_continue` knows its age better than its batch.
            outcome = restore(
                store, tp, end, ChangelogReader(consumer, tp), owner=cut.owner, deadline=self._deadline()
            )
        if isinstance(outcome, WipeNeeded):
            raise ChangelogError(
                f"cannot restore the store {store.path} to offset {end} of {tp}: {outcome.why}.",
                fix="read again, which begins with an empty folder.",
            )
        batch = cut.batches[shard]
        if batch is not None:
            store.commit({tp: end}, batch=batch)
        self._check_not_suspended(tp, self._cut_at)

    def _check_not_suspended(self, tp: TopicPartition, since: float) -> None:
        """Checks that compaction kept all deletes since a time, in seconds since the epoch.

        Raises:
            ChangelogCompactedError: if it may have removed the delete of a key that was read before, because
                this process was suspended for example.
        """
        seconds = time.time() - since
        if seconds < _LONG_READ_SECONDS:
            return  # an ordinary read sends no request for this
        retention_ms = self._delete_retention_ms
        if retention_ms and 1000 * seconds > MAX_AGE_AT_END * retention_ms:
            raise ChangelogCompactedError(
                f"the copy of {tp} is {seconds / 3600:.1f} h old when the read ends; compaction may have "
                f"removed deletes meanwhile (delete.retention.ms={retention_ms}).",
                fix="read again.",
            )

    def _has_batch_record(self, consumer: RangeConsumer, tp: TopicPartition, end: int, owner: Owner) -> bool:
        """Returns whether the last record before an offset is a batch record, as every batch leaves it."""
        reader = ChangelogReader(consumer, tp)
        gone = "read again."
        return any(
            pc.any(pc.equal(records.keys, pa.scalar(owner.key))).as_py()
            for records in reader.read(end - 1, end, self._deadline(), if_gone=gone)
        )

    @cached_property
    def _delete_retention_ms(self) -> int | None:
        """``delete.retention.ms`` of the topic; None if the principal may not read it."""
        try:
            return self._changelog.delete_retention_ms(self._deadline())
        except AuthorizationError as error:
            if self._changelog.snapshot_location is not None:
                _log.warning("snapshots are not used, because their age cannot be checked: %s", error)
            return None

    def _deadline(self) -> Deadline:
        return Deadline.after_seconds(self._budget_seconds)


def of_changelog(changelog: Changelog, cut: Cut, shards: Collection[int], deadline: Deadline) -> Snapshot:
    """Takes a snapshot of shards as of a cut, from the changelog. Closing it deletes the temporary folder.

    Args:
        changelog: the changelog.
        cut: how far it is committed.
        shards: numbers of the shards to restore.
        deadline: its budget limits each wait for the brokers, and not the whole restore.

    Raises:
        ChangelogCompactedError: if the broker compacted values that the read needed. Reading again, at a
            newer cut, may succeed.
        ChangelogError, UnavailableError, AuthorizationError: as `restore` describes.
        StateError: if the disk is full or fails.
    """
    copy = ChangelogCopy(changelog, deadline)
    try:
        copy.follow(cut, shards)
        copy.check_not_compacted(cut, shards)
        snapshot = copy.show(shards)
    except BaseException:
        copy.close()
        raise
    snapshot.also_close(copy.close)
    return snapshot


def newest_of_changelog(copy: ChangelogCopy, cut: Cut) -> tuple[Snapshot, Cut]:
    """Takes a snapshot of all shards as of the cut or a later batch, from the changelog.

    Args:
        copy: the databases to use. The caller closes the copy after the snapshot.
        cut: how far the changelog is committed.

    Returns:
        The snapshot, and the cut that it shows.

    Raises:
        KafkaEosError: as `of_changelog`.
    """
    number = 0
    while True:
        shards = range(cut.shards)
        copy.follow(cut, shards)
        now = copy.cut_now()
        if now.same_state(cut):
            return copy.show(shards), cut
        number += 1
        can_continue = copy.can_continue(now)
        if number >= _ROUNDS or not can_continue:
            try:
                copy.check_not_compacted(cut, shards)
                return copy.show(shards), cut
            except ChangelogCompactedError:
                if number >= _MOST_ROUNDS or not can_continue:
                    raise
        cut = now
