"""Creates, describes and deletes the topics that this package owns: changelogs and token topics."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import TracebackType
from typing import Any, TypeVar

from kafka_eos_source.errors import AuthorizationError
from kafka_eos_source.kafka.admin_client import AdminClient, Complaints, request
from kafka_eos_source.kafka.config import admin_config
from kafka_eos_source.kafka.error_codes import ErrorCode, KafkaError
from kafka_eos_source.kafka.failure import unreachable
from kafka_eos_source.runtime.deadline import Deadline, Pauses

T = TypeVar("T")

_log = logging.getLogger(__name__)

_PAUSE_SECONDS = 0.05

_MISSING = ErrorCode.UNKNOWN_TOPIC_OR_PARTITION
_MAY_NOT_CREATE = frozenset({ErrorCode.TOPIC_AUTHORIZATION_FAILED, ErrorCode.CLUSTER_AUTHORIZATION_FAILED})


@dataclass(frozen=True)
class TopicShape:
    """A topic as the cluster describes it.

    Attributes:
        partitions: number of partitions.
        led: whether every partition has a leader; those of a new topic may have none yet.
        topic_id: Kafka's id of the topic (KIP-516). A topic that was deleted and created again has a new one.
    """

    partitions: int
    led: bool
    topic_id: str


class TopicAdmin:
    """Manages topics through one admin client; a context manager.

    Args:
        kafka: librdkafka properties; only those for connecting to the cluster are used.
        starts: whether a command makes its first requests with it, which then fail soon if brokers refuse
            connections.
    """

    def __init__(self, kafka: Mapping[str, Any], *, starts: bool = False) -> None:
        self._starts = starts
        self._bootstrap = str(kafka.get("bootstrap.servers", ""))
        self._complaints = Complaints(kafka)
        self._client = AdminClient(admin_config(kafka))

    def __enter__(self) -> TopicAdmin:
        return self

    def __exit__(
        self, _type: type[BaseException] | None, _value: BaseException | None, _trace: TracebackType | None
    ) -> None:
        self._client.close()

    def shape(self, name: str, deadline: Deadline) -> TopicShape | None:
        """Describes the topic; None = the topic does not exist.

        Raises:
            UnavailableError: if no broker answers before ``deadline``.
            AuthorizationError: if the principal may not describe the topic.
        """

        def ask(seconds: float) -> TopicShape | None:
            try:
                found = self._client.topic(name, seconds)
            except KafkaError as failure:
                if failure.code == _MISSING:
                    return None
                raise
            led = all(each.leader >= 0 for each in found.partitions)
            return TopicShape(len(found.partitions), led, found.topic_id)

        return self._ask(f"looking up topic {name!r}", ask, deadline, only_reads=True)

    def cluster_id(self, deadline: Deadline) -> str:
        """Returns Kafka's id of the cluster; "" = the brokers report none.

        Raises:
            UnavailableError: if no broker answers before ``deadline``.
        """
        return self._ask(
            "looking up the cluster's id", lambda seconds: self._client.cluster(seconds)[0], deadline
        )

    def config(self, name: str, deadline: Deadline) -> Mapping[str, str]:
        """Returns the topic's properties, including the broker's defaults.

        Raises:
            UnavailableError: if the topic does not exist, or no broker answers before ``deadline``.
            AuthorizationError: if the principal may not describe the topic's configuration.
        """

        def ask(seconds: float) -> Mapping[str, str]:
            return {each: found.value for each, found in self._client.topic_config(name, seconds).items()}

        try:
            return self._ask(
                f"looking up the configuration of topic {name!r}", ask, deadline, only_reads=True
            )
        except AuthorizationError as refused:
            raise AuthorizationError(
                refused.message, fix=f"grant the principal DescribeConfigs on topic {name!r}."
            ) from refused

    def creation_settings(self, name: str, deadline: Deadline) -> tuple[int, Mapping[str, str]]:
        """Returns what `create` needs for another topic like this one.

        Returns:
            The replication factor, and the properties that were set on the topic itself.

        Raises:
            UnavailableError: if the topic does not exist, or no broker answers before ``deadline``.
            AuthorizationError: if the principal may not describe the topic or its configuration.
        """

        def ask(seconds: float) -> tuple[int, Mapping[str, str]]:
            replicas = len(self._client.topic(name, seconds).partitions[0].replicas)
            found = self._client.topic_config(name, seconds)
            return replicas, {each: one.value for each, one in found.items() if one.is_set_on_topic}

        return self._ask(f"looking up the settings of topic {name!r}", ask, deadline)

    def delete(self, name: str, deadline: Deadline) -> None:
        """Deletes the topic if it exists, and waits until brokers no longer report it.

        Raises:
            UnavailableError: if no controller answers, or brokers still report the topic at ``deadline``.
            AuthorizationError: if the principal may not delete the topic.
            OperatorError: if the cluster does not allow deletion (``delete.topic.enable=false``).
        """

        def ask(seconds: float) -> None:
            try:
                self._client.delete_topic(name, seconds + 1.0)
            except KafkaError as failure:
                if failure.code != _MISSING:
                    raise

        self._ask(f"deleting topic {name!r}", ask, deadline)
        pauses = Pauses(deadline, _PAUSE_SECONDS)
        while self.shape(name, deadline) is not None:
            self._pause(pauses, deadline, f"topic {name!r} was deleted, but a broker still reports it")

    def create(
        self,
        name: str,
        partitions: int,
        replication_factor: int,
        config: Mapping[str, str],
        deadline: Deadline,
    ) -> bool:
        """Creates the topic.

        Args:
            name: name of the topic.
            partitions: number of partitions.
            replication_factor: -1 = the broker's ``default.replication.factor`` (KIP-464).
            config: properties of the topic.
            deadline: for the controller's answer; the request is safe to repeat.

        Returns:
            False if a topic of that name exists already. It is not changed. But if the answer to a request
            was lost, the topic counts as created by it: callers look up first whether it exists.

        Raises:
            UnavailableError: if no controller answers before ``deadline``.
            AuthorizationError: if the principal may not create topics.
            OperatorError: if the cluster refuses the replication factor or a property.
        """
        is_retry = False

        def ask(seconds: float) -> bool:
            nonlocal is_retry
            was_sent, is_retry = is_retry, True
            try:
                self._client.create_topic(
                    name, partitions, replication_factor, config, seconds + 1.0, is_retry=was_sent
                )
            except KafkaError as error:
                if error.code == ErrorCode.TOPIC_ALREADY_EXISTS:
                    return False
                if error.code in _MAY_NOT_CREATE:
                    raise AuthorizationError(
                        f"creating topic {name!r}: {self._complaints.secrets.hide(error.text)} "
                        f"({error.name})",
                        fix=f"grant the principal Create on topic {name!r} (or on the cluster), "
                        "or create the topic before the query starts.",
                    ) from error
                raise
            return True

        return self._ask(f"creating topic {name!r}", ask, deadline)

    def await_led(self, name: str, deadline: Deadline) -> TopicShape:
        """Waits until brokers report the topic and every partition has a leader.

        Raises:
            UnavailableError: if that takes longer than ``deadline``.
            AuthorizationError: if the principal may not describe the topic.
        """
        pauses = Pauses(deadline, _PAUSE_SECONDS)
        while (found := self.shape(name, deadline)) is None or not found.led:
            missing = "no broker knows it" if found is None else "a partition has no leader"
            self._pause(pauses, deadline, f"topic {name!r} was created, but {missing}")
        return found

    def _pause(self, pauses: Pauses, deadline: Deadline, state: str) -> None:
        """Pauses, or raises an `UnavailableError` with this state after the deadline."""
        pauses.wait(lambda: unreachable(self._bootstrap, deadline.budget_seconds * 1000, state))

    def _ask(
        self, doing: str, ask: Callable[[float], T], deadline: Deadline, *, only_reads: bool = False
    ) -> T:
        return request(
            doing,
            ask,
            deadline,
            self._complaints,
            self._bootstrap,
            starts=only_reads and self._starts,
        )
