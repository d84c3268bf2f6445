"""The SASL exchanges of a login. PLAIN, SCRAM and OAUTHBEARER come from ``kafka-python``."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping
from typing import Any, Protocol

from kafka.net.sasl import get_sasl_mechanism
from kafka.net.sasl.oauth import AbstractTokenProvider

from kafka_eos_source.errors import InvalidOptionError
from kafka_eos_source.kafka.failure import LoginRefusedError
from kafka_eos_source.kafka.tokens import Issued, Tokens
from kafka_eos_source.runtime.deadline import Deadline

#: Kerberos' codes for "cannot contact any KDC" and "cannot resolve a KDC".
_KDC_UNREACHABLE = frozenset({-1765328228 & 0xFFFFFFFF, -1765328164 & 0xFFFFFFFF})
#: The only protection that Kafka has for GSSAPI is none, because TLS does that.
_NO_PROTECTION = b"\x01\x00\x00\x00"
#: How often SCRAM hashes the password. Kafka creates users with 4,096 to 16,384 iterations. With fewer,
#: whoever pretends to be the broker could guess the password quickly; far more would keep the client busy.
_LEAST_ITERATIONS, _MOST_ITERATIONS = 4096, 1_000_000


class Exchange(Protocol):
    """The client's side of one login."""

    def is_done(self) -> bool:
        """Returns whether the broker has accepted the login."""

    def auth_bytes(self) -> bytes:
        """Returns what to send next."""

    def receive(self, auth_bytes: bytes) -> Any:
        """Takes the broker's answer. Raises ValueError if it is wrong."""


def new_exchange(
    name: str, kafka: Mapping[str, str], tokens: Tokens | None, host: str, deadline: Deadline
) -> Exchange:
    """Begins a login.

    Args:
        name: the mechanism.
        kafka: librdkafka properties of SASL.
        tokens: for OAUTHBEARER.
        host: of the broker.
        deadline: for services that give credentials.

    Raises:
        LoginRefusedError: if there are no credentials, because a service or Kerberos refused them.
        OSError: if a service with credentials cannot be reached in time.
        InvalidOptionError: if a Python package is missing on this machine.
    """
    if name == "GSSAPI":
        return KerberosExchange(kafka, host)
    more: dict[str, Any] = {}
    if tokens is not None:
        more["sasl_oauth_token_provider"] = _Given(tokens.current(deadline))
    user = kafka.get("sasl.username", "")
    if name.startswith("SCRAM-"):  # RFC 5802 needs this for commas; kafka-python does not do it
        user = user.replace("=", "=3D").replace(",", "=2C")
    exchange: Exchange = get_sasl_mechanism(name)(
        host=host,
        sasl_mechanism=name,
        sasl_plain_username=user,
        sasl_plain_password=kafka.get("sasl.password", ""),
        **more,
    )
    return _Scram(exchange) if name.startswith("SCRAM-") else exchange


class _Scram:
    """A login with SCRAM (RFC 5802) that refuses a broker which asks for too few or too many iterations.

    Args:
        exchange: that of kafka-python, which accepts any number.
    """

    def __init__(self, exchange: Exchange) -> None:
        self._exchange = exchange
        self.is_done, self.auth_bytes = exchange.is_done, exchange.auth_bytes

    def receive(self, auth_bytes: bytes) -> None:
        asked = re.search(rb"(?:^|,)i=([^,]*)", auth_bytes)
        if asked is not None:
            try:
                iterations = int(asked[1])
            except ValueError:
                iterations = 0
            if not _LEAST_ITERATIONS <= iterations <= _MOST_ITERATIONS:
                raise LoginRefusedError(
                    f"the broker asks for {asked[1].decode(errors='replace')} iterations of SCRAM; expected "
                    f"{_LEAST_ITERATIONS} to {_MOST_ITERATIONS}. Somebody may pretend to be the broker to "
                    "learn the password"
                )
        self._exchange.receive(auth_bytes)


class _Given(AbstractTokenProvider):  # type: ignore[misc]
    """Gives one token to one exchange."""

    def __init__(self, issued: Issued) -> None:
        self._issued = issued

    def token(self) -> str:
        return self._issued.token

    def extensions(self) -> Mapping[str, str]:
        return self._issued.extensions


class KerberosExchange:
    """A login with GSSAPI (RFC 4752), with a ticket of a keytab or of the ticket cache.

    The Kerberos library gets tickets from the keytab without a ``kinit``, keeps them in memory, and renews
    them before they expire.

    Args:
        kafka: librdkafka properties: ``sasl.kerberos.*``.
        host: of the broker.
    """

    def __init__(self, kafka: Mapping[str, str], host: str) -> None:
        try:
            import gssapi
        except (ImportError, OSError) as error:
            raise InvalidOptionError(
                f"kafka.sasl.mechanism=GSSAPI needs the Python package 'gssapi': {error}.",
                fix="install it on every machine: pip install 'kafka-eos-source[kerberos]'; it needs a C "
                "compiler and the headers of MIT Kerberos (libkrb5-dev).",
            ) from error
        self._error: type[Exception] = gssapi.exceptions.GSSError
        service = f"{kafka.get('sasl.kerberos.service.name', 'kafka')}@{host}"
        principal, keytab = kafka.get("sasl.kerberos.principal"), kafka.get("sasl.kerberos.keytab")
        self._is_done = self._is_last = False
        try:
            name = gssapi.Name(principal, gssapi.NameType.kerberos_principal) if principal else None
            store = None
            if keytab:
                cache = hashlib.sha256(f"{principal}\0{keytab}".encode()).hexdigest()[:16]
                store = {"client_keytab": keytab, "ccache": f"MEMORY:kafka-eos-{cache}"}
            credentials = gssapi.Credentials(name=name, usage="initiate", store=store)
            self._context = gssapi.SecurityContext(
                name=gssapi.Name(service, gssapi.NameType.hostbased_service),
                creds=credentials,
                mech=gssapi.MechType.kerberos,
                usage="initiate",
            )
            self._next = self._context.step() or b""
        except self._error as error:
            who = f"{principal or 'the first principal'} of {keytab}" if keytab else "the ticket cache"
            text = f"Kerberos, with {who}, for the service {service}: {error}"
            if getattr(error, "min_code", 0) & 0xFFFFFFFF in _KDC_UNREACHABLE:
                raise ConnectionError(text) from error
            raise LoginRefusedError(text) from error

    def is_done(self) -> bool:
        return self._is_done

    def auth_bytes(self) -> bytes:
        return self._next

    def receive(self, auth_bytes: bytes) -> None:
        try:
            if not self._context.complete:
                self._next = self._context.step(auth_bytes) or b""
            elif self._is_last:
                self._is_done = True
            else:
                offered = self._context.unwrap(auth_bytes).message
                if len(offered) != 4 or not offered[0] & _NO_PROTECTION[0]:
                    raise ValueError("it asks for a protection of messages that Kafka does not have")
                self._next = self._context.wrap(_NO_PROTECTION, False).message
                self._is_last = True
        except self._error as error:
            raise ValueError(f"Kerberos: {error}") from error
