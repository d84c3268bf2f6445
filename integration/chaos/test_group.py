"""Other programs in the group of a query, two drivers on one checkpoint, and names that do not agree."""

from __future__ import annotations

import shutil
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from confluent_kafka import Consumer
from pyspark import TaskContext
from pyspark.sql.types import StringType, StructField, StructType

from integration.chaos.scenario import Scenario
from integration.chaos.stateful import STORE
from integration.chaos.stateful_case import Case
from integration.support.driver import Driver
from integration.support.kafka import Admin, final_end_offsets, read_back, values
from integration.support.processes import await_condition
from integration.support.stateful import check_running_counts
from kafka_eos_source.datasource import KafkaEosDataSource
from kafka_eos_source.errors import InvalidOptionError
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
def test_t54_without_the_look_at_the_offsets_a_consumer_loses_records(
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
            program.read(90 if mutations else 100)  # the anchor, a batch id, hides records from the consumer
        seen += program.seen
        scenario.feed(100)
    scenario.run()
    assert scenario.outcome().exactly_once
    assert seen == Counter(value for _, value in scenario.sent[:300]), "the consumer saw each record once"


def _joins(scenario: Scenario, group: str) -> OtherProgram:
    program = OtherProgram(scenario, group, scenario.source, **{"enable.auto.commit": False})
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
        assert condition is None or source_offsets(scenario, group) == before
        program.end()
    answer = {"onMovedOffsets": f"overwrite:{scenario.planned}"}
    scenario.run(sink={} if program is not None else answer)
    assert scenario.outcome().exactly_once


_NAMES = pytest.mark.fault(
    "T353", "application.id, group or brokers of operator, source and sink differ", "first batch"
)


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"sink": {"application.id": None}}, ("'application.id'", "the sink 'kafka-eos-", "(derived")),
        ({"state": {"application.id": None}}, ("'application.id'", "the operator with", "(derived")),
        ({"state": {"kafka.group.id": "theirs"}}, ("consumer groups", "'theirs'")),
        ({"source": {"application.id": "other"}}, ("'application.id'", "source 0 'other'", "offsets/0")),
    ],
)
@_NAMES
def test_t353_parts_of_a_query_that_disagree_are_refused_before_batch_0(
    broker: str,
    topic: Callable[..., str],
    driver: Callable[..., Driver],
    tmp_path: Path,
    changed: dict[str, dict[str, str | None]],
    said: tuple[str, ...],
) -> None:
    """Nothing is written, and the query works once the names agree."""
    case = Case(broker, topic, tmp_path)
    spec = case.spec()
    for part, options in changed.items():
        spec[part] = {name: value for name, value in {**spec[part], **options}.items() if value is not None}
    refused = driver(spec, module="integration.chaos.loop")
    assert refused.wait() == 1
    text = refused.log.read_text()
    assert "[KAFKA_EOS.INVALID_OPTION]" in text, refused.tail()
    for each in said:
        assert each in text, refused.tail()
    assert sum(final_end_offsets(broker, case.sink).values()) == 0, "nothing was written"
    if "source" in changed:
        (case.checkpoint / "offsets" / "0").unlink()  # as the message says
    driver(case.spec(), module="integration.chaos.loop").finish()
    check_running_counts(case.wanted, read_back(broker, case.sink))


@_NAMES
def test_t353_an_operator_on_another_cluster_is_refused_before_batch_0(
    broker: str, other_cluster: str, topic: Callable[..., str], driver: Callable[..., Driver], tmp_path: Path
) -> None:
    case = Case(broker, topic, tmp_path)
    changelog = f"{case.application}-{STORE}-changelog"
    spec = case.spec(operator={"kafka.bootstrap.servers": other_cluster})
    spec["sink"]["commitTimeoutMs"] = "10000"
    for said in ("does not exist on the cluster of the sink", "has the id"):
        refused = driver(spec, module="integration.chaos.loop")
        assert refused.wait() == 1
        text = refused.log.read_text()
        assert said in text, refused.tail()
        assert f"kafka.bootstrap.servers={other_cluster!r}" in text
        if not Admin(broker).client.list_topics(timeout=60).topics.get(changelog):
            Admin(broker).create(changelog, 2, **{"cleanup.policy": "compact"})
    assert sum(final_end_offsets(broker, case.sink).values()) == 0, "nothing was written"
    shutil.rmtree(case.state)  # it belongs to the state on the other cluster
    driver(case.spec(), module="integration.chaos.loop").finish()
    check_running_counts(case.wanted, read_back(broker, case.sink))


@pytest.mark.parametrize("exclusive", [True, False], ids=["rename", "object store"])
@pytest.mark.fault("T355", "two drivers run one query at the same time", "both plan and commit")
def test_t355_of_two_drivers_on_one_checkpoint_one_ends_with_an_error_and_no_row_is_affected(
    scenario: Scenario, *, exclusive: bool
) -> None:
    """On a file system that lets the second driver replace a log entry of the first, Spark does not notice.

    Then the transactional id and the token end one of the two.
    """
    scenario.feed(60)
    spec: dict[str, Any] = {"available_now": False, "exclusive_log": exclusive}
    first = scenario.start(**spec)
    first.await_text("BATCH 1")
    second = scenario.start(**spec)

    def one_has_ended() -> bool:
        scenario.feed(20)
        return any(each.process.poll() is not None for each in (first, second))

    await_condition(one_has_ended, _SECONDS, "one of the two drivers has ended")
    ended, other = (first, second) if first.process.poll() is not None else (second, first)
    text = ended.log.read_text()
    named = ("multiple streaming queries", "[KAFKA_EOS.FENCED]", "[KAFKA_EOS.RESTART_QUERY]")
    assert any(each in text for each in named), ended.tail()
    if other.process.poll() is None:
        other.tell("stop")
        assert other.wait() in (0, 1)
    scenario.run()
    found = scenario.outcome()
    assert found.exactly_once, found


@pytest.mark.fault("T356", "deadLetter.topic is a topic that the query reads", "first batch")
def test_t356_dead_letters_do_not_come_back_as_input(scenario: Scenario) -> None:
    scenario.feed(50)
    bad = {"onInvalidRecord": "dead-letter", "deadLetter.topic": scenario.source}
    before = sum(final_end_offsets(scenario.bootstrap, scenario.source).values())
    refused = scenario.start(sink=bad, marks="7$")
    assert refused.wait() == 1
    text = refused.log.read_text()
    assert "[KAFKA_EOS.INVALID_OPTION]" in text, refused.tail()
    assert f"'deadLetter.topic' has the value {scenario.source!r}" in text
    assert scenario.written() == 0
    assert sum(final_end_offsets(scenario.bootstrap, scenario.source).values()) == before
    scenario.run()
    assert scenario.outcome().exactly_once


@pytest.mark.fault(
    "T354", "one txnAppId and txnVersion are used for two topics (column topic)", "second write"
)
def test_t354_a_version_that_was_written_to_another_topic_is_refused_and_not_skipped(
    scenario: Scenario,
) -> None:
    """A repetition of the version with the same topics is skipped as before."""
    schema = StructType([StructField("topic", StringType()), StructField("value", StringType())])

    def write(topic: str, version: int = 1, rows: int = 40) -> None:
        options = {"kafka.bootstrap.servers": scenario.bootstrap, "txnAppId": scenario.application_id}
        writer: Any = KafkaEosDataSource({**options, "txnVersion": str(version)}).writer(schema, False)
        context: Any = TaskContext()
        context._localProperties, context._attemptNumber = {}, 0
        TaskContext._taskContext = context
        try:
            values = pa.array([f"{row:03d}" for row in range(rows)], pa.string())
            topics = pa.array([topic] * rows, pa.string())
            batch = pa.record_batch({"topic": topics, "value": values})
            writer.commit([writer.write(iter([batch]))])
        finally:
            TaskContext._taskContext = None

    write(scenario.sink)
    with pytest.raises(InvalidOptionError, match=f"txnVersion=1 .*{scenario.source}"):
        write(scenario.source)
    write(scenario.sink)
    write(scenario.source, version=2)
    write(scenario.sink, version=3, rows=0)
    with pytest.raises(InvalidOptionError, match=f"txnVersion=3 .*{scenario.source}"):
        write(scenario.source, version=3)
    for name in (scenario.sink, scenario.source):
        assert len(read_back(scenario.bootstrap, name)) == 40
