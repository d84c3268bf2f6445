"""Checks ``kafka.*`` options before a query starts, and returns the properties of its clients.

`kafka.properties` has the table of all properties. This module translates values that only Java's clients
have, such as stores of keys and certificates; `kafka.login_options` translates those of logins. It also
refuses values that conflict with each other or would break exactly-once.
Every error names a fix.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping
from pathlib import PurePath
from typing import Any, NamedTuple

from kafka_eos_source.errors import InvalidOptionError
from kafka_eos_source.kafka import login_options, tls
from kafka_eos_source.kafka.properties import PROPERTIES, Fate, canonical, refused, unknown
from kafka_eos_source.kafka.secrets import is_secret, shown

__all__ = [
    "admin_config",
    "check_consumer",
    "check_producer",
    "is_known",
    "is_secret",
    "producer_config",
]

_log = logging.getLogger(__name__)

_PRODUCER_DEFAULTS: Mapping[str, str] = {
    "partitioner": "murmur2_random",  # places keys as Java does, so the output stays co-partitioned
    "batch.size": "1000000",  # large batches compress better and are cheaper for the broker
    "allow.auto.create.topics": "false",  # a misspelt topic name is an error and creates no topic
}
_TRANSACTION_DEFAULTS: Mapping[str, str] = {
    "transaction.timeout.ms": "60000",
    "socket.timeout.ms": "10000",  # a lost EndTxn is sent again well before the transaction times out
}
_TRUST, _KEYS = "ssl.truststore.", "ssl.keystore."


class _Rule(NamedTuple):
    """A rule for the value of a property, which applies if the user sets the property."""

    holds: Callable[[str], bool]
    expected: str
    why: str


def _is(value: str) -> Callable[[str], bool]:
    return lambda each: each == value


#: Values are in the form of `properties.canonical` (``acks=all`` is -1).
_ACKS = _Rule(_is("-1"), "all", "needs acknowledgements of all in-sync replicas")
_ACKNOWLEDGED = _Rule(
    lambda value: value != "0",
    "all, or 1 to do without the in-sync replicas",
    "needs the leader's acknowledgement, because it could not report a lost record without",
)
_EXACTLY_ONCE: Mapping[str, _Rule] = {
    "enable.idempotence": _Rule(_is("true"), "true", "needs an idempotent producer"),
    "acks": _ACKS,
    "retries": _Rule(lambda value: int(value) >= 1, "1 or more", "needs retries of lost requests"),
    "max.in.flight.requests.per.connection": _Rule(
        lambda value: int(value) <= 5,
        "5 or less",
        "needs at most 5, because brokers detect duplicates among the last 5 requests only",
    ),
    "queuing.strategy": _Rule(_is("fifo"), "fifo", "needs records to be sent in order"),
    "allow.auto.create.topics": _Rule(
        _is("false"),
        "false",
        "needs existing topics: if a topic were deleted and created again during a batch, half of the "
        "batch would be lost",
    ),
}
_READ: Mapping[str, _Rule] = {
    "allow.auto.create.topics": _Rule(_is("false"), "false", "must not create the topics it reads"),
}

_IMPLIED_BY_TRANSACTIONS = ("acks", "enable.idempotence")

#: Options about which the log has said that they have no effect.
_said: set[str] = set()


def check_consumer(kafka: Mapping[str, str]) -> dict[str, str]:
    """Checks the ``kafka.*`` options of a read, and returns the properties that they set.

    Args:
        kafka: option → value, without the prefix ``kafka.``.

    Raises:
        InvalidOptionError: if an option is unknown or not supported, a value is malformed, values conflict,
            or users may not set an option.
    """
    checked = _Checked(kafka)
    checked.obey(_READ, "a read")
    return checked.effective()


def check_producer(kafka: Mapping[str, str], *, exactly_once: bool) -> dict[str, str]:
    """Checks the ``kafka.*`` options of a write, and returns the properties that they set.

    Args:
        kafka: option → value, without the prefix ``kafka.``.
        exactly_once: whether to reject values that would break exactly-once.

    Raises:
        InvalidOptionError: under the same conditions as `check_consumer`, or if a value would break
            exactly-once.
    """
    checked = _Checked(kafka)
    if exactly_once:
        checked.obey(_EXACTLY_ONCE, "exactly-once", "or set processing.guarantee=at_least_once")
        timeout_ms = _TRANSACTION_DEFAULTS["transaction.timeout.ms"]
        checked.at_most("socket.timeout.ms", "transaction.timeout.ms", timeout_ms, slack=100)
        return {
            name: value for name, value in checked.effective().items() if name not in _IMPLIED_BY_TRANSACTIONS
        }
    checked.obey({"acks": _ACKNOWLEDGED}, "a sink")
    found = checked.effective()
    if found.get("enable.idempotence") == "true":
        checked.obey({"acks": _ACKS}, "kafka.enable.idempotence=true", "or set that to false")
    elif found.get("acks", "-1") != "-1":
        found["enable.idempotence"] = "false"  # as Java does, unless the user asks for it
    return found


def producer_config(kafka: Mapping[str, str], transactional_id: str | None = None) -> dict[str, Any]:
    """Returns the properties of a producer. The user's values override the defaults.

    Args:
        kafka: from `check_producer`.
        transactional_id: None = an idempotent producer without transactions.
    """
    if transactional_id is None:
        return {**_PRODUCER_DEFAULTS, "enable.idempotence": "true", **kafka}
    timeouts = dict(_TRANSACTION_DEFAULTS)
    if "transaction.timeout.ms" in kafka:  # a lost EndTxn is sent again before the transaction times out
        timeouts["socket.timeout.ms"] = str(max(300, min(10_000, int(kafka["transaction.timeout.ms"]) - 100)))
    return {**_PRODUCER_DEFAULTS, **timeouts, **kafka, "transactional.id": transactional_id}


def admin_config(kafka: Mapping[str, str]) -> dict[str, Any]:
    """Returns only the properties for connecting to the cluster, without those of producers and consumers."""
    return {
        name: value for name, value in kafka.items() if name in PROPERTIES and PROPERTIES[name].connection
    }


def is_known(name: str) -> bool:
    """Returns whether an option ``kafka.<name>`` exists. Helps to report a missing or misspelt prefix."""
    return name in PROPERTIES


class _Checked:
    """The properties that the user set; raises errors with the user's names.

    Args:
        kafka: option → value, without the prefix ``kafka.``.
    """

    def __init__(self, kafka: Mapping[str, str]) -> None:
        self._values: dict[str, str] = {}
        self._stated: dict[str, str] = {}
        for name, value in kafka.items():
            if name not in PROPERTIES:
                raise unknown(name)
            if PROPERTIES[name].fate is Fate.REFUSED:
                raise refused(name, value, "kafka-eos does not support it", PROPERTIES[name].note)
        options, written = login_options.translated_login(kafka)
        for given, name, value in translated(options):
            stated = written.get(given, given)
            known = PROPERTIES[name]
            ours = known.note if known.fate is Fate.RENAMED else name
            each = canonical(ours, value, stated)
            if self._values.setdefault(ours, each) != each:
                raise InvalidOptionError(
                    f"options 'kafka.{self._stated[ours]}' and 'kafka.{stated}' have different values, but "
                    f"both set the property {ours!r}.",
                    fix="remove one of them.",
                )
            self._stated.setdefault(ours, stated)
        login_options.check_login(self._values)
        tls.check(self._values)

    def obey(self, rules: Mapping[str, _Rule], who: str, way_out: str = "") -> None:
        """Raises unless the properties follow the rules; ``way_out`` names another fix than removing one."""
        for name, rule in rules.items():
            if name in self._values and not rule.holds(self._values[name]):
                raise InvalidOptionError(
                    f"{self._option(name)}; expected {rule.expected}: {who} {rule.why}.",
                    fix=f"remove the option{', ' if way_out else ''}{way_out}.",
                )

    def at_most(self, name: str, other: str, default: str, *, slack: int = 0) -> None:
        """Raises unless ``name`` is at most ``other + slack``; ``default`` is our default of ``other``."""
        most = int(self._values.get(other, default))
        if name in self._values and int(self._values[name]) > most + slack:
            raise InvalidOptionError(
                f"{self._option(name)}; expected {most} or less: "
                f"'kafka.{self._stated.get(other, other)}' is {most}.",
                fix=f"change one of the two: 'kafka.{self._stated[name]}' or "
                f"'kafka.{self._stated.get(other, other)}'.",
            )

    def effective(self) -> dict[str, str]:
        """Returns the properties that clients obey. The log says once which options have no effect."""
        idle = {name for name in self._values if PROPERTIES[name].fate is Fate.IGNORED}
        for name in sorted(idle - _said):
            _log.info(
                "option 'kafka.%s' has no effect on records: %s", self._stated[name], PROPERTIES[name].note
            )
        _said.update(idle)
        return {
            name: value
            for name, value in self._values.items()
            if name not in idle or PROPERTIES[name].connection
        }

    def _option(self, name: str) -> str:
        return f"option 'kafka.{self._stated[name]}' has the value {shown(name, self._values[name])!r}"


def translated(kafka: Mapping[str, str]) -> Iterator[tuple[str, str, str]]:
    """Yields the option that the user set, a property, and its value. Most options keep their value.

    Args:
        kafka: option → value, without the prefix ``kafka.``.

    Raises:
        InvalidOptionError: if a value cannot be translated.
    """
    for name, value in kafka.items():
        if name == "ssl.endpoint.identification.algorithm" and not value.strip():
            yield name, name, "none"  # in Java, an empty text turns off the verification of host names
        elif name.startswith("ssl.") and not value.strip():
            continue  # for librdkafka, an empty text means that the option is not set
        elif name == f"{_TRUST}location":
            yield name, "ssl.ca.location", _pem_truststore(kafka, value)
        elif name == f"{_KEYS}location" and _type_of(kafka, _KEYS, value) != "PKCS12":
            for ours in ("ssl.certificate.location", "ssl.key.location"):
                yield name, ours, _pem_keystore(kafka, value)
        elif name in (f"{_TRUST}type", f"{_KEYS}type"):
            continue  # belongs to the location
        elif name == "connections.max.idle.ms" and value.strip() == "-1":
            yield name, name, "0"  # never
        elif name in ("receive.buffer.bytes", "send.buffer.bytes") and value.strip() == "-1":
            yield name, name, "0"  # the system decides
        else:
            yield name, name, value


def _type_of(kafka: Mapping[str, str], store: str, location: str) -> str:
    """Returns the type of a store: as declared, or as its name ends, or PKCS12."""
    declared = kafka.get(f"{store}type", "").strip().upper()
    if declared:
        return "PKCS12" if declared == "PKCS#12" else declared
    return {".jks": "JKS", ".pem": "PEM"}.get(PurePath(location).suffix.lower(), "PKCS12")


def _pem_truststore(kafka: Mapping[str, str], location: str) -> str:
    kind = _type_of(kafka, _TRUST, location)
    if kind == "PEM":
        return location
    command = f"keytool -exportcert -rfc -keystore {location} -alias ALIAS -file ca.pem"
    if kind == "PKCS12":
        command = f"openssl pkcs12 -in {location} -nokeys -out ca.pem"
    raise refused(
        f"{_TRUST}location",
        location,
        "authorities are read from PEM files",
        f"export them ({command}) and set kafka.ssl.ca.location to that file; if the store is a PEM file, "
        f"set kafka.{_TRUST}type=PEM",
    )


def _pem_keystore(kafka: Mapping[str, str], location: str) -> str:
    kind = _type_of(kafka, _KEYS, location)
    if kind == "PEM":
        return location
    declared = f", and remove kafka.{_KEYS}type" if kafka.get(f"{_KEYS}type") else ""
    raise refused(
        f"{_KEYS}location",
        location,
        f"keys are read from PKCS#12 and PEM files, not {kind}",
        f"convert it (keytool -importkeystore -srckeystore {location} -destkeystore keys.p12 -deststoretype "
        f"PKCS12) and set the option to the new file{declared}; or set kafka.ssl.certificate.location and "
        "kafka.ssl.key.location to PEM files",
    )
