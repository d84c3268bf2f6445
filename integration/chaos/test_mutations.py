"""T54, the suite bites: rules of the commit are switched off one at a time, and what held fails."""

from __future__ import annotations

import pytest

from integration.chaos.oracle import Outcome
from integration.chaos.scenario import Scenario


def replayed(scenario: Scenario, *mutations: str) -> Outcome:
    """T01, T07: the driver dies between Kafka's commit and Spark's."""
    scenario.feed(100)
    assert scenario.start("commit.after_commit=kill*2").wait() != 0
    scenario.start(mutations=mutations).wait()
    return scenario.outcome()


@pytest.mark.fault("T07", "the driver dies after Kafka's commit and before Spark's", "commit")
def test_t07_a_committed_batch_is_skipped(scenario: Scenario) -> None:
    found = replayed(scenario)
    assert found.exactly_once, found


@pytest.mark.fault("T54", "a rule is switched off; the others' tests must then fail", "its own")
def test_t54_without_the_token_check_it_is_written_again(scenario: Scenario) -> None:
    assert replayed(scenario, "token check").rows.doubled == 50


@pytest.mark.fault("T36", "the client silently loses a record", "produce")
def test_t36_a_record_lost_on_the_way_into_the_client(scenario: Scenario) -> None:
    """Every attempt loses one: the batch must never be committed without it."""
    scenario.feed(50)
    broken = scenario.start(mutations=["lose a record"], sink={"commitTimeoutMs": "3000"})
    assert broken.wait() == 1
    assert "records, but 50 are staged" in broken.log.read_text()
    assert scenario.outcome().rows.found == 0, "nothing of it is visible"
    scenario.run()
    found = scenario.outcome()
    assert found.exactly_once, found


@pytest.mark.fault("T54", "a rule is switched off; the others' tests must then fail", "its own")
def test_t54_without_the_count_check_it_is_lost(scenario: Scenario) -> None:
    scenario.feed(50)
    scenario.run(mutations=["lose a record", "count check"])
    assert scenario.outcome().rows.missing, "the test above cannot fail"
