"""Restores a store from its changelog, up to the committed offset.

Only the store records how far a restore has come. Each chunk moves the changelog offset in the same
`WriteBatch` as the data, so a restore that is killed continues after the last chunk, and reading a chunk
twice changes nothing. A restore ends by position: when a record or the reported end of the log is at or past
the committed offset. The last record is no criterion, because what follows it may be control records, aborted
records, or offsets that compaction removed.

::

    plan_restore ──▶ WipeNeeded                   the caller removes the state and restores again
      │
    read ──records──▶ write a chunk ──┐
      │ ▲ ▲                           │
      │ │ └───────────────────────────┘
      │ └─ nothing arrives: is the log shorter than the committed offset? ──yes, and stays so──▶ error
      └─ end reached ──▶ Restored
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Protocol

import pyarrow as pa
import pyarrow.compute as pc

from kafka_eos_source.errors import ChangelogError, StateLostError, UnavailableError
from kafka_eos_source.kafka.reader import LogEnds, Pulled, Records
from kafka_eos_source.model import TopicPartition
from kafka_eos_source.runtime.deadline import Deadline, Pauses
from kafka_eos_source.spark.worker import cycle_collection_paused
from kafka_eos_source.state.changelog.recovery import (
    ReadRange,
    Reason,
    Restored,
    RestoreProgress,
    WipeNeeded,
    deletes_may_be_gone,
    plan_restore,
    tag_restoring,
    untag_restoring,
)
from kafka_eos_source.state.model import BATCH_PREFIX, BatchRecord, Owner, decode_batch, foreign_state

_log = logging.getLogger(__name__)

_NONE = pa.array([], pa.binary())

#: A chunk is written once it has this many records, or this many bytes of keys and values. The store writes a
#: large chunk as a sorted file, which costs 0.8 µs a record instead of 3.3 µs in small batches. Larger files
#: also mean less merging by RocksDB. A kill loses at most one chunk. In memory a chunk takes four times its
#: bytes, and what arrives at once may exceed both limits.
CHUNK_RECORDS = 500_000
CHUNK_BYTES = 32 << 20

#: Longest single wait for records, after which deadlines are checked.
_WAIT_SECONDS = 0.2
#: How long a log must appear shorter than the committed offset before this is an error: after a change of
#: leader a broker may report an older high watermark (KIP-207).
_SHORT_LOG_GRACE_SECONDS = 3.0

_FIND_PRODUCER = (
    "find its producer with `kafka-transactions.sh find-hanging` and stop it; only the query may write to "
    "its changelog."
)


class RestoreTarget(Protocol):
    """The part of `TransactionalStateStore` that `restore.restore` uses."""

    @property
    def restoring(self) -> bool: ...
    @property
    def last_commit_ms(self) -> int:
        """Time of the last write to the data, ms since the epoch; 0 = not known."""

    def next_offset(self, tp: TopicPartition) -> int | None: ...
    def last_batch(self) -> BatchRecord | None: ...
    def restore_chunk(
        self,
        keys: pa.BinaryArray,
        values: pa.BinaryArray,
        changelog_offsets: Mapping[TopicPartition, int],
        *,
        batch: BatchRecord | None = None,
        done: bool | None = None,
    ) -> None:
        """Writes a chunk or nothing. The last value of a repeated key counts; null deletes the key."""


@dataclass
class ForwardingTarget:
    """A `RestoreTarget` that passes each chunk on and stores nothing.

    Attributes:
        forward: called with the keys and values (null = deleted) of each chunk, in the order of the log.
    """

    forward: Callable[[pa.BinaryArray, pa.BinaryArray], None]
    restoring: bool = False
    offsets: dict[TopicPartition, int] = field(default_factory=dict)
    batch: BatchRecord | None = None
    last_commit_ms: int = 0

    def next_offset(self, tp: TopicPartition) -> int | None:
        return self.offsets.get(tp)

    def last_batch(self) -> BatchRecord | None:
        return self.batch

    def restore_chunk(
        self,
        keys: pa.BinaryArray,
        values: pa.BinaryArray,
        changelog_offsets: Mapping[TopicPartition, int],
        *,
        batch: BatchRecord | None = None,
        done: bool | None = None,
    ) -> None:
        if len(keys):
            self.forward(keys, values)
        self.offsets.update(changelog_offsets)
        self.batch = batch or self.batch
        self.restoring = done is False


class ChangelogSource(Protocol):
    """The part of `kafka.reader.ChangelogReader` that `restore` uses."""

    @property
    def last_complaint(self) -> str: ...
    def start(self, position: int) -> None: ...
    def stop(self) -> None: ...
    def take(self, wait_seconds: float, end: int) -> Pulled: ...
    def readable(self, deadline: Deadline) -> tuple[int, int]: ...
    def ends(self) -> LogEnds: ...


def _clock_ms() -> int:
    return int(time.time() * 1000)


def restore(
    store: RestoreTarget,
    tp: TopicPartition,
    target_end: int | None,
    source: ChangelogSource,
    *,
    owner: Owner,
    deadline: Deadline,
    progress: RestoreProgress | None = None,
    end_transaction: Callable[[Deadline], None] | None = None,
    delete_retention_ms: int | None = None,
    accepted_start: int = 0,
    has_snapshots: bool = False,
    clock_ms: Callable[[], int] = _clock_ms,
) -> Restored | WipeNeeded:
    """Reads the changelog into the store, up to the committed offset.

    If the store is there already, no request goes to Kafka.

    Args:
        store: open, with nothing staged.
        tp: the store's changelog partition.
        target_end: committed offset of the partition in the query's group (excluded). None = the group has
            no offset: the whole log is read, once no transaction in it is open.
        source: reader of the partition.
        owner: whose state the changelog must hold.
        deadline: its budget limits each wait; it starts again whenever something arrives.
        progress: updated during the restore; None = a new one.
        end_transaction: ends a transaction that an earlier driver left open, as
            `topic.end_open_transaction` does. It is called at most once, if the group has no offset and
            the log has an open transaction, which may be that of the first batch.
        delete_retention_ms: ``delete.retention.ms`` of the changelog topic, which limits the age of a store
            that can be caught up; None = any age.
        accepted_start: first offset that the log may have although records before it were removed, because a
            person accepted that (`ShardProgress.log_start`).
        has_snapshots: whether a snapshot may replace a store that cannot be caught up.
        clock_ms: returns the current time, in ms since the epoch.

    Returns:
        What was read, or `WipeNeeded` if the local state cannot be caught up.

    Raises:
        ChangelogError: if the changelog ends before the committed offset or holds a record of another
            program or of another owner, or a transaction in it stays open.
        StateMismatchError: if the changelog holds the state of another number of shards.
        StateLostError: if the log begins after the first offset that is needed. Compaction never moves the
            beginning of a log, so somebody has removed records.
        StateFormatError: if a newer release wrote the changelog.
        UnavailableError: if no broker answers, nothing arrives, or the partition was deleted.
        AuthorizationError: if the principal may not read the topic.
    """
    progress = RestoreProgress(tp) if progress is None else progress
    next_offset = store.next_offset(tp)
    log_start = 0
    if target_end is None:
        log_start, target_end = _bounds_without_open_transaction(source, tp, end_transaction, deadline)
    elif next_offset != target_end:
        log_start, _ = source.readable(deadline)
    plan = plan_restore(
        next_offset,
        store.last_batch(),
        log_start,
        target_end,
        now_ms=clock_ms(),
        delete_retention_ms=delete_retention_ms,
        saved_ms=store.last_commit_ms,
    )

    def check_beginning(at: int, start: int, wiped: WipeNeeded | None) -> None:
        """Raises before the caller removes local state that the changelog cannot replace."""
        is_needed = at < min(start, target_end) if wiped is None else not has_snapshots
        if start > accepted_start and is_needed:
            raise _beginning_lost(tp, start, wiped)

    wiped = plan if isinstance(plan, WipeNeeded) else None
    check_beginning(next_offset or 0, log_start, wiped)
    if isinstance(plan, WipeNeeded):
        return plan

    def took_too_long() -> WipeNeeded | None:
        if delete_retention_ms is None:
            return None
        return deletes_may_be_gone(plan.since_ms, clock_ms(), delete_retention_ms)

    return _Run(store, tp, plan, source, owner, deadline, progress, took_too_long, check_beginning).run()


def _beginning_lost(tp: TopicPartition, log_start: int, wiped: WipeNeeded | None) -> StateLostError:
    local = "there is no local state" if wiped is None else f"the local state cannot be used ({wiped.why})"
    return StateLostError(
        f"the changelog {tp} begins at offset {log_start}, and {local}. The records before that offset were "
        "removed, by kafka-delete-records.sh or a cleanup.policy with 'delete'; keys that no later record "
        "wrote are lost.",
        fix="run the query on a host that has the state (state.dir), or with state.snapshot.location if "
        "there are snapshots; or restore the topic from a copy. If the lost keys may be missing, start the "
        "query once with onMissingState=changelog:… and the number of the batch; the results for these "
        "keys then begin again.",
    )


def _bounds_without_open_transaction(
    source: ChangelogSource,
    tp: TopicPartition,
    end_transaction: Callable[[Deadline], None] | None,
    deadline: Deadline,
) -> tuple[int, int]:
    """Returns first and end offset of the log; waits until no transaction in it is open."""
    pauses = Pauses(deadline, _WAIT_SECONDS)
    while (ends := source.ends()).stable < ends.end:
        if end_transaction is not None:
            end_transaction(deadline)
            end_transaction = None
            continue
        if pauses.expired:
            raise ChangelogError(
                f"an open transaction of another producer blocks {tp} at offset {ends.stable}, and the log "
                f"continues to {ends.end}; waited {deadline.budget_seconds:.0f} s.",
                fix=_FIND_PRODUCER,
            )
        pauses.wait()
    return ends.earliest, ends.end


class _Chunk:
    """Records that were read and are not in the store yet.

    Attributes:
        records: their number.
        batch_value: value of the last batch record among them; batch records are no data of the store.
    """

    def __init__(self, tp: TopicPartition, owner: Owner) -> None:
        self._tp = tp
        self._owner = owner
        self.records = 0
        self.batch_value: bytes | None = None
        self._keys: list[pa.BinaryArray] = []
        self._values: list[pa.BinaryArray] = []
        self._bytes = 0

    def add(self, keys: pa.BinaryArray, values: pa.BinaryArray) -> None:
        self.records += len(keys)
        is_batch = pc.starts_with(keys, BATCH_PREFIX)
        if is_batch.true_count:
            self._check_owner(keys.filter(is_batch))
            self.batch_value = values.filter(is_batch)[-1].as_py() or b""
            others = pc.invert(is_batch)
            keys, values = keys.filter(others), values.filter(others)
        self._keys.append(keys)
        self._values.append(values)
        self._bytes += keys.nbytes + values.nbytes

    def _check_owner(self, keys: pa.BinaryArray) -> None:
        """Raises unless all batch records with these keys are the owner's."""
        for key in keys.unique().to_pylist():
            if key != self._owner.key:
                raise foreign_state(self._tp, Owner.of_key(key), self._owner)

    @property
    def keys(self) -> pa.BinaryArray:
        return pa.concat_arrays(self._keys)

    @property
    def values(self) -> pa.BinaryArray:
        return pa.concat_arrays(self._values)

    @property
    def is_full(self) -> bool:
        return self.records >= CHUNK_RECORDS or self._bytes >= CHUNK_BYTES


class _Run:
    """Reads the changelog from ``plan.start`` to ``plan.end`` into the store."""

    def __init__(
        self,
        store: RestoreTarget,
        tp: TopicPartition,
        plan: ReadRange,
        source: ChangelogSource,
        owner: Owner,
        deadline: Deadline,
        progress: RestoreProgress,
        took_too_long: Callable[[], WipeNeeded | None],
        check_beginning: Callable[[int, int, WipeNeeded], None],
    ) -> None:
        self._store = store
        self._tp = tp
        self._plan = plan
        self._source = source
        self._budget_seconds = deadline.budget_seconds
        self._deadline = deadline
        self._progress = progress
        self._took_too_long = took_too_long
        self._check_beginning = check_beginning
        self._at = plan.start
        last = store.last_batch()
        #: The last batch whose record was read, now or by an earlier run; None = unknown.
        self._batch = None if last is None else untag_restoring(last)[0]
        self._new_chunk = partial(_Chunk, tp, owner)
        self._chunk = self._new_chunk()
        #: When the log first appeared shorter than the committed offset, in monotonic seconds.
        self._short_since: float | None = None

    def run(self) -> Restored | WipeNeeded:
        plan, progress = self._plan, self._progress
        progress.begin(plan.reason, plan.start, plan.end)
        if self._at < plan.end:
            self._source.start(self._at)
            try:
                with cycle_collection_paused():
                    wipe = self._read()
            finally:
                self._source.stop()
            if wipe is not None:
                return wipe
        self._finish()
        progress.advance(0, plan.end)
        progress.done()
        return Restored(
            progress.records, plan.end - plan.start - progress.records, progress.reason, progress.ms
        )

    def _finish(self) -> None:
        """Records the end offset and the batch.

        Control records may lie between the last record and the end offset.
        """
        if self._store.restoring or self._store.next_offset(self._tp) != self._plan.end:
            batch = self._batch or (BatchRecord("", -1, "") if self._store.restoring else None)
            self._store.restore_chunk(_NONE, _NONE, {self._tp: self._plan.end}, batch=batch, done=True)

    def _read(self) -> WipeNeeded | None:
        end = self._plan.end
        while self._at < end:
            wait_seconds = min(_WAIT_SECONDS, self._deadline.remaining_seconds())
            pulled = self._source.take(wait_seconds, end)
            # This process may have been suspended for longer than compaction keeps deletes. The check comes
            # after the read, so a chunk never holds a key whose delete compaction has removed.
            if (wipe := self._took_too_long()) is not None:
                return wipe
            if pulled.records is not None:
                self._accept(pulled.records)
            if pulled.log_end is not None:
                self._at_log_end(pulled.log_end)
            if pulled.gone:
                raise UnavailableError(
                    f"changelog {self._tp} was deleted while its state was being restored.",
                    fix="restore the topic from a copy; otherwise the state is lost: start the query with "
                    "another application.id and a new checkpoint.",
                )
            if pulled.out_of_range and (wipe := self._out_of_range()) is not None:
                return wipe
            if pulled.records is None:
                if self._chunk.records:
                    self._store_chunk()
                if self._at < end:
                    self._check_stalled()
        if self._chunk.records:
            self._store_chunk()
        return None

    def _accept(self, records: Records) -> None:
        self._restart_deadline()
        keys = records.keys
        if keys.null_count or pc.min(pc.binary_length(keys)).as_py() == 0:
            raise ChangelogError(
                f"changelog {self._tp} has a record without a key between offsets {self._at} and "
                f"{records.position}, which kafka-eos did not write.",
                fix="find the other program that writes to the changelog topic, and stop it.",
            )
        for part in records.parts(CHUNK_RECORDS):
            self._chunk.add(part.keys, part.values)
            self._at = part.position
            if self._chunk.is_full:
                self._store_chunk()

    def _store_chunk(self) -> None:
        chunk, self._chunk = self._chunk, self._new_chunk()
        if chunk.batch_value is not None:
            self._batch = decode_batch(chunk.batch_value)
        batch = tag_restoring(self._batch, self._plan.since_ms)
        self._store.restore_chunk(chunk.keys, chunk.values, {self._tp: self._at}, batch=batch, done=False)
        # The deadline limits the waits for the brokers, not how long a chunk takes to be stored or sent on.
        self._deadline = Deadline.after_seconds(self._budget_seconds)
        self._progress.advance(chunk.records, self._at)

    def _at_log_end(self, log_end: int) -> None:
        """Handles the report that the log has no further record before ``log_end``."""
        self._restart_deadline()
        if log_end > self._at:
            self._at = min(log_end, self._plan.end)
        if self._at < self._plan.end:
            self._short_since = time.monotonic()

    def _restart_deadline(self) -> None:
        self._short_since = None
        self._deadline = Deadline.after_seconds(self._budget_seconds)

    def _check_stalled(self) -> None:
        """Raises an error that names the cause if nothing has arrived for too long.

        Raises:
            ChangelogError: if the log ends before the committed offset, or an open transaction blocks it.
            UnavailableError: if nothing arrived until the deadline for another reason.
        """
        short_seconds = 0.0 if self._short_since is None else time.monotonic() - self._short_since
        is_short = short_seconds > _SHORT_LOG_GRACE_SECONDS
        if not is_short and not self._deadline.expired:
            return
        end, ends = self._plan.end, self._source.ends()
        if ends.end < end:
            raise ChangelogError(
                f"changelog {self._tp} is committed up to offset {end} and ends at {ends.end}: it lost "
                "records, or was deleted and created again.",
                fix="recover the topic; otherwise the state is lost: start the query with another "
                "application.id and a new checkpoint.",
            )
        if not self._deadline.expired:
            self._short_since = time.monotonic()
            return
        waited = f"waited {self._budget_seconds:.0f} s"
        if ends.stable < end:
            raise ChangelogError(
                f"an open transaction of another producer blocks {self._tp} at offset {ends.stable}, below "
                f"the committed offset {end}; {waited}.",
                fix=_FIND_PRODUCER,
            )
        raise UnavailableError(
            f"no record of changelog {self._tp} arrives, at offset {self._at} of {end}; {waited}. Last "
            f"error: {self._source.last_complaint or 'none; the broker does not answer the fetches'}.",
            fix="check that the partition has a leader and that the brokers can be reached.",
        )

    def _out_of_range(self) -> WipeNeeded | None:
        """Handles a fetch that the broker refused because of its offset.

        Returns:
            `WipeNeeded` if the log starts later now. Otherwise None, and reading starts again at the same
            offset: a new leader may be behind for a while.
        """
        log_start, stable = self._source.readable(self._deadline)
        if self._at < log_start:
            wipe = WipeNeeded(
                Reason.OUT_OF_RANGE,
                f"it holds the changelog up to offset {self._at}; the log now starts at {log_start}",
            )
            self._check_beginning(self._at, log_start, wipe)
            return wipe
        if self._at > stable:
            self._short_since = self._short_since or time.monotonic()
        Pauses(self._deadline, _WAIT_SECONDS).wait()
        self._source.start(self._at)
        return None
