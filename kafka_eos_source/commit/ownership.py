"""Takes ownership of the transactional id, reads what Kafka holds, and decides about the batch.

The order of the calls is what makes the decision safe:

* Sinks list their prepared work *before* ``init_transactions``, so that the token, which is read after it,
  decides the fate of that work for good (`two_phase.fate`).
* ``init_transactions`` fences every other producer *before* the token is read. Otherwise a transaction of a
  dead run could still commit after the token was read.

A new owner of the transactional id reads the offsets of the group. If the query has a ``token.topic``, the
topic's record of the query may replace them. The rules:

===================================== =========================== ============================================
newest token in the group             record in the token topic   what the commit uses
===================================== =========================== ============================================
of this query, no newer mark          none, older, or equally new the group
of this query, no newer mark          of another query            the group
of this query, no newer mark          newer                       the record: the group lost offsets
of this query, with a higher batch id newer                       neither: the commit refuses the batch
none, or some marks are newer         as new as the newest mark   the record: the group was deleted or expired
none, or some marks are newer         none, or older than a mark  the group: new query, or its token is lost
===================================== =========================== ============================================

If the commit uses the record, the record's offsets replace those of the group, and the next transaction
commits them again. An offset that another program committed in the meantime (``kafka-consumer-groups
--reset-offsets`` on the empty group) stays as it is, so that the commit notices the missing mark and refuses.

**When the topic is read.** If the group holds no token, the read is *certain*: it waits until the
transactions of other queries that share the topic have ended. If the group holds a token, each new owner
still makes one *quick* read, which waits for nobody. A group that is behind the topic shows that its
coordinator lost data (an unclean leader election of ``__consumer_offsets``, a restored backup) or gives
outdated answers; in both cases the batch would be written twice. The quick read takes some tens of
milliseconds, once per start and after each failed commit. The batches in between need none, because their
owner knows its own token. A record that the quick read returns was committed, so it proves that the group is
behind. The quick read may miss a record that lies after another query's open transaction; the query is then
as safe as without the token topic.

**When a record is not believed.** A record must be the newest one of its query. It may not be if it was
copied from another topic, or if the query ran without its token topic for a while. The identity file of
the checkpoint records the latter (`commit.identity_file`). Batch writes have no checkpoint: a person who
removes the option from a series of them must delete its record (``kafka-eos token-topic forget``).
"""

from __future__ import annotations

import logging
import time
from collections.abc import Collection, Mapping

from kafka_eos_source.commit import refusals
from kafka_eos_source.commit.report_checks import check_same_cluster, shards_match
from kafka_eos_source.commit.request import (
    Cluster,
    CommitContext,
    Decision,
    OwnOffsets,
    Producer,
    TokenRecords,
)
from kafka_eos_source.commit.run_notes import RunNotes
from kafka_eos_source.commit.steps import OvertakenError, Progress
from kafka_eos_source.commit.verdict import (
    Batch,
    Held,
    Verdict,
    batch_verdict,
    continues,
    moved_partitions,
    written_partitions,
)
from kafka_eos_source.errors import (
    AbortableError,
    ForeignQueryError,
    KafkaEosError,
    OperatorError,
    RestartQueryError,
    TokenMissingError,
    UnavailableError,
)
from kafka_eos_source.model import GroupOffset, TopicPartition
from kafka_eos_source.observe.figures import Step
from kafka_eos_source.protocol.token import Token, TokenRecord
from kafka_eos_source.runtime import failpoints
from kafka_eos_source.runtime.deadline import Deadline


def reuse_producer(context: CommitContext, progress: Progress) -> Decision | None:
    """Decides about the batch without asking Kafka, if the producer of the previous batch is still usable.

    The group still holds what this process committed last: any process that committed since then would have
    fenced this producer.

    Returns:
        None if there is no clean producer, or if this batch does not continue the one that it committed last.
    """
    request, session = context.request, context.session
    batch, producer, held = request.batch, session.producer, session.held
    if producer is None:
        return None
    records = session.token_records
    if request.token_topic != (None if records is None else records.name):
        return None  # a restart in the same process set, changed or removed the option
    if context.sinks.cluster_id not in ("", session.cluster.cluster_id):
        return None  # `take_ownership` finds out which of the two is outdated
    if request.new_group:
        if progress.transactions or not producer.is_clean():
            return None
        own = request.own(session.cluster)
        return Decision(producer, batch, own, Held(batch.application_id), Verdict.WRITE, {})
    if held is None or held.token is None or held.token.query_id != batch.query_id:
        return None
    if session.group_id != request.group_id:
        return None  # a restart in the same process changed kafka.group.id
    if session.run_id != batch.run_id and not batch.versioned:
        return None  # while the query was stopped, somebody may have moved the group's offsets
    if batch.versioned:
        follows = batch.batch_id > held.token.batch_id
    else:
        follows = continues(batch, held.token) and not any(each.jump for each in request.sources)
    # a shard whose state is newer than what this process knows proves that another process has committed
    if not follows or not shards_match(context.staged.shards, held) or not producer.is_clean():
        return None
    own = request.own(session.cluster)
    resolved = request.batch_on(own, session.topic_ids)
    return Decision(producer, resolved, own, held, Verdict.WRITE, held.offsets)


#: The risks of sinks of which the driver has warned in a run.
_RISKS = RunNotes("kafka-eos-risks", "of which risks of sinks it has warned", "it warns of them again")


def _warn_of_risks(context: CommitContext) -> None:
    """Logs the risks of the sinks, once in each run."""
    if not (risks := context.sinks.risks()):
        return
    batch = context.request.batch
    known = _RISKS.of(batch.application_id, batch.run_id)
    for each in risks:
        if each not in known:
            _log.warning("%s", each)
    _RISKS.add(batch.application_id, batch.run_id, risks)


def take_ownership(context: CommitContext, progress: Progress) -> Decision:
    """Initialises a producer, which fences all others, reads the token, and decides about the batch.

    Raises:
        UnavailableError: if the anchor topic does not exist, or Kafka does not answer in time.
        OvertakenError: if another run of the query took over.
        TokenMissingError: if the token was copied from another cluster.
        KafkaEosError: if the batch is refused (see `verdict.batch_verdict`), or a call to Kafka or a sink
            failed.
    """
    request, session, deadline = context.request, context.session, context.deadline
    # 1. Nobody else is in the group; sinks list their prepared batches. Crash here ⇒ nothing has happened.
    progress.move(Step.INIT)
    if not request.new_group:
        refuse_members(context, deadline)
        session.looked_at = time.monotonic()
    context.sinks.list_prepared(deadline)
    _warn_of_risks(context)
    failpoints.reach("commit.after_list_prepared")
    proved = _proved_offsets(context) if context.sinks.has_prepared() else None
    # 2. A new producer fences all others. Crash here ⇒ no transaction is open any more.
    producer = session.producer = context.clients.producer(request.batch.application_id)
    producer.init(deadline)
    failpoints.reach("commit.after_init")
    # 3. The commit reads what Kafka holds. Crash here ⇒ as after step 2.
    progress.move(Step.TOKEN)
    session.cluster = Cluster(*producer.cluster(deadline))
    if not session.cluster.has(request.anchor):
        # a new cluster creates the topic of committed offsets when it is first asked for those of a group
        context.clients.group_offsets(request.group_id, {request.anchor}, deadline)
        session.cluster = Cluster(*producer.cluster(deadline))
    if not session.cluster.has(request.anchor):
        raise UnavailableError(
            f"the anchor topic {request.anchor.topic!r} does not exist on the sink's cluster "
            f"({session.cluster.cluster_id}), or this principal may not describe it.",
            fix="create it, grant Read and Describe, or set .option('anchor.topic', …) to another topic.",
        )
    _refuse_another_cluster(context)
    own = request.own(session.cluster)
    partitions = request.partitions(own)
    in_group = context.clients.group_offsets(request.group_id, partitions, deadline)
    if proved is not None:
        refuse_changed(request.group_id, partitions, in_group, proved)
    held = _with_record(context, Held.of(request.batch.application_id, in_group))
    if held.token is not None and held.token.cluster_id not in ("", session.cluster.cluster_id):
        raise refusals.mirrored_token(request.batch, held.token, request.group_id, session.cluster.cluster_id)
    known = session.held
    session.held, session.group_id, session.run_id = held, request.group_id, request.batch.run_id
    failpoints.reach("commit.after_token")
    if progress.fenced is not None and held.token is not None:
        _refuse_rival(context, progress, held.token, known)
    # 4. The verdict; sinks finish what the token names. Crash here ⇒ the next owner repeats both.
    session.topic_ids = read_topic_ids(context, producer, own)
    if held.token is None:  # later, another id means that somebody created the changelog again
        _check_operators(context, producer)
    batch = request.batch_on(own, session.topic_ids)
    verdict = _decide(context, batch, held)
    if verdict is Verdict.SKIP and moved_partitions(written_partitions(batch, request.anchor), held):
        # Another program has moved offsets of the group. Kafka holds this batch, so the commit skips it all
        # the same. The next batch must not reuse this producer, so that it is judged by these offsets.
        session.held = None
    failpoints.reach("commit.after_resolve_prepared")
    return Decision(producer, batch, own, held, verdict, in_group)


def _refuse_another_cluster(context: CommitContext) -> None:
    """Raises if the sinks were opened for another cluster than the one that would commit the batch.

    Raises:
        RestartQueryError: if the bootstrap servers led to two clusters within a minute.
    """
    opened, found = context.sinks.cluster_id, context.session.cluster.cluster_id
    if opened not in ("", found):
        raise RestartQueryError(
            f"the sinks of application.id={context.request.batch.application_id!r} were opened for the Kafka "
            f"cluster {opened!r}, but kafka.bootstrap.servers now leads to the cluster {found!r}. Nothing of "
            "the batch was written.",
            fix="check that all addresses in kafka.bootstrap.servers belong to the query's own cluster, and "
            "start the query again after a minute.",
        )


def refuse_members(context: CommitContext, deadline: Deadline) -> None:
    """Raises if the group of the query has members.

    A query commits its offsets in transactions and never joins its group. So a member is another program,
    and the offsets that the two commit would overwrite each other.

    Raises:
        GroupInUseError: if there are members.
        UnavailableError: if the group coordinator does not answer in time.
        AuthorizationError: if the principal may not describe the group.
    """
    request = context.request
    members = context.clients.group_members(request.group_id, deadline)
    if members:
        raise refusals.group_has_members(request.batch, request.group_id, members)


def _check_operators(context: CommitContext, producer: Producer) -> None:
    """Checks that the changelog of each operator exists on the sink's cluster, and is the operator's.

    Raises:
        InvalidOptionError: if it is another topic.
        UnavailableError: if it does not exist.
    """
    session, shards = context.session, context.staged.shards
    missing = {
        shard.tp.topic: shard.shards - 1 for shard in shards if shard.tp.topic not in session.topic_ids
    }
    if missing:
        try:
            producer.check_partitions(missing, context.deadline)
        except UnavailableError as error:
            brokers = next(shard.brokers for shard in shards if shard.tp.topic in missing)
            raise UnavailableError(
                f"the changelog {', '.join(map(repr, missing))} does not exist on the cluster of the sink "
                f"({session.cluster.cluster_id}); the operator uses kafka.bootstrap.servers={brokers!r}. "
                f"{error.message}",
                fix="set kafka.bootstrap.servers on the sink and in the options of the operator to the same "
                "cluster; if they are the same, restart the query.",
            ) from error
    batch_id = context.request.batch.batch_id
    check_same_cluster(shards, session.topic_ids, session.cluster.cluster_id, batch_id)


def topics_of(context: CommitContext, own: OwnOffsets) -> set[str]:
    """Returns the topics whose ids matter: those that the batch read on this cluster, and its outputs."""
    records = context.session.token_records
    return {*own.topic_ids, *context.staged.topics, *(() if records is None else (records.name,))}


def read_topic_ids(context: CommitContext, producer: Producer, own: OwnOffsets) -> Mapping[str, str]:
    """Asks the cluster for the current ids of the topics of the batch (`topics_of`).

    Raises:
        AbortableError: if the cluster does not answer; another try may succeed.
        UnavailableError: if it does not answer, and the deadline has passed.
    """
    try:
        return producer.topic_ids(topics_of(context, own))
    except UnavailableError as error:
        if context.deadline.expired:
            raise
        raise AbortableError(error.message) from error


def refuse_changed(
    group_id: str,
    partitions: Collection[TopicPartition],
    read: Mapping[TopicPartition, GroupOffset],
    proved: Mapping[TopicPartition, GroupOffset],
) -> None:
    """Raises if the offsets that were read differ from those of a coordinator that is certainly up to date.

    Raises:
        AbortableError: if the two answers differ.
    """
    changed = sorted(tp for tp in partitions if read.get(tp) != proved.get(tp))
    if changed:
        raise AbortableError(
            f"the committed offset of {changed[0]} in group {group_id!r} differs from the one that was read "
            "before: another program committed it meanwhile, or a group coordinator gave an outdated answer."
        )


def _proved_offsets(context: CommitContext) -> Mapping[TopicPartition, GroupOffset] | None:
    """Reads the committed offsets from a coordinator that just accepted an offset commit from this process.

    Sinks commit or abort as the token decides, and they do so before a transaction of the batch can prove
    that the token is up to date (`transaction.Transaction._confirm`). So if a sink holds something prepared,
    which is rare, the proof comes first: a transaction commits an offset and is aborted. Its producer is not
    used again, because a late request to end this transaction could end the next one.

    Returns:
        None if the anchor topic does not exist.
    """
    request, deadline = context.request, context.deadline
    producer = context.clients.producer(request.batch.application_id)
    try:
        producer.init(deadline)
        cluster = Cluster(*producer.cluster(deadline))
        if not cluster.has(request.anchor):
            return None
        producer.begin()
        producer.send_offsets([GroupOffset(request.anchor, 0, "")], request.group_id, deadline)
        partitions = request.partitions(request.own(cluster))
        proved = context.clients.proved_offsets(request.group_id, partitions, deadline)
        producer.abort(deadline)
        return proved
    finally:
        producer.close()


def _decide(context: CommitContext, batch: Batch, held: Held) -> Verdict:
    """Returns the verdict on the batch, after the sinks have finished what the token names.

    The sinks finish also if the batch is refused. A token that is not the newest decides nothing in sinks,
    because the lost token may name their prepared batches.
    """
    request, sinks, token = context.request, context.sinks, held.whole_token
    try:
        verdict = batch_verdict(
            batch,
            held,
            request.anchor,
            missing_token=request.missing_token,
            foreign_query=request.foreign_query,
            moved_offsets=request.moved_offsets,
            token_topic=request.token_topic,
            group_id=request.group_id,
        )
    except ForeignQueryError:
        raise  # only the other query may commit the sinks that its token names
    except KafkaEosError:
        if token is not None:
            sinks.resolve_prepared(token, context.deadline)
            sinks.finish(token, context.deadline)
        raise
    sinks.resolve_prepared(token, context.deadline)
    # Spark plans the next batch only after every sink has committed this one
    is_finished = (
        verdict is Verdict.WRITE
        and token is not None
        and token.query_id == batch.query_id
        and continues(batch, token)
    )
    if token is not None and not is_finished:
        sinks.finish(token, context.deadline)
    return verdict


def _with_record(context: CommitContext, held: Held) -> Held:
    """Reads the token topic, and returns its record if the group lost the newest token."""
    request, session = context.request, context.session
    session.token_records = None
    if request.token_topic is None:
        return held
    session.token_records = context.clients.token_records(request.token_topic, context.deadline)
    file = context.identity_file
    return recover(
        held,
        request.group_id,
        session.token_records,
        context.deadline,
        batch_id=request.batch.batch_id,
        missing_token=request.missing_token,
        is_complete=file is None or file.has_all_tokens(request.token_topic),
    )


def _refuse_rival(context: CommitContext, progress: Progress, token: Token, known: Held | None) -> None:
    """Raises if the token shows that another run fenced this one.

    If the token did not move on under another run, this process's own transaction was fenced because it took
    too long, and another try may succeed.

    Raises:
        OvertakenError: if another run has committed.
    """
    batch = context.request.batch
    before = None if known is None else known.token
    runs = {batch.run_id, before.run_id if before is not None else ""}
    if token.run_id not in runs:
        # no token will name the work that this run prepared, and the other run may not list it for weeks
        context.sinks.resolve_prepared(token, context.deadline)
        raise OvertakenError(
            f"run {token.run_id} of query {token.query_id} took over application.id="
            f"{token.application_id!r} and wrote batch {token.batch_id}; this is run "
            f"{batch.run_id}, batch {batch.batch_id}.",
            fix="do nothing if the other run should continue; otherwise stop it and start this query again.",
        ) from progress.fenced


# -- the token topic ------------------------------------------------------------------------------------

_log = logging.getLogger(__name__)


def recover(
    held: Held,
    group_id: str,
    records: TokenRecords,
    deadline: Deadline,
    *,
    batch_id: int = -1,
    missing_token: str = "fail",
    is_complete: bool = True,
) -> Held:
    """Reads the token topic, and returns what Kafka holds of the query by the rules of this module.

    Call it after ``init_transactions`` and after the offsets of the group were read.

    Args:
        held: what the group holds.
        group_id: the consumer group of the query.
        records: the token topic.
        deadline: time limit for reading the topic.
        batch_id: the batch to commit.
        missing_token: option ``onMissingToken``. If a person has declared the outcome of this batch there, a
            doubtful record is ignored.
        is_complete: whether the topic has a record of every transaction, as far as the checkpoint knows. If
            the query ran without its token topic for a while, the record may be older than the lost token.

    Returns:
        ``held`` itself if the commit uses the group.

    Raises:
        TokenMissingError: if the group lost its newest token, and the record may not be the newest one.
        OperatorError: if group and record contradict each other, or the record cannot be read.
        UnavailableError: if the topic cannot be read before ``deadline``.
    """
    is_lost = held.whole_token is None
    record = records.last(held.application_id, deadline, certain=is_lost)
    if record is None:
        return held
    if record.topic_id != records.topic_id:
        doubt = (
            f"it is a copy, because it was written to the topic with the id {record.topic_id}, and the id of "
            f"this topic is {records.topic_id}"
        )
    elif not is_complete:
        doubt = "the query may have committed batches without a record since"
    else:
        return choose(held, group_id, record)
    is_answered = missing_token.endswith(f":{batch_id}")
    if not is_answered and (is_lost or choose(held, group_id, record) is not held):
        raise _doubtful(held, group_id, record, records, doubt, batch_id)
    _log.info("ignoring the record of %r in token.topic=%r: %s", held.application_id, records.name, doubt)
    return held


def choose(held: Held, group_id: str, record: TokenRecord | None) -> Held:
    """Chooses between group and record by the rules of this module. Reads nothing.

    Returns:
        ``held`` itself if the commit uses the group.

    Raises:
        OperatorError: if group and record contradict each other.
    """
    if record is None or record.token.sequence < held.newest_sequence:
        return held
    token = held.whole_token
    if token is not None:
        if token.query_id != record.token.query_id or token.sequence == record.token.sequence:
            return held
        if token.batch_id > record.token.batch_id:
            raise _contradiction(group_id, token, record)
    _log.warning(
        "group %r holds %s; continuing from the record in the token topic: transaction %d, batch %d of query "
        "%s%s",
        group_id,
        "no token" if token is None else f"the older transaction {token.sequence}",
        record.token.sequence,
        record.token.batch_id,
        record.token.query_id,
        "" if record.group_id == group_id else f", committed in group {record.group_id!r}",
    )
    moved = {tp: held.offsets[tp] for tp in record.ends if tp in held.offsets and not held.is_marked(tp)}
    return Held.of(held.application_id, {**held.offsets, **record.group_offsets(), **moved})


def _doubtful(
    held: Held, group_id: str, record: TokenRecord, records: TokenRecords, doubt: str, batch_id: int
) -> TokenMissingError:
    return TokenMissingError(
        f"the newest token of application.id={held.application_id!r} is not in group {group_id!r}, and its "
        f"record in token.topic={records.name!r} (transaction {record.token.sequence}, batch "
        f"{record.token.batch_id}) may not be the newest: {doubt}.",
        fix=f"look for the rows of batch {batch_id} in the output. If they are there, restart with "
        f".option('onMissingToken', 'assume_committed:{batch_id}'); if they are not, with "
        f"'assume_not_committed:{batch_id}'. A wrong answer loses or doubles the rows of this batch.",
    )


def _contradiction(group_id: str, token: Token, record: TokenRecord) -> OperatorError:
    return OperatorError(
        f"group {group_id!r} holds batch {token.batch_id} of query {token.query_id} with the sequence number "
        f"{token.sequence}, but the token topic holds batch {record.token.batch_id} of the same query with "
        f"{record.token.sequence}. Either the group lost its newest offsets after the checkpoint was rolled "
        "back, or the sequence started again while the query had no token.topic.",
        fix="find out which of the two batches was written last. If it is the record's, delete the group. If "
        "it is the group's, delete the record with kafka-eos token-topic forget TOPIC "
        f"{token.application_id} --bootstrap-servers … --yes. The wrong choice loses or doubles rows.",
    )
