"""Explores the chain model: each record takes effect once, or a named error refuses the query.

``KAFKA_EOS_MODEL_EXAMPLES`` sets the number of schedules; with it, each run tries other ones. Without it,
every run tries the same schedules.
"""

from __future__ import annotations

import os
from collections import Counter

import pytest
from chain_machine import PERILS, QUERIES, ChainMachine
from chain_model import EVENTS
from hypothesis import HealthCheck, seed, settings
from hypothesis.stateful import run_state_machine_as_test

EXAMPLES = int(os.environ.get("KAFKA_EOS_MODEL_EXAMPLES", "0"))
#: Queries whose sinks do not share a target.
_SAFE = tuple(query for query in QUERIES if len({system for _, system in query.sinks}) == len(query.sinks))
_SETTINGS = settings(
    max_examples=max(1, EXAMPLES // len(_SAFE)) if EXAMPLES else 30,
    stateful_step_count=20,
    database=None,
    deadline=None,
    report_multiple_bugs=False,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much, HealthCheck.data_too_large],
)


def _explore(perils: frozenset[str]) -> Counter[str]:
    """Explores each kind of query, and returns how often each event happened."""
    before = Counter(EVENTS)
    for number, query in enumerate(_SAFE):
        machine: type[ChainMachine] = type(
            "Machine", (ChainMachine,), {"perils": perils, "queries": (query,)}
        )
        if not EXAMPLES:
            machine = seed(number)(machine)  # each query has its own schedules, the same every time
        run_state_machine_as_test(machine, settings=_SETTINGS)
    return Counter(EVENTS) - before


def test_crashes_and_restarts_alone_neither_refuse_a_query_nor_lose_or_duplicate_a_record() -> None:
    event_counts = _explore(frozenset())
    assert event_counts["batch died"]
    assert event_counts["in the end idle"]
    assert not event_counts["batch refused"]


@pytest.fixture(scope="module")
def event_counts() -> Counter[str]:
    """The events of a run with every peril."""
    return _explore(PERILS)


def test_no_combination_of_faults_loses_or_duplicates_a_record(event_counts: Counter[str]) -> None:
    assert event_counts["in the end idle"]
    assert event_counts["in the end refused"]


@pytest.mark.parametrize(
    "event",
    [
        *(f"batch {outcome}" for outcome in ("done", "idle", "died", "failed", "refused", "conflict")),
        *("kill", "rival", "rolled back", "lost checkpoint", "copied", "shared group", "reset", "expired"),
        *("recreated", "state lost", "batch write", "stale coordinator", "idle for long"),
        *(f"fault {error}Error" for error in ("Retriable", "Abortable", "Fenced")),
        *(f"sink fails at {call}" for call in ("prepare", "commit", "abort", "recover")),
        *(
            f"error KAFKA_EOS.{condition}"
            for condition in (
                "CHECKPOINT_ROLLED_BACK",
                "DATA_LOSS",
                "FOREIGN_QUERY",
                "OFFSETS_MOVED",
                "TOKEN_MISSING",
            )
        ),
    ],
)
def test_the_exploration_reaches_each_event(event: str, event_counts: Counter[str]) -> None:
    assert event_counts[event], sorted(event_counts.items())
