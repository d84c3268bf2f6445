"""What repairs a query, or cleans up after it: adopt, fence and sweep.

Each first plans what it would do, and does it when a person has said yes.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import Enum

import pyarrow as pa

from kafka_eos_source.commit.identity_file import set_unproven
from kafka_eos_source.commit.machine import Commit, Result
from kafka_eos_source.commit.micro_batch import KafkaClients
from kafka_eos_source.commit.request import CommitRequest, ProducerSession, SourceRange, ranges
from kafka_eos_source.commit.two_phase import UndecidedSinks
from kafka_eos_source.commit.verdict import Batch, batch_verdict
from kafka_eos_source.errors import InvalidOptionError, KafkaEosError, TokenMissingError
from kafka_eos_source.model import ShardReport, TopicPartition
from kafka_eos_source.operate.inspection import (
    Checkpoint,
    Finding,
    Inspection,
    KafkaView,
    StagedEntry,
    short_name,
    staged_entries,
)
from kafka_eos_source.operate.shared import Target
from kafka_eos_source.protocol.identity import group_of
from kafka_eos_source.protocol.offset_log import LoggedOffsets, digest_of
from kafka_eos_source.protocol.token import ADOPTED, Token
from kafka_eos_source.runtime.deadline import Deadline
from kafka_eos_source.runtime.file_systems import file_system
from kafka_eos_source.stage.files import PROBE

# -- adopt: a checkpoint continues under an application.id, although only a person can decide that it may
#
# Three cases: the token belongs to another query (FOREIGN_QUERY), it is lost (TOKEN_MISSING), or batches
# were written with ``at_least_once`` since (GUARANTEE_CHANGED). In each, the command commits the token of
# an *empty* batch with the same code that commits every batch: it fences, then reads the token, then
# decides. To take over another query's work, it commits the batch before the new checkpoint's first batch,
# with the same offsets. For a lost token, it commits the batch in question if a person found it in the
# output, and otherwise the batch before it. After ``at_least_once``, it commits the newest batch in Spark's
# commit log.


class BatchOutcome(Enum):
    """What a person found out about a batch whose token is lost."""

    COMMITTED = "committed"
    NOT_COMMITTED = "not committed"


@dataclass(frozen=True)
class Adoption:
    """What the command can do, and what a person has to do.

    Attributes:
        messages: describe the situation, a sentence each.
        request: commit request of the empty batch; None = there is nothing to write.
        returns: the checkpoint whose batches leave tokens again after it; None = no checkpoint.
        options: options that a person has to set on the query, by "source" and "sink".
        refused: why the command cannot write although something is wrong.
    """

    messages: Sequence[str]
    request: CommitRequest | None = None
    returns: str | None = None
    options: Mapping[str, Mapping[str, str]] = field(default_factory=dict)
    refused: Finding | None = None


def plan_adoption(inspection: Inspection, target: Target, outcome: BatchOutcome | None) -> Adoption:
    """Decides how a query can continue whose token is missing or belongs to another query. Writes nothing.

    Args:
        inspection: state of the query, including Kafka.
        target: the query.
        outcome: what a person found out; None = nothing yet.
    """
    kafka, checkpoint = inspection.kafka, inspection.checkpoint
    if kafka is None:
        return Adoption((), refused=inspection.findings[-1])
    wrong_id = [each for each in inspection.findings if each.condition == short_name(InvalidOptionError)]
    if wrong_id:
        return Adoption((), refused=wrong_id[0])
    token = kafka.token
    if checkpoint is not None and checkpoint.unproven_since is not None:
        return _after_at_least_once(inspection, target, kafka, checkpoint, outcome)
    if token is None:
        return _without_token(inspection, target, kafka, outcome)
    held = (
        f"Kafka holds batch {token.batch_id} of query {token.query_id} (run {token.run_id or 'unknown'}) "
        f"under application.id={inspection.application_id!r}.",
    )
    if outcome is not None:
        return Adoption(
            held,
            refused=Finding(
                "--committed and --not-committed are only for a lost token, but Kafka holds the token.",
                fix="remove --committed and --not-committed.",
            ),
        )
    if checkpoint is None or checkpoint.planned is None:
        return Adoption(
            (*held, "The new checkpoint has not planned a batch yet. Start its query with these options."),
            options=_options(inspection, target.checkpoint, adopts=True),
        )
    if checkpoint.query_id == token.query_id:
        return Adoption((*held, "That is this checkpoint's own query.", inspection.verdict.text))
    return _hand_over(inspection, target, kafka, token, checkpoint, held)


def perform_adoption(
    adoption: Adoption, kafka: Mapping[str, str], deadline: Deadline, *, sinks_finished: bool = False
) -> Result:
    """Commits the token; Kafka fences any driver that runs with the ``application.id``.

    Args:
        adoption: an adoption that has a request.
        kafka: librdkafka properties of a producer.
        deadline: limits the whole call.
        sinks_finished: whether a person confirmed that all sinks outside Kafka that the token names have
            committed. Without it, a token that names sinks is not replaced.

    Raises:
        KafkaEosError: as a commit raises it, for example `ForeignQueryError` if Kafka holds something else by
            now.
    """
    assert adoption.request is not None
    session = ProducerSession()
    sinks = UndecidedSinks(finished=sinks_finished)
    try:
        result = Commit(adoption.request, NoRows(), KafkaClients(kafka), session, deadline, sinks).run()
    finally:
        session.drop()
    if adoption.returns is not None:
        set_unproven(adoption.returns, None)
    return result


def _hand_over(
    inspection: Inspection,
    target: Target,
    kafka: KafkaView,
    token: Token,
    checkpoint: Checkpoint,
    held: Sequence[str],
) -> Adoption:
    """Plans an empty batch that hands the application.id to this checkpoint's query."""
    batch = replace(
        checkpoint.describe_next_batch(inspection.application_id, kafka.own, token.target),
        run_id=ADOPTED,
        batch_id=checkpoint.next_batch - 1,
        end=digest_of(checkpoint.before if checkpoint.replays else checkpoint.logged, checkpoint.query_id),
        ends=None,
        comparable=kafka.own.comparable and not checkpoint.has_native_state,
    )
    try:
        batch_verdict(batch, kafka.held, kafka.anchor, foreign_query="adopt")
    except KafkaEosError as error:
        return Adoption(held, options=_options(inspection, None, adopts=True), refused=Finding.of(error))
    starts = kafka.own.starts or {}
    if kafka.own.starts is None or set(starts) - set(kafka.committed):
        new = ", ".join(str(tp) for tp in sorted(set(kafka.own.ends) - set(kafka.committed))) or "its sources"
        return Adoption(
            held,
            options=_options(inspection, None, adopts=True),
            refused=Finding(
                f"cannot check that this checkpoint starts at the group's committed offsets in {new}.",
                fix="give the query of this checkpoint a new application.id; or, if you know by other means "
                "that it starts exactly where the other query stopped, start it with "
                f"onForeignQuery=adopt_unchecked:{token.query_id}. If it does not, rows are lost or doubled.",
            ),
        )
    messages = [
        *held,
        f"Batch {checkpoint.next_batch} of the new checkpoint starts where that query stopped, so the "
        f"application.id can be handed over to query {checkpoint.query_id}.",
    ]
    return Adoption(
        messages,
        request=CommitRequest(
            batch=batch,
            group_id=inspection.group_id,
            anchor=_anchor(target.anchor_topic, kafka),
            sources=(SourceRange(starts, starts, kafka.cluster_id),) if starts else (),
            foreign_query="adopt",
            has_native_state=checkpoint.has_native_state,
        ),
        options=_options(inspection, None, adopts=False),
    )


def _without_token(
    inspection: Inspection, target: Target, kafka: KafkaView, outcome: BatchOutcome | None
) -> Adoption:
    checkpoint = inspection.checkpoint
    is_missing = inspection.verdict.condition == short_name(TokenMissingError)
    if kafka.unrecovered is not None and not is_missing:  # nobody knows what the token topic holds
        return Adoption(("The group holds no token.",), refused=Finding.of(kafka.unrecovered))
    if checkpoint is None or not is_missing:
        return Adoption(("Kafka holds no token, and the query does not need one.", inspection.verdict.text))
    batch_id = checkpoint.next_batch
    messages = [f"Kafka holds no token of application.id={inspection.application_id!r}."]
    if not checkpoint.replays:
        messages.append(f"Spark has not planned batch {batch_id} yet, so it cannot be in the output.")
        if outcome is BatchOutcome.COMMITTED:
            return Adoption(
                messages,
                refused=Finding(
                    f"batch {batch_id} cannot be committed, because Spark has not planned it yet.",
                    fix="remove --committed.",
                ),
            )
        outcome = BatchOutcome.NOT_COMMITTED
    elif outcome is None:
        messages.append(
            f"Check whether batch {batch_id} is in the output (docs/runbooks.md, TOKEN_MISSING), then run "
            "this command with --committed or --not-committed."
        )
        return Adoption(messages)
    token_batch = batch_id if outcome is BatchOutcome.COMMITTED else batch_id - 1
    logged = checkpoint.entry(token_batch)
    if logged is None:
        return Adoption(
            messages,
            refused=Finding(
                f"Spark's offset log no longer has batch {token_batch}.",
                fix="restart with .option('onMissingToken', "
                f"'assume_{outcome.value.replace(' ', '_')}:{batch_id}').",
            ),
        )
    before = checkpoint.entry(token_batch - 1)
    messages.append(f"Batch {batch_id} is {outcome.value}: the new token names batch {token_batch}.")
    return Adoption(
        messages,
        request=_declared(inspection, target, kafka, checkpoint, logged, before, token_batch),
    )


def _after_at_least_once(
    inspection: Inspection,
    target: Target,
    kafka: KafkaView,
    checkpoint: Checkpoint,
    outcome: BatchOutcome | None,
) -> Adoption:
    """Plans the token of the newest batch that is in the output, after batches that left none.

    That is the newest in Spark's commit log, or the one that Kafka holds and Spark has not logged.
    """
    messages = [
        f"Batches from batch {checkpoint.unproven_since} on were written with at_least_once, without a token."
    ]
    if outcome is not None:
        return Adoption(
            messages,
            refused=Finding(
                "--committed and --not-committed are only for a lost token.",
                fix="remove --committed and --not-committed.",
            ),
        )
    pending = checkpoint.logged if checkpoint.replays else None
    is_held = pending is not None and kafka.token is not None and kafka.token.end_digest == pending.digest
    token_batch = checkpoint.next_batch if is_held else checkpoint.next_batch - 1
    logged = checkpoint.entry(token_batch)
    if logged is None:
        return Adoption(
            messages,
            refused=Finding(
                f"Spark's offset log has no batch {token_batch}, so its end is not known.",
                fix="start a new checkpoint with a new application.id, and set startingOffsets.",
            ),
        )
    why = "which Kafka holds" if is_held else "the newest in Spark's commit log"
    messages.append(f"The new token names batch {token_batch}, {why}.")
    if checkpoint.replays and not is_held:
        messages.append(
            f"Batch {checkpoint.next_batch} is planned and not logged. The query writes it whole: if "
            "at_least_once has written rows of it, they are then in the output twice."
        )
    before = checkpoint.entry(token_batch - 1)
    request = _declared(inspection, target, kafka, checkpoint, logged, before, token_batch)
    batch = replace(request.batch, unproven=True)
    if kafka.token is not None:
        try:
            batch_verdict(batch, kafka.held, kafka.anchor)
        except KafkaEosError as error:
            return Adoption(messages, refused=Finding.of(error))
    return Adoption(messages, request=replace(request, batch=batch), returns=checkpoint.location)


def _declared(
    inspection: Inspection,
    target: Target,
    kafka: KafkaView,
    checkpoint: Checkpoint,
    logged: LoggedOffsets,
    before: LoggedOffsets | None,
    batch_id: int,
) -> CommitRequest:
    """Returns the request to commit the token of a batch that a person declared committed.

    Args:
        inspection, target, kafka, checkpoint: the query.
        logged, before: the entries of the batch and of the batch before it in the offset log.
        batch_id: Spark's id of the batch.
    """
    return CommitRequest(
        batch=Batch(
            application_id=inspection.application_id,
            query_id=checkpoint.query_id,
            run_id=ADOPTED,
            batch_id=batch_id,
            start=digest_of(before, checkpoint.query_id),
            end=digest_of(logged, checkpoint.query_id),
            promised=True,
        ),
        group_id=inspection.group_id,
        anchor=_anchor(target.anchor_topic, kafka),
        sources=tuple(ranges(logged, before)),
        missing_token=f"assume_committed:{batch_id}",
        source_cluster=target.source_cluster,
        token_topic=None if checkpoint.identity is None else checkpoint.identity.token_topic,
    )


def _anchor(topic: str | None, kafka: KafkaView) -> TopicPartition:
    """Returns the sink's anchor partition as far as it is known; any partition can carry the token."""
    read = {*kafka.own.ends, *(kafka.own.starts or {})}
    others = sorted(tp for tp in kafka.offsets if tp not in read and tp.topic in kafka.topics)
    return kafka.anchor if topic is not None or not others else others[0]


def _options(inspection: Inspection, location: str | None, *, adopts: bool) -> dict[str, dict[str, str]]:
    """Returns the options that the query needs on its source and on its sink."""
    names = {"application.id": inspection.application_id}
    if inspection.group_id != group_of(inspection.application_id):
        names["kafka.group.id"] = inspection.group_id
    sink = dict(names)
    if location is not None:
        sink["checkpointLocation"] = location
    if adopts:
        sink["onForeignQuery"] = "adopt"
    return {"source": {"startingOffsets": "group", **names}, "sink": sink}


class NoRows:
    """The staged rows of an empty batch."""

    rows = sealed_partitions = 0
    topics: Mapping[str, int] = {}
    shards: Sequence[ShardReport] = ()

    def batches(self) -> Iterable[pa.RecordBatch]:
        """Returns no rows."""
        return ()

    def changes(self) -> Iterable[tuple[TopicPartition, pa.RecordBatch]]:
        """Returns no changes of state."""
        return ()


# -- fence


def fence(kafka: Mapping[str, str], application_id: str, deadline: Deadline) -> None:
    """Initialises the transactional id, and does nothing else (``init_transactions``, KIP-98).

    The broker fences every older producer with this id and aborts its open transaction; a commit that was
    already under way completes. No data is lost: Spark's offset log still has the batch. A driver that is
    alive takes the id back and writes its batch again.

    Args:
        kafka: librdkafka properties of a producer.
        application_id: the transactional id.
        deadline: limits the wait for the broker.

    Raises:
        UnavailableError: if no broker or coordinator answered before ``deadline``.
        AuthorizationError: if the ACL on the transactional id is missing.
    """
    producer = KafkaClients(kafka).producer(application_id)
    try:
        producer.init(deadline)
    finally:
        producer.close()


# -- sweep

#: Names of the folder of a batch write (``df.write``), and of a probe file that was never renamed.
_WRITE = re.compile(r"write-[0-9a-f]{32}")
_LOST_PROBE = re.compile(re.escape(PROBE) + r"\.[0-9a-f]{32}")


@dataclass(frozen=True)
class SweepDecision:
    """Whether one entry can be deleted.

    Attributes:
        entry: the entry.
        delete: whether it can be deleted.
        reason: why, or why not; why it could not be deleted, if that failed.
        deleted: whether it was deleted.
    """

    entry: StagedEntry
    delete: bool
    reason: str
    deleted: bool = False


def sweep_decisions(
    found: Sequence[StagedEntry], *, token_batch: int | None, older_than_seconds: float, now_seconds: float
) -> list[SweepDecision]:
    """Decides for each entry whether it can be deleted.

    A batch above the token's batch is always kept: a driver is about to commit it. A driver that does not
    know the token yet may be staging the token's own batch again, so that batch is deleted only at the same
    age as orphans.

    Args:
        found: result of `staged_entries`.
        token_batch: newest batch of this query that Kafka holds; None = not known.
        older_than_seconds: age from which an orphan is deleted.
        now_seconds: the current time, in seconds since 1970.
    """
    return [_decide(each, token_batch, now_seconds - older_than_seconds, now_seconds) for each in found]


def _decide(
    each: StagedEntry, token_batch: int | None, before_seconds: float, now_seconds: float
) -> SweepDecision:
    old = each.newest_seconds < before_seconds
    age = f"{_duration(now_seconds - each.newest_seconds)} old"
    batch_id = each.batch_id
    if batch_id is not None:
        if token_batch is None:
            return SweepDecision(each, False, "it is not known whether Kafka holds it")
        if batch_id > token_batch:
            return SweepDecision(
                each, False, f"Kafka does not hold it yet; the token is at batch {token_batch}"
            )
        if batch_id == token_batch and not old:
            return SweepDecision(each, False, f"batch of the token, {age}; a restart may be staging it again")
        return SweepDecision(each, True, "Kafka holds it")
    if each.is_folder and _WRITE.fullmatch(each.name):
        return SweepDecision(each, old, f"batch write, {age}")
    if not each.is_folder and _LOST_PROBE.fullmatch(each.name):
        return SweepDecision(each, old, f"leftover probe file, {age}")
    return SweepDecision(each, False, "not created by kafka-eos")


def _duration(seconds: float) -> str:
    for unit, length in (("d", 86_400), ("h", 3600), ("min", 60)):
        if seconds >= length:
            return f"{seconds / length:.1f} {unit}"
    return f"{max(0.0, seconds):.0f} s"


@dataclass(frozen=True)
class Sweep:
    """What can be deleted from one staging folder.

    Attributes:
        location: the staging folder.
        decisions: a decision for each entry.
        token_batch: newest batch that Kafka holds; None = not known, so all micro-batches are kept.
        why_unknown: why ``token_batch`` is not known; "" if it is known.
    """

    location: str
    decisions: Sequence[SweepDecision]
    token_batch: int | None
    why_unknown: str = ""

    @property
    def deletable(self) -> list[SweepDecision]:
        """The entries that can be deleted."""
        return [each for each in self.decisions if each.delete]

    @property
    def size_bytes(self) -> int:
        """Size of all entries that can be deleted."""
        return sum(each.entry.size_bytes for each in self.deletable)


def plan_sweep(
    location: str | None, inspection: Inspection | None, older_than_seconds: float, now_seconds: float
) -> Sweep:
    """Decides what can be deleted. Deletes nothing.

    Args:
        location: the staging folder.
        inspection: state of the query that stages there; None = no query was named, so only orphans are
            deleted.
        older_than_seconds: age from which an orphan is deleted.
        now_seconds: the current time, in seconds since 1970.

    Raises:
        InvalidOptionError: if no folder is known.
    """
    if location is None:
        raise InvalidOptionError(
            "the staging folder is not known.",
            fix="add --checkpoint, or --staging if the sink sets staging.location.",
        )
    token_batch, why_unknown = _token_batch(inspection)
    decisions = sweep_decisions(
        staged_entries(location),
        token_batch=token_batch,
        older_than_seconds=older_than_seconds,
        now_seconds=now_seconds,
    )
    return Sweep(location, decisions, token_batch, why_unknown)


def _token_batch(inspection: Inspection | None) -> tuple[int | None, str]:
    if inspection is None:
        return None, "neither QUERY nor --checkpoint is set"
    if inspection.kafka is None:
        return None, "no brokers are set, or Kafka did not answer"
    token, checkpoint = inspection.kafka.token, inspection.checkpoint
    if token is None:
        return None, f"Kafka holds no token of application.id={inspection.application_id!r}"
    if checkpoint is not None and checkpoint.query_id != token.query_id:
        return None, f"the token in Kafka belongs to another query ({token.query_id})"
    return token.batch_id, ""


def perform_sweep(sweep: Sweep) -> Sweep:
    """Deletes what can be deleted, and nothing reads again; returns what became of each entry."""
    fs, path = file_system(sweep.location)

    def done(each: SweepDecision) -> SweepDecision:
        entry = f"{path}/{each.entry.name}"
        try:
            if each.entry.is_folder:
                fs.delete_dir(entry)
            else:
                fs.delete_file(entry)
        except FileNotFoundError:
            pass  # a commit has deleted it in the meantime
        except OSError as error:
            return replace(each, reason=str(error))
        return replace(each, deleted=True)

    return replace(sweep, decisions=[done(each) if each.delete else each for each in sweep.decisions])
