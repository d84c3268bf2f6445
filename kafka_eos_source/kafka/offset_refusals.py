"""Sends the offsets of a transaction in parts, and explains why a group coordinator refused one."""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection

from confluent_kafka import KafkaError, KafkaException

from kafka_eos_source.errors import AbortableError, KafkaEosError, OperatorError
from kafka_eos_source.kafka import offset_requests
from kafka_eos_source.kafka.failure import kafka_error
from kafka_eos_source.model import GroupOffset
from kafka_eos_source.runtime.deadline import Deadline

#: Kafka's default of ``max.message.bytes``.
_OFFSETS_TOPIC_BYTES = 1_048_588

#: Longest time to look for the reason of a refusal.
_SOON_SECONDS = 5.0

#: Returns a property of a topic: topic, property, deadline.
TopicProperty = Callable[[str, str, Deadline], str]

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
    for part in offset_requests.split(offsets, group_id):
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
    if not isinstance(cause, KafkaException) or kafka_error(cause).code() != KafkaError.UNKNOWN:
        return None
    size = sum(offset_requests.record_bytes(each, group_id) for each in offsets)
    name = offset_requests.OFFSETS_TOPIC
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
