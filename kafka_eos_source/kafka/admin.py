"""What the driver asks the brokers about the topics to be read: which, from where, how far."""

from __future__ import annotations

import concurrent.futures
import logging
import re
import threading
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, TypeVar

from confluent_kafka import (
    OFFSET_INVALID,
    IsolationLevel,
    KafkaError,
    KafkaException,
    TopicCollection,
)
from confluent_kafka import TopicPartition as ClientTopicPartition
from confluent_kafka import admin as client_admin

from kafka_eos_source.errors import OperatorError, UnavailableError
from kafka_eos_source.kafka.clients import make
from kafka_eos_source.kafka.failure import classify, is_login, is_transient, kafka_error
from kafka_eos_source.kafka.group import GroupOffsets
from kafka_eos_source.kafka.secrets import concealed
from kafka_eos_source.model import GroupOffset, TopicPartition
from kafka_eos_source.runtime.deadline import Deadline

_AdminClient: Any = client_admin.AdminClient
_OffsetSpec: Any = client_admin.OffsetSpec  # type: ignore[attr-defined]
_ConfigResource: Any = client_admin.ConfigResource  # type: ignore[attr-defined]
_BROKER: Any = client_admin.ResourceType.BROKER  # type: ignore[attr-defined]

_RETENTION = "offsets.retention.minutes"

T = TypeVar("T")

_log = logging.getLogger(__name__)

#: For one request. Times the retries it bounds how long a query waits for brokers that are not there.
_REQUEST_SECONDS = 10.0
#: How long an answer may take before anybody asks whether the client was let in at all.
_LOOK_SECONDS = 1.0

_MISSING = frozenset(
    {
        KafkaError.UNKNOWN_TOPIC_OR_PART,
        KafkaError._UNKNOWN_TOPIC,
        KafkaError._UNKNOWN_PARTITION,
        KafkaError.UNKNOWN_TOPIC_ID,
    }
)
#: Topics that are not there for us.
_UNSEEN = _MISSING | {KafkaError.TOPIC_AUTHORIZATION_FAILED}
#: A leader is being chosen, or is not ready yet: its high watermark is that of before (KIP-207).
_LEADERS = frozenset(
    {
        KafkaError.LEADER_NOT_AVAILABLE,
        KafkaError.NOT_LEADER_FOR_PARTITION,
        KafkaError.OFFSET_NOT_AVAILABLE,
        KafkaError.FENCED_LEADER_EPOCH,
        KafkaError.UNKNOWN_LEADER_EPOCH,
    }
)


@dataclass(frozen=True)
class Topics:
    """Topics as the cluster shows them.

    Attributes:
        partitions: of all of them, sorted.
        ids: topic ids (KIP-516).
        cluster_id: Kafka's id of the cluster.
    """

    partitions: tuple[TopicPartition, ...]
    ids: Mapping[str, str] = field(default_factory=dict)
    cluster_id: str | None = None


class SourceAdmin:
    """The driver's look at a source cluster. One client, kept until `close`.

    Args:
        config: librdkafka properties that say how to reach the cluster.
        isolation_level: decides what *latest* means: the last stable offset or the high watermark.
        retries: how often a failed look-up is repeated.
        retry_interval_ms: pause before that.
    """

    def __init__(
        self, config: Mapping[str, Any], isolation_level: str, retries: int, retry_interval_ms: int
    ) -> None:
        self._config = dict(config)
        self._isolation = (
            IsolationLevel.READ_COMMITTED
            if isolation_level == "read_committed"
            else IsolationLevel.READ_UNCOMMITTED
        )
        self._retries = retries
        self._retry_interval_seconds = retry_interval_ms / 1000
        self._client: Any = None
        self._said = ""
        self._login_refused: KafkaError | None = None
        self._known_cluster_id: str | None = None
        self._pause = threading.Event()

    def close(self) -> None:
        """Lets the client go."""
        self._pause.set()
        self._client = None

    def named(self, topics: Iterable[str]) -> Topics:
        """These topics.

        Raises:
            UnavailableError: one does not exist, or no broker answers.
            AuthorizationError: one may not be described.
        """
        wanted = list(topics)

        return self._ask(
            f"looking up the topics {', '.join(wanted)}", lambda client: self._describe(client, wanted)
        )

    def ids(self, topics: Iterable[str]) -> Mapping[str, str]:
        """The ids (KIP-516) of these topics; one that does not exist or may not be described is left out.

        Raises:
            UnavailableError: no broker answers.
        """
        wanted = sorted(set(topics))

        def ask(client: Any) -> Mapping[str, str]:
            found: dict[str, str] = {}
            futures = client.describe_topics(TopicCollection(wanted), request_timeout=_REQUEST_SECONDS)
            for name, future in futures.items():
                try:
                    found[name] = str(self._answer(client, future).topic_id)
                except KafkaException as failure:
                    if kafka_error(failure).code() not in _UNSEEN:
                        raise
            return found

        return self._ask(f"looking up the ids of the topics {', '.join(wanted)}", ask) if wanted else {}

    def matching(self, pattern: str) -> Topics:
        """Every topic in whose name ``pattern`` is found (Java's ``find``, as in Spark), but no internal one.

        Raises:
            UnavailableError: no broker answers.
        """

        def ask(client: Any) -> Topics:
            listed = client.list_topics(timeout=_REQUEST_SECONDS).topics
            names = [name for name, one in listed.items() if one.error is None and re.search(pattern, name)]
            return self._describe(client, names, matched=True)

        return self._ask(f"looking up topics that match {pattern!r}", ask)

    def current_ids(self, topics: Collection[str]) -> dict[str, str]:
        """Ids of those of the topics that exist: a topic that is left out was deleted.

        A broker may not know a topic for a moment, so a missing one is asked for again before it is left out.

        Raises:
            UnavailableError: no broker answers.
            AuthorizationError: a topic may not be described.
        """
        missing = 0

        def ask(client: Any) -> dict[str, str]:
            nonlocal missing
            found = self._described(client, topics, leave_out_missing=True)
            if len(found) < len(set(topics)) and missing < self._retries:
                missing += 1
                raise KafkaException(KafkaError(KafkaError.UNKNOWN_TOPIC_OR_PART))
            return {name: str(one.topic_id) for name, one in found.items()}

        return self._ask(f"looking up the topics {', '.join(topics)}", ask)

    def _describe(self, client: Any, names: Collection[str], matched: bool = False) -> Topics:
        """Partitions and ids of topics.

        Args:
            client: asks.
            names: of the topics.
            matched: whether a pattern chose them. Topics that are gone by now, and internal ones, are left
                out then.
        """
        described = self._described(client, names, leave_out_missing=matched)
        found = {name: one for name, one in described.items() if not (matched and one.is_internal)}
        partitions = [TopicPartition(name, p.id) for name, one in found.items() for p in one.partitions]
        ids = {name: str(one.topic_id) for name, one in found.items()}
        return Topics(tuple(sorted(partitions)), ids, self._cluster_id(client))

    def _described(self, client: Any, names: Collection[str], *, leave_out_missing: bool) -> dict[str, Any]:
        found = {}
        if names:
            futures = client.describe_topics(TopicCollection(list(names)), request_timeout=_REQUEST_SECONDS)
            for name, future in futures.items():
                try:
                    topic = self._answer(client, future)
                except KafkaException as failure:
                    if not leave_out_missing or kafka_error(failure).code() not in _MISSING:
                        raise
                    continue
                found[name] = topic
        return found

    def earliest(self, partitions: Collection[TopicPartition]) -> dict[TopicPartition, int]:
        """First offset still there."""
        return self._offsets({tp: _OffsetSpec.earliest() for tp in partitions}, "the earliest offsets")

    def latest(self, partitions: Collection[TopicPartition]) -> dict[TopicPartition, int]:
        """Where a reader may read up to: the last stable offset, or the high watermark."""
        return self._offsets({tp: _OffsetSpec.latest() for tp in partitions}, "the latest offsets")

    def high_watermarks(self, partitions: Collection[TopicPartition]) -> dict[TopicPartition, int]:
        """The log's end, open transactions included, whatever the isolation level."""
        return self._offsets(
            {tp: _OffsetSpec.latest() for tp in partitions},
            "the high watermarks",
            IsolationLevel.READ_UNCOMMITTED,
        )

    def at_time(self, times_ms: Mapping[TopicPartition, int]) -> dict[TopicPartition, int | None]:
        """First offset whose time is at or after the given one (ms since 1970); None = there is none."""
        found = self._offsets(
            {tp: _OffsetSpec.for_timestamp(at_ms) for tp, at_ms in times_ms.items()}, "the offsets at a time"
        )
        return {tp: None if offset < 0 else offset for tp, offset in found.items()}

    def committed(
        self, group_id: str, partitions: Collection[TopicPartition]
    ) -> dict[TopicPartition, GroupOffset]:
        """What a consumer group holds of these partitions; waits for pending transactions (KIP-447).

        Raises:
            UnavailableError: no coordinator answers, or a transaction stays open for too long.
            AuthorizationError: the group may not be described.
        """
        return GroupOffsets(self._config).fetch_named(group_id, partitions, self._patience())

    def offsets_retention_ms(self) -> int:
        """How long a broker keeps the offsets of an unused consumer group (``offsets.retention.minutes``).

        Raises:
            AuthorizationError: the principal may not read the configuration of brokers.
            KafkaEosError: the broker does not answer, or has no such property.
        """

        def ask(client: Any) -> int:
            nodes = self._answer(client, client.describe_cluster(request_timeout=_REQUEST_SECONDS)).nodes
            resource = _ConfigResource(_BROKER, str(nodes[0].id))
            (future,) = client.describe_configs([resource], request_timeout=_REQUEST_SECONDS).values()
            found = self._answer(client, future).get(_RETENTION)
            if found is None:
                raise OperatorError(f"broker {nodes[0].id} has no property {_RETENTION!r}.")
            return int(found.value) * 60_000

        return self._ask(f"looking up the brokers' {_RETENTION}", ask)

    def _offsets(
        self, specs: Mapping[TopicPartition, Any], what: str, isolation: IsolationLevel | None = None
    ) -> dict[TopicPartition, int]:
        if not specs:
            return {}

        def ask(client: Any) -> dict[TopicPartition, int]:
            futures = client.list_offsets(
                {ClientTopicPartition(tp.topic, tp.partition): spec for tp, spec in specs.items()},
                isolation_level=self._isolation if isolation is None else isolation,
                request_timeout=_REQUEST_SECONDS,
            )
            found = {
                TopicPartition(tp.topic, tp.partition): self._answer(client, future).offset
                for tp, future in futures.items()
            }
            if OFFSET_INVALID in found.values():
                # no error and no offset either: seen while a leader is being elected
                raise KafkaException(KafkaError(KafkaError.OFFSET_NOT_AVAILABLE))
            return found

        topics = sorted({tp.topic for tp in specs})
        return self._ask(f"looking up {what} of {', '.join(topics)}", ask)

    def _cluster_id(self, client: Any) -> str | None:
        if self._known_cluster_id is None:
            asked = client.describe_cluster(request_timeout=_REQUEST_SECONDS)
            self._known_cluster_id = self._answer(client, asked).cluster_id
        return self._known_cluster_id

    def _answer(self, client: Any, future: Any) -> Any:
        """What an admin call's future holds; not waited for to its end when the login was refused."""
        while True:
            try:
                return future.result(_LOOK_SECONDS)
            except concurrent.futures.TimeoutError:
                client.poll(0)  # delivers what the client complained about
                if self._login_refused is not None:
                    raise KafkaException(self._login_refused) from None

    def _ask(self, doing: str, ask: Callable[[Any], T]) -> T:
        """``ask``, repeated with a new client while it fails for a reason that may pass.

        A broker answers at once that a leader is not ready, so that many such answers are no sign of a long
        time: they get the time that as many requests without an answer would.
        """
        patience = self._patience()
        tries = 0
        while True:
            if self._client is None:
                self._client = make(_AdminClient, {**self._config, "error_cb": self._on_error}, logger=_log)
            try:
                answer = ask(self._client)
                self._login_refused = None
                return answer
            except KafkaException as failure:
                error = kafka_error(failure)
                missing = error.code() in _MISSING
                if not (missing or is_transient(error)):
                    raise classify(error, doing) from failure
                self._client.poll(0)  # delivers what the client complained about
                if self._login_refused is not None:
                    raise classify(self._login_refused, doing) from failure
                tries += 1
                if tries > self._retries and (error.code() not in _LEADERS or patience.expired):
                    raise self._gave_up(error, doing, missing, tries) from failure
            if not missing:
                self._client = None
            self._pause.wait(self._retry_interval_seconds)

    def _patience(self) -> Deadline:
        """As long as all tries of a request take if the brokers answer none of them."""
        return Deadline.after_seconds((self._retries + 1) * (_REQUEST_SECONDS + self._retry_interval_seconds))

    def _gave_up(self, error: KafkaError, doing: str, missing: bool, tries: int) -> UnavailableError:
        tried = f"{doing}: {concealed(error.str())} ({error.name()}), tried {tries} times"
        if missing:
            return UnavailableError(f"{tried}.", fix="create the topic, or correct its name.")
        servers = self._config.get("bootstrap.servers")
        said = f" Last seen: {self._said}." if self._said else ""
        return UnavailableError(
            f"no answer from Kafka at kafka.bootstrap.servers={servers!r}: {tried}.{said}",
            fix="check the addresses, that the brokers run, and that kafka.security.protocol fits; "
            "fetchOffset.numRetries and fetchOffset.retryIntervalMs say how often it is tried.",
        )

    def _on_error(self, error: KafkaError) -> None:
        self._said = concealed(error.str())
        if is_login(error):
            self._login_refused = error
