"""Requests for administration answer as confluent-kafka's, which asks the same broker."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from confluent_kafka import Consumer, IsolationLevel, TopicCollection
from confluent_kafka import TopicPartition as ClientTopicPartition
from confluent_kafka.admin import AdminClient, ConfigResource, ConfigSource, OffsetSpec, ResourceType

from integration.support.kafka import produce
from kafka_eos_source.kafka import admin_client
from kafka_eos_source.kafka.admin import ClusterReader, SourceAdmin
from kafka_eos_source.kafka.error_codes import KafkaError
from kafka_eos_source.kafka.group import GroupOffsets
from kafka_eos_source.kafka.messages import EARLIEST, LATEST
from kafka_eos_source.kafka.topic_admin import TopicAdmin
from kafka_eos_source.model import TopicPartition
from kafka_eos_source.runtime.deadline import Deadline


def soon() -> Deadline:
    return Deadline.after_seconds(60)


def test_admin_requests_answer_as_confluent_kafka_does(broker: str, topic: Callable[..., str]) -> None:
    name = topic(3, retention_ms="12345678")
    produce(broker, name, ["a", "b"])
    judge: Any = AdminClient({"bootstrap.servers": broker})
    ours = admin_client.AdminClient({"bootstrap.servers": broker})
    described = judge.describe_topics(
        TopicCollection([name, "missing"]), include_authorized_operations=True, request_timeout=10
    )
    found = ours.topics([name, "missing"], 10, operations=True)
    theirs, mine, missing = described[name].result(), found[name], found["missing"]
    assert isinstance(mine, admin_client.Topic)
    assert (mine.topic_id, mine.is_internal) == (str(theirs.topic_id), False)
    assert [(one.number, one.leader, len(one.replicas)) for one in mine.partitions] == [
        (one.id, one.leader.id, len(one.replicas)) for one in theirs.partitions
    ]
    assert mine.operations == {each.name for each in theirs.authorized_operations}
    assert described["missing"].exception().args[0].code() == 3
    assert isinstance(missing, KafkaError)
    assert missing.code == 3

    node = ours.cluster(10)[1][0]
    for resource, settings in (
        (ConfigResource(ResourceType.TOPIC, name), ours.topic_config(name, 10)),
        (ConfigResource(ResourceType.BROKER, str(node)), ours.broker_config(node, 10)),
    ):
        entries = judge.describe_configs([resource], request_timeout=10)[resource].result()
        assert {each: (found.value, found.is_set_on_topic) for each, found in settings.items()} == {
            each: (found.value, found.source == ConfigSource.DYNAMIC_TOPIC_CONFIG.value)
            for each, found in entries.items()
        }
    theirs = judge.describe_cluster(request_timeout=10).result()
    assert ours.cluster(10) == (theirs.cluster_id, [each.id for each in theirs.nodes])
    for spec, time_ms in (
        (OffsetSpec.earliest(), EARLIEST),
        (OffsetSpec.latest(), LATEST),
        (OffsetSpec.for_timestamp(1), 1),
        (OffsetSpec.for_timestamp(1 << 50), 1 << 50),
    ):
        wanted = {ClientTopicPartition(name, number): spec for number in range(3)}
        answers = judge.list_offsets(
            wanted, isolation_level=IsolationLevel.READ_COMMITTED, request_timeout=10
        )
        times = {TopicPartition(name, number): time_ms for number in range(3)}
        offsets = ours.offsets_at(times, 10, committed=True)
        assert {tp.partition: (each.offset, each.epoch) for tp, each in offsets.items()} == {
            tp.partition: (
                each.result().offset,
                -1 if each.result().leader_epoch is None else each.result().leader_epoch,
            )
            for tp, each in answers.items()
        }
    listed, metadata = ours.everything(10), judge.list_topics(timeout=10)
    assert {each: len(one.partitions) for each, one in listed.topics.items()} == {
        each: len(one.partitions) for each, one in metadata.topics.items()
    }
    assert listed.cluster_id == metadata.cluster_id
    assert listed.brokers == {each.id: (each.host, each.port) for each in metadata.brokers.values()}


def test_what_is_built_on_it(broker: str, topic: Callable[..., str]) -> None:
    name = topic(2, retention_ms="12345678")
    produce(broker, name, ["a", "b", "c"])
    partitions = [TopicPartition(name, number) for number in range(2)]
    kafka = {"bootstrap.servers": broker}
    admin = SourceAdmin(kafka, "read_committed", 3, 100)
    assert list(admin.named([name]).partitions) == partitions
    assert list(admin.matching(f"^{name}$").partitions) == partitions
    assert set(admin.existing_topic_ids([name, "gone"])) == {name}
    assert sum(each.offset for each in admin.latest(partitions).values()) == 3
    assert sum(admin.earliest(partitions).values()) == 0
    assert set(admin.at_time(dict.fromkeys(partitions, 1 << 50)).values()) == {None}
    assert set(admin.epoch_ends(dict.fromkeys(partitions, 0)).values()) <= {0, 1, 2, 3}
    assert admin.offsets_retention_ms() > 0
    admin.close()
    with ClusterReader(kafka) as reader:
        assert reader.topics(soon())[1][name] == 2
        assert sum(each.end for each in reader.logs(partitions).values()) == 3
    with TopicAdmin(kafka) as topics:
        replicas, settings = topics.creation_settings(name, soon())
        assert settings["retention.ms"] == "12345678"
        assert topics.create(f"{name}-2", 2, replicas, settings, soon())
        assert not topics.create(f"{name}-2", 2, -1, {}, soon())
        assert topics.await_led(f"{name}-2", soon()).partitions == 2
        topics.delete(f"{name}-2", soon())
        assert topics.shape(f"{name}-2", soon()) is None


def test_members_are_found_and_empty_groups_deleted(broker: str, topic: Callable[..., str]) -> None:
    name = topic()
    offsets = GroupOffsets({"bootstrap.servers": broker})
    assert offsets.members(name, soon()) == []
    consumer = Consumer({"bootstrap.servers": broker, "group.id": name, "client.id": "somebody"})
    consumer.subscribe([name])
    limit = soon()
    while not consumer.assignment():
        consumer.poll(0.1)
        assert not limit.expired
    (member,) = offsets.members(name, soon())
    assert "client.id='somebody'" in member
    consumer.close()
    while offsets.members(name, soon()):
        time.sleep(0.1)
        assert not limit.expired
    offsets.delete_group(name, soon())
    offsets.delete_group(name, soon())
