"""The aggregates of a query change between two runs: it continues exactly, or refuses and writes nothing.

The tests run the operator in the chaos loop, without Spark.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest

from integration.chaos.stateful import STORE
from integration.chaos.stateful_case import ROWS, Case
from integration.support.driver import Driver
from integration.support.kafka import read_back
from integration.support.stateful import check_changing_aggregates

FIRST = ["rows"]
THEN = ["bytes", "rows"]
LAST = ["wide", "longest", "renamed=rows", "bytes"]

_CHANGED = pytest.mark.fault(
    "T174",
    "aggregates are added, reordered, renamed and widened; then the driver is killed, and state deleted",
    "with the old query's last batch in Kafka only; around the first commits of the changed query",
)
_REFUSED = pytest.mark.fault(
    "T175", "the function of an aggregate changes under its name", "on the same host, and on a new one"
)
_SWITCHED_OFF = pytest.mark.fault(
    "T54", "a rule is switched off; the others' tests must then fail", "its own"
)


@pytest.fixture
def case(broker: str, topic: Callable[..., str], tmp_path: Path) -> Case:
    return Case(broker, topic, tmp_path)


@_CHANGED
def test_t174_a_changed_query_continues_exactly_although_it_is_killed_around_its_first_commits(
    case: Case, driver: Callable[..., Driver], tmp_path: Path
) -> None:
    start = partial(driver, module="integration.chaos.loop")
    runs = [
        (FIRST, "commit.after_commit"),  # the changed query replays this batch, which Kafka has
        (THEN, "state.after_pending"),
        (THEN, "commit.before_commit"),
        (THEN, "commit.after_commit"),
        (LAST, "commit.before_commit"),
        (LAST, "commit.after_commit"),
    ]
    for number, (aggregates, step) in enumerate(runs):
        killed = start(case.spec(aggregates=aggregates), f"{step}=kill@{tmp_path / f'once-{number}'}")
        assert killed.wait() != 0
        assert (tmp_path / f"once-{number}").exists(), f"{step} was not reached:\n{killed.tail()}"
        if number in (1, 4):  # one shard reads old and new values from its changelog
            shutil.rmtree(case.state / case.application / STORE / "0")
    start(case.spec(aggregates=LAST)).finish()
    case.feed(ROWS)
    shutil.rmtree(case.state)
    start(case.spec(aggregates=LAST)).finish()
    check_changing_aggregates(case.wanted, read_back(case.broker, case.sink))


@pytest.mark.parametrize(
    "mutations",
    [
        pytest.param((), marks=_REFUSED, id="refused"),
        pytest.param(("state versions",), marks=[_SWITCHED_OFF, pytest.mark.long], id="mutated"),
    ],
)
def test_t175_another_function_under_the_same_name_is_refused_also_after_a_restore(
    case: Case, driver: Callable[..., Driver], mutations: tuple[str, ...]
) -> None:
    """Both functions have states of the same width, so only the description tells them apart."""
    start = partial(driver, module="integration.chaos.loop")
    start(case.spec(aggregates=["wide", "rows", "bytes"])).finish()
    case.feed(ROWS)
    before = len(read_back(case.broker, case.sink))
    for number in range(2):
        changed = start(case.spec(aggregates=["wide", "rows", "bytes=longest"], mutations=mutations))
        code = changed.wait()
        if mutations:
            assert code == 0, changed.tail()
            found = [each.value or b"" for each in read_back(case.broker, case.sink)[before:]]
            assert any(b'"bytes": 1' in each for each in found), "a sum was read as the longest length"
            return
        assert code == 1, changed.tail()
        said = changed.log.read_text()
        assert "[KAFKA_EOS.STATE_MISMATCH]" in said, changed.tail()
        for declared in ("bytes = sum(size) with state int64", "bytes = max(size) with state int64"):
            assert declared in said
        assert len(read_back(case.broker, case.sink)) == before, "nothing was written"
        if number == 0:
            shutil.rmtree(case.state)
    start(case.spec(aggregates=["wide", "rows", "bytes"])).finish()
    rows = {(each.key or b"").decode(): each.value or b"" for each in read_back(case.broker, case.sink)}
    for key, wanted in case.wanted.items():
        assert rows[key] == b'{"rows": %d, "bytes": %d}' % (wanted, len(key) * wanted)
