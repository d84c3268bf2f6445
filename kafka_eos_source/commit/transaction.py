"""Writes one transaction: records, state changes, source offsets and token become visible together."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import replace

from kafka_eos_source.commit.ownership import read_topic_ids, refuse_changed, refuse_members, topics_of
from kafka_eos_source.commit.report_checks import check_same_log, check_tail, is_alone
from kafka_eos_source.commit.request import (
    Cluster,
    CommitContext,
    Decision,
    OwnOffsets,
    inherited_shards,
    progress_of,
)
from kafka_eos_source.commit.steps import Progress
from kafka_eos_source.commit.verdict import Held, moved_partitions
from kafka_eos_source.errors import (
    AbortableError,
    DataLossError,
    GroupInUseError,
    KafkaEosError,
    UnavailableError,
)
from kafka_eos_source.model import GroupOffset, Offsets, ShardReport, TopicPartition
from kafka_eos_source.observe.figures import Step
from kafka_eos_source.protocol.token import Token, TokenRecord, record_batch
from kafka_eos_source.runtime import failpoints
from kafka_eos_source.runtime.deadline import Deadline
from kafka_eos_source.spark.arrow import SEALED
from kafka_eos_source.spark.schema import TOPIC
from kafka_eos_source.stage.staging import sealed_batches

_log = logging.getLogger(__name__)

#: A running query looks at most this often whether another program uses its group.
_LOOK_SECONDS = 60.0
#: How long a look may take. A transaction does not wait longer for it.
_LOOK_TIMEOUT_SECONDS = 10.0


class Transaction:
    """One transaction of the commit of a batch.

    Args:
        context: the work to do.
        progress: progress of the commit; the transaction is counted there.
        decision: producer and facts of this try.
        token: the token that the transaction commits.
        offsets: end offsets of source partitions to commit.
        rows: number of staged records; 0 if the transaction carries no records.
        shards: reports of the shards whose state changes belong to the transaction.
    """

    def __init__(
        self,
        context: CommitContext,
        progress: Progress,
        decision: Decision,
        token: Token,
        offsets: Offsets,
        *,
        rows: int = 0,
        shards: Sequence[ShardReport] = (),
    ) -> None:
        self._context = context
        self._request = context.request
        self._session = context.session
        self._deadline = context.deadline
        self._progress = progress
        self._decision = decision
        self._producer = decision.producer
        self._own = decision.own  # computed again when the cluster is listed again
        self._token = token
        self._offsets = offsets
        self._rows = rows
        self._shards = shards
        self._sent_bytes = 0

    def commit(self, point: str = "commit") -> None:
        """Writes and commits the transaction.

        Args:
            point: prefix of the names of failpoints.

        Raises:
            OutcomeUnknownError: if Kafka did not answer the commit.
            AbortableError: if the transaction must be aborted and written again.
            KafkaEosError: if a step failed; the caller aborts the transaction if it is open.
        """
        session, deadline, producer = self._session, self._deadline, self._producer
        # 1. The client begins the transaction, and sends nothing yet. Crash here ⇒ nothing has happened.
        failpoints.reach(f"{point}.before_begin")
        self._progress.move(Step.BEGIN)
        producer.begin()
        look = self._begin_look()
        self._progress.transactions += 1
        self._progress.trace.count(transactions=1)
        self._progress.begun_at = time.monotonic()
        # 2. Records and state changes go to Kafka. Crash here ⇒ the next owner's init aborts the transaction.
        #    Without state changes all offsets are known already, so the record for the token topic travels
        #    with the records. Offsets of a topic that was deleted mean nothing in the topic that was created
        #    in its place, so they are left out.
        recreated = _recreated(session.topic_ids, self._own)
        offsets = _without(self._offsets, recreated & self._own.lossy_topics)
        written: list[GroupOffset] | None = None
        if self._rows and not any(shard.records for shard in self._shards):
            written = self._group_offsets(offsets)
            self._produce(self._token_record(written))
        elif self._rows:
            self._produce(None)
        failpoints.reach(f"{point}.after_flush")
        # 3. Offsets and token join the transaction. Meanwhile, the cluster says which topics it has after the
        #    last acknowledged record. Crash here ⇒ as in step 2.
        self._progress.move(Step.OFFSETS)
        producer.ask_topic_ids(topics_of(self._context, self._own))
        try:
            if written is None:
                written = self._group_offsets(offsets)
                record = self._token_record(written)
                if record is not None:
                    self._send_token_record(record)
                    producer.flush(deadline)
            producer.send_offsets(written, self._request.group_id, deadline)
        except UnavailableError as error:
            if deadline.expired:
                raise
            # a topic was deleted: the next try lists the remaining topics
            raise AbortableError(error.message) from error
        # 4. No topic was replaced. Crash here ⇒ as in step 2.
        if _without(offsets, self._check_topic_ids()) != offsets:
            # the next try leaves its offsets out
            raise AbortableError("a source topic was created again meanwhile")
        # 5. The coordinator that accepted them confirms the facts of the decision. Crash here ⇒ as in step 2.
        self._confirm()
        if look is not None:
            look.finish()
        failpoints.reach(f"{point}.before_commit")
        # 6. Kafka commits. Crash here ⇒ the next owner finds the outcome in the token.
        self._progress.move(Step.COMMIT)
        self._progress.anchor_before = self._decision.in_group.get(self._request.anchor)
        self._progress.sent_bytes = self._sent_bytes
        producer.commit(deadline)
        self._progress.trace.committed(self._token.sequence)
        self._progress.trace.count(bytes=self._sent_bytes)
        failpoints.reach(f"{point}.after_commit")
        session.held = self._decision.held.after(self._token, {each.tp: each for each in written})
        session.confirmed = True
        # 7. The checkpoint names the token topic. Crash here ⇒ if the group is lost now, the record is not
        #    believed; the next batch names the topic.
        if session.token_records is not None and self._context.identity_file is not None:
            self._context.identity_file.confirm_token_topic()

    # -- records ---------------------------------------------------------------------------------

    def _produce(self, record: TokenRecord | None) -> None:
        """Sends the staged records and state changes, and checks that the client enqueued all of them.

        Args:
            record: the record for the token topic, if it travels with the rows.
        """
        producer, deadline, staged = self._producer, self._deadline, self._context.staged
        self._progress.move(Step.PRODUCE)
        if record is not None:
            self._send_token_record(record)
        enqueued_before = producer.enqueued
        queued = 0
        for batch in staged.batches():
            # dead letters name their topic, even if the option `topic` is set
            topic = None if TOPIC in batch.schema.names else self._request.topic
            if SEALED in batch.schema.names:
                producer.send_sealed(sealed_batches(batch), str(topic), deadline)
                failpoints.reach("commit.within_sealed")
            else:
                producer.send(batch, topic, deadline, staged.sealed_partitions)
            self._sent_bytes += batch.nbytes
            queued = max(queued, producer.queued)
            failpoints.reach("commit.within_produce")
        for tp, changes in staged.changes():
            producer.send(changes, tp.topic, deadline)
            self._sent_bytes += changes.nbytes
            queued = max(queued, producer.queued)
            failpoints.reach("commit.within_changelog")
        self._progress.trace.gauge(queued_messages=queued)
        self._progress.move(Step.FLUSH)
        producer.flush(deadline)
        enqueued = producer.enqueued - enqueued_before
        if enqueued != self._rows:
            # a record that the client refused locally does not fail the transaction by itself
            raise AbortableError(f"the client enqueued {enqueued} records, but {self._rows} are staged")

    def _token_record(self, offsets: Iterable[GroupOffset]) -> TokenRecord | None:
        """Builds the record for the token topic, with the offsets that the transaction commits.

        Returns:
            None if the query has no token topic.
        """
        request, records = self._request, self._session.token_records
        if records is None:
            return None
        return TokenRecord.of(
            self._token,
            offsets,
            request.anchor,
            request.group_id,
            records.topic_id,
            records.partition_of(self._token.application_id),
            time.time_ns() // 1_000_000,
        )

    def _send_token_record(self, record: TokenRecord) -> None:
        records = self._session.token_records
        assert records is not None, "there is a record"
        enqueued_before = self._producer.enqueued
        self._producer.send(record_batch(record), records.name, self._deadline)
        if self._producer.enqueued != enqueued_before + 1:
            raise AbortableError(f"the client did not enqueue the record for token.topic={records.name!r}")
        failpoints.reach("commit.after_token_record")

    # -- offsets ---------------------------------------------------------------------------------

    def _group_offsets(self, offsets: Offsets) -> list[GroupOffset]:
        """Returns all offsets of the transaction. Call it after the state changes were flushed.

        Args:
            offsets: end offsets of source partitions.
        """
        request, session, token = self._request, self._session, self._token
        if not all(session.cluster.has(tp) for tp in request.partitions(self._own)):
            # a partition is newer than this producer, or was deleted
            session.cluster = Cluster(*self._producer.cluster(self._deadline))
            self._own = request.own(session.cluster)
        reported = {shard.tp for shard in self._shards}
        inherited = [
            each for each in inherited_shards(self._decision.held, token.query_id) if each.tp not in reported
        ]
        return [
            *request.offsets(token, offsets, session.cluster, inherited, self._own.epochs),
            *self._changelog_offsets(),
        ]

    def _changelog_offsets(self) -> list[GroupOffset]:
        """Returns the offset up to which each shard's changelog is committed, with the shard's progress.

        The end of the log is read after the flush. The transactional id fences other writers of this query,
        but not another application that uses the same topic. So the records since the committed offset must
        be this transaction's, which their number shows without a request.
        """
        changed = [shard.tp for shard in self._shards if shard.records]
        ends = self._producer.ends(changed) if changed else {}
        for shard in self._shards:
            if shard.tp in ends:
                end = ends[shard.tp]
                check_same_log(shard, end)
                start = shard.next_offset
                if shard.sequence >= 0:  # otherwise, an offset that another program committed means nothing
                    start = self._decision.held.offsets[shard.tp].offset
                if not is_alone(shard, start, end):
                    tail = self._context.clients.changelog_tail(shard.tp, start, self._deadline)
                    check_tail(shard, end, tail)
        return [
            GroupOffset(
                shard.tp,
                ends.get(shard.tp, shard.next_offset),
                self._token_of(shard).encode(),
            )
            for shard in self._shards
        ]

    def _token_of(self, shard: ShardReport) -> Token:
        return replace(self._token, shard=progress_of(shard), shards=shard.shards, in_read=shard.in_read)

    def _confirm(self) -> None:
        """Reads the offsets again from a coordinator that just accepted this transaction's offsets.

        OffsetFetch is not a quorum read: a coordinator that is cut off from the other brokers may have
        answered with old offsets and an old token. One that knows of this transaction is not cut off.

        Raises:
            AbortableError: if the group holds other offsets than those on which the decision was made.
        """
        request, session = self._request, self._session
        if session.confirmed or request.new_group:
            return
        partitions = request.partitions(self._own)
        committed = self._context.clients.proved_offsets(request.group_id, partitions, self._deadline)
        refuse_changed(request.group_id, partitions, self._decision.in_group, committed)

    def _begin_look(self) -> GroupLook | None:
        """Begins to look for another program in the group, if the last look was long enough ago."""
        session = self._session
        if self._request.new_group or time.monotonic() - session.looked_at < _LOOK_SECONDS:
            return None
        session.looked_at = time.monotonic()
        return GroupLook(self._context, self._request.partitions(self._own))

    # -- topics ----------------------------------------------------------------------------------

    def _check_topic_ids(self) -> set[str]:
        """Checks that no topic was deleted and created again since the batch was planned.

        Topic ids never recur. So if the ids after the last acknowledged record equal those before the first
        one, all records went to the same topics.

        Returns:
            Source topics that were created again, and whose loss the user accepts.

        Raises:
            DataLossError: if a source topic is not the one that the batch was planned for.
            AbortableError: if an output topic was replaced while the transaction was written.
        """
        session, own, batch_id = self._session, self._own, self._request.batch.batch_id
        before, now = session.topic_ids, read_topic_ids(self._context, self._producer, own)
        session.topic_ids = now
        recreated = _recreated(now, own)
        for topic in sorted(recreated):
            if topic in own.lossy_topics:
                _log.warning("topic %r was deleted and created again (failOnDataLoss=false)", topic)
                continue
            raise DataLossError(
                f"TOPIC_RECREATED: topic {topic!r} was deleted and created again after batch {batch_id} was "
                f"planned: its id was {own.topic_ids[topic]} and is {now[topic]}. The batch may have read "
                "either topic. Nothing of the batch was committed.",
                fix="if that is expected, restart with .option('failOnDataLoss', 'false') on the source. If "
                "this batch was planned before that option was set, also delete "
                f"offsets/{batch_id} in the checkpoint, so that Spark plans it again. Records of the former "
                "topic that the query has not written are then lost, and batch 0 of a query with "
                "startingOffsets=latest begins at the new end of its topics.",
            )
        records = session.token_records
        if records is not None and now.get(records.name, records.topic_id) != records.topic_id:
            raise AbortableError(f"token.topic={records.name!r} was deleted and created again meanwhile")
        for topic in sorted(self._context.staged.topics) if self._rows else ():
            if now.get(topic) != before.get(topic, now.get(topic)):
                raise AbortableError(f"output topic {topic!r} was deleted and created again meanwhile")
        return recreated


def _recreated(topic_ids: Mapping[str, str], own: OwnOffsets) -> set[str]:
    """Returns the source topics that have another id now than when the batch was planned."""
    return {topic for topic, planned in own.topic_ids.items() if topic_ids.get(topic, planned) != planned}


def _without(offsets: Offsets, topics: Collection[str]) -> dict[TopicPartition, int]:
    """Returns the offsets of all partitions that do not belong to these topics."""
    return {tp: offset for tp, offset in offsets.items() if tp.topic not in topics}


class GroupLook:
    """Looks in a thread of its own whether another program uses the group, while the transaction goes on.

    Offsets alone would not show a consumer that joins the group, because each transaction of the query
    replaces the offsets that such a consumer has committed. So the look asks for the members, too.

    Args:
        context: the work to do.
        partitions: those whose offsets the query commits.
    """

    def __init__(self, context: CommitContext, partitions: Collection[TopicPartition]) -> None:
        self._context = context
        self._partitions = partitions
        self._deadline = Deadline.after_seconds(_LOOK_TIMEOUT_SECONDS)
        self._found: KafkaEosError | None = None
        self._thread = threading.Thread(target=self._run, name="kafka-eos-group", daemon=True)
        self._thread.start()

    def finish(self) -> None:
        """Waits for the answers. If there are none in time, the transaction goes on, and a later one looks.

        Raises:
            GroupInUseError: if the group has members.
            AbortableError: if another program has committed an offset. The next try judges the batch by it.
        """
        self._thread.join(self._deadline.remaining_seconds())
        if self._found is not None:
            raise self._found

    def _run(self) -> None:
        request = self._context.request
        try:
            refuse_members(self._context, self._deadline)
            found = self._context.clients.committed_now(request.group_id, self._partitions, self._deadline)
            moved = moved_partitions(self._partitions, Held.of(request.batch.application_id, found))
            if moved:
                self._found = AbortableError(
                    f"another program committed the offset of {moved[0]} in group {request.group_id!r}"
                )
        except GroupInUseError as error:
            self._found = error
        except KafkaEosError as error:
            _log.info("cannot see whether another program uses group %r: %s", request.group_id, error)
