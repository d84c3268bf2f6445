"""The commit of one batch as a state machine: the only place that begins, commits or aborts.

The rules, each from `docs/guarantees.md`:

* whoever commits has initialised, fencing all others, *before* it read the token;
* a producer carries a second transaction only while it is clean (`kafka.producer`);
* after an error of the commit itself the outcome is unknown: nothing is aborted, a new producer is
  initialised and the token is believed;
* fenced once on a producer is a question, which the token answers; fenced twice is a rival;
* sinks outside Kafka prepare before the transaction begins, under an id that is new after each
  `init_transactions`, and commit when Kafka has; what they hold prepared is listed before that call, so
  that the token read after it decides it for good (`commit.settle`).
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass, replace

from kafka_eos_source import failpoints
from kafka_eos_source.commit.decide import Verdict, decide
from kafka_eos_source.commit.order import Order, mark_of
from kafka_eos_source.commit.parties import Cluster, NoSinks, Owner, Producer, Sinks, Staged
from kafka_eos_source.commit.steps import ABORTED_ON_ERROR, MOVES, ROLLED_BACK_ON_ERROR, Step
from kafka_eos_source.errors import (
    AbortableError,
    FencedError,
    KafkaEosError,
    OutcomeUnknownError,
    RestartQueryError,
    RetriableError,
    SinkRetryableError,
    SinkUnavailableError,
    StateLostError,
    UnavailableError,
)
from kafka_eos_source.model import GroupOffset, ShardReport, TopicPartition
from kafka_eos_source.protocol.token import UNDECIDED, Token, newest
from kafka_eos_source.runtime.deadline import Deadline

_log = logging.getLogger(__name__)

_FIRST_PAUSE_SECONDS = 0.1
_LONGEST_PAUSE_SECONDS = 5.0


@dataclass(frozen=True)
class Result:
    """How a commit ended.

    Attributes:
        step: `Step.COMMITTED` or `Step.SKIPPED`.
        transactions: transactions begun for it.
        settled_by_token: committed, though the commit call said otherwise.
    """

    step: Step
    transactions: int
    settled_by_token: bool = False


class _OvertakenError(FencedError):
    """Fenced, and the token says by whom: not a reason to try again."""


class Commit:
    """One run of the machine."""

    def __init__(
        self,
        order: Order,
        staged: Staged,
        cluster: Cluster,
        owner: Owner,
        deadline: Deadline,
        sinks: Sinks | None = None,
    ) -> None:
        self._order = order
        self._staged = staged
        self._sinks = NoSinks() if sinks is None else sinks
        self._cluster = cluster
        self._owner = owner
        self._deadline = deadline
        self._step = Step.OPEN
        self._begun = 0
        self._begun_at = 0.0
        self._inherited: Mapping[TopicPartition, GroupOffset] = {}
        self._fenced: FencedError | None = None
        self._unknown: OutcomeUnknownError | None = None
        self._pause = threading.Event()

    def run(self) -> Result:
        """Commits the batch, trying again under the one deadline.

        Raises:
            RestartQueryError: this driver was overtaken, or a sink outside Kafka is not finished in time.
            OutcomeUnknownError: the deadline passed before Kafka told whether it committed; a replay asks
                again.
            OperatorError: what no retry mends, or what no retry mended in time.
        """
        pause = _FIRST_PAUSE_SECONDS
        while True:
            try:
                return self._attempt()
            except _OvertakenError:
                self._lose()
                raise
            except (RetriableError, AbortableError, OutcomeUnknownError, FencedError) as error:
                self._lose()
                self._remember(error)
                if self._deadline.expired:
                    raise (self._unknown or _out_of_time(error, self._deadline)) from error
                _log.warning("batch %d: %s; trying again", self._order.batch.batch_id, error)
                self._pause.wait(min(pause, self._deadline.remaining_seconds()))
                pause = min(2 * pause, _LONGEST_PAUSE_SECONDS)
                self._move(Step.OPEN)
            except BaseException:
                self._lose()
                raise

    def _attempt(self) -> Result:
        owner, order = self._owner, self._order
        verdict = Verdict.WRITE
        # shards that found the batch in Kafka know more than the token in memory
        skipped = any(shard.skipped for shard in self._staged.shards)
        if skipped or not self._may_go_on():
            owner.drop()
            verdict = self._open()
        if verdict is Verdict.SKIP:
            if owner.token is not None and owner.token.batch_id == order.batch.batch_id:
                self._move(Step.FINISH)
                self._sinks.finish(owner.token, self._deadline)
            self._move(Step.SKIPPED)
            return Result(Step.SKIPPED, self._begun, settled_by_token=self._unknown is not None)
        if verdict is Verdict.MARK:
            self._check_marked()
        elif skipped:
            raise RestartQueryError(
                f"operators found batch {order.batch.batch_id} in Kafka and made nothing of it; its token "
                "says that it is not there.",
                fix="restart the query; if it stays so, give operator and sink the same application.id, "
                "kafka.group.id and cluster.",
            )
        assert owner.producer is not None
        rows = self._staged.rows if verdict is Verdict.WRITE else 0
        token = Token(
            application_id=order.batch.application_id,
            query_id=order.batch.query_id,
            run_id=order.batch.run_id,
            batch_id=order.batch.batch_id,
            start_digest=order.batch.start_digest,
            end_digest=order.batch.end_digest,
            rows=rows,
            transaction_number=self._begun + 1,
            sequence=order.batch.batch_id,
        )
        if rows:
            self._move(Step.CHECK)
            # before `begin`, so that a wrong name costs no transaction
            owner.producer.check_partitions(self._staged.topics, self._deadline)
        if verdict is Verdict.WRITE:
            self._move(Step.PREPARE)
            token = replace(token, sinks=self._sinks.prepare(self._deadline))
            failpoints.reach("commit.after_prepare")
        else:
            token = replace(token, sinks=UNDECIDED)
        self._transact(owner.producer, rows, token)
        self._move(Step.FINISH)
        self._sinks.finish(token, self._deadline)
        failpoints.reach("commit.after_finish")
        self._move(Step.COMMITTED)
        owner.token = token
        return Result(Step.COMMITTED if verdict is Verdict.WRITE else Step.SKIPPED, self._begun)

    def _check_marked(self) -> None:
        """A person said that the batch is in Kafka; a shard that has changes to write says that it is not."""
        changed = [str(shard.tp) for shard in self._staged.shards if shard.records]
        if changed:
            raise StateLostError(
                "onMissingToken=assume_committed, and the state changes of batch "
                f"{self._order.batch.batch_id} are not in the changelog: {', '.join(changed)}.",
                fix="start with .option('onMissingToken', 'assume_not_committed').",
            )

    def _may_go_on(self) -> bool:
        """Whether the producer at hand is clean and this batch is the one after its last.

        The token in memory is the one in Kafka: whoever had committed since would have fenced us.
        """
        batch, token, producer = self._order.batch, self._owner.token, self._owner.producer
        if producer is None or token is None or token.query_id != batch.query_id:
            return False
        is_next = batch.batch_id > token.batch_id if batch.versioned else batch.batch_id == token.batch_id + 1
        return is_next and producer.is_clean()

    def _open(self) -> Verdict:
        """A fresh producer; only then the token: before init, a dead run's transaction may still commit."""
        owner, order = self._owner, self._order
        self._move(Step.INIT)
        self._sinks.look(self._deadline)
        failpoints.reach("commit.after_look")
        owner.producer = self._cluster.producer()
        owner.producer.init(self._deadline)
        failpoints.reach("commit.after_init")
        self._move(Step.TOKEN)
        found = self._cluster.group_offsets(order.group_id, order.partitions(), self._deadline)
        owner.cluster_id, owner.topics = owner.producer.cluster(self._deadline)
        if owner.topics.get(order.anchor.topic, 0) <= order.anchor.partition:
            raise UnavailableError(
                f"topic {order.anchor.topic!r}, which is to carry the token, is not on the sink's cluster "
                f"({owner.cluster_id}), or may not be described.",
                fix="create it, grant Read and Describe, or set .option('anchor.topic', …) to another topic.",
            )
        known, owner.token = owner.token, newest(found.values())
        failpoints.reach("commit.after_token")
        if self._fenced is not None and owner.token is not None:
            self._refuse_rival(owner.token, known)
        self._inherited = {
            tp: each
            for tp, each in found.items()
            if (held := Token.decode(each.metadata)) is not None and held.query_id != order.batch.query_id
        }
        verdict = decide(
            order.batch_on(owner.cluster_id, owner.topics),
            owner.token,
            {tp: each.offset for tp, each in found.items()},
            missing_token=order.missing_token,
            foreign_query=order.foreign_query,
        )
        self._sinks.settle(owner.token, order.batch, verdict, self._deadline)
        failpoints.reach("commit.after_settle")
        return verdict

    def _refuse_rival(self, token: Token, known: Token | None) -> None:
        """Fenced: by a rival if the token moved on under its run, else by our own transaction's age."""
        runs = {self._order.batch.run_id, known.run_id if known is not None else ""}
        if token.run_id not in runs:
            # what we had prepared is dead, and the other run may not look again for weeks
            self._sinks.settle(token, self._order.batch, None, self._deadline)
            raise _OvertakenError(
                f"run {token.run_id} of query {token.query_id} took over application.id="
                f"{token.application_id!r} and has written batch {token.batch_id}; this is run "
                f"{self._order.batch.run_id}, batch {self._order.batch.batch_id}.",
                fix="nothing, if the other run is meant to go on; else stop it and start this query again.",
            ) from self._fenced

    def _transact(self, producer: Producer, rows: int, token: Token) -> None:
        order, deadline = self._order, self._deadline
        failpoints.reach("commit.before_begin")
        self._move(Step.BEGIN)
        producer.begin()
        self._begun += 1
        self._begun_at = time.monotonic()
        if rows:
            self._move(Step.PRODUCE)
            for batch in self._staged.batches():
                producer.send(batch, order.topic, deadline)
                failpoints.reach("commit.within_produce")
            for tp, changes in self._staged.changes():
                producer.send(changes, tp.topic, deadline)
                failpoints.reach("commit.within_changelog")
            self._move(Step.FLUSH)
            producer.flush(deadline)
            if producer.enqueued != rows:
                # a record that was refused locally does not fail a commit by itself
                raise AbortableError(f"{producer.enqueued} records enqueued, {rows} staged")
        failpoints.reach("commit.after_flush")
        self._move(Step.OFFSETS)
        owner = self._owner
        if any(owner.topics.get(tp.topic, 0) <= tp.partition for tp in order.partitions()):
            # a partition is newer than this producer, or gone
            owner.cluster_id, owner.topics = producer.cluster(deadline)
        try:
            offsets = [
                *order.offsets(token, owner.cluster_id, owner.topics, self._inherited_elsewhere()),
                *self._changelog_offsets(producer, token),
            ]
            producer.send_offsets(offsets, order.group_id, deadline)
        except UnavailableError as error:
            if deadline.expired:
                raise
            # a source topic was deleted: the next attempt sees which are left
            raise AbortableError(error.message) from error
        failpoints.reach("commit.before_commit")
        self._move(Step.COMMIT)
        producer.commit(deadline)
        failpoints.reach("commit.after_commit")

    def _inherited_elsewhere(self) -> Mapping[TopicPartition, GroupOffset]:
        own = {shard.tp for shard in self._staged.shards}
        return {tp: each for tp, each in self._inherited.items() if tp not in own}

    def _changelog_offsets(self, producer: Producer, token: Token) -> list[GroupOffset]:
        """How far each shard's changelog is committed, and by which attempt.

        The log's end is asked for after the flush: nobody else writes there, for this producer has fenced all
        others and its transaction is the only one open.
        """
        changed = [shard.tp for shard in self._staged.shards if shard.records]
        ends = producer.ends(changed) if changed else {}
        for shard in self._staged.shards:
            if shard.tp in ends:
                _check_same_log(shard, ends[shard.tp])
        return [
            GroupOffset(
                shard.tp,
                ends.get(shard.tp, shard.next_offset),
                replace(token, shard=mark_of(shard)).encode(),
            )
            for shard in self._staged.shards
        ]

    def _remember(self, error: KafkaEosError) -> None:
        """What the next attempt must know, and the rule of the second fencing."""
        if isinstance(error, OutcomeUnknownError):
            self._unknown = error
            fenced = error.__cause__ if isinstance(error.__cause__, FencedError) else None
        else:
            fenced = error if isinstance(error, FencedError) else None
        if fenced is None:
            return
        if self._fenced is not None:
            raise FencedError(
                f"fenced twice while committing batch {self._order.batch.batch_id} of application.id="
                f"{self._order.batch.application_id!r}: another driver commits under it at this moment, or "
                f"the transaction timed out (begun {time.monotonic() - self._begun_at:.0f} s ago).",
                fix="let only one query use this application.id, and only one driver this checkpoint; if "
                "that is so, raise kafka.transaction.timeout.ms or make batches smaller.",
            ) from fenced
        self._fenced = fenced

    def _lose(self) -> None:
        """Ends this attempt: abort what may be aborted, and never use this producer again."""
        if self._owner.producer is not None and self._step in ABORTED_ON_ERROR:
            failpoints.reach("commit.before_abort")
            self._owner.producer.abort(self._deadline)
        self._owner.drop()
        if self._step in ROLLED_BACK_ON_ERROR:
            self._sinks.roll_back(self._deadline)
        if self._step not in (Step.LOST, Step.COMMITTED, Step.SKIPPED):
            self._move(Step.LOST)

    def _move(self, to: Step) -> None:
        if to not in MOVES[self._step]:
            raise AssertionError(f"commit cannot go from {self._step.name} to {to.name}")
        self._step = to


def _check_same_log(shard: ShardReport, end: int) -> None:
    """The changes stand behind the state that they are made to, else the changelog would hold a part of it.

    Raises:
        StateLostError: they do not.
    """
    if end < shard.next_offset + shard.records:
        raise StateLostError(
            f"changelog {shard.tp} ends at offset {end}, with {shard.records} changes of this batch in it; "
            f"the state that they are made to is that of offset {shard.next_offset}: the topic was deleted "
            "and made anew while the query ran.",
            fix="nothing of this batch is in Kafka. Put the topic back from a copy, or start anew with a new "
            "checkpoint and application.id.",
        )


def _out_of_time(error: KafkaEosError, deadline: Deadline) -> KafkaEosError:
    if isinstance(error, FencedError):
        return error
    if isinstance(error, SinkRetryableError):
        return SinkUnavailableError(
            f"the batch could not be prepared within {deadline.budget_seconds:.0f} s (commitTimeoutMs): "
            f"{error.message}",
            fix="see to that system, then restart the query; nothing of this batch is visible to readers.",
        )
    return UnavailableError(
        f"the batch could not be committed within {deadline.budget_seconds:.0f} s (commitTimeoutMs); "
        f"last: {error.message}",
        fix="see to the cluster, then restart the query; nothing of this batch is visible to readers.",
    )
