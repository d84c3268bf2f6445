"""The commit of one batch as a state machine: the only place that begins, commits or aborts.

The rules, each from `docs/guarantees.md`:

* whoever commits has initialised, fencing all others, *before* it read the token;
* a producer carries a second transaction only while it is clean (`kafka.producer`);
* after an error of the commit itself the outcome is unknown: nothing is aborted, a new producer is
  initialised and the token is believed;
* fenced once on a producer is a question, which the token answers; fenced twice is a rival.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import Enum
from types import MappingProxyType
from typing import Protocol

import pyarrow as pa

from kafka_eos_source import failpoints
from kafka_eos_source.commit.decide import Batch, Verdict, decide
from kafka_eos_source.commit.sources import SourceRange, on_cluster
from kafka_eos_source.commit.token import ShardMark, Token, newest
from kafka_eos_source.deadline import Deadline
from kafka_eos_source.errors import (
    AbortableError,
    FencedError,
    KafkaEosError,
    OutcomeUnknownError,
    RestartQueryError,
    RetriableError,
    StateLostError,
    UnavailableError,
)
from kafka_eos_source.model import GroupOffset, ShardReport, TopicPartition

_log = logging.getLogger(__name__)

_FIRST_PAUSE_SECONDS = 0.1
_LONGEST_PAUSE_SECONDS = 5.0


class Step(Enum):
    """Where a commit is. `MOVES` lists what may follow."""

    OPEN = "open"  #: look for a clean producer
    INIT = "init"  #: a new producer: fence older owners, settle what they left
    TOKEN = "token"  #: read what Kafka holds, decide
    CHECK = "check"  #: output topics and partitions exist
    BEGIN = "begin"
    PRODUCE = "produce"
    FLUSH = "flush"
    OFFSETS = "offsets"
    COMMIT = "commit"
    COMMITTED = "committed"  #: by this call
    SKIPPED = "skipped"  #: it was in Kafka already
    LOST = "lost"  #: this attempt is over, another may follow


MOVES: Mapping[Step, frozenset[Step]] = {
    Step.OPEN: frozenset({Step.INIT, Step.CHECK, Step.BEGIN, Step.LOST}),
    Step.INIT: frozenset({Step.TOKEN, Step.LOST}),
    Step.TOKEN: frozenset({Step.CHECK, Step.BEGIN, Step.SKIPPED, Step.LOST}),
    Step.CHECK: frozenset({Step.BEGIN, Step.LOST}),
    Step.BEGIN: frozenset({Step.PRODUCE, Step.OFFSETS, Step.LOST}),
    Step.PRODUCE: frozenset({Step.FLUSH, Step.LOST}),
    Step.FLUSH: frozenset({Step.OFFSETS, Step.LOST}),
    Step.OFFSETS: frozenset({Step.COMMIT, Step.LOST}),
    Step.COMMIT: frozenset({Step.COMMITTED, Step.LOST}),
    Step.LOST: frozenset({Step.OPEN}),
    Step.COMMITTED: frozenset(),
    Step.SKIPPED: frozenset(),
}

#: Steps within an open transaction, which an error may still abort. COMMIT is not one of them.
_ABORTED_ON_ERROR = frozenset({Step.PRODUCE, Step.FLUSH, Step.OFFSETS})


class Producer(Protocol):
    """What the machine needs of `kafka.producer.TransactionalProducer`."""

    enqueued: int

    def init(self, deadline: Deadline) -> None: ...
    def is_clean(self) -> bool: ...
    def cluster(self, deadline: Deadline) -> tuple[str, Mapping[str, int]]: ...
    def check_partitions(self, highest: Mapping[str, int], deadline: Deadline) -> None: ...
    def begin(self) -> None: ...
    def send(self, rows: pa.RecordBatch, topic: str | None, deadline: Deadline) -> None: ...
    def flush(self, deadline: Deadline) -> None: ...
    def ends(self, partitions: Collection[TopicPartition]) -> Mapping[TopicPartition, int]: ...
    def send_offsets(self, offsets: Collection[GroupOffset], group_id: str, deadline: Deadline) -> None: ...
    def commit(self, deadline: Deadline) -> None: ...
    def abort(self, deadline: Deadline) -> None: ...
    def close(self) -> None: ...


class Cluster(Protocol):
    """The Kafka cluster written to."""

    def producer(self) -> Producer:
        """A new client, not yet initialised."""

    def group_offsets(
        self, group_id: str, certainly: Collection[TopicPartition], deadline: Deadline
    ) -> Mapping[TopicPartition, GroupOffset]:
        """As `kafka.group.GroupOffsets.fetch`."""


class Staged(Protocol):
    """The rows of a batch, proved whole before the machine starts."""

    rows: int
    topics: Mapping[str, int]

    @property
    def shards(self) -> Sequence[ShardReport]: ...

    def batches(self) -> Iterable[pa.RecordBatch]: ...
    def changes(self) -> Iterable[tuple[TopicPartition, pa.RecordBatch]]: ...


@dataclass
class Owner:
    """What one process keeps of a transactional id between batches.

    Attributes:
        producer: the initialised client, None = none.
        token: the newest token known to be in Kafka.
        topics: partitions of each topic of the cluster, as seen when the producer was made.
        cluster_id: the cluster's id.
    """

    producer: Producer | None = None
    token: Token | None = None
    topics: Mapping[str, int] = field(default_factory=dict)
    cluster_id: str = ""

    def drop(self) -> None:
        """Closes the producer; the next one raises the epoch."""
        producer, self.producer = self.producer, None
        if producer is not None:
            producer.close()


@dataclass(frozen=True)
class Order:
    """One batch to be committed, and how.

    Attributes:
        batch: who and which. Its offsets are filled in from ``sources`` once the cluster is known.
        sources: what the batch read.
        group_id: consumer group of offsets and token.
        anchor: partition that carries the token in any case.
        topic: the ``topic`` option.
        missing_token, foreign_query: policies, as `decide` takes them.
        source_cluster: option ``source.cluster``.
    """

    batch: Batch
    group_id: str
    anchor: TopicPartition
    sources: Sequence[SourceRange] = ()
    topic: str | None = None
    missing_token: str = "fail"
    foreign_query: str = "fail"
    source_cluster: str = "auto"

    def batch_on(self, cluster_id: str, topics: Mapping[str, int]) -> Batch:
        """The batch with its offsets on the sink's cluster."""
        own = on_cluster(self.sources, cluster_id, topics, self.source_cluster)
        return replace(self.batch, starts=own.starts, ends=own.ends, comparable=own.comparable)

    def offsets(
        self,
        token: Token,
        cluster_id: str,
        topics: Mapping[str, int],
        inherited: Mapping[TopicPartition, GroupOffset] = MappingProxyType({}),
    ) -> list[GroupOffset]:
        """Source offsets and anchor, each with the token. A partition that is gone is left out.

        Args:
            token: of this batch.
            cluster_id, topics: of the sink's cluster.
            inherited: offsets with another query's token. They stay and get this token too: the other's, of a
                higher batch id, would else be taken for the newest by the next owner.
        """
        text = token.encode()
        own = on_cluster(self.sources, cluster_id, topics, self.source_cluster)
        left = {tp: each.offset for tp, each in inherited.items()}
        # a shard's state is still that of the other query's attempt
        marked = {tp: mark for tp, each in inherited.items() if (mark := _shard_mark(each)) is not None}
        there = {
            tp: end for tp, end in {**left, **own.ends}.items() if topics.get(tp.topic, 0) > tp.partition
        }
        ends = {**there, self.anchor: own.ends.get(self.anchor, max(0, self.batch.batch_id))}
        return [
            GroupOffset(tp, end, replace(token, shard=marked[tp]).encode() if tp in marked else text)
            for tp, end in sorted(ends.items())
        ]

    def partitions(self) -> set[TopicPartition]:
        """Every partition that may carry the token of this batch."""
        return {self.anchor, *(tp for each in self.sources for tp in each.end or ())}


def _mark_of(shard: ShardReport) -> ShardMark:
    return ShardMark(shard.attempt, shard.time_ms, shard.event_time_ms, shard.counts)


def _shard_mark(offset: GroupOffset) -> ShardMark | None:
    token = Token.decode(offset.metadata)
    return None if token is None else token.shard


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
        self, order: Order, staged: Staged, cluster: Cluster, owner: Owner, deadline: Deadline
    ) -> None:
        self._order = order
        self._staged = staged
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
            RestartQueryError: this driver was overtaken.
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
            attempt=self._begun + 1,
        )
        if rows:
            self._move(Step.CHECK)
            # before `begin`, so that a wrong name costs no transaction
            owner.producer.check_partitions(self._staged.topics, self._deadline)
        self._transact(owner.producer, rows, token)
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
        return decide(
            order.batch_on(owner.cluster_id, owner.topics),
            owner.token,
            {tp: each.offset for tp, each in found.items()},
            missing_token=order.missing_token,
            foreign_query=order.foreign_query,
        )

    def _refuse_rival(self, token: Token, known: Token | None) -> None:
        """Fenced: by a rival if the token moved on under its run, else by our own transaction's age."""
        runs = {self._order.batch.run_id, known.run_id if known is not None else ""}
        if token.run_id not in runs:
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
        self._move(Step.COMMITTED)

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
        return [
            GroupOffset(
                shard.tp,
                ends.get(shard.tp, shard.next_offset),
                replace(token, shard=_mark_of(shard)).encode(),
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
        if self._owner.producer is not None and self._step in _ABORTED_ON_ERROR:
            failpoints.reach("commit.before_abort")
            self._owner.producer.abort(self._deadline)
        self._owner.drop()
        if self._step not in (Step.LOST, Step.COMMITTED, Step.SKIPPED):
            self._move(Step.LOST)

    def _move(self, to: Step) -> None:
        if to not in MOVES[self._step]:
            raise AssertionError(f"commit cannot go from {self._step.name} to {to.name}")
        self._step = to


def _out_of_time(error: KafkaEosError, deadline: Deadline) -> KafkaEosError:
    if isinstance(error, FencedError):
        return error
    return UnavailableError(
        f"the batch could not be committed within {deadline.budget_seconds:.0f} s (commitTimeoutMs); "
        f"last: {error.message}",
        fix="see to the cluster, then restart the query; nothing of this batch is visible to readers.",
    )
