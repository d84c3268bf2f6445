"""The token topic: a compacted topic that permanently keeps each query's newest token and offsets.

The commit of a batch writes one record to it (`protocol.token`), in the transaction of the batch. A
new owner of the transactional id reads the record, in case the group lost the token (`commit.ownership`).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import pyarrow as pa

from kafka_eos_source.errors import AuthorizationError, InvalidOptionError, UnavailableError
from kafka_eos_source.kafka.kernel import kernel
from kafka_eos_source.kafka.topic_admin import TopicAdmin
from kafka_eos_source.runtime.deadline import Deadline

#: Properties of the topic that `create` creates. Kafka never compacts the active segment, so a reader has to
#: read all of it. Each commit adds a record (0.5 KiB for a small query) and a control record of 78 bytes.
#: Segments of 1 MiB, the smallest size that Kafka 4 accepts, are read in milliseconds. Kafka closes a segment
#: that grows slowly after 10 minutes, so that it can be compacted. A dirty ratio of 1 % makes Kafka compact
#: soon after that, which rewrites a few MiB at most. Control records and tombstones stay for another
#: ``delete.retention.ms``. With Kafka's default of a day, a query that commits ten times a second would leave
#: 67 MB of control records. A reader that takes longer than this time may miss a tombstone.
PROPERTIES: Mapping[str, str] = {
    "cleanup.policy": "compact",
    "segment.bytes": str(1 << 20),
    "segment.ms": "600000",
    "max.compaction.lag.ms": "600000",
    "min.cleanable.dirty.ratio": "0.01",
    "delete.retention.ms": "600000",
}

#: Larger segments take seconds to read after the group was lost. Kafka's default is 1 GiB.
_LARGE_SEGMENT_BYTES = 64 << 20


class NoTokenTopicError(UnavailableError):
    """The topic that the option ``token.topic`` names does not exist."""


@dataclass(frozen=True)
class TokenTopic:
    """A token topic that passed the checks.

    Attributes:
        name: name of the topic.
        topic_id: Kafka's id of the topic (KIP-516).
        partitions: number of partitions.
        described: False if the principal may not describe the topic's configuration, which is then unchecked.
        warnings: sentences for an administrator.
    """

    name: str
    topic_id: str
    partitions: int
    described: bool = True
    warnings: tuple[str, ...] = ()

    def partition_of(self, application_id: str) -> int:
        """Returns the partition of a query's record."""
        return partition_of(application_id.encode(), self.partitions)


def partition_of(key: bytes, partitions: int) -> int:
    """Returns the partition of a key, as Java's default partitioner chooses it (murmur2)."""
    from kafka_eos_source.kafka.wire.rows import Rows  # imports kafka-python

    row = Rows([{"key": pa.array([key]), "value": pa.array([b""])}])
    row.place(kernel(), partitions, 0, 1)
    return int(row.partitions[0])


def check(kafka: Mapping[str, Any], name: str, deadline: Deadline) -> TokenTopic:
    """Checks that a topic can serve as a token topic, and describes it.

    Args:
        kafka: librdkafka properties for connecting to the cluster.
        name: value of the option ``token.topic``.
        deadline: for the answers of the brokers.

    Raises:
        InvalidOptionError: if the topic's ``cleanup.policy`` is not exactly ``compact``.
        NoTokenTopicError: if the topic does not exist.
        UnavailableError: if no broker answers before ``deadline``.
        AuthorizationError: if the principal may not describe the topic. If it may not describe only the
            topic's configuration, the result has a warning instead.
    """
    with TopicAdmin(kafka) as admin:
        shape = admin.shape(name, deadline)
        if shape is None:
            raise NoTokenTopicError(
                f"the topic of the option token.topic={name!r} does not exist.",
                fix=f"create it: kafka-eos token-topic create --topic {name} --bootstrap-servers … --yes",
            )
        try:
            config = admin.config(name, deadline)
        except AuthorizationError as refused:
            unknown = (
                f"cannot check that token.topic={name!r} is compacted: {refused.message}. With a "
                "cleanup.policy other than 'compact', Kafka deletes tokens that are still needed."
            )
            return TokenTopic(name, shape.topic_id, shape.partitions, False, (unknown,))
    return TokenTopic(name, shape.topic_id, shape.partitions, warnings=_warnings(name, config))


def create(
    kafka: Mapping[str, Any],
    name: str,
    deadline: Deadline,
    *,
    partitions: int = 1,
    replication_factor: int = -1,
    min_insync: int | None = None,
) -> tuple[TokenTopic, bool]:
    """Creates the token topic, or checks a topic of that name that exists already.

    Args:
        kafka: librdkafka properties for connecting to the cluster.
        name: name of the topic.
        deadline: for the answers of the brokers.
        partitions: partition count of a new topic. An open transaction blocks the readers of its partition,
            so with several partitions, queries wait for each other less often.
        replication_factor: replication factor of a new topic; -1 = the broker's default.
        min_insync: ``min.insync.replicas`` of a new topic; None = the broker's default.

    Returns:
        The topic, and whether this call created it.

    Raises:
        InvalidOptionError: if a topic of that name exists with another ``cleanup.policy``. It is not changed.
        UnavailableError: if no broker answers before ``deadline``.
        AuthorizationError: if the principal may not create topics.
        OperatorError: if the cluster refuses the replication factor or a property.
    """
    wanted = dict(PROPERTIES)
    if min_insync is not None:
        wanted["min.insync.replicas"] = str(min_insync)
    with TopicAdmin(kafka) as admin:
        created = admin.shape(name, deadline) is None and admin.create(
            name, partitions, replication_factor, wanted, deadline
        )
        admin.await_led(name, deadline)
    return check(kafka, name, deadline), created


def config(kafka: Mapping[str, Any], name: str, deadline: Deadline) -> Mapping[str, str]:
    """Returns the topic's properties. Raises the same errors as `TopicAdmin.config`."""
    with TopicAdmin(kafka) as admin:
        return admin.config(name, deadline)


def _warnings(name: str, config: Mapping[str, str]) -> tuple[str, ...]:
    """Returns warnings about the configuration of an existing topic.

    Raises:
        InvalidOptionError: if the ``cleanup.policy`` is not exactly ``compact``.
    """
    policy = config["cleanup.policy"]
    if [each.strip() for each in policy.split(",") if each.strip()] != ["compact"]:
        raise InvalidOptionError(
            f"token.topic={name!r} has cleanup.policy={policy!r}; expected 'compact', because with any other "
            "policy Kafka deletes tokens that are still needed.",
            fix="create another topic with kafka-eos token-topic create. Or, if nobody else uses this topic, "
            f"run kafka-configs.sh --bootstrap-server … --alter --entity-type topics --entity-name {name} "
            "--add-config cleanup.policy=compact.",
        )
    if int(config["segment.bytes"]) > _LARGE_SEGMENT_BYTES:
        return (
            f"token.topic={name!r} has segment.bytes={int(config['segment.bytes']):,}. Kafka never compacts "
            "the newest segment, so if the consumer group is lost, a restart may have to read that much. "
            "kafka-eos token-topic create sets 1 MiB.",
        )
    return ()
