"""Translates property names of Java's Kafka clients to librdkafka's, or explains why that is impossible."""

from __future__ import annotations

from collections.abc import Iterable

from kafka_eos_source.errors import InvalidOptionError
from kafka_eos_source.kafka.secrets import shown

#: Java's name → librdkafka's name of a property whose values mean the same.
RENAMED = {
    "fetch.max.wait.ms": "fetch.wait.max.ms",
    "receive.buffer.bytes": "socket.receive.buffer.bytes",
    "send.buffer.bytes": "socket.send.buffer.bytes",
    "max.request.size": "message.max.bytes",
    "request.timeout.ms": "socket.timeout.ms",
}

_METRICS = "remove it; the metrics of this package are described in docs/metrics.md"
_LOGIN = "remove it; logins are renewed in time"
_TLS = "remove it, or set kafka.ssl.cipher.suites; librdkafka uses OpenSSL"
_COMMITTED = "remove it; offsets are committed with the batch"
_PARTITIONER = "set kafka.partitioner (the default, murmur2_random, places keys as Java does)"

#: Java's name → what to do instead.
REFUSED = {
    "key.serializer": "remove it, and cast the column 'key' to string or binary; keys are written as bytes",
    "value.serializer": "remove it, and cast the column 'value' to string or binary; values are written as "
    "bytes",
    "key.deserializer": "remove it, and cast the column 'key' after load(); keys are read as bytes",
    "value.deserializer": "remove it, and cast the column 'value' after load(); values are read as bytes",
    "interceptor.classes": "remove it, and transform the DataFrame; librdkafka has no interceptor classes",
    "partitioner.class": _PARTITIONER,
    "partitioner.ignore.keys": "remove it, and leave the column 'key' null",
    "partitioner.adaptive.partitioning.enable": "set kafka.sticky.partitioning.linger.ms",
    "partitioner.availability.timeout.ms": "set kafka.sticky.partitioning.linger.ms",
    "metric.reporters": _METRICS,
    "metrics.num.samples": _METRICS,
    "metrics.recording.level": _METRICS,
    "metrics.sample.window.ms": _METRICS,
    "auto.include.jmx.reporter": _METRICS,
    "sasl.login.class": "set kafka.sasl.mechanism and its properties",
    "sasl.login.connect.timeout.ms": _LOGIN,
    "sasl.login.read.timeout.ms": _LOGIN,
    "sasl.login.refresh.buffer.seconds": _LOGIN,
    "sasl.login.refresh.min.period.seconds": _LOGIN,
    "sasl.login.refresh.window.factor": _LOGIN,
    "sasl.login.refresh.window.jitter": _LOGIN,
    "sasl.login.retry.backoff.max.ms": _LOGIN,
    "sasl.login.retry.backoff.ms": _LOGIN,
    "sasl.kerberos.ticket.renew.jitter": _LOGIN,
    "sasl.kerberos.ticket.renew.window.factor": _LOGIN,
    "ssl.truststore.location": "set kafka.ssl.ca.location to a PEM file, or kafka.ssl.ca.pem to its text",
    "ssl.truststore.password": "remove it; set kafka.ssl.ca.location to a PEM file, which has no password",
    "ssl.truststore.type": "set kafka.ssl.ca.location to a PEM file",
    "ssl.truststore.certificates": "set kafka.ssl.ca.pem to the same text",
    "ssl.keystore.type": "remove it; set kafka.ssl.keystore.location to a PKCS#12 file, or "
    "kafka.ssl.certificate.location and kafka.ssl.key.location to PEM files",
    "ssl.keystore.certificate.chain": "set kafka.ssl.certificate.pem to the same text",
    "ssl.keystore.key": "set kafka.ssl.key.pem to the same text",
    "ssl.enabled.protocols": _TLS,
    "ssl.protocol": _TLS,
    "ssl.provider": _TLS,
    "ssl.secure.random.implementation": _TLS,
    "ssl.engine.factory.class": _TLS,
    "ssl.keymanager.algorithm": _TLS,
    "ssl.trustmanager.algorithm": _TLS,
    "buffer.memory": "set kafka.queue.buffering.max.kbytes",
    "max.block.ms": "set the option commitTimeoutMs",
    "default.api.timeout.ms": "set kafka.socket.timeout.ms, or fetchOffset.numRetries",
    "exclude.internal.topics": "remove it; a pattern never matches internal topics",
    "security.providers": "remove it",
    "auto.offset.reset": "set the options startingOffsets and failOnDataLoss",
    "enable.auto.commit": _COMMITTED,
    "auto.commit.enable": _COMMITTED,
    "auto.commit.interval.ms": _COMMITTED,
    "max.poll.records": "set the options maxOffsetsPerTrigger and maxRecordsPerPartition",
    "transactional.id": "set the option application.id",
}

#: Properties in `REFUSED` that librdkafka has too, but that this package sets itself.
_SET_BY_US = frozenset(
    {
        "auto.offset.reset",
        "enable.auto.commit",
        "auto.commit.enable",
        "auto.commit.interval.ms",
        "max.poll.records",
        "transactional.id",
    }
)


def translated(name: str, value: str) -> Iterable[tuple[str, str]]:
    """Translates an option to librdkafka properties. Most options keep their name and value.

    Args:
        name: the option without ``kafka.``.
        value: the user's value.

    Raises:
        InvalidOptionError: if only Java's clients have the option, or this package sets it itself.
    """
    instead = REFUSED.get(name)
    if instead is not None:
        why = "kafka-eos sets it itself" if name in _SET_BY_US else "only Java's client has this property"
        raise InvalidOptionError(
            f"option 'kafka.{name}' (value {shown(name, value)!r}) cannot be used: {why}.", fix=f"{instead}."
        )
    if name == "ssl.keystore.location" and value.lower().endswith(".jks"):
        raise InvalidOptionError(
            f"option 'kafka.ssl.keystore.location' has the value {value!r}; "
            "librdkafka cannot read JKS stores.",
            fix="convert it (keytool -importkeystore -deststoretype PKCS12) and set the option to the .p12 "
            "file, or set kafka.ssl.certificate.location and kafka.ssl.key.location to PEM files.",
        )
    if name == "ssl.endpoint.identification.algorithm" and not value.strip():
        return ((name, "none"),)  # in Java, an empty text turns off the verification of host names
    return ((RENAMED.get(name, name), value),)


def documentation() -> Iterable[str]:
    """Yields the lines about Java's names in ``docs/options.md``."""
    yield "## Property names of Java's clients"
    yield ""
    yield "| Java's name | with kafka-eos |"
    yield "|---|---|"
    for java, ours in sorted(RENAMED.items()):
        yield f"| `{java}` | becomes `{ours}` |"
    yield (
        "| `sasl.jaas.config` | becomes the properties of the login: `sasl.username` and `sasl.password`, "
        "`sasl.oauthbearer.*`, or `sasl.kerberos.*` |"
    )
    yield (
        "| `sasl.client.callback.handler.class`, `sasl.login.callback.handler.class` | those of Kafka's "
        "OAuth client and of AWS are replaced, others refused: set `sasl.oauthbearer.token.provider` |"
    )
    for java, instead in sorted(REFUSED.items()):
        yield f"| `{java}` | refused: {instead} |"
