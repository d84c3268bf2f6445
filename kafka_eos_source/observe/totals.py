"""Sums the figures of a run's micro-batches, and bounds how many output topics they name."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from operator import add
from typing import Any

from kafka_eos_source.observe.figures import BatchFigures, Outcome

#: Bounds of the histogram `BatchFigures.durations`, in seconds. Longer batches are in no bound.
DURATION_BOUNDS = (0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 300.0)

#: Most output topics whose figures have a name. The others are summed, so that metrics have few labels.
MOST_TOPICS = 50
#: Name of the others. No topic of Kafka can have it.
OTHER_TOPICS = "(other)"


def with_totals(figures: BatchFigures, last: BatchFigures | None) -> BatchFigures:
    """Returns the figures with the sums over the batches of this run, and with few names of topics.

    Args:
        figures: the batch that has ended.
        last: the batch before it; None if there is none.
    """
    runs = 1 if last is None else last.runs
    if last is not None and last.run_id != figures.run_id:
        runs, last = last.runs + 1, None
    counts = {**figures.counts, "batches": 1}
    if figures.outcome is not Outcome.COMMITTED:
        counts[figures.outcome.value] = 1
    topic_totals = bounded(figures.topics, {} if last is None else last.topic_totals)
    figures = replace(figures, topics=_named_as(figures.topics, topic_totals))
    took = sum(figures.seconds.values())
    durations = tuple(int(took <= bound) for bound in DURATION_BOUNDS)
    if last is None:
        return replace(
            figures,
            totals=counts,
            sink_totals=dict(figures.sinks),
            topic_totals=topic_totals,
            total_seconds=dict(figures.seconds),
            durations=durations,
            totals_since=figures.began_at,
            runs=runs,
        )
    sinks = {
        name: summed(last.sink_totals.get(name, {}), figures.sinks.get(name, {}))
        for name in {**last.sink_totals, **figures.sinks}
    }
    return replace(
        figures,
        totals=summed(last.totals, counts),
        sink_totals=sinks,
        topic_totals=topic_totals,
        total_seconds=summed(last.total_seconds, figures.seconds),
        durations=tuple(map(add, durations, last.durations or [0] * len(durations))),
        totals_since=last.totals_since,
        runs=runs,
    )


def newer(one: BatchFigures | None, other: BatchFigures | None) -> BatchFigures | None:
    """Returns the newer one of two batches of the same query; None if there is neither.

    Within a run, the one whose totals cover more batches is newer, whatever a clock that was set says.
    """
    if one is None or other is None:
        return other if one is None else one
    if one.run_id == other.run_id:
        is_later = other.totals.get("batches", 0) > one.totals.get("batches", 0)
    else:
        is_later = other.ended_at > one.ended_at
    return other if is_later else one


def bounded(
    topics: Mapping[str, Mapping[str, float]], before: Mapping[str, Mapping[str, float]] | None = None
) -> dict[str, dict[str, float]]:
    """Returns the sums of both per topic, with at most `MOST_TOPICS` names.

    A topic that was named before stays named. Of the others, those with the most records get the names that
    are left.

    Args:
        topics: records and bytes per topic of one batch.
        before: the sums before it.
    """
    found = {name: dict(each) for name, each in (before or {}).items()}
    for name in sorted(topics, key=lambda name: -topics[name].get("records", 0)):
        is_named = name in found or len(found.keys() - {OTHER_TOPICS}) < MOST_TOPICS
        kept = name if is_named else OTHER_TOPICS
        found[kept] = summed(found.get(kept, {}), topics[name])
    return found


def _named_as(
    topics: Mapping[str, Mapping[str, float]], named: Mapping[str, Mapping[str, float]]
) -> dict[str, dict[str, float]]:
    """Returns the figures by topic; those of topics without a name are summed under `OTHER_TOPICS`."""
    found: dict[str, dict[str, float]] = {}
    for name, each in topics.items():
        kept = name if name in named else OTHER_TOPICS
        found[kept] = summed(found.get(kept, {}), each)
    return found


def summed(before: Mapping[str, float], more: Mapping[str, float]) -> dict[str, Any]:
    """Returns the sums of both by name."""
    return {name: before.get(name, 0) + more.get(name, 0) for name in {**before, **more}}
