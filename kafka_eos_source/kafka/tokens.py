"""Tokens for SASL/OAUTHBEARER: of an OAuth service, a file, AWS, or a function of the user.

The package's own client asks for one before each login. All clients of a process share the token of a login.
"""

from __future__ import annotations

import base64
import concurrent.futures
import datetime
import http.client
import importlib
import importlib.util
import json
import os
import re
import ssl
import threading
import time
import urllib.error
import urllib.parse
import urllib.request
import uuid
from collections.abc import Callable, Mapping
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple

from kafka_eos_source import option_values
from kafka_eos_source.errors import InvalidOptionError, KafkaEosError, RetriableError
from kafka_eos_source.kafka.failure import LoginRefusedError
from kafka_eos_source.runtime.deadline import Deadline
from kafka_eos_source.runtime.json_input import SHAPE_ERRORS, parse_json
from kafka_eos_source.secrets import ALLOW_HTTP, Secrets, shown_url

#: Properties that describe the tokens.
PREFIXES = ("sasl.oauthbearer.", "enable.sasl.oauthbearer.", "https.")
#: Names the function that gives tokens.
PROVIDER = "sasl.oauthbearer.token.provider"
#: A token is renewed after this share of its lifetime.
_LIFETIME_SHARE = 0.8
#: Lifetime of a token that does not tell its own.
_UNKNOWN_LIFETIME_SECONDS = 60.0
_UNSECURED_LIFETIME_SECONDS = 3600.0
#: In the year 5138; a larger number is in milliseconds, as AWS's signer returns it.
_NO_EXPIRY_SECONDS = 100_000_000_000
_LARGEST_ANSWER_BYTES = 1 << 20
_CLIENT_CREDENTIALS, _JWT_BEARER = "client_credentials", "urn:ietf:params:oauth:grant-type:jwt-bearer"
#: Where Azure's virtual machines get tokens of their managed identity. Only the machine itself answers there.
_AZURE_HOST = "http://169.254.169.254/"
_AZURE_URL = f"{_AZURE_HOST}metadata/identity/oauth2/token"
_ENDPOINT = "sasl.oauthbearer.token.endpoint.url"
_ALLOWS = f"sasl.oauthbearer.{ALLOW_HTTP}"


class Issued(NamedTuple):
    """A token as a source gives it.

    Attributes:
        token: the token.
        expires: seconds since the epoch.
        principal: name for librdkafka's log.
        extensions: SASL extensions (KIP-342).
    """

    token: str
    expires: float
    principal: str = ""
    extensions: Mapping[str, str] = {}


Source = Callable[[Deadline], Issued]


class Tokens:
    """The token of a login. Call `current` before each login; it keeps a token that is still good.

    Args:
        source: gives a new token. Raises `LoginRefusedError` if it is refused, and OSError if it may be given
            a moment later.
        extensions: SASL extensions of each token.
    """

    def __init__(self, source: Source, extensions: Mapping[str, str]) -> None:
        self._source = source
        self._extensions = dict(extensions)
        self._issued = Issued("", 0.0)
        self._renew_at = 0.0
        self._lock = threading.Lock()

    @staticmethod
    def of(kafka: Mapping[str, Any]) -> Tokens:
        """Returns the tokens that librdkafka properties describe; the same object for the same properties.

        Raises:
            InvalidOptionError: if the properties are not complete, or a file or function cannot be loaded.
        """
        return _tokens(tuple(sorted((n, str(v)) for n, v in kafka.items() if n.startswith(PREFIXES))))

    def current(self, deadline: Deadline) -> Issued:
        """Returns a token that is good for some time.

        Raises:
            LoginRefusedError: if it is refused.
            OSError: if nobody answers in time.
        """
        if not self._lock.acquire(timeout=deadline.remaining_seconds()):
            raise TimeoutError("another thread waits for a token")
        try:
            if time.monotonic() >= self._renew_at:
                issued = self._source(deadline)
                seconds = issued.expires - time.time()
                if not seconds > 0:  # nor is it if it is not a number
                    raise ConnectionError(f"a token was given that expired {-seconds:.0f} s ago")
                self._issued = issued._replace(extensions={**self._extensions, **issued.extensions})
                self._renew_at = time.monotonic() + _LIFETIME_SHARE * seconds
            return self._issued
        finally:
            self._lock.release()


@lru_cache(maxsize=64)
def _tokens(properties: tuple[tuple[str, str], ...]) -> Tokens:
    kafka = dict(properties)
    check_tokens(kafka)
    extensions = _pairs(kafka.get("sasl.oauthbearer.extensions", ""), ",")
    config, url = kafka.get("sasl.oauthbearer.config", ""), _url(kafka)
    if PROVIDER in kafka:
        return Tokens(ProvidedTokens(kafka[PROVIDER], config), extensions)
    if _method(kafka) == "default":
        return Tokens(unsecured_tokens(config), extensions | _unsecured_extensions(config))
    if _is_azure(kafka):
        url = kafka.get("sasl.oauthbearer.token.endpoint.url") or _AZURE_URL
        query = _pairs(config, ",").get("query", "")
        return Tokens(OAuthService(f"{url}?{query}", {"Metadata": "true"}, None, kafka), extensions)
    if url.startswith("file:"):
        return Tokens(TokenFile(urllib.request.url2pathname(urllib.parse.urlsplit(url).path)), extensions)
    headers = {}
    if kafka.get("sasl.oauthbearer.client.id"):
        login = f"{kafka['sasl.oauthbearer.client.id']}:{kafka.get('sasl.oauthbearer.client.secret', '')}"
        headers["Authorization"] = "Basic " + base64.b64encode(login.encode()).decode()
    scope = {"scope": kafka["sasl.oauthbearer.scope"]} if kafka.get("sasl.oauthbearer.scope") else {}
    if _grant(kafka) == _JWT_BEARER:
        asserted = assertion(kafka)

        def form() -> dict[str, str]:
            return {"grant_type": _JWT_BEARER, "assertion": asserted(), **scope}
    else:

        def form() -> dict[str, str]:
            return {"grant_type": _CLIENT_CREDENTIALS, **scope}

    return Tokens(OAuthService(url, headers, form, kafka), extensions)


# -- sources -------------------------------------------------------------------------------------


class _NoRedirects(urllib.request.HTTPRedirectHandler):
    """Follows no redirect, because another host must not see the client's secret."""

    def redirect_request(self, *_: Any) -> None:
        return None


class OAuthService:
    """Asks an OAuth service for tokens (RFC 6749, section 4.4; RFC 7523).

    Args:
        url: the token endpoint.
        headers: of each request, such as the client's login.
        form: returns the fields to send; None = the request has no body.
        kafka: properties of TLS.
    """

    def __init__(
        self,
        url: str,
        headers: Mapping[str, str],
        form: Callable[[], Mapping[str, str]] | None,
        kafka: Mapping[str, str],
    ) -> None:
        self._url, self._headers, self._form = url, {**headers, "Accept": "application/json"}, form
        self._shown = shown_url(url)
        self._secrets = Secrets.of(kafka)
        handlers: list[Any] = [_NoRedirects]
        if url.lower().startswith("https:"):
            handlers.append(urllib.request.HTTPSHandler(context=_https(kafka)))
        self._opener = urllib.request.build_opener(*handlers)

    def __call__(self, deadline: Deadline) -> Issued:
        body = None if self._form is None else urllib.parse.urlencode(self._form()).encode()
        request = urllib.request.Request(self._url, body, self._headers)
        seconds = deadline.remaining_seconds()
        if not seconds:
            raise TimeoutError(f"no time is left to ask {self._shown}")
        try:
            with self._opener.open(request, timeout=seconds) as answer:
                found: Any = parse_json(answer.read(_LARGEST_ANSWER_BYTES))
        except urllib.error.HTTPError as error:
            said = self._secrets.hide(f"{error.reason}{_explanation(error)}")
            text = f"{self._shown} answered {error.code} {said}"
            if error.code >= 500 or error.code == 429:
                raise ConnectionError(text) from None
            raise LoginRefusedError(text) from None  # the service's own words may quote the secret
        except (http.client.InvalidURL, UnicodeError) as error:
            said = self._secrets.hide(f"{self._shown!r} is not a URL: {error}")
            raise LoginRefusedError(said) from None  # the error may quote a password in the URL
        except ValueError as error:
            raise ConnectionError(f"{self._shown} did not answer with JSON") from error
        except http.client.HTTPException as error:
            raise ConnectionError(
                f"{self._shown} did not answer with HTTP ({type(error).__name__})"
            ) from error
        if not isinstance(found, dict) or not isinstance(found.get("access_token"), str):
            raise LoginRefusedError(f"{self._shown} answered without an access_token")
        token = found["access_token"]
        try:
            return Issued(token, time.time() + float(found["expires_in"]))
        except SHAPE_ERRORS:  # it does not say for how long
            return Issued(token, _expiry(token))


class TokenFile:
    """Reads tokens from a file that others renew, such as the kubelet.

    Args:
        path: of the file.
    """

    def __init__(self, path: str) -> None:
        self._path = path

    def __call__(self, _: Deadline) -> Issued:
        token = _read_text(self._path)
        return Issued(token, _expiry(token))


class ProvidedTokens:
    """Calls a function of the user, in a thread of its own, because it may hang.

    Args:
        path: ``module:function``.
        config: the function's argument.
    """

    def __init__(self, path: str, config: str) -> None:
        self._path, self._config = path, config
        self._function = provider(path)
        self._secrets = Secrets.of({"sasl.oauthbearer.config": config})
        self._running: concurrent.futures.Future[Any] | None = None

    def __call__(self, deadline: Deadline) -> Issued:
        if self._running is None:
            self._running = concurrent.futures.Future()
            threading.Thread(target=self._run, args=(self._running,), daemon=True).start()
        running = self._running
        concurrent.futures.wait([running], deadline.remaining_seconds())
        if not running.done():
            raise TimeoutError(
                f"the token provider {self._path!r} has not returned for {deadline.budget_seconds:.0f} s"
            )
        self._running = None
        error = running.exception()
        if error is None:
            return self._issued(running.result())
        said = self._secrets.hide(str(error))
        text = f"the token provider {self._path!r} raised {type(error).__name__}: {said}"
        if isinstance(error, LoginRefusedError):
            raise error
        if isinstance(error, (OSError, RetriableError)):
            raise ConnectionError(text) from error
        raise LoginRefusedError(text) from error

    def _run(self, running: concurrent.futures.Future[Any]) -> None:
        try:
            running.set_result(self._function(self._config))
        except BaseException as error:  # noqa: BLE001 - `__call__` raises it in the caller's thread
            running.set_exception(error)

    def _issued(self, found: Any) -> Issued:
        if isinstance(found, tuple):
            token, expires, *more = (*found, None, None)[: max(2, len(found))]
        else:
            token, more = getattr(found, "token", None), []
            expires = getattr(found, "expires_on", None) or getattr(found, "expiry", None)
        if isinstance(expires, datetime.datetime):  # without a time zone, google-auth means UTC
            expires = expires.replace(tzinfo=expires.tzinfo or datetime.timezone.utc).timestamp()
        principal, extensions = (*more, None, None)[:2]
        if (
            not isinstance(token, str)
            or not token
            or isinstance(expires, bool)
            or not isinstance(expires, (int, float))
            or not isinstance(extensions or {}, Mapping)
        ):
            raise LoginRefusedError(
                f"the token provider {self._path!r} returned {_shape(found)}; expected (token, expiry) or an "
                "object with the attributes token and expires_on or expiry: a text, and seconds since the "
                "epoch or a datetime"
            )
        if _NO_EXPIRY_SECONDS < expires < float("inf"):
            raise LoginRefusedError(
                f"the token provider {self._path!r} returned the expiry {expires}; expected seconds since "
                "the epoch, not milliseconds"
            )
        return Issued(token, float(expires), str(principal or ""), dict(extensions or {}))


def unsecured_tokens(config: str) -> Source:
    """Gives tokens without a signature (RFC 7515, appendix A.5), for tests and development.

    Args:
        config: ``sasl.oauthbearer.config``, as in ``principal=alice lifeSeconds=60``.
    """
    given = _pairs(config, " ")
    own = {given.get("principalClaimName", "sub"): given.get("principal", "")}
    if "scope" in given:
        own[given.get("scopeClaimName", "scope")] = given["scope"]
    seconds = float(given.get("lifeSeconds", _UNSECURED_LIFETIME_SECONDS))

    def issue(_: Deadline) -> Issued:
        now = time.time()
        claims = {**own, "iat": now, "exp": now + seconds}
        return Issued(f"{_part({'alg': 'none'})}.{_part(claims)}.", now + seconds, given.get("principal", ""))

    return issue


def _unsecured_extensions(config: str) -> dict[str, str]:
    marked = _pairs(config, " ").items()
    return {name.removeprefix("extension_"): value for name, value in marked if name.startswith("extension_")}


def assertion(kafka: Mapping[str, str]) -> Callable[[], str]:
    """Returns what makes the assertion of a request for a token (RFC 7523): a file, or a signature.

    Raises:
        InvalidOptionError: if the private key cannot be used.
    """
    prefix = "sasl.oauthbearer.assertion."
    if kafka.get(prefix + "file"):
        return lambda: _read_text(kafka[prefix + "file"])
    algorithm = kafka.get(prefix + "algorithm", "RS256")
    key = _private_key(kafka, algorithm)
    header: dict[str, Any] = {"alg": algorithm, "typ": "JWT"}
    template: dict[str, Any] = {}
    if kafka.get(prefix + "jwt.template.file"):
        try:
            given = parse_json(Path(kafka[prefix + "jwt.template.file"]).read_text())
            header, template = {**header, **given.get("header", {})}, dict(given.get("payload", {}))
        except (OSError, ValueError, TypeError, AttributeError) as error:
            raise InvalidOptionError(
                f"option 'kafka.{prefix}jwt.template.file' has the value "
                f"{kafka[prefix + 'jwt.template.file']!r}, which cannot be read: {error}.",
                fix='name a JSON file of the form {"header": {…}, "payload": {…}}.',
            ) from error
    for claim in ("aud", "iss", "sub"):
        if kafka.get(f"{prefix}claim.{claim}"):
            template[claim] = kafka[f"{prefix}claim.{claim}"]

    def signed() -> str:
        now = int(time.time())
        claims = {**template, "iat": now, "exp": now + int(kafka.get(prefix + "claim.exp.seconds", "300"))}
        claims["nbf"] = now - int(kafka.get(prefix + "claim.nbf.seconds", "60"))
        if kafka.get(prefix + "claim.jti.include", "false").lower() == "true":
            claims["jti"] = str(uuid.uuid4())
        text = f"{_part(header)}.{_part(claims)}"
        return f"{text}.{_encoded(key(text.encode()))}"

    return signed


def _private_key(kafka: Mapping[str, str], algorithm: str) -> Callable[[bytes], bytes]:
    """Returns the function that signs with the key of ``sasl.oauthbearer.assertion.private.key.*``."""
    name = "sasl.oauthbearer.assertion.private.key."
    try:
        from cryptography.hazmat.primitives.asymmetric import ec, padding, rsa, utils
        from cryptography.hazmat.primitives.hashes import SHA256
        from cryptography.hazmat.primitives.serialization import load_pem_private_key
    except ImportError as error:
        raise InvalidOptionError(
            f"option 'kafka.{name}*' needs the Python package 'cryptography', which is not installed.",
            fix="install it: pip install cryptography. Or set kafka.sasl.oauthbearer.assertion.file.",
        ) from error
    try:
        pem = kafka.get(name + "pem", "").encode() or Path(kafka.get(name + "file", "")).read_bytes()
        key = load_pem_private_key(pem, kafka.get(name + "passphrase", "").encode() or None)
    except (OSError, ValueError, TypeError) as error:
        # the library's text may quote the key
        why = error.strerror if isinstance(error, OSError) else "wrong passphrase, or not PEM"
        where = f"file={kafka[name + 'file']!r}" if name + "pem" not in kafka else "pem"
        raise InvalidOptionError(
            f"the private key of option 'kafka.{name}{where}' cannot be used: {why}.",
            fix=f"correct the option, or kafka.{name}passphrase.",
        ) from None
    if algorithm == "RS256" and isinstance(key, rsa.RSAPrivateKey):
        return lambda data: key.sign(data, padding.PKCS1v15(), SHA256())
    if algorithm == "ES256" and isinstance(key, ec.EllipticCurvePrivateKey) and key.curve.key_size == 256:

        def sign(data: bytes) -> bytes:
            r, s = utils.decode_dss_signature(key.sign(data, ec.ECDSA(SHA256())))
            return r.to_bytes(32, "big") + s.to_bytes(32, "big")

        return sign
    raise InvalidOptionError(
        f"option 'kafka.sasl.oauthbearer.assertion.algorithm' has the value {algorithm!r}, which the private "
        f"key does not fit ({type(key).__name__}).",
        fix="use RS256 with an RSA key, or ES256 with a key of the curve P-256.",
    )


# -- checks --------------------------------------------------------------------------------------


def provider(path: str) -> Callable[[str], Any]:
    """Imports a token provider.

    Args:
        path: ``module:function``.

    Raises:
        InvalidOptionError: if that is impossible on this machine.
    """
    module, separator, name = path.partition(":")
    fix = (
        "write module:function. The module must be importable on the driver and on every executor: install "
        "it there, or pass it to spark-submit with --py-files."
    )
    if not (separator and module and name):
        raise InvalidOptionError(f"option 'kafka.{PROVIDER}' has the value {path!r}.", fix=fix)
    try:
        found: Any = importlib.import_module(module)
        for each in name.split("."):
            found = getattr(found, each)
    except KafkaEosError:
        raise
    except Exception as error:
        raise InvalidOptionError(
            f"option 'kafka.{PROVIDER}' has the value {path!r}, which cannot be imported in this process: "
            f"{type(error).__name__}: {error}.",
            fix=fix,
        ) from error
    if not callable(found):
        raise InvalidOptionError(
            f"option 'kafka.{PROVIDER}' has the value {path!r}, which is no function but a "
            f"{type(found).__name__}.",
            fix=fix,
        )
    function: Callable[[str], Any] = found
    return function


def check_tokens(kafka: Mapping[str, str]) -> None:
    """Checks the properties of OAUTHBEARER, except files and functions.

    Raises:
        InvalidOptionError: if they conflict, or one is missing.
    """
    if PROVIDER in kafka:
        for name in ("method", "token.endpoint.url", "client.id", "client.secret", "grant.type"):
            if f"sasl.oauthbearer.{name}" in kafka:
                raise InvalidOptionError(
                    f"options 'kafka.{PROVIDER}' and 'kafka.sasl.oauthbearer.{name}' are both set; tokens "
                    "have one source.",
                    fix="remove one of them.",
                )
        return
    method = _method(kafka)
    if method == "default":
        if kafka.get("enable.sasl.oauthbearer.unsecure.jwt", "false").lower() in ("true", "1", "t"):
            return
        raise InvalidOptionError(
            "kafka.sasl.mechanism=OAUTHBEARER needs to know where tokens come from.",
            fix="set kafka.sasl.oauthbearer.token.endpoint.url with kafka.sasl.oauthbearer.client.id and "
            f".client.secret, or kafka.{PROVIDER}=module:function; docs/logins.md has examples.",
        )
    metadata = kafka.get("sasl.oauthbearer.metadata.authentication.type", "none").lower()
    if metadata not in ("none", "azure_imds"):
        raise InvalidOptionError(
            f"option 'kafka.sasl.oauthbearer.metadata.authentication.type' has the value {metadata!r}; "
            "expected none or azure_imds.",
            fix=f"write a function that gets the token, and set kafka.{PROVIDER}=module:function.",
        )
    url = _url(kafka)
    if metadata == "azure_imds":
        if url and not url.startswith(_AZURE_HOST):
            _refuse_plain_http(kafka, url, "the token")
        return
    scheme = url.partition(":")[0].lower()
    if scheme not in ("http", "https", "file"):
        raise InvalidOptionError(
            f"option 'kafka.sasl.oauthbearer.token.endpoint.url' has the value {shown_url(url)!r}."
            if url
            else "option 'kafka.sasl.oauthbearer.token.endpoint.url' is missing.",
            fix="set it to the https URL of the token endpoint, or to file:///path/of/a/token.",
        )
    if scheme != "file":
        _refuse_plain_http(kafka, url, "the login")
    needs_client = scheme != "file" and _grant(kafka) == _CLIENT_CREDENTIALS
    for name in ("client.id", "client.secret") if needs_client else ():
        if not kafka.get(f"sasl.oauthbearer.{name}"):
            raise InvalidOptionError(
                f"option 'kafka.sasl.oauthbearer.{name}' is missing; the token endpoint asks for it.",
                fix=f"set .option('kafka.sasl.oauthbearer.{name}', …).",
            )


def _refuse_plain_http(kafka: Mapping[str, str], url: str, sent: str) -> None:
    allowed = kafka.get(_ALLOWS, "false").lower() in ("true", "1", "t")
    option_values.refuse_plain_http(f"kafka.{_ENDPOINT}", url, sent, f"kafka.{_ALLOWS}", allowed=allowed)


def _method(kafka: Mapping[str, str]) -> str:
    """Returns ``oidc`` or ``default``. Java's clients have no such property, and decide by the URL."""
    implied = "oidc" if _url(kafka) else "default"
    return kafka.get("sasl.oauthbearer.method", implied).lower()


def _url(kafka: Mapping[str, str]) -> str:
    return kafka.get("sasl.oauthbearer.token.endpoint.url", "").strip()


def _grant(kafka: Mapping[str, str]) -> str:
    return kafka.get("sasl.oauthbearer.grant.type", _CLIENT_CREDENTIALS).lower()


def _is_azure(kafka: Mapping[str, str]) -> bool:
    return kafka.get("sasl.oauthbearer.metadata.authentication.type", "none").lower() == "azure_imds"


# -- texts ---------------------------------------------------------------------------------------


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


def _explanation(error: urllib.error.HTTPError) -> str:
    """Returns what a service says about a refusal (RFC 6749, section 5.2); "" if nothing."""
    try:
        found = parse_json(error.read(_LARGEST_ANSWER_BYTES))
        said = [str(found[name])[:300] for name in ("error", "error_description") if found.get(name)]
    except (OSError, http.client.HTTPException, *SHAPE_ERRORS):
        return ""
    return f" ({': '.join(said)})" if said else ""


def _shape(found: Any) -> str:
    """Describes a value by its types, because it may contain a token."""
    if isinstance(found, tuple):
        return f"({', '.join(type(each).__name__ for each in found)})"
    return f"a value of type {type(found).__name__}"


def _read_text(path: str) -> str:
    text = Path(path).read_text().strip()
    if not text:
        raise ConnectionError(f"the file {path!r} with a token is empty")
    return text


def _pairs(text: str, separator: str) -> dict[str, str]:
    parts = (each.partition("=") for each in text.split(separator) if each.strip())
    return {name.strip(): value.strip() for name, _, value in parts}


def _encoded(data: bytes) -> str:
    return base64.urlsafe_b64encode(data).decode().rstrip("=")


def _part(claims: Mapping[str, object]) -> str:
    return _encoded(json.dumps(claims).encode())


def _expiry(token: str) -> float:
    """Returns when a JWT expires, if it says so."""
    try:
        part = token.split(".")[1]
        claims = parse_json(base64.urlsafe_b64decode(part + "=" * (-len(part) % 4)))
        return float(claims["exp"])
    except SHAPE_ERRORS:
        return time.time() + _UNKNOWN_LIFETIME_SECONDS


# -- Amazon MSK with IAM ------------------------------------------------------------------------
#
# AWS's signer makes the token without a request. Only credentials may need one: those of a role, of a machine
# or of a container. They are looked up for each token, which lasts 15 minutes.

#: The provider, as the value of ``sasl.oauthbearer.token.provider``.
PROVIDER_PATH = f"{__name__}:aws_token"

#: What ``sasl.oauthbearer.config`` may contain. All but the first are options of AWS's ``IAMLoginModule``.
OPTIONS = (
    "awsRegion",
    "awsProfileName",
    "awsRoleArn",
    "awsRoleSessionName",
    "awsRoleExternalId",
    "awsStsRegion",
)

_SESSION_NAME = "kafka-eos"
_HOST_OF_REGION = re.compile(r"\.kafka(?:-serverless)?\.([a-z0-9-]+)\.(?:api\.)?(?:amazonaws\.com|api\.aws)")


def checked_aws(given: Mapping[str, str], bootstrap_servers: str) -> str:
    """Returns the text of ``sasl.oauthbearer.config`` for options, with the region of the cluster.

    Args:
        given: option → value, of `OPTIONS`.
        bootstrap_servers: addresses of the cluster, whose names contain the region.

    Raises:
        InvalidOptionError: if an option is unknown, the region is, or the package of the signer is missing.
    """
    if importlib.util.find_spec("aws_msk_iam_sasl_signer") is None:
        raise InvalidOptionError(
            "kafka.sasl.mechanism=AWS_MSK_IAM needs the Python package 'aws-msk-iam-sasl-signer-python', "
            "which is not installed.",
            fix="install it on the driver and on every executor: pip install 'kafka-eos-source[aws]'.",
        )
    for name, value in given.items():
        if name not in OPTIONS:
            raise InvalidOptionError(
                f"the login at AWS has no option {name!r}; expected {', '.join(OPTIONS)}.",
                fix="remove it from kafka.sasl.jaas.config or kafka.sasl.oauthbearer.config.",
            )
        if not value or re.search(r"\s", value):
            raise InvalidOptionError(
                f"the option {name!r} of the login at AWS has the value {value!r}.",
                fix="set it to a value without spaces, or remove it.",
            )
    found = _HOST_OF_REGION.search(bootstrap_servers)
    region = (
        given.get("awsRegion")
        or (found[1] if found else "")
        or os.environ.get("AWS_REGION", "")
        or os.environ.get("AWS_DEFAULT_REGION", "")
    )
    if not region:
        raise InvalidOptionError(
            f"the AWS region of the cluster is unknown: kafka.bootstrap.servers={bootstrap_servers!r} does "
            "not name it, as in b-1.name.xxxxxx.c2.kafka.eu-central-1.amazonaws.com:9098.",
            fix="set kafka.sasl.oauthbearer.config to awsRegion=…, or the environment variable AWS_REGION.",
        )
    return " ".join(f"{name}={value}" for name, value in sorted({**given, "awsRegion": region}.items()))


def aws_token(config: str) -> tuple[str, float]:
    """Returns a token and its expiry. A token provider; see ``docs/logins.md``.

    Args:
        config: from `checked`.

    Raises:
        LoginRefusedError: if there are no credentials, or AWS refuses them.
        ConnectionError: if AWS does not answer.
    """
    from aws_msk_iam_sasl_signer.MSKAuthTokenProvider import generate_auth_token_from_credentials_provider
    from botocore.credentials import CredentialProvider
    from botocore.exceptions import BotoCoreError, ClientError, HTTPClientError
    from botocore.exceptions import ConnectionError as NoConnection

    options = dict(each.split("=", 1) for each in config.split())

    class Found(CredentialProvider):  # type: ignore[misc]
        def load(self) -> Any:
            return _credentials(options)

    try:
        made, expires_ms = generate_auth_token_from_credentials_provider(options["awsRegion"], Found())
    except (HTTPClientError, NoConnection) as error:
        raise ConnectionError(f"no answer from AWS: {error}") from error
    except (BotoCoreError, ClientError) as error:
        raise LoginRefusedError(f"AWS: {error}") from error
    return made, expires_ms / 1000


def _credentials(options: Mapping[str, str]) -> Any:
    """Returns credentials of the environment, a profile, or a role."""
    import botocore.session
    from botocore.credentials import Credentials

    session = botocore.session.Session(profile=options.get("awsProfileName"))
    found = session.get_credentials()
    if found is None:
        raise LoginRefusedError(
            "AWS: no credentials were found: neither environment variables, nor a profile, nor the role of a "
            "machine or container"
        )
    if "awsRoleArn" not in options:
        return found.get_frozen_credentials()
    sts = session.create_client("sts", region_name=options.get("awsStsRegion", options["awsRegion"]))
    wanted = {
        "RoleArn": options["awsRoleArn"],
        "RoleSessionName": options.get("awsRoleSessionName", _SESSION_NAME),
    }
    if "awsRoleExternalId" in options:
        wanted["ExternalId"] = options["awsRoleExternalId"]
    given = sts.assume_role(**wanted)["Credentials"]
    return Credentials(given["AccessKeyId"], given["SecretAccessKey"], given["SessionToken"])
