"""What people paste from Java clients: names that librdkafka spells otherwise, and those it has not."""

from __future__ import annotations

import re
from collections.abc import Iterable

from kafka_eos_source.errors import InvalidOptionError
from kafka_eos_source.kafka.secrets import shown

#: Java's name → librdkafka's, where the value means the same.
RENAMED = {
    "fetch.max.wait.ms": "fetch.wait.max.ms",
    "receive.buffer.bytes": "socket.receive.buffer.bytes",
    "send.buffer.bytes": "socket.send.buffer.bytes",
    "max.request.size": "message.max.bytes",
    "request.timeout.ms": "socket.timeout.ms",
}

_BYTES = "are bytes as they are; cast the column"
_METRICS = "Java only; remove it. Spark's progress and the group's lag show what goes on"
_OIDC = "set kafka.sasl.oauthbearer.method=oidc and its properties"
_LOGIN = "librdkafka renews logins itself; remove it"
_TLS = "librdkafka uses OpenSSL; remove it, or set kafka.ssl.cipher.suites"
_COMMITTED = "offsets are committed with the batch; remove it"
_PARTITIONER = "set kafka.partitioner (the default, murmur2_random, places keys as Java does)"

#: Java's name → what to do instead.
REFUSED = {
    "key.serializer": f"keys {_BYTES} 'key' to string or binary",
    "value.serializer": f"values {_BYTES} 'value' to string or binary",
    "key.deserializer": f"keys {_BYTES} 'key' after load()",
    "value.deserializer": f"values {_BYTES} 'value' after load()",
    "interceptor.classes": "librdkafka has no interceptor classes; transform the frame instead",
    "partitioner.class": _PARTITIONER,
    "partitioner.ignore.keys": "leave the column 'key' null; remove it",
    "partitioner.adaptive.partitioning.enable": "set kafka.sticky.partitioning.linger.ms",
    "partitioner.availability.timeout.ms": "set kafka.sticky.partitioning.linger.ms",
    "metric.reporters": _METRICS,
    "metrics.num.samples": _METRICS,
    "metrics.recording.level": _METRICS,
    "metrics.sample.window.ms": _METRICS,
    "auto.include.jmx.reporter": _METRICS,
    "sasl.client.callback.handler.class": "set kafka.sasl.mechanism and kafka.sasl.username / .password",
    "sasl.login.callback.handler.class": _OIDC,
    "sasl.login.class": "set kafka.sasl.mechanism and its properties",
    "sasl.login.connect.timeout.ms": _LOGIN,
    "sasl.login.read.timeout.ms": _LOGIN,
    "sasl.login.refresh.buffer.seconds": _LOGIN,
    "sasl.login.refresh.min.period.seconds": _LOGIN,
    "sasl.login.refresh.window.factor": _LOGIN,
    "sasl.login.refresh.window.jitter": _LOGIN,
    "sasl.login.retry.backoff.max.ms": _LOGIN,
    "sasl.login.retry.backoff.ms": _LOGIN,
    "sasl.kerberos.ticket.renew.jitter": "set kafka.sasl.kerberos.min.time.before.relogin",
    "sasl.kerberos.ticket.renew.window.factor": "set kafka.sasl.kerberos.min.time.before.relogin",
    "ssl.truststore.location": "set kafka.ssl.ca.location to a PEM file, or kafka.ssl.ca.pem to its text",
    "ssl.truststore.password": "PEM files of authorities have none: remove it; set kafka.ssl.ca.location",
    "ssl.truststore.type": "set kafka.ssl.ca.location to a PEM file",
    "ssl.truststore.certificates": "set kafka.ssl.ca.pem to the same text",
    "ssl.keystore.type": "a PKCS#12 file goes in kafka.ssl.keystore.location; "
    "PEM files in kafka.ssl.certificate.location and kafka.ssl.key.location",
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
    "exclude.internal.topics": "a pattern never finds internal topics; remove it",
    "security.providers": "Java only; remove it",
    "auto.offset.reset": "set the options startingOffsets and failOnDataLoss",
    "enable.auto.commit": _COMMITTED,
    "auto.commit.enable": _COMMITTED,
    "auto.commit.interval.ms": _COMMITTED,
    "max.poll.records": "set the options maxOffsetsPerTrigger and maxRecordsPerPartition",
    "transactional.id": "set the option application.id",
}

#: Of `REFUSED`: those that librdkafka has too, but that are not the user's to say.
_DECIDED_HERE = frozenset(
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
    """The librdkafka properties that an option stands for; most stand for themselves.

    Args:
        name: without ``kafka.``.
        value: as given.

    Raises:
        InvalidOptionError: only Java's clients have it, or it is decided here.
    """
    instead = REFUSED.get(name)
    if instead is not None:
        why = "kafka-eos decides it itself" if name in _DECIDED_HERE else "only Java's client has it"
        raise InvalidOptionError(
            f"option 'kafka.{name}' (value {shown(name, value)!r}) cannot be used: {why}.", fix=f"{instead}."
        )
    if name == "sasl.jaas.config":
        return _from_jaas(value)
    if name == "ssl.keystore.location" and value.lower().endswith(".jks"):
        raise InvalidOptionError(
            f"option 'kafka.ssl.keystore.location' is {value!r}: librdkafka does not read JKS stores.",
            fix="convert it once (keytool -importkeystore -deststoretype PKCS12) and give the .p12 file, "
            "or use kafka.ssl.certificate.location and kafka.ssl.key.location with PEM files.",
        )
    if name == "ssl.endpoint.identification.algorithm" and not value.strip():
        return ((name, "none"),)  # Java: an empty text turns the check of host names off
    return ((RENAMED.get(name, name), value),)


_WORD = r"[A-Za-z0-9_$.-]+"
_JAAS_OPTION = rf"""({_WORD})\s*=\s*("(?:[^"\\]|\\.)*"|'(?:[^'\\]|\\.)*'|{_WORD})\s*"""
_JAAS_LINE = re.compile(
    rf"\s*({_WORD})\s+(?:required|requisite|sufficient|optional)\s+((?:{_JAAS_OPTION})*);\s*", re.DOTALL
)
_ESCAPES = {"n": "\n", "t": "\t", "r": "\r", "a": "\a", "b": "\b", "f": "\f", "v": "\v"}


def _from_jaas(line: str) -> Iterable[tuple[str, str]]:
    """The two modules that name a user and a password. Read as ``JaasConfig`` in Kafka reads it."""
    parsed = _JAAS_LINE.fullmatch(line)
    options = dict(_jaas_option(*found) for found in re.findall(_JAAS_OPTION, parsed[2])) if parsed else {}
    if (
        parsed
        and parsed[1].rpartition(".")[2] in ("PlainLoginModule", "ScramLoginModule")
        and {"username", "password"} <= options.keys()
        and options.get("tokenauth", "").lower() != "true"
    ):
        return (("sasl.username", options["username"]), ("sasl.password", options["password"]))
    module = re.match(rf"\s*({_WORD}LoginModule)\b", line)
    raise InvalidOptionError(
        f"option 'kafka.sasl.jaas.config' with {module[1] if module else 'this text'} cannot be translated "
        "(its value is not shown); expected one entry of PlainLoginModule or ScramLoginModule, with username "
        "and password.",
        fix="set kafka.sasl.mechanism and librdkafka's own options: kafka.sasl.username and "
        "kafka.sasl.password, kafka.sasl.kerberos.* for GSSAPI, kafka.sasl.oauthbearer.* for OAUTHBEARER.",
    )


def _jaas_option(name: str, value: str) -> tuple[str, str]:
    if value[0] not in "\"'":
        return name, value
    return name, re.sub(r"\\([0-7]{1,3}|.)", _unescaped, value[1:-1], flags=re.DOTALL)


def _unescaped(found: re.Match[str]) -> str:
    text = found[1]
    return chr(int(text, 8)) if text[0] in "01234567" else _ESCAPES.get(text, text)


def documentation() -> Iterable[str]:
    """Lines for ``docs/options.md``."""
    yield "## Java's names"
    yield ""
    yield "| `kafka.` name | here |"
    yield "|---|---|"
    for java, ours in sorted(RENAMED.items()):
        yield f"| `{java}` | becomes `{ours}` |"
    yield "| `sasl.jaas.config` | becomes `sasl.username` and `sasl.password` for PLAIN and SCRAM |"
    for java, instead in sorted(REFUSED.items()):
        yield f"| `{java}` | refused: {instead} |"
