"""Topics or staged files change under a query, or a broker refuses a setting: exactly-once still holds."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest

from integration.chaos.scenario import Scenario
from integration.support.kafka import produce
from integration.support.processes import await_condition


@pytest.mark.fault("T13", "a staged file is truncated", "between staging and commit")
def test_t13_a_truncated_staged_file_fails_the_batch_and_a_restart_writes_it(scenario: Scenario) -> None:
    scenario.feed(100)
    inline = {"staging.inline.bytes": "100"}
    driver = scenario.stopped_at("stage.after_close", at_time=2, sink=inline)
    (staged,) = Path(scenario.checkpoint, "kafka-eos", "staging", "1").glob("*.arrow")
    os.truncate(staged, staged.stat().st_size // 2)
    driver.resume()
    assert driver.wait() == 1
    assert "StagedPartError" in driver.log.read_text()
    scenario.run(sink=inline)
    found = scenario.outcome()
    assert found.exactly_once, found


@pytest.mark.fault("T34", "one record is larger than the topic takes", "produce")
def test_t34_a_record_larger_than_the_topic_allows_fails_the_batch_until_the_limit_is_raised(
    scenario: Scenario,
) -> None:
    scenario.feed(50)
    scenario.run()
    scenario.admin.configure(scenario.sink, {"max.message.bytes": "2000"})
    poison = "x" * 5000
    produce(scenario.bootstrap, scenario.source, [poison], keys=["k0"])
    driver = scenario.start()
    assert driver.wait() == 1
    assert "InvalidRecordError" in driver.log.read_text()
    assert "max.message.bytes" in driver.log.read_text()
    found = scenario.outcome()
    assert found.rows.exactly_once, "no record of the batch is visible"
    assert found.token is not None
    assert found.token.batch_id == 0
    assert found.group_is_behind, "the batch's offsets are not committed"
    # the fix that the error message names works
    scenario.admin.configure(scenario.sink, {"max.message.bytes": "1000000"})
    scenario.sent.append(("k0", poison))
    scenario.run()
    found = scenario.outcome()
    assert found.exactly_once, found


@pytest.mark.fault("T37", "the output topic is deleted", "before and during the transaction")
@pytest.mark.parametrize(
    "at", ["commit.before_begin", pytest.param("commit.within_produce", marks=pytest.mark.long)]
)
def test_t37_a_deleted_output_topic_fails_the_batch_and_a_new_one_gets_it_once(
    scenario: Scenario, at: str
) -> None:
    scenario.feed(50)
    # the commit waits so long for the topic
    driver = scenario.stopped_at(at, sink={"commitTimeoutMs": "15000"})
    scenario.admin.delete(scenario.sink)
    driver.resume()
    assert driver.wait() == 1
    said = driver.log.read_text()
    assert "KAFKA_EOS.UNAVAILABLE" in said
    # the topic holds the records and the token; which of the two checks fails first depends on timing
    missed = (f"output topic {scenario.sink!r}", f"anchor topic {scenario.sink!r} does not exist")
    assert any(each in said for each in missed)
    scenario.admin.create(scenario.sink, 2)
    scenario.run()
    found = scenario.outcome()
    assert found.exactly_once, found


@pytest.mark.fault("T38", "the source topic is deleted and created again", "between batches")
def test_t38_a_recreated_source_topic_fails_the_query(scenario: Scenario) -> None:
    scenario.feed(50)
    scenario.run()
    scenario.admin.delete(scenario.source)
    scenario.admin.create(scenario.source, 2)
    produce(scenario.bootstrap, scenario.source, [f"new-{row}" for row in range(200)])
    driver = scenario.start()
    assert driver.wait() == 1
    assert "TOPIC_RECREATED" in driver.log.read_text()


@pytest.mark.fault("T38b", "the source topic is deleted and created again", "while a replay is pending")
@pytest.mark.parametrize("fail", ["true", "false"])
def test_t38b_a_source_topic_recreated_before_a_replay_is_detected(scenario: Scenario, fail: str) -> None:
    source = {"failOnDataLoss": fail}
    scenario.feed(50)
    scenario.run(source=source)
    scenario.feed(50)
    driver = scenario.stopped_at("commit.before_begin", source=source)
    driver.kill()
    scenario.admin.delete(scenario.source)
    scenario.admin.create(scenario.source, 2)
    del scenario.sent[50:]  # the records of the pending batch are lost
    scenario.feed(200)
    if fail == "true":
        driver = scenario.start(source=source)
        assert driver.wait() == 1
        said = driver.log.read_text()
        assert "TOPIC_RECREATED" in said
        assert "after the batch was planned" in said, "the source detects it before a task reads anything"
        assert scenario.outcome().rows.found == 50
        # the fix that the messages name: the planned batch does not accept data loss, so plan it again
        driver = scenario.start(source={"failOnDataLoss": "false"})
        assert driver.wait() == 1
        assert "also delete offsets/1 in the checkpoint" in driver.log.read_text()
        assert scenario.outcome().rows.found == 50
        (scenario.checkpoint / "offsets" / "1").unlink()
        source = {"failOnDataLoss": "false"}
    scenario.run(source=source)
    found = scenario.outcome()
    assert found.exactly_once, found


@pytest.mark.fault("T39", "the output topic grows", "between batches")
def test_t39_partitions_added_to_the_output_topic_do_not_lose_or_duplicate_records(
    scenario: Scenario,
) -> None:
    scenario.feed(50)
    driver = scenario.start(available_now=False)
    driver.await_text("BATCH 0")
    scenario.admin.grow(scenario.sink, 8)
    scenario.feed(300)
    await_condition(
        lambda: driver.process.poll() is not None or not scenario.outcome().group_is_behind, 60, "all is read"
    )
    driver.tell("stop")
    driver.finish()
    rows = scenario.outcome().rows  # keys move to other partitions, so there is no order to check
    assert rows.exactly_once, rows


@pytest.mark.fault("T44", "an old checkpoint whose next batches have other boundaries", "restart")
def test_t44_a_batch_of_an_old_checkpoint_that_is_partly_written_is_refused(scenario: Scenario) -> None:
    scenario.feed(50)
    scenario.run()
    old = scenario.folder / "old"
    shutil.copytree(scenario.checkpoint, old)
    scenario.feed(200)
    scenario.run()
    committed = len(scenario.sent)
    shutil.rmtree(scenario.checkpoint)
    shutil.copytree(old, scenario.checkpoint)
    scenario.feed(30)
    driver = scenario.start(source={"maxOffsetsPerTrigger": "70"})
    assert driver.wait() == 1
    assert "CheckpointRolledBackError" in driver.log.read_text(), "the batch up to 260 is partly written"
    assert scenario.outcome().rows.found == committed
    # the fix that the error message names
    shutil.rmtree(scenario.checkpoint)
    scenario.run(
        source={"startingOffsets": "group", "application.id": scenario.application_id},
        sink={"onForeignQuery": "adopt"},
    )
    found = scenario.outcome()
    assert found.exactly_once, found


@pytest.mark.fault("T52", "transaction.timeout.ms above what the broker allows", "start")
def test_t52_a_transaction_timeout_above_the_brokers_limit_is_refused(scenario: Scenario) -> None:
    scenario.feed(10)
    driver = scenario.start(sink={"kafka.transaction.timeout.ms": "1000000"})
    assert driver.wait() == 1
    said = driver.log.read_text()
    assert "InvalidOptionError" in said
    assert "transaction.max.timeout.ms" in said
    scenario.run()
    found = scenario.outcome()
    assert found.exactly_once, found
