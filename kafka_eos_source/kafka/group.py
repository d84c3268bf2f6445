"""Reads the committed offsets of consumer groups and the metadata stored with them; deletes groups."""

from __future__ import annotations

import concurrent.futures
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from confluent_kafka import KafkaError, KafkaException

from kafka_eos_source.errors import UnavailableError
from kafka_eos_source.kafka.clients import admin_client
from kafka_eos_source.kafka.failure import classify, kafka_error, unreachable
from kafka_eos_source.kafka.request import REQUEST_SECONDS, Complaints, request
from kafka_eos_source.model import GroupOffset, TopicPartition
from kafka_eos_source.runtime.deadline import Deadline, Pauses

if TYPE_CHECKING:
    from kafka_eos_source.kafka.wire.cluster import Cluster

_PAUSE_SECONDS = 0.05

#: The time limit of admin calls is not passed to librdkafka. If it passed before librdkafka found the
#: coordinator, and librdkafka found it later, an assertion would kill the process (librdkafka issue 4605).
#: One hour is the longest that it accepts.
_NO_LIMIT_SECONDS = 3600.0

_NOTHING_TO_DELETE = (KafkaError.GROUP_ID_NOT_FOUND, KafkaError.INVALID_GROUP_ID)


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
        from kafka_eos_source.kafka.wire.group_offsets import committed_offsets, stable_offsets

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
        from kafka_eos_source.kafka.wire.group_offsets import committed_offsets

        with self._cluster() as cluster:
            return committed_offsets(cluster, group_id, certainly, deadline)

    def proved(
        self, group_id: str, partitions: Collection[TopicPartition], deadline: Deadline
    ) -> dict[TopicPartition, GroupOffset]:
        """Returns what is committed now, from a coordinator that knows of the caller's transaction.

        Call it while a transaction is open that has sent an offset of one of the partitions
        (`wire.group_offsets.proved_offsets`).

        Raises:
            UnavailableError, AuthorizationError: under the same conditions as `fetch`.
        """
        from kafka_eos_source.kafka.wire.group_offsets import proved_offsets

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
        client: Any = admin_client({**self._config, "error_cb": self._complaints.on_error})

        def send(seconds: float) -> list[str]:
            future = client.describe_consumer_groups([group_id], request_timeout=_NO_LIMIT_SECONDS)[group_id]
            try:
                found = self._complaints.await_answer(client, future, seconds)
            except KafkaException as error:
                if kafka_error(error).code() == KafkaError.TOPIC_AUTHORIZATION_FAILED:
                    return ["a member that reads topics which this principal may not describe"]
                raise
            return [f"client.id={each.client_id!r} at {each.host.lstrip('/')}" for each in found.members]

        return request(
            f"reading the members of group {group_id!r}",
            send,
            deadline,
            self._complaints,
            self._bootstrap,
            poll=client.poll,
        )

    def delete_group(self, group_id: str, deadline: Deadline) -> None:
        """Deletes the group if it exists.

        Raises:
            UnavailableError: if no coordinator answers before ``deadline``.
            AuthorizationError: if the principal may not delete the group.
        """
        client: Any = admin_client({**self._config, "error_cb": self._complaints.on_error})
        future = client.delete_consumer_groups([group_id], request_timeout=_NO_LIMIT_SECONDS)[group_id]
        doing = f"deleting group {group_id!r}"
        try:
            future.result(deadline.remaining_seconds(REQUEST_SECONDS))
        except concurrent.futures.TimeoutError:
            client.poll(0)  # runs the error callback
            raise self._complaints.login_error(doing) or unreachable(
                self._bootstrap, deadline.budget_seconds * 1000, doing
            ) from None
        except KafkaException as error:
            if kafka_error(error).code() not in _NOTHING_TO_DELETE:
                raise classify(error, doing) from error

    @contextmanager
    def _cluster(self) -> Iterator[Cluster]:
        from kafka_eos_source.kafka.wire.cluster import Cluster

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
        from kafka_eos_source.kafka.wire.group_offsets import doing, stable_offsets

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
