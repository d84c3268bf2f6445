"""The process that plans, stages and commits is killed; inside Spark that is `test_sink_kills`."""

from __future__ import annotations

import pytest

from integration.chaos.scenario import Scenario

#: Before the transaction and within it, in the order in which a batch meets them.
STEPS = ["commit.after_token", "commit.within_produce", "commit.after_flush"]


@pytest.mark.fault("T03", "the driver is killed", "before begin")
@pytest.mark.fault("T04", "the driver is killed", "within produce")
def test_t03_t04_the_driver_is_killed(scenario: Scenario) -> None:
    scenario.feed(200)
    for step in STEPS:
        killed = scenario.start(f"{step}=kill@{scenario.once(step)}")
        assert killed.wait() != 0, f"{step}: it was not killed:\n{killed.tail()}"
        assert scenario.once(step).exists(), f"{step} was not reached:\n{killed.tail()}"
    scenario.run()
    found = scenario.outcome()
    assert found.exactly_once, found
