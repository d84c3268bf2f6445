"""The commit calls as Spark makes them, and what this process keeps between them.

Spark runs ``commit`` of a streaming sink in a Python process of the driver that it usually, not always,
reuses. So producers are kept here by transactional id; that one of them is stale is found out by fencing.
"""

from __future__ import annotations

import logging
from collections import OrderedDict
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field

from kafka_eos_source import admission, failpoints
from kafka_eos_source.checked_options import WriteOptions
from kafka_eos_source.commit import identity, sink_session
from kafka_eos_source.commit.decide import Batch
from kafka_eos_source.commit.identity import Identity, Mark
from kafka_eos_source.commit.order import Order
from kafka_eos_source.commit.parties import Owner, Sinks
from kafka_eos_source.commit.sources import SourceRange, ranges
from kafka_eos_source.commit.steps import Step
from kafka_eos_source.commit.transaction import Commit, Result
from kafka_eos_source.errors import InvalidOptionError, KafkaEosError
from kafka_eos_source.kafka.config import admin_config, producer_config
from kafka_eos_source.kafka.group import GroupOffsets
from kafka_eos_source.kafka.transactional import TransactionalProducer
from kafka_eos_source.model import GroupOffset, StagedPart, TopicPartition
from kafka_eos_source.protocol import offset_log
from kafka_eos_source.runtime.deadline import Deadline
from kafka_eos_source.stage import shards
from kafka_eos_source.stage.fanout import Plan, SinkPart
from kafka_eos_source.stage.files import StagingFolder
from kafka_eos_source.stage.parts import StagedRows

_log = logging.getLogger(__name__)

#: Clients kept open in one process; the one unused for longest is closed first.
_MOST_OWNERS = 8

_owners: OrderedDict[tuple[str, str], Owner] = OrderedDict()


@dataclass(frozen=True)
class KafkaCluster:
    """`parties.Cluster` over the real client."""

    kafka: Mapping[str, str] = field(repr=False)  # may hold passwords
    transactional_id: str

    def producer(self) -> TransactionalProducer:
        return TransactionalProducer(producer_config(self.kafka, transactional_id=self.transactional_id))

    def group_offsets(
        self, group_id: str, certainly: Collection[TopicPartition], deadline: Deadline
    ) -> Mapping[TopicPartition, GroupOffset]:
        return GroupOffsets(admin_config(self.kafka)).fetch(group_id, certainly, deadline)


def commit_micro_batch(
    options: WriteOptions,
    folder: StagingFolder,
    parts: Iterable[StagedPart],
    batch_id: int,
    plan: Plan | None = None,
    sink_parts: Iterable[SinkPart] = (),
) -> Result:
    """Commits one micro-batch of a streaming query: records, source offsets and token together.

    Returns when the batch is in Kafka, whether by this call or an earlier one; Spark may then write its
    own commit log, or die: the token tells. By then every sink outside Kafka has the batch too.

    Args:
        options: of the sink.
        folder: where the parts lie.
        parts: Kafka's rows, of the task attempts that count.
        batch_id: Spark's.
        plan: of the sinks outside Kafka; None = there are none.
        sink_parts: what those tasks staged for them.

    Raises:
        KafkaEosError: by what the caller should do; see `errors`.
    """
    parts = list(parts)
    checkpoint = options.checkpoint_location
    if checkpoint is None:
        raise InvalidOptionError("the sink has no checkpointLocation.")
    name = str(batch_id)
    query_id = offset_log.query_id(checkpoint)
    staged = StagedRows(folder, name, parts, shards.reports(parts, query_id, batch_id))
    failpoints.reach("commit.after_check")
    logged = offset_log.read(checkpoint, batch_id)
    if logged is None:
        raise InvalidOptionError(
            f"checkpointLocation={checkpoint!r} has no offset log of batch {batch_id}.",
            fix="give the sink the checkpointLocation of its own query, as a full URI.",
        )
    before = offset_log.read(checkpoint, batch_id - 1) if batch_id > 0 else None
    who = identity.of_stream(options, query_id)
    mark = identity.mark(checkpoint, Mark(who.application_id, query_id, batch_id))
    order = _order(
        options,
        who,
        Batch(
            application_id=who.application_id,
            query_id=query_id,
            run_id=_run_id(parts),
            batch_id=batch_id,
            start_digest=before.digest if before is not None else "",
            end_digest=logged.digest,
            first_batch=mark.first_batch,
        ),
        sources=tuple(ranges(logged, before)),
    )
    if plan is None:
        result = _commit(options, who, order, staged)
    else:
        sinks = sink_session.work(options, plan, folder, who.application_id, batch_id, sink_parts)
        try:
            result = _commit(options, who, order, staged, sinks)
        except BaseException:
            sink_session.forget(options, who.application_id)
            raise
        sinks.tidy(Deadline.after_ms(options.commit_timeout_ms))
    failpoints.reach("commit.before_cleanup")
    if staged.shards:
        _advise(who.application_id, order, staged)
    for old in [each for each in folder.batches() if each <= batch_id]:
        folder.remove_batch(str(old))
    return result


def _advise(application_id: str, order: Order, staged: StagedRows) -> None:
    """Tells the source how many records the query's state can take in one batch."""
    pressure = max(shard.pressure for shard in staged.shards)
    records = sum(
        end - source.start[tp]
        for source in order.sources
        if source.end is not None and source.start is not None
        for tp, end in source.end.items()
        if tp in source.start
    )
    before = admission.read(application_id)
    advised = admission.next_limit(before, records, pressure)
    if pressure > 1:
        _log.warning(
            "batch %d changed %.1f times the state that statestore.uncommitted.max.bytes allows; the source, "
            "if it has the option application.id=%r, reads %s offsets in the next; else set "
            "maxOffsetsPerTrigger",
            order.batch.batch_id,
            pressure,
            application_id,
            advised,
        )
    if advised != before:
        admission.write(application_id, advised)


def commit_batch_write(
    options: WriteOptions, who: Identity, folder: StagingFolder, name: str, parts: Iterable[StagedPart]
) -> Result:
    """Commits one ``df.write``: all its rows in one transaction; with ``txnVersion`` at most once.

    Raises:
        KafkaEosError: by what the caller should do; see `errors`.
    """
    parts = list(parts)
    order = _order(
        options,
        who,
        Batch(
            application_id=who.application_id,
            query_id=who.query_id,
            run_id=_run_id(parts),
            batch_id=options.txn_version or 0,
            versioned=who.versioned,
            once=who.once,
        ),
    )
    try:
        result = _commit(options, who, order, StagedRows(folder, name, parts))
    finally:
        if who.once:
            forget(options, who)
    failpoints.reach("commit.before_cleanup")
    folder.remove_batch(name)
    if who.disposable:
        try:
            GroupOffsets(admin_config(options.kafka)).forget(who.group_id, Deadline.after_seconds(10))
        except KafkaEosError as error:
            # the records are committed; a group without members expires by itself
            _log.info("group %s of a finished batch write was not deleted: %s", who.group_id, error)
    return result


def forget(options: WriteOptions, who: Identity) -> None:
    """Closes what this process keeps of an identity."""
    owner = _owners.pop(_key(options, who), None)
    if owner is not None:
        owner.drop()


def _commit(
    options: WriteOptions, who: Identity, order: Order, staged: StagedRows, sinks: Sinks | None = None
) -> Result:
    owner = _owners.setdefault(_key(options, who), Owner())
    _owners.move_to_end(_key(options, who))
    while len(_owners) > _MOST_OWNERS:
        _owners.popitem(last=False)[1].drop()
    result = Commit(
        order,
        staged,
        KafkaCluster(options.kafka, who.application_id),
        owner,
        Deadline.after_ms(options.commit_timeout_ms),
        sinks,
    ).run()
    _log.info(
        "batch %d of %s: %s, %d records, %d transactions",
        order.batch.batch_id,
        who.application_id,
        "in Kafka already" if result.step is Step.SKIPPED else "committed",
        staged.rows,
        result.transactions,
    )
    return result


def _order(
    options: WriteOptions,
    who: Identity,
    batch: Batch,
    sources: tuple[SourceRange, ...] = (),
) -> Order:
    return Order(
        batch=batch,
        group_id=who.group_id,
        anchor=who.anchor,
        sources=sources,
        topic=options.topic,
        missing_token=options.missing_token,
        foreign_query=options.foreign_query,
        source_cluster=options.source_cluster,
    )


def _run_id(parts: Iterable[StagedPart]) -> str:
    return next((part.run_id for part in parts if part.run_id), "")


def _key(options: WriteOptions, who: Identity) -> tuple[str, str]:
    return who.application_id, repr(sorted(options.kafka.items()))
