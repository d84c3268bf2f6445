"""Dead letters of killed drivers are written exactly once; what a broker refuses becomes a dead letter."""

from __future__ import annotations

import pickle
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta, timezone
from typing import Any

import pyarrow as pa
import pytest
from pyspark import TaskContext
from pyspark.sql.types import StringType, StructField, StructType, TimestampType

from integration.chaos.scenario import Scenario
from integration.support.driver import Driver
from integration.support.kafka import read_back, values
from kafka_eos_source.datasource import KafkaEosDataSource
from kafka_eos_source.spark.arrow import arrow_schema
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


def write(broker: str, rows: dict[str, Any], **options: str) -> None:
    """Runs a ``df.write`` by the calls that Spark makes."""
    options = {"kafka.bootstrap.servers": broker, "commitTimeoutMs": "30000", **options}
    kinds = {"timestamp": TimestampType()}
    schema = StructType([StructField(name, kinds.get(name, StringType())) for name in rows])
    context: Any = TaskContext()
    context._localProperties, context._attemptNumber = {}, 0
    TaskContext._taskContext = context
    try:
        driver = KafkaEosDataSource(options).writer(schema, overwrite=False)
        task = pickle.loads(pickle.dumps(driver))
        driver.commit([task.write(iter([pa.record_batch(rows, schema=arrow_schema(schema))]))])
    finally:
        TaskContext._taskContext = None


SMALL = ["x" * 200] * 1000
TOMORROW = datetime.now(timezone.utc) + timedelta(days=1)


@pytest.mark.parametrize(
    ("rows", "configs", "good"),
    [
        # the broker compares a whole record batch with the limit of the topic
        (
            {"value": SMALL, "kafka_eos_invalid": ["bad"] * 1000},
            {},
            0,
        ),
        ({"value": [*SMALL, "x" * 30_000]}, {"max.message.bytes": "20000"}, 1000),
        (
            {"key": ["k", None], "value": ["1", "2"]},
            {"cleanup.policy": "compact"},
            1,
        ),
        (
            {"value": ["1", "2"], "timestamp": [datetime.now(timezone.utc), TOMORROW]},
            {"message.timestamp.after.max.ms": "3600000"},
            1,
        ),
    ],
    ids=["many small letters", "many small records and a large one", "no key", "tomorrow"],
)
def test_records_that_the_broker_refuses_are_dead_letters(
    broker: str,
    topic: Callable[..., str],
    rows: dict[str, Any],
    configs: dict[str, str],
    good: int,
) -> None:
    """Without the option, such a record fails the batch at each restart."""
    output, dead = topic(1, **configs), topic(1, **{"max.message.bytes": "20000"})
    dead_letters = {"onInvalidRecord": "dead-letter", "deadLetter.topic": dead}
    times = {"includeTimestamp": "true"} if "timestamp" in rows else {}
    write(broker, rows, topic=output, **dead_letters, **times)
    written, letters = read_back(broker, output), read_back(broker, dead)
    assert (len(written), len(letters)) == (good, len(rows["value"]) - good)


def test_a_row_with_an_illegal_topic_is_a_dead_letter(broker: str, topic: Callable[..., str]) -> None:
    output, other, dead = topic(1), topic(1), topic(1)
    rows = {"value": ["1", "2", "3", "4"], "topic": [output, "a b", other, "x" * 300]}
    options = {"onInvalidRecord": "dead-letter", "deadLetter.topic": dead}
    write(broker, rows, **options)
    found = [values(read_back(broker, each)) for each in (output, other, dead)]
    assert found == [["1"], ["3"], ["2", "4"]]


@pytest.mark.fault("T120", "the driver is killed while a batch has dead letters", "produce, commit")
def test_t120_dead_letters_commit_with_the_records_of_their_batch(scenario: Scenario) -> None:
    found = killed_at(scenario, STEPS)
    assert found.exactly_once, found


# -- records that the reading tasks set aside: they travel to the sink in packets


def set_aside(scenario: Scenario, *mutations: str, restarts: int = 0, **spec: Any) -> tuple[Outputs, Driver]:
    """Runs a query whose reading tasks cannot decode each tenth record, and judges both outputs."""
    dead = scenario.admin.create(f"dead-{scenario.sink}", 1)
    sink = {"onInvalidRecord": "dead-letter", "deadLetter.topic": dead}
    scenario.feed(200)
    for number, step in enumerate(spec.pop("steps", ())):
        killed = scenario.start(
            _kill(step, scenario.once(str(number))), sink=sink, undecodable=f"{BAD}$", mutations=mutations
        )
        assert killed.wait() != 0, f"{step}: the driver was not killed:\n{killed.tail()}"
    last = scenario.start(sink=sink, undecodable=f"{BAD}$", mutations=mutations, restarts=restarts, **spec)
    last.finish()
    found = Outputs(
        *(_verdict(scenario, topic, bad) for topic, bad in ((scenario.sink, False), (dead, True)))
    )
    return found, last


@pytest.mark.fault(
    "T495", "the driver is killed while a batch has records that could not be decoded", "steps"
)
def test_t495_records_that_were_set_aside_commit_with_those_of_their_batch(scenario: Scenario) -> None:
    found, _ = set_aside(scenario, steps=["stage.after_close", *STEPS])
    assert found.exactly_once, found


@pytest.mark.fault("T54", "a rule is switched off; the others' tests must then fail", "its own")
def test_t54_bad_records_that_stay_in_their_packets_are_lost(scenario: Scenario) -> None:
    """Proves that the test above notices lost bad records."""
    found, _ = set_aside(scenario, "unpack bad records")
    assert found.records.exactly_once, found
    assert found.letters.missing == 20, found


@pytest.mark.fault("T496", "a packet of bad records gets lost between the read and the sink", "stage")
def test_t496_a_batch_with_a_lost_packet_is_repeated(scenario: Scenario) -> None:
    found, driver = set_aside(scenario, restarts=1, lost_packet=str(scenario.once("lost")))
    assert "STAGED_READ" in driver.log.read_text(), driver.tail()
    assert found.exactly_once, found


@pytest.mark.fault("T54", "a rule is switched off; the others' tests must then fail", "its own")
def test_t54_without_the_check_of_packets_bad_records_are_lost(scenario: Scenario) -> None:
    """Proves that the test above can fail."""
    found, _ = set_aside(scenario, "packet check", lost_packet=str(scenario.once("lost")))
    assert found.records.exactly_once, found
    assert found.letters.missing > 0, found


@pytest.mark.fault("T497", "the sink gets the bad records of two attempts of a reading task", "stage")
def test_t497_a_batch_with_the_packets_of_two_attempts_is_repeated(scenario: Scenario) -> None:
    found, driver = set_aside(scenario, restarts=1, lost_attempt=str(scenario.once("lost")))
    assert "STAGED_PART_DAMAGED" in driver.log.read_text(), driver.tail()
    assert found.exactly_once, found


@pytest.mark.fault("T54", "a rule is switched off; the others' tests must then fail", "its own")
def test_t54_without_the_check_of_packets_bad_records_of_two_attempts_are_doubled(
    scenario: Scenario,
) -> None:
    """Proves that the test above can fail."""
    found, _ = set_aside(scenario, "packet check", lost_attempt=str(scenario.once("lost")))
    assert found.letters.doubled > 0, found


def replaced_after_flush(scenario: Scenario, how: str, *mutations: str) -> tuple[str, Driver]:
    """Replaces the dead-letter topic when the broker has all letters of an open transaction, then goes on."""
    dead = scenario.admin.create(f"dead-{scenario.sink}", 1)
    scenario.feed(50)
    sink = {"onInvalidRecord": "dead-letter", "deadLetter.topic": dead}
    if how == "deleted":
        sink["commitTimeoutMs"] = "15000"  # so long does the commit wait for the topic
    driver = scenario.stopped_at("commit.after_flush", sink=sink, marks=f"{BAD}$", mutations=mutations)
    if how == "grown":
        scenario.admin.grow(dead, 3)
    else:
        scenario.admin.delete(dead)
    if how == "created again":
        scenario.admin.create(dead, 1)
    driver.resume()
    return dead, driver


@pytest.mark.fault("T154", "the dead-letter topic is deleted, created again or grows", "after flush")
@pytest.mark.parametrize("how", ["deleted", "created again", "grown"])
def test_t154_letters_of_a_batch_are_in_the_topic_that_exists_when_it_commits(
    scenario: Scenario, how: str
) -> None:
    dead, driver = replaced_after_flush(scenario, how)
    code = driver.wait()
    if how == "deleted":
        assert code == 1
        said = driver.log.read_text()
        assert "KAFKA_EOS.UNAVAILABLE" in said
        assert dead in said
        assert read_back(scenario.bootstrap, scenario.sink) == [], "records of the failed batch are visible"
        scenario.admin.create(dead, 1)
    else:
        assert code == 0, driver.tail()
    scenario.feed(50)
    scenario.run(sink={"onInvalidRecord": "dead-letter", "deadLetter.topic": dead}, marks=f"{BAD}$")
    found = Outputs(
        *(_verdict(scenario, topic, bad) for topic, bad in ((scenario.sink, False), (dead, True)))
    )
    assert found.exactly_once, found


@pytest.mark.fault("T54", "a rule is switched off; the others' tests must then fail", "its own")
def test_t54_without_the_check_of_topic_ids_letters_are_lost_with_the_old_topic(scenario: Scenario) -> None:
    """Proves that the test above notices them."""
    dead, driver = replaced_after_flush(scenario, "created again", "topic ids")
    assert driver.wait() == 0, driver.tail()
    assert _verdict(scenario, scenario.sink, False).exactly_once
    assert _verdict(scenario, dead, True).missing == 5


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


@pytest.mark.fault(
    "T499", "a step drops the bad records of reading tasks that ran on other hosts than the sink", "plan"
)
def test_t499_bad_records_that_a_step_drops_are_missed_although_no_sink_ran_beside_the_read(
    scenario: Scenario,
) -> None:
    found, driver = _dropped(scenario)
    assert driver.wait() == 1
    assert "reading tasks were planned, and nothing that they sent" in driver.log.read_text(), driver.tail()
    assert not found.records.found
    assert not found.letters.found


@pytest.mark.fault("T54", "a rule is switched off; the others' tests must then fail", "its own")
def test_t54_without_a_note_of_the_planned_reads_dropped_bad_records_are_lost(scenario: Scenario) -> None:
    """Proves that the test above can fail."""
    found, _ = _dropped(scenario, "planned reads")
    assert found.records.exactly_once, found
    assert found.letters.missing == 10, found


def _dropped(scenario: Scenario, *mutations: str) -> tuple[Outputs, Driver]:
    """Runs a query that drops the column of packets, without a task of the sink beside a reading task."""
    dead = scenario.admin.create(f"dead-{scenario.sink}", 1)
    scenario.feed(100)
    last = scenario.start(
        source={"application.id": scenario.application_id},
        sink={"onInvalidRecord": "dead-letter", "deadLetter.topic": dead},
        undecodable=f"{BAD}$",
        drops_packets=True,
        mutations=mutations,
    )
    last.wait()
    return Outputs(
        *(_verdict(scenario, topic, bad) for topic, bad in ((scenario.sink, False), (dead, True)))
    ), last


# -- a topic of which all records are bad


@pytest.mark.fault("T498", "all records of a topic are bad, because the schema is wrong", "commit")
@pytest.mark.parametrize("way", [{"undecodable": "."}, {"marks": "."}], ids=["set aside", "marked"])
def test_t498_a_run_whose_first_batch_has_only_bad_records_stops_before_it_writes_anything(
    scenario: Scenario, way: dict[str, Any]
) -> None:
    dead = scenario.admin.create(f"dead-{scenario.sink}", 1)
    sink = {"onInvalidRecord": "dead-letter", "deadLetter.topic": dead}
    way = {**way, "source": {"maxOffsetsPerTrigger": "5000"}}
    scenario.feed(900)
    # too few decide nothing, and do not use up the look at the next batch
    scenario.run(sink=sink, **way)
    assert len(read_back(scenario.bootstrap, dead)) == 900
    assert not scenario.outcome().group_is_behind
    scenario.feed(1200)
    for _ in range(2):  # also when the batch is repeated
        stopped = scenario.start(sink=sink, **way)
        assert stopped.wait() == 1
        text = stopped.log.read_text()
        assert f"all 1,200 records of topic {scenario.source!r} in batch 1 are bad" in text, stopped.tail()
        assert "matches" in text or "is bad" in text
        assert len(read_back(scenario.bootstrap, dead)) == 900
        assert scenario.outcome().group_is_behind, "no offset was committed"
    # a person says that this is meant; later batches of the run are not looked at again
    scenario.run(sink={**sink, "onAllRecordsBad": "continue"}, **way)
    letters = read_back(scenario.bootstrap, dead)
    assert sorted(values(letters)) == sorted(value for _, value in scenario.sent)
    assert not read_back(scenario.bootstrap, scenario.sink)


@pytest.mark.parametrize("way", [{"undecodable": "[1-9]"}, {"marks": "[1-9]"}], ids=["set aside", "marked"])
def test_t498_a_good_record_in_the_first_batch_of_a_run_is_enough_for_the_whole_run(
    scenario: Scenario, way: dict[str, Any]
) -> None:
    dead = scenario.admin.create(f"dead-{scenario.sink}", 1)
    sink = {"onInvalidRecord": "dead-letter", "deadLetter.topic": dead}
    scenario.feed(2400)  # only 000000 is good, the first record of its partition
    last = scenario.start(sink=sink, source={"maxOffsetsPerTrigger": "1200"}, **way)
    last.finish()
    assert "BATCH 1" in last.log.read_text()
    assert values(read_back(scenario.bootstrap, scenario.sink)) == ["000000"]
    assert len(read_back(scenario.bootstrap, dead)) == 2399


@pytest.mark.fault("T54", "a rule is switched off; the others' tests must then fail", "its own")
def test_t54_without_the_first_look_a_whole_topic_goes_to_the_dead_letters(scenario: Scenario) -> None:
    """Proves that the test above can fail."""
    dead = scenario.admin.create(f"dead-{scenario.sink}", 1)
    scenario.feed(1200)
    sink = {"onInvalidRecord": "dead-letter", "deadLetter.topic": dead}
    source = {"maxOffsetsPerTrigger": "5000"}
    scenario.run(sink=sink, source=source, undecodable=".", mutations=["first look"])
    assert len(read_back(scenario.bootstrap, dead)) == 1200
