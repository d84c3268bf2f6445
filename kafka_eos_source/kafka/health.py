"""What doctor asks a cluster: its brokers, its replicas, and its clock."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass

from kafka_eos_source.errors import InvalidOptionError
from kafka_eos_source.kafka.cluster_reader import metadata
from kafka_eos_source.kafka.config import admin_config
from kafka_eos_source.kafka.request import Complaints
from kafka_eos_source.kafka.topic_admin import TopicAdmin
from kafka_eos_source.kafka.wire.probe import append_time
from kafka_eos_source.model import TopicPartition
from kafka_eos_source.runtime.deadline import Deadline


@dataclass(frozen=True)
class Broker:
    """A broker, with the address that it gives to clients."""

    node_id: int
    host: str
    port: int


@dataclass(frozen=True)
class Layout:
    """Brokers of a cluster, and the replicas of its topics.

    Attributes:
        brokers: all brokers that the cluster knows.
        replicas: smallest number of replicas of a partition, for each topic that the principal may see.
    """

    brokers: tuple[Broker, ...]
    replicas: Mapping[str, int]


@dataclass(frozen=True)
class ClockDifference:
    """How far a broker's clock is ahead of this machine's.

    Attributes:
        ms: the difference; negative = the broker's clock is behind.
        uncertainty_ms: half the time that the request took.
    """

    ms: float
    uncertainty_ms: float


def layout(kafka: Mapping[str, str], deadline: Deadline) -> Layout:
    """Returns the brokers that the cluster knows, and the replicas of its topics.

    Raises:
        UnavailableError, AuthorizationError: if no broker answers, or the login is refused.
    """
    found = metadata(admin_config(kafka), Complaints(kafka), deadline)
    return Layout(
        tuple(Broker(each.id, each.host, each.port) for _, each in sorted(found.brokers.items())),
        {
            name: min((len(each.replicas) for each in topic.partitions.values()), default=0)
            for name, topic in found.topics.items()
            if topic.error is None
        },
    )


def clock_difference(kafka: Mapping[str, str], topic: str, deadline: Deadline) -> ClockDifference:
    """Sends two records to a topic with ``message.timestamp.type=LogAppendTime``, and compares the clocks.

    Raises:
        InvalidOptionError: if the topic does not have this property.
        UnavailableError: if the record is not acknowledged before ``deadline``.
        KafkaEosError: if the topic does not exist, or the principal may not describe it or write to it.
    """
    with TopicAdmin(kafka) as admin:
        kind = admin.config(topic, deadline)["message.timestamp.type"]
    if kind != "LogAppendTime":  # nothing is written to such a topic, which may be a query's output
        raise InvalidOptionError(
            f"topic {topic!r} has message.timestamp.type={kind}, and keeps the time of the producer.",
            fix="name a topic with message.timestamp.type=LogAppendTime.",
        )
    sent, appended_ms, acknowledged = append_time(admin_config(kafka), TopicPartition(topic, 0), deadline)
    middle = (sent + acknowledged) / 2
    return ClockDifference(appended_ms - 1000 * middle, 500 * (acknowledged - sent))


def replicas_below(found: Layout, topics: Collection[str], least: int) -> dict[str, int]:
    """Returns the topics among these that have a partition with fewer replicas."""
    return {name: found.replicas[name] for name in topics if found.replicas.get(name, least) < least}
