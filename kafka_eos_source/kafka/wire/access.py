"""How to connect to a broker: TLS, the login, and the first requests of a connection."""

from __future__ import annotations

import socket
import ssl
import struct
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from kafka.errors import KafkaError as KafkaPythonError
from kafka.protocol.sasl import SaslAuthenticateRequest, SaslHandshakeRequest

from kafka_eos_source.kafka.login import LoginRefusedError, mechanism
from kafka_eos_source.kafka.tls import context, uses_tls
from kafka_eos_source.kafka.wire import debug
from kafka_eos_source.kafka.wire.addresses import Addresses
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

#: Defaults of librdkafka, and for idle connections of Java's clients.
_RECONNECT_MS, _RECONNECT_MAX_MS, _IDLE_MS = "100", "10000", "540000"
_UNSUPPORTED_VERSION = struct.pack(">h", 35)
#: Answers before and during a login are small. A server that is not trusted yet gets no more memory.
_MOST_LOGIN_BYTES = 1 << 20
#: A session is renewed after this share of the lifetime that the broker allows (KIP-368).
_SESSION_SHARE = 0.85


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
        debug.configure(kafka)
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
        debug.security.debug("%s: %s, %s", host, encrypted.version(), encrypted.cipher())
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
        debug.request(address, request, session.requests)
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
    debug.security.debug("%s: login with %s", address, name)
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
