"""Reads the committed offsets of consumer groups and the metadata stored with them; deletes groups.

OffsetFetch asks for stable offsets (KIP-447). The coordinator writes the offsets of one TxnOffsetCommit
request as one record batch. It refuses the whole request if that batch is larger than ``max.message.bytes``
of the topic ``__consumer_offsets``. A transaction may contain several such requests.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any, TypeVar

from kafka.protocol.consumer import OffsetFetchRequest

from kafka_eos_source.errors import AbortableError, KafkaEosError, OperatorError, UnavailableError
from kafka_eos_source.kafka.admin_client import AdminClient, Complaints, request
from kafka_eos_source.kafka.cluster import GROUP, Cluster, TemporaryError
from kafka_eos_source.kafka.connection import Connection
from kafka_eos_source.kafka.error_codes import ErrorCode, KafkaError
from kafka_eos_source.kafka.failure import named_partitions
from kafka_eos_source.model import GroupOffset, TopicPartition
from kafka_eos_source.runtime.deadline import Deadline, Pauses

_PAUSE_SECONDS = 0.05

_NOTHING_TO_DELETE = (ErrorCode.GROUP_ID_NOT_FOUND, ErrorCode.INVALID_GROUP_ID)


class GroupOffsets:
    """Reads and deletes the offsets of consumer groups, with new connections for each call.

    Args:
        config: librdkafka properties for connecting to the cluster.
    """

    def __init__(self, config: Mapping[str, Any]) -> None:
        self._bootstrap = str(config.get("bootstrap.servers", ""))
        self._config = dict(config)
        self._complaints = Complaints(config)

    def fetch(
        self, group_id: str, certainly: Collection[TopicPartition], deadline: Deadline
    ) -> dict[TopicPartition, GroupOffset]:
        """Returns every committed offset of the group, after waiting for open transactions.

        The request asks for stable offsets (``RequireStable``, KIP-447). The broker checks for open
        transactions only the partitions that the request names and those that have an older offset. Hence
        the argument ``certainly``.

        Args:
            group_id: the group; a group that does not exist has no offsets.
            certainly: partitions whose pending offsets must not be overlooked.
            deadline: for the offsets to become stable. A time-out is an error, never "no offset".

        Returns:
            The offsets; a partition that has none is absent.

        Raises:
            UnavailableError: if no coordinator answers, or a transaction is still open, at ``deadline``.
            AuthorizationError: if the principal may not describe the group.
        """
        with self._cluster() as cluster:
            found = self._stable(cluster, group_id, None, deadline)
            # partitions that have an offset were already checked for an open transaction
            missing = [tp for tp in certainly if tp not in found]
            if missing:
                found.update(self._stable(cluster, group_id, missing, deadline))
            return found

    def fetch_named(
        self, group_id: str, partitions: Collection[TopicPartition], deadline: Deadline
    ) -> dict[TopicPartition, GroupOffset]:
        """Returns the group's offsets of these partitions, after waiting for open transactions.

        Raises:
            UnavailableError, AuthorizationError: under the same conditions as `fetch`.
        """
        if not partitions:
            return {}
        with self._cluster() as cluster:
            return self._stable(cluster, group_id, partitions, deadline)

    def now(
        self, group_id: str, certainly: Collection[TopicPartition], deadline: Deadline
    ) -> tuple[dict[TopicPartition, GroupOffset], bool]:
        """Returns what is committed at this moment, to show to people. Decisions need `fetch`.

        Returns:
            The offsets, and whether an open transaction is about to change them.

        Raises:
            UnavailableError, AuthorizationError: under the same conditions as `fetch`.
        """
        found: dict[TopicPartition, GroupOffset] = {}
        pending = False
        with self._cluster() as cluster:
            for partitions in (None, certainly) if certainly else (None,):
                offsets = stable_offsets(cluster, group_id, partitions, deadline)
                if offsets is None:
                    pending = True
                    offsets = committed_offsets(cluster, group_id, partitions, deadline)
                found.update(offsets)
        return found, pending

    def committed_now(
        self, group_id: str, certainly: Collection[TopicPartition], deadline: Deadline
    ) -> dict[TopicPartition, GroupOffset]:
        """Returns what is committed at this moment for these partitions; ignores open transactions.

        Raises:
            UnavailableError, AuthorizationError: under the same conditions as `fetch`.
        """
        with self._cluster() as cluster:
            return committed_offsets(cluster, group_id, certainly, deadline)

    def proved(
        self, group_id: str, partitions: Collection[TopicPartition], deadline: Deadline
    ) -> dict[TopicPartition, GroupOffset]:
        """Returns what is committed now, from a coordinator that knows of the caller's transaction.

        Call it while a transaction is open that has sent an offset of one of the partitions
        (`proved_offsets`).

        Raises:
            UnavailableError, AuthorizationError: under the same conditions as `fetch`.
        """
        with self._cluster() as cluster:
            return proved_offsets(cluster, group_id, partitions, deadline)

    def members(self, group_id: str, deadline: Deadline) -> list[str]:
        """Returns client id and host of each member of the group; a group that does not exist has none.

        The request finds the members of classic groups and those of the consumer protocol (KIP-848). Members
        of share groups are not found; Kafka itself commits no offsets to a share group.

        Raises:
            UnavailableError: if no coordinator answers before ``deadline``.
            AuthorizationError: if the principal may not describe the group.
        """
        client = AdminClient(self._config)

        def send(seconds: float) -> list[str]:
            try:
                found = client.group(group_id, seconds)
            except KafkaError as error:
                if error.code == ErrorCode.TOPIC_AUTHORIZATION_FAILED:
                    return ["a member that reads topics which this principal may not describe"]
                raise
            return [f"client.id={client_id!r} at {host.lstrip('/')}" for client_id, host in found.members]

        doing = f"reading the members of group {group_id!r}"
        return request(doing, send, deadline, self._complaints, self._bootstrap)

    def delete_group(self, group_id: str, deadline: Deadline) -> None:
        """Deletes the group if it exists.

        Raises:
            UnavailableError: if no coordinator answers before ``deadline``.
            AuthorizationError: if the principal may not delete the group.
        """
        client = AdminClient(self._config)

        def send(seconds: float) -> None:
            try:
                client.delete_group(group_id, seconds)
            except KafkaError as error:
                if error.code not in _NOTHING_TO_DELETE:
                    raise

        request(f"deleting group {group_id!r}", send, deadline, self._complaints, self._bootstrap)

    @contextmanager
    def _cluster(self) -> Iterator[Cluster]:
        from kafka_eos_source.kafka.cluster import Cluster

        cluster = Cluster(self._config)
        try:
            yield cluster
        finally:
            cluster.close()

    def _stable(
        self,
        cluster: Cluster,
        group_id: str,
        partitions: Collection[TopicPartition] | None,
        deadline: Deadline,
    ) -> dict[TopicPartition, GroupOffset]:
        """Returns the group's offsets after waiting for open transactions; None = all partitions."""
        pauses = Pauses(deadline, _PAUSE_SECONDS)
        while (found := stable_offsets(cluster, group_id, partitions, deadline)) is None:
            if pauses.expired:
                raise UnavailableError(
                    f"{doing(group_id, partitions)}: a transaction that changes these offsets is not "
                    f"finished (UNSTABLE_OFFSET_COMMIT); waited {deadline.budget_seconds:.0f} s.",
                    fix="if another driver of this query runs, wait for it or stop it. If none runs and a "
                    "restart does not help, the brokers have lost track of the transaction: see 'Hanging "
                    "transactions' in docs/runbooks.md.",
                )
            pauses.wait()
        return found


# -- requests -----------------------------------------------------------------------------------

T = TypeVar("T")

#: Version 7 can ask for stable offsets; version 8 names several groups (KIP-709).
_LOWEST, _HIGHEST = 7, 8
_NAMES_GROUPS = 8

#: How long a request may take at least. A caller that waits for the end of a transaction until its deadline
#: asks once more then, and must hear that the transaction is open, rather than nothing.
_LEAST_SECONDS = 1.0

#: An open transaction is about to change the offset.
_PENDING: int = ErrorCode.UNSTABLE_OFFSET_COMMIT
#: The right coordinator answers like this while it loads the group's offsets.
_LOADING = ErrorCode.COORDINATOR_LOAD_IN_PROGRESS
#: The topic in which group coordinators store committed offsets.
OFFSETS_TOPIC = "__consumer_offsets"
#: Largest record batch that one request may cause: half of Kafka's default of ``max.message.bytes``.
LIMIT_BYTES = 512 << 10
#: Bytes of the fields of fixed size, rounded up: versions and lengths, partition, offset, leader epoch, topic
#: id and timestamp (54 bytes with librdkafka's null byte), and the record's own header (14).
_FIXED_BYTES = 72
#: Kafka's default of ``max.message.bytes``.
_OFFSETS_TOPIC_BYTES = 1_048_588
#: Longest time to look for the reason of a refusal.
_SOON_SECONDS = 5.0
#: Returns a property of a topic: topic, property, deadline.
TopicProperty = Callable[[str, str, Deadline], str]


def stable_offsets(
    cluster: Cluster, group_id: str, partitions: Collection[TopicPartition] | None, deadline: Deadline
) -> dict[TopicPartition, GroupOffset] | None:
    """Returns the committed offsets of a group, unless an open transaction is about to change one of them.

    The request has ``RequireStable``. The broker checks for open transactions only the partitions that the
    request names, or that have an older offset.

    Args:
        cluster: the brokers.
        group_id: the group; a group that does not exist has no offsets.
        partitions: the partitions to ask for; None = all that have an offset.
        deadline: for the answer of the group coordinator.

    Returns:
        The offsets, without partitions that have none; None = an open transaction is about to change one of
        them.

    Raises:
        UnavailableError: if no coordinator answers before ``deadline``.
        AuthorizationError: if the principal may not describe the group, or the login is refused.
    """
    return _fetched(cluster, group_id, partitions, deadline, stable=True)


def committed_offsets(
    cluster: Cluster, group_id: str, partitions: Collection[TopicPartition] | None, deadline: Deadline
) -> dict[TopicPartition, GroupOffset]:
    """Returns the offsets that are committed at this moment, whatever open transactions are about to change.

    The arguments and errors are those of `stable_offsets`.
    """
    return _fetched(cluster, group_id, partitions, deadline, stable=False) or {}


def proved_offsets(
    cluster: Cluster, group_id: str, partitions: Collection[TopicPartition], deadline: Deadline
) -> dict[TopicPartition, GroupOffset]:
    """Returns the offsets that are committed at this moment, from a coordinator that is certainly up to date.

    A transaction of the caller must be open that has sent an offset of one of the partitions. A coordinator
    that is cut off from the other brokers answers with old offsets, and does not know of this transaction.

    The arguments and errors are those of `stable_offsets`.
    """

    def ask(connection: Connection) -> dict[TopicPartition, GroupOffset]:
        asked = partial(_asked, cluster, connection, group_id, partitions, deadline)
        if asked(stable=True) is not None:
            cluster.metadata((), deadline)  # for the addresses of brokers that may know another coordinator
            raise TemporaryError(
                f"broker {connection.address} does not know the open transaction, so that it is not the "
                f"coordinator of group {group_id!r}, or not any more"
            )
        return asked(stable=False) or {}

    return _of_coordinator(cluster, group_id, partitions, deadline, ask)


def doing(group_id: str, partitions: Collection[TopicPartition] | None) -> str:
    """Returns what a request for these offsets does, for messages."""
    of_partitions = f" for {named_partitions(partitions)}" if partitions else ""
    return f"reading the offsets of group {group_id!r}{of_partitions}"


def _fetched(
    cluster: Cluster,
    group_id: str,
    partitions: Collection[TopicPartition] | None,
    deadline: Deadline,
    *,
    stable: bool,
) -> dict[TopicPartition, GroupOffset] | None:
    if deadline.remaining_seconds() < _LEAST_SECONDS:
        deadline = Deadline.after_seconds(_LEAST_SECONDS)

    def ask(connection: Connection) -> dict[TopicPartition, GroupOffset] | None:
        return _asked(cluster, connection, group_id, partitions, deadline, stable=stable)

    return _of_coordinator(cluster, group_id, partitions, deadline, ask)


def _of_coordinator(
    cluster: Cluster,
    group_id: str,
    partitions: Collection[TopicPartition] | None,
    deadline: Deadline,
    ask: Callable[[Connection], T],
) -> T:
    """Calls ``ask`` with the coordinator, and after a failure with the one that another broker names."""

    def once() -> T:
        try:
            return ask(cluster.coordinator(GROUP, group_id, deadline))
        except TemporaryError:
            cluster.forget_coordinator(GROUP, group_id)
            raise
        except KafkaError as failure:
            if failure.code != _LOADING:
                cluster.forget_coordinator(GROUP, group_id)
            raise

    return cluster.retried(doing(group_id, partitions), deadline, once)


def _asked(
    cluster: Cluster,
    connection: Connection,
    group_id: str,
    partitions: Collection[TopicPartition] | None,
    deadline: Deadline,
    *,
    stable: bool,
) -> dict[TopicPartition, GroupOffset] | None:
    version = connection.version(OffsetFetchRequest, _HIGHEST, _LOWEST)
    request = _request(version, group_id, partitions, stable=stable)
    try:
        return _offsets(cluster.ask(connection, request, deadline), version, group_id, partitions)
    except KafkaError as failure:
        if stable and failure.code == _PENDING:
            return None
        raise


def _request(
    version: int, group_id: str, partitions: Collection[TopicPartition] | None, *, stable: bool
) -> OffsetFetchRequest:
    of_group = version >= _NAMES_GROUPS
    kind = OffsetFetchRequest.OffsetFetchRequestGroup if of_group else OffsetFetchRequest
    name_topic = kind.OffsetFetchRequestTopics if of_group else kind.OffsetFetchRequestTopic
    topics = None
    if partitions is not None:
        by_topic: dict[str, list[int]] = {}
        for tp in partitions:
            by_topic.setdefault(tp.topic, []).append(tp.partition)
        topics = [
            name_topic(name=name, partition_indexes=numbers, version=version)
            for name, numbers in by_topic.items()
        ]
    if of_group:
        groups = [kind(group_id=group_id, topics=topics, version=version)]
        return OffsetFetchRequest(groups=groups, require_stable=stable, version=version)
    return OffsetFetchRequest(group_id=group_id, topics=topics, require_stable=stable, version=version)


def _offsets(
    answer: Any, version: int, group_id: str, partitions: Collection[TopicPartition] | None
) -> dict[TopicPartition, GroupOffset]:
    """Returns the offsets in an answer.

    Raises:
        KafkaError: with the first error in it.
        TemporaryError: if it does not mention what was asked for.
    """
    if version >= _NAMES_GROUPS:
        found = next((each for each in answer.groups or () if each.group_id == group_id), None)
        if found is None:
            raise TemporaryError(f"the coordinator's answer does not mention group {group_id!r}")
        answer = found
    if answer.error_code == ErrorCode.GROUP_ID_NOT_FOUND:
        return {}
    _check(answer.error_code)
    offsets, mentioned = {}, set()
    for topic in answer.topics or ():
        for each in topic.partitions or ():
            _check(each.error_code)
            tp = TopicPartition(topic.name, each.partition_index)
            mentioned.add(tp)
            if each.committed_offset >= 0:
                # librdkafka ends the metadata that it commits with a NUL
                metadata = (each.metadata or "").rstrip("\0")
                offsets[tp] = GroupOffset(tp, each.committed_offset, metadata, each.committed_leader_epoch)
    for tp in set(partitions or ()) - mentioned:
        raise TemporaryError(f"the coordinator's answer does not mention {tp}")
    return offsets


def _check(code: int) -> None:
    if code:
        raise KafkaError(code)


def split(
    offsets: Iterable[GroupOffset], group_id: str, limit_bytes: int = LIMIT_BYTES
) -> Iterator[list[GroupOffset]]:
    """Yields the offsets, in order, in lists that the coordinator can store as one record batch each.

    Args:
        offsets: offsets that one transaction commits.
        group_id: the group.
        limit_bytes: largest record batch. An offset that alone is larger forms a list of its own.
    """
    request: list[GroupOffset] = []
    size = 0
    for each in offsets:
        added = record_bytes(each, group_id)
        if request and size + added > limit_bytes:
            yield request
            request, size = [], 0
        request.append(each)
        size += added
    if request:
        yield request


def record_bytes(offset: GroupOffset, group_id: str) -> int:
    """Returns an upper bound of the bytes that one committed offset takes in the coordinator's log."""
    text = group_id, offset.tp.topic, offset.metadata
    return _FIXED_BYTES + sum(len(each.encode()) for each in text)


_log = logging.getLogger(__name__)


def send_in_parts(
    topic_property: TopicProperty,
    offsets: Collection[GroupOffset],
    group_id: str,
    deadline: Deadline,
    send: Callable[[Collection[GroupOffset], str, Deadline], None],
) -> None:
    """Sends offsets in requests that are small enough for one record batch in the coordinator's log.

    All requests belong to the transaction, so a producer that dies between two of them commits none.

    Args:
        topic_property: returns a property of a topic: topic, property, deadline.
        offsets: the offsets that the transaction commits.
        group_id: the group.
        deadline: for all requests.
        send: sends one request: offsets, group, deadline.

    Raises:
        OperatorError: if the coordinator's log does not accept record batches of that size.
        KafkaEosError: what ``send`` raises.
    """
    for part in split(offsets, group_id):
        try:
            send(part, group_id, deadline)
        except AbortableError as error:
            soon = Deadline.after_seconds(deadline.remaining_seconds(_SOON_SECONDS))
            too_large = explain_too_large(topic_property, part, group_id, soon, error)
            if too_large is None:
                raise
            raise too_large from error


def explain_too_large(
    topic_property: TopicProperty,
    offsets: Collection[GroupOffset],
    group_id: str,
    deadline: Deadline,
    error: KafkaEosError,
) -> OperatorError | None:
    """Explains an "unknown server error" of a coordinator whose log accepts only small record batches.

    A coordinator that cannot write a request because it is too large answers with that error and gives no
    reason. No retry mends it.

    Args:
        topic_property: returns a property of a topic.
        offsets: the offsets of the request.
        group_id: the group.
        deadline: for reading the log's limit.
        error: the error of the request; its cause is the client's error.

    Returns:
        The error to raise; None if the cause is another one, or the log's limit cannot be read.
    """
    cause = error.__cause__
    if not isinstance(cause, KafkaError) or cause.code != ErrorCode.UNKNOWN_SERVER_ERROR:
        return None
    size = sum(record_bytes(each, group_id) for each in offsets)
    name = OFFSETS_TOPIC
    try:
        limit = int(topic_property(name, "max.message.bytes", deadline))
    except (KafkaEosError, ValueError) as unknown:
        _log.warning("cannot read max.message.bytes of topic %s: %s", name, unknown)
        return None
    if size <= limit:
        return None
    return OperatorError(
        f"the coordinator of group {group_id!r} refused {len(offsets):,} offsets (up to {size:,} bytes) "
        f"because topic {name!r} has max.message.bytes={limit}. {error.message}",
        fix=f"raise max.message.bytes of {name!r} to {_OFFSETS_TOPIC_BYTES} (Kafka's default), then "
        "restart the query. Nothing of this transaction was committed.",
    )
