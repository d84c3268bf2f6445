"""Snapshots: all shards of a store at one moment, from the databases on this machine.

`restored` takes snapshots of a changelog.

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
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from pathlib import Path

from kafka_eos_source.errors import (
    NotUpToBoundError,
    RetriableError,
    StateCorruptedError,
    StateError,
    StateFormatError,
    StateLockedError,
    StateMismatchError,
)
from kafka_eos_source.runtime.deadline import Deadline, Pauses, retry
from kafka_eos_source.state.model import BatchRecord, StoreIdentity
from kafka_eos_source.state.operator.shard_store import Action, LocalState, shard_action
from kafka_eos_source.state.reading.cut import Cut, newest_batch
from kafka_eos_source.state.reading.local import StoreFolder
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
