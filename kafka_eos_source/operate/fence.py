"""Fences the owner of a transactional id and aborts the transaction that the owner left open."""

from __future__ import annotations

from collections.abc import Mapping

from kafka_eos_source.commit.micro_batch import KafkaClients
from kafka_eos_source.runtime.deadline import Deadline


def fence(kafka: Mapping[str, str], application_id: str, deadline: Deadline) -> None:
    """Initialises the transactional id, and does nothing else (``init_transactions``, KIP-98).

    The broker fences every older producer with this id and aborts its open transaction; a commit that was
    already under way completes. No data is lost: Spark's offset log still has the batch. A driver that is
    alive takes the id back and writes its batch again.

    Args:
        kafka: librdkafka properties of a producer.
        application_id: the transactional id.
        deadline: limits the wait for the broker.

    Raises:
        UnavailableError: if no broker or coordinator answered before ``deadline``.
        AuthorizationError: if the ACL on the transactional id is missing.
    """
    producer = KafkaClients(kafka).producer(application_id)
    try:
        producer.init(deadline)
    finally:
        producer.close()
