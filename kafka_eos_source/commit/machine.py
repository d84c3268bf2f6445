"""The commit of one batch as a state machine, which retries until the batch is committed.

The rules, explained in `docs/guarantees.md`:

* The process that commits has initialised the transactional id, which fences all others, *before* it reads
  the token (`commit.ownership`).
* A batch is written only if it continues the chain of tokens (`commit.verdict`).
* A producer is used for another transaction only while it is clean (`kafka.producer`).
* If the commit call itself fails, the outcome is unknown. Nothing is aborted; a new producer is initialised,
  and the token shows whether Kafka committed.
* If a producer is fenced once, the token shows why. If it is fenced twice, another driver is running.
* Sinks outside Kafka prepare before the transaction begins, and commit after Kafka has committed
  (`commit.two_phase`). If one refuses rows, the batch is staged again without them, and the commit begins
  again.
"""

from __future__ import annotations

import logging
import socket
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace

from kafka_eos_source.commit.identity_file import IdentityFile
from kafka_eos_source.commit.ownership import read_topic_ids, reuse_producer, take_ownership, topics_of
from kafka_eos_source.commit.report_checks import check_reports, check_shards
from kafka_eos_source.commit.request import (
    Clients,
    CommitContext,
    CommitRequest,
    Decision,
    ProducerSession,
    Restage,
    StagedBatch,
    earliest_due,
)
from kafka_eos_source.commit.steps import (
    ABORTED_ON_ERROR,
    ROLLED_BACK_ON_ERROR,
    OutcomeLostError,
    OvertakenError,
    Progress,
)
from kafka_eos_source.commit.transaction import Transaction
from kafka_eos_source.commit.two_phase import Refusal, Sinks
from kafka_eos_source.commit.verdict import Verdict
from kafka_eos_source.errors import (
    AbortableError,
    FencedError,
    InvalidRecordError,
    KafkaEosError,
    OutcomeUnknownError,
    RestartQueryError,
    RetriableError,
    SinkFailedError,
    SinkRetryableError,
    SinkUnavailableError,
    StateLostError,
    UnavailableError,
)
from kafka_eos_source.observe.figures import EventKind, Step
from kafka_eos_source.observe.trace import Trace
from kafka_eos_source.protocol.token import UNDECIDED, Token
from kafka_eos_source.runtime import failpoints
from kafka_eos_source.runtime.deadline import Deadline, Pauses

_log = logging.getLogger(__name__)

_FIRST_PAUSE_SECONDS = 0.1
_LONGEST_PAUSE_SECONDS = 5.0
#: A sink may refuse rows of one batch so often. It names all of them at once, so a second time is rare.
_MOST_REFUSALS = 5


@dataclass(frozen=True)
class Result:
    """How a commit ended.

    Attributes:
        step: `Step.COMMITTED` or `Step.SKIPPED`.
        transactions: number of transactions that were begun for the batch.
        confirmed_by_token: whether a commit call failed, and the token showed that Kafka had committed.
        token: the newest token that Kafka holds of the query; None if it holds none.
    """

    step: Step
    transactions: int
    confirmed_by_token: bool = False
    token: Token | None = field(default=None, compare=False)


class Commit:
    """The commit of one batch.

    Args:
        request, staged, clients, session, deadline, sinks, identity_file: see `CommitContext`. Without sinks,
            the batch writes only to Kafka.
        trace: measures the commit; None = nobody looks at the figures.
        restage: see `CommitContext`.
        sleep: pauses between two tries; tests replace it.
    """

    def __init__(
        self,
        request: CommitRequest,
        staged: StagedBatch,
        clients: Clients,
        session: ProducerSession,
        deadline: Deadline,
        sinks: Sinks | None = None,
        identity_file: IdentityFile | None = None,
        trace: Trace | None = None,
        *,
        restage: Restage | None = None,
        sleep: Callable[[float], object] = time.sleep,
    ) -> None:
        self._trace = Trace() if trace is None else trace
        self._context = CommitContext(
            request,
            staged,
            clients,
            session,
            deadline,
            Sinks() if sinks is None else sinks,
            identity_file,
            restage,
        )
        self._progress = Progress(trace=self._trace)
        self._sleep = sleep

    @property
    def rows(self) -> int:
        """Number of records that the batch writes. Rows that a sink refuses do not count."""
        return self._context.staged.rows

    def run(self) -> Result:
        """Commits the batch, and retries until the deadline.

        Raises:
            RestartQueryError: if another driver took over, or a sink outside Kafka does not commit in time.
            OutcomeUnknownError: if the deadline passed before Kafka showed whether it committed. A replay of
                the batch finds out.
            OperatorError: if the batch is refused, or retries did not help in time.
        """
        pauses = self._pauses()
        self._trace.enter(Step.OPEN)
        while True:
            try:
                result = self._try()
                if result is not None:
                    return result
                if self._progress.step is Step.RESTAGE:
                    pauses = self._pauses()
                self._progress.move(Step.OPEN)
            except (OvertakenError, OutcomeLostError) as error:
                self._end_try()
                self._trace_failure(error)
                raise
            except (RetriableError, AbortableError, OutcomeUnknownError, FencedError) as error:
                self._end_try()
                self._trace_failure(error)
                self._record_failure(error)
                _log.warning("batch %d: %s; retrying", self._context.request.batch.batch_id, error)
                pauses.wait()
                if pauses.expired:
                    # another try would fail at once, with a less helpful error than this one
                    raise (self._progress.unknown or _out_of_time(error, self._context.deadline)) from error
                self._trace.happened(EventKind.RETRIED, error.message)
                self._progress.move(Step.OPEN)
            except BaseException:
                self._end_try()
                raise

    def _pauses(self) -> Pauses:
        deadline = self._context.deadline
        return Pauses(deadline, _FIRST_PAUSE_SECONDS, _LONGEST_PAUSE_SECONDS, sleep=self._sleep)

    def _try(self) -> Result | None:
        """Tries to commit the batch once.

        Returns:
            None if it committed the genesis token, or staged the batch again, and the batch itself comes
            next.
        """
        # 1. Take ownership and decide. Crash here ⇒ nothing has happened.
        decision = reuse_producer(self._context, self._progress)
        if decision is None:
            self._context.session.drop()
            decision = take_ownership(self._context, self._progress)
        if decision.verdict is Verdict.SKIP:
            return self._skip(decision)
        if decision.batch.once:
            self._refuse_hidden_outcome(decision)
        driver = socket.gethostname(), time.time_ns() // 1_000_000
        check_reports(self._context.staged.shards, decision.batch, decision.held, driver)
        # 2. The genesis token begins the chain. Crash here ⇒ the next start finds it, if it was committed.
        if self._needs_genesis(decision):
            self._write_genesis(decision)
            return None
        # 3. The identity file. Crash here ⇒ the next start finds the token, and writes the file.
        if self._context.identity_file is not None:
            self._context.identity_file.write()
        # 4. The batch. Crash here ⇒ see the steps of the function.
        if decision.verdict is Verdict.WRITE_TOKEN_ONLY:
            return self._write_token_only(decision)
        return self._write(decision)

    # -- skipping, writing the token only, writing -----------------------------------------------

    def _skip(self, decision: Decision) -> Result:
        """Ends the commit: Kafka holds the batch, and the sinks that its token names have committed it."""
        self._progress.move(Step.SKIPPED)
        confirmed_by_token, token = self._progress.unknown is not None, decision.held.token
        if confirmed_by_token and token is not None:
            self._trace.committed(token.sequence)
            self._trace.count(bytes=self._progress.sent_bytes)
        return Result(Step.SKIPPED, self._progress.transactions, confirmed_by_token, token)

    def _write_token_only(self, decision: Decision) -> Result:
        """Commits the token of a batch that a person declared committed (``onMissingToken``)."""
        batch = decision.batch
        changed = [str(shard.tp) for shard in self._context.staged.shards if shard.records]
        if changed:
            raise StateLostError(
                f"onMissingToken=assume_committed:{batch.batch_id} is refused, because the state changes of "
                f"that batch are missing in the changelog ({', '.join(changed)}).",
                fix=f"start with .option('onMissingToken', 'assume_not_committed:{batch.batch_id}'). If the "
                "rows of the batch are in the output nevertheless, they are then doubled.",
            )
        token = replace(self._token(decision, rows=0), sinks=UNDECIDED)
        # 1. The transaction. Crash before its commit ⇒ the next start still needs the person's declaration.
        shards = self._context.staged.shards
        Transaction(self._context, self._progress, decision, token, batch.ends or {}, shards=shards).commit()
        # 2. Sinks have nothing to commit. Crash here ⇒ the next start finds the token.
        self._finish_sinks(token)
        self._progress.move(Step.COMMITTED)
        return Result(Step.SKIPPED, self._progress.transactions, token=token)

    def _check_sealed(self, decision: Decision) -> None:
        """Checks that the topic still has every partition for which tasks have encoded record batches.

        Raises:
            RestartQueryError: if the topic was deleted and created again with fewer partitions.
        """
        context, topic = self._context, self._context.request.topic
        partitions = context.staged.sealed_partitions
        if topic is None or partitions == 0:
            return
        try:
            decision.producer.check_partitions({topic: partitions - 1}, context.deadline)
        except InvalidRecordError as fewer:
            raise RestartQueryError(
                f"tasks encoded the batch for {partitions} partitions of topic {topic!r}, which has fewer "
                "now: it was deleted and created again. Nothing of the batch was written.",
                fix="restart the query a minute later; its tasks then encode the batch again.",
            ) from fewer

    def _write(self, decision: Decision) -> Result | None:
        """Commits the batch: records, state, offsets and token in one transaction, and then the sinks.

        Returns:
            None if a sink refused rows, and the batch was staged again without them.
        """
        context, batch = self._context, decision.batch
        staged, session = context.staged, context.session
        check_shards(
            staged.shards,
            batch.batch_id,
            decision.held,
            lambda tp, start: context.clients.changelog_tail(tp, start, context.deadline),
        )
        if not topics_of(context, decision.own) <= set(session.topic_ids):
            session.topic_ids = read_topic_ids(context, decision.producer, decision.own)
        if staged.rows:
            # 1. Output topics exist and have enough partitions. Crash here ⇒ nothing has happened.
            self._progress.move(Step.CHECK)
            decision.producer.check_partitions(staged.topics, context.deadline)
            self._check_sealed(decision)
        # 2. Sinks prepare. Crash here ⇒ the next owner finds work that no token names, and aborts it.
        self._progress.move(Step.PREPARE)
        token = self._token(decision, staged.rows)
        prepared = context.sinks.prepare(token.sequence, context.deadline)
        if isinstance(prepared, Refusal):
            self._stage_again(prepared)
            return None
        token = replace(token, sinks=prepared)
        failpoints.reach("commit.after_prepare")
        # 3. The transaction. Crash before its commit ⇒ the next owner aborts it and the sinks' work.
        ends = batch.ends or {}
        Transaction(
            context, self._progress, decision, token, ends, rows=staged.rows, shards=staged.shards
        ).commit()
        # 4. Sinks commit. Crash here ⇒ the token names their work, and the next owner commits it.
        self._finish_sinks(token)
        # 5. Spark may write its commit log. Crash here ⇒ Spark replays the batch, and the token skips it.
        self._progress.move(Step.COMMITTED)
        return Result(Step.COMMITTED, self._progress.transactions, token=token)

    def _stage_again(self, refusal: Refusal) -> None:
        """Takes the rows that a sink refuses out of all outputs, so that the commit can begin again.

        Nothing of the batch is in Kafka yet. So after a crash Spark repeats the batch, from its tasks on.

        Raises:
            InvalidRecordError: if a refused row fails the batch.
            SinkFailedError: if the sink has refused rows too often.
        """
        context, progress = self._context, self._progress
        first = min(refusal.rows)
        text = (
            f"sink {refusal.sink!r} refuses {len(refusal.rows):,} of {refusal.of:,} rows of batch "
            f"{context.request.batch.batch_id}, the first because {refusal.rows[first].why}"
        )
        progress.refusals[refusal.sink] += 1
        if progress.refusals[refusal.sink] > _MOST_REFUSALS:
            raise SinkFailedError(
                f"{text}. It has refused other rows {_MOST_REFUSALS} times already, and each time the driver "
                "staged the batch again.",
                fix="let the sink's prepare() name all rows that it refuses at once; or find out who writes "
                "rows to its target that collide with those of the batch.",
            )
        _log.warning("%s; staging the batch again without them", text)
        self._trace.happened(EventKind.REFUSED, text)
        failpoints.reach("commit.after_refusal")
        # 1. Sinks abort what they prepared. Crash here ⇒ the next owner aborts it, because no token names it.
        context.sinks.roll_back(context.deadline)
        # 2. The driver stages the rows again. Crash here ⇒ what it staged is deleted with the batch.
        progress.move(Step.RESTAGE)
        failpoints.reach("commit.before_restage")
        assert context.restage is not None, "only a query with sinks outside Kafka stages for them"
        staged, sinks = context.restage(refusal)
        failpoints.reach("commit.after_restage")
        # 3. The commit begins again, with all of its time. Crash here ⇒ as in step 2.
        deadline = Deadline.after_seconds(context.deadline.budget_seconds)
        self._context = replace(context, staged=staged, sinks=sinks, deadline=deadline)

    def _write_genesis(self, decision: Decision) -> None:
        """Commits the genesis token in its own transaction, with the offsets where the first batch starts.

        From then on a missing token always means that Kafka lost it. Crash before the commit ⇒ nothing has
        happened. Crash after it ⇒ the next start finds the token, and the batch continues it.
        """
        batch, held = decision.batch, decision.held
        is_first = held.newest_sequence < 0 and not batch.promised
        token = Token(
            application_id=batch.application_id,
            query_id=batch.query_id,
            run_id=batch.run_id,
            sequence=0 if is_first else held.next_sequence(),
            batch_id=batch.batch_id - 1,
            start_digest="",
            end_digest=batch.start,
            rows=0,
            target=batch.target,
            cluster_id=self._context.session.cluster.cluster_id,
        )
        Transaction(self._context, self._progress, decision, token, batch.starts or {}).commit("genesis")
        self._progress.move(Step.GENESIS)

    # -- parts of these --------------------------------------------------------------------------

    def _needs_genesis(self, decision: Decision) -> bool:
        """Whether the chain of tokens must begin now. Batch writes have no chain: versions may have gaps."""
        batch = decision.batch
        if batch.versioned or batch.once or decision.verdict is not Verdict.WRITE:
            return False
        return decision.held.whole_token is None

    def _refuse_hidden_outcome(self, decision: Decision) -> None:
        """Raises if another write replaced the token that would show this write's outcome.

        Writes without a version share their group if ``kafka.group.id`` or ``application.id`` names one.

        Raises:
            OutcomeLostError: if another write did, and the outcome of an earlier try is not known.
        """
        request, unknown = self._context.request, self._progress.unknown
        if unknown is None or decision.in_group.get(request.anchor) == self._progress.anchor_before:
            return
        raise OutcomeLostError(
            f"{unknown.message} Another write has since committed its token in group {request.group_id!r}, "
            "so Kafka no longer shows whether this write was committed.",
            fix="check whether the rows are in the output before you write them again. Give each write "
            "without txnVersion its own group: leave out kafka.group.id and application.id.",
        ) from unknown

    def _token(self, decision: Decision, rows: int) -> Token:
        batch = decision.batch
        return Token(
            application_id=batch.application_id,
            query_id=batch.query_id,
            run_id=batch.run_id,
            sequence=decision.held.next_sequence(),
            batch_id=batch.batch_id,
            start_digest=batch.start,
            end_digest=batch.end,
            rows=rows,
            target=batch.target,
            cluster_id=self._context.session.cluster.cluster_id,
            transaction_number=self._progress.transactions + 1,
            due=earliest_due(self._context.staged.shards),
        )

    def _finish_sinks(self, token: Token) -> None:
        self._progress.move(Step.FINISH)
        self._context.sinks.finish(token, self._context.deadline)
        failpoints.reach("commit.after_finish")

    # -- a try that failed -----------------------------------------------------------------------

    def _record_failure(self, error: KafkaEosError) -> None:
        """Records, for the next try, that the outcome is unknown or that the producer was fenced.

        Raises:
            FencedError: if this is the second time that the producer was fenced.
        """
        progress, batch = self._progress, self._context.request.batch
        if isinstance(error, OutcomeUnknownError):
            progress.unknown = error
            fenced = error.__cause__ if isinstance(error.__cause__, FencedError) else None
        else:
            fenced = error if isinstance(error, FencedError) else None
        if fenced is None:
            return
        if progress.fenced is not None:
            raise FencedError(
                f"this driver was fenced twice while it committed batch {batch.batch_id} of application.id="
                f"{batch.application_id!r}: another driver is committing under the same id, or the "
                f"transaction timed out (it was begun {time.monotonic() - progress.begun_at:.0f} s ago).",
                fix="let only one query use this application.id, and only one driver this checkpoint; if "
                "that is the case, raise kafka.transaction.timeout.ms or make batches smaller.",
            ) from fenced
        progress.fenced = fenced

    def _trace_failure(self, error: KafkaEosError) -> None:
        text = error.message
        if isinstance(error, OutcomeUnknownError):
            self._trace.happened(EventKind.UNKNOWN, text)
        if isinstance(error, FencedError) or isinstance(error.__cause__, FencedError):
            self._trace.happened(EventKind.FENCED, text)
        self._trace.waiting(text)

    def _end_try(self) -> None:
        """Aborts an open transaction, takes back prepared work, and closes the producer for good."""
        session, deadline = self._context.session, self._context.deadline
        if session.producer is not None and self._progress.step in ABORTED_ON_ERROR:
            failpoints.reach("commit.before_abort")
            session.producer.abort(deadline)
            self._trace.happened(EventKind.ABORTED, f"in step {self._progress.step.value!r}")
        session.drop()
        if self._progress.step in ROLLED_BACK_ON_ERROR:
            self._context.sinks.roll_back(deadline)
        if self._progress.step not in (Step.LOST, Step.COMMITTED, Step.SKIPPED):
            self._progress.move(Step.LOST)


def _out_of_time(error: KafkaEosError, deadline: Deadline) -> KafkaEosError:
    """The error to raise when the deadline has passed; ``error`` is the failure of the last try."""
    if isinstance(error, FencedError):
        return error
    if isinstance(error, SinkRetryableError):
        return SinkUnavailableError(
            f"a sink could not prepare the batch within {deadline.budget_seconds:.0f} s (commitTimeoutMs): "
            f"{error.message}",
            fix="check that system, then restart the query; nothing of this batch is visible to readers.",
        )
    return UnavailableError(
        f"the batch could not be committed within {deadline.budget_seconds:.0f} s (commitTimeoutMs); "
        f"the last error was: {error.message}",
        fix="check the cluster, then restart the query; nothing of this batch is visible to readers.",
    )
