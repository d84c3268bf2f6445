"""Paused drivers and zombies: at most one driver commits each batch, and the other one is fenced."""

from __future__ import annotations

import pytest

from integration.chaos.oracle import Outcome
from integration.chaos.scenario import Scenario
from integration.support.kafka import await_stable, end_offsets, final_end_offsets

TIMEOUT_MS = 2000


@pytest.mark.parametrize(
    "at",
    [
        pytest.param(
            "commit.after_flush",
            marks=pytest.mark.fault("T22", "a pause longer than the transaction timeout", "within produce"),
        ),
        pytest.param(
            "commit.before_commit",
            marks=pytest.mark.fault(
                "T23", "a pause longer than the transaction timeout", "after send_offsets"
            ),
        ),
    ],
)
def test_t22_t23_a_driver_paused_beyond_the_transaction_timeout_writes_its_batch_again(
    scenario: Scenario, at: str
) -> None:
    """After a transaction timeout the driver is fenced; it reads the token and writes the batch again.

    While the driver is paused, the coordinator aborts the transaction and raises the epoch.
    """
    scenario.feed(150)
    options = {"kafka.transaction.timeout.ms": str(TIMEOUT_MS), "kafka.socket.timeout.ms": "1000"}
    driver = scenario.stopped_at(at, at_time=2, sink=options)
    await_stable(scenario.bootstrap, scenario.sink)  # the coordinator has aborted the transaction
    driver.resume()
    driver.finish()
    found = scenario.outcome()
    assert found.exactly_once, found


@pytest.mark.fault("T24", "a driver comes back after another went on", "token, produce, commit")
@pytest.mark.parametrize("at", ["commit.after_token", "commit.after_flush", "commit.before_commit"])
def test_t24_a_paused_driver_that_resumes_after_another_is_fenced_and_writes_nothing(
    scenario: Scenario, at: str
) -> None:
    """The second driver has finished when the first one resumes."""
    scenario.feed(150)
    zombie = scenario.stopped_at(at)
    scenario.run()
    ends = final_end_offsets(scenario.bootstrap, scenario.sink)
    zombie.resume()
    assert zombie.wait() == 1
    assert "KAFKA_EOS.FENCED" in zombie.log.read_text()
    found = scenario.outcome()
    assert found.exactly_once, found
    assert end_offsets(scenario.bootstrap, scenario.sink) == ends, "the zombie wrote nothing"


@pytest.mark.fault("T25", "one application.id, two checkpoints", "start")
def test_t25_a_second_checkpoint_with_the_same_application_id_is_refused(scenario: Scenario) -> None:
    """The first query continues."""
    scenario.feed(100)
    first = scenario.stopped_at("commit.before_begin", at_time=2)
    second = scenario.start(checkpoint=scenario.folder / "another")
    assert second.wait() == 1
    assert "ForeignQueryError" in second.log.read_text()
    first.resume()
    first.wait()  # it was fenced by the refused one; it may recover by the token or ask for a restart
    scenario.run()
    found = scenario.outcome()
    assert found.exactly_once, found


@pytest.mark.fault("T26", "two drivers on one checkpoint", "always")
def test_t26_of_two_drivers_on_one_checkpoint_only_one_commits_each_batch(scenario: Scenario) -> None:
    """Of two drivers about to commit the same batch, the slower one fails: in Kafka or at Spark's log."""
    scenario.feed(300)
    both = [scenario.stopped_at("commit.after_check") for _ in range(2)]
    for each in both:
        each.resume()
    (loser,) = [each for each in both if each.wait() != 0]
    said = loser.log.read_text()
    assert "KAFKA_EOS.FENCED" in said or "concurrently using this checkpoint" in said, said
    found = scenario.outcome()
    assert found.exactly_once, found
    assert found.token is not None
    assert found.token.batch_id == 5, "the other driver finished the query"


def test_t24_a_driver_fences_before_it_reads_the_token(scenario: Scenario) -> None:
    """B fences A before it reads the token, so A cannot commit the batch that B is about to write."""
    assert _overtaken(scenario).exactly_once


@pytest.mark.fault("T54", "a rule is switched off; the others' tests must then fail", "its own")
def test_t54_a_driver_that_reads_the_token_before_it_fences_writes_a_batch_twice(scenario: Scenario) -> None:
    """If B reads the token before it fences A, both write the batch."""
    found = _overtaken(scenario, "init before token")
    assert found.rows.doubled, "with the token read first, the batch must be written twice"


def _overtaken(scenario: Scenario, *mutations: str) -> Outcome:
    scenario.feed(50)
    first = scenario.stopped_at("commit.after_flush")
    second = scenario.stopped_at("commit.after_token", mutations=mutations)
    first.resume()
    first.wait()
    second.resume()
    second.wait()
    scenario.run()
    return scenario.outcome()
