"""EndTxn requests that are lost, duplicated or late never end the wrong transaction."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from integration.chaos.conftest import Proxied
from integration.chaos.oracle import Outcome
from integration.chaos.proxy import END_TXN, PRODUCE, Action
from integration.chaos.scenario import Scenario
from integration.support.kafka import end_offsets
from integration.support.processes import await_condition

Late = Callable[..., tuple[int, Outcome]]

NONE, INVALID_PRODUCER_EPOCH, CONCURRENT_TRANSACTIONS, PRODUCER_FENCED = 0, 47, 51, 90
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


def late_abort(
    scenario: Scenario, proxied: Proxied, *mutations: str, meanwhile: Callable[[], object] = lambda: None
) -> tuple[int, Outcome]:
    """T16: batch 0's first EndTxn arrives late, as an abort, after batch 1's rows are flushed."""
    scenario.feed(100)
    held = proxied.proxy.catch(END_TXN, Action.HOLD)
    driver = scenario.stopped_at("commit.after_flush", at_time=2, mutations=mutations)
    (late,) = held.await_caught()
    meanwhile()
    answer = late.deliver(commit=False)
    driver.resume()
    driver.wait()
    scenario.run()
    return answer, scenario.outcome()


def late_commit(scenario: Scenario, proxied: Proxied, *mutations: str) -> tuple[int, Outcome]:
    """T17: batch 0's first EndTxn arrives when one partition of batch 1 is written; the driver then dies."""
    scenario.feed(100)
    held = proxied.proxy.catch(END_TXN, Action.HOLD)
    driver = scenario.stopped_at("commit.before_begin", at_time=2, mutations=mutations)
    (late,) = held.await_caught()
    written = scenario.written()
    proxied.proxy.catch(PRODUCE, Action.HOLD, skip=1, times=1000)
    driver.resume()
    await_condition(
        lambda: sum(end_offsets(scenario.bootstrap, scenario.sink).values()) > written,
        60,
        "one partition is written",
    )
    answer = late.deliver()
    driver.kill()
    proxied.proxy.catch_nothing()
    scenario.run()
    return answer, scenario.outcome()


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
