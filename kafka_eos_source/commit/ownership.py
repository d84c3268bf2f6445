"""Takes ownership of the transactional id, reads what Kafka holds, and decides about the batch.

The order of the calls is what makes the decision safe:

* Sinks list their prepared work *before* ``init_transactions``, so that the token, which is read after it,
  decides the fate of that work for good (`commit.sink_fate`).
* ``init_transactions`` fences every other producer *before* the token is read. Otherwise a transaction of a
  dead run could still commit after the token was read.
"""

from __future__ import annotations

import time
from collections.abc import Collection, Mapping

from kafka_eos_source.commit import refusals
from kafka_eos_source.commit.context import CommitContext, Decision, OvertakenError, Progress
from kafka_eos_source.commit.facts import Batch, Held
from kafka_eos_source.commit.interfaces import Producer
from kafka_eos_source.commit.recovered import recover
from kafka_eos_source.commit.request import Cluster
from kafka_eos_source.commit.shard_checks import check_same_cluster, shards_match
from kafka_eos_source.commit.sources import OwnOffsets
from kafka_eos_source.commit.steps import Step
from kafka_eos_source.commit.verdict import (
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
    RestartQueryError,
    UnavailableError,
)
from kafka_eos_source.model import GroupOffset, TopicPartition
from kafka_eos_source.protocol.token import Token
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
    return recover(
        held,
        request.group_id,
        session.token_records,
        context.deadline,
        batch_id=request.batch.batch_id,
        missing_token=request.missing_token,
        is_complete=context.identity_file.has_all_tokens(request.token_topic),
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
