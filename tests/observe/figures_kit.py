"""Figures of a query, its journal, and what is seen of it at a fixed time."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from kafka_eos_source.model import TopicPartition
from kafka_eos_source.observe.figures import (
    BatchFigures,
    Event,
    EventKind,
    Outcome,
    SourceFigures,
    SourceRead,
    SourceState,
    WaitingCommit,
    position_id,
    with_totals,
)
from kafka_eos_source.observe.journal import QueryJournal
from kafka_eos_source.observe.lines import ProcessId, Writer
from kafka_eos_source.observe.view import QueryView, view

WRITER = Writer(ProcessId(10, 100.5), ProcessId(9, 99.5))
BATCH = BatchFigures(
    application_id="app/ä",
    query_id="query",
    run_id="run",
    batch_id=7,
    outcome=Outcome.COMMITTED,
    began_at=1000.0,
    ended_at=1000.25,
    seconds={"tasks": 0.5, "produce": 0.125},
    counts={"records": 10, "committed": 1},
    writer=WRITER,
    sinks={"files": {"rows": 10, "commit_seconds": 0.25}},
    sources=(SourceRead("abc", {"in": 12}),),
    sequence=8,
    pressure=0.5,
    processor_counts={"late_rows": 3},
    state={"app-counts-changelog": {"keys": 5, "bytes": 900}},
    gauges={"tasks": 2, "median_task_seconds": 0.25, "longest_task_seconds": 0.5},
    topics={"out": {"records": 10, "bytes": 100}},
    links=(f"00-{'a' * 32}-{'b' * 16}-01",),
    events=(Event(1000.1, EventKind.RETRIED, "no answer"),),
    error="",
)
WAITING = WaitingCommit("app", "query", "run", 7, 1002.0, 1000.0, "flush", 1001.0, "no answer", 1, WRITER)
SOURCE = SourceFigures(
    at=1001.0,
    writer=WRITER,
    state=SourceState.IDLE,
    state_since=1000.0,
    reason="minOffsetsPerTrigger=5: 2 offsets are available",
    name="in",
    start={TopicPartition("in", 0): 12},
    planned={TopicPartition("in", 0): 12},
    latest={TopicPartition("in", 0): 14},
    positions=("abc",),
    behind_since={"in": 998.0},
    behind_at_least=("in",),
    hidden={TopicPartition("in", 1): 7},
    hidden_since=997.5,
    retention_seconds=604800.0,
)

T0 = TopicPartition("in", 0)
NOW = 2000.0


def batch(number: int, ended_at: float, **more: Any) -> BatchFigures:
    return replace(BATCH, batch_id=number, began_at=ended_at - 0.25, ended_at=ended_at, **more)


def journal(*batches: BatchFigures, **more: Any) -> QueryJournal:
    """Returns a journal whose batches have the totals that their writer would add."""
    found: list[BatchFigures] = []
    for each in batches:
        found.append(with_totals(each, found[-1] if found else None))
    return QueryJournal(BATCH.application_id, tuple(found), **more)


def seen(found: QueryJournal, *dead: ProcessId) -> QueryView:
    return view(found, NOW, lambda process: process not in dead)


DONE = replace(SOURCE, positions=(), planned={T0: 12}, reason="", at=NOW - 1)
READ = replace(BATCH.sources[0], position=position_id({T0: 12}))
LAST = batch(7, NOW - 20, sources=(READ,))
