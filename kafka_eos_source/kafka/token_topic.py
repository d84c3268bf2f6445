"""The token topic: a compacted topic that permanently keeps each query's newest token and offsets.

The commit of a batch writes one record to it (`protocol.token`), in the transaction of the batch. A
new owner of the transactional id reads the record, in case the group lost the token (`commit.ownership`).
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from kafka_eos_source.errors import (
    AuthorizationError,
    InvalidOptionError,
    KafkaEosError,
    RetriableError,
    UnavailableError,
)
from kafka_eos_source.kafka.admin import ClusterReader
from kafka_eos_source.kafka.config import admin_config
from kafka_eos_source.kafka.kernel import kernel
from kafka_eos_source.kafka.reader import POOL, ChangelogReader, LogEnds, Records
from kafka_eos_source.kafka.topic_admin import TopicAdmin
from kafka_eos_source.model import TopicPartition
from kafka_eos_source.protocol.token import TokenRecord
from kafka_eos_source.runtime.deadline import Deadline, Pauses, retry

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
    from kafka_eos_source.kafka.kernel import Rows  # imports kafka-python

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
                fix=f"create it: kafka-eos token-topic create {name} --bootstrap-servers …",
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


# -- reading ------------------------------------------------------------------------------------
#
# A ``read_committed`` consumer sees nothing above the last stable offset (LSO), and any open transaction of
# any producer holds back the LSO. So a reader that must not miss a record waits until the LSO has passed the
# end that the log had when the reader started.

_log = logging.getLogger(__name__)

_IF_GONE = "create the topic again with kafka-eos token-topic create, then restart the query."
_PAUSE_SECONDS = 0.05
#: Time limit for finding out which query holds the LSO, to name it in an error.
_HOLDER_SECONDS = 5.0


@dataclass(frozen=True)
class NewestRecord:
    """The newest record of a key in one partition of the token topic. It is not a tombstone.

    Attributes:
        key: key of the record.
        tp, offset: position of the record.
        value: value of the record.
    """

    key: bytes
    tp: TopicPartition
    offset: int
    value: bytes

    def decode(self) -> TokenRecord:
        """Decodes the record. Raises the same errors as `TokenRecord.decode`."""
        return TokenRecord.decode(self.key, self.value)


@dataclass
class Survey:
    """The contents of a token topic.

    Attributes:
        records: number of records, including outdated ones.
        size_bytes: size of their keys and values.
        newest: the newest record of each key in each partition; None = a tombstone.
    """

    records: int
    size_bytes: int
    newest: dict[tuple[bytes, TopicPartition], NewestRecord | None]


def last(
    kafka: Mapping[str, Any],
    topic: TokenTopic,
    application_id: str,
    deadline: Deadline,
    *,
    certain: bool = True,
) -> TokenRecord | None:
    """Returns the newest committed record of a query; None = no record, or only a tombstone.

    Call it after ``init_transactions`` of the query's transactional id. Before that, the transaction of a
    dead driver may still commit a newer record.

    Args:
        kafka: librdkafka properties for connecting to the cluster.
        topic: the topic, from `check`.
        application_id: the transactional id of the query.
        deadline: for the brokers, and for open transactions of other queries that share the topic.
        certain: False = read only what is readable at once. The reader may then miss the newest record while
            another query has an open transaction in the same partition, so None proves nothing.

    Raises:
        UnavailableError: if no broker answers, or an open transaction still holds a partition, at
            ``deadline``.
        AuthorizationError: if the principal may not read the topic.
        OperatorError: if the record is damaged or has a newer format.
    """
    survey = read(kafka, topic, deadline, certain=certain, key=application_id.encode())
    records = [found.decode() for found in survey.newest.values() if found is not None]
    # after partitions were added to the topic, older records of a key may be in another partition
    return max(records, key=lambda record: record.token.sequence, default=None)


def read(
    kafka: Mapping[str, Any],
    topic: TokenTopic,
    deadline: Deadline,
    *,
    certain: bool,
    key: bytes | None = None,
) -> Survey:
    """Reads the committed records of all partitions.

    Args:
        kafka, topic, deadline, certain: as for `last`.
        key: the only key to include in `Survey.newest`; None = all keys.

    Raises:
        UnavailableError, AuthorizationError: under the same conditions as `last`.
    """
    connection = admin_config(kafka)
    survey = Survey(0, 0, {})
    with ClusterReader(connection) as cluster:
        bounds = _Bounds(connection, cluster, topic, deadline)
        ranges = bounds.after_open_transactions() if certain else bounds.now()
    with POOL.borrow({**connection, "isolation.level": "read_committed"}) as consumer:
        for tp, (start, end) in ranges.items():
            for records in ChangelogReader(consumer, tp).read(start, end, deadline, if_gone=_IF_GONE):
                _add(survey, tp, records, key)
    return survey


@dataclass(frozen=True)
class TopicRecords:
    """Reads the records of one checked token topic, on behalf of the commit."""

    kafka: Mapping[str, Any] = field(repr=False)  # may contain passwords
    topic: TokenTopic

    @classmethod
    def checked(cls, kafka: Mapping[str, Any], name: str, deadline: Deadline) -> TopicRecords:
        """Checks the topic and logs warnings. Raises the same errors as `kafka.token_topic.check`."""
        topic = check(kafka, name, deadline)
        for warning in topic.warnings:
            _log.warning("%s", warning)
        return cls(kafka, topic)

    @property
    def name(self) -> str:
        """Name of the topic."""
        return self.topic.name

    @property
    def topic_id(self) -> str:
        """Kafka's id of the topic (KIP-516)."""
        return self.topic.topic_id

    def partition_of(self, application_id: str) -> int:
        """Returns the partition of a query's record."""
        return self.topic.partition_of(application_id)

    def last(self, application_id: str, deadline: Deadline, *, certain: bool) -> TokenRecord | None:
        """Returns the newest committed record of a query, as the function `last` does."""
        return last(self.kafka, self.topic, application_id, deadline, certain=certain)


_Ranges = dict[TopicPartition, tuple[int, int]]


class _Bounds:
    """Decides which offsets of each partition to read."""

    def __init__(
        self, connection: Mapping[str, Any], cluster: ClusterReader, topic: TokenTopic, deadline: Deadline
    ) -> None:
        self._connection = connection
        self._cluster = cluster
        self._partitions = [TopicPartition(topic.name, number) for number in range(topic.partitions)]
        self._deadline = deadline

    def now(self) -> _Ranges:
        """Returns what is readable at this moment. Open transactions may hold back more."""
        found = self._logs(self._partitions)
        return {tp: (ends.earliest, min(ends.stable, ends.end)) for tp, ends in found.items()}

    def after_open_transactions(self) -> _Ranges:
        """Returns all that the logs contain now, after waiting for the transactions in it to end.

        Raises:
            UnavailableError: if a transaction does not end before the deadline.
        """
        found = self._logs(self._partitions)
        wanted = {tp: ends.end for tp, ends in found.items()}
        pauses = Pauses(self._deadline, _PAUSE_SECONDS)
        is_logged = False
        while held := [tp for tp in found if found[tp].stable < wanted[tp]]:
            if pauses.expired:
                raise self._still_open(held[0], found[held[0]])
            if not is_logged:
                is_logged = True
                _log.info("waiting for open transactions in %s", ", ".join(map(str, held)))
            pauses.wait()
            found.update(self._logs(held))
        return {tp: (ends.earliest, wanted[tp]) for tp, ends in found.items()}

    def _logs(self, partitions: Collection[TopicPartition]) -> dict[TopicPartition, LogEnds]:
        # a partition may be unavailable for a while, for example while a leader is elected
        return retry(
            lambda: dict(self._cluster.logs(partitions)),
            (UnavailableError, RetriableError),
            Pauses(self._deadline, _PAUSE_SECONDS),
        )

    def _still_open(self, tp: TopicPartition, ends: LogEnds) -> UnavailableError:
        owner = self._owner(tp, ends)
        if owner is None:
            whose = "of an unknown producer"
            end_it = "find its producer with kafka-transactions.sh find-hanging and end the transaction"
        else:
            whose = f"of application.id={owner!r}"
            end_it = f"end the transaction with kafka-eos fence {owner} --yes"
        return UnavailableError(
            f"an open transaction {whose} holds partition {tp} of the token topic at offset {ends.stable}, "
            f"while the log ends at {ends.end}. Newer tokens cannot be read until it ends; "
            f"waited {self._deadline.budget_seconds:.0f} s.",
            fix=f"if the driver of that query is dead, {end_it}; then restart this query. Give queries "
            "different token topics if they must not wait for each other.",
        )

    def _owner(self, tp: TopicPartition, ends: LogEnds) -> str | None:
        """Returns the query whose transaction is open: it wrote the record at the last stable offset."""
        conf = {**self._connection, "isolation.level": "read_uncommitted"}
        soon = Deadline.after_seconds(_HOLDER_SECONDS)
        try:
            with POOL.borrow(conf) as consumer:
                reader = ChangelogReader(consumer, tp)
                records = reader.read(ends.stable, ends.stable + 1, soon, if_gone=_IF_GONE)
                keys = [key for each in records for key in each.keys.to_pylist()]
        except KafkaEosError as error:
            _log.info("cannot find out which producer blocks %s at offset %d: %s", tp, ends.stable, error)
            return None
        return keys[0].decode(errors="replace") if keys and keys[0] is not None else None


def _add(survey: Survey, tp: TopicPartition, records: Records, key: bytes | None) -> None:
    """Adds records to the survey; a later value of a key replaces an earlier one."""
    survey.records += len(records)
    survey.size_bytes += records.keys.nbytes + records.values.nbytes
    wanted: Sequence[int] = range(len(records))
    if key is not None:
        own = pc.equal(records.keys, pa.scalar(key, pa.binary())).fill_null(False)
        wanted = pc.indices_nonzero(own).to_pylist()[-1:]
    for index in wanted:
        name, value = records.keys[index].as_py(), records.values[index].as_py()
        if name is not None:
            found = None if value is None else NewestRecord(name, tp, int(records.offsets[index]), value)
            survey.newest[name, tp] = found
