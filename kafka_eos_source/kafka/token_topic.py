"""The token topic: a compacted topic that keeps each query's newest token and offsets for good.

The commit of a batch writes one record to it (`protocol.token_record`), in the transaction of the batch. The
record is read where the consumer group holds no token any more (`kafka.token_topic_reader`).
"""

from __future__ import annotations

from collections.abc import Mapping
from ctypes import c_char_p, c_int32, c_size_t, c_void_p
from dataclasses import dataclass
from typing import Any

from kafka_eos_source.errors import AuthorizationError, InvalidOptionError, UnavailableError
from kafka_eos_source.kafka.native import function
from kafka_eos_source.kafka.topic_admin import TopicAdmin
from kafka_eos_source.runtime.deadline import Deadline

#: Properties of a topic that `create` makes. Kafka never compacts the segment that is being written, so a
#: reader reads all of that segment. Each commit adds a record (0.5 KiB for a small query) and a control
#: record of 78 bytes. Segments of 1 MiB, the smallest that Kafka 4 takes, are read in milliseconds. A segment
#: that grows slowly is closed after 10 minutes, so that it can be compacted. A dirty ratio of 1 % lets Kafka
#: compact soon after that, which rewrites a few MiB at most. Control records and tombstones stay for
#: ``delete.retention.ms`` more; with Kafka's default of a day, a query that commits ten times a second would
#: leave 67 MB of control records. A reader that takes longer than that time may miss a tombstone.
PROPERTIES: Mapping[str, str] = {
    "cleanup.policy": "compact",
    "segment.bytes": str(1 << 20),
    "segment.ms": "600000",
    "max.compaction.lag.ms": "600000",
    "min.cleanable.dirty.ratio": "0.01",
    "delete.retention.ms": "600000",
}

#: A segment larger than this takes seconds to read after a lost group. Kafka's default is 1 GiB.
_LARGE_SEGMENT_BYTES = 64 << 20


class NoTokenTopicError(UnavailableError):
    """The topic that the option ``token.topic`` names does not exist."""


@dataclass(frozen=True)
class TokenTopic:
    """A token topic that was looked at and found fit.

    Attributes:
        name: of the topic.
        topic_id: Kafka's id of it (KIP-516).
        partitions: how many it has.
        described: False if the principal may not see the topic's configuration, which was not checked then.
        warnings: what an administrator should know; sentences.
    """

    name: str
    topic_id: str
    partitions: int
    described: bool = True
    warnings: tuple[str, ...] = ()

    def partition_of(self, application_id: str) -> int:
        """The partition of a query's record: where Java's default partitioner places its key."""
        return partition_of(application_id.encode(), self.partitions)


def partition_of(key: bytes, partitions: int) -> int:
    """The partition that Java's default partitioner gives a key: murmur2, in librdkafka's own code."""
    place = function(
        "rd_kafka_msg_partitioner_murmur2",
        c_int32,
        c_void_p,
        c_char_p,
        c_size_t,
        c_int32,
        c_void_p,
        c_void_p,
    )
    placed: int = place(None, key, len(key), partitions, None, None)
    return placed


def check(kafka: Mapping[str, Any], name: str, deadline: Deadline) -> TokenTopic:
    """The token topic, if it can be one.

    Args:
        kafka: librdkafka properties that say how to reach the cluster.
        name: option ``token.topic``.
        deadline: for the brokers.

    Raises:
        InvalidOptionError: its ``cleanup.policy`` is not exactly ``compact``.
        NoTokenTopicError: the topic does not exist.
        UnavailableError: no broker answers before ``deadline``.
        AuthorizationError: the topic may not be described. A missing right to its configuration is a warning.
    """
    with TopicAdmin(kafka) as admin:
        shape = admin.shape(name, deadline)
        if shape is None:
            raise NoTokenTopicError(
                f"token.topic={name!r} does not exist.",
                fix=f"create it: kafka-eos token-topic create --topic {name} --bootstrap-servers … --yes",
            )
        try:
            config = admin.config(name, deadline)
        except AuthorizationError as refused:
            unknown = (
                f"cannot check that token.topic={name!r} is compacted: {refused.message}. With any "
                "cleanup.policy but 'compact' Kafka removes tokens that are still needed."
            )
            return TokenTopic(name, shape.topic_id, shape.partitions, False, (unknown,))
    return TokenTopic(name, shape.topic_id, shape.partitions, warnings=_judged(name, config))


def create(
    kafka: Mapping[str, Any],
    name: str,
    deadline: Deadline,
    *,
    partitions: int = 1,
    replication_factor: int = -1,
    min_insync: int | None = None,
) -> tuple[TokenTopic, bool]:
    """Creates the token topic, or checks the topic of that name that is there already.

    Args:
        kafka: librdkafka properties that say how to reach the cluster.
        name: of the topic.
        deadline: for the brokers.
        partitions: of a new topic. An open transaction holds up the readers of its partition, so several
            partitions keep queries out of each other's way.
        replication_factor: of a new topic; -1 = the broker's default.
        min_insync: ``min.insync.replicas`` of a new topic; None = the broker's default.

    Returns:
        The topic, and whether it was created now.

    Raises:
        InvalidOptionError: a topic of that name has another ``cleanup.policy``. It is left as it is.
        UnavailableError: no broker answers before ``deadline``.
        AuthorizationError: the principal may not create topics.
        OperatorError: the cluster refuses the replication factor or a property.
    """
    wanted = dict(PROPERTIES)
    if min_insync is not None:
        wanted["min.insync.replicas"] = str(min_insync)
    with TopicAdmin(kafka) as admin:
        made = admin.shape(name, deadline) is None and admin.create(
            name, partitions, replication_factor, wanted, deadline
        )
        admin.await_led(name, deadline)
    return check(kafka, name, deadline), made


def config(kafka: Mapping[str, Any], name: str, deadline: Deadline) -> Mapping[str, str]:
    """The topic's properties. Raises: as `TopicAdmin.config`."""
    with TopicAdmin(kafka) as admin:
        return admin.config(name, deadline)


def _judged(name: str, config: Mapping[str, str]) -> tuple[str, ...]:
    """Warnings about the configuration of an existing topic.

    Raises:
        InvalidOptionError: as `check`.
    """
    policy = config["cleanup.policy"]
    if [each.strip() for each in policy.split(",") if each.strip()] != ["compact"]:
        raise InvalidOptionError(
            f"token.topic={name!r} has cleanup.policy={policy!r}; expected 'compact': with any other policy "
            "Kafka removes tokens that are still needed.",
            fix="create another topic with kafka-eos token-topic create; or, if nobody else uses this one, "
            f"kafka-configs.sh --bootstrap-server … --alter --entity-type topics --entity-name {name} "
            "--add-config cleanup.policy=compact.",
        )
    if int(config["segment.bytes"]) > _LARGE_SEGMENT_BYTES:
        return (
            f"token.topic={name!r} has segment.bytes={int(config['segment.bytes']):,}. Kafka never compacts "
            "the newest segment, so a restart after a lost group may have to read that much. "
            "kafka-eos token-topic create sets 1 MiB.",
        )
    return ()
