"""EndTxn requests that are lost, duplicated or late never end the wrong transaction."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from integration.chaos.conftest import Proxied
from integration.chaos.late_requests import (
    CONCURRENT_TRANSACTIONS,
    INVALID_PRODUCER_EPOCH,
    NONE,
    PRODUCER_FENCED,
)
from integration.chaos.oracle import Outcome
from integration.chaos.proxy import END_TXN, Action
from integration.chaos.scenario import Scenario

Late = Callable[..., tuple[int, Outcome]]

#: The second answers newer versions of a request.
FENCED = INVALID_PRODUCER_EPOCH, PRODUCER_FENCED


@pytest.mark.fault("T06", "the driver dies while its EndTxn is on the way", "commit")
@pytest.mark.parametrize("delivered", ["before the restart", "after the restart", "never"])
def test_t06_a_commit_request_that_outlives_its_driver_takes_effect_at_most_once(
    behind_proxy: Scenario, proxied: Proxied, delivered: str
) -> None:
    behind_proxy.feed(120)
    held = proxied.proxy.catch(END_TXN, Action.HOLD, skip=1, times=1000)
    driver = behind_proxy.start()
    late = held.await_caught()[0]
    driver.kill()
    proxied.proxy.catch_nothing()
    if delivered == "before the restart":
        assert late.deliver() == NONE
    behind_proxy.run()
    if delivered == "after the restart":
        assert late.deliver() in FENCED, "the restart has fenced the old producer, so its commit is refused"
    found = behind_proxy.outcome()
    assert found.exactly_once, found


@pytest.mark.fault("T18", "the answer to EndTxn is lost", "commit")
def test_t18_a_driver_continues_after_the_answer_to_its_commit_was_lost(
    behind_proxy: Scenario, proxied: Proxied
) -> None:
    """The driver reads the token, finds that the commit took effect, and continues by itself."""
    behind_proxy.feed(150)
    dropped = proxied.proxy.catch(END_TXN, Action.DROP_ANSWER, skip=1)
    behind_proxy.run()
    assert dropped.caught
    found = behind_proxy.outcome()
    assert found.exactly_once, found
    assert found.token is not None
    assert found.token.batch_id == 2, "the query finished without a restart"


@pytest.mark.fault("T19", "EndTxn is held until the next batch runs", "commit")
def test_t19_a_delayed_commit_request_does_not_affect_the_next_batches(
    behind_proxy: Scenario, proxied: Proxied
) -> None:
    """Delayed commit requests arrive while later batches run."""
    behind_proxy.feed(200)
    held = proxied.proxy.catch(END_TXN, Action.HOLD, times=3)
    driver = behind_proxy.start()
    answers = [late.deliver() for late in held.await_caught(3)]
    driver.finish()
    found = behind_proxy.outcome()
    assert found.exactly_once, found
    assert set(answers) <= {NONE, *FENCED, CONCURRENT_TRANSACTIONS}
