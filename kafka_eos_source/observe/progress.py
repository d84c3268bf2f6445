"""Makes the view of a query from Spark's progress reports, where the driver's files cannot be read.

That is so over Spark Connect. The source of this package adds the newest micro-batch to each report
(`observe.summary`). Reports of other sources only have Spark's own numbers.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from datetime import datetime
from typing import Any

from kafka_eos_source.observe.figures import BatchFigures, Outcome
from kafka_eos_source.observe.journal import QueryJournal
from kafka_eos_source.observe.steps import StepGroup
from kafka_eos_source.observe.summary import figures_in
from kafka_eos_source.observe.view import BatchView, QueryView, Status, TopicLag, view
from kafka_eos_source.protocol.offset_log import OURS
from kafka_eos_source.runtime.json_input import JsonError, parse_json


def view_of_reports(
    query_id: str, reports: Sequence[Mapping[str, Any]], now: float, *, runs: bool, works: bool, error: str
) -> QueryView:
    """Returns what Spark's progress reports of one query show.

    Args:
        query_id: Spark's id of the query.
        reports: the newest reports, oldest first, as objects of JSON.
        now: present time in seconds since 1970.
        runs: whether the query runs.
        works: whether it works on a micro-batch.
        error: why it failed; "" if it did not.
    """
    found: dict[tuple[str, int], BatchFigures] = {}
    for report in reports:
        for source in report.get("sources", ()):
            batch = figures_in(source.get("latestOffset"))
            if batch is not None:
                found[batch.run_id, batch.batch_id] = batch
    batches = tuple(sorted(found.values(), key=lambda each: each.ended_at))
    application_id = batches[-1].application_id if batches else ""
    made = view(QueryJournal(application_id, batches), now, lambda _process: runs)
    last = reports[-1] if reports else {}
    if not batches:
        made = replace(
            made,
            batches=tuple(_batch(each) for each in reports if each.get("durationMs")),
            read_per_second=float(last.get("inputRowsPerSecond") or 0.0),
            query_id=query_id,
            sources=tuple(str(each.get("description", "")) for each in last.get("sources", ())),
        )
    if error:
        status, since = Status.FAILED, None
    elif not runs:
        status, since = Status.STOPPED, None
    else:
        status, since = (Status.RUNNING if works else Status.IDLE), None
    return replace(
        made,
        query_id=query_id,
        status=status,
        status_since=since,
        status_text=error,
        lag=_lag(last.get("sources", ())),
    )


def _batch(report: Mapping[str, Any]) -> BatchView:
    """Returns a micro-batch with Spark's own numbers."""
    rows = int(report.get("numInputRows") or 0)
    return BatchView(
        batch_id=int(report.get("batchId", -1)),
        outcome=Outcome.COMMITTED,
        ended_at=_seconds(str(report.get("timestamp", ""))),
        seconds={StepGroup.TASKS: float(report["durationMs"].get("triggerExecution", 0)) / 1000},
        offsets_read=rows,
        records=max(0, int((report.get("sink") or {}).get("numOutputRows") or 0)),
        changes=0,
        retried=0,
    )


def _seconds(timestamp: str) -> float:
    try:
        return datetime.fromisoformat(timestamp.replace("Z", "+00:00")).timestamp()
    except ValueError:
        return 0.0


def _lag(sources: Sequence[Mapping[str, Any]]) -> dict[str, TopicLag]:
    """Returns the difference between the latest offsets and those at the end of the batch, per topic."""
    found: dict[str, TopicLag] = {}
    for source in sources:
        latest, end = _offsets(source.get("latestOffset")), _offsets(source.get("endOffset"))
        for topic, partitions in latest.items():
            behind = {
                int(partition): max(0, offset - end.get(topic, {}).get(partition, offset))
                for partition, offset in partitions.items()
            }
            found[topic] = TopicLag(sum(behind.values()), 0.0, False, behind)
    return found


def _offsets(found: object) -> dict[str, dict[str, int]]:
    """Returns the offsets in a source position; {} if it is none."""
    try:
        position = parse_json(found) if isinstance(found, str) else found
    except JsonError:
        return {}
    if not isinstance(position, dict):
        return {}
    return {
        topic: partitions
        for topic, partitions in position.items()
        if topic != OURS
        and isinstance(partitions, dict)
        and all(type(offset) is int and number.isdecimal() for number, offset in partitions.items())
    }
