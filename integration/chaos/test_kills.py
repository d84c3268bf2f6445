"""The committing process is killed around and within the transaction; restarts write each record once.

`test_sink_kills` does the same inside Spark.
"""

from __future__ import annotations

import pytest

from integration.chaos.scenario import Scenario
from integration.chaos.steps import STEPS


@pytest.mark.fault("T03", "the driver is killed", "before begin")
@pytest.mark.fault("T04", "the driver is killed", "within produce")
@pytest.mark.fault("T150", "the driver is killed", "within and after the transaction")
def test_t03_t04_t150_a_killed_driver_neither_loses_nor_doubles_records(scenario: Scenario) -> None:
    """The next driver writes the batch once."""
    scenario.feed(200)
    for step in STEPS:
        killed = scenario.start(f"{step}=kill@{scenario.once(step)}")
        assert killed.wait() != 0, f"{step}: the driver was not killed:\n{killed.tail()}"
        assert scenario.once(step).exists(), f"{step} was not reached:\n{killed.tail()}"
    scenario.run()
    found = scenario.outcome()
    assert found.exactly_once, found
