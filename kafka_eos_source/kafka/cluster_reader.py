"""A look at a cluster for people: what is there at this moment, without waiting for anybody's transaction."""

from __future__ import annotations

import threading
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

from confluent_kafka import KafkaError, KafkaException
from confluent_kafka import admin as client_admin

from kafka_eos_source.kafka.admin import SourceAdmin
from kafka_eos_source.kafka.clients import make
from kafka_eos_source.kafka.failure import classify, is_login, is_transient, kafka_error, unreachable
from kafka_eos_source.kafka.group import GroupOffsets
from kafka_eos_source.model import GroupOffset, TopicPartition
from kafka_eos_source.runtime.deadline import Deadline

_AdminClient: Any = client_admin.AdminClient

_REQUEST_SECONDS = 5.0
_PAUSE_SECONDS = 0.1
_ADMIN_RETRIES = 1
_ADMIN_PAUSE_MS = 200


@dataclass(frozen=True)
class LogEnds:
    """The offsets of one partition's log.

    Attributes:
        earliest: first offset still there.
        stable: the last stable offset: ``read_committed`` consumers read up to it.
        end: the high watermark; above ``stable`` while a transaction is open in the partition.
    """

    earliest: int
    stable: int
    end: int


class ClusterReader:
    """Looks at one cluster; a context manager.

    Args:
        config: librdkafka properties that say how to reach the cluster.
    """

    def __init__(self, config: Mapping[str, Any]) -> None:
        self._config = dict(config)
        self._last_error: KafkaError | None = None
        self._pause = threading.Event()
        self._admin = SourceAdmin(config, "read_committed", _ADMIN_RETRIES, _ADMIN_PAUSE_MS)

    def __enter__(self) -> ClusterReader:
        return self

    def __exit__(self, *_error: object) -> None:
        self._admin.close()

    def topics(self, deadline: Deadline) -> tuple[str, Mapping[str, int]]:
        """The cluster's id, and the number of partitions of every topic that it shows us.

        Raises:
            InvalidOptionError: librdkafka refuses the properties together.
            UnavailableError: no broker answers before ``deadline``.
            AuthorizationError: the credentials are refused.
        """
        client = make(_AdminClient, {**self._config, "error_cb": self._on_error})
        while True:
            try:
                found = client.list_topics(timeout=max(0.5, deadline.remaining_seconds(_REQUEST_SECONDS)))
            except KafkaException as error:
                if not is_transient(error):
                    raise classify(error, "reading the cluster's metadata") from error
                client.poll(0)  # delivers what the client complained about
                said = self._last_error or kafka_error(error)
                if is_login(said):
                    raise classify(said, "reading the cluster's metadata") from error
                if deadline.expired:
                    raise unreachable(
                        str(self._config.get("bootstrap.servers", "")),
                        deadline.budget_seconds * 1000,
                        said.str(),
                    ) from error
                self._pause.wait(min(_PAUSE_SECONDS, deadline.remaining_seconds()))
            else:
                return found.cluster_id, {
                    name: len(topic.partitions) for name, topic in found.topics.items() if topic.error is None
                }

    def group(
        self, group_id: str, certainly: Collection[TopicPartition], deadline: Deadline
    ) -> tuple[Mapping[TopicPartition, GroupOffset], bool]:
        """As `GroupOffsets.now`."""
        return GroupOffsets(self._config).now(group_id, certainly, deadline)

    def topic_ids(self, topics: Collection[str]) -> Mapping[str, str]:
        """Topic ids (KIP-516). Raises: as `SourceAdmin.named`."""
        return self._admin.named(sorted(topics)).ids if topics else {}

    def logs(self, partitions: Collection[TopicPartition]) -> dict[TopicPartition, LogEnds]:
        """Where each log begins and ends.

        Raises:
            UnavailableError: a partition is not there, has no leader, or no broker answers.
            AuthorizationError: a topic may not be described.
        """
        earliest = self._admin.earliest(partitions)
        end = self._admin.high_watermarks(partitions)
        stable = self._admin.latest(
            partitions
        )  # after the end: records that come meanwhile look like no transaction
        return {tp: LogEnds(earliest[tp], stable[tp], end[tp]) for tp in partitions}

    def _on_error(self, error: KafkaError) -> None:
        self._last_error = error
