"""A stateful query keeps exact counts when its driver is killed, its state deleted or its group removed.

The tests run the operator in the chaos loop, without Spark.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest

from integration.chaos.stateful import STORE
from integration.chaos.stateful_case import Case
from integration.support.driver import Driver
from integration.support.kafka import Admin, read_back
from kafka_eos_source.errors import RestartQueryError, StateLostError, TokenMissingError
from kafka_eos_source.runtime import failpoints

DIES_IN_BATCH = 2


@pytest.fixture
def case(broker: str, topic: Callable[..., str], tmp_path: Path) -> Case:
    return Case(broker, topic, tmp_path)


@pytest.mark.fault("S03", "the driver is killed while state commits", "before, within and after the commit")
@pytest.mark.fault("S04", "the state of one shard is deleted, then of all", "between two runs")
def test_counts_stay_exact_although_the_driver_is_killed_and_state_is_deleted(
    case: Case, driver: Callable[..., Driver], tmp_path: Path
) -> None:
    """The driver is killed around the commit, and local state is deleted between runs.

    Tasks run inside the driver process, so they die with it; the next start recovers their pending changes.
    """
    start = partial(driver, module="integration.chaos.loop")
    for number, step in enumerate(["state.after_pending", "commit.before_commit", "commit.after_commit"]):
        once = tmp_path / f"once-{number}"
        killed = start(case.spec(), f"{step}=kill*{number + 1}@{once}")
        assert killed.wait() != 0
        assert once.exists(), f"{step} was not reached:\n{killed.tail()}"
        if number == 1:
            shutil.rmtree(case.state / case.application / STORE / "0")
        if number == 2:
            shutil.rmtree(case.state)
    start(case.spec()).finish()
    case.check()


@pytest.mark.parametrize(
    "mutations",
    [
        pytest.param(
            (),
            id="with-the-log",
            marks=pytest.mark.fault(
                "T165",
                "the driver is killed while changes are only in the logs of closed stores",
                "three steps",
            ),
        ),
        pytest.param(
            ("state log",),
            id="mutated",
            marks=pytest.mark.fault(
                "T54", "a rule is switched off; the others' tests must then fail", "its own"
            ),
        ),
    ],
)
def test_t165_counts_stay_exact_although_closed_stores_have_no_tables(
    case: Case, driver: Callable[..., Driver], tmp_path: Path, mutations: tuple[str, ...]
) -> None:
    """Small changes stay in the log when a task closes its store; the next open reads them."""
    start = partial(driver, case.spec(mutations=mutations), module="integration.chaos.loop")
    for number, step in enumerate(["state.within_close", "state.after_emit", "commit.after_commit"]):
        once = tmp_path / f"once-{number}"
        killed = start(failpoints=f"{step}=kill*{number + 1}@{once}")
        assert killed.wait() != 0
        assert once.exists(), f"{step} was not reached:\n{killed.tail()}"
    if not mutations:
        assert not list(case.state.rglob("*.sst")), "otherwise this test shows nothing"
    start().finish()
    if mutations:
        with pytest.raises(AssertionError):
            case.check()
    else:
        case.check()


@pytest.mark.fault(
    "S08", "the group is deleted while a batch is in Kafka and not in Spark's log", "after the commit"
)
def test_the_changelog_identifies_a_batch_whose_group_was_deleted(case: Case, admin: Admin) -> None:
    """With the group deleted, the changelog still knows a batch that an operator declares as committed.

    ``onMissingToken=assume_committed`` skips the batch; without the changelog the state would count it twice.
    """
    with pytest.MonkeyPatch.context() as patch:
        armed = f"commit.after_commit=raise*{DIES_IN_BATCH + 1}"
        patch.setenv(failpoints.ENVIRONMENT_VARIABLE, armed)
        failpoints._armed.cache_clear()
        with pytest.raises(RestartQueryError, match="armed to raise"):
            case.run()
    failpoints._armed.cache_clear()
    commits = case.checkpoint / "commits"
    assert {path.name for path in commits.iterdir()} == {str(each) for each in range(DIES_IN_BATCH)}
    admin.delete_group(case.application)
    with pytest.raises(TokenMissingError):
        case.run()
    case.run(sink={"onMissingToken": "assume_committed"}, operator={"onMissingState": "changelog"})
    case.check()


@pytest.mark.fault("S05", "a filter drops rows with state", "between operator and sink")
def test_a_filter_that_drops_state_changes_fails_the_batch_before_kafka(case: Case) -> None:
    with pytest.raises(StateLostError):
        case.run(drops_state=True)
    assert read_back(case.broker, case.sink) == []
