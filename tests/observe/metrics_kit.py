"""A query at the moment of a scrape, and the values of its metrics."""

from __future__ import annotations

from dataclasses import replace

from kafka_eos_source.model import TopicPartition
from kafka_eos_source.observe.figures import (
    BatchFigures,
    Outcome,
    SourceFigures,
    SourceRead,
    SourceState,
    WaitingCommit,
    position_id,
    with_totals,
)
from kafka_eos_source.observe.journal import QueryJournal
from kafka_eos_source.observe.lines import this_writer
from kafka_eos_source.observe.metrics import METRICS, Query, query_of

NOW = 1_700_000_000.0
END = {TopicPartition("in", 0): 5, TopicPartition("in", 1): 7}


def batch(application: str = "app", at: float = NOW - 3, **changed: object) -> BatchFigures:
    found = BatchFigures(
        application_id=application,
        query_id="query",
        run_id="run",
        batch_id=4,
        outcome=Outcome.COMMITTED,
        began_at=at - 2,
        ended_at=at,
        seconds={"tasks": 1.0, "produce": 0.25},
        counts={"records": 12, "offsets_read": 14, "transactions": 2, "committed": 2, "staged_bytes": 100},
        writer=this_writer(),
        sinks={"db": {"rows": 12, "prepared": 1, "committed": 1, "held_back_seconds": 0.5}},
        sources=(SourceRead(position_id(END), {"in": 14}),),
        sequence=1,
    )
    return with_totals(replace(found, **changed), None)  # type: ignore[arg-type]


def source(**changed: object) -> SourceFigures:
    found = SourceFigures(
        at=NOW - 1,
        writer=this_writer(),
        state=SourceState.IDLE,
        state_since=NOW - 2,
        application_id="app",
        name="in",
        start=END,
        planned=END,
        latest={TopicPartition("in", 0): 5, TopicPartition("in", 1): 27},
        behind_since={"in": NOW - 30},
    )
    return replace(found, **changed)  # type: ignore[arg-type]


def waiting(step: str, **changed: object) -> WaitingCommit:
    found = WaitingCommit(
        "app", "query", "run", 5, NOW - 1, NOW - 60, step, NOW - 40, "reason", 0, this_writer()
    )
    return replace(found, **changed)  # type: ignore[arg-type]


def query(*batches: BatchFigures, **changed: object) -> Query:
    found = QueryJournal("app", batches, sources=(source(),))
    return query_of(replace(found, **changed), NOW, lambda _process: True)  # type: ignore[arg-type]


def values(found: Query) -> dict[tuple[str, ...], float]:
    return {(each.name, *labels): value for each in METRICS for labels, value in each.values(found)}
