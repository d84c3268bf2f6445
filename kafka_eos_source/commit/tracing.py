"""What the commit of a micro-batch tells its trace about the batch."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence

from kafka_eos_source.commit.interfaces import Producer
from kafka_eos_source.commit.machine import Result
from kafka_eos_source.commit.sources import SourceRange
from kafka_eos_source.commit.steps import Step
from kafka_eos_source.model import Offsets, ShardReport, StagedPart
from kafka_eos_source.observe.background import guarded
from kafka_eos_source.observe.figures import BatchFigures, Outcome, SourceRead, position_id
from kafka_eos_source.observe.journal import Journal
from kafka_eos_source.observe.lines import this_writer
from kafka_eos_source.observe.trace import BatchLog, Observer, Trace
from kafka_eos_source.protocol.offset_log import LoggedOffsets
from kafka_eos_source.runtime import logs
from kafka_eos_source.stage.parts import StagedRows

#: What shards measure of their state as it is; the rest is about restores.
_PRESENT = ("keys", "bytes", "uncommitted_bytes", "spilled_bytes")


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
    if result.step is Step.SKIPPED and not result.confirmed_by_token:
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
