"""All shards of a store at one moment, readable: from the databases on this machine, or from the changelog.

What lies on the disk is a copy that may be one batch behind Kafka: a batch that is committed stays *pending*
until the shard's next task promotes it. With Kafka at hand the pending batch that Kafka names is read over
the data, and all shards show the same batch::

    on disk        Kafka's token names        shown
    ─────────────  ─────────────────────────  ──────────────────────────────────────────
    batch n        n                          the data
    batch n-1      n, its changes pending     the data and, over it, those changes
    older          n                          asked again: a task may be at it; then NotUpToBoundError

Without Kafka every shard shows its data: each of a committed batch, not necessarily the same or the newest.
"""

from __future__ import annotations

import shutil
import tempfile
import threading
from collections.abc import Callable, Collection, Mapping
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from pathlib import Path

from kafka_eos_source.errors import (
    ChangelogError,
    NotUpToBoundError,
    RetriableError,
    StateCorruptedError,
    StateError,
    StateFormatError,
    StateMismatchError,
)
from kafka_eos_source.kafka.changelog_reader import ChangelogReader
from kafka_eos_source.runtime.deadline import Deadline
from kafka_eos_source.state.batch_record import token_of
from kafka_eos_source.state.changelog.committed import changelog_client
from kafka_eos_source.state.changelog.restore import restore
from kafka_eos_source.state.changelog.restore_plan import WipeNeeded
from kafka_eos_source.state.model import BatchRecord, StoreIdentity
from kafka_eos_source.state.operator.shard_action import Action, LocalState, shard_action
from kafka_eos_source.state.reading.cut import Changelog, Cut, newest_batch
from kafka_eos_source.state.reading.local import StoreFolder
from kafka_eos_source.state.store.reader import CommittedReader
from kafka_eos_source.state.store.transactional import TransactionalStateStore
from kafka_eos_source.state.store.views import StateView

#: How long a database may look half made before that is believed.
_MAKING_SECONDS = 3.0
#: Between two looks at a shard that a task is about to bring to its batch.
_PAUSE_SECONDS = 0.05

_pause = threading.Event()  # never set


@dataclass(frozen=True)
class ShardState:
    """One shard of a snapshot.

    Attributes:
        batch: whose state it is; None = no batch was ever committed.
    """

    shard: int
    view: StateView
    batch: BatchRecord | None


class Snapshot:
    """A context manager. What it shows stands still until it is closed.

    Attributes:
        application_id, store: whose state.
        shards: how many the store has.
        states: those that are here.
        exact: whether Kafka said which batch is the newest.
    """

    def __init__(
        self,
        identity: StoreIdentity,
        states: Mapping[int, ShardState],
        exact: bool,
        closing: ExitStack,
    ) -> None:
        self.application_id = identity.application_id
        self.store = identity.store
        self.shards = identity.shards
        self.states = states
        self.exact = exact
        self._closing = closing

    @property
    def batch_id(self) -> int | None:
        """The newest batch that any shard shows; None = none."""
        return newest_batch([state.batch for state in self.states.values()])

    def shard(self, number: int) -> ShardState:
        """Raises: StateError: it is not here."""
        self.check_here([number])
        return self.states[number]

    def check_here(self, shards: Collection[int]) -> None:
        """Raises: StateError: not all of these shards are here."""
        missing = sorted(set(shards) - set(self.states))
        if missing:
            raise StateError(
                f"shards {missing} of store {self.store!r} ({self.shards} in all) have no database on this "
                "machine.",
                fix="ask the machine that has them; or read the changelog: give kafka.bootstrap.servers and "
                "no state.dir.",
            )

    def close(self) -> None:
        """Idempotent."""
        self._closing.close()

    def __enter__(self) -> Snapshot:
        return self

    def __exit__(self, *_error: object) -> None:
        self.close()


def of_folders(
    found: Collection[StoreFolder], changelog: Callable[[Deadline], Cut] | None, deadline: Deadline
) -> Snapshot:
    """The store as it lies in these folders; its owner may be at work on it.

    Args:
        found: of one store.
        changelog: says how far it is committed; None = not to be asked.
        deadline: for Kafka, and for shards that a task is about to bring to their batch.

    Raises:
        NotUpToBoundError: a shard is behind Kafka, or is being restored. Ask again.
        StateMismatchError: it is not the state of this changelog.
        StateError, StateCorruptedError, StateFormatError: as `CommittedReader`.
        UnavailableError, AuthorizationError: as `Changelog.cut`.
    """
    with ExitStack() as stack:
        readers = {each.shard: stack.enter_context(_opened(each.path, deadline)) for each in sorted(found)}
        if changelog is None:
            readers = _newest(readers)
            states = {k: ShardState(k, reader, reader.last_batch()) for k, reader in readers.items()}
        else:
            states = _committed(readers, changelog, deadline)
        identity = readers[next(iter(states))].identity
        return Snapshot(identity, states, changelog is not None, stack.pop_all())


def _newest(readers: Mapping[int, CommittedReader]) -> dict[int, CommittedReader]:
    """Those of one changelog: what was left behind when its state moved to other shards is none of it."""
    made: dict[tuple[int, str], int] = {}
    for reader in readers.values():
        of, batch = (reader.identity.shards, reader.identity.topic_id), reader.last_batch()
        made[of] = max(made.get(of, 0), 0 if batch is None else batch.time_ms)
    newest = max(made, key=lambda of: made[of])
    return {
        shard: reader
        for shard, reader in readers.items()
        if (reader.identity.shards, reader.identity.topic_id) == newest
    }


def _opened(path: Path, deadline: Deadline) -> CommittedReader:
    """The store, once it is one: a task may be making or restoring it at this moment."""
    patience = Deadline.after_seconds(deadline.remaining_seconds(_MAKING_SECONDS))
    while True:
        try:
            return TransactionalStateStore.open_read_only(path)
        except StateFormatError:
            raise
        except (RetriableError, StateError, StateCorruptedError):
            if patience.expired:
                raise
        _pause.wait(_PAUSE_SECONDS)


def _committed(
    readers: Mapping[int, CommittedReader], changelog: Callable[[Deadline], Cut], deadline: Deadline
) -> dict[int, ShardState]:
    """Every shard at the batch that Kafka names, which is asked for after the databases were opened."""
    stale: set[int] = set()
    while True:
        for shard in sorted(stale):
            with suppress(RetriableError):  # it is being restored: looked at again
                readers[shard].refresh()
                stale.remove(shard)
        cut = changelog(deadline)
        readers = _of_cut(readers, cut)
        stale &= readers.keys()
        states: dict[int, ShardState] = {}
        for shard in sorted(readers.keys() - stale):
            view = _at(readers[shard], shard, cut)
            if view is not None:
                states[shard] = ShardState(shard, view, cut.batches[shard])
        behind = [shard for shard in readers if shard not in states]
        if not behind:
            return states
        if deadline.expired:
            held = ", ".join(f"shard {k} of {_named(readers[k].last_batch())}" for k in behind)
            raise NotUpToBoundError(
                f"Kafka holds {_named(cut.batches[behind[0]])}; on this machine is {held}: its task ran "
                "elsewhere, or has not begun.",
                fix="ask again; or read the changelog: leave out state.dir.",
            )
        _pause.wait(min(_PAUSE_SECONDS, deadline.remaining_seconds()))
        stale.update(behind)


def _at(reader: CommittedReader, shard: int, cut: Cut) -> StateView | None:
    """The shard at the cut's batch; None = it is not there yet."""
    tp, end, batch = cut.tp(shard), cut.ends[shard], cut.batches[shard]
    local = LocalState(reader.last_batch(), reader.next_offset(tp), reader.pending())
    if batch is None:
        is_empty = local.batch is None or local.batch.batch_id < 0
        return reader if is_empty else None
    action = shard_action(local, token_of(batch), end)
    if action is Action.PROMOTE:
        return reader.promoted(batch, {tp: end})
    return reader if action is Action.READY else None


def _of_cut(readers: Mapping[int, CommittedReader], cut: Cut) -> dict[int, CommittedReader]:
    """Those of this changelog. Others were left behind when it was made anew.

    Raises:
        StateMismatchError: there is none.
    """
    found = {
        shard: reader
        for shard, reader in readers.items()
        if reader.identity.shards == cut.shards and reader.identity.topic_id in ("", cut.topic_id)
    }
    if not found:
        reader = next(iter(readers.values()))
        own = reader.identity
        raise StateMismatchError(
            f"the state in {reader.path} is of changelog {own.changelog_topic!r} with {own.shards} shards "
            f"and id {own.topic_id or 'unknown'}; the topic of that name has {cut.shards} and id "
            f"{cut.topic_id}.",
            fix="the query restores it when it runs; until then read the changelog: leave out state.dir.",
        )
    return found


def of_changelog(
    changelog: Changelog, cut: Cut, shards: Collection[int], deadline: Deadline, schema: str = ""
) -> Snapshot:
    """Shards restored from the changelog into a temporary folder, which goes when the snapshot is closed.

    Memory is that of a store, whatever the size of the state; the disk must have room for it. A key that was
    changed after the cut, in a segment that is closed *and* compacted before it was read, is missed: older
    values are not kept then. That takes the query a segment's worth of changes (``segment.bytes``, 1 GiB).

    Args:
        cut: of this changelog.
        shards: which to restore.
        deadline: its budget is for each wait for the brokers, not for the whole.

    Raises:
        ChangelogError, UnavailableError, AuthorizationError: as `restore`.
        StateError: the disk is full or fails.
    """
    with ExitStack() as stack:
        scratch = Path(tempfile.mkdtemp(prefix="kafka-eos-state-read-"))
        stack.callback(shutil.rmtree, scratch, ignore_errors=True)
        states: dict[int, ShardState] = {}
        for shard in sorted(shards):
            identity = cut.identity(shard, schema)
            store = stack.enter_context(TransactionalStateStore.open(scratch / str(shard), identity))
            restore_to(store, changelog, cut, shard, deadline)
            view = stack.enter_context(store.view("read_committed"))
            states[shard] = ShardState(shard, view, cut.batches[shard])
        return Snapshot(cut.identity(0, schema), states, True, stack.pop_all())


def restore_to(
    store: TransactionalStateStore, changelog: Changelog, cut: Cut, shard: int, deadline: Deadline
) -> int:
    """Brings an open store to the cut; returns how many records were read.

    Raises:
        ChangelogError: what the store holds cannot be brought there, or the changelog lost records.
        UnavailableError, AuthorizationError: as `restore`.
    """
    tp, end = cut.tp(shard), cut.ends[shard]
    with changelog_client(changelog.kafka, changelog.group_id) as consumer:
        found = restore(store, tp, end, ChangelogReader(consumer, tp), deadline=deadline)
    if isinstance(found, WipeNeeded):
        raise ChangelogError(
            f"the store {store.path} cannot be brought to offset {end} of {tp}: {found.why}.",
            fix="remove the folder, and restore it again.",
        )
    batch = cut.batches[shard]
    if batch is not None:
        store.commit({tp: end}, batch=batch)
    return found.records


def _named(batch: BatchRecord | None) -> str:
    return "no batch" if batch is None or batch.batch_id < 0 else f"batch {batch.batch_id}"
