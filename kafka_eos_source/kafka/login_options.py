"""The options of a login: translates Java's to librdkafka's, and checks them before a query starts."""

from __future__ import annotations

import importlib.util
import logging
import re
from collections.abc import Callable, Iterable, Mapping
from typing import NamedTuple

from kafka_eos_source.errors import InvalidOptionError
from kafka_eos_source.kafka import aws
from kafka_eos_source.kafka.login import MECHANISMS, mechanism
from kafka_eos_source.kafka.tokens import PROVIDER, Tokens
from kafka_eos_source.runtime.private_folders import warn_once
from kafka_eos_source.secrets import is_loopback

_log = logging.getLogger(__name__)

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
    put(PROVIDER, aws.PROVIDER_PATH, source)
    put(_CONFIG, aws.checked_aws(wanted, options.get("bootstrap.servers", "")), source)


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
