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
def test_t07_a_replayed_batch_that_kafka_holds_is_skipped(scenario: Scenario) -> None:
    """A batch that Kafka committed and Spark did not log is replayed by Spark and skipped by the sink."""
    found = replayed(scenario)
    assert found.exactly_once, found


@pytest.mark.fault("T54", "a rule is switched off; the others' tests must then fail", "its own")
def test_t54_without_the_token_check_a_replayed_batch_is_written_twice(scenario: Scenario) -> None:
    """Proves that the test above can fail."""
    assert replayed(scenario, "token check").rows.doubled == 50


@pytest.mark.fault("T36", "the client silently loses a record", "produce")
def test_t36_a_batch_that_lost_a_record_in_the_client_is_never_committed(scenario: Scenario) -> None:
    """The batch is retried and never committed."""
    scenario.feed(50)
    broken = scenario.start(mutations=["lose a record"], sink={"commitTimeoutMs": "3000"})
    assert broken.wait() == 1
    assert "records, but 50 are staged" in broken.log.read_text()
    assert scenario.outcome().rows.found == 0, "no record of the batch is visible"
    scenario.run()
    found = scenario.outcome()
    assert found.exactly_once, found


@pytest.mark.fault("T54", "a rule is switched off; the others' tests must then fail", "its own")
def test_t54_without_the_count_check_a_batch_with_a_lost_record_is_committed(scenario: Scenario) -> None:
    """Proves that the test above can fail."""
    scenario.feed(50)
    scenario.run(mutations=["lose a record", "count check"])
    assert scenario.outcome().rows.missing, "without the count check a record must be missing"
