"""T54, the tests can fail: each rule of the commit is switched off once, and exactly-once then breaks."""

from __future__ import annotations

import pytest

from integration.chaos.oracle import Outcome
from integration.chaos.scenario import Scenario


def replayed(scenario: Scenario, *mutations: str) -> Outcome:
    """T01, T07: kills the driver between Kafka's commit and Spark's, restarts it, and returns the outcome."""
    scenario.feed(100)
    assert scenario.start("commit.after_commit=kill*2").wait() != 0
    scenario.start(mutations=mutations).wait()
    return scenario.outcome()


@pytest.mark.fault("T07", "the driver dies after Kafka's commit and before Spark's", "commit")
def test_t07_a_committed_batch_is_skipped(scenario: Scenario) -> None:
    """A batch that Kafka committed and Spark did not log is replayed by Spark and skipped by the sink."""
    found = replayed(scenario)
    assert found.exactly_once, found


@pytest.mark.fault("T54", "a rule is switched off; the others' tests must then fail", "its own")
def test_t54_without_the_token_check_it_is_written_again(scenario: Scenario) -> None:
    """Without the token check, the replayed batch is written twice."""
    assert replayed(scenario, "token check").rows.doubled == 50


@pytest.mark.fault("T36", "the client silently loses a record", "produce")
def test_t36_a_record_lost_on_the_way_into_the_client(scenario: Scenario) -> None:
    """A batch that lost a record in the client is never committed, however often it is tried."""
    scenario.feed(50)
    broken = scenario.start(mutations=["lose a record"], sink={"commitTimeoutMs": "3000"})
    assert broken.wait() == 1
    assert "records, but 50 are staged" in broken.log.read_text()
    assert scenario.outcome().rows.found == 0, "no record of the batch is visible"
    scenario.run()
    found = scenario.outcome()
    assert found.exactly_once, found


@pytest.mark.fault("T54", "a rule is switched off; the others' tests must then fail", "its own")
def test_t54_without_the_count_check_it_is_lost(scenario: Scenario) -> None:
    """Without the count check, a record that the client loses is missing from a committed batch."""
    scenario.feed(50)
    scenario.run(mutations=["lose a record", "count check"])
    assert scenario.outcome().rows.missing, "without the count check a record must be missing"
