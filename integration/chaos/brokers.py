"""What tests know about the brokers of a scenario: leaders, coordinators, and when a query is complete."""

from __future__ import annotations

from confluent_kafka import KafkaException

from integration.chaos.scenario import Scenario
from integration.support.driver import Driver
from integration.support.processes import await_condition
from kafka_eos_source.protocol.identity import group_of

_SECONDS = 120.0

#: Versions of Kafka before and after an upgrade: the last of Kafka 3, and the newest.
OLD, NEW = "3.9.2", "4.4.0"

#: Kafka's cluster then notices a dead broker within two seconds instead of nine.
QUICK = {
    "broker.session.timeout.ms": "2000",
    "broker.heartbeat.interval.ms": "300",
    "controller.quorum.election.timeout.ms": "500",
    "controller.quorum.fetch.timeout.ms": "1000",
}


def leader(scenario: Scenario, topic: str, partition: int) -> int:
    """Returns the id of the broker that leads a partition."""
    metadata = scenario.admin.client.list_topics(timeout=_SECONDS)
    return int(metadata.topics[topic].partitions[partition].leader)


def coordinator(scenario: Scenario, internal_topic: str, group: str | None = None) -> int:
    """Returns the coordinator of a group (by default the query's), or of the query's transactional id.

    It is the leader of the partition of ``internal_topic`` that Java's hash of the name selects.
    """
    id_ = scenario.application_id
    name = group or group_of(id_) if internal_topic == "__consumer_offsets" else id_
    hashed = 0
    for character in name:
        hashed = (31 * hashed + ord(character)) & 0xFFFFFFFF
    signed = hashed - (1 << 32) if hashed >= 1 << 31 else hashed
    count = len(scenario.admin.client.list_topics(timeout=_SECONDS).topics[internal_topic].partitions)
    return leader(scenario, internal_topic, abs(signed) % count)


def await_in_sync(scenario: Scenario) -> None:
    """Waits until every partition of the cluster has a leader and all its replicas are in sync."""

    def in_sync() -> bool:
        topics = scenario.admin.client.list_topics(timeout=_SECONDS).topics.values()
        return all(
            each.leader >= 0 and len(each.isrs) == len(each.replicas)
            for topic in topics
            for each in topic.partitions.values()
        )

    await_condition(in_sync, _SECONDS, "all replicas are in sync")


def undisturbed_end(scenario: Scenario, driver: Driver) -> None:
    """Checks that this driver commits everything by itself, without a restart; then stops it."""
    await_complete(scenario, driver)
    driver.tell("stop")
    driver.finish()
    found = scenario.outcome()
    assert found.exactly_once, found


def await_complete(scenario: Scenario, driver: Driver) -> None:
    """Waits until everything is committed, or the driver has ended."""
    await_condition(
        lambda: driver.process.poll() is not None or _is_complete(scenario),
        _SECONDS,
        "everything is committed",
    )


def _is_complete(scenario: Scenario) -> bool:
    try:
        return scenario.outcome().exactly_once
    except KafkaException:  # the check's own clients can fail while a partition's leader changes
        return False
