"""How to connect to a broker: its addresses, TLS, the login, and the first requests of a connection.

Also the log of connections and requests, which the options ``debug`` and ``log_level`` control.
"""

from __future__ import annotations

import hashlib
import logging
import random
import re
import socket
import ssl
import struct
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache
from typing import TYPE_CHECKING, Any, Protocol

from kafka.errors import KafkaError as KafkaPythonError
from kafka.protocol.sasl import SaslAuthenticateRequest, SaslHandshakeRequest

from kafka_eos_source.errors import InvalidOptionError
from kafka_eos_source.kafka.failure import LoginRefusedError, mechanism
from kafka_eos_source.kafka.messages import (
    LARGEST_ANSWER_BYTES,
    SOFTWARE,
    check_size,
    decoded,
    encoded,
    features_of,
    versions_request,
)
from kafka_eos_source.kafka.tls import context, uses_tls
from kafka_eos_source.runtime.deadline import Deadline, limit, receive

if TYPE_CHECKING:
    from kafka_eos_source.kafka.tokens import Issued, Tokens

_DEFAULT_PORT = 9092
_FAMILIES = {"v4": socket.AF_INET, "v6": socket.AF_INET6}
#: How long the canonical names of bootstrap servers are kept.
_VALID_SECONDS = 60.0

#: Defaults of librdkafka, and for idle connections of Java's clients.
_RECONNECT_MS, _RECONNECT_MAX_MS, _IDLE_MS = "100", "10000", "540000"
_UNSUPPORTED_VERSION = struct.pack(">h", 35)
#: Answers before and during a login are small. A server that is not trusted yet gets no more memory.
_MOST_LOGIN_BYTES = 1 << 20
#: A session is renewed after this share of the lifetime that the broker allows (KIP-368).
_SESSION_SHARE = 0.85

Address = tuple[str, int]


class NoConnectionError(TimeoutError):
    """A host did not accept a TCP connection in time, so nothing says that it runs.

    A broker that hangs or is slow still accepts connections, because its operating system does.
    """


@dataclass
class Addresses:
    """How to find the addresses of brokers, and the options of sockets. Create it with `Addresses.of`.

    Attributes:
        bootstrap_servers: as the user wrote them.
        canonical: whether bootstrap servers are replaced by the canonical names of their addresses.
        family: the family of addresses that is used; ``AF_UNSPEC`` = any.
        options: options of each socket: level, name, value.
    """

    bootstrap_servers: str
    canonical: bool = False
    family: socket.AddressFamily = socket.AF_UNSPEC
    options: tuple[tuple[int, int, int], ...] = ()
    _names: list[Address] = field(default_factory=list)
    _names_until: float = 0.0

    @classmethod
    def of(cls, kafka: Mapping[str, str]) -> Addresses:
        """Returns what librdkafka properties describe."""
        options = [
            (
                socket.IPPROTO_TCP,
                socket.TCP_NODELAY,
                int(kafka.get("socket.nagle.disable", "true").lower() == "true"),
            )
        ]
        if kafka.get("socket.keepalive.enable", "false").lower() == "true":
            options.append((socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1))
        for name, option in (
            ("socket.send.buffer.bytes", socket.SO_SNDBUF),
            ("socket.receive.buffer.bytes", socket.SO_RCVBUF),
        ):
            if size := int(kafka.get(name, "0")):
                options.append((socket.SOL_SOCKET, option, size))
        return cls(
            kafka.get("bootstrap.servers", ""),
            kafka.get("client.dns.lookup") == "resolve_canonical_bootstrap_servers_only",
            _FAMILIES.get(kafka.get("broker.address.family", "any"), socket.AF_UNSPEC),
            tuple(options),
        )

    def bootstrap(self) -> list[Address]:
        """Returns host and port of the bootstrap servers, in random order."""
        if not self.canonical:
            found = listed(self.bootstrap_servers)
        else:
            if time.monotonic() >= self._names_until:
                self._names = self._canonical_names()
                self._names_until = time.monotonic() + _VALID_SECONDS
            found = list(self._names)
        random.shuffle(found)
        return found

    def connect(self, host: str, port: int, deadline: Deadline) -> socket.socket:
        """Connects to a host. Tries its addresses one after the other, until one accepts.

        Raises:
            OSError: if the name does not resolve, or no address accepts; names each address that was tried.
        """
        found = socket.getaddrinfo(host, port, self.family, socket.SOCK_STREAM)
        failures: list[tuple[str, OSError]] = []
        for index, (family, kind, protocol, _, address) in enumerate(found):
            # an address that does not answer must leave time for the others
            seconds = deadline.remaining_seconds() / (len(found) - index)
            plain = socket.socket(family, kind, protocol)
            try:
                for option in self.options:
                    plain.setsockopt(*option)
                plain.settimeout(max(seconds, 0.001))  # 0 would mean: do not block
                plain.connect(address)
            except OSError as error:
                plain.close()
                is_silent = isinstance(error, TimeoutError)
                failures.append((str(address[0]), NoConnectionError("timed out") if is_silent else error))
                broker_log.debug(
                    "%s:%d does not accept a connection at %s: %s", host, port, address[0], error
                )
            except BaseException:
                plain.close()
                raise
            else:
                broker_log.debug("connected to %s:%d at %s", host, port, address[0])
                return plain
        raise _failure(failures)

    def _canonical_names(self) -> list[Address]:
        names: dict[Address, None] = {}
        for host, port in listed(self.bootstrap_servers):
            try:
                found = socket.getaddrinfo(host, port, self.family, socket.SOCK_STREAM)
            except OSError:
                names[host, port] = None  # whoever connects to it reports why
                continue
            for *_, address in found:
                name, _ = socket.getnameinfo(address, socket.NI_NUMERICSERV)  # the address if it has no name
                names[name, port] = None
        broker_log.debug("canonical names of %s: %s", self.bootstrap_servers, list(names))
        return list(names)


def listed(servers: str) -> list[Address]:
    """Returns host and port of each server in a comma-separated list, such as ``bootstrap.servers``."""
    found = []
    for each in filter(None, (address.strip() for address in servers.split(","))):
        plain = each.rpartition("://")[2]
        host, separator, port = plain.rpartition(":")
        if separator and port.isdigit():
            found.append((host.strip("[]"), int(port)))
        else:
            found.append((plain.strip("[]"), _DEFAULT_PORT))
    return found


def _failure(failures: list[tuple[str, OSError]]) -> OSError:
    """Returns one error for all addresses of a host, of the class of the last one."""
    last = failures[-1][1]
    if len(failures) == 1:
        return last
    text = "; ".join(f"{address}: {error.strerror or error}" for address, error in failures)
    return OSError(last.errno, text) if last.errno is not None else type(last)(text)


@dataclass(frozen=True)
class Access:
    """How to connect and log in. Create it with `Access.of`.

    Attributes:
        kafka: librdkafka properties of TLS and SASL.
        tls: settings of TLS; None = connections are not encrypted.
        tokens: tokens of OAUTHBEARER; None = another login.
        addresses: finds brokers, and opens sockets to them.
        connect_seconds: limits connecting: TCP, TLS, and the login.
        request_seconds: limits the answer to each request.
        most_bytes: limits the size of an answer.
    """

    kafka: Mapping[str, str] = field(repr=False)  # may hold passwords
    tls: ssl.SSLContext | None
    tokens: Tokens | None
    addresses: Addresses
    connect_seconds: float
    request_seconds: float
    most_bytes: int

    @classmethod
    def of(cls, kafka: Mapping[str, str], connect_seconds: float, request_seconds: float) -> Access:
        """Returns the access that librdkafka properties describe.

        Raises:
            InvalidOptionError: if a certificate or key cannot be used.
        """
        tls = tokens = None
        if uses_tls(kafka):
            tls = context(kafka)
        if mechanism(kafka) == "OAUTHBEARER":
            from kafka_eos_source.kafka.tokens import Tokens  # imports an HTTP client

            tokens = Tokens.of(kafka)
        # an answer may have a little more than the records that a Fetch asks for
        asked = int(kafka.get("receive.message.max.bytes", "0")), int(kafka.get("fetch.max.bytes", "0")) + 512
        most_bytes = max(LARGEST_ANSWER_BYTES, *asked)
        configure_log(kafka)
        addresses = Addresses.of(kafka)
        return cls(kafka, tls, tokens, addresses, connect_seconds, request_seconds, most_bytes)

    @property
    def client_id(self) -> str:
        """The name of the client in the broker's quotas and logs."""
        return self.kafka.get("client.id", SOFTWARE)

    @property
    def idle_seconds(self) -> float:
        """How long a connection may be idle; it is then replaced, before the broker ends it."""
        return int(self.kafka.get("connections.max.idle.ms", _IDLE_MS)) / 1000 or float("inf")

    def pause_seconds(self, failures: int) -> float:
        """Returns how long not to connect to an address to which so many attempts failed; 0 = no limit."""
        if "reconnect.backoff.ms" not in self.kafka and "reconnect.backoff.max.ms" not in self.kafka:
            return 0.0
        first = int(self.kafka.get("reconnect.backoff.ms", _RECONNECT_MS))
        longest = max(first, int(self.kafka.get("reconnect.backoff.max.ms", _RECONNECT_MAX_MS)))
        return float(min(first << min(failures - 1, 30), longest)) / 1000

    def wrapped(self, plain: socket.socket, host: str) -> socket.socket:
        """Returns the socket with TLS, if the protocol asks for it."""
        if self.tls is None:
            return plain
        encrypted = self.tls.wrap_socket(plain, server_hostname=host)
        security_log.debug("%s: %s, %s", host, encrypted.version(), encrypted.cipher())
        return encrypted


@dataclass
class Session:
    """What the first requests of a connection found.

    Attributes:
        versions: lowest and highest version by API key.
        features: finalized levels by feature.
        expires: when the session should be renewed, on the monotonic clock (KIP-368).
        requests: number of requests that were sent.
    """

    versions: dict[int, tuple[int, int]] = field(default_factory=dict)
    features: dict[str, int] = field(default_factory=dict)
    expires: float = float("inf")
    requests: int = 0

    def learn(self, answer: Any, address: str) -> None:
        """Takes over versions and features from an `ApiVersions` answer.

        Raises:
            ConnectionError: if the broker is too old.
        """
        if answer.error_code:
            raise ConnectionError(f"broker {address} is older than Kafka 2.4")
        self.versions = {each.api_key: (each.min_version, each.max_version) for each in answer.api_keys or ()}
        self.features = features_of(answer)


def open_session(
    connection: socket.socket, host: str, address: str, access: Access, soon: Deadline, deadline: Deadline
) -> Session:
    """Asks the broker for its versions and logs in, while the socket still blocks.

    Args:
        connection: the socket.
        host: of the broker.
        address: host and port, for messages.
        access: the login.
        soon: for the first answer.
        deadline: for all answers, and for what services that know credentials answer.

    Raises:
        OSError: if the broker does not answer in time, or its answer is not one of Kafka's.
        ValueError: if an answer is damaged.
        LoginRefusedError: if the broker refuses the credentials.
    """
    session = Session()

    def answer_to(request: Any, until: Deadline = deadline) -> bytes:
        session.requests += 1
        log_request(address, request, session.requests)
        limit(connection, until)
        connection.sendall(encoded(request, session.requests, access.client_id))
        (size,) = struct.unpack(">i", receive(connection, 4, until))
        check_size(size, address, _MOST_LOGIN_BYTES)
        return receive(connection, size, until)

    def ask(request: Any) -> Any:
        return decoded(request, answer_to(request), session.requests)

    first = versions_request()
    data = answer_to(first, soon)
    if data[4:6] == _UNSUPPORTED_VERSION:  # answered in version 0, which every broker knows (KIP-511)
        session.learn(ask(versions_request(0)), address)
    else:
        session.learn(decoded(first, data, session.requests), address)
    name = mechanism(access.kafka)
    if not name:
        return session
    security_log.debug("%s: login with %s", address, name)

    exchange = new_exchange(name, access.kafka, access.tokens, host, deadline)
    answer = ask(SaslHandshakeRequest(mechanism=name, version=1))
    if answer.error_code:
        offered = ", ".join(filter(None, answer.mechanisms or ()))
        raise LoginRefusedError(
            f"the broker supports {offered}, not {name}"
            if offered
            else f"the broker's listener has no login, such as {name}; its security.protocol is not "
            "sasl_plaintext or sasl_ssl"
        )
    while not exchange.is_done():
        answer = ask(SaslAuthenticateRequest(auth_bytes=exchange.auth_bytes(), version=1))
        if answer.error_code:
            raise LoginRefusedError(answer.error_message or f"error {answer.error_code}")
        try:
            exchange.receive(answer.auth_bytes or b"")
        except (
            ValueError,
            LookupError,
            KafkaPythonError,
        ) as error:  # the broker does not know the password either
            raise LoginRefusedError(f"the broker's answer to {name} is wrong: {error}") from error
    if answer.session_lifetime_ms:
        session.expires = time.monotonic() + answer.session_lifetime_ms / 1000 * _SESSION_SHARE
    return session


# -- SASL ---------------------------------------------------------------------------------------

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
    from kafka.net.sasl import get_sasl_mechanism  # imports the network layer of kafka-python
    from kafka.net.sasl.oauth import AbstractTokenProvider

    more: dict[str, Any] = {}
    if tokens is not None:
        AbstractTokenProvider.register(_Given)
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


class _Given:
    """Gives one token to one exchange of kafka-python."""

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


# -- the log ------------------------------------------------------------------------------------

_PACKAGE = "kafka_eos_source.kafka"
_client = logging.getLogger(_PACKAGE)

broker_log = _client.getChild("broker")
security_log = _client.getChild("security")
_requests = _client.getChild("requests")

_TRANSACTION = (
    "FindCoordinator",
    "InitProducerId",
    "AddPartitionsToTxn",
    "AddOffsetsToTxn",
    "TxnOffsetCommit",
    "EndTxn",
)
_READ = ("Fetch", "ListOffsets", "OffsetForLeaderEpoch")
#: Contexts of librdkafka that have lines here, and their loggers below this package's.
_CONTEXTS: Mapping[str, tuple[str, ...]] = {
    "all": ("broker", "security", "requests"),
    "generic": ("broker", "security"),
    "broker": ("broker",),
    "security": ("security",),
    "protocol": ("requests",),
    "feature": ("requests.ApiVersions",),
    "metadata": ("requests.Metadata",),
    "topic": ("requests.Metadata",),
    "fetch": tuple(f"requests.{each}" for each in _READ),
    "consumer": tuple(f"requests.{each}" for each in _READ),
    "msg": ("requests.Produce",),
    "queue": ("requests.Produce",),
    "eos": tuple(f"requests.{each}" for each in _TRANSACTION),
}
#: Levels of syslog below which `log_level` hides lines; those with a higher number are for ``debug``.
_LEVELS = (*[logging.ERROR] * 4, logging.WARNING, *[logging.INFO] * 3)


#: The levels that the clients of this process have asked for.
_asked: set[int] = set()


def configure_log(kafka: Mapping[str, str]) -> None:
    """Applies the options ``debug`` and ``log_level`` to this process. They stay for later clients.

    The logger has the lowest level that any client asked for: one that wants errors only must not hide the
    warnings of another, such as those of damaged records.
    """
    _asked.add(_LEVELS[int(kafka["log_level"])] if kafka.get("log_level") else logging.NOTSET)
    others = logging.getLogger(_PACKAGE.rpartition(".")[0]).getEffectiveLevel()
    lowest = min(each or others for each in _asked)
    _client.setLevel(logging.NOTSET if lowest == others and logging.NOTSET in _asked else lowest)
    contexts = [each for each in kafka.get("debug", "").split(",") if each in _CONTEXTS]
    for each in contexts:
        for name in _CONTEXTS[each]:
            _client.getChild(name).setLevel(logging.DEBUG)
    if contexts and not _is_shown():
        # a worker of Spark configures no logging, so that Python would print warnings only
        handler = logging.StreamHandler()
        handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(name)s: %(message)s"))
        _client.addHandler(handler)


def log_request(address: str, sent: Any, correlation_id: int) -> None:
    """Logs a request that is sent."""
    log = _logger(type(sent).__name__)
    if log.isEnabledFor(logging.DEBUG):
        log.debug("%s: request %d, version %d", address, correlation_id, sent.API_VERSION)


def log_answer(address: str, sent: Any, correlation_id: int, size: int) -> None:
    """Logs the answer to a request."""
    log = _logger(type(sent).__name__)
    if log.isEnabledFor(logging.DEBUG):
        log.debug("%s: answer %d, %d bytes", address, correlation_id, size)


@cache
def _logger(kind: str) -> logging.Logger:
    return _requests.getChild(kind.removesuffix("Request"))


def _is_shown() -> bool:
    """Returns whether any handler shows the lines of this client."""
    log: logging.Logger | None = _client
    while log is not None:
        if any(not isinstance(each, logging.NullHandler) for each in log.handlers):
            return True
        log = log.parent if log.propagate else None
    return False
