"""Checks on the driver that the state changes of a batch are complete and come from one attempt per shard.

State changes travel as rows of the frame. So a filter or a projection after the operator can drop them, and
after the loss of a shuffle file Spark may mix the rows of two attempts of a task. This module detects both
before anything is sent to Kafka.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from kafka_eos_source.errors import StagedPartError, StateLostError
from kafka_eos_source.model import ShardPart, ShardReport, StagedPart, TopicPartition
from kafka_eos_source.protocol.packet import CHANGELOG
from kafka_eos_source.state.model import BatchRecord


def reports(parts: Iterable[StagedPart], query_id: str, batch_id: int) -> tuple[ShardReport, ...]:
    """Returns the report of each shard of each operator of the batch, sorted by changelog partition.

    All reports of an operator get the largest event time of its shards.

    Args:
        parts: staged parts of the batch.
        query_id: id of the query in the checkpoint.
        batch_id: id of the micro-batch.

    Raises:
        StateLostError: if packets of state changes are missing.
        StagedPartError: if packets come from two attempts of a task, or from another batch.
    """
    found: dict[TopicPartition, list[ShardPart]] = {}
    carried = False
    ran: set[str] = set()
    for part in parts:
        carried = carried or part.shards is not None
        ran.update(part.operators)
        for shard in part.shards or ():
            found.setdefault(shard.tp, []).append(shard)
    if carried and not found:
        raise _state_lost(
            "no shard of the operator sent a report",
            batch_id,
            "; with shards='partitions', remove stateful steps of Spark such as dropDuplicates, for which it "
            "runs batches without the source",
        )
    silent = sorted(ran - {tp.topic for tp in found})
    if silent:
        raise _state_lost(
            f"the operator of {', '.join(silent)} ran, but none of its state changes reached the sink",
            batch_id,
        )
    whole = {tp: _whole(tp, pieces, query_id, batch_id) for tp, pieces in sorted(found.items())}
    for topic in {tp.topic for tp in whole}:
        _check_all_reported([report for tp, report in whole.items() if tp.topic == topic])
    return tuple(_with_common_event_time(list(whole.values())))


def batch_of(report: ShardReport, end_digest: str) -> BatchRecord:
    """Returns the batch record for the changelog of a shard. It does not name the run; the token does."""
    return BatchRecord(
        query_id=report.query_id,
        batch_id=report.batch_id,
        task_attempt_id=report.task_attempt_id,
        time_ms=report.time_ms,
        event_time_ms=report.event_time_ms,
        counts=report.counts,
        end_digest=end_digest,
        log_start=report.log_start,
    )


def _whole(tp: TopicPartition, pieces: list[ShardPart], query_id: str, batch_id: int) -> ShardReport:
    attempts = {piece.task_attempt_id for piece in pieces}
    if len(attempts) > 1:
        raise StagedPartError(
            f"the state changes for {tp} in batch {batch_id} come from {len(attempts)} attempts of one "
            "task; expected one. Spark computed its rows again after the sink had read some of them.",
            fix="restart the query, which repeats the batch. Nothing was sent to Kafka.",
        )
    reported = [piece.report for piece in pieces if piece.report is not None]
    if not reported:
        raise _state_lost(f"the report of shard {tp.partition} of {tp.topic!r} is missing", batch_id)
    report = reported[0]
    numbers = sorted(number for piece in pieces for number in piece.packets)
    if numbers != list(range(report.packets)):
        raise _state_lost(
            f"{len(set(numbers))} of the {report.packets} packets of {tp} reached the sink, in "
            f"{len(numbers)} rows",
            batch_id,
        )
    if (report.query_id, report.batch_id) != (query_id, batch_id):
        raise StagedPartError(
            f"the state changes for {tp} belong to batch {report.batch_id} of query {report.query_id}; "
            f"expected batch {batch_id} of query {query_id}.",
            fix="do not cache or persist the result of a stateful operator; write it directly.",
        )
    return report


def _check_all_reported(found: list[ShardReport]) -> None:
    shards = {report.shards for report in found}
    missing = sorted(set(range(max(shards))) - {report.tp.partition for report in found})
    if missing or len(shards) > 1:
        raise _state_lost(
            f"of the {max(shards)} shards of {found[0].tp.topic!r}, the shards {missing} sent no report",
            found[0].batch_id,
        )


def _with_common_event_time(found: list[ShardReport]) -> Iterable[ShardReport]:
    largest: dict[str, int] = {}
    for report in found:
        if report.event_time_ms is not None:
            topic = report.tp.topic
            largest[topic] = max(report.event_time_ms, largest.get(topic, report.event_time_ms))
    for report in found:
        yield replace(report, event_time_ms=largest.get(report.tp.topic))


def _state_lost(what: str, batch_id: int, more: str = "") -> StateLostError:
    return StateLostError(
        f"state changes of batch {batch_id} are lost: {what}. A step between the operator and the sink "
        f"dropped their rows, or the column {CHANGELOG!r}.",
        fix=f"select the column {CHANGELOG!r}, do not use limit() or sample(), extend filters by "
        f"'… OR {CHANGELOG} IS NOT NULL', and write the result of an operator to one sink only{more}. "
        "Nothing was sent to Kafka.",
    )
