"""The guarantee ``at_least_once``: tasks write without a transaction.

The check of the target is here too, because every write begins with it, in the process that plans.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

import pyarrow as pa

from kafka_eos_source.commit.identity_file import is_proven, set_unproven
from kafka_eos_source.kafka.config import admin_config, producer_config
from kafka_eos_source.kafka.failure import START_SECONDS
from kafka_eos_source.kafka.probe import check_reachable
from kafka_eos_source.kafka.producer import RecordProducer
from kafka_eos_source.model import WrittenPart
from kafka_eos_source.observe.background import guarded
from kafka_eos_source.options.checked import WriteOptions
from kafka_eos_source.protocol import offset_log
from kafka_eos_source.protocol.token import Mark, Token
from kafka_eos_source.runtime import failpoints
from kafka_eos_source.runtime.deadline import Deadline
from kafka_eos_source.spark.worker import StreamingTask, running_task
from kafka_eos_source.stage.staging import TaskMeter

if TYPE_CHECKING:
    from kafka_eos_source.commit.request import SourceRange
    from kafka_eos_source.protocol.offset_log import LoggedOffsets


#: Longest wait for brokers before the first batch, if some have answered, or none.
_CHECK_MS, _SILENT_MS = 60_000, 2_000

#: The module that Spark runs in the process that commits. Spark has planned the write before, in another.
_COMMITTER = "pyspark.sql.worker.python_streaming_sink_runner"

_checked: set[str] = set()
_producers: dict[str, RecordProducer] = {}


def check_target(options: WriteOptions) -> None:
    """Checks once per process that brokers can be reached, and ``topic`` and ``deadLetter.topic`` exist.

    The process that commits a micro-batch does not check again what the process that planned it has checked.
    If Spark plans a later batch in a new process, as it does when the last one was idle for a minute, brokers
    that restart have `commitTimeoutMs`. A person waits for the first batch, so that fails sooner.

    Raises:
        UnavailableError: if no broker answers in time, or the topic does not exist.
        AuthorizationError: if the principal may not describe the topic, or the brokers refuse its
        credentials.
    """
    key = repr((options.topic, options.dead_letter_topic, sorted(options.kafka.items())))
    if key in _checked or _COMMITTER in sys.modules:
        return
    checkpoint, limit_ms = options.checkpoint_location, options.commit_timeout_ms
    if checkpoint is None or not offset_log.has_finished_batch(checkpoint):
        first = Deadline.after_seconds(START_SECONDS)
        check_reachable(admin_config(options.kafka), START_SECONDS)
        limit_ms = min(limit_ms, _SILENT_MS if first.expired else _CHECK_MS)
    producer = RecordProducer(producer_config(options.kafka), "check")
    try:
        deadline = Deadline.after_ms(limit_ms)
        named = [each for each in (options.topic, options.dead_letter_topic) if each is not None]
        if named:
            producer.check_partitions(dict.fromkeys(named, -1), deadline)
        else:
            producer.cluster(deadline)
    finally:
        producer.close()
    _checked.add(key)


def leave_guarantee(options: WriteOptions) -> None:
    """Records that the batch which Spark has just planned, and those after it, will leave no token.

    Call it before the tasks of the batch begin. If the query returns to ``exactly_once``, the commit refuses
    to trust the last token, which is older than the output. The first batch after ``exactly_once`` records
    this in the token too, because a checkpoint from before it may be restored. Crash between the two ⇒ the
    commit refuses the query all the same.

    Raises:
        UnavailableError: if the checkpoint cannot be read or written, or Kafka does not answer in time.
        AuthorizationError: if the principal may not commit with the ``application.id`` of the query.
        KafkaEosError: if the token is damaged, or its transaction failed.
    """
    checkpoint = options.checkpoint_location
    if checkpoint is None or not is_proven(checkpoint):
        return  # most batches: there is no promise to take back, and the offset log need not be listed
    planned = offset_log.newest(checkpoint)
    if planned is not None:
        since = planned.batch_id
        set_unproven(checkpoint, since, lambda found: _mark_token(options, found.application_id, since))


def _mark_token(options: WriteOptions, application_id: str, since: int) -> None:
    """Records in the token, wherever the group holds it, that batches are written without one.

    The sequence number stays, because this is the same link of the chain: its offsets and sinks still count.
    """
    # imported here, because only the first batch after a change of the guarantee needs it
    from kafka_eos_source.commit.micro_batch import KafkaClients
    from kafka_eos_source.commit.verdict import Held
    from kafka_eos_source.protocol.identity import anchor, group_of

    group_id = group_of(application_id, options.group_id)
    clients = KafkaClients(options.kafka)
    deadline = Deadline.after_ms(options.commit_timeout_ms)
    # a driver that still commits with exactly_once is fenced before the token is read
    producer = clients.producer(application_id)
    try:
        producer.init(deadline)
        offsets = clients.group_offsets(group_id, {anchor(options.anchor_topic, options.topic)}, deadline)
        newest = Held.of(application_id, offsets).whole_token
        if newest is None or newest.unproven_since >= 0:
            return  # a lost token refuses the way back too
        marked = []
        for each in offsets.values():
            token = Token.decode(each.metadata)
            if token is not None and Mark.of(token) == Mark.of(newest) and token.shard is None:
                marked.append(replace(each, metadata=replace(token, unproven_since=since).encode()))
        producer.begin()
        producer.send_offsets(marked, group_id, deadline)
        producer.commit(deadline)
    finally:
        producer.close()


def produce(options: WriteOptions, batches: Iterable[pa.RecordBatch]) -> WrittenPart:
    """Sends the rows of one task with an idempotent producer, and waits until brokers have acknowledged all.

    If Spark retries the task, it sends its rows again.

    Returns:
        What was written, for metrics.

    Raises:
        InvalidRecordError: if a record is too large, or its partition does not exist.
        UnavailableError: if the brokers did not answer in time.
    """
    key = repr(sorted(options.kafka.items()))
    producer = _producers.get(key)
    if producer is None:
        producer = _producers[key] = RecordProducer(producer_config(options.kafka), "at_least_once")
    producer.begin_count()
    meter = TaskMeter(options.topic)
    try:
        for batch in batches:
            # limits the wait for brokers; the query may need longer to compute the rows
            deadline = Deadline.after_ms(options.commit_timeout_ms)
            with meter.staging():
                producer.check_partitions(meter.add(batch), deadline)
                producer.send(batch, options.topic, deadline)
        with meter.staging():
            producer.flush(Deadline.after_ms(options.commit_timeout_ms))
        if producer.enqueued:  # a retry of an empty task duplicates nothing
            failpoints.reach("direct.after_flush")
    except BaseException:
        _producers.pop(key, None)
        producer.close()
        raise
    task = running_task() or StreamingTask("", "", "")
    return WrittenPart(producer.enqueued, task.query_id, task.run_id, meter.figures())


def report(options: WriteOptions, batch_id: int, parts: Sequence[WrittenPart]) -> None:
    """Writes down the figures of a micro-batch that its tasks have written. Does not raise."""
    guarded(lambda: _report(options, batch_id, parts))


def _report(options: WriteOptions, batch_id: int, parts: Sequence[WrittenPart]) -> None:
    # imported here, because the process that plans a write calls only `check_target`
    from kafka_eos_source.commit import micro_batch
    from kafka_eos_source.observe.background import in_background
    from kafka_eos_source.observe.figures import Outcome
    from kafka_eos_source.observe.journal import Journal
    from kafka_eos_source.observe.trace import Subject, Trace
    from kafka_eos_source.protocol.identity import derived_application_id

    query_id, run_id = next(((part.query_id, part.run_id) for part in parts), ("", ""))
    if not query_id:
        return  # the batch had no task, and so no rows
    # not the option application.id: only commits reserve it for one query, and queries that share a journal
    # would look like one query that restarts all the time
    application_id = derived_application_id(query_id)
    journal = Journal(application_id)
    trace = Trace(micro_batch.observers(journal))
    # the batch is already written: a store that hangs may cost the figures of what was read, but no time
    planned = in_background(lambda: _planned(options.checkpoint_location, batch_id))
    if planned is not None:
        micro_batch.describe(trace, journal, planned[0], run_id, planned[1])
    trace.count(records=sum(part.records for part in parts))
    trace.tasks([part.measured for part in parts])
    trace.begin(Subject(application_id, query_id, run_id, batch_id))
    trace.finish(Outcome.COMMITTED)


def _planned(checkpoint: str | None, batch_id: int) -> tuple[LoggedOffsets, tuple[SourceRange, ...]] | None:
    """Reads from the offset log what a micro-batch reads; returns None if that is not known."""
    from kafka_eos_source.commit.request import ranges

    logged = None if checkpoint is None else offset_log.read(checkpoint, batch_id)
    if checkpoint is None or logged is None:
        return None
    before = offset_log.read(checkpoint, batch_id - 1) if batch_id > 0 else None
    return logged, tuple(ranges(logged, before))
