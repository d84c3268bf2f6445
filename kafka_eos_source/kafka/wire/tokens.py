"""Tokens for SASL/OAUTHBEARER, from the same properties as librdkafka's (KIP-768)."""

from __future__ import annotations

import base64
import binascii
import json
import ssl
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Mapping
from typing import Any

from kafka.net.sasl.oauth import AbstractTokenProvider

from kafka_eos_source.errors import InvalidOptionError
from kafka_eos_source.kafka.login import LoginRefusedError
from kafka_eos_source.kafka.secrets import Secrets
from kafka_eos_source.runtime.deadline import Deadline

#: A token is renewed after this share of its lifetime.
_LIFETIME_SHARE = 0.8
#: Lifetime of a token that does not tell its own.
_UNKNOWN_LIFETIME_SECONDS = 60.0
_UNSECURED_LIFETIME_SECONDS = 3600.0
_LARGEST_ANSWER_BYTES = 1 << 20


class Tokens(AbstractTokenProvider):  # type: ignore[misc]
    """The token of a client. Call `refresh` before each login; it keeps a token that is still good.

    Args:
        extensions: SASL extensions (KIP-342).
    """

    def __init__(self, extensions: Mapping[str, str]) -> None:
        self._extensions = dict(extensions)
        self._token, self._renew_at = "", 0.0

    @classmethod
    def of(cls, kafka: Mapping[str, str]) -> Tokens:
        """Returns the tokens that librdkafka properties describe; `unsupported` must not object to them."""
        extensions = _pairs(kafka.get("sasl.oauthbearer.extensions", ""), ",")
        if kafka.get("sasl.oauthbearer.method", "default").lower() == "oidc":
            return ClientCredentials(kafka, extensions)
        return UnsecuredTokens(kafka.get("sasl.oauthbearer.config", ""), extensions)

    def refresh(self, deadline: Deadline) -> None:
        """Gets another token, if there is none or it expires soon.

        Raises:
            LoginRefusedError: if it is refused.
            OSError: if nobody answers in time.
        """
        if time.monotonic() >= self._renew_at:
            self._token, seconds = self._new_token(deadline)
            self._renew_at = time.monotonic() + _LIFETIME_SHARE * seconds

    def token(self) -> str:
        """Returns the token of the last `refresh`."""
        return self._token

    def extensions(self) -> dict[str, str]:
        """Returns the SASL extensions."""
        return self._extensions

    def _new_token(self, deadline: Deadline, /) -> tuple[str, float]:
        """Returns a token and its lifetime in seconds."""
        raise NotImplementedError


class ClientCredentials(Tokens):
    """Tokens of an OAuth service, for a client id and secret (RFC 6749, section 4.4)."""

    def __init__(self, kafka: Mapping[str, str], extensions: Mapping[str, str]) -> None:
        super().__init__(extensions)
        self._url = kafka.get("sasl.oauthbearer.token.endpoint.url", "")
        self._secrets = Secrets.of(kafka)
        client = kafka.get("sasl.oauthbearer.client.id", "")
        secret = kafka.get("sasl.oauthbearer.client.secret", "")
        self._authorization = "Basic " + base64.b64encode(f"{client}:{secret}".encode()).decode()
        self._form = {"grant_type": "client_credentials"}
        if kafka.get("sasl.oauthbearer.scope"):
            self._form["scope"] = kafka["sasl.oauthbearer.scope"]
        self._tls = _https(kafka) if self._url.lower().startswith("https:") else None

    def _new_token(self, deadline: Deadline) -> tuple[str, float]:
        request = urllib.request.Request(
            self._url,
            urllib.parse.urlencode(self._form).encode(),
            {"Authorization": self._authorization, "Accept": "application/json"},
        )
        seconds = deadline.remaining_seconds()
        if not seconds:
            raise TimeoutError(f"no time is left to ask {self._url}")
        try:
            with urllib.request.urlopen(request, timeout=seconds, context=self._tls) as answer:
                found: Any = json.loads(answer.read(_LARGEST_ANSWER_BYTES))
        except urllib.error.HTTPError as error:
            text = f"{self._url} answered {error.code} {self._secrets.hide(str(error.reason))}"
            if error.code >= 500 or error.code == 429:
                raise ConnectionError(text) from None
            raise LoginRefusedError(text) from None  # the service's own words may quote the secret
        if not isinstance(found, dict) or not isinstance(found.get("access_token"), str):
            raise LoginRefusedError(f"{self._url} answered without an access_token")
        token = found["access_token"]
        lifetime = found.get("expires_in")
        return token, float(lifetime) if isinstance(lifetime, (int, float)) else _lifetime(token)


class UnsecuredTokens(Tokens):
    """Tokens without a signature (RFC 7515, appendix A.5), for tests and development.

    Args:
        config: ``sasl.oauthbearer.config``, as in ``principal=alice lifeSeconds=60``.
        extensions: SASL extensions.
    """

    def __init__(self, config: str, extensions: Mapping[str, str]) -> None:
        given = _pairs(config, " ")
        more = {
            name.removeprefix("extension_"): value
            for name, value in given.items()
            if name.startswith("extension_")
        }
        super().__init__({**extensions, **more})
        self._claims = {
            given.get("principalClaimName", "sub"): given.get("principal", ""),
        }
        if "scope" in given:
            self._claims[given.get("scopeClaimName", "scope")] = given["scope"]
        self._seconds = float(given.get("lifeSeconds", _UNSECURED_LIFETIME_SECONDS))

    def _new_token(self, _: Deadline) -> tuple[str, float]:
        now = time.time()
        claims = {**self._claims, "iat": now, "exp": now + self._seconds}
        return f"{_part({'alg': 'none'})}.{_part(claims)}.", self._seconds


def unsupported(kafka: Mapping[str, str]) -> str:
    """Returns why there are no tokens for librdkafka properties; "" if there are."""
    method = kafka.get("sasl.oauthbearer.method", "default").lower()
    if method == "default":
        if str(kafka.get("enable.sasl.oauthbearer.unsecure.jwt", "false")).lower() == "true":
            return ""
        return "kafka.sasl.oauthbearer.method=default without kafka.enable.sasl.oauthbearer.unsecure.jwt=true"
    if method != "oidc":
        return f"kafka.sasl.oauthbearer.method={method}"
    grant = kafka.get("sasl.oauthbearer.grant.type", "client_credentials").lower()
    if grant != "client_credentials":
        return f"kafka.sasl.oauthbearer.grant.type={grant}"
    metadata = kafka.get("sasl.oauthbearer.metadata.authentication.type", "none").lower()
    if metadata != "none":
        return f"kafka.sasl.oauthbearer.metadata.authentication.type={metadata}"
    return "" if kafka.get("sasl.oauthbearer.token.endpoint.url") else "OIDC without a token endpoint"


def _https(kafka: Mapping[str, str]) -> ssl.SSLContext:
    try:
        return ssl.create_default_context(
            cafile=kafka.get("https.ca.location"), cadata=kafka.get("https.ca.pem") or None
        )
    except (OSError, ValueError) as error:
        raise InvalidOptionError(
            f"cannot use the certificates of kafka.https.ca.location: {error}.",
            fix="set it to a PEM file with the authority of the token endpoint.",
        ) from error


def _pairs(text: str, separator: str) -> dict[str, str]:
    parts = (each.partition("=") for each in text.split(separator) if each.strip())
    return {name.strip(): value.strip() for name, _, value in parts}


def _part(claims: Mapping[str, object]) -> str:
    return base64.urlsafe_b64encode(json.dumps(claims).encode()).decode().rstrip("=")


def _lifetime(token: str) -> float:
    """Returns the seconds until a JWT expires, if it says so."""
    try:
        part = token.split(".")[1]
        claims = json.loads(base64.urlsafe_b64decode(part + "=" * (-len(part) % 4)))
        return max(0.0, float(claims["exp"]) - time.time())
    except (IndexError, KeyError, TypeError, ValueError, binascii.Error):
        return _UNKNOWN_LIFETIME_SECONDS
