"""What the start of a query asks a cluster, in one request: whether brokers answer, and know its topics.

Only definite answers are errors: no address can be reached, the login is refused, a topic does not exist or
may not be seen. Brokers that are slow, or a topic without a leader, are left to the first batch, which waits
for them. Nothing is created, joined, fenced or written.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import Any

from kafka_eos_source.errors import KafkaEosError
from kafka_eos_source.kafka.admin_client import (
    NAMES_SECONDS,
    SOON_SECONDS,
    AdminClient,
    Complaints,
    Topic,
)
from kafka_eos_source.kafka.error_codes import ErrorCode, KafkaError
from kafka_eos_source.kafka.failure import classify, is_login, is_transient, missing_topic
from kafka_eos_source.runtime.deadline import Deadline, Pauses

#: How long brokers may refuse connections or not answer, unless they have answered this process before.
_SECONDS = 6.0
#: Pause before a topic that a broker does not know is looked up again, as it may have been created just now.
_PAUSE_SECONDS = 0.25


@dataclass(frozen=True)
class Contact:
    """What a cluster answered.

    Attributes:
        cluster_id: Kafka's id of the cluster; "" = brokers report none, or none has answered in time.
        topics: the topics that brokers described, by name.
        silence: why no broker has answered in time, although addresses can be reached; "" = one has.
    """

    cluster_id: str = ""
    topics: Mapping[str, Topic] = field(default_factory=dict)
    silence: str = ""

    def may(self, topic: str, operation: str) -> bool:
        """Returns whether the principal may use a topic so, as far as brokers say that."""
        found = self.topics.get(topic)
        return found is None or found.operations is None or operation in found.operations


def contact(
    config: Mapping[str, Any],
    topics: Mapping[str, str],
    *,
    missing_seconds: float = 3.0,
) -> Contact:
    """Asks a cluster about topics. Takes less than 10 s, and a few ms if a broker answers.

    Args:
        config: librdkafka properties for connecting to the cluster.
        topics: the topics by name, each with what it is looked up for, as in "looking up output topic 't'".
        missing_seconds: how long brokers may not know a topic.

    Raises:
        UnavailableError: if no address can be reached, or a topic does not exist.
        AuthorizationError: if brokers refuse the login, or the principal may not describe a topic.
    """
    client, complaints = AdminClient(config), Complaints(config)
    try:
        pauses = Pauses(Deadline.after_seconds(missing_seconds), _PAUSE_SECONDS)
        while True:
            try:
                cluster_id, found = client.described(
                    list(topics), SOON_SECONDS if complaints.has_answered else _SECONDS, operations=True
                )
            except KafkaError as failure:
                return _silent(failure, complaints, next(iter(topics.values()), "looking up the brokers"))
            complaints.answered()
            missing = [name for name in topics if _is_unknown(found[name])]
            if not missing:
                break
            if pauses.expired:
                known = client.names_if_known(NAMES_SECONDS)
                raise missing_topic(topics[missing[0]], missing[0], known)
            pauses.wait()
    finally:
        client.close()
    for name, each in found.items():
        if isinstance(each, KafkaError) and not is_transient(each):
            raise classify(each, topics[name], complaints.secrets)
    return Contact(cluster_id, {name: each for name, each in found.items() if isinstance(each, Topic)})


def matching(config: Mapping[str, Any], seconds: float = SOON_SECONDS) -> Collection[str] | None:
    """Returns the names of all topics that the principal may see; None = no broker has answered in time."""
    client = AdminClient(config)
    try:
        return client.names(seconds)
    except (KafkaError, KafkaEosError):
        return None
    finally:
        client.close()


def _is_unknown(answer: Topic | KafkaError) -> bool:
    return isinstance(answer, KafkaError) and answer.code == ErrorCode.UNKNOWN_TOPIC_OR_PARTITION


def _silent(failure: KafkaError, complaints: Complaints, doing: str) -> Contact:
    """Returns what brokers did not answer; raises why they cannot.

    Raises:
        UnavailableError: if no address can be reached.
        AuthorizationError: if brokers refuse the login.
    """
    complaints.record(failure)
    error = complaints.login_error(doing) if is_login(failure) else None
    error = error or complaints.explanation(doing, failure)
    if error is not None:
        raise error
    return Contact(silence=complaints.last)
