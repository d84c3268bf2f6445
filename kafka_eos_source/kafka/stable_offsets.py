"""Offsets of a group through a consumer that is open anyhow: one request and one round trip a look.

`group.GroupOffsets` makes a client for each look, which is right once in a while on a driver and costs a task
of a small batch more than its work.
"""

from __future__ import annotations

import threading
from collections.abc import Collection

from confluent_kafka import KafkaError, KafkaException

from kafka_eos_source.kafka.consumer import AssignedConsumer
from kafka_eos_source.kafka.failure import classify, is_transient, kafka_error, named_partitions, unreachable
from kafka_eos_source.kafka.offset_fetch import fetch
from kafka_eos_source.model import GroupOffset, TopicPartition
from kafka_eos_source.runtime.deadline import Deadline

_REQUEST_SECONDS = 10.0
_PAUSE_SECONDS = 0.02

_pause = threading.Event()  # never set


def stable_offsets(
    consumer: AssignedConsumer, group_id: str, partitions: Collection[TopicPartition], deadline: Deadline
) -> dict[TopicPartition, GroupOffset] | None:
    """What the group has committed for these partitions, each asked for by name with ``RequireStable``.

    Args:
        consumer: any one; it need not belong to the group.
        group_id: the group; one that does not exist has no offsets.
        partitions: at least one.
        deadline: for the group coordinator's answer.

    Returns:
        The offsets, a partition that has none is absent; None = an unfinished transaction is about to change
        one of them (KIP-447).

    Raises:
        UnavailableError: no coordinator answers before ``deadline``.
        AuthorizationError: the group may not be described.
    """
    while True:
        timeout_ms = int(1000 * max(0.5, deadline.remaining_seconds(_REQUEST_SECONDS)))
        try:
            fetched = fetch(consumer.client, group_id, partitions, timeout_ms)
        except KafkaException as failure:
            error = kafka_error(failure)
            if error.code() == KafkaError.UNSTABLE_OFFSET_COMMIT:
                return None
            if not is_transient(error):
                named = named_partitions(partitions)
                raise classify(error, f"reading the offsets of group {group_id!r} for {named}") from failure
            consumer.raise_if_refused(f"reading the offsets of group {group_id!r}")
            if deadline.expired:
                raise unreachable(
                    consumer.bootstrap_servers,
                    deadline.budget_seconds * 1000,
                    f"offsets of group {group_id!r}: {consumer.last_complaint or error.str()}",
                ) from failure
        else:
            # librdkafka writes a trailing NUL into the log
            return {
                each.tp: GroupOffset(each.tp, each.offset, each.metadata.rstrip("\0"))
                for each in fetched
                if each.offset >= 0
            }
        _pause.wait(min(_PAUSE_SECONDS, deadline.remaining_seconds()))
