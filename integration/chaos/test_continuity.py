"""No record is duplicated when a checkpoint is restored, a token is lost, or the group's offsets are reset.

After a checkpoint was restored from a copy, Spark uses the same batch id for two different batches. A
connector that compares batch ids alone would fail each of these tests.
"""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from confluent_kafka import OFFSET_END

from integration.chaos.scenario import Scenario
from integration.support.kafka import TIMEOUT_SECONDS
from kafka_eos_source.protocol.identity import group_of


def restore(scenario: Scenario, copy: Path) -> None:
    """Replaces the checkpoint with an earlier copy of it."""
    shutil.rmtree(scenario.checkpoint)
    shutil.copytree(copy, scenario.checkpoint)


def backed_up(scenario: Scenario) -> Path:
    """Writes 50 records in one batch, copies the checkpoint, writes 200 more, and returns the copy."""
    scenario.feed(50)
    scenario.run()
    copy = scenario.folder / "copy"
    shutil.copytree(scenario.checkpoint, copy)
    scenario.feed(200)
    scenario.run()
    return copy


def delete_group(scenario: Scenario) -> None:
    for future in scenario.admin.client.delete_consumer_groups([group_of(scenario.application_id)]).values():
        future.result(TIMEOUT_SECONDS)


@pytest.mark.fault("T60", "a checkpoint is restored from a copy, with another limit", "restart")
@pytest.mark.parametrize("limit", [20, pytest.param(50, marks=pytest.mark.long), 200])
def test_t60_batches_within_the_output_are_skipped_and_the_others_refused(
    scenario: Scenario, limit: int
) -> None:
    """A restored checkpoint's batches are skipped if they lie below the committed offsets, else refused.

    This is the case without application.id on the source, which then cannot jump.
    """
    copy = backed_up(scenario)
    restore(scenario, copy)
    scenario.feed(30)
    driver = scenario.start(source={"maxOffsetsPerTrigger": str(limit)})
    ended = driver.wait()
    found = scenario.outcome()
    assert found.rows.doubled == 0, found
    if ended:
        assert "CheckpointRolledBackError" in driver.log.read_text()
        assert found.rows.found == 250
    else:
        assert found.exactly_once, found


@pytest.mark.fault("T61", "the same, with onRolledBackCheckpoint=jump", "restart")
@pytest.mark.parametrize("limit", [pytest.param(20, marks=pytest.mark.long), 70, 300])
def test_t61_a_restored_checkpoint_heals_by_a_jump(scenario: Scenario, limit: int) -> None:
    """With ``jump``, one batch that reads nothing moves the source to the offsets committed in Kafka."""
    copy = backed_up(scenario)
    restore(scenario, copy)
    scenario.feed(30)
    source = {
        "maxOffsetsPerTrigger": str(limit),
        "application.id": scenario.application_id,
        "onRolledBackCheckpoint": "jump",
    }
    scenario.run(source=source)
    found = scenario.outcome()
    assert found.exactly_once, found


@pytest.mark.fault("T62", "the offsets of the group are reset by Kafka's own tool", "stopped")
@pytest.mark.parametrize("to", [0, pytest.param(10, marks=pytest.mark.long), 1000])
def test_t62_offsets_that_another_program_reset_are_named(scenario: Scenario, to: int) -> None:
    scenario.feed(100)
    scenario.run()
    scenario.admin.reset_offsets(group_of(scenario.application_id), scenario.source, {0: to, 1: to})
    scenario.feed(50)
    driver = scenario.start()
    assert driver.wait() == 1
    assert "OffsetsMovedError" in driver.log.read_text()
    assert scenario.outcome().rows.found == 100
    scenario.run(sink={"onMovedOffsets": f"overwrite:{scenario.planned}"})
    found = scenario.outcome()
    assert found.exactly_once, found


@pytest.mark.fault("T63", "the group is deleted after the first batch's commit", "before Spark's commit")
def test_t63_a_token_that_was_lost_in_the_first_batch_is_an_error(scenario: Scenario) -> None:
    scenario.feed(50)
    killed = scenario.start(f"commit.after_commit=kill-worker@{scenario.once('first')}")
    assert killed.wait() == -9, killed.tail()
    assert scenario.outcome().rows.found == 50
    delete_group(scenario)
    driver = scenario.start()
    assert driver.wait() == 1
    assert "TokenMissingError" in driver.log.read_text()
    scenario.run(sink={"onMissingToken": "assume_committed:0"})
    scenario.feed(50)
    scenario.run()
    found = scenario.outcome()
    assert found.exactly_once, found


@pytest.mark.fault("T64", "the driver dies around the genesis token", "first batch")
def test_t64_drivers_killed_around_the_genesis_token_lose_nothing(scenario: Scenario) -> None:
    scenario.feed(120)
    for step in (
        "genesis.before_commit",
        "genesis.after_commit",
        "commit.after_prepare",
        "commit.before_commit",
    ):
        killed = scenario.start(f"{step}=kill-worker@{scenario.once(step)}")
        assert killed.wait() == -9, f"{step} was not reached:\n{killed.tail()}"
    scenario.run()
    found = scenario.outcome()
    assert found.exactly_once, found


@pytest.mark.fault(
    "T369", "the records of a committed batch are removed from the source", "before Spark's commit"
)
def test_t369_a_batch_that_kafka_holds_needs_no_records_that_are_gone(scenario: Scenario) -> None:
    """The driver dies between Kafka's commit and Spark's, and retention removes what the batch has read."""
    source = {"application.id": scenario.application_id}
    scenario.feed(50)
    killed = scenario.start(f"commit.after_commit=kill-worker@{scenario.once('held')}", source=source)
    assert killed.wait() == -9, killed.tail()
    for partition in range(scenario.partitions):
        scenario.admin.delete_records(scenario.source, partition, OFFSET_END)
    driver = scenario.start(source=source)
    assert driver.wait() == 1
    said = driver.log.read_text()
    assert "DataLossError" in said
    assert "finds that out itself with onRolledBackCheckpoint=jump" in said
    scenario.feed(20)
    scenario.run(source={**source, "onRolledBackCheckpoint": "jump"})
    found = scenario.outcome()
    assert found.exactly_once, found


@pytest.mark.fault("T369", "the same, and Kafka does not hold the batch", "before Kafka's commit")
def test_t369_a_batch_that_kafka_does_not_hold_reports_the_loss(scenario: Scenario) -> None:
    source = {"application.id": scenario.application_id, "onRolledBackCheckpoint": "jump"}
    scenario.feed(50)
    killed = scenario.start(f"commit.before_begin=kill-worker@{scenario.once('lost')}", source=source)
    assert killed.wait() == -9, killed.tail()
    for partition in range(scenario.partitions):
        scenario.admin.delete_records(scenario.source, partition, OFFSET_END)
    driver = scenario.start(source=source)
    assert driver.wait() == 1
    assert "DataLossError" in driver.log.read_text()


@pytest.mark.fault("T65", "two queries share one kafka.group.id", "start")
def test_t65_two_transactional_ids_in_one_group_are_refused(scenario: Scenario) -> None:
    scenario.feed(50)
    scenario.run()
    before = scenario.written()
    rival = {"application.id": "rival", "kafka.group.id": group_of(scenario.application_id)}
    for policy in ({}, {"onForeignQuery": "adopt"}):
        checkpoint = scenario.folder / f"rival-{len(policy)}"
        driver = scenario.start(checkpoint=checkpoint, sink={**rival, **policy})
        assert driver.wait() == 1
        assert "ForeignQueryError" in driver.log.read_text()
    assert scenario.written() == before
    scenario.feed(50)
    scenario.run()
    found = scenario.outcome()
    assert found.exactly_once, found


_RESTORED = pytest.mark.fault(
    "T90", "a checkpoint is restored while a paused driver still holds a batch", "tasks, commit"
)
_SWITCHED_OFF = pytest.mark.fault(
    "T54", "a rule is switched off; the others' tests must then fail", "its own"
)


@pytest.mark.parametrize(
    ("step", "mutations"),
    [
        pytest.param("stage.after_close", (), id="within-the-tasks", marks=_RESTORED),
        pytest.param("commit.after_check", (), id="within-the-commit", marks=_RESTORED),
        pytest.param("stage.after_close", ("plan check",), id="mutated", marks=_SWITCHED_OFF),
    ],
)
def test_t90_a_zombie_does_not_commit_its_rows_with_the_offsets_of_another_plan(
    scenario: Scenario, step: str, mutations: tuple[str, ...]
) -> None:
    """Two drivers plan the same batch differently, because the restored checkpoint lacks the first plan.

    The commit reads the offset log, which then holds the second plan, but the zombie stages the rows of the
    first. Committed together, the second driver would skip its batch, and the rows between would be lost.
    """
    scenario.feed(50)
    scenario.run()
    copy = scenario.folder / "copy"
    shutil.copytree(scenario.checkpoint, copy)
    scenario.feed(30)
    zombie = scenario.stopped_at(step, mutations=mutations)
    restore(scenario, copy)
    scenario.feed(20)
    second = scenario.stopped_at("commit.after_check")
    zombie.resume()
    code = zombie.wait()
    second.resume()
    second.wait()
    scenario.run()
    found = scenario.outcome()
    if mutations:
        assert (found.rows.found, len(scenario.sent)) == (80, 100), found
    else:
        assert code == 1
        assert "RestartQueryError" in zombie.log.read_text(), zombie.tail()
        assert found.exactly_once, found
