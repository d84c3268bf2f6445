"""Drivers that stand still for too long, and drivers that are two."""

from __future__ import annotations

import pytest

from integration.chaos.oracle import Outcome
from integration.chaos.scenario import Scenario
from integration.support.kafka import end_offsets
from integration.support.processes import await_condition

TIMEOUT_MS = 2000
_SECONDS = 60.0


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
def test_t22_t23_a_pause_longer_than_the_transaction_timeout(scenario: Scenario, at: str) -> None:
    """The coordinator aborts and raises the epoch; the driver is fenced, reads the token and writes again."""
    scenario.feed(150)
    options = {"kafka.transaction.timeout.ms": str(TIMEOUT_MS), "kafka.socket.timeout.ms": "1000"}
    driver = scenario.stopped_at(at, at_time=2, sink=options)
    written = scenario.written()
    # the marker of the coordinator's abort is a record
    await_condition(lambda: scenario.written() > written, _SECONDS, "the coordinator aborts the transaction")
    driver.resume()
    driver.finish()
    found = scenario.outcome()
    assert found.exactly_once, found


@pytest.mark.fault("T24", "a driver comes back after another went on", "token, produce, commit")
@pytest.mark.parametrize("at", ["commit.after_token", "commit.after_flush", "commit.before_commit"])
def test_t24_a_driver_comes_back_after_another_went_on(scenario: Scenario, at: str) -> None:
    scenario.feed(150)
    zombie = scenario.stopped_at(at)
    scenario.run()
    ends = end_offsets(scenario.bootstrap, scenario.sink)
    zombie.resume()
    assert zombie.wait() == 1
    assert "KAFKA_EOS.FENCED" in zombie.log.read_text()
    found = scenario.outcome()
    assert found.exactly_once, found
    assert end_offsets(scenario.bootstrap, scenario.sink) == ends, "the zombie wrote nothing that stayed"


@pytest.mark.fault("T25", "one application.id, two checkpoints", "start")
def test_t25_one_application_id_and_two_checkpoints(scenario: Scenario) -> None:
    scenario.feed(100)
    first = scenario.stopped_at("commit.before_begin", at_time=2)
    second = scenario.start(checkpoint=scenario.folder / "another")
    assert second.wait() == 1
    assert "ForeignQueryError" in second.log.read_text()
    first.resume()
    first.wait()  # fenced by the one that was refused, it may settle that by the token or ask for a restart
    scenario.run()
    found = scenario.outcome()
    assert found.exactly_once, found


@pytest.mark.fault("T26", "two drivers on one checkpoint", "always")
def test_t26_two_drivers_on_one_checkpoint(scenario: Scenario) -> None:
    """Both are about to commit the same batch; whoever is behind fails at Kafka or at Spark's log."""
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
    assert found.token.batch_id == 5, "the other one went on to the end"


def test_t24_a_driver_that_nobody_has_fenced_yet(scenario: Scenario) -> None:
    """B has read the token, and A, whom nobody fenced, commits the batch that B then writes."""
    assert _overtaken(scenario).exactly_once


@pytest.mark.fault("T54", "a rule is switched off; the others' tests must then fail", "its own")
def test_t54_init_before_token(scenario: Scenario) -> None:
    found = _overtaken(scenario, "init before token")
    assert found.rows.doubled, "the test above cannot fail"


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
