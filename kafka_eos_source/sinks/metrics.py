"""Counters of each sink of this process: of the one that commits, which is a Python worker of the driver."""

from __future__ import annotations

from dataclasses import asdict, dataclass


@dataclass
class SinkMetrics:
    """Of one sink of one query, since the process began.

    Attributes:
        prepared, committed, aborted: calls that did it.
        recovered: ids that an earlier process had left prepared.
        rows: committed.
        retries: commits that were to be tried again.
        prepare_seconds, commit_seconds: spent in all.
        held_back_seconds: how long the query waits for this sink right now, its batch being in Kafka; 0 = it
            does not. What to set an alarm on.
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
    """The counters of a sink, made when they are first asked for."""
    return _all.setdefault((application_id, sink), SinkMetrics())


def snapshot() -> dict[str, dict[str, float]]:
    """All counters, by ``<application.id>/<sink>``."""
    return {f"{application_id}/{sink}": asdict(each) for (application_id, sink), each in _all.items()}
