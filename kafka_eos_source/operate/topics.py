"""Lists, creates and describes topics."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from kafka_eos_source.errors import InvalidOptionError
from kafka_eos_source.kafka.cluster_reader import ClusterReader, LogEnds
from kafka_eos_source.kafka.config import admin_config
from kafka_eos_source.kafka.topic_admin import TopicAdmin
from kafka_eos_source.model import TopicPartition
from kafka_eos_source.operate.cluster import INTERNAL_PREFIX
from kafka_eos_source.runtime.deadline import Deadline


@dataclass(frozen=True)
class TopicDescription:
    """A topic, its logs, and the properties that were set on it.

    Attributes:
        name: of the topic.
        topic_id: Kafka's id of the topic (KIP-516).
        replication_factor: number of replicas of each partition.
        logs: bounds of each partition's log.
        config: properties that were set on the topic itself.
    """

    name: str
    topic_id: str
    replication_factor: int
    logs: Mapping[TopicPartition, LogEnds]
    config: Mapping[str, str]

    def to_json(self) -> dict[str, Any]:
        return {
            "topic": self.name,
            "topic_id": self.topic_id,
            "replication_factor": self.replication_factor,
            "partitions": logs_json(self.logs),
            "config": dict(self.config),
        }


def logs_json(logs: Mapping[TopicPartition, LogEnds]) -> list[dict[str, int]]:
    """Returns the logs of one topic as JSON objects, by partition."""
    return [{"partition": tp.partition, **asdict(log)} for tp, log in sorted(logs.items())]


def partition_counts(
    kafka: Mapping[str, Any], deadline: Deadline, *, internal: bool = False
) -> dict[str, int]:
    """Returns the number of partitions of each topic, by name.

    Args:
        kafka: librdkafka properties that say how to reach the cluster.
        deadline: for the brokers.
        internal: whether to include Kafka's own topics.

    Raises:
        UnavailableError, AuthorizationError: the cluster does not answer, or refuses to.
    """
    with ClusterReader(admin_config(kafka)) as cluster:
        _, found = cluster.topics(deadline)
    return {name: found[name] for name in sorted(found) if internal or not name.startswith(INTERNAL_PREFIX)}


def create_topic(
    kafka: Mapping[str, Any],
    name: str,
    deadline: Deadline,
    *,
    partitions: int = 1,
    replication_factor: int = -1,
    config: Mapping[str, str] | None = None,
) -> bool:
    """Creates a topic and waits until each partition has a leader. Leaves an existing topic as it is.

    Returns:
        False if a topic of that name exists.

    Raises:
        UnavailableError, AuthorizationError, OperatorError: as `TopicAdmin.create`.
    """
    with TopicAdmin(kafka, starts=True) as admin:
        # looked up first, because a request that changes nothing fails sooner if no broker answers
        exists = admin.shape(name, deadline) is not None
        created = not exists and admin.create(name, partitions, replication_factor, config or {}, deadline)
        admin.await_led(name, deadline)
    return created


def describe_topic(kafka: Mapping[str, Any], name: str, deadline: Deadline) -> TopicDescription:
    """Describes one topic.

    Raises:
        InvalidOptionError: there is no such topic.
        UnavailableError, AuthorizationError: the cluster does not answer, or refuses to.
    """
    topic_id, ends = log_ends(kafka, name, deadline)
    with TopicAdmin(kafka, starts=True) as admin:
        replication_factor, config = admin.creation_settings(name, deadline)
    return TopicDescription(name, topic_id, replication_factor, ends, config)


def log_ends(
    kafka: Mapping[str, Any], name: str, deadline: Deadline
) -> tuple[str, Mapping[TopicPartition, LogEnds]]:
    """Returns the id of a topic, and the bounds of each partition's log. Needs no more than Describe.

    Raises:
        InvalidOptionError: there is no such topic.
        UnavailableError, AuthorizationError: the cluster does not answer, or refuses to.
    """
    with TopicAdmin(kafka, starts=True) as admin:
        shape = admin.shape(name, deadline)
    if shape is None:
        raise no_topic(kafka, name, deadline)
    with ClusterReader(admin_config(kafka)) as cluster:
        ends = cluster.logs([TopicPartition(name, number) for number in range(shape.partitions)])
    return shape.topic_id, ends


def no_topic(kafka: Mapping[str, Any], name: str, deadline: Deadline) -> InvalidOptionError:
    """Returns the error for a topic that does not exist; it names those that do."""
    others = list(partition_counts(kafka, deadline))
    known = ", ".join(repr(each) for each in others[:10]) or "none"
    more = f" and {len(others) - 10} more" if len(others) > 10 else ""
    return InvalidOptionError(
        f"topic {name!r} does not exist. Topics of this cluster: {known}{more}.",
        fix=f"create it: kafka-eos topics create {name}",
    )
