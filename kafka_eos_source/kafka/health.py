"""What doctor asks a cluster: its brokers, its replicas, its clock, and what the principal may do."""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import TypeVar

from kafka_eos_source.errors import InvalidOptionError, KafkaEosError
from kafka_eos_source.kafka.admin import metadata
from kafka_eos_source.kafka.admin_client import AdminClient, Complaints, initial_error, request
from kafka_eos_source.kafka.config import admin_config
from kafka_eos_source.kafka.error_codes import ErrorCode, KafkaError
from kafka_eos_source.kafka.failure import classify
from kafka_eos_source.kafka.probe import append_time
from kafka_eos_source.kafka.topic_admin import TopicAdmin
from kafka_eos_source.model import TopicPartition
from kafka_eos_source.runtime.deadline import Deadline

T = TypeVar("T")


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
        tuple(Broker(node, *address) for node, address in sorted(found.brokers.items())),
        {
            name: min((len(each.replicas) for each in topic.partitions), default=0)
            for name, topic in found.topics.items()
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


# -- rights -------------------------------------------------------------------------------------

#: A transaction timeout that brokers do not grant unless transaction.max.timeout.ms is as large.
_NEVER_GRANTED_MS = 2_147_483_647

_MISSING = frozenset({ErrorCode.UNKNOWN_TOPIC_OR_PARTITION, ErrorCode.GROUP_ID_NOT_FOUND})
_DENIED = frozenset({ErrorCode.TOPIC_AUTHORIZATION_FAILED, ErrorCode.GROUP_AUTHORIZATION_FAILED})

_log = logging.getLogger(__name__)


class Rights:
    """Looks up the operations that the principal may use.

    Args:
        kafka: librdkafka properties with the query's own credentials.
        deadline: limits the wait for the brokers.
    """

    def __init__(self, kafka: Mapping[str, str], deadline: Deadline) -> None:
        self._kafka, self._deadline = dict(kafka), deadline
        self._complaints = Complaints(self._kafka)
        self._client = AdminClient(admin_config(self._kafka))

    def of_topics(self, topics: Collection[str]) -> dict[str, frozenset[str] | None]:
        """Returns the operations on each topic, such as ``READ``; None = there is no such topic.

        Raises:
            KafkaEosError: if no broker answers, or the login is refused.
        """
        if not topics:
            return {}
        names = sorted(topics)

        def send(seconds: float) -> dict[str, frozenset[str] | None]:
            found = self._client.topics(names, seconds, operations=True)
            return {
                name: _rights_despite(each) if isinstance(each, KafkaError) else each.operations
                for name, each in found.items()
            }

        return self._request(f"looking up the rights on {', '.join(names)}", send)

    def of_group(self, group_id: str) -> frozenset[str] | None:
        """Returns the operations on a consumer group; None = the broker reports none of a missing group.

        Raises:
            KafkaEosError: if no broker answers, or the login is refused.
        """

        def send(seconds: float) -> frozenset[str] | None:
            try:
                return self._client.group(group_id, seconds, operations=True).operations
            except KafkaError as failure:
                return _rights_despite(failure)

        return self._request(f"looking up the rights on group {group_id!r}", send)

    def may_write_transactional_id(self, transactional_id: str) -> bool | None:
        """Returns whether the principal may write with a transactional id; None = it cannot be asked.

        Brokers check the right first, then whether they grant the transaction timeout, and only then look at
        the id. The method asks for a timeout that they do not grant, so nobody is fenced.

        Raises:
            KafkaEosError: if no broker answers, or the login is refused.
        """
        limit = self._largest_transaction_timeout_ms()
        if limit is not None and limit >= _NEVER_GRANTED_MS:
            return None
        config = admin_config(self._kafka)
        code = initial_error(config, transactional_id, _NEVER_GRANTED_MS, self._deadline)
        if code == ErrorCode.INVALID_TRANSACTION_TIMEOUT:
            return True
        if code == ErrorCode.TRANSACTIONAL_ID_AUTHORIZATION_FAILED:
            return False
        if code:
            raise classify(
                KafkaError(code), f"looking up the rights on transactional id {transactional_id!r}"
            )
        return None

    def _largest_transaction_timeout_ms(self) -> int | None:
        """Returns transaction.max.timeout.ms of a broker; None = the principal may not read it."""

        def send(seconds: float) -> int | None:
            node = min(self._client.cluster(seconds)[1])
            found = self._client.broker_config(node, seconds).get("transaction.max.timeout.ms")
            return None if found is None else int(found.value)

        try:
            return self._request("looking up transaction.max.timeout.ms", send)
        except KafkaEosError:
            return None  # without this right, the check assumes that the limit is smaller

    def _request(self, doing: str, send: Callable[[float], T]) -> T:
        bootstrap = str(self._kafka.get("bootstrap.servers", ""))
        return request(doing, send, self._deadline, self._complaints, bootstrap)


def _rights_despite(error: KafkaError) -> frozenset[str] | None:
    """Returns the rights that an error shows: none, or None = there is no such topic or group.

    Raises:
        KafkaError: if it shows nothing.
    """
    if error.code in _DENIED:
        return frozenset()
    if error.code in _MISSING:
        return None
    raise error
