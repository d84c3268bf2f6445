"""Reads the committed offsets of consumer groups, and the metadata stored with them."""

from __future__ import annotations

import concurrent.futures
from collections.abc import Collection, Iterable, Mapping
from dataclasses import replace
from functools import partial
from typing import Any

from confluent_kafka import Consumer, KafkaError, KafkaException

from kafka_eos_source.errors import KafkaEosError
from kafka_eos_source.kafka.admin_client import admin_client
from kafka_eos_source.kafka.clients import make
from kafka_eos_source.kafka.consumer import AssignedConsumer
from kafka_eos_source.kafka.failure import classify, is_transient, kafka_error, named_partitions, unreachable
from kafka_eos_source.kafka.offset_fetch import NO_LIMIT_MS, fetch
from kafka_eos_source.kafka.request import REQUEST_SECONDS, Complaints, TryLimit, request
from kafka_eos_source.model import GroupOffset, TopicPartition
from kafka_eos_source.runtime.deadline import Deadline
from kafka_eos_source.runtime.retry import Pauses, retry

#: Between two tries of `stable_offsets`, which a task calls for each batch.
_TASK_PAUSE_SECONDS = 0.02

#: How long one client may ask brokers that are not the coordinator, before a new client takes its place.
_NOT_COORDINATOR_SECONDS = 2.0

#: The broker's error code for an offset that an open transaction is about to change (KIP-447).
_PENDING: int = KafkaError.UNSTABLE_OFFSET_COMMIT

_NOTHING_TO_DELETE = (KafkaError.GROUP_ID_NOT_FOUND, KafkaError.INVALID_GROUP_ID)


class GroupOffsets:
    """Reads and deletes the offsets of consumer groups, with a new client for each request.

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
        found = self._stable(group_id, None, deadline)
        # partitions that have an offset were already checked for an open transaction
        missing = [tp for tp in certainly if tp not in found]
        if missing:
            found.update(self._stable(group_id, missing, deadline))
        return found

    def fetch_named(
        self, group_id: str, partitions: Collection[TopicPartition], deadline: Deadline
    ) -> dict[TopicPartition, GroupOffset]:
        """Returns the group's offsets of these partitions, after waiting for open transactions.

        Raises:
            UnavailableError, AuthorizationError: under the same conditions as `fetch`.
        """
        return self._stable(group_id, partitions, deadline) if partitions else {}

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
        for partitions in (None, certainly) if certainly else (None,):
            offsets = self._fetch(group_id, partitions, deadline, none_if_pending=True)
            if offsets is None:
                pending = True
                offsets = self._fetch(group_id, partitions, deadline, stable=False) or {}
            found.update(offsets)
        return found, pending

    def committed_now(
        self, group_id: str, certainly: Collection[TopicPartition], deadline: Deadline
    ) -> dict[TopicPartition, GroupOffset]:
        """Returns what is committed at this moment for these partitions; ignores open transactions.

        Raises:
            UnavailableError, AuthorizationError: under the same conditions as `fetch`.
        """
        return self._fetch(group_id, certainly, deadline, stable=False) or {}

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
            # the time limit is not passed to librdkafka, for the reason given in `offset_fetch`
            future = client.describe_consumer_groups([group_id], request_timeout=NO_LIMIT_MS / 1000)[group_id]
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
        # the time limit is not passed to librdkafka, for the reason given in `offset_fetch`
        future = client.delete_consumer_groups([group_id], request_timeout=NO_LIMIT_MS / 1000)[group_id]
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

    def _stable(
        self, group_id: str, partitions: Collection[TopicPartition] | None, deadline: Deadline
    ) -> dict[TopicPartition, GroupOffset]:
        found = self._fetch(group_id, partitions, deadline)
        assert found is not None, "None is returned only with none_if_pending"
        return found

    def _fetch(
        self,
        group_id: str,
        partitions: Collection[TopicPartition] | None,
        deadline: Deadline,
        *,
        stable: bool = True,
        none_if_pending: bool = False,
    ) -> dict[TopicPartition, GroupOffset] | None:
        """Requests the group's offsets, and retries temporary failures.

        Args:
            group_id: the group.
            partitions: which to ask for; None = all that have an offset.
            deadline: of all tries together.
            stable: whether to wait for open transactions.
            none_if_pending: return None instead of waiting for an open transaction.
        """

        def send(seconds: float) -> dict[TopicPartition, GroupOffset] | None:
            try:
                return self._fetch_once(group_id, partitions, seconds, stable)
            except KafkaException as failure:
                if none_if_pending and kafka_error(failure).code() == _PENDING:
                    return None
                raise

        doing = _doing(group_id, partitions)
        return request(doing, send, deadline, self._complaints, self._bootstrap, only_reads=True)

    def _fetch_once(
        self, group_id: str, partitions: Collection[TopicPartition] | None, seconds: float, stable: bool
    ) -> dict[TopicPartition, GroupOffset]:
        config = {**self._config, "group.id": group_id, "error_cb": self._complaints.on_error}
        consumer = make(Consumer, config)
        try:
            stop = partial(self._is_refused, consumer)
            return _by_partition(
                fetch(consumer, group_id, partitions, int(1000 * seconds), stable=stable, stop=stop)
            )
        finally:
            consumer.close()

    def _is_refused(self, consumer: Consumer) -> bool:
        consumer.poll(0)  # runs the error callback; nothing is assigned, so there is no message to lose
        return self._complaints.permanent_login_error("") is not None


def stable_offsets(
    consumer: AssignedConsumer, group_id: str, partitions: Collection[TopicPartition], deadline: Deadline
) -> dict[TopicPartition, GroupOffset] | None:
    """Returns a group's stable offsets of these partitions, through a consumer that is already open.

    `GroupOffsets` creates a client for each request. In the task of a small batch, that would cost more than
    the work of the task.

    Args:
        consumer: any consumer; it need not belong to the group.
        group_id: the group; a group that does not exist has no offsets.
        partitions: the partitions, at least one. The request names each, with ``RequireStable``.
        deadline: for the answer of the group coordinator.

    Returns:
        The offsets, without partitions that have none; None = an open transaction is about to change one of
        them (KIP-447).

    Raises:
        UnavailableError: if no coordinator answers before ``deadline``.
        AuthorizationError: if the principal may not describe the group.
    """
    doing = _doing(group_id, partitions)
    misled, limit = Deadline.after_seconds(_NOT_COORDINATOR_SECONDS), TryLimit()

    def send() -> dict[TopicPartition, GroupOffset] | None:
        nonlocal misled
        timeout_ms = int(1000 * limit.seconds(deadline))
        try:
            found = fetch(
                consumer.client,
                group_id,
                partitions,
                timeout_ms,
                stop=lambda: consumer.refusal(doing) is not None,
            )
            consumer.answered()
            return _by_partition(found)
        except KafkaException as failure:
            code = kafka_error(failure).code()
            if code == _PENDING:
                return None
            # A client whose coordinator has left the cluster waits for it for ever, even after it is back
            # (librdkafka issue 5511). A client may also keep asking a broker that was the coordinator before,
            # because it remembers coordinators for minutes.
            is_stuck = code == KafkaError._TIMED_OUT or (
                code == KafkaError.NOT_COORDINATOR and misled.expired
            )
            if is_stuck and not deadline.expired:
                consumer.reconnect()
                misled = Deadline.after_seconds(_NOT_COORDINATOR_SECONDS)
            raise

    def permanent(failure: KafkaException) -> KafkaEosError | None:
        return consumer.refusal(doing) if is_transient(failure) else classify(failure, doing)

    def timed_out(failure: KafkaException) -> KafkaEosError:
        refused = consumer.login_error(doing)
        if refused is not None:
            return refused
        reason = f"{doing}: {consumer.last_complaint or kafka_error(failure).str()}"
        return unreachable(consumer.bootstrap_servers, deadline.budget_seconds * 1000, reason)

    return retry(
        send, KafkaException, Pauses(deadline, _TASK_PAUSE_SECONDS), permanent=permanent, timed_out=timed_out
    )


def _doing(group_id: str, partitions: Collection[TopicPartition] | None) -> str:
    of_partitions = f" for {named_partitions(partitions)}" if partitions else ""
    return f"reading the offsets of group {group_id!r}{of_partitions}"


def _by_partition(fetched: Iterable[GroupOffset]) -> dict[TopicPartition, GroupOffset]:
    """Returns the offsets by partition, without partitions that have none."""
    # librdkafka appends a NUL to the metadata that it commits
    return {
        each.tp: replace(each, metadata=each.metadata.rstrip("\0")) for each in fetched if each.offset >= 0
    }
