"""Creates and checks the changelog topic of a store.

The topic is compacted and has one partition for each shard. A record of a changelog holds a complete value
under a key of `layout`; a null value deletes the key. So reading a part of it twice changes nothing. The
batch records (`batch_record`) in each partition name the owner of the topic and the micro-batch that the
records before them belong to.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from kafka_eos_source.errors import ChangelogError, InvalidOptionError, StateMismatchError
from kafka_eos_source.kafka.topic_admin import TopicAdmin, TopicShape
from kafka_eos_source.runtime.deadline import Deadline

#: `Topic.MAX_NAME_LENGTH` in Kafka.
_TOPIC_CHARACTERS = 249
_LEGAL = re.compile(r"[A-Za-z0-9._-]+")


def changelog_name(application_id: str, store: str) -> str:
    """Returns the name of a store's changelog topic, ``<application.id>-<store>-changelog``.

    It is the name that Kafka Streams would use.

    Raises:
        InvalidOptionError: if Kafka does not allow that name.
    """
    name = f"{application_id}-{store}-changelog"
    if not _LEGAL.fullmatch(name) or len(name) > _TOPIC_CHARACTERS:
        raise InvalidOptionError(
            f"store {store!r} of application.id {application_id!r} would have the changelog topic {name!r} "
            f"({len(name)} characters); a topic name has at most {_TOPIC_CHARACTERS} letters, digits, dots, "
            "dashes or underscores.",
            fix="choose a shorter or simpler store name or application.id.",
        )
    return name


@dataclass(frozen=True)
class ChangelogTopic:
    """A changelog topic that passed `check`.

    Attributes:
        name: of the topic.
        topic_id: Kafka's id of the topic (KIP-516). State with another id belongs to a deleted topic.
        shards: number of partitions.
        delete_retention_ms: how long compaction keeps a delete. A store that is older than this may keep keys
            that were deleted (KIP-1259).
        cluster_id: Kafka's id of the cluster.
    """

    name: str
    topic_id: str
    shards: int
    delete_retention_ms: int
    cluster_id: str = ""


def ensure(
    kafka: Mapping[str, Any],
    name: str,
    shards: int,
    *,
    replication_factor: int = -1,
    min_insync: int | None = None,
    delete_retention_ms: int | None = None,
    create: bool = True,
    deadline: Deadline,
) -> ChangelogTopic:
    """Returns the changelog topic; creates it if it is missing.

    Several processes may call this at the same time: a topic that another process created is checked.

    Args:
        kafka: librdkafka properties for the connection.
        name: from `changelog_name`.
        shards: number of partitions that the topic must have.
        replication_factor: of a new topic; -1 = the broker's default. Use three in production.
        min_insync: ``min.insync.replicas`` of a new topic; None = the broker's default. Use two in
            production.
        delete_retention_ms: ``delete.retention.ms`` of a new topic; None = the broker's default.
        create: False = a missing topic is an error.
        deadline: for the brokers.

    Raises:
        StateMismatchError: if the topic has another number of partitions.
        ChangelogError: if the topic is not compacted, or is missing with ``create=False``.
        UnavailableError: if no broker answers before ``deadline``.
        AuthorizationError: if an ACL on the topic is missing.
        OperatorError: if the cluster refuses to create the topic.
    """
    with TopicAdmin(kafka) as admin:
        shape = admin.shape(name, deadline)
        if shape is None:
            if not create:
                raise ChangelogError(
                    f"the changelog topic {name!r} does not exist.",
                    fix=f"create it: {_create_command(name, shards)}",
                )
            wanted = {"cleanup.policy": "compact"}
            if min_insync is not None:
                wanted["min.insync.replicas"] = str(min_insync)
            if delete_retention_ms is not None:
                wanted["delete.retention.ms"] = str(delete_retention_ms)
            admin.create(name, shards, replication_factor, wanted, deadline)
            shape = admin.await_led(name, deadline)
        checked = check(name, shape, admin.config(name, deadline), shards)
        return replace(checked, cluster_id=admin.cluster_id(deadline))


def check(name: str, shape: TopicShape, config: Mapping[str, str], shards: int) -> ChangelogTopic:
    """Returns the topic if it can be the changelog of this number of shards.

    Args:
        name: of the topic.
        shape: its partitions and id.
        config: its configuration.
        shards: number of partitions that it must have.

    Raises:
        StateMismatchError, ChangelogError: as `ensure`.
    """
    if shape.partitions != shards:
        raise StateMismatchError(
            f"the changelog topic {name!r} has {shape.partitions} partitions; the operator has {shards} "
            "shards, and each shard needs one partition.",
            fix=f"stop the query and run `kafka-eos state rescale --shards {shards} --yes`, which moves the "
            f"state to {shards} shards, also if somebody added partitions to the topic. If the number of "
            f"shards in the query was changed by mistake, set it to {shape.partitions} again. If the "
            "operator is new, another application may use the topic, because names are joined with a dash: "
            "choose another store name.",
        )
    policy = frozenset(each.strip() for each in config["cleanup.policy"].split(",") if each.strip())
    if policy != {"compact"}:
        raise ChangelogError(
            f"the changelog topic {name!r} has cleanup.policy={config['cleanup.policy']!r}; expected "
            "'compact', because any other policy removes state that is still in use.",
            fix=f"kafka-configs.sh --bootstrap-server … --alter --entity-type topics --entity-name {name} "
            "--add-config cleanup.policy=compact. Records that were removed already are lost.",
        )
    return ChangelogTopic(name, shape.topic_id, shards, int(config["delete.retention.ms"]))


def _create_command(name: str, shards: int) -> str:
    return (
        f"kafka-topics.sh --bootstrap-server … --create --topic {name} --partitions {shards} "
        "--config cleanup.policy=compact"
    )
