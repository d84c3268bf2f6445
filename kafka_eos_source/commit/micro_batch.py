"""Commits one micro-batch of a streaming query, or one batch write.

There is one way down, in four rooms:

1. **Collect** (here): the checkpoint, the staged parts and the reports of the tasks become one immutable
   `CommitRequest`, with the rows to write. Nothing is written yet.
2. **Decide**: `commit.ownership` fences every other owner and reads what Kafka holds, and `commit.verdict`
   decides.
3. **Act**: `commit.machine` and `commit.transaction` carry the decision out in numbered steps. If a step
   fails, the commit enters rooms 2 and 3 again with the same request.
4. **Record** (here): the figures, a note for the process that plans, and the removal of the staged rows.

Spark runs ``commit`` of a streaming sink in a Python process on the driver, which it usually reuses, but not
always. So this module keeps producers by transactional id. If another process has committed since, the broker
fences the kept producer.
"""

from __future__ import annotations

import logging
from collections import Counter, OrderedDict
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial

from kafka_eos_source.commit import first_records, open_sinks, two_phase
from kafka_eos_source.commit.first_records import FirstRecords
from kafka_eos_source.commit.identity_file import IdentityFile
from kafka_eos_source.commit.machine import Commit, Result
from kafka_eos_source.commit.refused_rows import BatchRows, parts_of
from kafka_eos_source.commit.report_checks import check_names, check_one_source, check_staged_reads
from kafka_eos_source.commit.request import (
    CommitRequest,
    Producer,
    ProducerSession,
    Restage,
    SourceRange,
    TokenRecords,
    ranges,
)
from kafka_eos_source.commit.verdict import Batch
from kafka_eos_source.errors import (
    InvalidOptionError,
    KafkaEosError,
    RestartQueryError,
    StateLostError,
)
from kafka_eos_source.kafka.config import admin_config, producer_config
from kafka_eos_source.kafka.group import GroupOffsets
from kafka_eos_source.kafka.producer import TransactionalProducer
from kafka_eos_source.model import GroupOffset, Offsets, ShardReport, StagedPart, StagedRead, TopicPartition
from kafka_eos_source.observe.background import guarded
from kafka_eos_source.observe.figures import BatchFigures, Outcome, SourceRead, Step, position_id
from kafka_eos_source.observe.journal import Journal
from kafka_eos_source.observe.lines import this_writer
from kafka_eos_source.observe.trace import BatchLog, Observer, Subject, Trace, traced
from kafka_eos_source.options.checked import WriteOptions
from kafka_eos_source.plan import due
from kafka_eos_source.protocol import identity, offset_log
from kafka_eos_source.protocol.identity import Identity
from kafka_eos_source.protocol.offset_log import (
    LoggedOffsets,
    PlannedBatch,
    SourcePosition,
    digest_of,
    is_kafka_offset_json,
)
from kafka_eos_source.protocol.token import digest
from kafka_eos_source.runtime import failpoints, logs
from kafka_eos_source.runtime.deadline import Deadline
from kafka_eos_source.sinks.specs import targets
from kafka_eos_source.spark import packet_senders
from kafka_eos_source.stage.fanout import Plan
from kafka_eos_source.stage.files import StagingFolder
from kafka_eos_source.stage.parts import StagedRows, check_planned_reads, check_reads, reports
from kafka_eos_source.stage.task import StagedTask, Staging
from kafka_eos_source.state.changelog.topic import Tail, read_tail

_log = logging.getLogger(__name__)

#: Number of producers that stay open in one process. The least recently used one is closed first.
_MOST_SESSIONS = 8

#: What tokens say about the targets of the sinks that this process has committed to.
_targets: dict[tuple[str | None, ...], str] = {}

_sessions: OrderedDict[tuple[str, str], ProducerSession] = OrderedDict()


def commit_micro_batch(
    options: WriteOptions,
    folder: StagingFolder,
    tasks: Sequence[StagedTask],
    batch_id: int,
    plan: Plan | None = None,
    planned: Collection[PlannedBatch | None] = (),
    reads: Sequence[StagedRead] | None = None,
    staging: Callable[[], Staging] | None = None,
) -> Result:
    """Commits one micro-batch of a streaming query: records, source offsets and token together.

    When it returns, Kafka holds the batch, written by this call or an earlier one, and so does every sink
    outside Kafka. Spark then writes its commit log. If the driver dies before that, Spark replays the batch,
    and the token shows that it is committed.

    Args:
        options: options of the sink.
        folder: the staging folder.
        tasks: what the successful task attempts staged.
        batch_id: Spark's id of the batch.
        plan: routing of rows to sinks outside Kafka; None if the query has none.
        planned: the newest entry of the offset log before the tasks ran, as each task reports it; None = the
            log was empty then.
        reads: what the parts cover, if the tasks that read staged them; None if tasks of the sink did.
        staging: returns how the tasks staged their rows, to stage some of them again; None if there is no
            plan.

    Raises:
        StagedReadError: if a step of the query dropped or doubled such parts.
        RestartQueryError: if another driver has replaced the plan of the batch since then.
        KafkaEosError: if the batch cannot be committed. The class shows what to do (see `errors`).
    """
    checkpoint = options.checkpoint_location
    if checkpoint is None:
        raise InvalidOptionError(
            "the option checkpointLocation of the sink is missing.",
            fix="set .option('checkpointLocation', …) on the query.",
        )
    who = identity.of_stream(offset_log.query_id(checkpoint), **_names(options))
    parts = parts_of(tasks)
    journal = Journal(who.application_id)
    trace = Trace(observers(journal))
    with traced(trace, options.secrets.hide):
        trace.begin(Subject(who.application_id, who.query_id, _run_id(parts), batch_id))
        # 1. Collect. Crash here ⇒ nothing has happened.
        told = partial(describe, trace, journal)
        work = _collect(options, who, checkpoint, folder, parts, batch_id, planned, reads, told)
        rows = BatchRows(options, folder, who.application_id, batch_id, tasks, work.staged, trace)
        if plan is not None:
            work = replace(work, sinks=rows.for_sinks(plan, staging), restage=rows.without)
        # 2. and 3. Decide and act. Crash here ⇒ see the steps of `machine.Commit`.
        result = _commit(options, work, trace)
        # 4. Record. Crash here ⇒ Spark repeats the batch, and the token skips it.
        trace.enter(Step.TIDY)
        if work.sinks is not None:
            work.sinks.tidy(Deadline.after_ms(options.commit_timeout_ms))
        failpoints.reach("commit.before_cleanup")
        if work.first is not None and result.is_new:
            first_records.SETTLED.add(who.application_id, work.request.batch.run_id, work.first.settles)
        if result.token is not None:
            due.write(who.application_id, work.request.batch.run_id, result.token)
        for old in [each for each in folder.batches() if each <= batch_id]:
            folder.remove_batch(str(old))
        finish(trace, result, rows.staged, parts_of(rows.tasks))
        return result


def commit_batch_write(
    options: WriteOptions, folder: StagingFolder, name: str, tasks: Sequence[StagedTask]
) -> Result:
    """Commits all rows of one ``df.write`` in one transaction, and skips a ``txnVersion`` already written.

    Args:
        options: options of the write.
        folder: the staging folder.
        name: unique name of the write in the folder.
        tasks: what the successful task attempts staged.

    Raises:
        KafkaEosError: if the rows cannot be committed. The class shows what to do (see `errors`).
    """
    if options.txn_app_id is None:
        who = identity.of_one_write(name.removeprefix("write-"), **_names(options))
    else:
        who = identity.of_series(options.txn_app_id, **_names(options))
    parts = parts_of(tasks)
    # a write without a version has a name that never comes back, and nobody needs its token later
    trace = Trace(observers(Journal(who.application_id) if who.versioned else None))
    with traced(trace, options.secrets.hide):
        # no run: each write may have a job group of its own, and would look like a restart
        trace.begin(Subject(who.application_id, who.query_id, "", options.txn_version or 0))
        # 1. Collect. Crash here ⇒ nothing has happened.
        work = _collect_write(options, who, folder, name, parts)
        # 2. and 3. Decide and act. Crash here ⇒ see the steps of `machine.Commit`.
        result = _commit(options, work, trace)
        # 4. Record. Crash here ⇒ the token skips the write if it has a version and is repeated.
        trace.enter(Step.TIDY)
        failpoints.reach("commit.before_cleanup")
        folder.remove_batch(name)
        if who.disposable:
            _delete_group(options, who)
        finish(trace, result, work.staged, parts)
        return result


# -- 1. collect ------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Work:
    """One batch, with everything that its commit needs.

    Attributes:
        request: the batch, and how to commit it.
        staged: its rows, which were verified.
        identity_file: the identity file of the checkpoint; None for a batch write.
        sinks: the sinks outside Kafka; None if there are none.
        first: what the batch shows of the records of its topics; None for a batch write.
        restage: stages the rows again without those that a sink refuses; None if there are no sinks.
    """

    request: CommitRequest
    staged: StagedRows
    identity_file: IdentityFile | None = None
    sinks: two_phase.Sinks | None = None
    first: FirstRecords | None = None
    restage: Restage | None = None


def _collect(
    options: WriteOptions,
    who: Identity,
    checkpoint: str,
    folder: StagingFolder,
    parts: Sequence[StagedPart],
    batch_id: int,
    planned: Collection[PlannedBatch | None],
    reads: Sequence[StagedRead] | None,
    told: Callable[[LoggedOffsets, str, Sequence[SourceRange]], None],
) -> _Work:
    """Collects a micro-batch from its staged parts, the reports of its tasks, and the checkpoint.

    Args:
        told: receives the batch's entry in Spark's offset log, the run and what the sources read, also if the
            checkpoint or a name is refused after that: a query that fails is then shown with its sources.

    Returns:
        The batch without its sinks.
    """
    staged = StagedRows(folder, str(batch_id), parts, reports(parts, who.query_id, batch_id))
    check_reads(parts, batch_id)
    failpoints.reach("commit.after_check")
    # As late as possible, so that another driver's plan is noticed. And in this order: if the batch still
    # has its own entry, so had the batch before it.
    before = _logged(checkpoint, batch_id - 1) if batch_id > 0 else None
    logged = _logged(checkpoint, batch_id)
    staged.end_digest = logged.digest
    _refuse_another_plan(planned, PlannedBatch(batch_id, logged.digest), checkpoint)
    if reads is not None:
        check_staged_reads(reads, batch_id, logged, before)
    check_planned_reads(parts, _planned_reads(who.application_id, logged, before, parts), batch_id)
    check_one_source(staged.shards, len(logged.sources))
    sources, run_id = tuple(ranges(logged, before)), _run_id(parts)
    told(logged, run_id, sources)
    identity_file = IdentityFile.of(checkpoint, options, who.query_id, batch_id)
    if identity_file.is_new_fork and staged.shards:
        raise _fork_with_state(staged.shards)
    check_names(who, batch_id, staged.shards, sources)
    batch = Batch(
        application_id=who.application_id,
        query_id=who.query_id,
        run_id=run_id,
        batch_id=batch_id,
        start=digest_of(before, who.query_id),
        end=logged.digest,
        target=_target(options),
        promised=identity_file.promises_token,
    )
    request = _request(options, who, batch, sources, offset_log.has_native_state(checkpoint))
    first = FirstRecords.of(parts, _read_offsets(sources))
    if first.bad and options.all_records_bad == "fail":
        known = first_records.SETTLED.of(who.application_id, run_id)
        topics = {tp.topic for each in sources for tp in each.end or {}}
        request = replace(request, refusal=first.refusal(known, topics, batch_id))
    return _Work(request, staged, identity_file, first=first)


def _planned_reads(
    application_id: str,
    logged: LoggedOffsets,
    before: LoggedOffsets | None,
    parts: Iterable[StagedPart],
) -> set[str]:
    """Returns the frames whose reading tasks were planned in this run to send packets for the batch.

    A source without new offsets plans nothing, and its line in the log stays the same.
    """
    planned = packet_senders.planned_reads(application_id)
    if not planned:
        return set()
    lines = {
        name: line
        for name, line in logged.sources.items()
        if line is not None
        and is_kafka_offset_json(line)
        and (before is None or before.sources.get(name) != line)
    }
    ends = {SourcePosition.from_json(line).digest for line in lines.values()}
    arrived = {each.task.frame for part in parts for each in part.reads}
    return {
        frame
        for frame, end in planned.items()
        if end in ends and (frame in arrived or packet_senders.is_running(application_id, frame))
    }


def _collect_write(
    options: WriteOptions, who: Identity, folder: StagingFolder, name: str, parts: Sequence[StagedPart]
) -> _Work:
    """Collects a batch write from its staged parts."""
    staged = StagedRows(folder, name, parts)
    # the option topic is part of the names of a series; topics in a column are known from the rows alone
    by_column = who.versioned and options.topic is None
    rows = [part for part in parts if by_column and not part.dead_letters]
    topics = tuple(sorted({topic for part in rows for topic, _ in part.topics}))
    batch = Batch(
        application_id=who.application_id,
        query_id=who.query_id,
        run_id=_run_id(parts),
        batch_id=options.txn_version or 0,
        end=digest(topics) if by_column else "",
        target=_target(options),
        versioned=who.versioned,
        topics=topics,
        once=who.once,
    )
    return _Work(_request(options, who, batch), staged)


def _names(options: WriteOptions) -> dict[str, str | None]:
    """Returns the options from which the names of a writer follow (`protocol.identity`)."""
    return {
        "application_id": options.application_id,
        "group_id": options.group_id,
        "topic": options.topic,
        "anchor_topic": options.anchor_topic,
    }


def _target(options: WriteOptions) -> str:
    """Returns where the rows of a write go, as its tokens say it.

    Raises:
        InvalidOptionError: if a sink rejects its options.
    """
    key = (options.topic, *(spec.key for spec in options.sinks))
    if key not in _targets:
        _targets[key] = identity.target(options.topic, targets(options.sinks))
    return _targets[key]


def _fork_with_state(shards: Sequence[ShardReport]) -> StateLostError:
    topics = ", ".join(sorted({shard.tp.topic for shard in shards}))
    return StateLostError(
        "onMovedCheckpoint=fork is refused for a query with stateful operators, because the state in the "
        f"changelogs of the original is not copied: {topics} would begin empty. Nothing was written.",
        fix="start the new query with a new checkpoint, so that its operators read the input from "
        "startingOffsets on.",
    )


def _logged(checkpoint: str, batch_id: int) -> LoggedOffsets:
    found = offset_log.read(checkpoint, batch_id)
    if found is None:
        raise InvalidOptionError(
            f"the offset log in checkpointLocation={checkpoint!r} has no entry for batch {batch_id}.",
            fix="set checkpointLocation of the sink to the checkpoint of its own query, as a full URI. Do "
            "not delete entries by hand: those of a batch and of the batch before it are needed.",
        )
    return found


def _refuse_another_plan(
    planned: Collection[PlannedBatch | None], logged: PlannedBatch, checkpoint: str
) -> None:
    """Raises if the entry of the batch in the offset log is not the one that the tasks worked on.

    A driver that hangs may wake up after somebody restored or edited the checkpoint and another driver
    planned the same batch again. Its rows must not be committed with the offsets of the other plan: the other
    driver would find the token and skip its batch, and the records between the two plans would be lost.

    Raises:
        RestartQueryError: if that happened. Nothing of the batch was committed by this driver.
    """
    if all(each == logged for each in planned):
        return
    raise RestartQueryError(
        f"the entry of batch {logged.batch_id} in the offset log in checkpointLocation={checkpoint!r} was "
        "replaced while the batch ran: another driver uses the same checkpoint, or somebody restored or "
        "edited it. Nothing of this driver's batch was committed.",
        fix="do nothing if the other driver should continue; otherwise stop it and start this query again.",
    )


def _request(
    options: WriteOptions,
    who: Identity,
    batch: Batch,
    sources: tuple[SourceRange, ...] = (),
    has_native_state: bool = False,
) -> CommitRequest:
    return CommitRequest(
        batch=batch,
        group_id=who.group_id,
        anchor=who.anchor,
        sources=sources,
        topic=options.topic,
        missing_token=options.missing_token,
        foreign_query=options.foreign_query,
        moved_offsets=options.moved_offsets,
        source_cluster=options.source_cluster,
        new_group=who.disposable,
        has_native_state=has_native_state,
        token_topic=options.token_topic,
        dead_letter_topic=options.dead_letter_topic,
    )


def _run_id(parts: Iterable[StagedPart]) -> str:
    return next((part.run_id for part in parts if part.run_id), "")


# -- 2. and 3. decide and act ----------------------------------------------------------------------


def _commit(options: WriteOptions, work: _Work, trace: Trace) -> Result:
    """Commits a batch with the producer that this process keeps for the transactional id, if it has one."""
    application_id = work.request.batch.application_id
    key = application_id, repr(sorted(options.kafka.items()))
    session = _sessions.setdefault(key, ProducerSession())
    _sessions.move_to_end(key)
    while len(_sessions) > _MOST_SESSIONS:
        _sessions.popitem(last=False)[1].drop()
    trace.explained_by(lambda: complaint(session.producer))
    clients, deadline = KafkaClients(options.kafka), Deadline.after_ms(options.commit_timeout_ms)
    commit = Commit(
        work.request,
        work.staged,
        clients,
        session,
        deadline,
        work.sinks,
        work.identity_file,
        trace,
        restage=work.restage,
    )
    try:
        result = commit.run()
    except BaseException:
        if work.sinks is not None:
            open_sinks.ask_again(options)
        raise
    _log.info(
        "batch %d of %s: %s, %d records, %d transactions",
        work.request.batch.batch_id,
        application_id,
        "already committed" if result.step is Step.SKIPPED else "committed",
        commit.rows,
        result.transactions,
    )
    return result


@dataclass(frozen=True)
class KafkaClients:
    """The `request.Clients` for a real cluster.

    Attributes:
        kafka: librdkafka properties of the sink.
    """

    kafka: Mapping[str, str] = field(repr=False)  # may hold passwords

    @property
    def _group(self) -> GroupOffsets:
        return GroupOffsets(admin_config(self.kafka))

    def producer(self, transactional_id: str) -> Producer:
        return TransactionalProducer(producer_config(self.kafka, transactional_id=transactional_id))

    def group_offsets(
        self, group_id: str, certainly: Collection[TopicPartition], deadline: Deadline
    ) -> Mapping[TopicPartition, GroupOffset]:
        return self._group.fetch(group_id, certainly, deadline)

    def group_members(self, group_id: str, deadline: Deadline) -> Sequence[str]:
        return self._group.members(group_id, deadline)

    def committed_now(
        self, group_id: str, certainly: Collection[TopicPartition], deadline: Deadline
    ) -> Mapping[TopicPartition, GroupOffset]:
        return self._group.committed_now(group_id, certainly, deadline)

    def proved_offsets(
        self, group_id: str, partitions: Collection[TopicPartition], deadline: Deadline
    ) -> Mapping[TopicPartition, GroupOffset]:
        return self._group.proved(group_id, partitions, deadline)

    def changelog_tail(self, tp: TopicPartition, start: int, deadline: Deadline) -> Tail:
        return read_tail(admin_config(self.kafka), tp, start, deadline)

    def token_records(self, name: str, deadline: Deadline) -> TokenRecords:
        from kafka_eos_source.kafka.token_topic import TopicRecords

        return TopicRecords.checked(self.kafka, name, deadline)


# -- 4. record ------------------------------------------------------------------------------------

#: What shards measure of their state as it is; the rest is about restores.
_PRESENT = ("keys", "bytes", "uncommitted_bytes", "spilled_bytes")


def _delete_group(options: WriteOptions, who: Identity) -> None:
    try:
        GroupOffsets(admin_config(options.kafka)).delete_group(who.group_id, Deadline.after_seconds(10))
    except KafkaEosError as error:
        # the records are committed, and a group without members expires
        _log.info("cannot delete the consumer group %s of a finished batch write: %s", who.group_id, error)


def planned_at(logged: LoggedOffsets, run_id: str, last: BatchFigures | None) -> float | None:
    """Returns when Spark planned the batch, in seconds since 1970.

    Args:
        logged: entry of the batch in the offset log.
        run_id: Spark's id of this run.
        last: the batch before it; None if it is not known.

    Returns:
        None if that is not known, or if an earlier run planned the batch and this one repeats it.
    """
    if logged.planned_at_ms is None:
        return None
    at = logged.planned_at_ms / 1000
    is_of_run = last is not None and last.run_id == run_id
    run_began_at = this_writer().driver.started_at if last is None else last.ended_at
    return at if is_of_run or at >= run_began_at else None


def observers(journal: Journal | None) -> list[Observer]:
    """Returns what receives the figures of a batch: the journal, and the log if structured logs are on."""
    found: list[Observer] = [] if journal is None else [journal]
    return [*found, BatchLog()] if logs.wants_json_logs() else found


def describe(
    trace: Trace, journal: Journal, logged: LoggedOffsets, run_id: str, sources: Iterable[SourceRange]
) -> None:
    """Adds to the trace when Spark planned the batch, and what the batch reads. Does not raise."""
    guarded(lambda: trace.planned(planned_at(logged, run_id, journal.newest(run_id)), reads(sources)))


def finish(trace: Trace, result: Result, staged: StagedRows, parts: Iterable[StagedPart]) -> None:
    """Ends the trace of a batch that Kafka holds. Does not raise."""
    if not result.is_new:
        trace.finish(Outcome.SKIPPED)
        return
    guarded(lambda: _count(trace, staged, parts))
    trace.finish(Outcome.COMMITTED)


def _count(trace: Trace, staged: StagedRows, parts: Iterable[StagedPart]) -> None:
    parts = list(parts)
    dead = sum(part.dead_letters for part in parts)
    trace.count(
        records=staged.rows - staged.changelog_rows - dead,
        dead_letters=dead,
        dropped=sum(part.dropped for part in parts),
        changes=staged.changelog_rows,
        staged_bytes=sum(part.size_bytes for part in parts),
    )
    trace.tasks([part.measured for part in parts])
    if staged.shards:
        _count_state(trace, staged.shards)


def _count_state(trace: Trace, shards: Sequence[ShardReport]) -> None:
    counts: Counter[str] = Counter()
    restored: Counter[str] = Counter()
    operators: dict[str, Counter[str]] = {}
    for shard in shards:
        counts.update(shard.counts)
        own = operators.setdefault(shard.tp.topic, Counter())
        for name, number in shard.measured.items():
            (own if name in _PRESENT else restored)[name] += number  # type: ignore[assignment]
    trace.count(
        shards=len(shards),
        restores=int(restored["restores"]),
        restored_records=int(restored["restored_records"]),
        restore_ms=round(1000 * restored["restore_seconds"]),
    )
    trace.state(max(shard.pressure for shard in shards), counts, operators)


def complaint(producer: Producer | None) -> str:
    """Returns what the producer's client has reported, the likely reason why a commit stands still."""
    return "" if producer is None else producer.complaint


def reads(sources: Iterable[SourceRange]) -> tuple[SourceRead, ...]:
    """Returns what the batch reads from its Kafka sources."""
    return tuple(
        SourceRead(position_id(source.end), _offsets(source, source.end, source.start or {}))
        for source in sources
        if source.end is not None
    )


def _read_offsets(sources: Iterable[SourceRange]) -> Mapping[str, int]:
    """Returns how many offsets the batch reads of each topic of which it reads any."""
    found: Counter[str] = Counter()
    for each in reads(sources):
        for topic, number in each.offsets.items():
            found[topic] += number
    return {topic: number for topic, number in found.items() if number}


def _offsets(source: SourceRange, end: Offsets, start: Offsets) -> dict[str, int]:
    """Returns per topic how many offsets of the source the batch read."""
    topics = {tp.topic for tp in end}
    if source.jump:
        return dict.fromkeys(topics, 0)
    if len(topics) == 1 and source.same_topics and end.keys() == start.keys():
        return {topics.pop(): sum(end.values()) - sum(start.values())}  # a topic may have 1,000 partitions
    offsets = dict.fromkeys(topics, 0)
    for tp, until in end.items():
        offsets[tp.topic] += max(0, until - start.get(tp, until))
    return offsets
