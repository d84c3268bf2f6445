"""Asks brokers about topics: partitions, topic ids and offsets, for queries and for people."""

from __future__ import annotations

import re
import threading
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

from kafka_eos_source.errors import KafkaEosError, OperatorError, UnavailableError
from kafka_eos_source.kafka.admin_client import (
    NAMES_SECONDS,
    REQUEST_SECONDS,
    AdminClient,
    Complaints,
    Everything,
    Topic,
    TryLimit,
    request,
)
from kafka_eos_source.kafka.error_codes import ErrorCode, KafkaError
from kafka_eos_source.kafka.failure import (
    FIRST_SECONDS,
    MISSING_TOPIC_FIX,
    START_SECONDS,
    MissingTopicError,
    classify,
    is_login,
    is_transient,
    missing_topic,
)
from kafka_eos_source.kafka.group import GroupOffsets
from kafka_eos_source.kafka.messages import EARLIEST, LATEST
from kafka_eos_source.kafka.reader import LogEnds
from kafka_eos_source.model import Epochs, GroupOffset, LogEnd, TopicPartition
from kafka_eos_source.runtime.deadline import Deadline, Pauses, retry

_RETENTION = "offsets.retention.minutes"

T = TypeVar("T")

_MISSING = frozenset({ErrorCode.UNKNOWN_TOPIC_OR_PARTITION, ErrorCode.UNKNOWN_TOPIC_ID})
#: A leader is being elected, or its high watermark is not up to date yet (KIP-207).
_LEADER_NOT_READY = frozenset(
    {
        ErrorCode.LEADER_NOT_AVAILABLE,
        ErrorCode.NOT_LEADER_OR_FOLLOWER,
        ErrorCode.OFFSET_NOT_AVAILABLE,
        ErrorCode.FENCED_LEADER_EPOCH,
        ErrorCode.UNKNOWN_LEADER_EPOCH,
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
        self._committed = isolation_level == "read_committed"
        self._retries = retries
        self._retry_interval_seconds = retry_interval_ms / 1000
        self._client: AdminClient | None = None
        self._complaints = Complaints(config)
        self._known_cluster_id: str | None = None
        #: time limit of the present try
        self._seconds = REQUEST_SECONDS
        self._closed = threading.Event()
        #: when a new query gives up, if no broker has answered it; None = a query that waits for its brokers
        self._first: Deadline | None = None

    def close(self) -> None:
        """Drops the client, and ends the current pause between two tries."""
        self._closed.set()
        self._client = None

    def new_query(self) -> None:
        """Says that the next request is the first of a new query, unless a broker has answered one before.

        It fails after `FIRST_SECONDS` if no broker answers, because a person waits for it, and the address
        may be wrong. A query that has run waits for its brokers as long as its options say.
        """
        if not self._complaints.has_answered:
            self._first = Deadline.after_seconds(FIRST_SECONDS)

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

        def ask(client: AdminClient) -> Topics:
            names = [name for name in client.everything(self._seconds).topics if re.search(pattern, name)]
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

        def ask(client: AdminClient) -> Topics:
            nonlocal retries
            found = self._describe(client, topics, _MISSING)
            if len(found) < len(set(topics)) and retries > 0:
                retries -= 1
                raise KafkaError(ErrorCode.UNKNOWN_TOPIC_OR_PARTITION)
            return _topics_of(found)

        return self._ask(f"looking up the ids of the topics {', '.join(topics)}", ask)

    def _topics(self, client: AdminClient, names: Collection[str], matched: bool = False) -> Topics:
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

    def _describe(
        self, client: AdminClient, names: Collection[str], left_out: Collection[int]
    ) -> dict[str, Topic]:
        """Describes topics; leaves out those that fail with one of these codes."""
        if not names:
            return {}
        found = {}
        for name, each in client.topics(names, self._seconds).items():
            if isinstance(each, Topic):
                found[name] = each
            elif each.code not in left_out:
                raise MissingTopicError(name) if each.code in _MISSING else each
        return found

    def earliest(self, partitions: Collection[TopicPartition]) -> dict[TopicPartition, int]:
        """Returns the first offset in each partition's log."""
        found = self._offsets(dict.fromkeys(partitions, EARLIEST), "the earliest offsets")
        return {tp: each.offset for tp, each in found.items()}

    def latest(self, partitions: Collection[TopicPartition]) -> dict[TopicPartition, LogEnd]:
        """Returns the offset up to which a reader may read: the last stable offset or the high watermark.

        Brokers name their own epoch as leader with it, and not that of the last record before it.
        """
        return self._offsets(dict.fromkeys(partitions, LATEST), "the latest offsets")

    def epoch_ends(self, epochs: Epochs, leaders: Epochs | None = None) -> dict[TopicPartition, int]:
        """Returns where a leader epoch ends in the log of each partition's present leader (KIP-320).

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
        topics = sorted({tp.topic for tp in epochs})
        return self._ask(
            f"looking up the ends of leader epochs of {', '.join(topics)}",
            lambda client: client.epoch_ends(epochs, self._seconds, leaders),
        )

    def high_watermarks(self, partitions: Collection[TopicPartition]) -> dict[TopicPartition, int]:
        """Returns the end of each log, open transactions included, at any isolation level."""
        found = self._offsets(dict.fromkeys(partitions, LATEST), "the high watermarks", committed=False)
        return {tp: each.offset for tp, each in found.items()}

    def at_time(self, times_ms: Mapping[TopicPartition, int]) -> dict[TopicPartition, int | None]:
        """Returns the first offset whose timestamp is at or after a time; None = no such record.

        Args:
            times_ms: partition → ms since the epoch.
        """
        found = self._offsets(times_ms, "the offsets at a time")
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

        def ask(client: AdminClient) -> int:
            node = client.cluster(self._seconds)[1][0]
            found = client.broker_config(node, self._seconds).get(_RETENTION)
            if found is None:
                raise OperatorError(f"broker {node} does not report its property {_RETENTION!r}.")
            return int(found.value) * 60_000

        return self._ask(f"looking up the brokers' {_RETENTION}", ask)

    def _offsets(
        self, times: Mapping[TopicPartition, int], what: str, *, committed: bool | None = None
    ) -> dict[TopicPartition, LogEnd]:
        if not times:
            return {}

        def ask(client: AdminClient) -> dict[TopicPartition, LogEnd]:
            found = client.offsets_at(
                times, self._seconds, committed=self._committed if committed is None else committed
            )
            if any(each.offset < 0 and times[tp] < 0 for tp, each in found.items()):
                # while a leader is elected, brokers may answer with neither an offset nor an error
                raise KafkaError(ErrorCode.OFFSET_NOT_AVAILABLE)
            return found

        topics = sorted({tp.topic for tp in times})
        return self._ask(f"looking up {what} of {', '.join(topics)}", ask)

    def _cluster_id(self, client: AdminClient) -> str | None:
        if self._known_cluster_id is None:
            self._known_cluster_id = client.cluster(self._seconds)[0] or None
        return self._known_cluster_id

    def _ask(self, doing: str, ask: Callable[[AdminClient], T]) -> T:
        """Calls ``ask`` and retries temporary failures, each time with a new client.

        A broker reports at once that a leader is not ready, and the first requests have little time, so the
        number of such failures means little. They are retried for as long as that many requests without any
        answer would take. A topic that brokers do not know counts apart from other failures.
        """
        patience, soon, limit = self._patience(), Deadline.after_seconds(START_SECONDS), TryLimit()
        failures: Counter[bool] = Counter()

        def call() -> T:
            self._seconds = limit.seconds(self._first)
            self._client = client = self._client or AdminClient(self._config)
            return ask(client)

        def permanent(error: KafkaError) -> KafkaEosError | None:
            is_missing = error.code in _MISSING
            if not (is_missing or is_login(error) or is_transient(error)):
                return classify(error, doing, self._complaints.secrets)
            self._complaints.record(error)
            for_good = self._complaints.permanent_login_error(doing) or self._complaints.start_error(
                doing, error, soon
            )
            if for_good is not None:
                return for_good
            failures[is_missing] += 1
            means_little = (
                error.code in _LEADER_NOT_READY or error.code == ErrorCode.NO_ANSWER or is_login(error)
            )
            is_over = failures[is_missing] > self._retries and (not means_little or patience.expired)
            is_silent = error.code == ErrorCode.NO_ANSWER
            gives_up = is_silent and self._first is not None and self._first.expired
            if is_over or gives_up:
                return (
                    self._complaints.login_error(doing)
                    or (None if gives_up else self._complaints.explanation(doing, error))
                    or self._unavailable(error, doing, is_missing, failures.total())
                )
            if not is_missing:
                self._client = None
            return None

        pauses = Pauses(None, self._retry_interval_seconds, sleep=self._closed.wait)
        answer = retry(call, KafkaError, pauses, permanent=permanent)
        self._complaints.answered()
        self._complaints.forget()
        self._first = None
        return answer

    def _patience(self) -> Deadline:
        """Returns the time that all tries of a request take if no broker answers."""
        return Deadline.after_seconds((self._retries + 1) * (REQUEST_SECONDS + self._retry_interval_seconds))

    def _unavailable(self, error: KafkaError, doing: str, is_missing: bool, tries: int) -> UnavailableError:
        if isinstance(error, MissingTopicError):
            client = self._client or AdminClient(self._config)
            return missing_topic(doing, error.topic, client.names_if_known(NAMES_SECONDS))
        tried = f"{doing}: {self._complaints.secrets.hide(error.text)} ({error.name}), tried {tries} times"
        if is_missing:
            return UnavailableError(f"{tried}.", fix=MISSING_TOPIC_FIX)
        servers = self._config.get("bootstrap.servers")
        last = self._complaints.last
        reported = f" Last report: {last}." if last and last not in tried else ""
        return UnavailableError(
            f"no answer from Kafka at kafka.bootstrap.servers={servers!r}: {tried}.{reported}",
            fix="check the addresses, that the brokers run, and that kafka.security.protocol matches theirs; "
            "the options fetchOffset.numRetries and fetchOffset.retryIntervalMs set how long to retry.",
        )


def _topics_of(described: Mapping[str, Topic]) -> Topics:
    """Returns the topics that an answer to DescribeTopics describes, by name."""
    partitions = [
        TopicPartition(name, each.number) for name, one in described.items() for each in one.partitions
    ]
    return Topics(tuple(sorted(partitions)), {name: one.topic_id for name, one in described.items()})


# -- for people ---------------------------------------------------------------------------------

_REQUEST_SECONDS = 5.0
_PAUSE_SECONDS = 0.1
_ADMIN_RETRIES = 1
_ADMIN_PAUSE_MS = 200


def metadata(config: Mapping[str, Any], complaints: Complaints, deadline: Deadline) -> Everything:
    """Returns the cluster's brokers and topics.

    Args:
        config: librdkafka properties for connecting to the cluster.
        complaints: collects failures.
        deadline: limits the wait for the brokers.

    Raises:
        UnavailableError: if no broker answers before ``deadline``.
        AuthorizationError: if a broker refuses the credentials.
    """
    client = AdminClient(config)
    return request(
        "reading the cluster's metadata",
        client.everything,
        deadline,
        complaints,
        str(config.get("bootstrap.servers", "")),
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
            UnavailableError: if no broker answers before ``deadline``.
            AuthorizationError: if a broker refuses the credentials.
        """
        found = metadata(self._config, self._complaints, deadline)
        return found.cluster_id, {name: len(topic.partitions) for name, topic in found.topics.items()}

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
