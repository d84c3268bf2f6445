"""One shard in one task: brought to the state that its batch starts from, then kept as *pending*.

::

    token
      │
      ▼
    open ──▶ READY │ PROMOTE │ CATCH_UP (again from the beginning, once) │ START ──▶ process ──▶ pending

Nothing that a batch does changes the state itself. Its changes are kept as pending under their attempt, and
the shard's next task, wherever it runs, learns from the token whether they count.
"""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

import pyarrow as pa

from kafka_eos_source.errors import TokenMissingError
from kafka_eos_source.kafka.changelog_reader import ChangelogReader
from kafka_eos_source.kafka.consumer import AssignedConsumer
from kafka_eos_source.model import GroupOffset, ShardReport, TopicPartition
from kafka_eos_source.protocol.token import Token
from kafka_eos_source.runtime import failpoints
from kafka_eos_source.runtime.deadline import Deadline
from kafka_eos_source.state.batch_record import record_of
from kafka_eos_source.state.changelog.committed import CommittedShard, changelog_client, end_open_transaction
from kafka_eos_source.state.changelog.recovery import open_restored
from kafka_eos_source.state.changelog.restore import Restored, restore
from kafka_eos_source.state.changelog.restore_plan import Reason, WipeNeeded
from kafka_eos_source.state.changelog.restore_progress import RestoreProgress
from kafka_eos_source.state.changelog.topic import ChangelogTopic
from kafka_eos_source.state.model import BatchContext, BatchRecord, StoreIdentity
from kafka_eos_source.state.operator.shard_action import Action, Local, Spark, check_owner, shard_action
from kafka_eos_source.state.options import StateOptions
from kafka_eos_source.state.store.config import StoreConfig
from kafka_eos_source.state.store.transactional import TransactionalStateStore

_log = logging.getLogger(__name__)

#: Characters of a processor's error that travel to the driver.
_LONGEST_FAILURE = 2_000


@dataclass(frozen=True)
class Task:
    """Who asks: one attempt at one shard of one micro-batch.

    Attributes:
        spark: query and batch.
        run_id: Spark's id of the run.
        attempt: UUID (hex) made up for this attempt.
        identity: of the shard's store.
        changelog: its topic, looked at.
    """

    spark: Spark
    run_id: str
    attempt: str
    identity: StoreIdentity
    changelog: ChangelogTopic
    options: StateOptions

    @property
    def tp(self) -> TopicPartition:
        return TopicPartition(self.identity.changelog_topic, self.identity.shard)

    @property
    def path(self) -> Path:
        """Of the shard's database on this machine."""
        return self.identity.folder(self.options.root())


class OpenShard:
    """A shard whose store holds the state that the batch starts from.

    Attributes:
        store: its state; the processor's writes stay in memory.
        context: what the processor is told.
    """

    def __init__(
        self,
        task: Task,
        store: TransactionalStateStore,
        end: int,
        last: BatchRecord | None,
        token: Token | None,
    ) -> None:
        self._task = task
        self._end = end
        self._token = token
        self._counted: Mapping[str, int] = {} if last is None else last.counts
        self.store = store
        self.context = _context(task, last)

    def keep(self) -> tuple[ShardReport, list[pa.RecordBatch]]:
        """Makes the changes pending on disk; then they, and the report of them, may leave the task."""
        changes = list(self.store.staged_changes())
        pressure = self._pressure()
        record = BatchRecord(
            query_id=self._task.spark.query_id,
            batch_id=self._task.spark.batch_id,
            attempt=self._task.attempt,
            run_id=self._task.run_id,
            time_ms=self.context.time_ms,
            event_time_ms=self._event_time_ms(),
            counts=self._counts(),
        )
        failpoints.reach("state.before_pending")
        self.store.persist_pending(record)
        failpoints.reach("state.after_pending")
        report = _report(self._task, self._end, record.time_ms, record.event_time_ms)
        return self._based(replace(report, pressure=pressure, counts=record.counts)), changes

    def may_be_in_kafka(self) -> bool:
        """Whether Kafka may hold the batch already, so that the state may contain it."""
        spark, token = self._task.spark, self._token
        return token is not None and token.query_id == spark.query_id and token.batch_id >= spark.batch_id

    def failed(self, why: str) -> ShardReport:
        """The report of a shard whose processor failed on a batch that may be in Kafka already.

        The processor then met a state that contains the batch. If the commit finds the batch in Kafka, the
        failure does not matter; if not, the commit raises it.
        """
        record_time = self.context.time_ms
        report = _report(self._task, self._end, record_time, self.context.event_time_ms)
        return self._based(replace(report, failure=why[:_LONGEST_FAILURE]))

    def _based(self, report: ShardReport) -> ShardReport:
        """The report with the token that the shard's state stands at."""
        return replace(
            report,
            sequence=-1 if self._token is None else self._token.sequence,
            accepts_gap=self._task.options.missing_state == "changelog",
        )

    def _pressure(self) -> float:
        limit = self._task.options.uncommitted_max_bytes
        return 0.0 if limit < 0 else self.store.approximate_num_uncommitted_bytes() / limit

    def _counts(self) -> Mapping[str, int]:
        """What was counted before, and in this batch."""
        return dict(Counter(self._counted) + Counter(self.context.metrics))

    def _event_time_ms(self) -> int | None:
        seen = (self.context.event_time_ms, self.context.seen_event_time_ms)
        return max((each for each in seen if each is not None), default=None)


@contextmanager
def open_shard(task: Task) -> Iterator[OpenShard | ShardReport]:
    """The shard, ready for its batch; or the report that its changelog holds the batch without a token.

    Raises:
        StateLockedError: another process has the database open for longer than ``state.lock.timeout.ms``.
        StateError: the state is not this query's, is lost, or is of a newer format.
        ForeignQueryError, TokenMissingError: see `shard_action.check_owner`.
        UnavailableError: Kafka did not answer within ``state.timeout.ms``.
    """
    options, spark = task.options, task.spark
    deadline = Deadline.after_ms(options.timeout_ms)
    group = options.group(spark.query_id)

    def end_dead_transaction(left: Deadline) -> None:
        end_open_transaction(options.kafka, options.application(spark.query_id), left)

    with changelog_client(options.kafka, group) as consumer:
        shard = CommittedShard(consumer, group, task.tp, end_transaction=end_dead_transaction)
        committed = shard.offset(deadline)
        while True:
            token = None if committed is None else Token.decode(committed.metadata)
            try:
                check_owner(
                    spark, token, missing_state=options.missing_state, foreign_query=options.foreign_query
                )
                store = _ready(task, consumer, committed, token, deadline, end_dead_transaction)
                break
            except TokenMissingError:
                # Another process of this query may have committed its first batch after the offset was read.
                committed, before = shard.offset(deadline), committed
                if committed == before:
                    raise
    try:
        failpoints.reach("state.after_open")
        last = store.last_batch()
        if (
            token is None
            and last is not None
            and last.query_id == spark.query_id
            and last.batch_id >= spark.batch_id
        ):
            # no token (`onMissingState=changelog`), but the changelog itself says which batch it holds
            yield _report_of(task, last, store.next_offset(task.tp) or 0)
            return
        yield OpenShard(task, store, store.next_offset(task.tp) or 0, last, token)
    finally:
        store.close()


def _ready(
    task: Task,
    consumer: AssignedConsumer,
    committed: GroupOffset | None,
    token: Token | None,
    deadline: Deadline,
    end_dead_transaction: Callable[[Deadline], None],
) -> TransactionalStateStore:
    """The open store at the token's state. What is damaged or too old is wiped and restored, once."""
    progress = RestoreProgress(task.tp)
    config = StoreConfig(
        uncommitted_max_bytes=task.options.uncommitted_max_bytes,
        lock_timeout_ms=task.options.lock_timeout_ms,
        wal_sync=task.options.wal_sync,
    )

    def bring(store: TransactionalStateStore) -> Restored | WipeNeeded:
        end = 0 if committed is None else committed.offset
        reader = ChangelogReader(consumer, task.tp)

        def read(until: int | None) -> Restored | WipeNeeded:
            return restore(
                store,
                task.tp,
                until,
                reader,
                deadline=deadline,
                progress=progress,
                end_transaction=end_dead_transaction,
                delete_retention_ms=task.changelog.delete_retention_ms,
            )

        outcome = _start(task, store, read) if token is None else _bring(task, store, end, token, read)
        if isinstance(outcome, Restored):
            store.drop_pending()
        return outcome

    store, restored = open_restored(task.path, task.identity, config, bring, progress)
    if restored.records or progress.reason is not Reason.NONE:
        _log.info("shard %s: %s", task.tp, progress.metrics())
    return store


_Read = Callable[[int | None], Restored | WipeNeeded]
_NOTHING_READ = Restored(0, 0, Reason.NONE, 0.0)


def _bring(
    task: Task, store: TransactionalStateStore, end: int, token: Token, read: _Read
) -> Restored | WipeNeeded:
    """The store to the token's state, by the shortest way."""
    local = Local(store.last_batch(), store.next_offset(task.tp), store.pending())
    action = shard_action(local, token, end)
    _log.info("shard %s, batch %d: %s", task.tp, task.spark.batch_id, action.value)
    record = record_of(token)
    outcome: Restored | WipeNeeded = _NOTHING_READ
    if action is Action.PROMOTE:
        store.promote(record, {task.tp: end})
        failpoints.reach("state.after_promote")
        return outcome
    if action is Action.CATCH_UP:
        outcome = read(end)
        if isinstance(outcome, WipeNeeded):
            return outcome
        failpoints.reach("state.after_restore")
    if store.last_batch() != record:
        store.commit({task.tp: end}, batch=record)
    return outcome


def _start(task: Task, store: TransactionalStateStore, read: _Read) -> Restored | WipeNeeded:
    """No token: a new query has an empty changelog. Whatever else is there was not asked for."""
    outcome = read(None)
    if isinstance(outcome, WipeNeeded):
        return outcome
    if (outcome.records or _is_batch(store.last_batch())) and task.options.missing_state != "changelog":
        raise TokenMissingError(
            f"changelog {task.tp} holds state ({outcome.records:,} records read); no batch of this query "
            "says that it is its own. The group was deleted or expired, or the topic was left behind by "
            "another query of the same application.id.",
            fix="to go on with that state, start once with onMissingState=changelog; else choose another "
            "application.id, or delete the changelog topic while the query is stopped.",
        )
    return outcome


def _is_batch(record: BatchRecord | None) -> bool:
    """Whether any batch was ever committed; a restore that found none leaves a record that says so."""
    return record is not None and record.batch_id >= 0


def _context(task: Task, last: BatchRecord | None) -> BatchContext:
    return BatchContext(
        batch_id=task.spark.batch_id,
        shard=task.identity.shard,
        shards=task.identity.shards,
        first=not _is_batch(last),
        # a clock that was set back, or another machine's, must not make timers fire twice
        time_ms=max(time.time_ns() // 1_000_000, 0 if last is None else last.time_ms),
        event_time_ms=None if last is None else last.event_time_ms,
    )


def _report_of(task: Task, batch: BatchRecord, next_offset: int) -> ShardReport:
    """That the shard holds this batch, made by another attempt, and made nothing of it now."""
    report = _report(task, next_offset, batch.time_ms, batch.event_time_ms, skipped=True)
    return replace(report, attempt=batch.attempt, counts=batch.counts)


def _report(
    task: Task, next_offset: int, time_ms: int, event_time_ms: int | None, *, skipped: bool = False
) -> ShardReport:
    return ShardReport(
        tp=task.tp,
        attempt=task.attempt,
        shards=task.identity.shards,
        query_id=task.spark.query_id,
        batch_id=task.spark.batch_id,
        next_offset=next_offset,
        time_ms=time_ms,
        event_time_ms=event_time_ms,
        skipped=skipped,
    )
