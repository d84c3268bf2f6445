"""Counters of each sink, in the process that commits: a Python worker of the driver."""

from __future__ import annotations

from dataclasses import asdict, dataclass


@dataclass
class SinkMetrics:
    """Counters of one sink of one query since the process started.

    Attributes:
        prepared, committed, aborted: number of successful calls.
        recovered: number of ids that an earlier process left prepared.
        rows: number of committed rows.
        retries: number of commits that returned `Retryable`.
        prepare_seconds, commit_seconds: total time spent in these calls.
        held_back_seconds: how long the query has been waiting for this sink to commit a batch that Kafka has
            already committed; 0 if it is not waiting. Alert on this value.
    """

    prepared: int = 0
    committed: int = 0
    aborted: int = 0
    recovered: int = 0
    rows: int = 0
    retries: int = 0
    prepare_seconds: float = 0.0
    commit_seconds: float = 0.0
    held_back_seconds: float = 0.0


_all: dict[tuple[str, str], SinkMetrics] = {}


def of(application_id: str, sink: str) -> SinkMetrics:
    """Returns the counters of a sink; creates them at the first call."""
    return _all.setdefault((application_id, sink), SinkMetrics())


def snapshot() -> dict[str, dict[str, float]]:
    """Returns all counters, by ``<application.id>/<sink>``."""
    return {f"{application_id}/{sink}": asdict(each) for (application_id, sink), each in _all.items()}
