"""Other programs in the consumer group of a query, two drivers on one checkpoint, and names that do not agree."""

from __future__ import annotations

import shutil
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import pytest
from confluent_kafka import Consumer

from integration.chaos.scenario import Scenario
from integration.support.kafka import read_back, values
from integration.support.processes import await_condition
from kafka_eos_source.protocol.identity import group_of

_SECONDS = 120.0
_IN_USE, _MOVED = "[KAFKA_EOS.GROUP_IN_USE]", "[KAFKA_EOS.OFFSETS_MOVED]"
_SWITCHED_OFF = pytest.mark.fault(
    "T54", "a rule is switched off; the others' tests must then fail", "its own"
)
_BEFORE = pytest.mark.fault(
    "T350", "a consumer has the group of a query; it lives, and it has ended", "start"
)
_WHILE = pytest.mark.fault("T351", "a consumer joins the group of a query, or commits there", "while it runs")
_OUTPUT = pytest.mark.fault(
    "T352", "a consumer of the output has the application.id as its group.id", "between runs of the query"
)


class OtherProgram:
    """A consumer as other programs have one, with its own auto commits."""

    def __init__(self, scenario: Scenario, group_id: str, topic: str, **config: Any) -> None:
        self.seen: Counter[str] = Counter()
        self._consumer = Consumer(
            {
                "bootstrap.servers": scenario.bootstrap,
                "group.id": group_id,
                "client.id": "the-other-program",
                "auto.offset.reset": "earliest",
                "auto.commit.interval.ms": 100,
                "isolation.level": "read_committed",
                **config,
            }
        )
        self._consumer.subscribe([topic])

    def read(self, records: int) -> None:
        """Reads so many records; it is a member of the group then."""
        wanted = self.seen.total() + records

        def is_read() -> bool:
            message = self._consumer.poll(0.2)
            if message is not None and message.error() is None:
                self.seen[bytes(message.value()).decode()] += 1
            return self.seen.total() >= wanted

        await_condition(is_read, _SECONDS, f"the consumer has read {records} records")

    def await_joined(self) -> None:
        def has_joined() -> bool:
            self._consumer.poll(0.1)
            return bool(self._consumer.assignment())

        await_condition(has_joined, _SECONDS, "the consumer has joined its group")

    def end(self) -> None:
        """Commits what was read, and leaves the group."""
        self._consumer.close()


@contextmanager
def other_program(scenario: Scenario, group_id: str, topic: str, **config: Any) -> Iterator[OtherProgram]:
    program = OtherProgram(scenario, group_id, topic, **config)
    try:
        yield program
    finally:
        program.end()


def source_offsets(scenario: Scenario, group_id: str) -> dict[tuple[str, int], int]:
    found = scenario.admin.group(group_id, may_be_empty=True)
    return {tp: offset for tp, (offset, _) in found.items() if tp[0] == scenario.source}


@pytest.mark.parametrize("protocol", ["classic", "consumer"])
@_BEFORE
def test_t350_a_query_begins_only_in_a_group_without_members_and_offsets(
    scenario: Scenario, protocol: str
) -> None:
    """The consumer loses nothing, and with startingOffsets=group the query reads on where it stopped."""
    group = f"theirs-{scenario.sink}"
    scenario.feed(100)
    shared = {"kafka.group.id": group}
    with other_program(scenario, group, scenario.source, **{"group.protocol": protocol}) as program:
        program.read(30)
        refused = scenario.start(sink=shared)
        assert refused.wait() == 1
        said = refused.log.read_text()
        assert _IN_USE in said, refused.tail()
        assert f"'{group}'" in said
        assert "client.id='the-other-program' at 127.0.0.1" in said
    theirs = source_offsets(scenario, group)
    assert sum(theirs.values()) == program.seen.total() >= 30
    # it has ended, and left its offsets
    refused = scenario.start(sink=shared)
    assert refused.wait() == 1
    said = refused.log.read_text()
    assert _IN_USE in said, refused.tail()
    assert any(
        f"{topic}-{number} at {offset}" in said for (topic, number), offset in theirs.items() if offset
    )
    assert source_offsets(scenario, group) == theirs, "nothing was overwritten"
    assert scenario.written() == 0
    # the query replaces the consumer
    shutil.rmtree(scenario.checkpoint)
    continuing = {"startingOffsets": "group", **shared}
    scenario.run(source=continuing, sink=shared)
    scenario.feed(50)
    scenario.run(source=continuing, sink=shared)
    found = Counter(values(read_back(scenario.bootstrap, scenario.sink)))
    assert found.total() == 150 - program.seen.total()
    assert found + program.seen == Counter(value for _, value in scenario.sent), "each record once"


@_SWITCHED_OFF
def test_t54_without_the_look_at_the_offsets_a_consumer_of_the_group_loses_records(
    scenario: Scenario,
) -> None:
    """Proves that the test above can fail: the query moves the offsets of the consumer."""
    group = f"theirs-{scenario.sink}"
    scenario.feed(100)
    with other_program(scenario, group, scenario.source) as program:
        program.read(30)
    before = program.seen
    scenario.run(sink={"kafka.group.id": group}, mutations=["group offsets"])
    scenario.feed(10)
    with other_program(scenario, group, scenario.source) as program:
        program.read(10)
    new = {value for _, value in scenario.sent[100:]}
    assert set(program.seen) == new, "it has lost what lay between its offsets and the query's"
    assert before.total() < 100


@_OUTPUT
@pytest.mark.parametrize(
    "mutations",
    [pytest.param((), id="own group"), pytest.param(("group prefix",), marks=_SWITCHED_OFF, id="mutated")],
)
def test_t352_a_consumer_of_the_output_named_like_the_application_does_no_harm(
    scenario: Scenario, mutations: tuple[str, ...]
) -> None:
    """With the application.id as the group, the query would be refused; the consumer was there first."""
    seen: Counter[str] = Counter()
    scenario.feed(100)
    for number in range(3):
        driver = scenario.start(mutations=mutations)
        if mutations and number:
            assert driver.wait() == 1
            assert _MOVED in driver.log.read_text(), driver.tail()
            return
        driver.finish()
        with other_program(scenario, scenario.application_id, scenario.sink) as program:
            program.read(100)
        seen += program.seen
        scenario.feed(100)
    scenario.run()
    assert scenario.outcome().exactly_once
    assert seen == Counter(value for _, value in scenario.sent[:300]), "the consumer saw each record once"


def _joins(scenario: Scenario, group: str) -> OtherProgram:
    program = OtherProgram(scenario, group, scenario.source)
    program.await_joined()
    return program


def _commits(scenario: Scenario, group: str) -> None:
    scenario.admin.commit(group, {(scenario.source, 1): (3, "")})


@_WHILE
@pytest.mark.parametrize(
    ("disturb", "condition"),
    [
        pytest.param(_joins, _IN_USE, id="joins"),
        pytest.param(_commits, _MOVED, id="commits"),
        pytest.param(_joins, None, marks=_SWITCHED_OFF, id="mutated"),
    ],
)
def test_t351_a_running_query_notices_another_program_in_its_group(
    scenario: Scenario,
    disturb: Callable[[Scenario, str], OtherProgram | None],
    condition: str | None,
) -> None:
    """The query looks beside the transaction of a batch, aborts it, and continues when the other has gone."""
    group = group_of(scenario.application_id)
    scenario.feed(150)
    rules = ["short look"] if condition else ["short look", "group members"]
    driver = scenario.stopped_at("commit.before_begin", at_time=2, mutations=rules)
    before = source_offsets(scenario, group)
    program = disturb(scenario, group)
    driver.resume()
    if condition is None:
        assert driver.wait() == 0, "nobody noticed the member"
    else:
        assert driver.wait() == 1
        assert condition in driver.log.read_text(), driver.tail()
        assert scenario.outcome().rows.found == 50, "the batch was aborted"
    if program is not None:
        if condition is not None:
            assert source_offsets(scenario, group) == before
        program.end()
    policy: Mapping[str, str] = {} if condition != _MOVED else {"onMovedOffsets": f"overwrite:{scenario.planned}"}
    if program is not None:
        # the consumer may have committed before it left
        policy = {"onMovedOffsets": f"overwrite:{scenario.planned}"}
    scenario.run(sink=policy)
    assert scenario.outcome().exactly_once
