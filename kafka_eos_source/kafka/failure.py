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
from kafka_eos_source.kafka.error_codes import ErrorCode, KafkaError
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
    {ErrorCode.PRODUCER_FENCED, ErrorCode.INVALID_PRODUCER_EPOCH, ErrorCode.FENCED_INSTANCE_ID}
)

_ACLS = "`kafka-eos acls` prints all rights that a query needs."
#: Error code → the ACL that is missing.
_AUTHORIZATION: dict[int, str] = {
    ErrorCode.TOPIC_AUTHORIZATION_FAILED: "the topic (for a source: Read; for a sink: Write and Describe, "
    "and Read of every topic whose offsets it commits, including the output topic itself; for state and "
    "token.topic also DescribeConfigs)",
    ErrorCode.GROUP_AUTHORIZATION_FAILED: "the consumer group (Read; for an operator: Describe)",
    ErrorCode.TRANSACTIONAL_ID_AUTHORIZATION_FAILED: "the transactional id (Write and Describe)",
    ErrorCode.CLUSTER_AUTHORIZATION_FAILED: "the cluster (to write: IdempotentWrite; to "
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

#: A refused login. Java's clients do not retry it either (SaslAuthenticationException and
#: SslAuthenticationException, KIP-152).
_LOGIN = frozenset(
    {
        ErrorCode.SASL_AUTHENTICATION_FAILED,
        ErrorCode.TLS_HANDSHAKE_FAILED,
    }
)

_TOO_LARGE_FIX = (
    "raise the topic's max.message.bytes and the option kafka.message.max.bytes, or filter out the record "
    "before it reaches the sink."
)
#: Error code of a record that the topic does not accept → what to do.
_RECORD_FIXES: dict[int, str] = {
    ErrorCode.MESSAGE_TOO_LARGE: _TOO_LARGE_FIX,
    ErrorCode.INVALID_FETCH_SIZE: _TOO_LARGE_FIX,
    ErrorCode.RECORD_LIST_TOO_LARGE: _TOO_LARGE_FIX,
    ErrorCode.INVALID_RECORD: "if the topic is compacted (cleanup.policy), give each record a key; "
    "otherwise the broker's log says what it does not accept. Or filter out the record before it reaches "
    "the sink.",
    ErrorCode.INVALID_TIMESTAMP: "the time of the record is too far from the broker's clock: correct the "
    "column timestamp, or remove the option includeTimestamp; or raise the topic's "
    "message.timestamp.before.max.ms and message.timestamp.after.max.ms, or set its "
    "message.timestamp.type=LogAppendTime.",
}

#: Error code that no retry mends → what to do.
_OPERATOR_FIXES: dict[int, str] = {
    ErrorCode.INVALID_REPLICATION_FACTOR: "ask for at most as many replicas as the cluster has brokers: "
    "1 in a cluster of one broker.",
    ErrorCode.POLICY_VIOLATION: "create the topic by hand as the cluster's create.topic.policy.class.name "
    "demands it, or ask who runs the cluster.",
    ErrorCode.UNSUPPORTED_COMPRESSION_TYPE: "set kafka.compression.type to a codec that the brokers know.",
}

_GONE = frozenset(
    {
        ErrorCode.UNKNOWN_TOPIC_OR_PARTITION,
        ErrorCode.INVALID_TOPIC_EXCEPTION,
    }
)

MISSING_TOPIC_FIX = "create the topic, or correct its name."

#: Temporary errors of a request that can simply be repeated.
_TRANSIENT = frozenset(
    {
        ErrorCode.NO_ANSWER,
        ErrorCode.CONNECTION_FAILED,
        ErrorCode.REQUEST_TIMED_OUT,
        ErrorCode.LEADER_NOT_AVAILABLE,
        ErrorCode.NOT_LEADER_OR_FOLLOWER,
        ErrorCode.PREFERRED_LEADER_NOT_AVAILABLE,
        ErrorCode.ELIGIBLE_LEADERS_NOT_AVAILABLE,
        ErrorCode.FENCED_LEADER_EPOCH,  # of a partition's leader, not of a producer
        ErrorCode.UNKNOWN_LEADER_EPOCH,
        ErrorCode.OFFSET_NOT_AVAILABLE,
        ErrorCode.LISTENER_NOT_FOUND,
        ErrorCode.NOT_CONTROLLER,
        ErrorCode.KAFKA_STORAGE_ERROR,
        ErrorCode.NOT_ENOUGH_REPLICAS,
        ErrorCode.NOT_ENOUGH_REPLICAS_AFTER_APPEND,
        ErrorCode.BROKER_NOT_AVAILABLE,
        ErrorCode.REPLICA_NOT_AVAILABLE,
        ErrorCode.COORDINATOR_LOAD_IN_PROGRESS,
        ErrorCode.COORDINATOR_NOT_AVAILABLE,
        ErrorCode.NOT_COORDINATOR,
        ErrorCode.NETWORK_EXCEPTION,
        ErrorCode.UNSTABLE_OFFSET_COMMIT,
        ErrorCode.CONCURRENT_TRANSACTIONS,
        ErrorCode.THROTTLING_QUOTA_EXCEEDED,  # of topics created and deleted (KIP-599); nothing was done
    }
)


def is_transient(error: KafkaError) -> bool:
    """Returns whether the same request may succeed a moment later."""
    return error.code in _TRANSIENT


def is_login(error: KafkaError) -> bool:
    """Returns whether a login failed: wrong credentials, certificate or certificate authority."""
    return error.code in _LOGIN


class MissingTopicError(KafkaError):
    """A broker does not know a topic."""

    def __init__(self, topic: str) -> None:
        super().__init__(ErrorCode.UNKNOWN_TOPIC_OR_PARTITION, f"topic {topic!r} does not exist")
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
        f"{doing}: topic {topic!r} does not exist (UNKNOWN_TOPIC_OR_PARTITION).{hint}", fix=MISSING_TOPIC_FIX
    )


def record_too_large(size_bytes: int, topic: str) -> KafkaEosError:
    """Returns the error for a record that is larger than the client or its topic accepts."""
    doing = f"writing a record of {size_bytes:,} bytes to topic {topic!r}"
    return classify(KafkaError(ErrorCode.MESSAGE_TOO_LARGE), doing)


def classify(error: KafkaError, doing: str, secrets: Secrets = NO_SECRETS) -> KafkaEosError:
    """Returns the error of this package to raise for an error of Kafka's.

    Args:
        error: the client's error.
        doing: what was attempted, with the name of the topic, group or transactional id, as in "writing to
            topic 't'".
        secrets: of the client, whose library words the error.
    """
    code = error.code
    text = f"{doing}: {secrets.hide(error.text)} ({error.name})"
    if code in _FENCED:
        return FencedError(text, fix=FENCED_FIX)
    if code in _AUTHORIZATION:
        return AuthorizationError(text, fix=f"grant the principal access to {_AUTHORIZATION[code]}. {_ACLS}")
    if code == ErrorCode.TLS_HANDSHAKE_FAILED:
        return AuthorizationError(text, fix=_TLS_FIX)
    if code in _LOGIN:
        return AuthorizationError(text, fix="correct the credentials: kafka.sasl.*, kafka.ssl.*.")
    if code in _RECORD_FIXES:
        return InvalidRecordError(text, fix=_RECORD_FIXES[code])
    if code in _GONE:
        return UnavailableError(text, fix=MISSING_TOPIC_FIX)
    if code == ErrorCode.INVALID_TRANSACTION_TIMEOUT:
        return InvalidOptionError(
            text, fix="set kafka.transaction.timeout.ms to at most the broker's transaction.max.timeout.ms."
        )
    if code == ErrorCode.OFFSET_METADATA_TOO_LARGE:
        return InvalidOptionError(
            text,
            fix="raise offset.metadata.max.bytes of the brokers; or shorten application.id, which is part of "
            "the offset metadata (a query that has committed batches then needs a new checkpoint).",
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
        f"(kafka.security.protocol={protocol}{of_mechanism}): {secrets.hide(refusal.text)} "
        f"({refusal.name})"
    )
    fix = _TLS_FIX
    if refusal.code != ErrorCode.TLS_HANDSHAKE_FAILED:
        prefix = next(
            (each for name, each in _SASL_OPTIONS.items() if (mechanism or "").startswith(name)), None
        )
        options = prefix or "kafka.sasl.username and kafka.sasl.password"
        fix = f"correct the credentials: {options}; or kafka.sasl.mechanism, if the brokers expect another."
    if worked_before:
        what = (
            "the brokers' certificates"
            if refusal.code == ErrorCode.TLS_HANDSHAKE_FAILED
            else "the credentials"
        )
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
