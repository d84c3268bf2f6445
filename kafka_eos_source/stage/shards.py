"""The state changes of a batch on the driver: whole and of one attempt a shard, or nothing is committed.

Rows with changes travel like any others, so a filter or a projection behind an operator can drop them, and
after a lost shuffle file Spark may mix two attempts of a task. That is seen here, before Kafka is touched.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from kafka_eos_source.errors import StagedPartError, StateLostError
from kafka_eos_source.model import ShardPart, ShardReport, StagedPart, TopicPartition
from kafka_eos_source.protocol.packet import CHANGELOG
from kafka_eos_source.state.model import BatchRecord


def reports(parts: Iterable[StagedPart], query_id: str, batch_id: int) -> tuple[ShardReport, ...]:
    """One report for each shard of each operator of the batch, sorted by changelog partition.

    The event time in all reports of an operator is the largest of its shards'.

    Raises:
        StateLostError: packets are missing.
        StagedPartError: packets of two attempts came, or of another batch.
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
        raise _lost("no shard reported", batch_id)
    silent = sorted(ran - {tp.topic for tp in found})
    if silent:
        raise _lost(f"the operator of {', '.join(silent)} ran, and nothing of it came", batch_id)
    whole = {tp: _whole(tp, pieces, query_id, batch_id) for tp, pieces in sorted(found.items())}
    for topic in {tp.topic for tp in whole}:
        _check_all_there([report for tp, report in whole.items() if tp.topic == topic])
    return tuple(_with_common_event_time(list(whole.values())))


def batch_of(report: ShardReport) -> BatchRecord:
    """What the changelog says of the batch in this shard. The run is the token's business."""
    return BatchRecord(
        query_id=report.query_id,
        batch_id=report.batch_id,
        attempt=report.attempt,
        time_ms=report.time_ms,
        event_time_ms=report.event_time_ms,
        counts=report.counts,
    )


def _whole(tp: TopicPartition, pieces: list[ShardPart], query_id: str, batch_id: int) -> ShardReport:
    attempts = {piece.attempt for piece in pieces}
    if len(attempts) > 1:
        raise StagedPartError(
            f"the changes of {tp} in batch {batch_id} come from {len(attempts)} attempts of one task: Spark "
            "made its rows again after a part of them had been read.",
            fix="restart the query: the batch is made anew. Nothing was sent to Kafka.",
        )
    reported = [piece.report for piece in pieces if piece.report is not None]
    if not reported:
        raise _lost(f"the report of shard {tp.partition} of {tp.topic!r} is missing", batch_id)
    report = reported[0]
    numbers = sorted(number for piece in pieces for number in piece.packets)
    if numbers != list(range(report.packets)):
        raise _lost(
            f"of the {report.packets} packets of {tp}, {len(set(numbers))} came, {len(numbers)} rows in all",
            batch_id,
        )
    if (report.query_id, report.batch_id) != (query_id, batch_id):
        raise StagedPartError(
            f"the changes of {tp} were made for batch {report.batch_id} of query {report.query_id}; this is "
            f"batch {batch_id} of query {query_id}.",
            fix="do not cache or persist the result of a stateful operator; write it as it is.",
        )
    return report


def _check_all_there(found: list[ShardReport]) -> None:
    shards = {report.shards for report in found}
    missing = sorted(set(range(max(shards))) - {report.tp.partition for report in found})
    if missing or len(shards) > 1:
        raise _lost(
            f"of the {max(shards)} shards of {found[0].tp.topic!r}, {missing} did not report",
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


def _lost(what: str, batch_id: int) -> StateLostError:
    return StateLostError(
        f"batch {batch_id}: {what}. Rows with state changes, or their column {CHANGELOG!r}, were dropped "
        "between the operator and the sink.",
        fix="let them through: select the column, no limit() or sample(), filter with "
        f"'… OR {CHANGELOG} IS NOT NULL', and one result of an operator goes to one sink. Nothing was sent "
        "to Kafka.",
    )
