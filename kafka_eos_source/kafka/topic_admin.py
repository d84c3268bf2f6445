"""Topics that this package makes for itself: created, and looked at with their configuration."""

from __future__ import annotations

import concurrent.futures
import logging
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import TracebackType
from typing import Any, TypeVar

from confluent_kafka import KafkaError, KafkaException, TopicCollection
from confluent_kafka import admin as client_admin

from kafka_eos_source.errors import AuthorizationError
from kafka_eos_source.kafka.clients import make
from kafka_eos_source.kafka.config import admin_config
from kafka_eos_source.kafka.failure import classify, is_login, is_transient, kafka_error, unreachable
from kafka_eos_source.kafka.secrets import concealed
from kafka_eos_source.runtime.deadline import Deadline

_AdminClient: Any = client_admin.AdminClient
_NewTopic: Any = client_admin.NewTopic  # type: ignore[attr-defined]
_ConfigResource: Any = client_admin.ConfigResource  # type: ignore[attr-defined]
_TOPIC: Any = client_admin.ResourceType.TOPIC  # type: ignore[attr-defined]

T = TypeVar("T")

_log = logging.getLogger(__name__)

#: Kafka's DescribeConfigs: the value was given to this topic, and is no default.
_SET_ON_TOPIC = client_admin.ConfigSource.DYNAMIC_TOPIC_CONFIG.value  # type: ignore[attr-defined]

_REQUEST_SECONDS = 10.0
_LOOK_SECONDS = 0.5
_PAUSE_SECONDS = 0.05

_MISSING = frozenset({KafkaError.UNKNOWN_TOPIC_OR_PART, KafkaError._UNKNOWN_TOPIC})
_MAY_NOT_CREATE = frozenset({KafkaError.TOPIC_AUTHORIZATION_FAILED, KafkaError.CLUSTER_AUTHORIZATION_FAILED})


@dataclass(frozen=True)
class TopicShape:
    """A topic as the cluster shows it.

    Attributes:
        partitions: how many.
        led: whether each of them has a leader; a topic made a moment ago may have none yet.
        topic_id: Kafka's id of it (KIP-516): another topic of the same name has another one.
    """

    partitions: int
    led: bool
    topic_id: str


class TopicAdmin:
    """One admin client; a context manager.

    Args:
        kafka: librdkafka properties; those that say how to reach the cluster are taken.
    """

    def __init__(self, kafka: Mapping[str, Any]) -> None:
        self._bootstrap = str(kafka.get("bootstrap.servers", ""))
        self._said = ""
        self._login_refused: KafkaError | None = None
        self._pause = threading.Event()
        self._client: Any = make(
            _AdminClient, {**admin_config(kafka), "error_cb": self._on_error}, logger=_log
        )

    def __enter__(self) -> TopicAdmin:
        return self

    def __exit__(
        self, _type: type[BaseException] | None, _value: BaseException | None, _trace: TracebackType | None
    ) -> None:
        self._client = None

    def shape(self, name: str, deadline: Deadline) -> TopicShape | None:
        """The topic; None = there is none.

        Raises:
            UnavailableError: no broker answers before ``deadline``.
            AuthorizationError: it may not be described.
        """

        def ask(seconds: float) -> TopicShape | None:
            future = self._client.describe_topics(TopicCollection([name]), request_timeout=seconds)[name]
            try:
                found = self._answer(future)
            except KafkaException as failure:
                if kafka_error(failure).code() in _MISSING:
                    return None
                raise
            led = all(each.leader is not None and each.leader.id >= 0 for each in found.partitions)
            return TopicShape(len(found.partitions), led, str(found.topic_id))

        return self._ask(f"looking up topic {name!r}", ask, deadline)

    def config(self, name: str, deadline: Deadline) -> Mapping[str, str]:
        """The topic's properties, the broker's defaults included.

        Raises:
            UnavailableError: there is no such topic, or no broker answers before ``deadline``.
            AuthorizationError: its configuration may not be described.
        """
        resource = _ConfigResource(_TOPIC, name)

        def ask(seconds: float) -> Mapping[str, str]:
            (future,) = self._client.describe_configs([resource], request_timeout=seconds).values()
            return {each.name: each.value for each in self._answer(future).values()}

        try:
            return self._ask(f"looking up the configuration of topic {name!r}", ask, deadline)
        except AuthorizationError as refused:
            raise AuthorizationError(
                refused.message, fix=f"grant the principal DescribeConfigs on topic {name!r}."
            ) from refused

    def stated(self, name: str, deadline: Deadline) -> tuple[int, Mapping[str, str]]:
        """Replication factor, and the properties that were set on the topic itself, to make another like it.

        Raises:
            UnavailableError: there is no such topic, or no broker answers before ``deadline``.
            AuthorizationError: it, or its configuration, may not be described.
        """
        resource = _ConfigResource(_TOPIC, name)

        def ask(seconds: float) -> tuple[int, Mapping[str, str]]:
            described = self._client.describe_topics(TopicCollection([name]), request_timeout=seconds)[name]
            replicas = len(self._answer(described).partitions[0].replicas)
            (future,) = self._client.describe_configs([resource], request_timeout=seconds).values()
            entries = self._answer(future).values()
            return replicas, {each.name: each.value for each in entries if each.source == _SET_ON_TOPIC}

        return self._ask(f"looking up how topic {name!r} was made", ask, deadline)

    def delete(self, name: str, deadline: Deadline) -> None:
        """Deletes the topic and waits until no broker that is asked knows it. Idempotent.

        Raises:
            UnavailableError: no controller answers, or the topic is still there at ``deadline``.
            AuthorizationError: the principal may not delete it.
            OperatorError: the cluster allows no deletion (``delete.topic.enable=false``).
        """

        def ask(seconds: float) -> None:
            futures = self._client.delete_topics(
                [name], operation_timeout=seconds, request_timeout=seconds + 1.0
            )
            try:
                self._answer(futures[name])
            except KafkaException as failure:
                if kafka_error(failure).code() not in _MISSING:
                    raise

        self._ask(f"deleting topic {name!r}", ask, deadline)
        while self.shape(name, deadline) is not None:
            if deadline.expired:
                raise unreachable(
                    self._bootstrap,
                    deadline.budget_seconds * 1000,
                    f"topic {name!r} was deleted and is there",
                )
            self._pause.wait(min(_PAUSE_SECONDS, deadline.remaining_seconds()))

    def create(
        self,
        name: str,
        partitions: int,
        replication_factor: int,
        config: Mapping[str, str],
        deadline: Deadline,
    ) -> bool:
        """Makes the topic; returns False where there is one of that name already.

        Args:
            name: of the topic.
            partitions: how many.
            replication_factor: -1 = the broker's ``default.replication.factor`` (KIP-464).
            config: properties of the topic.
            deadline: for the controller's answer; the request is safe to repeat.

        Raises:
            UnavailableError: no controller answers before ``deadline``.
            AuthorizationError: the principal may create no topics.
            OperatorError: the cluster refuses the replication factor or a property.
        """
        topic = _NewTopic(name, partitions, replication_factor, config=dict(config))

        def ask(seconds: float) -> bool:
            future = self._client.create_topics(
                [topic], operation_timeout=seconds, request_timeout=seconds + 1.0
            )[name]
            try:
                self._answer(future)
            except KafkaException as failure:
                error = kafka_error(failure)
                if error.code() == KafkaError.TOPIC_ALREADY_EXISTS:
                    return False
                if error.code() in _MAY_NOT_CREATE:
                    raise AuthorizationError(
                        concealed(f"creating topic {name!r}: {error.str()} ({error.name()})"),
                        fix=f"grant the principal Create on topic {name!r} (or on the cluster), "
                        "or create the topic beforehand.",
                    ) from failure
                raise
            return True

        return self._ask(f"creating topic {name!r}", ask, deadline)

    def await_led(self, name: str, deadline: Deadline) -> TopicShape:
        """The topic, as soon as the brokers know it and each partition has a leader.

        Raises:
            UnavailableError: not before ``deadline``.
            AuthorizationError: it may not be described.
        """
        while (found := self.shape(name, deadline)) is None or not found.led:
            if deadline.expired:
                seen = "no broker knows it" if found is None else "a partition has no leader"
                raise unreachable(
                    self._bootstrap,
                    deadline.budget_seconds * 1000,
                    f"topic {name!r} was created and {seen}",
                )
            self._pause.wait(min(_PAUSE_SECONDS, deadline.remaining_seconds()))
        return found

    def _ask(self, doing: str, ask: Callable[[float], T], deadline: Deadline) -> T:
        """``ask``, repeated while it fails for a reason that may pass."""
        while True:
            try:
                answer = ask(max(0.5, deadline.remaining_seconds(_REQUEST_SECONDS)))
                self._login_refused = None
                return answer
            except KafkaException as failure:
                if not is_transient(failure):
                    raise classify(failure, doing) from failure
                self._client.poll(0)  # delivers what the client complained about
                if self._login_refused is not None:
                    raise classify(self._login_refused, doing) from failure
                if deadline.expired:
                    raise unreachable(
                        self._bootstrap,
                        deadline.budget_seconds * 1000,
                        f"{doing}: {self._said or kafka_error(failure).str()}",
                    ) from failure
            self._pause.wait(min(_PAUSE_SECONDS, deadline.remaining_seconds()))

    def _answer(self, future: Any) -> Any:
        """What an admin call's future holds; not waited for to its end when the login was refused."""
        while True:
            try:
                return future.result(_LOOK_SECONDS)
            except concurrent.futures.TimeoutError:
                self._client.poll(0)
                if self._login_refused is not None:
                    raise KafkaException(self._login_refused) from None

    def _on_error(self, error: KafkaError) -> None:
        self._said = concealed(error.str())
        if is_login(error):
            self._login_refused = error
