"""What a consumer group holds: committed offsets and the text beside them."""

from __future__ import annotations

import concurrent.futures
import threading
from collections.abc import Collection, Mapping
from typing import Any

from confluent_kafka import Consumer, KafkaError, KafkaException
from confluent_kafka.admin import AdminClient

from kafka_eos_source.kafka.clients import make
from kafka_eos_source.kafka.failure import classify, is_transient, kafka_error, named_partitions, unreachable
from kafka_eos_source.kafka.offset_fetch import NO_LIMIT_MS, fetch
from kafka_eos_source.model import GroupOffset, TopicPartition
from kafka_eos_source.runtime.deadline import Deadline

_REQUEST_SECONDS = 10.0
_PAUSE_SECONDS = 0.05

#: The broker's word for an unfinished transaction that holds offsets (KIP-447).
_PENDING: int = KafkaError.UNSTABLE_OFFSET_COMMIT

_NOTHING_TO_DELETE = (KafkaError.GROUP_ID_NOT_FOUND, KafkaError.INVALID_GROUP_ID)


class GroupOffsets:
    """Reads (and forgets) the offsets of consumer groups.

    Args:
        config: librdkafka properties that say how to reach the cluster.
    """

    def __init__(self, config: Mapping[str, Any]) -> None:
        self._bootstrap = str(config.get("bootstrap.servers", ""))
        self._config = dict(config)
        self._said = ""
        self._pause = threading.Event()

    def fetch(
        self, group_id: str, certainly: Collection[TopicPartition], deadline: Deadline
    ) -> dict[TopicPartition, GroupOffset]:
        """Every committed offset of the group; a partition that has none is absent.

        ``RequireStable`` (KIP-447) is asked for: an offset that is part of an unfinished transaction is
        waited for. The broker says so only for partitions it is *asked* about by name, or that have an
        older offset: hence ``certainly``.

        Args:
            group_id: the group; one that does not exist has no offsets.
            certainly: partitions whose pending offsets must not be overlooked.
            deadline: for the offsets to become stable. Running out is an error, never "no offset".

        Raises:
            UnavailableError: no answer, or an unfinished transaction, until ``deadline``.
            AuthorizationError: the group may not be described.
        """
        found = self._stable(group_id, None, deadline)
        # a partition with an older offset was checked for a pending one already
        missing = [tp for tp in certainly if tp not in found]
        if missing:
            found.update(self._stable(group_id, missing, deadline))
        return found

    def fetch_named(
        self, group_id: str, partitions: Collection[TopicPartition], deadline: Deadline
    ) -> dict[TopicPartition, GroupOffset]:
        """What the group holds of these partitions, in one request; waits for pending transactions.

        Raises:
            UnavailableError, AuthorizationError: as `fetch`.
        """
        return self._stable(group_id, partitions, deadline) if partitions else {}

    def now(
        self, group_id: str, certainly: Collection[TopicPartition], deadline: Deadline
    ) -> tuple[dict[TopicPartition, GroupOffset], bool]:
        """What is committed at this moment, to be looked at only: a decision takes `fetch`.

        Returns:
            The offsets, and whether an unfinished transaction is about to change them.

        Raises:
            UnavailableError, AuthorizationError: as `fetch`.
        """
        found: dict[TopicPartition, GroupOffset] = {}
        pending = False
        for partitions in (None, certainly) if certainly else (None,):
            offsets = self._retried(group_id, partitions, deadline, ends=_PENDING)
            if offsets is None:
                pending = True
                offsets = self._retried(group_id, partitions, deadline, stable=False) or {}
            found.update(offsets)
        return found, pending

    def committed_now(
        self, group_id: str, certainly: Collection[TopicPartition], deadline: Deadline
    ) -> dict[TopicPartition, GroupOffset]:
        """What is committed at this moment for these partitions, without what open transactions will commit.

        Raises:
            UnavailableError, AuthorizationError: as `fetch`.
        """
        return self._retried(group_id, certainly, deadline, stable=False) or {}

    def forget(self, group_id: str, deadline: Deadline) -> None:
        """Deletes the group, if it is there.

        Raises:
            UnavailableError: no coordinator answers before ``deadline``.
            AuthorizationError: the group may not be deleted.
        """
        client: Any = make(AdminClient, self._config)
        # as in `offset_fetch`, the time limit is not librdkafka's
        future = client.delete_consumer_groups([group_id], request_timeout=NO_LIMIT_MS / 1000)[group_id]
        try:
            future.result(deadline.remaining_seconds(_REQUEST_SECONDS))
        except concurrent.futures.TimeoutError:
            raise unreachable(
                self._bootstrap, deadline.budget_seconds * 1000, f"deleting group {group_id!r}"
            ) from None
        except KafkaException as error:
            if kafka_error(error).code() not in _NOTHING_TO_DELETE:
                raise classify(error, f"deleting group {group_id!r}") from error

    def _stable(
        self, group_id: str, partitions: Collection[TopicPartition] | None, deadline: Deadline
    ) -> dict[TopicPartition, GroupOffset]:
        found = self._retried(group_id, partitions, deadline)
        assert found is not None, "no code ends this look-up"
        return found

    def _retried(
        self,
        group_id: str,
        partitions: Collection[TopicPartition] | None,
        deadline: Deadline,
        *,
        stable: bool = True,
        ends: int | None = None,
    ) -> dict[TopicPartition, GroupOffset] | None:
        """Asked again while it fails for a reason that may pass; None = it failed by the code ``ends``."""
        while True:
            try:
                return self._once(group_id, partitions, deadline, stable)
            except KafkaException as error:
                last = kafka_error(error)
                if ends is not None and last.code() == ends:
                    return None
                if not is_transient(error):
                    named = f" for {named_partitions(partitions)}" if partitions else ""
                    raise classify(error, f"reading the offsets of group {group_id!r}{named}") from error
            if deadline.expired:
                raise unreachable(
                    self._bootstrap,
                    deadline.budget_seconds * 1000,
                    f"offsets of group {group_id!r}: {self._said or last}",
                )
            self._pause.wait(min(_PAUSE_SECONDS, deadline.remaining_seconds()))

    def _once(
        self,
        group_id: str,
        partitions: Collection[TopicPartition] | None,
        deadline: Deadline,
        stable: bool,
    ) -> dict[TopicPartition, GroupOffset]:
        consumer = make(Consumer, {**self._config, "group.id": group_id, "error_cb": self._on_error})
        try:
            timeout_ms = int(1000 * max(0.5, deadline.remaining_seconds(_REQUEST_SECONDS)))
            fetched = fetch(consumer, group_id, partitions, timeout_ms, stable=stable)
        finally:
            consumer.close()
        # librdkafka writes a trailing NUL into the log
        return {
            each.tp: GroupOffset(each.tp, each.offset, each.metadata.rstrip("\0"))
            for each in fetched
            if each.offset >= 0
        }

    def _on_error(self, error: KafkaError) -> None:
        self._said = error.str()
