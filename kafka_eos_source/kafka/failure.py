"""What a Kafka error means for us: the one place where error codes become our error tree.

The order of the tests is the rule (KIP-1050, and what librdkafka was seen to do): fencing first and by
*name*, because librdkafka flags PRODUCER_FENCED as merely abortable; then what a person must mend, which
librdkafka flags abortable too and which no retry can heal; then librdkafka's own flags.
"""

from __future__ import annotations

from collections.abc import Iterable

from confluent_kafka import KafkaError, KafkaException

from kafka_eos_source.errors import (
    AbortableError,
    AuthorizationError,
    FencedError,
    InvalidOptionError,
    InvalidRecordError,
    KafkaEosError,
    OperatorError,
    RetriableError,
    UnavailableError,
)
from kafka_eos_source.kafka.secrets import concealed
from kafka_eos_source.model import TopicPartition

#: How many partitions a message names; a group may have thousands.
_NAMED_PARTITIONS = 5

_FENCED = frozenset(
    {
        KafkaError._FENCED,
        KafkaError.PRODUCER_FENCED,
        KafkaError.INVALID_PRODUCER_EPOCH,
        KafkaError.FENCED_INSTANCE_ID,
    }
)

#: Code → the ACL that is missing.
_AUTHORIZATION = {
    KafkaError.TOPIC_AUTHORIZATION_FAILED: "the topic (Write and Describe for a sink, and Read of the topics "
    "whose offsets it commits, its own among them; Read for a source)",
    KafkaError.GROUP_AUTHORIZATION_FAILED: "the consumer group (Read)",
    KafkaError.TRANSACTIONAL_ID_AUTHORIZATION_FAILED: "the transactional id (Write and Describe)",
    KafkaError.CLUSTER_AUTHORIZATION_FAILED: "the cluster (IdempotentWrite)",
}

_TLS_FIX = (
    "kafka.ssl.ca.location is to hold the authority that signed the brokers' certificates; those must name "
    "the addresses in kafka.bootstrap.servers; brokers that ask for a client's certificate want "
    "kafka.ssl.certificate.location and kafka.ssl.key.location."
)

#: What a client complains about, apart from the call that it holds up. Java's clients do not try again either
#: (SaslAuthenticationException and SslAuthenticationException, KIP-152).
_LOGIN = frozenset({KafkaError._AUTHENTICATION, KafkaError.SASL_AUTHENTICATION_FAILED, KafkaError._SSL})

_RECORD = frozenset(
    {
        KafkaError.MSG_SIZE_TOO_LARGE,
        KafkaError.INVALID_MSG_SIZE,
        KafkaError.RECORD_LIST_TOO_LARGE,
        KafkaError.INVALID_RECORD,
        KafkaError.INVALID_TIMESTAMP,
    }
)

_GONE = frozenset(
    {
        KafkaError.UNKNOWN_TOPIC_OR_PART,
        KafkaError._UNKNOWN_TOPIC,
        KafkaError._UNKNOWN_PARTITION,
        KafkaError.TOPIC_EXCEPTION,
    }
)

#: Retriable for anyone who may simply ask again, whatever flag librdkafka set.
_TRANSIENT = frozenset(
    {
        KafkaError._TIMED_OUT,
        KafkaError._TRANSPORT,
        KafkaError._ALL_BROKERS_DOWN,
        KafkaError._TIMED_OUT_QUEUE,
        KafkaError._WAIT_COORD,
        KafkaError._RESOLVE,
        KafkaError.REQUEST_TIMED_OUT,
        KafkaError.LEADER_NOT_AVAILABLE,
        KafkaError.NOT_LEADER_FOR_PARTITION,
        KafkaError.PREFERRED_LEADER_NOT_AVAILABLE,
        KafkaError.ELIGIBLE_LEADERS_NOT_AVAILABLE,
        KafkaError.FENCED_LEADER_EPOCH,  # of a partition's leader, not of a producer
        KafkaError.UNKNOWN_LEADER_EPOCH,
        KafkaError.OFFSET_NOT_AVAILABLE,
        KafkaError.LISTENER_NOT_FOUND,
        KafkaError.NOT_CONTROLLER,
        KafkaError.KAFKA_STORAGE_ERROR,
        KafkaError.NOT_ENOUGH_REPLICAS,
        KafkaError.NOT_ENOUGH_REPLICAS_AFTER_APPEND,
        KafkaError.BROKER_NOT_AVAILABLE,
        KafkaError.REPLICA_NOT_AVAILABLE,
        KafkaError.COORDINATOR_LOAD_IN_PROGRESS,
        KafkaError.COORDINATOR_NOT_AVAILABLE,
        KafkaError.NOT_COORDINATOR,
        KafkaError.NETWORK_EXCEPTION,
        KafkaError.UNSTABLE_OFFSET_COMMIT,
        KafkaError.CONCURRENT_TRANSACTIONS,
    }
)


def kafka_error(failure: KafkaError | KafkaException) -> KafkaError:
    """The `KafkaError` inside an exception of the client, or the error itself."""
    return failure.args[0] if isinstance(failure, KafkaException) else failure


def is_fenced(failure: KafkaError | KafkaException) -> bool:
    """Whether a newer owner initialised the transactional id, or the broker timed our transaction out."""
    return kafka_error(failure).code() in _FENCED


def is_transient(failure: KafkaError | KafkaException) -> bool:
    """Whether asking the same again, a moment later, is the answer."""
    error = kafka_error(failure)
    return error.code() in _TRANSIENT or bool(error.retriable())


def is_login(failure: KafkaError | KafkaException) -> bool:
    """Whether client and broker do not trust each other: wrong credentials, certificate or authority.

    Of the errors of TLS only those of the hand-shake count: librdkafka also has passing ones of its own
    ("ssl3 ext invalid servername", seen where a coordinator's address is not known for a moment).
    """
    error = kafka_error(failure)
    return error.code() in _LOGIN and (error.code() != KafkaError._SSL or "handshake" in error.str())


def classify(failure: KafkaError | KafkaException, doing: str) -> KafkaEosError:
    """The error of ours to raise for one of Kafka's.

    Args:
        failure: as the client gave it.
        doing: what was tried, naming topic, group or transactional id, as in "writing to topic 't'".
    """
    error = kafka_error(failure)
    code = error.code()
    text = concealed(f"{doing}: {error.str()} ({error.name()})")
    if code in _FENCED:
        return FencedError(
            text, fix="another driver took over, or the transaction timed out; the newer owner goes on."
        )
    if code in _AUTHORIZATION:
        return AuthorizationError(text, fix=f"grant the principal access to {_AUTHORIZATION[code]}.")
    if code == KafkaError._SSL:
        return AuthorizationError(text, fix=_TLS_FIX)
    if code in _LOGIN:
        return AuthorizationError(text, fix="correct the credentials: kafka.sasl.*, kafka.ssl.*.")
    if code in _RECORD:
        return InvalidRecordError(
            text,
            fix="raise the topic's max.message.bytes and the option kafka.message.max.bytes, "
            "or drop the record before it reaches the sink.",
        )
    if code in _GONE:
        return UnavailableError(text, fix="create the topic, or correct its name.")
    if code == KafkaError.INVALID_TRANSACTION_TIMEOUT:
        return InvalidOptionError(
            text, fix="set kafka.transaction.timeout.ms to at most the broker's transaction.max.timeout.ms."
        )
    if code == KafkaError.OFFSET_METADATA_TOO_LARGE:
        return InvalidOptionError(text, fix="shorten application.id: it is part of the offset metadata.")
    if error.txn_requires_abort():
        return AbortableError(text)
    if code == KafkaError._MSG_TIMED_OUT:
        return UnavailableError(
            text,
            fix="see that every partition has a leader; it may take kafka.message.timeout.ms to come back.",
        )
    if is_transient(error):
        return RetriableError(text)
    if error.fatal():
        # the client is done for, the rows are not: a new producer may well succeed
        return AbortableError(text)
    return OperatorError(text)


def named_partitions(partitions: Iterable[TopicPartition]) -> str:
    """The first few partitions in their order, for an error message, and how many more there are."""
    ordered = sorted(partitions)
    text = ", ".join(map(str, ordered[:_NAMED_PARTITIONS]))
    more = len(ordered) - _NAMED_PARTITIONS
    return f"{text} and {more:,} more" if more > 0 else text


def unreachable(bootstrap_servers: str, waited_ms: float, last: str = "") -> UnavailableError:
    """The error for brokers that did not answer in time. ``last`` is what the client said last."""
    said = f" Last seen: {concealed(last)}." if last else ""
    return UnavailableError(
        f"no answer from Kafka at kafka.bootstrap.servers={bootstrap_servers!r} "
        f"within {waited_ms / 1000:.0f} s.{said}",
        fix="check the addresses, that the brokers run, and that security.protocol fits.",
    )
