"""Takes a transactional id, so that what its owner left open is settled, and lets it go."""

from __future__ import annotations

from collections.abc import Mapping

from kafka_eos_source.commit.session import KafkaClients
from kafka_eos_source.runtime.deadline import Deadline


def fence(kafka: Mapping[str, str], application_id: str, deadline: Deadline) -> None:
    """``init_transactions``, and nothing else (KIP-98).

    Every older owner is fenced, and the transaction it left open is aborted; one whose commit was under way
    is committed. Nothing is lost: Spark's offset log has the batch, and a driver that still runs takes the id
    back and writes its batch again.

    Args:
        kafka: librdkafka properties of a producer.
        application_id: the transactional id.
        deadline: for the brokers' answer.

    Raises:
        UnavailableError: no broker or coordinator answered before ``deadline``.
        AuthorizationError: the ACL on the transactional id is missing.
    """
    producer = KafkaClients(kafka).producer(application_id)
    try:
        producer.init(deadline)
    finally:
        producer.close()
