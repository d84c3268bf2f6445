"""``kafka.*`` options → librdkafka properties: translated, refused with the way out named, checked, masked.

librdkafka judges names and values itself (``rd_kafka_conf_set`` on a configuration that no client is made
from), so that what is accepted here is what the client accepts.
"""

from __future__ import annotations

import ctypes
import difflib
import re
from collections.abc import Iterable, Mapping
from functools import lru_cache
from typing import Any

from kafka_eos_source.errors import InvalidOptionError
from kafka_eos_source.kafka.native import ERROR_TEXT_BYTES, function

_MASK = "********"
_CONF_OK = 0
_CONF_UNKNOWN = -2

#: Java's name → librdkafka's, where the value means the same.
_RENAMED = {
    "fetch.max.wait.ms": "fetch.wait.max.ms",
    "receive.buffer.bytes": "socket.receive.buffer.bytes",
    "send.buffer.bytes": "socket.send.buffer.bytes",
    "max.request.size": "message.max.bytes",
    "request.timeout.ms": "socket.timeout.ms",
    "sasl.mechanism": "sasl.mechanisms",
}

#: Java's name → why it is refused and what to set instead.
_JAVA_ONLY = {
    "key.serializer": "keys are sent as they are; cast the column 'key' to string or binary",
    "value.serializer": "values are sent as they are; cast the column 'value' to string or binary",
    "key.deserializer": "keys are read as bytes; cast the column 'key' after load()",
    "value.deserializer": "values are read as bytes; cast the column 'value' after load()",
    "interceptor.classes": "librdkafka has no interceptor classes; transform the frame instead",
    "partitioner.class": "set kafka.partitioner (the default, murmur2_random, places keys as Java does)",
    "metric.reporters": "Java only; Spark's progress and the group's lag show what goes on",
    "sasl.client.callback.handler.class": "set kafka.sasl.mechanism and kafka.sasl.username / .password",
    "sasl.login.callback.handler.class": "set kafka.sasl.oauthbearer.method=oidc and its properties",
    "sasl.login.class": "set kafka.sasl.mechanism and its properties",
    "ssl.truststore.location": "set kafka.ssl.ca.location to a PEM file, or kafka.ssl.ca.pem to its text",
    "ssl.truststore.password": "PEM files of authorities have none: remove it; set kafka.ssl.ca.location",
    "ssl.truststore.type": "set kafka.ssl.ca.location to a PEM file",
    "ssl.truststore.certificates": "set kafka.ssl.ca.pem to the same text",
    "ssl.keystore.type": "a PKCS#12 file goes in kafka.ssl.keystore.location; "
    "PEM files in kafka.ssl.certificate.location and kafka.ssl.key.location",
    "ssl.keystore.certificate.chain": "set kafka.ssl.certificate.pem to the same text",
    "ssl.keystore.key": "set kafka.ssl.key.pem to the same text",
    "buffer.memory": "set kafka.queue.buffering.max.kbytes",
    "max.block.ms": "set the option commitTimeoutMs",
    "default.api.timeout.ms": "set kafka.socket.timeout.ms",
    "client.dns.lookup": "use_all_dns_ips is librdkafka's default; remove it",
    "security.providers": "Java only; remove it",
    "auto.offset.reset": "set the options startingOffsets and failOnDataLoss",
    "enable.auto.commit": "offsets are committed with the batch; remove it",
    "auto.commit.interval.ms": "offsets are committed with the batch; remove it",
    "max.poll.records": "set the options maxOffsetsPerTrigger and maxRecordsPerPartition",
    "transactional.id": "set the option application.id",
}

#: What exactly-once needs; another value is refused.
_FORCED_EXACTLY_ONCE = {"enable.idempotence": ("true",), "acks": ("all", "-1")}

_PRODUCER_DEFAULTS: Mapping[str, str] = {
    "partitioner": "murmur2_random",  # Java's placement of keys: output stays co-partitioned
    "linger.ms": "5",  # fills batches while rows stream in; a flush does not wait for it
    "batch.size": "1000000",  # large batches compress better and cost the broker less
    "queue.buffering.max.messages": "500000",  # room for a second of the fast path
    "queue.buffering.max.kbytes": "524288",
    "allow.auto.create.topics": "false",  # a misspelt topic is an error, not a topic
    "topic.metadata.propagation.max.ms": "5000",  # a missing topic is reported after this (default 30 s)
    "retry.backoff.ms": "10",  # what a transaction waits behind another: 100 ms by default, each batch
    "retry.backoff.max.ms": "200",
}
_TRANSACTION_DEFAULTS: Mapping[str, str] = {
    "transaction.timeout.ms": "60000",
    "socket.timeout.ms": "10000",  # a lost EndTxn is sent again well before the transaction times out
}
_CONSUMER_FORCED: Mapping[str, str] = {
    "enable.auto.commit": "false",
    "enable.auto.offset.store": "false",
    "enable.partition.eof": "true",  # how a range that ends in markers is known to be read
    "auto.offset.reset": "error",  # data loss is decided by failOnDataLoss, never by a reset
    "allow.auto.create.topics": "false",
}

_SECRET = re.compile(r"password|secret|\.pem$|jaas|token|ssl\.key", re.IGNORECASE)


def check_consumer(kafka: Mapping[str, str]) -> dict[str, str]:
    """The ``kafka.*`` options of a read (prefix removed) as librdkafka properties.

    Raises:
        InvalidOptionError: a name is unknown or Java's alone, or librdkafka refuses a value.
    """
    return _checked(kafka)


def check_producer(kafka: Mapping[str, str], *, exactly_once: bool) -> dict[str, str]:
    """The ``kafka.*`` options of a write (prefix removed) as librdkafka properties.

    Raises:
        InvalidOptionError: as `check_consumer`, or a value would break exactly-once.
    """
    checked = _checked(kafka)
    for name, allowed in _FORCED_EXACTLY_ONCE.items() if exactly_once else ():
        value = checked.pop(name, allowed[0])
        if value.lower() not in allowed:
            raise InvalidOptionError(
                f"option 'kafka.{name}' has the value {value!r}; exactly-once needs {allowed[0]!r}.",
                fix="remove it, or set processing.guarantee=at_least_once.",
            )
    in_flight = checked.get("max.in.flight.requests.per.connection", checked.get("max.in.flight", "5"))
    if exactly_once and int(in_flight) > 5:
        raise InvalidOptionError(
            f"option 'kafka.max.in.flight.requests.per.connection' has the value {in_flight!r}; "
            "exactly-once needs at most 5.",
            fix="remove it, or set processing.guarantee=at_least_once.",
        )
    return checked


def consumer_config(kafka: Mapping[str, str], group_id: str, isolation_level: str) -> dict[str, Any]:
    """Properties of a consumer that is assigned ranges and never joins or commits."""
    return {**kafka, **_CONSUMER_FORCED, "group.id": group_id, "isolation.level": isolation_level}


def producer_config(kafka: Mapping[str, str], transactional_id: str | None = None) -> dict[str, Any]:
    """Properties of a producer; idempotent, and transactional with an id. The user's values win."""
    if transactional_id is None:
        return {**_PRODUCER_DEFAULTS, "enable.idempotence": "true", **kafka}
    timeout = {k: v for k, v in _TRANSACTION_DEFAULTS.items() if k not in kafka}
    stated = kafka.get("transaction.timeout.ms")
    if stated is not None and "socket.timeout.ms" in timeout:
        # librdkafka: at most the transaction's timeout less 100 ms
        timeout["socket.timeout.ms"] = str(max(300, min(10_000, int(stated) - 100)))
    return {**_PRODUCER_DEFAULTS, **timeout, **kafka, "transactional.id": transactional_id}


def admin_config(kafka: Mapping[str, str]) -> dict[str, Any]:
    """Properties that say how to reach the cluster; those of producers and consumers are left out."""
    return {name: value for name, value in kafka.items() if _is_connection(name)}


def masked(kafka: Mapping[str, Any]) -> dict[str, Any]:
    """The properties with every secret hidden, for messages and logs."""
    return {name: _MASK if _SECRET.search(name) else value for name, value in kafka.items()}


def redact(text: str, kafka: Mapping[str, Any]) -> str:
    """``text`` without any secret of ``kafka``."""
    for name, value in kafka.items():
        if _SECRET.search(name) and str(value):
            text = text.replace(str(value), _MASK)
    return text


def documentation() -> Iterable[str]:
    """Lines for ``docs/options.md``."""
    yield "## Java's names"
    yield ""
    yield "| `kafka.` name | here |"
    yield "|---|---|"
    for java, ours in sorted(_RENAMED.items()):
        yield f"| `{java}` | becomes `{ours}` |"
    yield "| `sasl.jaas.config` | becomes `sasl.username` and `sasl.password` for PLAIN and SCRAM |"
    for java, instead in sorted(_JAVA_ONLY.items()):
        yield f"| `{java}` | refused: {instead} |"


def _checked(kafka: Mapping[str, str]) -> dict[str, str]:
    checked: dict[str, str] = {}
    conf = _Conf()
    try:
        for name, value in kafka.items():
            for ours, translated in _translated(name, value):
                conf.set(ours, translated, name, value)
                checked[ours] = translated
    finally:
        conf.close()
    return checked


def _translated(name: str, value: str) -> Iterable[tuple[str, str]]:
    instead = _JAVA_ONLY.get(name)
    if instead is not None:
        raise InvalidOptionError(
            f"option 'kafka.{name}' (value {_shown(name, value)!r}) cannot be used: {_is_java(name)}.",
            fix=f"{instead}.",
        )
    if name == "sasl.jaas.config":
        return _from_jaas(value)
    if name == "ssl.keystore.location" and value.lower().endswith(".jks"):
        raise InvalidOptionError(
            f"option 'kafka.ssl.keystore.location' is {value!r}: librdkafka does not read JKS stores.",
            fix="convert it once (keytool -importkeystore -deststoretype PKCS12) and give the .p12 file, "
            "or use kafka.ssl.certificate.location and kafka.ssl.key.location with PEM files.",
        )
    return ((_RENAMED.get(name, name), value),)


def _is_java(name: str) -> str:
    ours = {"auto.offset.reset", "enable.auto.commit", "auto.commit.interval.ms", "transactional.id"}
    return "kafka-eos decides it itself" if name in ours else "only Java's client has it"


def _from_jaas(value: str) -> Iterable[tuple[str, str]]:
    """The two modules that name a user and a password."""
    user = re.search(r"""\busername\s*=\s*["']([^"']*)["']""", value)
    password = re.search(r"""\bpassword\s*=\s*["']([^"']*)["']""", value)
    if re.search(r"\.(PlainLoginModule|ScramLoginModule)\b", value) and user and password:
        return (("sasl.username", user[1]), ("sasl.password", password[1]))
    module = re.match(r"\s*([\w.]+)", value)
    raise InvalidOptionError(
        f"option 'kafka.sasl.jaas.config' with {module[1] if module else 'this text'} cannot be translated; "
        "expected PlainLoginModule or ScramLoginModule with username and password.",
        fix="set kafka.sasl.mechanism and librdkafka's own options (kafka.sasl.kerberos.* for GSSAPI, "
        "kafka.sasl.oauthbearer.* for OAUTHBEARER).",
    )


def _shown(name: str, value: str) -> str:
    return _MASK if _SECRET.search(name) else value


_CONNECTION_PREFIXES = (
    "bootstrap.servers",
    "metadata.broker.list",
    "client.id",
    "client.rack",
    "security.",
    "ssl.",
    "sasl.",
    "enable.ssl.",
    "enable.sasl.",
    "https.",
    "socket.",
    "broker.address.",
    "reconnect.backoff.",
    "api.version.",
    "debug",
    "log_level",
)


def _is_connection(name: str) -> bool:
    return name.startswith(_CONNECTION_PREFIXES)


class _Conf:
    """An ``rd_kafka_conf_t`` that no client is made from."""

    def __init__(self) -> None:
        self._conf = function("rd_kafka_conf_new", ctypes.c_void_p)()

    def set(self, name: str, value: str, stated_name: str, stated_value: str) -> None:
        text = ctypes.create_string_buffer(ERROR_TEXT_BYTES)
        conf_set = function(
            "rd_kafka_conf_set",
            ctypes.c_int,
            ctypes.c_void_p,
            ctypes.c_char_p,
            ctypes.c_char_p,
            ctypes.c_char_p,
            ctypes.c_size_t,
        )
        result = conf_set(self._conf, name.encode(), value.encode(), text, len(text))
        if result == _CONF_OK:
            return
        if result == _CONF_UNKNOWN:
            near = difflib.get_close_matches(name, property_names(), n=2, cutoff=0.75)
            said = f" Did you mean {' or '.join(repr('kafka.' + each) for each in near)}?" if near else ""
            raise InvalidOptionError(
                f"unknown option 'kafka.{stated_name}' (value {_shown(stated_name, stated_value)!r}): "
                f"librdkafka has no such property.{said}",
                fix="correct or remove it.",
            )
        why = text.value.decode(errors="replace")
        if _SECRET.search(stated_name):
            why = why.replace(value, _MASK)
        raise InvalidOptionError(
            f"option 'kafka.{stated_name}' has the value {_shown(stated_name, stated_value)!r}; "
            f"librdkafka refuses it: {why}.",
            fix="correct or remove it.",
        )

    def close(self) -> None:
        function("rd_kafka_conf_destroy", None, ctypes.c_void_p)(self._conf)


@lru_cache(maxsize=1)
def property_names() -> tuple[str, ...]:
    """Every property that this librdkafka knows, as its own dump of defaults lists them."""
    conf = function("rd_kafka_conf_new", ctypes.c_void_p)()
    count = ctypes.c_size_t()
    strings = ctypes.POINTER(ctypes.c_char_p)
    dump = function("rd_kafka_conf_dump", strings, ctypes.c_void_p, ctypes.POINTER(ctypes.c_size_t))(
        conf, ctypes.byref(count)
    )
    names = tuple(dump[index].decode() for index in range(0, count.value, 2))
    function("rd_kafka_conf_dump_free", None, strings, ctypes.c_size_t)(dump, count)
    function("rd_kafka_conf_destroy", None, ctypes.c_void_p)(conf)
    return (*names, "partitioner", "acks", "compression.type", "auto.offset.reset")
