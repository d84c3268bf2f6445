"""The driver is killed while a batch has dead letters: all records and letters are written exactly once."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import pytest

from integration.chaos.scenario import Scenario
from integration.support.kafka import read_back
from kafka_eos_source.testing.verdict import Verdict, judge

#: Records whose values end so are marked as invalid.
BAD = "7"
#: Where the driver is killed: among the records, between records and dead letters, and around the commit.
STEPS = ("commit.within_produce", "commit.within_produce*2", "commit.before_commit", "commit.after_commit")


@dataclass(frozen=True)
class Outputs:
    """The verdicts on the two topics that a query writes."""

    records: Verdict
    letters: Verdict

    @property
    def exactly_once(self) -> bool:
        return self.records.exactly_once and self.letters.exactly_once


def killed_at(scenario: Scenario, steps: Sequence[str], *mutations: str) -> Outputs:
    """Kills the query once at each step, runs it to its end, and judges both outputs."""
    dead = scenario.admin.create(f"dead-{scenario.sink}", 1)
    sink = {"onInvalidRecord": "dead-letter", "deadLetter.topic": dead}
    scenario.feed(300)
    for number, step in enumerate(steps):
        once = scenario.once(str(number))
        killed = scenario.start(_kill(step, once), sink=sink, marks=f"{BAD}$", mutations=mutations)
        assert killed.wait() != 0, f"{step}: the driver was not killed:\n{killed.tail()}"
    scenario.run(sink=sink, marks=f"{BAD}$", mutations=mutations)
    return Outputs(*(_verdict(scenario, topic, bad) for topic, bad in ((scenario.sink, False), (dead, True))))


def _kill(step: str, once: object) -> str:
    name, _, times = step.partition("*")
    return f"{name}=kill*{times or 1}@{once}"


def _verdict(scenario: Scenario, topic: str, bad: bool) -> Verdict:
    wanted = [(key, value) for key, value in scenario.sent if value.endswith(BAD) == bad]
    found = read_back(scenario.bootstrap, topic)
    return judge(wanted, (((each.key or b"").decode(), (each.value or b"").decode()) for each in found))


@pytest.mark.fault("T120", "the driver is killed while a batch has dead letters", "produce, commit")
def test_t120_dead_letters_commit_with_the_records_of_their_batch(scenario: Scenario) -> None:
    found = killed_at(scenario, STEPS)
    assert found.exactly_once, found


@pytest.mark.fault("T54", "a rule is switched off; the others' tests must then fail", "its own")
def test_t54_dead_letters_that_are_not_committed_are_lost(scenario: Scenario) -> None:
    """Proves that the test above notices lost dead letters."""
    found = killed_at(scenario, [], "commit dead letters")
    assert found.records.exactly_once, found
    assert found.letters.missing == 30, found


@pytest.mark.fault("T54", "a rule is switched off; the others' tests must then fail", "its own")
def test_t54_dead_letters_outside_the_transaction_are_doubled(scenario: Scenario) -> None:
    """Proves that the test above notices dead letters of an attempt that did not commit."""
    found = killed_at(scenario, ["commit.within_produce"], "dead letters in the transaction")
    assert found.records.exactly_once, found
    assert found.letters.doubled > 0, found
