"""Explores the chain model: each record takes effect once, or a named error refuses the query.

Every run tries the same schedules. With ``KAFKA_EOS_MODEL_EXAMPLES`` it also tries that many others, which
differ from run to run. The tests that assert what the schedules reach count only the former, because a small
number of random schedules may miss a rare event.
"""

from __future__ import annotations

import os
from collections import Counter

import pytest
from hypothesis import HealthCheck, seed, settings
from hypothesis.stateful import run_state_machine_as_test

from tests.chain.machine import IDENTITY_PERILS, PERILS, QUERIES, ChainMachine
from tests.chain.model import EVENTS
from tests.chain.query import Query

EXAMPLES = int(os.environ.get("KAFKA_EOS_MODEL_EXAMPLES", "0"))
#: Queries whose sinks do not share a target.
_SAFE = tuple(query for query in QUERIES if len({system for _, system in query.sinks}) == len(query.sinks))
_SETTINGS = settings(
    max_examples=40,
    stateful_step_count=20,
    database=None,
    deadline=None,
    report_multiple_bugs=False,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much, HealthCheck.data_too_large],
)


def _explore(perils: frozenset[str], examples: int) -> tuple[Counter[str], Counter[str]]:
    """Explores each kind of query.

    Args:
        perils: what may happen besides crashes and restarts.
        examples: number of fixed schedules of each query.

    Returns:
        How often each event happened in the fixed schedules, and in all schedules.
    """
    before = Counter(EVENTS)
    for number, query in enumerate(_SAFE):
        # each query has its own schedules, the same every time
        fixed = settings(_SETTINGS, max_examples=examples)
        run_state_machine_as_test(seed(number)(_machine(perils, query)), settings=fixed)
    reached = Counter(EVENTS) - before
    if EXAMPLES:
        others = settings(_SETTINGS, max_examples=max(1, EXAMPLES // len(_SAFE)))
        for query in _SAFE:
            run_state_machine_as_test(_machine(perils, query), settings=others)
    return reached, Counter(EVENTS) - before


def _machine(perils: frozenset[str], query: Query) -> type[ChainMachine]:
    return type("Machine", (ChainMachine,), {"perils": perils, "queries": (query,)})


def test_crashes_and_restarts_alone_neither_refuse_a_query_nor_lose_or_duplicate_a_record() -> None:
    reached, in_all = _explore(frozenset(), 15)  # with perils, the same crashes happen in many more
    assert reached["batch died"]
    assert reached["in the end idle"]
    assert not in_all["batch refused"]


@pytest.fixture(scope="module")
def event_counts() -> Counter[str]:
    """The events of the fixed schedules with every peril."""
    return _explore(PERILS, 40)[0]


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


#: The queries that meet a peril of identity; those of the other perils are plain.
_MEET = {
    "changelog": (Query(stateful=True),),
    "clocks": (Query(stateful=True),),
    "names": (Query(stateful=True),),
    "regions": (Query(sinks=(("one", "a"), ("two", "b"))),),
    "proofs": (Query(sources=("files",)), Query(distinct=True)),
}
#: Perils without which another one does little.
_WITH = {"advice": ("loss", "rollback")}


@pytest.mark.parametrize("peril", sorted(IDENTITY_PERILS))
def test_a_peril_of_identity_loses_or_doubles_no_record(peril: str) -> None:
    """Each peril alone, with the queries that meet it, so that a few schedules reach much of it."""
    run = settings(_SETTINGS, max_examples=max(20, EXAMPLES // len(IDENTITY_PERILS)))
    queries = _MEET.get(peril, (Query(), Query(jumps=False)))
    perils = {peril, *_WITH.get(peril, ())}
    machine = type("Machine", (ChainMachine,), {"perils": frozenset(perils), "queries": queries})
    run_state_machine_as_test(seed(1)(machine), settings=run)
