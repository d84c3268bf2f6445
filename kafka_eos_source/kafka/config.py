"""Checks ``kafka.*`` options before a query starts, and returns the properties of its clients.

`kafka.properties` has the table of all properties. This module translates what only Java's clients have, such
as stores of keys and certificates, and JAAS entries. It refuses values that conflict with each other or would
break exactly-once, and checks a login as far as this is possible without the brokers. Every error names a
fix.
"""

from __future__ import annotations

import importlib.util
import logging
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import PurePath
from typing import Any, NamedTuple

from kafka_eos_source.errors import InvalidOptionError
from kafka_eos_source.kafka import tls, tokens
from kafka_eos_source.kafka.failure import MECHANISMS, mechanism
from kafka_eos_source.kafka.properties import PROPERTIES, Fate, canonical, refused, unknown
from kafka_eos_source.kafka.tokens import PROVIDER, Tokens
from kafka_eos_source.runtime.logs import warn_once
from kafka_eos_source.secrets import is_loopback, is_secret, shown

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
        options, written = translated_login(kafka)
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
        check_login(self._values)
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


# -- logins -------------------------------------------------------------------------------------

_AWS = "AWS_MSK_IAM"
_CLIENT_HANDLER, _LOGIN_HANDLER = "sasl.client.callback.handler.class", "sasl.login.callback.handler.class"
_JAAS, _CONFIG = "sasl.jaas.config", "sasl.oauthbearer.config"
_MECHANISM_NAMES = ("sasl.mechanism", "sasl.mechanisms")

_AWS_CLIENT_HANDLER = "software.amazon.msk.auth.iam.IAMClientCallbackHandler"
_AWS_LOGIN_HANDLER = "software.amazon.msk.auth.iam.IAMOAuthBearerLoginCallbackHandler"
#: AWS documents its handler of OAUTHBEARER for both options.
_AWS_HANDLERS = (_AWS_CLIENT_HANDLER, _AWS_LOGIN_HANDLER)
_OIDC_HANDLERS = (
    "org.apache.kafka.common.security.oauthbearer.OAuthBearerLoginCallbackHandler",
    "org.apache.kafka.common.security.oauthbearer.secured.OAuthBearerLoginCallbackHandler",
)
#: Options of AWS's login module that have no effect here.
_AWS_IGNORED = ("awsDebugCreds", "awsMaxRetries", "awsMaxBackOffTimeMs")

_WORD = r"[A-Za-z0-9_$.-]+"
_JAAS_OPTION = rf"""({_WORD})\s*=\s*("(?:[^"\\]|\\.)*"|'(?:[^'\\]|\\.)*'|{_WORD})\s*"""
_JAAS_LINE = re.compile(
    rf"\s*({_WORD})\s+(?i:required|requisite|sufficient|optional)\b\s*((?:{_JAAS_OPTION})*);\s*", re.DOTALL
)
_Put = Callable[[str, str, str], None]
_ESCAPES = {"n": "\n", "t": "\t", "r": "\r", "a": "\a", "b": "\b", "f": "\f", "v": "\v"}


class LoginOptions(NamedTuple):
    """Options without those that only Java's clients know.

    Attributes:
        options: librdkafka's or the user's name → value.
        stated: the option that the user wrote, for each option that was translated.
    """

    options: dict[str, str]
    stated: dict[str, str]


def translated_login(kafka: Mapping[str, str]) -> LoginOptions:
    """Translates a login that is written for Java's clients.

    Args:
        kafka: all ``kafka.*`` options, without the prefix.

    Raises:
        InvalidOptionError: if an option has no equivalent, or two of them differ.
    """
    options, stated = dict(kafka), dict[str, str]()

    def put(name: str, value: str, source: str) -> None:
        if options.setdefault(name, value) != value:
            raise InvalidOptionError(
                f"options 'kafka.{name}' and 'kafka.{source}' have different values for the same property.",
                fix="remove one of them.",
            )
        stated.setdefault(name, source)

    # Databricks has these classes in packages of its own
    handlers = {
        name: re.sub(r"^(kafkashaded|shadedmskiam)\.", "", options.pop(name).strip())
        for name in (_CLIENT_HANDLER, _LOGIN_HANDLER)
        if name in options
    }
    module, given = "", dict[str, str]()
    if _JAAS in options:
        module, given = _parsed(options.pop(_JAAS))
    asked = next((name for name in _MECHANISM_NAMES if options.get(name, "").upper() == _AWS), None)
    if (
        asked
        or module == "IAMLoginModule"
        or handlers.get(_CLIENT_HANDLER) in _AWS_HANDLERS
        or handlers.get(_LOGIN_HANDLER) == _AWS_LOGIN_HANDLER
    ):
        _use_aws(options, put, asked, module, given, handlers)
        return LoginOptions(options, stated)
    for name, value in _from_jaas(module, given):
        put(name, value, _JAAS)
    for name, value in handlers.items():
        if name == _LOGIN_HANDLER and value in _OIDC_HANDLERS:
            put("sasl.oauthbearer.method", "oidc", name)
            continue
        raise InvalidOptionError(
            f"option 'kafka.{name}' has the value {value!r}: only Java's clients can run this class.",
            fix="remove the option, and set kafka.sasl.mechanism=OAUTHBEARER. For an OAuth service, such as "
            "Keycloak or Okta, set kafka.sasl.oauthbearer.token.endpoint.url, .client.id and .client.secret. "
            f"For others, write a Python function, and set kafka.{PROVIDER}=module:function. "
            "docs/logins.md has examples for Entra ID, Google and AWS.",
        )
    return LoginOptions(options, stated)


def check_login(kafka: Mapping[str, str]) -> None:
    """Checks a login as far as this is possible without the brokers.

    Args:
        kafka: librdkafka properties, and ``sasl.oauthbearer.token.provider``.

    Raises:
        InvalidOptionError: if an option or a Python package is missing, or a file or function cannot be
            loaded.
    """
    wanted = mechanism(kafka)
    if not wanted:
        return
    _warn_of_plain_text(kafka, wanted)
    if wanted == "OAUTHBEARER":
        Tokens.of(kafka)
    elif wanted == "GSSAPI":
        _check_kerberos(kafka)
    else:
        for name in ("sasl.username", "sasl.password"):
            if not kafka.get(name):
                raise InvalidOptionError(
                    f"option 'kafka.{name}' is missing; kafka.sasl.mechanism={wanted} requires it.",
                    fix=f"set .option('kafka.{name}', …).",
                )


def _warn_of_plain_text(kafka: Mapping[str, str], wanted: str) -> None:
    """Logs once that a login sends its password or token without encryption to another host.

    It is no error, because Kafka's clients all accept it. SCRAM and Kerberos do not send the password.
    """
    servers = kafka.get("bootstrap.servers", "").split(",")
    hosts = [each.strip().rpartition("://")[2].rpartition(":")[0] for each in servers if each.strip()]
    is_plain = kafka.get("security.protocol", "").lower() == "sasl_plaintext"
    if is_plain and wanted in ("PLAIN", "OAUTHBEARER") and not all(map(is_loopback, hosts)):
        warn_once(
            _log,
            f"kafka.security.protocol=SASL_PLAINTEXT with kafka.sasl.mechanism={wanted} sends the "
            f"{'password' if wanted == 'PLAIN' else 'token'} to the brokers without encryption. Use "
            "SASL_SSL, unless nobody else can read what crosses the network.",
        )


def _check_kerberos(kafka: Mapping[str, str]) -> None:
    if not any(name in _MECHANISM_NAMES or name.startswith("sasl.kerberos.") for name in kafka):
        raise InvalidOptionError(
            "option 'kafka.sasl.mechanism' is missing; without it, Kafka's clients use GSSAPI (Kerberos).",
            fix=f"set it to one of {', '.join(MECHANISMS)}, {_AWS}.",
        )
    if importlib.util.find_spec("gssapi") is None:
        raise InvalidOptionError(
            "kafka.sasl.mechanism=GSSAPI needs the Python package 'gssapi', which is not installed.",
            fix="install it on the driver and on every executor: pip install 'kafka-eos-source[kerberos]'. "
            "It is built from source, with a C compiler and the headers of MIT Kerberos (Debian and Ubuntu: "
            "libkrb5-dev; Red Hat: krb5-devel).",
        )


def _use_aws(
    options: dict[str, str],
    put: _Put,
    asked: str | None,
    module: str,
    given: dict[str, str],
    handlers: Mapping[str, str],
) -> None:
    """Replaces the options of a login at Amazon MSK by OAUTHBEARER with the provider of tokens for it."""
    source = asked or (_JAAS if module == "IAMLoginModule" else next(iter(handlers)))
    login = _AWS_LOGIN_HANDLER in handlers.values()  # Java's way to use OAUTHBEARER at MSK
    for name, value in handlers.items():
        is_of_kafka = value.startswith("org.apache.kafka.common.security.oauthbearer.")
        if value not in _AWS_HANDLERS and not is_of_kafka:
            raise InvalidOptionError(
                f"option 'kafka.{name}' has the value {value!r}, but 'kafka.{source}' asks for a login at "
                "AWS.",
                fix="remove one of them.",
            )
    if module not in ("", "IAMLoginModule") and not (login and module == "OAuthBearerLoginModule"):
        raise InvalidOptionError(
            f"option 'kafka.{_JAAS}' names {module}, but 'kafka.{source}' asks for a login at AWS.",
            fix="remove one of them; the login module of AWS is software.amazon.msk.auth.iam.IAMLoginModule.",
        )
    if PROVIDER in options:
        raise InvalidOptionError(
            f"options 'kafka.{PROVIDER}' and 'kafka.{source}' are both set; tokens have one source.",
            fix="remove one of them.",
        )
    for name in _MECHANISM_NAMES:
        if options.get(name, _AWS).upper() not in (_AWS, "OAUTHBEARER"):
            raise InvalidOptionError(
                f"option 'kafka.{name}' has the value {options[name]!r}, but 'kafka.{source}' asks for a "
                "login at AWS.",
                fix=f"set kafka.sasl.mechanism={_AWS}.",
            )
        options.pop(name, None)
    if _CONFIG in options and given:
        raise InvalidOptionError(
            f"options 'kafka.{_JAAS}' and 'kafka.{_CONFIG}' are both set for a login at AWS.",
            fix="remove one of them.",
        )
    words = options.pop(_CONFIG, "").split()
    given = given or {name: value for name, _, value in (each.partition("=") for each in words)}
    wanted = {name: value for name, value in given.items() if name not in _AWS_IGNORED}
    put("sasl.mechanisms", "OAUTHBEARER", source)
    put(PROVIDER, tokens.PROVIDER_PATH, source)
    put(_CONFIG, tokens.checked_aws(wanted, options.get("bootstrap.servers", "")), source)


def _from_jaas(module: str, given: dict[str, str]) -> Iterable[tuple[str, str]]:
    """Yields the properties for a JAAS entry of Kafka's own login modules."""
    if not module:
        return
    if module in ("PlainLoginModule", "ScramLoginModule"):
        if {"username", "password"} <= given.keys() and given.get("tokenauth", "").lower() != "true":
            yield "sasl.username", given["username"]
            yield "sasl.password", given["password"]
            return
        raise _untranslatable(module, "a username and a password, and no delegation token")
    if module == "Krb5LoginModule":
        if given.get("useKeyTab", "false").lower() == "true" and "keyTab" not in given:
            raise _untranslatable(module, "keyTab with useKeyTab=true")
        for name, ours in _KERBEROS.items():
            if name in given:
                yield ours, given[name]
        return
    if module != "OAuthBearerLoginModule":
        raise _untranslatable(module, "a login module of Kafka, Java or AWS")
    claims = {name: value for name, value in given.items() if name.startswith("unsecuredLoginStringClaim_")}
    extensions = {
        name.removeprefix("extension_"): value
        for name, value in given.items()
        if name.startswith("extension_")
    }
    if extensions:
        yield "sasl.oauthbearer.extensions", ",".join(f"{name}={value}" for name, value in extensions.items())
    if claims:
        subject = claims.pop("unsecuredLoginStringClaim_sub", None)
        if claims or subject is None:
            raise _untranslatable(module, "of unsecured claims only unsecuredLoginStringClaim_sub")
        seconds = given.get("unsecuredLoginLifetimeSeconds", "3600")
        yield "enable.sasl.oauthbearer.unsecure.jwt", "true"
        yield _CONFIG, f"principal={subject} lifeSeconds={seconds}"
    for name, ours in _OAUTH.items():
        if name in given:
            yield ours, given[name]


_KERBEROS: Mapping[str, str] = {
    "keyTab": "sasl.kerberos.keytab",
    "principal": "sasl.kerberos.principal",
    "serviceName": "sasl.kerberos.service.name",
}
_OAUTH: Mapping[str, str] = {
    "clientId": "sasl.oauthbearer.client.id",
    "clientSecret": "sasl.oauthbearer.client.secret",
    "scope": "sasl.oauthbearer.scope",
}


def _parsed(line: str) -> tuple[str, dict[str, str]]:
    """Returns the class of a JAAS entry's module without its package, and the options. Parses as Kafka does.

    Raises:
        InvalidOptionError: if it is not one entry.
    """
    parsed = _JAAS_LINE.fullmatch(line)
    if parsed is None:
        module = re.match(rf"\s*({_WORD}LoginModule)\b", line)
        expected = "one entry: MODULE required name=value …;"
        raise _untranslatable(module[1] if module else "this text", expected)
    options = dict(_jaas_option(*found) for found in re.findall(_JAAS_OPTION, parsed[2]))
    return parsed[1].rpartition(".")[2], options


def _untranslatable(module: str, expected: str) -> InvalidOptionError:
    return InvalidOptionError(
        f"option 'kafka.{_JAAS}' with {module} cannot be translated (its value is not shown); expected "
        f"{expected}.",
        fix="correct it, or remove it and set kafka.sasl.mechanism and librdkafka's own options: "
        "kafka.sasl.username and kafka.sasl.password, kafka.sasl.kerberos.* for GSSAPI, "
        "kafka.sasl.oauthbearer.* for OAUTHBEARER.",
    )


def _jaas_option(name: str, value: str) -> tuple[str, str]:
    if value[0] not in "\"'":
        return name, value
    return name, re.sub(r"\\([0-7]{1,3}|.)", _unescaped, value[1:-1], flags=re.DOTALL)


def _unescaped(found: re.Match[str]) -> str:
    text = found[1]
    return chr(int(text, 8)) if text[0] in "01234567" else _ESCAPES.get(text, text)
