"""Asks brokers about topics: partitions, topic ids and offsets, for queries and for people."""

from __future__ import annotations

import logging
import re
import threading
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, TypeVar

from confluent_kafka import (
    OFFSET_INVALID,
    IsolationLevel,
    KafkaError,
    KafkaException,
    TopicCollection,
)
from confluent_kafka import TopicPartition as ClientTopicPartition
from confluent_kafka import admin as client_admin

from kafka_eos_source.errors import KafkaEosError, OperatorError, UnavailableError
from kafka_eos_source.kafka.admin_client import (
    REQUEST_SECONDS,
    Complaints,
    TryLimit,
    admin_client,
    request,
)
from kafka_eos_source.kafka.failure import START_SECONDS, classify, is_login, is_transient, kafka_error
from kafka_eos_source.kafka.group import GroupOffsets
from kafka_eos_source.kafka.reader import LogEnds
from kafka_eos_source.model import Epochs, GroupOffset, LogEnd, TopicPartition
from kafka_eos_source.runtime.deadline import Deadline
from kafka_eos_source.runtime.retry import Pauses, retry

if TYPE_CHECKING:
    from kafka_eos_source.kafka.cluster import Cluster

_OffsetSpec: Any = client_admin.OffsetSpec  # type: ignore[attr-defined]
_ConfigResource: Any = client_admin.ConfigResource  # type: ignore[attr-defined]
_BROKER: Any = client_admin.ResourceType.BROKER  # type: ignore[attr-defined]

_RETENTION = "offsets.retention.minutes"

T = TypeVar("T")

_log = logging.getLogger(__name__)


_MISSING = frozenset(
    {
        KafkaError.UNKNOWN_TOPIC_OR_PART,
        KafkaError._UNKNOWN_TOPIC,
        KafkaError._UNKNOWN_PARTITION,
        KafkaError.UNKNOWN_TOPIC_ID,
    }
)
#: A leader is being elected, or its high watermark is not up to date yet (KIP-207).
_LEADER_NOT_READY = frozenset(
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
    """Topics as the cluster describes them.

    Attributes:
        partitions: partitions of all topics, sorted.
        ids: topic name → topic id (KIP-516).
        cluster_id: Kafka's id of the cluster.
    """

    partitions: tuple[TopicPartition, ...]
    ids: Mapping[str, str] = field(default_factory=dict)
    cluster_id: str | None = None


class SourceAdmin:
    """Describes the topics of a source cluster. It keeps one client until `close`.

    Args:
        config: librdkafka properties for connecting to the cluster.
        isolation_level: decides what *latest* means: the last stable offset or the high watermark.
        retries: how often a failed request is retried (option ``fetchOffset.numRetries``).
        retry_interval_ms: pause before each retry.
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
        self._wire: Cluster | None = None
        self._complaints = Complaints(config)
        self._known_cluster_id: str | None = None
        #: time limit of the present try
        self._seconds = REQUEST_SECONDS
        self._closed = threading.Event()

    def close(self) -> None:
        """Drops the clients, and ends the current pause between two tries."""
        self._closed.set()
        self._client = None
        if self._wire is not None:
            self._wire.close()
            self._wire = None

    @property
    def complaint(self) -> str:
        """What the client reported since the last answer, without secrets; "" if nothing."""
        return self._complaints.last

    def named(self, topics: Iterable[str]) -> Topics:
        """Describes these topics.

        Raises:
            UnavailableError: if a topic does not exist, or no broker answers.
            AuthorizationError: if the principal may not describe a topic.
        """
        wanted = list(topics)

        return self._ask(
            f"looking up the topics {', '.join(wanted)}", lambda client: self._topics(client, wanted)
        )

    def matching(self, pattern: str) -> Topics:
        """Describes every topic whose name contains a match of ``pattern``, except internal topics.

        Spark's ``subscribePattern`` has the same meaning (``Matcher.find`` in Java).

        Raises:
            UnavailableError: if no broker answers.
        """

        def ask(client: Any) -> Topics:
            listed = client.list_topics(timeout=self._seconds).topics
            names = [name for name, one in listed.items() if one.error is None and re.search(pattern, name)]
            return self._topics(client, names, matched=True)

        return self._ask(f"looking up topics that match {pattern!r}", ask)

    def existing_topic_ids(self, topics: Collection[str]) -> dict[str, str]:
        """Returns the ids (KIP-516) of the topics that exist; a topic that is left out was deleted.

        A broker may not know a topic for a moment, so a missing topic is looked up again before it is left
        out.

        Raises:
            UnavailableError: if no broker answers.
            AuthorizationError: if the principal may not describe a topic.
        """
        return dict(self.existing(topics).ids)

    def existing(self, topics: Collection[str]) -> Topics:
        """Describes the topics that exist, but not the cluster; otherwise as `existing_topic_ids`."""
        retries = self._retries

        def ask(client: Any) -> Topics:
            nonlocal retries
            found = self._describe(client, topics, _MISSING)
            if len(found) < len(set(topics)) and retries > 0:
                retries -= 1
                raise KafkaException(KafkaError(KafkaError.UNKNOWN_TOPIC_OR_PART))
            return _topics_of(found)

        return self._ask(f"looking up the ids of the topics {', '.join(topics)}", ask)

    def _topics(self, client: Any, names: Collection[str], matched: bool = False) -> Topics:
        """Describes topics.

        Args:
            client: the client that sends the request.
            names: names of the topics.
            matched: whether a pattern selected them. Then internal topics, and topics that were deleted in
                the meantime, are left out.
        """
        described = self._describe(client, names, _MISSING if matched else ())
        found = {name: one for name, one in described.items() if not (matched and one.is_internal)}
        return replace(_topics_of(found), cluster_id=self._cluster_id(client))

    def _describe(self, client: Any, names: Collection[str], left_out: Collection[int]) -> dict[str, Any]:
        """Sends one DescribeTopics request; leaves out topics that fail with one of these codes."""
        if not names:
            return {}
        found = {}
        futures = client.describe_topics(TopicCollection(list(names)), request_timeout=self._seconds)
        for name, future in futures.items():
            try:
                found[name] = self._complaints.await_answer(client, future)
            except KafkaException as failure:
                if kafka_error(failure).code() not in left_out:
                    raise
        return found

    def earliest(self, partitions: Collection[TopicPartition]) -> dict[TopicPartition, int]:
        """Returns the first offset in each partition's log."""
        found = self._offsets({tp: _OffsetSpec.earliest() for tp in partitions}, "the earliest offsets")
        return {tp: each.offset for tp, each in found.items()}

    def latest(self, partitions: Collection[TopicPartition]) -> dict[TopicPartition, LogEnd]:
        """Returns the offset up to which a reader may read: the last stable offset or the high watermark.

        Brokers name their own epoch as leader with it, and not that of the last record before it.
        """
        return self._offsets({tp: _OffsetSpec.latest() for tp in partitions}, "the latest offsets")

    def epoch_ends(self, epochs: Epochs, leaders: Epochs | None = None) -> dict[TopicPartition, int]:
        """Returns where a leader epoch ends in the log of each partition's present leader (KIP-320).

        Confluent's client cannot ask this, so it goes through the package's own client.

        Args:
            epochs: epoch of each partition; that of a leader that there was.
            leaders: epochs of the present leaders, as far as they are known; older leaders do not count.

        Returns:
            The first offset of a later epoch, or else the end of the log; -1 = the leader does not know
            whether there was such an epoch.

        Raises:
            UnavailableError: if no broker answers.
            AuthorizationError: if the principal may not describe a topic.
        """
        # the import takes 0.1 s, and leaders change rarely
        from kafka_eos_source.kafka.cluster import Cluster

        if self._wire is None:
            self._wire = Cluster(self._config)
        wire, deadline = self._wire, self._patience()
        topics = sorted({tp.topic for tp in epochs})
        return wire.retried(
            f"looking up the ends of leader epochs of {', '.join(topics)}",
            deadline,
            lambda: wire.epoch_ends(epochs, deadline, leaders),
        )

    def high_watermarks(self, partitions: Collection[TopicPartition]) -> dict[TopicPartition, int]:
        """Returns the end of each log, open transactions included, at any isolation level."""
        found = self._offsets(
            {tp: _OffsetSpec.latest() for tp in partitions},
            "the high watermarks",
            IsolationLevel.READ_UNCOMMITTED,
        )
        return {tp: each.offset for tp, each in found.items()}

    def at_time(self, times_ms: Mapping[TopicPartition, int]) -> dict[TopicPartition, int | None]:
        """Returns the first offset whose timestamp is at or after a time; None = no such record.

        Args:
            times_ms: partition → ms since the epoch.
        """
        found = self._offsets(
            {tp: _OffsetSpec.for_timestamp(at_ms) for tp, at_ms in times_ms.items()}, "the offsets at a time"
        )
        return {tp: None if each.offset < 0 else each.offset for tp, each in found.items()}

    def committed(
        self, group_id: str, partitions: Collection[TopicPartition]
    ) -> dict[TopicPartition, GroupOffset]:
        """Returns a group's committed offsets of these partitions; waits for open transactions (KIP-447).

        Raises:
            UnavailableError: if no coordinator answers, or a transaction stays open for too long.
            AuthorizationError: if the principal may not describe the group.
        """
        return GroupOffsets(self._config).fetch_named(group_id, partitions, self._patience())

    def all_committed(self, group_id: str) -> dict[TopicPartition, GroupOffset]:
        """Returns all offsets of a group that are committed at this moment; ignores open transactions.

        Raises:
            UnavailableError: if no coordinator answers in the time of one request.
            AuthorizationError: if the principal may not describe the group.
        """
        return GroupOffsets(self._config).now(group_id, (), Deadline.after_seconds(REQUEST_SECONDS))[0]

    def offsets_retention_ms(self) -> int:
        """Returns how long brokers keep the offsets of an unused group (``offsets.retention.minutes``), ms.

        Raises:
            AuthorizationError: if the principal may not read the configuration of brokers.
            KafkaEosError: if the broker does not answer, or has no such property.
        """

        def ask(client: Any) -> int:
            described = client.describe_cluster(request_timeout=self._seconds)
            nodes = self._complaints.await_answer(client, described).nodes
            resource = _ConfigResource(_BROKER, str(nodes[0].id))
            (future,) = client.describe_configs([resource], request_timeout=self._seconds).values()
            found = self._complaints.await_answer(client, future).get(_RETENTION)
            if found is None:
                raise OperatorError(f"broker {nodes[0].id} does not report its property {_RETENTION!r}.")
            return int(found.value) * 60_000

        return self._ask(f"looking up the brokers' {_RETENTION}", ask)

    def _offsets(
        self, specs: Mapping[TopicPartition, Any], what: str, isolation: IsolationLevel | None = None
    ) -> dict[TopicPartition, LogEnd]:
        if not specs:
            return {}

        def ask(client: Any) -> dict[TopicPartition, LogEnd]:
            futures = client.list_offsets(
                {ClientTopicPartition(tp.topic, tp.partition): spec for tp, spec in specs.items()},
                isolation_level=self._isolation if isolation is None else isolation,
                request_timeout=self._seconds,
            )
            found = {}
            for tp, future in futures.items():
                answer = self._complaints.await_answer(client, future)
                epoch = -1 if answer.leader_epoch is None else answer.leader_epoch
                found[TopicPartition(tp.topic, tp.partition)] = LogEnd(answer.offset, epoch)
            if any(each.offset == OFFSET_INVALID for each in found.values()):
                # while a leader is elected, brokers may answer with neither an offset nor an error
                raise KafkaException(KafkaError(KafkaError.OFFSET_NOT_AVAILABLE))
            return found

        topics = sorted({tp.topic for tp in specs})
        return self._ask(f"looking up {what} of {', '.join(topics)}", ask)

    def _cluster_id(self, client: Any) -> str | None:
        if self._known_cluster_id is None:
            described = client.describe_cluster(request_timeout=self._seconds)
            self._known_cluster_id = self._complaints.await_answer(client, described).cluster_id
        return self._known_cluster_id

    def _ask(self, doing: str, ask: Callable[[Any], T]) -> T:
        """Calls ``ask`` and retries temporary failures, each time with a new client.

        A broker reports at once that a leader is not ready, and the first requests have little time, so the
        number of such failures means little. They are retried for as long as that many requests without any
        answer would take. A topic that brokers do not know counts apart from other failures.
        """
        patience, soon, limit = self._patience(), Deadline.after_seconds(START_SECONDS), TryLimit()
        failures: Counter[bool] = Counter()

        def call() -> T:
            self._seconds = limit.seconds()
            if self._client is None:
                config = {**self._config, "error_cb": self._complaints.on_error}
                self._client = admin_client(config)
            return ask(self._client)

        def permanent(failure: KafkaException) -> KafkaEosError | None:
            error = kafka_error(failure)
            is_missing = error.code() in _MISSING
            if is_login(error):
                self._complaints.on_error(error)
            elif not (is_missing or is_transient(error)):
                return classify(error, doing, self._complaints.secrets)
            self._client.poll(0)  # runs the error callback
            for_good = self._complaints.permanent_login_error(doing) or self._complaints.start_error(
                doing, failure, soon
            )
            if for_good is not None:
                return for_good
            failures[is_missing] += 1
            means_little = error.code() in _LEADER_NOT_READY or error.code() == KafkaError._TIMED_OUT
            if failures[is_missing] > self._retries and (not means_little or patience.expired):
                return (
                    self._complaints.login_error(doing)
                    or self._complaints.explanation(doing, error)
                    or self._unavailable(error, doing, is_missing, failures.total())
                )
            if not is_missing:
                self._client = None
            return None

        pauses = Pauses(None, self._retry_interval_seconds, sleep=self._closed.wait)
        answer = retry(call, KafkaException, pauses, permanent=permanent)
        self._client.poll(0)  # logs what librdkafka has logged
        self._complaints.answered()
        self._complaints.forget()
        return answer

    def _patience(self) -> Deadline:
        """Returns the time that all tries of a request take if no broker answers."""
        return Deadline.after_seconds((self._retries + 1) * (REQUEST_SECONDS + self._retry_interval_seconds))

    def _unavailable(self, error: KafkaError, doing: str, is_missing: bool, tries: int) -> UnavailableError:
        tried = f"{doing}: {self._complaints.secrets.hide(error.str())} ({error.name()}), tried {tries} times"
        if is_missing:
            return UnavailableError(f"{tried}.", fix="create the topic, or correct its name.")
        servers = self._config.get("bootstrap.servers")
        reported = f" Last report: {self._complaints.last}." if self._complaints.last else ""
        return UnavailableError(
            f"no answer from Kafka at kafka.bootstrap.servers={servers!r}: {tried}.{reported}",
            fix="check the addresses, that the brokers run, and that kafka.security.protocol matches theirs; "
            "the options fetchOffset.numRetries and fetchOffset.retryIntervalMs set how long to retry.",
        )


def _topics_of(described: Mapping[str, Any]) -> Topics:
    """Returns the topics that an answer to DescribeTopics describes, by name."""
    partitions = [TopicPartition(name, each.id) for name, one in described.items() for each in one.partitions]
    return Topics(tuple(sorted(partitions)), {name: str(one.topic_id) for name, one in described.items()})


# -- for people ---------------------------------------------------------------------------------

_REQUEST_SECONDS = 5.0
_PAUSE_SECONDS = 0.1
_ADMIN_RETRIES = 1
_ADMIN_PAUSE_MS = 200


def metadata(config: Mapping[str, Any], complaints: Complaints, deadline: Deadline) -> Any:
    """Returns the cluster's metadata, as `confluent_kafka.admin.ClusterMetadata`.

    Args:
        config: librdkafka properties for connecting to the cluster.
        complaints: collects what the client reports.
        deadline: limits the wait for the brokers.

    Raises:
        InvalidOptionError: if librdkafka rejects the combination of properties.
        UnavailableError: if no broker answers before ``deadline``.
        AuthorizationError: if a broker refuses the credentials.
    """
    client = admin_client({**config, "error_cb": complaints.on_error})
    return request(
        "reading the cluster's metadata",
        lambda seconds: client.list_topics(timeout=seconds),
        deadline,
        complaints,
        str(config.get("bootstrap.servers", "")),
        poll=client.poll,
        pause_seconds=_PAUSE_SECONDS,
        request_seconds=_REQUEST_SECONDS,
        starts=True,
    )


class ClusterReader:
    """Reads metadata, group offsets and log ends of one cluster; a context manager.

    Args:
        config: librdkafka properties for connecting to the cluster.
    """

    def __init__(self, config: Mapping[str, Any]) -> None:
        self._config = dict(config)
        self._complaints = Complaints(config)
        self._admin = SourceAdmin(config, "read_committed", _ADMIN_RETRIES, _ADMIN_PAUSE_MS)

    def __enter__(self) -> ClusterReader:
        return self

    def __exit__(self, *_error: object) -> None:
        self._admin.close()

    def topics(self, deadline: Deadline) -> tuple[str, Mapping[str, int]]:
        """Returns the cluster's id, and the partition count of every topic that the principal may see.

        Raises:
            InvalidOptionError: if librdkafka rejects the combination of properties.
            UnavailableError: if no broker answers before ``deadline``.
            AuthorizationError: if a broker refuses the credentials.
        """
        found = metadata(self._config, self._complaints, deadline)
        return found.cluster_id, {
            name: len(topic.partitions) for name, topic in found.topics.items() if topic.error is None
        }

    def group(
        self, group_id: str, certainly: Collection[TopicPartition], deadline: Deadline
    ) -> tuple[Mapping[TopicPartition, GroupOffset], bool]:
        """Returns the group's committed offsets as `GroupOffsets.now` does."""
        return GroupOffsets(self._config).now(group_id, certainly, deadline)

    def topic_ids(self, topics: Collection[str]) -> Mapping[str, str]:
        """Returns topic ids (KIP-516). Raises the same errors as `SourceAdmin.named`."""
        return self._admin.named(sorted(topics)).ids if topics else {}

    def epoch_ends(self, epochs: Epochs) -> dict[TopicPartition, int]:
        """Returns where leader epochs end. Raises the same errors as `SourceAdmin.epoch_ends`."""
        return self._admin.epoch_ends(epochs)

    def logs(self, partitions: Collection[TopicPartition]) -> dict[TopicPartition, LogEnds]:
        """Returns where each log begins and ends.

        Raises:
            UnavailableError: if a partition does not exist or has no leader, or no broker answers.
            AuthorizationError: if the principal may not describe a topic.
        """
        earliest = self._admin.earliest(partitions)
        end = self._admin.high_watermarks(partitions)
        # the stable offset last: otherwise records that arrive in between would look like an open transaction
        stable = self._admin.latest(partitions)
        return {tp: LogEnds(earliest[tp], stable[tp].offset, end[tp]) for tp in partitions}
