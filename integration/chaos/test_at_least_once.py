"""``at_least_once``: no fault loses a record, and only a repeated task writes one twice."""

from __future__ import annotations

import pytest

from integration.chaos.conftest import Proxied
from integration.chaos.proxy import PRODUCE, Action
from integration.chaos.scenario import Scenario

AT_LEAST_ONCE = {"processing.guarantee": "at_least_once"}
#: Records of a micro-batch of the scenario.
A_BATCH = 50


@pytest.mark.fault("T371", "answers to Produce are lost, requests are cut off; at_least_once", "produce")
@pytest.mark.parametrize("action", [Action.DROP_ANSWER, Action.CUT], ids=lambda action: action.value)
def test_t371_what_an_idempotent_producer_sends_again_is_written_once_and_in_order(
    behind_proxy: Scenario, proxied: Proxied, action: Action
) -> None:
    behind_proxy.feed(200)
    caught = proxied.proxy.catch(PRODUCE, action, skip=1, times=3)
    behind_proxy.run(sink=AT_LEAST_ONCE)
    assert len(caught.caught) == 3
    found = behind_proxy.outcome()
    assert found.rows.exactly_once, found
    assert not found.out_of_order


@pytest.mark.fault("T372", "the task is killed after Kafka has its records; at_least_once", "flush")
def test_t372_a_task_that_is_repeated_doubles_its_records_and_loses_none(scenario: Scenario) -> None:
    scenario.feed(3 * A_BATCH)
    once = scenario.once("flushed")
    killed = scenario.start(f"direct.after_flush=kill*2@{once}", sink=AT_LEAST_ONCE)
    assert killed.wait() != 0, killed.tail()
    assert once.exists(), killed.tail()
    scenario.run(sink=AT_LEAST_ONCE)
    found = scenario.outcome()
    assert found.rows.missing == 0, found
    assert 0 < found.rows.doubled <= A_BATCH, found
