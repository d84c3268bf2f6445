"""Maps Kafka's error codes to the errors of this package, and decides how long a refused login is retried.

No other module maps codes.

The order of the checks matters (KIP-1050): fencing first, then errors that a person must fix and no retry can
mend, then temporary ones. `kafka.transaction` knows which errors of a transaction a new try mends.
"""

from __future__ import annotations

import difflib
import hashlib
from collections.abc import Iterable, Mapping
from typing import Any

from confluent_kafka import KafkaError, KafkaException

from kafka_eos_source.errors import (
    AuthorizationError,
    FencedError,
    InvalidOptionError,
    InvalidRecordError,
    KafkaEosError,
    OperatorError,
    RetriableError,
    UnavailableError,
)
from kafka_eos_source.model import TopicPartition
from kafka_eos_source.secrets import NO_SECRETS, Secrets

#: Time in which a request that starts a query fails if brokers refuse connections.
START_SECONDS = 7.0

#: Time in which the first request of a new query fails if brokers accept connections and do not answer.
FIRST_SECONDS = 9.0

#: Most partitions that a message names; a group may have thousands.
_NAMED_PARTITIONS = 5

FENCED_FIX = (
    "another driver of this query took over and continues, or the transaction timed out; make sure that only "
    "one driver runs the query."
)

_FENCED = frozenset(
    {
        KafkaError.PRODUCER_FENCED,
        KafkaError.INVALID_PRODUCER_EPOCH,
        KafkaError.FENCED_INSTANCE_ID,
    }
)

_ACLS = "`kafka-eos acls` prints all rights that a query needs."
#: Error code → the ACL that is missing.
_AUTHORIZATION = {
    KafkaError.TOPIC_AUTHORIZATION_FAILED: "the topic (for a source: Read; for a sink: Write and Describe, "
    "and Read of every topic whose offsets it commits, including the output topic itself; for state and "
    "token.topic also DescribeConfigs)",
    KafkaError.GROUP_AUTHORIZATION_FAILED: "the consumer group (Read; for an operator: Describe)",
    KafkaError.TRANSACTIONAL_ID_AUTHORIZATION_FAILED: "the transactional id (Write and Describe)",
    KafkaError.CLUSTER_AUTHORIZATION_FAILED: "the cluster (to write: IdempotentWrite; to "
    "look up settings of brokers: DescribeConfigs)",
}

_TLS_FIX = (
    "set kafka.ssl.ca.location to the certificate of the authority that signed the brokers' certificates; "
    "these must name the addresses in kafka.bootstrap.servers. If brokers require a client certificate, set "
    "kafka.ssl.certificate.location and kafka.ssl.key.location."
)

UNREACHABLE_FIX = (
    "check the addresses, that the brokers run, and that kafka.security.protocol matches theirs."
)

#: For brokers whose bootstrap address answers, but not the one that they advertise.
ADVERTISED_FIX = (
    "set advertised.listeners of each broker to an address that the driver and all executors can resolve and "
    "reach; or let the names resolve here (DNS, /etc/hosts). Brokers in containers need a listener of their "
    "own for clients outside."
)

#: SASL mechanism → its options, where they are not user and password.
_SASL_OPTIONS = {"OAUTHBEARER": "kafka.sasl.oauthbearer.*", "GSSAPI": "kafka.sasl.kerberos.*"}

#: A refused login. Clients report it through the error callback, while the blocked call just waits. Java's
#: clients do not retry it either (SaslAuthenticationException and SslAuthenticationException, KIP-152).
_LOGIN = frozenset({KafkaError._AUTHENTICATION, KafkaError.SASL_AUTHENTICATION_FAILED, KafkaError._SSL})

_TOO_LARGE_FIX = (
    "raise the topic's max.message.bytes and the option kafka.message.max.bytes, or filter out the record "
    "before it reaches the sink."
)
#: Error code of a record that the topic does not accept → what to do.
_RECORD_FIXES = {
    KafkaError.MSG_SIZE_TOO_LARGE: _TOO_LARGE_FIX,
    KafkaError.INVALID_MSG_SIZE: _TOO_LARGE_FIX,
    KafkaError.RECORD_LIST_TOO_LARGE: _TOO_LARGE_FIX,
    KafkaError.INVALID_RECORD: "if the topic is compacted (cleanup.policy), give each record a key; "
    "otherwise the broker's log says what it does not accept. Or filter out the record before it reaches "
    "the sink.",
    KafkaError.INVALID_TIMESTAMP: "the time of the record is too far from the broker's clock: correct the "
    "column timestamp, or remove the option includeTimestamp; or raise the topic's "
    "message.timestamp.before.max.ms and message.timestamp.after.max.ms, or set its "
    "message.timestamp.type=LogAppendTime.",
}

#: Error code that no retry mends → what to do.
_OPERATOR_FIXES = {
    KafkaError.INVALID_REPLICATION_FACTOR: "ask for at most as many replicas as the cluster has brokers: "
    "1 in a cluster of one broker.",
    KafkaError.POLICY_VIOLATION: "create the topic by hand as the cluster's create.topic.policy.class.name "
    "demands it, or ask who runs the cluster.",
    KafkaError.UNSUPPORTED_COMPRESSION_TYPE: "set kafka.compression.type to a codec that the brokers know.",
}

_GONE = frozenset(
    {
        KafkaError.UNKNOWN_TOPIC_OR_PART,
        KafkaError._UNKNOWN_TOPIC,
        KafkaError._UNKNOWN_PARTITION,
        KafkaError.TOPIC_EXCEPTION,
    }
)

MISSING_TOPIC_FIX = "create the topic, or correct its name."

#: Temporary errors of a request that can simply be repeated, whatever flag librdkafka sets.
_TRANSIENT = frozenset(
    {
        KafkaError._TIMED_OUT,
        KafkaError._TRANSPORT,
        KafkaError._DESTROY_BROKER,
        KafkaError._ALL_BROKERS_DOWN,
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
        KafkaError.THROTTLING_QUOTA_EXCEEDED,  # of topics created and deleted (KIP-599); nothing was done
    }
)


def kafka_error(failure: KafkaError | KafkaException) -> KafkaError:
    """Returns the `KafkaError` inside an exception of the client, or the error itself."""
    return failure.args[0] if isinstance(failure, KafkaException) else failure


def is_transient(failure: KafkaError | KafkaException) -> bool:
    """Returns whether the same request may succeed a moment later."""
    error = kafka_error(failure)
    return error.code() in _TRANSIENT or bool(error.retriable())


def is_login(failure: KafkaError | KafkaException) -> bool:
    """Returns whether a login failed: wrong credentials, certificate or certificate authority.

    Of TLS errors, only those of the handshake count. librdkafka also reports temporary TLS errors, such as
    "ssl3 ext invalid servername" while the address of a coordinator is unknown.
    """
    error = kafka_error(failure)
    return error.code() in _LOGIN and (error.code() != KafkaError._SSL or "handshake" in error.str())


class MissingTopicError(KafkaException):
    """A broker does not know a topic."""

    def __init__(self, topic: str) -> None:
        super().__init__(KafkaError(KafkaError.UNKNOWN_TOPIC_OR_PART, f"topic {topic!r} does not exist"))
        self.topic = topic


def missing_topic(doing: str, topic: str, known: Iterable[str]) -> UnavailableError:
    """Returns the error for a topic that does not exist, with the names of similar ones.

    Args:
        doing: what was attempted.
        topic: the name.
        known: the topics of the cluster, as far as they are known. Kafka's own are not suggested.
    """
    visible = [name for name in known if not name.startswith("__")]
    near = difflib.get_close_matches(topic, visible, n=2, cutoff=0.6)
    hint = f" Did you mean {' or '.join(map(repr, near))}?" if near else ""
    return UnavailableError(
        f"{doing}: topic {topic!r} does not exist (UNKNOWN_TOPIC_OR_PART).{hint}", fix=MISSING_TOPIC_FIX
    )


def record_too_large(size_bytes: int, topic: str) -> KafkaEosError:
    """Returns the error for a record that is larger than the client or its topic accepts."""
    doing = f"writing a record of {size_bytes:,} bytes to topic {topic!r}"
    return classify(KafkaError(KafkaError.MSG_SIZE_TOO_LARGE), doing)


def classify(
    failure: KafkaError | KafkaException, doing: str, secrets: Secrets = NO_SECRETS
) -> KafkaEosError:
    """Returns the error of this package to raise for an error of Kafka's.

    Args:
        failure: the client's error.
        doing: what was attempted, with the name of the topic, group or transactional id, as in "writing to
            topic 't'".
        secrets: of the client, whose library words the error.
    """
    error = kafka_error(failure)
    code = error.code()
    text = f"{doing}: {secrets.hide(error.str())} ({error.name()})"
    if code in _FENCED:
        return FencedError(
            text,
            fix=FENCED_FIX,
        )
    if code in _AUTHORIZATION:
        return AuthorizationError(text, fix=f"grant the principal access to {_AUTHORIZATION[code]}. {_ACLS}")
    if code == KafkaError._SSL:
        return AuthorizationError(text, fix=_TLS_FIX)
    if code in _LOGIN:
        return AuthorizationError(text, fix="correct the credentials: kafka.sasl.*, kafka.ssl.*.")
    if code in _RECORD_FIXES:
        return InvalidRecordError(text, fix=_RECORD_FIXES[code])
    if code in _GONE:
        return UnavailableError(text, fix=MISSING_TOPIC_FIX)
    if code == KafkaError.INVALID_TRANSACTION_TIMEOUT:
        return InvalidOptionError(
            text, fix="set kafka.transaction.timeout.ms to at most the broker's transaction.max.timeout.ms."
        )
    if code == KafkaError.OFFSET_METADATA_TOO_LARGE:
        return InvalidOptionError(
            text,
            fix="raise offset.metadata.max.bytes of the brokers; or shorten application.id, which is part of "
            "the offset metadata (a query that has committed batches then needs a new checkpoint).",
        )
    if code == KafkaError._MSG_TIMED_OUT:
        return UnavailableError(
            text,
            fix="check that every partition has a leader; records wait for a leader for "
            "kafka.message.timeout.ms.",
        )
    if is_transient(error):
        return RetriableError(text)
    return OperatorError(text, fix=_OPERATOR_FIXES.get(code, ""))


def refused_login(
    refusal: KafkaError,
    doing: str,
    bootstrap_servers: str,
    protocol: str,
    mechanism: str | None,
    secrets: Secrets,
    *,
    worked_before: bool,
) -> AuthorizationError:
    """Returns the error for a login that brokers refused.

    Args:
        refusal: for which `is_login` is true.
        doing: what was attempted.
        bootstrap_servers: of the cluster.
        protocol: ``kafka.security.protocol``.
        mechanism: ``kafka.sasl.mechanism``; None = the client does not use SASL.
        secrets: of the client.
        worked_before: whether brokers accepted the same login before. It was changed since then, and clients
            read options and files only when they are made.
    """
    of_mechanism = "" if mechanism is None else f", kafka.sasl.mechanism={mechanism}"
    message = (
        f"{doing}: the login at kafka.bootstrap.servers={bootstrap_servers!r} failed "
        f"(kafka.security.protocol={protocol}{of_mechanism}): {secrets.hide(refusal.str())} "
        f"({refusal.name()})"
    )
    fix = _TLS_FIX
    if refusal.code() != KafkaError._SSL:
        prefix = next(
            (each for name, each in _SASL_OPTIONS.items() if (mechanism or "").startswith(name)), None
        )
        options = prefix or "kafka.sasl.username and kafka.sasl.password"
        fix = f"correct the credentials: {options}; or kafka.sasl.mechanism, if the brokers expect another."
    if worked_before:
        what = "the brokers' certificates" if refusal.code() == KafkaError._SSL else "the credentials"
        fix = (
            f"the same login worked before. If {what} were changed, restart the query with options and files "
            f"that match. Otherwise {fix}"
        )
    return AuthorizationError(message, fix=fix)


def named_partitions(partitions: Iterable[TopicPartition]) -> str:
    """Returns the first few partitions in order, and how many more there are, for an error message."""
    ordered = sorted(partitions)
    text = ", ".join(map(str, ordered[:_NAMED_PARTITIONS]))
    more = len(ordered) - _NAMED_PARTITIONS
    return f"{text} and {more:,} more" if more > 0 else text


def unreachable(bootstrap_servers: str, waited_ms: float, last: str = "") -> UnavailableError:
    """Returns the error for brokers that did not answer in time.

    Args:
        bootstrap_servers: of the cluster.
        waited_ms: how long the caller waited.
        last: what the caller was doing, or what the client reported last, without secrets.
    """
    reported = f" Last report: {last}." if last else ""
    return UnavailableError(
        f"no answer from Kafka at kafka.bootstrap.servers={bootstrap_servers!r} "
        f"within {waited_ms / 1000:.0f} s.{reported}",
        fix=UNREACHABLE_FIX,
    )


# -- refused logins -----------------------------------------------------------------------------
#
# A refusal is permanent if the credentials are wrong, and temporary while credentials are rotated or one
# broker has not learned of them yet. What distinguishes the two is whether these credentials ever worked:
#
# - As long as no request of this process succeeded with them, a refusal is raised at once. Nothing runs that
#   it could interrupt.
# - After that, a refused request is retried until its deadline, like any other failure of the network.
#
# The memory covers the process and not a single client, because many requests use a client of their own.

_CREDENTIALS = ("bootstrap.servers", "security.protocol", "sasl.", "ssl.", "enable.ssl.", "enable.sasl.")

#: The SASL mechanisms of both clients.
MECHANISMS = ("PLAIN", "SCRAM-SHA-256", "SCRAM-SHA-512", "OAUTHBEARER", "GSSAPI")

#: Digests of the credentials with which a request of this process has succeeded.
_worked: set[bytes] = set()


class LoginRefusedError(Exception):
    """The broker, or a service that gives credentials, refused the login."""


def mechanism(config: Mapping[str, Any]) -> str:
    """Returns the SASL mechanism of librdkafka properties; "" if the connection does not use SASL."""
    if not str(config.get("security.protocol", "plaintext")).lower().startswith("sasl"):
        return ""
    return str(config.get("sasl.mechanisms", config.get("sasl.mechanism", "GSSAPI"))).upper()


class Login:
    """The brokers and credentials of a client.

    Args:
        config: librdkafka properties of the client.
    """

    def __init__(self, config: Mapping[str, Any]) -> None:
        used = {name: str(value) for name, value in config.items() if name.startswith(_CREDENTIALS)}
        self._secrets = Secrets.of(used)
        self._brokers = used.get("bootstrap.servers", "")
        self._protocol = used.get("security.protocol", "PLAINTEXT").upper()
        self._mechanism = mechanism(config) or None
        # a digest, so that the memory keeps no password
        self._digest = hashlib.sha256(repr(sorted(used.items())).encode()).digest()

    @property
    def has_worked(self) -> bool:
        """Whether a request of this process has succeeded with these credentials."""
        return self._digest in _worked

    def record_success(self) -> None:
        """Records that a request succeeded."""
        _worked.add(self._digest)

    def error(self, refusal: KafkaError, doing: str) -> AuthorizationError:
        """Returns the error to raise for a refused login.

        Args:
            refusal: what the client reported.
            doing: what was attempted.
        """
        return refused_login(
            refusal,
            doing,
            self._brokers,
            self._protocol,
            self._mechanism,
            self._secrets,
            worked_before=self.has_worked,
        )
