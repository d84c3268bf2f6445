"""The commit of one batch as a state machine: the only place that begins, commits or aborts.

The rules, each from `docs/guarantees.md`:

* Whoever commits has initialised, fencing all others, *before* it read the token.
* A batch is written only if it continues the chain of tokens (`commit.verdict`).
* A producer carries another transaction only while it is clean (`kafka.transactional`).
* After an error of the commit itself the outcome is unknown: nothing is aborted, a new producer is
  initialised, and the token is believed.
* A producer that is fenced once asks the token why. A producer that is fenced twice has a rival.
* Sinks outside Kafka prepare before the transaction begins, under an id that is new after each
  `init_transactions`, and commit when Kafka has. What they hold prepared is listed before that call, so that
  the token read after it decides their fate for good (`commit.sink_fate`).
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from kafka_eos_source.commit.interfaces import (
    Clients,
    FirstBatchMarker,
    NoCheckpoint,
    NoSinks,
    Producer,
    ProducerSession,
    Sinks,
    Staged,
)
from kafka_eos_source.commit.recovered import recover
from kafka_eos_source.commit.request import Cluster, CommitRequest, inherited_shards, progress_of
from kafka_eos_source.commit.shard_checks import check_same_log, check_shards, stand_at
from kafka_eos_source.commit.steps import ABORTED_ON_ERROR, MOVES, ROLLED_BACK_ON_ERROR, Step
from kafka_eos_source.commit.verdict import Batch, Held, Verdict, batch_verdict, continues
from kafka_eos_source.errors import (
    AbortableError,
    DataLossError,
    FencedError,
    ForeignQueryError,
    KafkaEosError,
    OutcomeUnknownError,
    RetriableError,
    SinkRetryableError,
    SinkUnavailableError,
    StateLostError,
    UnavailableError,
)
from kafka_eos_source.model import GroupOffset, Offsets, ShardReport, TopicPartition
from kafka_eos_source.protocol.token import FORMAT, UNDECIDED, Token
from kafka_eos_source.protocol.token_record import TokenRecord, record_batch
from kafka_eos_source.runtime import failpoints
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


@dataclass(frozen=True)
class Attempt:
    """What one attempt to commit the batch knows.

    Attributes:
        producer: initialised, and with no transaction open.
        batch: with its offsets on the sink's cluster.
        held: what the group holds, as the decision saw it.
        verdict: what to do with the batch.
        in_group: the committed offsets of the group itself; they differ from ``held`` where a token comes
            from elsewhere.
    """

    producer: Producer
    batch: Batch
    held: Held
    verdict: Verdict
    in_group: Mapping[TopicPartition, GroupOffset]


class _OvertakenError(FencedError):
    """Fenced, and the token says by whom: not a reason to try again."""


class _UnknownForGoodError(OutcomeUnknownError):
    """Nothing in Kafka tells any more whether a transaction was committed: trying again does not help."""


class Commit:
    """One run of the machine.

    Args:
        request: the batch.
        staged: its rows.
        clients: of the sink's cluster.
        session: what this process keeps of the transactional id.
        deadline: for all of it.
        sinks: outside Kafka.
        first_batch: the checkpoint's first-batch file.
    """

    def __init__(
        self,
        request: CommitRequest,
        staged: Staged,
        clients: Clients,
        session: ProducerSession,
        deadline: Deadline,
        sinks: Sinks | None = None,
        first_batch: FirstBatchMarker | None = None,
    ) -> None:
        self._request = request
        self._staged = staged
        self._sinks = NoSinks() if sinks is None else sinks
        self._clients = clients
        self._session = session
        self._deadline = deadline
        self._first_batch = NoCheckpoint() if first_batch is None else first_batch
        self._step = Step.OPEN
        self._begun = 0
        self._begun_at = 0.0
        self._fenced: FencedError | None = None
        self._unknown: OutcomeUnknownError | None = None
        self._anchor_before: GroupOffset | None = None  # as it was before the newest commit was sent
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
                result = self._attempt()
                if result is not None:
                    return result
                self._move(Step.OPEN)
            except (_OvertakenError, _UnknownForGoodError):
                self._end_attempt()
                raise
            except (RetriableError, AbortableError, OutcomeUnknownError, FencedError) as error:
                self._end_attempt()
                self._record_failure(error)
                _log.warning("batch %d: %s; trying again", self._request.batch.batch_id, error)
                self._pause.wait(min(pause, self._deadline.remaining_seconds()))
                if self._deadline.expired:
                    # another attempt would end at once, with an error that says less than this one
                    raise (self._unknown or _out_of_time(error, self._deadline)) from error
                pause = min(2 * pause, _LONGEST_PAUSE_SECONDS)
                self._move(Step.OPEN)
            except BaseException:
                self._end_attempt()
                raise

    def _attempt(self) -> Result | None:
        """One attempt. Returns None if it wrote the genesis token and the batch itself is still to come."""
        attempt = self._reuse()
        if attempt is None:
            self._session.drop()
            attempt = self._open()
        if attempt.verdict is Verdict.SKIP:
            return self._skip()
        if attempt.batch.once:
            self._refuse_hidden_outcome(attempt)
        if self._needs_genesis(attempt):
            self._write_genesis(attempt)
            return None
        if not (attempt.batch.versioned or attempt.batch.once):
            # Crash here ⇒ the next start finds the token, and writes the file if it is missing.
            self._first_batch.write()
        if attempt.verdict is Verdict.WRITE_TOKEN_ONLY:
            return self._write_token_only(attempt)
        return self._write(attempt)

    # -- deciding --------------------------------------------------------------------------------

    def _reuse(self) -> Attempt | None:
        """The producer at hand, if it is clean and this batch continues what it committed last.

        What this process knows of the group is what the group holds: whoever committed since would have
        fenced its producer.
        """
        request, session = self._request, self._session
        batch, producer, held = request.batch, session.producer, session.held
        if producer is None:
            return None
        records = session.token_records
        if request.token_topic != (None if records is None else records.name):
            return None  # a restart in the same process set, changed or removed the option
        if request.new_group:
            if self._begun or not producer.is_clean():
                return None
            return Attempt(producer, batch, Held(batch.application_id), Verdict.WRITE, {})
        if held is None or held.token is None or held.token.query_id != batch.query_id:
            return None
        if session.group_id != request.group_id:
            return None  # a restart in the same process changed kafka.group.id
        if batch.versioned:
            follows = batch.batch_id > held.token.batch_id
        else:
            follows = continues(batch, held.token) and not any(each.jump for each in request.sources)
        # shards whose state is newer than what this process knows prove that another one committed since
        if not follows or not stand_at(self._staged.shards, held) or not producer.is_clean():
            return None
        resolved = request.batch_on(session.cluster, session.topic_ids)
        return Attempt(producer, resolved, held, Verdict.WRITE, held.offsets)

    def _open(self) -> Attempt:
        """Initialises a producer, reads the token, and decides.

        The order matters: before `init_transactions` a dead run's transaction may still commit.
        """
        request, session = self._request, self._session
        # 1. Sinks list what they hold prepared. Crash here ⇒ nothing happened.
        self._move(Step.INIT)
        self._sinks.list_prepared(self._deadline)
        failpoints.reach("commit.after_look")
        proved = self._proved_offsets() if self._sinks.has_prepared() else None
        # 2. A new producer fences all others. Crash here ⇒ nothing is open any more.
        producer = session.producer = self._clients.producer(request.batch.application_id)
        producer.init(self._deadline)
        failpoints.reach("commit.after_init")
        # 3. What Kafka holds.
        self._move(Step.TOKEN)
        session.cluster = Cluster(*producer.cluster(self._deadline))
        if not session.cluster.has(request.anchor):
            raise UnavailableError(
                f"the anchor topic {request.anchor.topic!r} does not exist on the sink's cluster "
                f"({session.cluster.cluster_id}), or may not be described.",
                fix="create it, grant Read and Describe, or set .option('anchor.topic', …) to another topic.",
            )
        partitions = request.partitions(session.cluster)
        found = self._clients.group_offsets(request.group_id, partitions, self._deadline)
        if proved is not None:
            self._refuse_changed(partitions, found, proved)
        held = self._with_record(Held.of(request.batch.application_id, found))
        known, held = session.held, self._with_predecessor(held)
        session.held, session.group_id = held, request.group_id
        failpoints.reach("commit.after_token")
        if self._fenced is not None and held.token is not None:
            self._refuse_rival(held.token, known)
        # 4. The decision.
        session.topic_ids = self._topic_ids(producer)
        batch = request.batch_on(session.cluster, session.topic_ids)
        verdict = self._decide(batch, held)
        failpoints.reach("commit.after_settle")
        return Attempt(producer, batch, held, verdict, found)

    def _proved_offsets(self) -> Mapping[TopicPartition, GroupOffset] | None:
        """The committed offsets, from a coordinator that took an offset commit of ours, which is taken back.

        Sinks commit and abort for good what the token says, and they do so before a transaction of the batch
        can show that the token was out of date (`_confirm`). So the proof comes first where sinks hold
        something prepared, which is rare. Its producer is not used again: a late request to end this
        transaction could end the next one.

        Returns:
            None if the anchor topic does not exist.
        """
        request, deadline = self._request, self._deadline
        producer = self._clients.producer(request.batch.application_id)
        try:
            producer.init(deadline)
            cluster = Cluster(*producer.cluster(deadline))
            if not cluster.has(request.anchor):
                return None
            producer.begin()
            producer.send_offsets([GroupOffset(request.anchor, 0, "")], request.group_id, deadline)
            found = self._clients.committed_now(request.group_id, request.partitions(cluster), deadline)
            producer.abort(deadline)
            return found
        finally:
            producer.close()

    def _decide(self, batch: Batch, held: Held) -> Verdict:
        """The verdict on the batch. Sinks first get what the token promises them, also if it is refused.

        A token that is not the newest promises nothing: the lost one may name what sinks hold prepared.
        """
        request, token = self._request, held.whole_token
        try:
            verdict = batch_verdict(
                batch,
                held,
                request.anchor,
                missing_token=request.missing_token,
                foreign_query=request.foreign_query,
                moved_offsets=request.moved_offsets,
                token_topic=request.token_topic,
            )
        except ForeignQueryError:
            raise  # the sinks that the token names are the other query's
        except KafkaEosError:
            if token is not None:
                self._resolve_sinks(token, batch, None)
            raise
        # Spark plans the next batch only when this one is finished everywhere
        finished = (
            verdict is Verdict.WRITE
            and token is not None
            and token.query_id == batch.query_id
            and continues(batch, token)
        )
        if token is None or finished:
            self._sinks.resolve_prepared(token, batch, verdict, self._deadline)
        else:
            self._resolve_sinks(token, batch, verdict)
        return verdict

    def _resolve_sinks(self, token: Token, batch: Batch, verdict: Verdict | None) -> None:
        """Commits what the token names in sinks, whoever wrote it, and takes back what nothing names."""
        self._sinks.resolve_prepared(token, batch, verdict, self._deadline)
        self._sinks.finish(token, self._deadline)

    def _with_record(self, held: Held) -> Held:
        """Finds the token in the token topic if the group lost it."""
        request, session = self._request, self._session
        session.token_records = None
        if request.token_topic is None:
            return held
        session.token_records = self._clients.token_records(request.token_topic, self._deadline)
        return recover(
            held,
            request.group_id,
            session.token_records,
            self._deadline,
            missing_token=request.missing_token,
            is_complete=self._first_batch.has_all_tokens(request.token_topic),
        )

    def _with_predecessor(self, held: Held) -> Held:
        """Finds the token that a series of batch writes left under its names of format 1."""
        request = self._request
        former = request.predecessor
        if former is None or (held.token is not None and held.token.query_id == request.batch.query_id):
            return held
        translated = self._translated(held.offsets)
        if translated is None and former.application_id not in (held.application_id, request.group_id):
            wanted = {request.anchor}
            found = self._clients.group_offsets(former.application_id, wanted, self._deadline)
            if self._translated(found) is not None:
                # a writer of the older version may be in the midst of a commit: fence it, and look again
                older = self._clients.producer(former.application_id)
                try:
                    older.init(self._deadline)
                finally:
                    older.close()
                found = self._clients.group_offsets(former.application_id, wanted, self._deadline)
                translated = self._translated(found)
        if translated is None:
            return held
        return Held.of(held.application_id, {**held.offsets, request.anchor: translated})

    def _translated(self, offsets: Mapping[TopicPartition, GroupOffset]) -> GroupOffset | None:
        """The anchor's offset with a token of format 1 of the same series, under the names of today."""
        request = self._request
        offset = offsets.get(request.anchor)
        token = None if offset is None else Token.decode(offset.metadata)
        if offset is None or token is None or request.predecessor is None:
            return None
        if token.format == FORMAT or token.query_id != request.predecessor.query_id:
            return None
        batch = request.batch
        own = replace(token, application_id=batch.application_id, query_id=batch.query_id)
        return replace(offset, metadata=own.encode())

    def _refuse_rival(self, token: Token, known: Held | None) -> None:
        """Fenced: by a rival if the token moved on under its run, else by our own transaction's age."""
        batch = self._request.batch
        before = None if known is None else known.token
        runs = {batch.run_id, before.run_id if before is not None else ""}
        if token.run_id not in runs:
            # what we had prepared is dead, and the other run may not look again for weeks
            self._sinks.resolve_prepared(token, batch, None, self._deadline)
            raise _OvertakenError(
                f"run {token.run_id} of query {token.query_id} took over application.id="
                f"{token.application_id!r} and has written batch {token.batch_id}; this is run "
                f"{batch.run_id}, batch {batch.batch_id}.",
                fix="nothing, if the other run is meant to go on; else stop it and start this query again.",
            ) from self._fenced

    # -- the three ways to go on -----------------------------------------------------------------

    def _skip(self) -> Result:
        """Kafka holds the batch, and by now the sinks that its token names hold it too."""
        self._move(Step.SKIPPED)
        return Result(Step.SKIPPED, self._begun, settled_by_token=self._unknown is not None)

    def _refuse_hidden_outcome(self, attempt: Attempt) -> None:
        """Raises if another write has replaced the token that would tell of our transaction.

        Writes without a version share their group if ``kafka.group.id`` or ``application.id`` names one.
        """
        now = attempt.in_group.get(self._request.anchor)
        if self._unknown is None or now == self._anchor_before:
            return
        raise _UnknownForGoodError(
            f"{self._unknown.message} Another write committed its token in group {self._request.group_id!r} "
            "meanwhile, so this write's own token cannot be looked for.",
            fix="look whether the rows are in the output before you write them again. Let each write without "
            "txnVersion have a group of its own: leave out kafka.group.id and application.id.",
        ) from self._unknown

    def _write_token_only(self, attempt: Attempt) -> Result:
        """Commits the token of a batch that, as a person says, is in Kafka without one."""
        changed = [str(shard.tp) for shard in self._staged.shards if shard.records]
        if changed:
            raise StateLostError(
                "onMissingToken=assume_committed, and the state changes of batch "
                f"{attempt.batch.batch_id} are not in the changelog: {', '.join(changed)}.",
                fix="start with .option('onMissingToken', 'assume_not_committed').",
            )
        token = replace(self._token(attempt, rows=0), sinks=UNDECIDED)
        # Crash before the commit ⇒ nothing is visible, and the person is asked again.
        self._transact(attempt, token, attempt.batch.ends or {}, rows=0)
        self._finish_sinks(token)
        self._move(Step.COMMITTED)
        return Result(Step.SKIPPED, self._begun)

    def _write(self, attempt: Attempt) -> Result:
        """Commits the batch: records, offsets, state and token in one transaction."""
        rows, deadline = self._staged.rows, self._deadline
        check_shards(self._staged.shards, attempt.batch.batch_id, attempt.held)
        if not self._topics() <= set(self._session.topic_ids):
            self._session.topic_ids = self._topic_ids(attempt.producer)
        if rows:
            # 1. Output topics exist and are wide enough. Crash here ⇒ nothing happened.
            self._move(Step.CHECK)
            attempt.producer.check_partitions(self._staged.topics, deadline)
        # 2. Sinks prepare. Crash here ⇒ the next owner finds work that no token names, and aborts it.
        self._move(Step.PREPARE)
        token = self._token(attempt, rows)
        token = replace(token, sinks=self._sinks.prepare(token.sequence, deadline))
        failpoints.reach("commit.after_prepare")
        # 3. The transaction. Crash before its commit ⇒ the next owner's init aborts it, and the sinks' work.
        self._transact(attempt, token, attempt.batch.ends or {}, rows=rows)
        # 4. Sinks commit. Crash here ⇒ the token names them, and the next owner commits them.
        self._finish_sinks(token)
        # 5. Spark may write its commit log. Crash here ⇒ Spark replays the batch, and the token skips it.
        self._move(Step.COMMITTED)
        return Result(Step.COMMITTED, self._begun)

    def _finish_sinks(self, token: Token) -> None:
        self._move(Step.FINISH)
        self._sinks.finish(token, self._deadline)
        failpoints.reach("commit.after_finish")

    # -- the genesis token -----------------------------------------------------------------------

    def _needs_genesis(self, attempt: Attempt) -> bool:
        """Whether the chain has no beginning yet. Batch writes have none: their versions may have gaps."""
        batch = attempt.batch
        if batch.versioned or batch.once or attempt.verdict is not Verdict.WRITE:
            return False
        return attempt.held.whole_token is None

    def _write_genesis(self, attempt: Attempt) -> None:
        """Commits the first token of a chain in a transaction of its own: it ends where the batch starts.

        From then on a missing token always means that Kafka lost it. Crash before the commit ⇒ nothing
        happened. Crash after it ⇒ the next start finds the token, and the batch continues it.
        """
        batch = attempt.batch
        is_first = attempt.held.newest_sequence < 0 and not batch.promised
        token = Token(
            application_id=batch.application_id,
            query_id=batch.query_id,
            run_id=batch.run_id,
            sequence=0 if is_first else attempt.held.next_sequence(),
            batch_id=batch.batch_id - 1,
            start_digest="",
            end_digest=batch.start.current,
            rows=0,
        )
        self._transact(attempt, token, batch.starts or {}, rows=0, with_shards=False)
        self._move(Step.GENESIS)

    # -- one transaction -------------------------------------------------------------------------

    def _token(self, attempt: Attempt, rows: int) -> Token:
        batch = attempt.batch
        return Token(
            application_id=batch.application_id,
            query_id=batch.query_id,
            run_id=batch.run_id,
            sequence=attempt.held.next_sequence(),
            batch_id=batch.batch_id,
            start_digest=batch.start.current,
            end_digest=batch.end.current,
            rows=rows,
            transaction_number=self._begun + 1,
        )

    def _transact(
        self,
        attempt: Attempt,
        token: Token,
        offsets: Mapping[TopicPartition, int],
        *,
        rows: int,
        with_shards: bool = True,
    ) -> None:
        request, session, deadline = self._request, self._session, self._deadline
        producer = attempt.producer
        point = "commit" if with_shards else "genesis"
        failpoints.reach(f"{point}.before_begin")
        self._move(Step.BEGIN)
        producer.begin()
        self._begun += 1
        self._begun_at = time.monotonic()
        shards = self._staged.shards if with_shards else ()
        # offsets of an old topic mean nothing in the one that was created in its place
        accepted = request.own(session.cluster).lossy_topics
        offsets = _without(offsets, self._recreated(session.topic_ids) & accepted)
        written: list[GroupOffset] | None = None
        if rows and not any(shard.records for shard in shards):
            # all offsets are known already, so the record for the token topic travels with the rows
            written = self._group_offsets(attempt, token, offsets, shards)
            self._produce(producer, rows, self._record(token, written))
        elif rows:
            self._produce(producer, rows)
        failpoints.reach(f"{point}.after_flush")
        self._move(Step.OFFSETS)
        left = _without(offsets, self._check_topic_ids(producer, is_written=bool(rows)))
        if left != offsets:
            if session.token_records is not None and written is not None:
                raise AbortableError("a source topic was created again after the offsets had been recorded")
            offsets, written = left, None
        try:
            if written is None:
                written = self._group_offsets(attempt, token, offsets, shards)
                record = self._record(token, written)
                if record is not None:
                    self._send_record(producer, record)
                    producer.flush(deadline)
            producer.send_offsets(written, request.group_id, deadline)
        except UnavailableError as error:
            if deadline.expired:
                raise
            # a topic was deleted: the next attempt sees which are left
            raise AbortableError(error.message) from error
        self._confirm(attempt)
        failpoints.reach(f"{point}.before_commit")
        self._move(Step.COMMIT)
        self._anchor_before = attempt.in_group.get(request.anchor)
        producer.commit(deadline)
        failpoints.reach(f"{point}.after_commit")
        session.held = attempt.held.after(token, {each.tp: each for each in written})
        session.confirmed = True
        # Crash here ⇒ the record is not believed if the group is lost now; the next batch says it again.
        if session.token_records is not None:
            self._first_batch.confirm_token_topic()

    def _group_offsets(
        self,
        attempt: Attempt,
        token: Token,
        offsets: Mapping[TopicPartition, int],
        shards: Sequence[ShardReport],
    ) -> list[GroupOffset]:
        """All offsets of one transaction. The changes of shards must have been flushed."""
        request, session, producer = self._request, self._session, attempt.producer
        if not all(session.cluster.has(tp) for tp in request.partitions(session.cluster)):
            # a partition is newer than this producer, or gone
            session.cluster = Cluster(*producer.cluster(self._deadline))
        reported = {shard.tp for shard in shards}
        inherited = inherited_shards(attempt.held, token.query_id)
        inherited = [each for each in inherited if each.tp not in reported]
        return [
            *request.offsets(token, offsets, session.cluster, inherited),
            *self._changelog_offsets(producer, token, shards),
        ]

    def _produce(self, producer: Producer, rows: int, record: TokenRecord | None = None) -> None:
        """Sends the staged records and the changes of state, and proves that none was left out."""
        deadline = self._deadline
        self._move(Step.PRODUCE)
        if record is not None:
            self._send_record(producer, record)
        sent = producer.enqueued
        for batch in self._staged.batches():
            producer.send(batch, self._request.topic, deadline)
            failpoints.reach("commit.within_produce")
        for tp, changes in self._staged.changes():
            producer.send(changes, tp.topic, deadline)
            failpoints.reach("commit.within_changelog")
        self._move(Step.FLUSH)
        producer.flush(deadline)
        if producer.enqueued != sent + rows:
            # a record that was refused locally does not fail a commit by itself
            raise AbortableError(f"{producer.enqueued - sent} records enqueued, {rows} staged")

    def _record(self, token: Token, offsets: Iterable[GroupOffset]) -> TokenRecord | None:
        """The record for the token topic, which holds what the transaction writes to the group."""
        request, records = self._request, self._session.token_records
        if records is None:
            return None
        return TokenRecord.of(
            token,
            offsets,
            request.anchor,
            request.group_id,
            records.topic_id,
            records.partition_of(token.application_id),
            time.time_ns() // 1_000_000,
        )

    def _send_record(self, producer: Producer, record: TokenRecord) -> None:
        records = self._session.token_records
        assert records is not None, "there is a record"
        before = producer.enqueued
        producer.send(record_batch(record), records.name, self._deadline)
        if producer.enqueued != before + 1:
            raise AbortableError(f"the record for token.topic={records.name!r} was not enqueued")
        failpoints.reach("commit.after_token_record")

    def _confirm(self, attempt: Attempt) -> None:
        """Reads the offsets again from a coordinator that has just taken an offset commit of ours.

        OffsetFetch is no quorum read: a coordinator that is cut off from the others may have answered with
        old offsets and an old token. One that took our offsets was not cut off.

        Raises:
            AbortableError: the decision was made on other offsets than the group holds.
        """
        request, session = self._request, self._session
        if session.confirmed or request.new_group:
            return
        partitions = request.partitions(session.cluster)
        found = self._clients.committed_now(request.group_id, partitions, self._deadline)
        self._refuse_changed(partitions, attempt.in_group, found)

    def _refuse_changed(
        self,
        partitions: Collection[TopicPartition],
        read: Mapping[TopicPartition, GroupOffset],
        proved: Mapping[TopicPartition, GroupOffset],
    ) -> None:
        """Raises AbortableError unless what was read is what a coordinator in good standing says."""
        changed = sorted(tp for tp in partitions if read.get(tp) != proved.get(tp))
        if changed:
            raise AbortableError(
                f"the committed offset of {changed[0]} in group {self._request.group_id!r} was read as "
                "another one than it is: another program committed it meanwhile, or a group coordinator "
                "that answered was out of date."
            )

    def _topics(self) -> set[str]:
        """Topics whose ids matter: those that the batch reads on this cluster, and those that it writes."""
        read = self._request.own(self._session.cluster).topic_ids
        records = self._session.token_records
        return {*read, *self._staged.topics, *(() if records is None else (records.name,))}

    def _topic_ids(self, producer: Producer) -> Mapping[str, str]:
        """The ids of those topics as they are now. A cluster that does not answer costs the attempt."""
        try:
            return producer.topic_ids(self._topics())
        except UnavailableError as error:
            if self._deadline.expired:
                raise
            raise AbortableError(error.message) from error

    def _check_topic_ids(self, producer: Producer, *, is_written: bool) -> set[str]:
        """No topic was deleted and created again since the batch was planned, or while it was written.

        Topic ids never recur. So if the ids after the last acknowledged record are those from before the
        first one, all records went to the same topics.

        Returns:
            Source topics that were created again, and whose loss the user accepts.

        Raises:
            DataLossError: a source topic is another one than the batch was planned for.
            AbortableError: an output topic was replaced while the transaction was written.
        """
        own = self._request.own(self._session.cluster)
        before, now = self._session.topic_ids, self._topic_ids(producer)
        self._session.topic_ids = now
        recreated = self._recreated(now)
        for topic in sorted(recreated):
            if topic in own.lossy_topics:
                _log.warning("topic %r was deleted and created again (failOnDataLoss=false)", topic)
                continue
            planned = own.topic_ids[topic]
            raise DataLossError(
                f"TOPIC_RECREATED: topic {topic!r} was deleted and created again after batch "
                f"{self._request.batch.batch_id} was planned: its id was {planned} and is {now[topic]}. What "
                "was read may be of either one. Nothing of the batch was committed.",
                fix="if that is expected, restart with .option('failOnDataLoss', 'false') on the source. If "
                "this batch was planned before that option was set, also delete "
                f"offsets/{self._request.batch.batch_id} in the checkpoint, so that it is planned again.",
            )
        records = self._session.token_records
        if records is not None and now.get(records.name, records.topic_id) != records.topic_id:
            raise AbortableError(f"token.topic={records.name!r} was deleted and created again meanwhile")
        for topic in sorted(self._staged.topics) if is_written else ():
            if now.get(topic) != before.get(topic, now.get(topic)):
                raise AbortableError(f"output topic {topic!r} was deleted and created again meanwhile")
        return recreated

    def _recreated(self, topic_ids: Mapping[str, str]) -> set[str]:
        """Source topics that have another id now than when the batch was planned."""
        planned = self._request.own(self._session.cluster).topic_ids
        return {topic for topic, was in planned.items() if topic_ids.get(topic, was) != was}

    # -- state of operators ----------------------------------------------------------------------

    def _changelog_offsets(
        self, producer: Producer, token: Token, shards: Iterable[ShardReport]
    ) -> list[GroupOffset]:
        """How far each shard's changelog is committed, and by which task attempt.

        The log's end is asked for after the flush: nobody else writes there, for this producer has fenced all
        others and its transaction is the only one open.
        """
        changed: Collection[TopicPartition] = [shard.tp for shard in shards if shard.records]
        ends = producer.ends(changed) if changed else {}
        for shard in shards:
            if shard.tp in ends:
                check_same_log(shard, ends[shard.tp])
        return [
            GroupOffset(
                shard.tp,
                ends.get(shard.tp, shard.next_offset),
                replace(token, shard=progress_of(shard)).encode(),
            )
            for shard in shards
        ]

    # -- the end of an attempt -------------------------------------------------------------------

    def _record_failure(self, error: KafkaEosError) -> None:
        """Keeps what the next attempt must know, and applies the rule of the second fencing."""
        if isinstance(error, OutcomeUnknownError):
            self._unknown = error
            fenced = error.__cause__ if isinstance(error.__cause__, FencedError) else None
        else:
            fenced = error if isinstance(error, FencedError) else None
        if fenced is None:
            return
        batch = self._request.batch
        if self._fenced is not None:
            raise FencedError(
                f"fenced twice while committing batch {batch.batch_id} of application.id="
                f"{batch.application_id!r}: another driver commits under it at this moment, or "
                f"the transaction timed out (begun {time.monotonic() - self._begun_at:.0f} s ago).",
                fix="let only one query use this application.id, and only one driver this checkpoint; if "
                "that is so, raise kafka.transaction.timeout.ms or make batches smaller.",
            ) from fenced
        self._fenced = fenced

    def _end_attempt(self) -> None:
        """Aborts what may be aborted, and never uses this producer again."""
        if self._session.producer is not None and self._step in ABORTED_ON_ERROR:
            failpoints.reach("commit.before_abort")
            self._session.producer.abort(self._deadline)
        self._session.drop()
        if self._step in ROLLED_BACK_ON_ERROR:
            self._sinks.roll_back(self._deadline)
        if self._step not in (Step.LOST, Step.COMMITTED, Step.SKIPPED):
            self._move(Step.LOST)

    def _move(self, to: Step) -> None:
        if to not in MOVES[self._step]:
            raise AssertionError(f"commit cannot go from {self._step.name} to {to.name}")
        self._step = to


def _without(offsets: Offsets, topics: Collection[str]) -> dict[TopicPartition, int]:
    """The offsets of all other topics."""
    return {tp: offset for tp, offset in offsets.items() if tp.topic not in topics}


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
