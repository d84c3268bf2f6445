"""How to connect to a broker: its addresses, TLS, the login, and the first requests of a connection."""

from __future__ import annotations

import random
import socket
import ssl
import struct
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from kafka.errors import KafkaError as KafkaPythonError
from kafka.protocol.sasl import SaslAuthenticateRequest, SaslHandshakeRequest

from kafka_eos_source.kafka.failure import LoginRefusedError, mechanism
from kafka_eos_source.kafka.tls import context, uses_tls
from kafka_eos_source.kafka.wire import debug
from kafka_eos_source.kafka.wire.messages import (
    LARGEST_ANSWER_BYTES,
    SOFTWARE,
    check_size,
    decoded,
    encoded,
    features_of,
    versions_request,
)
from kafka_eos_source.runtime.deadline import Deadline
from kafka_eos_source.runtime.sockets import limit, receive

if TYPE_CHECKING:
    from kafka_eos_source.kafka.tokens import Tokens

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
                failures.append((str(address[0]), error))
                debug.broker_log.debug(
                    "%s:%d does not accept a connection at %s: %s", host, port, address[0], error
                )
            except BaseException:
                plain.close()
                raise
            else:
                debug.broker_log.debug("connected to %s:%d at %s", host, port, address[0])
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
        debug.broker_log.debug("canonical names of %s: %s", self.bootstrap_servers, list(names))
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
        debug.configure_log(kafka)
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
        debug.security_log.debug("%s: %s, %s", host, encrypted.version(), encrypted.cipher())
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
        debug.log_request(address, request, session.requests)
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
    debug.security_log.debug("%s: login with %s", address, name)
    from kafka_eos_source.kafka.wire.sasl import new_exchange  # imports the network layer of kafka-python

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
