"""Opens one shard in one task, at the state that its batch starts from, and persists its changes as pending.

::

    token
      │
      ▼
    open ──▶ READY │ PROMOTE │ CATCH_UP (again from the beginning, once) ──▶ process ──▶ pending

A batch does not change the state itself. The task writes its changes to disk as *pending*, under its task
attempt. The shard's next task, on whichever host it runs, learns from the token whether they are committed.
"""

from __future__ import annotations

import logging
import socket
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

import pyarrow as pa

from kafka_eos_source.errors import ForeignQueryError, StateLostError, StateMismatchError, TokenMissingError
from kafka_eos_source.kafka.fetch import RangeConsumer
from kafka_eos_source.kafka.reader import ChangelogReader
from kafka_eos_source.model import OTHER_INPUT, GroupOffset, ShardReport, TopicPartition
from kafka_eos_source.protocol.identity import adopts
from kafka_eos_source.protocol.token import Token, number_of_shards
from kafka_eos_source.runtime import failpoints
from kafka_eos_source.runtime.deadline import Deadline
from kafka_eos_source.state.changelog.recovery import Reason, Restored, RestoreProgress, WipeNeeded
from kafka_eos_source.state.changelog.topic import (
    ChangelogTopic,
    CommittedShard,
    changelog_client,
    end_open_transaction,
)
from kafka_eos_source.state.model import BatchContext, BatchRecord, ShardsBy, StoreIdentity, record_of
from kafka_eos_source.state.operator.shard_store import (
    ReadChangelog,
    SnapshotUse,
    bring_to_batch,
    open_shard_store,
)
from kafka_eos_source.state.options import StateOptions
from kafka_eos_source.state.snapshots.upload import remove_left_copies, take_if_due
from kafka_eos_source.state.store.rocksdb import StoreConfig
from kafka_eos_source.state.store.transactional import TransactionalStateStore

_log = logging.getLogger(__name__)

#: Most characters of a processor's error that are reported to the driver.
_MAX_FAILURE_CHARS = 2_000


@dataclass(frozen=True)
class RequestedBatch:
    """The micro-batch that Spark runs now."""

    query_id: str
    batch_id: int


@dataclass(frozen=True)
class ShardTask:
    """One task attempt at one shard of one micro-batch.

    Attributes:
        requested: query and batch that Spark runs.
        run_id: Spark's id of the run.
        task_attempt_id: UUID (hex) of this task attempt.
        identity: identity of the shard's store.
        changelog: changelog topic, whose settings were checked.
        options: options of the operator.
        shards_by: what decides the shard of a key.
    """

    requested: RequestedBatch
    run_id: str
    task_attempt_id: str
    identity: StoreIdentity
    changelog: ChangelogTopic
    options: StateOptions
    shards_by: ShardsBy = ShardsBy.HASH

    @property
    def tp(self) -> TopicPartition:
        """The shard's partition of the changelog topic."""
        return TopicPartition(self.identity.changelog_topic, self.identity.shard)

    @property
    def missing_state(self) -> str:
        """What ``onMissingState`` says about this batch."""
        return self.options.missing_state_in(self.requested.batch_id)

    @property
    def path(self) -> Path:
        """Folder of the shard's database on this host."""
        return self.identity.folder(self.options.root())


class OpenShard:
    """A shard whose store holds the state that the batch starts from.

    Attributes:
        store: state of the shard; the processor's writes stay in memory.
        context: batch, times and metrics, for the processor.
    """

    def __init__(
        self,
        task: ShardTask,
        store: TransactionalStateStore,
        end: int,
        last: BatchRecord | None,
        token: Token | None,
        restored: RestoreProgress,
        log_start: int,
    ) -> None:
        self._log_start = log_start
        self._task = task
        self._restored = restored
        self._end = end
        self._token = token
        self._base_digest = "" if last is None or token is not None else last.end_digest
        self._counts_before: Mapping[str, int] = {} if last is None else last.counts
        self.store = store
        self.context = _context(task, last)

    def persist_pending(self) -> tuple[ShardReport, Iterable[pa.RecordBatch]]:
        """Writes the changes to disk as pending; only then may they leave the task.

        Returns:
            The report on the shard, and the changes. Read the changes while the shard is open: large ones are
            read from disk.
        """
        size_bytes, spilled_bytes = self.store.staged_bytes()
        record = BatchRecord(
            query_id=self._task.requested.query_id,
            batch_id=self._task.requested.batch_id,
            task_attempt_id=self._task.task_attempt_id,
            run_id=self._task.run_id,
            time_ms=self.context.time_ms,
            event_time_ms=self._event_time_ms(),
            counts=self._counts(),
            log_start=self._log_start,
        )
        failpoints.reach("state.before_pending")
        changes = self.store.persist_pending(record)
        failpoints.reach("state.after_pending")
        report = _report(self._task, self._end, record.time_ms, record.event_time_ms)
        measured = self._measured(size_bytes, spilled_bytes)
        report = replace(
            report,
            due_ms=self.context.due_ms,
            pressure=self._pressure(size_bytes),
            counts=record.counts,
            measured=measured,
        )
        return self._with_base(report), self.store.pending_changes(record) if changes is None else changes

    def may_be_in_kafka(self) -> bool:
        """Whether Kafka may already hold the batch, so that the state may already contain it."""
        requested, token = self._task.requested, self._token
        return (
            token is not None
            and token.query_id == requested.query_id
            and token.batch_id >= requested.batch_id
        )

    def failure_report(self, reason: str) -> ShardReport:
        """Returns the report of a shard whose processor failed on a batch that Kafka may already hold.

        In that case the processor ran on a state that already contains the batch. If the commit finds the
        batch in Kafka, it ignores the failure; otherwise it raises the failure.
        """
        report = _report(self._task, self._end, self.context.time_ms, self.context.event_time_ms)
        return self._with_base(replace(report, failure=reason[:_MAX_FAILURE_CHARS]))

    def _with_base(self, report: ShardReport) -> ShardReport:
        """Returns the report with the token of the state that the batch started from."""
        return replace(
            report,
            sequence=-1 if self._token is None else self._token.sequence,
            base_digest=self._base_digest,
            missing_state=self._task.missing_state,
            log_start=self._log_start,
        )

    def _pressure(self, size_bytes: int) -> float:
        limit = self._task.options.uncommitted_max_bytes
        return 0.0 if limit < 0 else size_bytes / limit

    def _measured(self, uncommitted_bytes: int, spilled_bytes: int) -> dict[str, float]:
        keys, size = self.store.approximate_committed_size()
        measured: dict[str, float] = {"keys": keys, "bytes": size, "uncommitted_bytes": uncommitted_bytes}
        if spilled_bytes:
            measured["spilled_bytes"] = spilled_bytes
        restored = self._restored
        if restored.records or restored.wiped is not None:
            measured["restores"] = 1
            measured["restored_records"] = restored.records
            measured["restore_seconds"] = restored.ms / 1000
        return measured

    def _counts(self) -> Mapping[str, int]:
        """Returns the processor's counters over all batches, including this one."""
        return dict(Counter(self._counts_before) + Counter(self.context.metrics))

    def _event_time_ms(self) -> int | None:
        seen = (self.context.event_time_ms, self.context.seen_event_time_ms)
        return max((each for each in seen if each is not None), default=None)


@contextmanager
def open_shard(task: ShardTask) -> Iterator[OpenShard | ShardReport]:
    """Opens the shard at the state that its batch starts from, and closes it at the end.

    Yields:
        The open shard; or a report, if there is no token and the changelog already holds the batch.

    Raises:
        StateLockedError: if another process has the database open for longer than ``state.lock.timeout.ms``.
        StateError: if the state belongs to another query, is lost, or has a newer format.
        StateMismatchError: if the changelog holds the state of another number of shards.
        ForeignQueryError: see `check_owner`.
        TokenMissingError: if the changelog holds state, but there is no token of it.
        StateLostError: if the beginning of the changelog was removed, or the checkpoint is older than it.
        UnavailableError: if Kafka does not answer within ``state.timeout.ms``.
    """
    options, requested = task.options, task.requested
    deadline = Deadline.after_ms(options.timeout_ms)
    group = options.group(requested.query_id)

    def end_dead_transaction(left: Deadline) -> None:
        end_open_transaction(options.kafka, options.application(requested.query_id), left)

    with changelog_client(options.kafka) as consumer:
        shard = CommittedShard(consumer, group, task.tp, end_transaction=end_dead_transaction)
        committed = shard.offset(deadline)
        while True:
            token = None if committed is None else Token.decode(committed.metadata)
            _check_shards(task, shard, token, deadline)
            try:
                check_owner(requested, token, foreign_query=options.foreign_query)
                store, restored, log_start = _open_at_token(
                    task, consumer, committed, token, deadline, end_dead_transaction
                )
                break
            except TokenMissingError:
                # Another process of this query may have committed its first batch after the offset was read.
                committed, before = shard.offset(deadline), committed
                if committed == before:
                    raise
    try:
        failpoints.reach("state.after_open")
        remove_left_copies(task.path)
        last = store.last_batch()
        if token is None and last is not None and last.query_id == requested.query_id:
            # The offset with the token was deleted, but the changelog contains the record of its last batch.
            if last.batch_id > requested.batch_id:
                raise _checkpoint_behind(task, last)
            if last.batch_id == requested.batch_id:
                yield _skipped_report(task, last, store.next_offset(task.tp) or 0, log_start)
                return
        if options.snapshots is not None and token is not None and committed is not None:
            # Now the store holds committed state only; later it also holds this batch's pending changes.
            take_if_due(store, task.tp, committed.offset, record_of(token), options.snapshots)
        yield OpenShard(task, store, store.next_offset(task.tp) or 0, last, token, restored, log_start)
    finally:
        store.close()


def check_owner(requested: RequestedBatch, token: Token | None, *, foreign_query: str) -> None:
    """Raises unless this query may continue with the state in the changelog.

    A changelog without a token is checked elsewhere: the task refuses one that holds state, and the commit
    knows which stores the query had before (`commit.report_checks`).

    This does not check whether Kafka already holds the batch. A shard cannot know that: it knows the batch
    id, but after a checkpoint was restored from a copy, Spark uses the same id for two different batches.
    The shard works on the state that the token names and reports which state that was. The commit compares,
    and drops the changes of a batch that Kafka already holds.

    Args:
        requested: the batch that Spark runs.
        token: token on the shard's changelog partition; None if there is no token.
        foreign_query: option ``onForeignQuery``.

    Raises:
        ForeignQueryError: if the changelog belongs to another query.
    """
    if token is None:
        return
    if token.query_id != requested.query_id and not adopts(foreign_query, token.query_id):
        raise ForeignQueryError(
            f"the state in the changelog belongs to query {token.query_id} (batch {token.batch_id}, run "
            f"{token.run_id or 'unknown'}), but this is query {requested.query_id}: the query uses another "
            "checkpoint, or a new one in place of a lost one.",
            fix="give this query its own application.id; or, to continue where the other query stopped, "
            "start with an empty checkpoint, startingOffsets=group on the source, and "
            "onForeignQuery=adopt on operator and sink.",
        )


def _check_shards(task: ShardTask, shard: CommittedShard, token: Token | None, deadline: Deadline) -> None:
    """Raises unless the state in the changelog has as many shards as the operator.

    The number of partitions alone does not show that. Somebody may add partitions to the changelog and set
    the operator's number of shards to match; keys would then meet shards that never held their state.

    Raises:
        StateMismatchError: if the tokens of the changelog name another number of shards.
    """
    shards, topic = task.identity.shards, task.tp.topic
    told = number_of_shards([token])
    if token is None and shards > 1:
        all_shards = [TopicPartition(topic, number) for number in range(shards)]
        offsets = shard.offsets(all_shards, deadline)
        told = number_of_shards(
            Token.decode(offsets[each].metadata) if each in offsets else None for each in all_shards
        )
    if told is None or told == shards:
        return
    what = f"the changelog topic {topic!r} holds the state of {told} shards, but it has {shards} partitions"
    if task.shards_by is ShardsBy.INPUT_PARTITION:
        raise StateMismatchError(
            f"{what}, and so has the operator, whose shards='partitions': the input topic had {told} "
            "partitions before, so keys may now be in other partitions than their state.",
            fix=OTHER_INPUT,
        )
    raise StateMismatchError(
        f"{what}, and so has the operator: somebody added partitions to the topic."
        if told < shards
        else f"{what}: somebody deleted the topic and created it again, and the tokens in the group are of "
        "the topic before.",
        fix=f"stop the query and run `kafka-eos state rescale QUERY --shards {shards} --yes`, which moves "
        f"the state to {shards} shards; or --shards {told}, and set the operator's number of shards to "
        f"{told}."
        if told < shards
        else "restore the topic from a copy with all its partitions. Without a copy the state is lost: start "
        "the query with a new application.id and checkpoint.",
    )


def _open_at_token(
    task: ShardTask,
    consumer: RangeConsumer,
    committed: GroupOffset | None,
    token: Token | None,
    deadline: Deadline,
    end_dead_transaction: Callable[[Deadline], None],
) -> tuple[TransactionalStateStore, RestoreProgress, int]:
    """Opens the store and brings it to the token's state; wipes and restores a damaged or stale one, once.

    Returns:
        The store, what was restored, and the accepted start of the changelog (`ShardProgress.log_start`).
    """
    progress = RestoreProgress(task.tp)
    config = StoreConfig(
        uncommitted_max_bytes=task.options.uncommitted_max_bytes,
        lock_timeout_ms=task.options.lock_timeout_ms,
        wal_sync=task.options.wal_sync,
    )
    settings = task.options.snapshots
    end = 0 if committed is None else committed.offset
    log_start = 0 if token is None or token.shard is None else token.shard.log_start
    reader = ChangelogReader(consumer, task.tp)
    if task.missing_state == "changelog":
        log_start = max(log_start, reader.readable(deadline)[0])

    def bring(store: TransactionalStateStore, read: ReadChangelog) -> Restored | WipeNeeded:
        if token is None:
            return _restore_without_token(task, store, read)
        action, outcome = bring_to_batch(store, task.tp, record_of(token), end, read)
        _log.info("shard %s, batch %d: %s", task.tp, task.requested.batch_id, action.value)
        return outcome

    store, restored = open_shard_store(
        task.path,
        task.identity,
        config,
        reader,
        bring,
        end=None if token is None or committed is None else end,
        deadline=deadline,
        progress=progress,
        delete_retention_ms=task.changelog.delete_retention_ms,
        snapshots=None if settings is None else SnapshotUse(settings.location, task.options.timeout_ms),
        end_transaction=end_dead_transaction,
        accepted_start=log_start,
    )
    if restored.records or progress.reason is not Reason.NONE:
        _log.info("shard %s: %s", task.tp, progress.metrics())
    return store, progress, log_start


def _restore_without_token(
    task: ShardTask, store: TransactionalStateStore, read: ReadChangelog
) -> Restored | WipeNeeded:
    """Reads the changelog of a shard without a token.

    If the state is that of this query, the commit decides by its batch record whether the batch continues it.

    Raises:
        TokenMissingError: if the state is that of another query, and ``onMissingState`` is not ``changelog``.
    """
    outcome = read(None)
    if isinstance(outcome, WipeNeeded):
        return outcome
    last = store.last_batch()
    batch_id, query_id = task.requested.batch_id, task.requested.query_id
    is_own = last is not None and last.query_id == query_id
    if (outcome.records or _is_batch(last)) and not is_own and task.missing_state != "changelog":
        of = "no batch" if last is None or last.batch_id < 0 else f"batch {last.batch_id} of {last.query_id}"
        raise TokenMissingError(
            f"the changelog {task.tp} holds the state of {of} ({outcome.records:,} records read), and the "
            f"consumer group has no token of it; this is batch {batch_id} of {query_id}. Another query with "
            "the same application.id and store has left the topic behind, or the checkpoint is another one.",
            fix="choose another application.id or store name, with a new checkpoint. If this query continues "
            f"the other one, start it once with onMissingState=changelog:{batch_id}; rows that the other one "
            "did not process would be missing in the state.",
        )
    return outcome


def _checkpoint_behind(task: ShardTask, last: BatchRecord) -> StateLostError:
    return StateLostError(
        f"the changelog {task.tp} holds the state of batch {last.batch_id}, and Spark runs batch "
        f"{task.requested.batch_id}: the checkpoint was restored from an older copy, and the token that "
        "would show where the query stopped is lost. The output has the batches from here on already.",
        fix=f"restore a checkpoint whose last batch is {last.batch_id}; or start with a new application.id "
        "and a new checkpoint, so that output and state are computed from the input again.",
    )


def _is_batch(record: BatchRecord | None) -> bool:
    """Whether the record is of a real batch; a restore of a changelog without batches leaves batch -1."""
    return record is not None and record.batch_id >= 0


def _context(task: ShardTask, last: BatchRecord | None) -> BatchContext:
    # Timers must not fire twice after the clock was set back, or on a host whose clock is behind.
    time_ms = max(time.time_ns() // 1_000_000, 0 if last is None else last.time_ms)
    return BatchContext(
        batch_id=task.requested.batch_id,
        shard=task.identity.shard,
        shards=task.identity.shards,
        first=not _is_batch(last),
        time_ms=time_ms,
        event_time_ms=None if last is None else last.event_time_ms,
        event_time_limit_ms=time_ms + task.options.event_time_max_ahead_ms,
        shards_by=task.shards_by,
    )


def _skipped_report(task: ShardTask, batch: BatchRecord, next_offset: int, log_start: int) -> ShardReport:
    """Returns the report of a shard that already holds a batch with this id from another task attempt."""
    return replace(
        _report(task, next_offset, batch.time_ms, batch.event_time_ms),
        skipped=True,
        base_digest=batch.end_digest,
        # Nobody looked for what is due, so the next batch must not wait for records.
        due_ms=batch.time_ms,
        task_attempt_id=batch.task_attempt_id,
        counts=batch.counts,
        missing_state=task.missing_state,
        log_start=log_start,
    )


def _report(task: ShardTask, next_offset: int, time_ms: int, event_time_ms: int | None) -> ShardReport:
    return ShardReport(
        tp=task.tp,
        task_attempt_id=task.task_attempt_id,
        shards=task.identity.shards,
        query_id=task.requested.query_id,
        batch_id=task.requested.batch_id,
        next_offset=next_offset,
        time_ms=time_ms,
        event_time_ms=event_time_ms,
        in_read=task.shards_by is ShardsBy.INPUT_PARTITION,
        application_id=task.identity.application_id,
        group_id=task.options.group(task.requested.query_id),
        store=task.identity.store,
        host=socket.gethostname(),
        clock_max_ahead_ms=task.options.clock_max_ahead_ms,
        topic_id=task.identity.topic_id,
        brokers=task.options.kafka.get("bootstrap.servers", ""),
    )
