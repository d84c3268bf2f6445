"""A source log is cut below the query's position and filled again: the query reports it (KIP-320)."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from integration.chaos.conftest import report_measures
from integration.chaos.scenario import Scenario
from integration.support import broker as brokers
from integration.support.driver import Driver
from kafka_eos_source.embedded import EmbeddedKafka
from kafka_eos_source.protocol.identity import group_of

_NODE = 1
_LOSSY = {"failOnDataLoss": "false"}


class Disk:
    """A broker whose disk can be set back.

    Args:
        kafka: a cluster of one broker.
    """

    def __init__(self, kafka: EmbeddedKafka) -> None:
        self._kafka = kafka
        self._logs = kafka.directory / f"node-{_NODE}" / "data"
        self._copies = kafka.directory / "copies"

    def copy(self, topic: str) -> None:
        """Copies the logs of a topic, while the broker is stopped."""
        self._kafka.stop_node(_NODE)
        for log in self._logs.glob(f"{topic}-*"):
            shutil.copytree(log, self._copies / log.name)
        self._kafka.start_node(_NODE)

    def set_back(self, topic: str) -> None:
        """Replaces the logs of a topic by their copies, while the broker is stopped."""
        self._kafka.stop_node(_NODE)
        for log in self._logs.glob(f"{topic}-*"):
            shutil.rmtree(log)
            shutil.copytree(self._copies / log.name, log)
        self._kafka.start_node(_NODE)


@pytest.fixture(scope="module")
def one() -> Iterator[EmbeddedKafka]:
    with EmbeddedKafka(java_options=brokers.JAVA_OPTIONS, **brokers.version(os.environ)) as kafka:
        yield kafka


@pytest.fixture
def disk(one: EmbeddedKafka) -> Disk:
    return Disk(one)


@pytest.fixture
def on_one(
    request: pytest.FixtureRequest, one: EmbeddedKafka, tmp_path: Path, driver: Callable[..., Driver]
) -> Iterator[Scenario]:
    made = Scenario(one.bootstrap_servers, tmp_path, driver, partitions=1)
    yield made
    report_measures(request.node, made)


def read_then_cut(scenario: Scenario, disk: Disk) -> None:
    """Lets the query read 100 records; then the log is cut at offset 60, and refilled to 140."""
    scenario.feed(60)
    scenario.run()
    disk.copy(scenario.source)
    scenario.feed(40)
    scenario.run()
    disk.set_back(scenario.source)
    scenario.feed(80)


@pytest.mark.fault("T321", "a disk is set back, and the source's log refilled", "while the query is stopped")
def test_t321_a_log_that_was_set_back_and_refilled_is_reported_and_read_from_the_cut_on(
    on_one: Scenario, disk: Disk
) -> None:
    read_then_cut(on_one, disk)
    group = {"startingOffsets": "group", "kafka.group.id": group_of(on_one.application_id)}
    for source in ({}, {}, group):
        checkpoint = on_one.folder / "other" if source else None
        failed = on_one.start(source=source, checkpoint=checkpoint)
        assert failed.wait() == 1
        said = failed.log.read_text()
        assert f"LOG_WAS_CUT: {on_one.source}-0: the query is at offset 100" in said
        assert "the log was cut at offset 60" in said
    assert on_one.outcome().rows.found == 100
    on_one.run(source=_LOSSY)
    found = on_one.outcome()
    assert found.exactly_once, found
    assert found.rows.found == 180


@pytest.mark.fault("T322", "a disk is set back, and the source's log refilled", "while a batch is pending")
def test_t322_a_task_of_a_repeated_batch_reports_a_log_that_was_set_back(
    on_one: Scenario, disk: Disk
) -> None:
    """The batch was planned before; its tasks find other records at its offsets."""
    on_one.feed(60)
    on_one.run()
    disk.copy(on_one.source)
    on_one.feed(40)
    on_one.stopped_at("commit.before_begin").kill()
    disk.set_back(on_one.source)
    del on_one.sent[60:]  # nobody has read them
    on_one.feed(80)
    failed = on_one.start()
    assert failed.wait() == 1
    assert (
        f"offsets 60 to 99 of {on_one.source}-0 cannot be read: the log was cut at offset 60"
        in failed.log.read_text()
    )
    assert on_one.outcome().rows.found == 60
    on_one.run(source=_LOSSY)
    found = on_one.outcome()
    assert found.exactly_once, found


@pytest.mark.fault("T54", "a rule is switched off; the others' tests must then fail", "its own")
def test_t54_without_leader_epochs_the_records_between_the_cut_and_the_position_are_lost(
    on_one: Scenario, disk: Disk
) -> None:
    read_then_cut(on_one, disk)
    on_one.run(mutations=["leader epochs"])
    assert on_one.outcome().rows.missing == 40
