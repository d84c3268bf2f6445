"""Reports the present state of a cluster to people. It never waits for an open transaction."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

from kafka_eos_source.kafka.admin import SourceAdmin
from kafka_eos_source.kafka.clients import admin_client
from kafka_eos_source.kafka.group import GroupOffsets
from kafka_eos_source.kafka.request import Complaints, request
from kafka_eos_source.model import Epochs, GroupOffset, TopicPartition
from kafka_eos_source.runtime.deadline import Deadline

_REQUEST_SECONDS = 5.0
_PAUSE_SECONDS = 0.1
_ADMIN_RETRIES = 1
_ADMIN_PAUSE_MS = 200


@dataclass(frozen=True)
class LogEnds:
    """The offsets of one partition's log.

    Attributes:
        earliest: the first offset in the log.
        stable: the last stable offset: ``read_committed`` consumers read up to it.
        end: the high watermark; above ``stable`` while a transaction is open in the partition.
    """

    earliest: int
    stable: int
    end: int


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
