"""Requests that the network delays, and the errors that answer them."""

from __future__ import annotations

from collections.abc import Callable

from integration.chaos.conftest import Proxied
from integration.chaos.oracle import Outcome
from integration.chaos.proxy import END_TXN, PRODUCE, Action
from integration.chaos.scenario import Scenario
from integration.support.kafka import end_offsets
from integration.support.processes import await_condition

NONE, INVALID_PRODUCER_EPOCH, CONCURRENT_TRANSACTIONS, PRODUCER_FENCED = 0, 47, 51, 90


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
