"""The changelog topic of a store: its creation and checks, a shard's committed offset, and what follows it.

The topic is compacted and has one partition for each shard. A record of a changelog holds a complete value
under a key of `encoding.layout`; a null value deletes the key. So reading a part of it twice changes nothing.
The batch records (`model.Owner`) in each partition name the owner of the topic and the micro-batch that the
records before them belong to.
"""

from __future__ import annotations

import logging
import re
import time
from collections.abc import Callable, Collection, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import pyarrow.compute as pc

from kafka_eos_source.errors import ChangelogError, InvalidOptionError, StateMismatchError, UnavailableError
from kafka_eos_source.kafka.config import admin_config, producer_config
from kafka_eos_source.kafka.group import stable_offsets
from kafka_eos_source.kafka.producer import TransactionalProducer
from kafka_eos_source.kafka.reader import POOL, ChangelogReader
from kafka_eos_source.kafka.topic_admin import TopicAdmin, TopicShape
from kafka_eos_source.model import GroupOffset, TopicPartition
from kafka_eos_source.runtime.deadline import Deadline, Pauses
from kafka_eos_source.state.model import BATCH_PREFIX, Owner

if TYPE_CHECKING:
    from kafka_eos_source.kafka.fetch import RangeConsumer

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
            fix=f"stop the query and run `kafka-eos state rescale QUERY --shards {shards} --yes`, which "
            f"moves the state to {shards} shards, also if somebody added partitions to the topic. If the "
            f"number of shards in the query was changed by mistake, set it to {shape.partitions} again. If "
            "the operator is new, another application may use the topic, because names are joined with a "
            "dash: choose another store name.",
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


# ---------------------------------------- the committed offset of a shard
#
# The committed offset is an offset of the query's group, with the commit token as metadata. The token decides
# whether the pending changes of a shard are applied, so it must not be read while an open transaction is
# about to change it (``RequireStable``, KIP-447). Usually that transaction is the previous batch, whose
# control records are being written, which takes a few milliseconds. But the driver may have died inside the
# transaction, which then stays open until its timeout. So after a while the reader ends the transaction, as
# the next driver would: it initialises the query's transactional id (KIP-98), which completes a commit that
# was decided and aborts a transaction that was not.
#
#     fetch ──stable──▶ answer
#       │ ▲
#       │ └─────────────────────────────┐
#       └─unstable─▶ wait ──end_after_ms──▶ end the transaction, once ──unstable until the deadline──▶ error

_log = logging.getLogger(__name__)

#: How long a transaction may stay open before the reader ends it. Control records of a committed transaction
#: are written in milliseconds; a coordinator that moves to another broker takes seconds.
END_AFTER_MS = 3_000

#: Pause between two fetches while a transaction is open: the first, and the longest after doubling.
_FIRST_PAUSE_SECONDS, _LONGEST_PAUSE_SECONDS = 0.005, 0.1


def changelog_client(kafka: Mapping[str, str]) -> AbstractContextManager[RangeConsumer]:
    """Borrows the consumer that a shard uses for all requests.

    It is the same client for offsets, log bounds and restore, so that a task connects once. The process keeps
    it between tasks.

    Args:
        kafka: librdkafka properties, from `kafka.config.check_consumer`.
    """
    return POOL.borrow({**kafka, "isolation.level": "read_committed"})


def end_open_transaction(kafka: Mapping[str, Any], transactional_id: str, deadline: Deadline) -> None:
    """Ends the transaction that an earlier owner of the id left open, and fences that owner.

    A driver of the query that is still alive is fenced too; it then opens a new producer and reads the token
    again.

    Args:
        kafka: librdkafka properties of the sink's cluster.
        transactional_id: of the query.
        deadline: for the transaction coordinator.

    Raises:
        UnavailableError: if no coordinator answers before ``deadline``.
        AuthorizationError: if the ACL on the transactional id is missing.
    """
    timeout = {key: value for key, value in kafka.items() if key == "transaction.timeout.ms"}
    producer = TransactionalProducer(producer_config({**admin_config(kafka), **timeout}, transactional_id))
    try:
        producer.init(deadline)
    finally:
        producer.close()


@dataclass(frozen=True)
class Tail:
    """What a changelog partition holds after an offset, up to the first open transaction.

    Attributes:
        stable: where it ends: the offset of the first record of an open transaction, or the end of the log.
        records: number of committed records.
        owners: the owners that their batch records name.
    """

    stable: int
    records: int
    owners: frozenset[Owner]


def read_tail(kafka: Mapping[str, Any], tp: TopicPartition, start: int, deadline: Deadline) -> Tail:
    """Reads the committed records of a changelog partition from an offset on.

    Args:
        kafka: as `changelog_client`.
        tp: the partition.
        start: the offset.
        deadline: for the brokers.

    Raises:
        UnavailableError: if no broker answers before ``deadline``.
        AuthorizationError: if the principal may not read the topic.
        ChangelogError: if another program wrote a batch record.
    """
    records, owners = 0, set[Owner]()
    with changelog_client(kafka) as consumer:
        reader = ChangelogReader(consumer, tp)
        first, stable = reader.readable(deadline)
        for each in reader.read(max(first, start), stable, deadline, if_gone="restart the query."):
            records += len(each)
            keys = each.keys.filter(pc.starts_with(each.keys, BATCH_PREFIX)).unique()
            owners.update(map(Owner.of_key, keys.to_pylist()))
    return Tail(stable, records, frozenset(owners))


class CommittedShard:
    """Reads the committed offset of one changelog partition.

    Args:
        consumer: from `changelog_client`, with nothing assigned.
        group_id: the query's group.
        tp: the shard's changelog partition.
        end_transaction: ends a transaction that stays open, as `end_open_transaction` does; None = only wait
            for its end.
        end_after_ms: how long the transaction may stay open before `end_transaction` is called.
    """

    def __init__(
        self,
        consumer: RangeConsumer,
        group_id: str,
        tp: TopicPartition,
        *,
        end_transaction: Callable[[Deadline], None] | None = None,
        end_after_ms: int = END_AFTER_MS,
    ) -> None:
        self._consumer = consumer
        self._group_id = group_id
        self._tp = tp
        self._end_transaction = end_transaction
        self._end_after_seconds = end_after_ms / 1000

    def offset(self, deadline: Deadline) -> GroupOffset | None:
        """Returns the shard's committed offset; None if it was never committed.

        The token is the offset's metadata.

        Raises:
            UnavailableError: if there is no answer before ``deadline``, or a transaction stays open. A
                failure is never reported as None.
            AuthorizationError: if the principal may not describe the group.
        """
        return self.offsets((), deadline).get(self._tp)

    def offsets(
        self, others: Collection[TopicPartition], deadline: Deadline
    ) -> dict[TopicPartition, GroupOffset]:
        """Returns the committed offsets of the shard and of ``others`` as of one moment.

        A partition without a committed offset is absent.

        Raises:
            UnavailableError, AuthorizationError: as `offset`.
        """
        wanted = [self._tp, *(tp for tp in others if tp != self._tp)]
        since: float | None = None
        ended = False
        pauses = Pauses(deadline, _FIRST_PAUSE_SECONDS, _LONGEST_PAUSE_SECONDS)
        while (found := stable_offsets(self._consumer.cluster, self._group_id, wanted, deadline)) is None:
            now = time.monotonic()
            since = now if since is None else since
            if pauses.expired:
                raise self._still_open(now - since, ended)
            if self._end_transaction is not None and not ended and now - since >= self._end_after_seconds:
                _log.info(
                    "an open transaction has blocked the offset of %s in group %s for %.1f s; ending it",
                    self._tp,
                    self._group_id,
                    now - since,
                )
                self._end_transaction(deadline)
                ended = True
                continue
            pauses.wait()
        return found

    def _still_open(self, seconds: float, ended: bool) -> UnavailableError:
        if ended:
            owner = " It belongs to another program: this query's own transactions were ended meanwhile."
            fix = f"find the program that commits offsets in group {self._group_id!r}, and stop it."
        else:
            owner = ""
            fix = "wait until it ends or times out; kafka-transactions.sh lists it and can abort it."
        return UnavailableError(
            f"an open transaction has blocked the offset of {self._tp} in group {self._group_id!r} for "
            f"{seconds:.1f} s.{owner}",
            fix=fix,
        )
