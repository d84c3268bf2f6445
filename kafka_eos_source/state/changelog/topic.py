"""The changelog of a store: one compacted topic, a partition a shard, and the batch record in each.

Records of a changelog are full values under the keys of `layout`, a null value is a deletion; so to read a
part of it twice changes nothing. Under `layout.BATCH_KEY` each partition holds, once after compaction, which
micro-batch its records belong to.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from kafka_eos_source.errors import ChangelogError, InvalidOptionError, StateMismatchError
from kafka_eos_source.kafka.topic_admin import TopicAdmin, TopicShape
from kafka_eos_source.runtime.deadline import Deadline

#: `Topic.MAX_NAME_LENGTH` in Kafka.
_TOPIC_CHARACTERS = 249
_LEGAL = re.compile(r"[A-Za-z0-9._-]+")


def changelog_name(application_id: str, store: str) -> str:
    """``<application.id>-<store>-changelog``, as Kafka Streams names them.

    Raises:
        InvalidOptionError: that is no name for a topic.
    """
    name = f"{application_id}-{store}-changelog"
    if not _LEGAL.fullmatch(name) or len(name) > _TOPIC_CHARACTERS:
        raise InvalidOptionError(
            f"store {store!r} of application.id {application_id!r} would have the changelog {name!r} "
            f"({len(name)} characters); expected at most {_TOPIC_CHARACTERS} letters, digits, dots, dashes "
            "or underscores.",
            fix="choose a shorter or simpler name of the store, or application.id.",
        )
    return name


@dataclass(frozen=True)
class ChangelogTopic:
    """A changelog topic that was looked at and found fit.

    Attributes:
        name: of the topic.
        topic_id: Kafka's id (KIP-516): state of another id belongs to a topic that is gone.
        shards: partitions.
        delete_retention_ms: how long a deletion can be seen before compaction forgets it. State that missed
            the changelog for longer may keep keys that were deleted (KIP-1259).
    """

    name: str
    topic_id: str
    shards: int
    delete_retention_ms: int


def ensure(
    kafka: Mapping[str, Any],
    name: str,
    shards: int,
    *,
    replication_factor: int = -1,
    min_insync: int | None = None,
    windowed: bool = False,
    create: bool = True,
    deadline: Deadline,
) -> ChangelogTopic:
    """The changelog topic, made when it is missing, checked when it is there.

    Safe to be called by many at once: whoever finds it made by another checks that one.

    Args:
        kafka: librdkafka properties that say how to reach the cluster.
        name: from `changelog_name`.
        shards: partitions that it must have.
        replication_factor: of a new topic; -1 = the broker's default. Three in production.
        min_insync: ``min.insync.replicas`` of a new topic; None = the broker's default. Two in production.
        windowed: ``cleanup.policy=compact,delete`` is taken too: old windows may go by age. A new topic is
            compacted only, for a window that is closed is deleted record by record anyhow.
        create: False = a missing topic is an error.
        deadline: for the brokers.

    Raises:
        StateMismatchError: it has another number of partitions.
        ChangelogError: it is not compacted, or missing with ``create=False``.
        UnavailableError: no broker answers before ``deadline``.
        AuthorizationError: an ACL on the topic is missing.
        OperatorError: the cluster refuses to make the topic as asked.
    """
    with TopicAdmin(kafka) as admin:
        shape = admin.shape(name, deadline)
        if shape is None:
            if not create:
                raise ChangelogError(
                    f"changelog topic {name!r} does not exist.",
                    fix=f"create it: {_create_command(name, shards)}",
                )
            wanted = {"cleanup.policy": "compact"}
            if min_insync is not None:
                wanted["min.insync.replicas"] = str(min_insync)
            admin.create(name, shards, replication_factor, wanted, deadline)
            shape = admin.await_led(name, deadline)
        return check(name, shape, admin.config(name, deadline), shards, windowed=windowed)


def check(
    name: str, shape: TopicShape, config: Mapping[str, str], shards: int, *, windowed: bool = False
) -> ChangelogTopic:
    """The topic, if it can be the changelog of this many shards.

    Raises:
        StateMismatchError, ChangelogError: as `ensure`.
    """
    if shape.partitions != shards:
        raise StateMismatchError(
            f"changelog topic {name!r} has {shape.partitions} partitions; the operator has {shards} shards, "
            "and each shard owns one partition.",
            fix=f"set the number of shards to {shape.partitions}, or move the state to {shards} shards with "
            "`kafka-eos state rescale` while the query is stopped.",
        )
    policy = frozenset(each.strip() for each in config["cleanup.policy"].split(",") if each.strip())
    if policy != {"compact"} and not (windowed and policy == {"compact", "delete"}):
        also = " or 'compact,delete'" if windowed else ""
        raise ChangelogError(
            f"changelog topic {name!r} has cleanup.policy={config['cleanup.policy']!r}; expected "
            f"'compact'{also}: any other policy removes state that is still in use.",
            fix=f"kafka-configs.sh --bootstrap-server … --alter --entity-type topics --entity-name {name} "
            "--add-config cleanup.policy=compact; what was removed already must come from another copy.",
        )
    return ChangelogTopic(name, shape.topic_id, shards, int(config["delete.retention.ms"]))


def _create_command(name: str, shards: int) -> str:
    return (
        f"kafka-topics.sh --bootstrap-server … --create --topic {name} --partitions {shards} "
        "--config cleanup.policy=compact"
    )
