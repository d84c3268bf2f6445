"""Snapshots: all shards of a store at one moment, from the databases on this machine or from the changelog.

A database may be one batch behind Kafka, because a committed batch stays *pending* until the shard's next
task promotes it. If the reader also has access to Kafka, it applies the pending batch that the commit token
names while it reads, and all shards show the same batch::

    database                      token     snapshot shows
    ────────────────────────────  ────────  ──────────────────────────────────────────────────────────
    batch n                       batch n   the data
    batch n-1, batch n pending    batch n   the data with the pending changes
    older                         batch n   (waits for a task to catch up, then raises NotUpToBoundError)

Without Kafka, each shard shows its own data, which is that of a committed batch. It need not be the newest
batch, nor the same one in all shards.

Without databases, shards are restored to databases in a temporary folder, as of one cut of their changelog. A
shard begins with its newest snapshot on shared storage if the caller names the storage, and with an empty
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
from collections.abc import Callable, Collection, Mapping
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import pyarrow as pa
import pyarrow.compute as pc

from kafka_eos_source.errors import (
    AuthorizationError,
    ChangelogCompactedError,
    ChangelogError,
    NotUpToBoundError,
    RetriableError,
    StateCorruptedError,
    StateError,
    StateFormatError,
    StateLockedError,
    StateMismatchError,
)
from kafka_eos_source.kafka.fetch import RangeConsumer
from kafka_eos_source.kafka.reader import ChangelogReader
from kafka_eos_source.model import TopicPartition
from kafka_eos_source.runtime.deadline import Deadline, Pauses, retry
from kafka_eos_source.state.changelog.recovery import (
    MAX_AGE,
    MAX_AGE_AT_END,
    Restored,
    RestoreProgress,
    WipeNeeded,
)
from kafka_eos_source.state.changelog.restore import restore
from kafka_eos_source.state.changelog.topic import CommittedShard, changelog_client
from kafka_eos_source.state.model import BatchRecord, Owner, StoreIdentity
from kafka_eos_source.state.operator.shard_store import (
    Action,
    LocalState,
    ReadChangelog,
    bring_to_batch,
    open_shard_store,
    shard_action,
)
from kafka_eos_source.state.reading.stores import Changelog, Cut, StoreFolder, newest_batch
from kafka_eos_source.state.store.rocksdb import StoreConfig
from kafka_eos_source.state.store.transactional import TransactionalStateStore
from kafka_eos_source.state.store.views import CommittedReader, StateView

#: How long to wait for a database that seems incomplete, because a task may be creating it.
_CREATION_SECONDS = 3.0
#: Pause between two reads of a shard that is behind.
_PAUSE_SECONDS = 0.05


@dataclass(frozen=True)
class ShardState:
    """One shard of a snapshot.

    Attributes:
        shard: number of the shard.
        view: its data.
        batch: batch that the data reflects; None = no batch is committed yet.
    """

    shard: int
    view: StateView
    batch: BatchRecord | None


class Snapshot:
    """A store at one moment. A context manager; its data does not change until it is closed.

    Args:
        identity: identity of any shard of the store.
        states: the shards on this machine, by number.
        resources: closed together with the snapshot.

    Attributes:
        application_id: the query's ``application.id``.
        store: name of the store.
        shards: number of shards of the store.
        states: the shards on this machine, by number.
    """

    def __init__(
        self, identity: StoreIdentity, states: Mapping[int, ShardState], resources: ExitStack
    ) -> None:
        self.application_id = identity.application_id
        self.store = identity.store
        self.shards = identity.shards
        self.states = states
        self._resources = resources

    @property
    def batch_id(self) -> int | None:
        """Id of the newest batch that any shard reflects; None = no batch is committed yet."""
        return newest_batch([state.batch for state in self.states.values()])

    def shard(self, number: int) -> ShardState:
        """Returns one shard.

        Raises:
            StateError: if the shard has no database on this machine.
        """
        self.check_here([number])
        return self.states[number]

    def check_here(self, shards: Collection[int]) -> None:
        """Checks that the snapshot has these shards.

        Raises:
            StateError: if a shard has no database on this machine.
        """
        missing = sorted(set(shards) - set(self.states))
        if missing:
            raise StateError(
                f"shards {missing} of store {self.store!r} ({self.shards} in all) have no database on this "
                "machine.",
                fix="read on the machine that has them; or read the changelog, by setting "
                "kafka.bootstrap.servers and no state.dir.",
            )

    def also_close(self, close: Callable[[], object]) -> None:
        """Lets `close` call this function too."""
        self._resources.callback(close)

    def close(self) -> None:
        """Closes the databases, and deletes temporary files. May be called repeatedly."""
        self._resources.close()

    def __enter__(self) -> Snapshot:
        return self

    def __exit__(self, *_error: object) -> None:
        self.close()


def of_folders(
    found: Collection[StoreFolder], changelog: Callable[[Deadline], Cut] | None, deadline: Deadline
) -> Snapshot:
    """Takes a snapshot of the databases in these folders, which their owners may be changing.

    Args:
        found: folders of the shards of one store.
        changelog: reads how far the changelog is committed; None = do not use Kafka.
        deadline: limit for the brokers to answer, and for a task to bring a shard to the committed batch.

    Raises:
        NotUpToBoundError: if a shard is behind Kafka, or is being restored. Try again later.
        StateMismatchError: if the databases belong to another changelog.
        StateError, StateCorruptedError, StateFormatError: as `CommittedReader` describes.
        UnavailableError, AuthorizationError: as `Changelog.cut` describes.
    """
    with ExitStack() as stack:
        readers = {
            each.shard: stack.enter_context(_open_reader(each.path, deadline)) for each in sorted(found)
        }
        if changelog is None:
            readers = _readers_of_newest_changelog(readers)
            states = {k: ShardState(k, reader, reader.last_batch()) for k, reader in readers.items()}
        else:
            states = _states_at_cut(readers, changelog, deadline)
        identity = readers[next(iter(states))].identity
        return Snapshot(identity, states, stack.pop_all())


def _readers_of_newest_changelog(readers: Mapping[int, CommittedReader]) -> dict[int, CommittedReader]:
    """Drops databases of an older changelog, which a change of the number of shards leaves behind."""
    newest_ms: dict[tuple[int, str], int] = {}
    for reader in readers.values():
        of, batch = (reader.identity.shards, reader.identity.topic_id), reader.last_batch()
        newest_ms[of] = max(newest_ms.get(of, 0), 0 if batch is None else batch.time_ms)
    newest = max(newest_ms, key=lambda of: newest_ms[of])
    return {
        shard: reader
        for shard, reader in readers.items()
        if (reader.identity.shards, reader.identity.topic_id) == newest
    }


def _open_reader(path: Path, deadline: Deadline) -> CommittedReader:
    """Opens a database; waits for a moment if a task seems to be creating or restoring it."""
    patience = Deadline.after_seconds(deadline.remaining_seconds(_CREATION_SECONDS))
    return retry(
        lambda: TransactionalStateStore.open_read_only(path),
        (RetriableError, StateError, StateCorruptedError),
        Pauses(patience, _PAUSE_SECONDS),
        permanent=lambda failure: failure if isinstance(failure, StateFormatError) else None,
    )


def _states_at_cut(
    readers: Mapping[int, CommittedReader], changelog: Callable[[Deadline], Cut], deadline: Deadline
) -> dict[int, ShardState]:
    """Returns all shards at the committed batch, waiting until the deadline for those that are behind.

    It reads the committed offsets after opening the databases, because a database that is ahead of the
    offsets cannot be shown at their batch.
    """
    stale: set[int] = set()
    pauses = Pauses(deadline, _PAUSE_SECONDS)
    while True:
        for shard in sorted(stale):
            with suppress(RetriableError):  # the shard is being restored, so the next round tries again
                readers[shard].refresh()
                stale.remove(shard)
        cut = changelog(deadline)
        readers = _readers_of_changelog(readers, cut)
        stale &= readers.keys()
        states: dict[int, ShardState] = {}
        for shard in sorted(readers.keys() - stale):
            view = _view_at_cut(readers[shard], shard, cut)
            if view is not None:
                states[shard] = ShardState(shard, view, cut.batches[shard])
        behind = [shard for shard in readers if shard not in states]
        if not behind:
            return states
        if pauses.expired:
            held = ", ".join(f"shard {k} is at {_batch_name(readers[k].last_batch())}" for k in behind)
            raise NotUpToBoundError(
                f"Kafka has committed {_batch_name(cut.batches[behind[0]])}, but on this machine {held}; its "
                "task ran on another machine, or has not started yet.",
                fix="read again later; or remove state.dir to read the changelog.",
            )
        pauses.wait()
        stale.update(behind)


def _view_at_cut(reader: CommittedReader, shard: int, cut: Cut) -> StateView | None:
    """Returns a view of the shard at the cut's batch; None = the database must be read again."""
    tp, end, batch = cut.tp(shard), cut.ends[shard], cut.batches[shard]
    local = LocalState(reader.last_batch(), reader.next_offset(tp), reader.pending())
    if batch is None:
        is_empty = local.batch is None or local.batch.batch_id < 0
        return reader if is_empty else None
    action = shard_action(local, batch, end)
    if action is Action.PROMOTE:
        try:
            return reader.promoted(batch, {tp: end})
        except StateLockedError:
            return None  # the owner has promoted the batch meanwhile
    return reader if action is Action.READY else None


def _readers_of_changelog(readers: Mapping[int, CommittedReader], cut: Cut) -> dict[int, CommittedReader]:
    """Drops databases of an older changelog, which remain after the topic was created again.

    Raises:
        StateMismatchError: if no database belongs to the changelog.
    """
    matching = {
        shard: reader
        for shard, reader in readers.items()
        if reader.identity.shards == cut.shards and reader.identity.topic_id in ("", cut.topic_id)
    }
    if not matching:
        reader = next(iter(readers.values()))
        own = reader.identity
        raise StateMismatchError(
            f"the state in {reader.path} belongs to changelog {own.changelog_topic!r} with {own.shards} "
            f"partitions and topic id {own.topic_id or 'unknown'}; the topic now has {cut.shards} partitions "
            f"and topic id {cut.topic_id}.",
            fix="start the query, which restores the state; until then, remove state.dir to read the "
            "changelog.",
        )
    return matching


def _batch_name(batch: BatchRecord | None) -> str:
    return "no batch" if batch is None or batch.batch_id < 0 else f"batch {batch.batch_id}"


# ------------------------------------------------------------------ restored from the changelog

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
