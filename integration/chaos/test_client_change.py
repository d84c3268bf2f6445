"""A query changes the client of its transactions, at a restart and while an older driver still runs."""

from __future__ import annotations

from itertools import cycle

import pytest

from integration.chaos.oracle import Outcome
from integration.chaos.scenario import Scenario
from integration.chaos.test_kills import STEPS
from kafka_eos_source.kafka import kernel
from kafka_eos_source.kafka.native_support import LIBRDKAFKA, NATIVE

pytestmark = pytest.mark.skipif(kernel.choice().kernel is None, reason=kernel.choice().why_not)

BOTH_WAYS = pytest.mark.parametrize(
    ("first", "second"), [(LIBRDKAFKA, NATIVE), (NATIVE, LIBRDKAFKA)], ids=lambda name: name
)


def client(name: str) -> dict[str, str]:
    return {"transaction.client": name}


@pytest.mark.fault("T158", "the client changes between two batches; the driver is killed", "each step")
def test_t158_each_restart_continues_with_the_other_client(scenario: Scenario) -> None:
    """Batches of both clients alternate: each driver is killed at another step, most in its second batch."""
    names = cycle([LIBRDKAFKA, NATIVE])
    for step in [*STEPS, "commit.before_commit", "commit.after_commit"] * 2:
        scenario.feed(100)  # two batches
        once = scenario.once(f"{step}-{scenario.starts}")
        times = "" if step == "commit.after_token" else "*2"  # a process reads the token once
        killed = scenario.start(f"{step}=kill{times}@{once}", sink=client(next(names)))
        assert killed.wait() != 0, f"{step}: the driver was not killed:\n{killed.tail()}"
        assert once.exists(), f"{step} was not reached:\n{killed.tail()}"
    scenario.run(sink=client(next(names)))
    found = scenario.outcome()
    assert found.exactly_once, found


@BOTH_WAYS
@pytest.mark.fault("T158", "the client changes while an older driver is stopped", "before commit")
def test_t158_a_driver_that_wakes_up_is_fenced_by_the_other_client(
    scenario: Scenario, first: str, second: str
) -> None:
    """Its transaction is complete but for EndTxn, which the epoch of the other client's producer refuses."""
    scenario.feed(150)
    asleep = scenario.stopped_at("commit.before_commit", at_time=3, sink=client(first))
    scenario.run(sink=client(second))
    asleep.resume()
    asleep.wait()
    found = scenario.outcome()
    assert found.exactly_once, found


def committed_then_changed(scenario: Scenario, first: str, second: str, *mutations: str) -> Outcome:
    """Kills a driver between Kafka's commit and Spark's, and continues with the other client."""
    scenario.feed(150)
    once = scenario.once("commit.after_commit")
    killed = scenario.start(f"commit.after_commit=kill*2@{once}", sink=client(first))
    assert killed.wait() != 0
    assert once.exists(), killed.tail()
    scenario.run(sink=client(second), mutations=mutations)
    return scenario.outcome()


@BOTH_WAYS
@pytest.mark.fault("T54", "a rule is switched off; the others' tests must then fail", "its own")
def test_t54_without_the_token_check_the_other_client_writes_a_batch_twice(
    scenario: Scenario, first: str, second: str
) -> None:
    found = committed_then_changed(scenario, first, second, "token check")
    assert not found.rows.exactly_once, "without the token check the batch must be doubled"
