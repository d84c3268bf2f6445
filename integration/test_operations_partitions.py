"""Partitions are added to topics of a query that runs: records go on exactly once, or it refuses by name."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from integration.chaos.conftest import scenario as scenario
from integration.chaos.scenario import Scenario
from integration.chaos.stateful_case import Case
from integration.support.driver import Driver
from integration.support.kafka import Admin, read_back
from integration.support.stateful import check_running_counts

_GROWN = pytest.mark.fault(
    "T134", "input and output topic grow", "tasks, produce, commit; then the driver is killed"
)
_CHANGELOG_GROWN = pytest.mark.fault(
    "T135", "the changelog topic grows", "while state commits; then the driver is killed"
)
_SWITCHED_OFF = pytest.mark.fault(
    "T54", "a rule is switched off; the others' tests must then fail", "its own"
)
MISMATCH = "[KAFKA_EOS.STATE_MISMATCH]"


def grown_and_killed(scenario: Scenario, step: str) -> None:
    """Both topics grow while a batch is under way and records arrive; later the driver is killed."""
    scenario.feed(50)
    scenario.run()
    scenario.feed(100)
    killed = f"commit.after_commit=kill-worker*3@{scenario.once('third')}"
    driver = scenario.stopped_at(step, then=killed, available_now=False)
    scenario.admin.grow(scenario.source, 6)
    scenario.admin.grow(scenario.sink, 5)
    scenario.feed(100)
    driver.resume()
    assert driver.wait() == -9, driver.tail()


@_GROWN
@pytest.mark.long
@pytest.mark.parametrize("step", ["stage.after_close", "commit.within_produce", "commit.before_commit"])
def test_t134_partitions_added_to_input_and_output_under_load(scenario: Scenario, step: str) -> None:
    """New partitions are read from their beginning, also by a query that starts with ``latest``."""
    grown_and_killed(scenario, step)
    scenario.run(source={"startingOffsets": "latest"})
    found = scenario.outcome()
    assert found.rows.exactly_once, found  # keys move to other partitions, so there is no order to check
    assert not found.group_is_behind, found
    assert not found.open_partitions, found


@_SWITCHED_OFF
@pytest.mark.long
def test_t54_new_partitions_that_are_read_from_their_end_lose_records(scenario: Scenario) -> None:
    """Proves that the test above can fail."""
    scenario.feed(50)
    scenario.run()
    scenario.admin.grow(scenario.source, 6)
    scenario.feed(100)
    # by default, the source also refuses a new partition whose first record it cannot read
    scenario.run(mutations=["new partitions"], source={"failOnDataLoss": "false"})
    assert scenario.outcome().rows.missing


@pytest.fixture
def case(broker: str, topic: Callable[..., str], tmp_path: Path) -> Case:
    return Case(broker, topic, tmp_path)


@pytest.mark.parametrize(
    "mutations",
    [
        pytest.param((), marks=_CHANGELOG_GROWN, id="refused"),
        pytest.param(("shard check",), marks=[_SWITCHED_OFF, pytest.mark.long], id="mutated"),
    ],
)
def test_t135_a_changelog_that_grew_is_refused_whatever_the_number_of_shards_and_the_options(
    case: Case, admin: Admin, driver: Callable[..., Driver], tmp_path: Path, mutations: tuple[str, ...]
) -> None:
    """A person sets the shards to the partitions, asks to continue with the changelog, and has a new host.

    Without the check, keys meet shards that never held their state, and are counted from zero again.
    """

    def start(failpoints: str = "", **spec: Any) -> Driver:
        return driver(case.spec(**spec), failpoints, module="integration.chaos.loop")

    once, stopped = tmp_path / "killed", tmp_path / "stopped"
    running = start(f"commit.before_commit=stop*2@{stopped},commit.after_commit=kill-worker*2@{once}")
    running.await_text("BATCH 0")
    running.await_stopped()
    admin.grow(f"{case.application}-counts-changelog", 4)
    running.resume()
    assert running.wait() == -9, running.tail()
    case.feed(200)
    before = len(read_back(case.broker, case.sink))
    refused = start(mutations=mutations)
    assert refused.wait() == 1, refused.tail()
    said = refused.log.read_text()
    assert MISMATCH in said, refused.tail()
    assert "rescale QUERY --shards 2" in said
    shutil.rmtree(case.state)
    followed = start(shards=4, operator={"onMissingState": "changelog:1"}, mutations=mutations)
    code = followed.wait()
    if mutations:
        assert code == 0, followed.tail()
        with pytest.raises(AssertionError):
            case.check()
        return
    assert code == 1, followed.tail()
    assert MISMATCH in followed.log.read_text(), followed.tail()
    found = read_back(case.broker, case.sink)
    assert len(found) == before, "nothing was written"
    assert before, "batches were committed before the changelog grew"
    with pytest.raises(AssertionError):
        check_running_counts(case.wanted, found)  # the newest rows still have to be counted
