"""Rows that reading tasks stage themselves (``write=`` of `map_in_read`) are written once, whoever dies.

`integration.test_in_read` kills driver and task workers inside Spark.
"""

from __future__ import annotations

import pytest

from integration.chaos.oracle import Outcome
from integration.chaos.scenario import Scenario

#: Failpoints after the rows are staged, within and after the transaction.
STEPS = ["stage.after_close", "commit.after_check", "commit.after_flush", "commit.after_commit"]


@pytest.mark.fault("T156", "the driver is killed; reading tasks stage the rows", "four steps")
def test_t156_a_killed_driver_neither_loses_nor_doubles_rows_that_reading_tasks_staged(
    scenario: Scenario,
) -> None:
    scenario.feed(200)
    for step in STEPS:
        killed = scenario.start(f"{step}=kill@{scenario.once(step)}", in_read=True)
        assert killed.wait() != 0, f"{step}: the driver was not killed:\n{killed.tail()}"
        assert scenario.once(step).exists(), f"{step} was not reached:\n{killed.tail()}"
    scenario.run(in_read=True)
    found = scenario.outcome()
    assert found.exactly_once, found
    assert not list((scenario.checkpoint / "kafka-eos" / "staging").rglob("*.arrow")), "nothing is left"


@pytest.mark.fault("T54", "a rule is switched off; the others' tests must then fail", "its own")
def test_t54_without_the_token_check_rows_that_were_staged_again_are_written_twice(
    scenario: Scenario,
) -> None:
    """Proves that the test above can fail."""
    scenario.feed(100)
    assert scenario.start("commit.after_commit=kill*2", in_read=True).wait() != 0
    scenario.start(mutations=["token check"], in_read=True).wait()
    assert scenario.outcome().rows.doubled == 50


def with_a_lost_attempt(scenario: Scenario, *mutations: str) -> Outcome:
    """Passes the reports of two attempts of one task to the sink, and returns the outcome.

    Spark does so if a worker dies that holds a shuffle file between the reading tasks and those of the sink.
    """
    scenario.feed(100)
    lost = str(scenario.once("lost"))
    started = scenario.start(mutations=mutations, in_read=True, lost_attempt=lost, restarts=1)
    started.finish()
    assert mutations or "STAGED_PART_DAMAGED" in started.log.read_text(), started.tail()
    return scenario.outcome()


@pytest.mark.fault(
    "T157", "a task worker dies after its report was passed on, and the task runs again", "stage"
)
def test_t157_a_batch_with_the_reports_of_two_attempts_of_a_task_is_repeated(scenario: Scenario) -> None:
    found = with_a_lost_attempt(scenario)
    assert found.exactly_once, found


@pytest.mark.fault("T54", "a rule is switched off; the others' tests must then fail", "its own")
def test_t54_without_the_check_of_reports_a_task_that_ran_twice_is_written_twice(scenario: Scenario) -> None:
    """Proves that the test above can fail."""
    assert with_a_lost_attempt(scenario, "report check").rows.doubled == 50
