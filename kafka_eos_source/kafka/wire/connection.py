"""Connections to brokers: TLS, login, and several requests in flight, answered in order.

Messages and logins come from ``kafka-python``; only Produce, the hot path, is encoded here
(`produce_body`). All sockets of a client are served by one `Network`, in the caller's thread.
"""

from __future__ import annotations

import selectors
import socket
import ssl
import struct
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from kafka.errors import KafkaError as KafkaPythonError
from kafka.net.sasl import get_sasl_mechanism
from kafka.protocol.api_message import ApiMessage
from kafka.protocol.metadata import ApiVersionsRequest
from kafka.protocol.sasl import SaslAuthenticateRequest, SaslHandshakeRequest

from kafka_eos_source.errors import OperatorError
from kafka_eos_source.kafka.api_versions import tls_context
from kafka_eos_source.runtime.sockets import receive

#: Requests that may wait for an answer on one connection. Brokers recognise a batch that was sent again only
#: among the last five of a producer and partition.
MOST_IN_FLIGHT = 5

_SOFTWARE = "kafka-eos"
_READ_BYTES = 64 << 10
_LARGEST_ANSWER_BYTES = 100 << 20
_PRODUCE, _API_VERSIONS_VERSION = 0, 3
#: A session is renewed after this share of the lifetime that the broker allows (KIP-368).
_SESSION_SHARE = 0.85

Buffers = Sequence[bytes | memoryview]
OnAnswer = Callable[[Any, Exception | None], None]


class LoginRefusedError(Exception):
    """The broker refused the credentials."""


@dataclass(frozen=True)
class Access:
    """How to connect and log in.

    Attributes:
        kafka: librdkafka properties of TLS and SASL.
        connect_seconds: limits each step of connecting: TCP, TLS, and each request of the login.
        request_seconds: limits the answer to each request.
    """

    kafka: Mapping[str, str]
    connect_seconds: float = 10.0
    request_seconds: float = 10.0

    @property
    def client_id(self) -> str:
        """The name of the client in the broker's quotas and logs."""
        return self.kafka.get("client.id", _SOFTWARE)

    @property
    def _protocol(self) -> str:
        return self.kafka.get("security.protocol", "plaintext").lower()

    def wrapped(self, plain: socket.socket, host: str) -> socket.socket:
        """Returns the socket with TLS, if the protocol asks for it."""
        if not self._protocol.endswith("ssl"):
            return plain
        return tls_context(self.kafka).wrap_socket(plain, server_hostname=host)

    def mechanism(self, host: str) -> tuple[str, Any] | None:
        """Returns the name of the SASL mechanism, and a new exchange; None if there is no login."""
        if not self._protocol.startswith("sasl"):
            return None
        name = self.kafka.get("sasl.mechanisms", "GSSAPI").upper()
        exchange = get_sasl_mechanism(name)(
            host=host,
            sasl_mechanism=name,
            sasl_plain_username=self.kafka.get("sasl.username", ""),
            sasl_plain_password=self.kafka.get("sasl.password", ""),
        )
        return name, exchange


@dataclass
class _InFlight:
    correlation_id: int
    request: Any
    on_answer: OnAnswer
    due: float


class Connection:
    """One connection to one broker. Create it with `Network.connect`.

    Attributes:
        address: host and port of the broker.
        socket: the socket, with TLS if the protocol asks for it.
        muted_until: when the broker's quota allows the next request, on the monotonic clock.
        expires: when the session should be renewed, on the monotonic clock (KIP-368).
        features: finalized levels by feature, as of the last `ApiVersions` answer.
        failure: why the connection ended; None = it works.
    """

    def __init__(self, network: Network, host: str, port: int, access: Access) -> None:
        self._network = network
        self._access = access
        self.address = f"{host}:{port}"
        self.failure: Exception | None = None
        self.features: dict[str, int] = {}
        self._versions: dict[int, tuple[int, int]] = {}
        self._in_flight: deque[_InFlight] = deque()
        self._out: deque[memoryview] = deque()
        self._in = bytearray()
        self._next_id = 0
        self.muted_until = 0.0
        self.expires = float("inf")
        self.socket = socket.create_connection((host, port), access.connect_seconds)
        try:
            self.socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            self.socket = access.wrapped(self.socket, host)
            self._handshake(host)
            self.socket.setblocking(False)
        except BaseException:
            self.socket.close()
            raise

    # -- requests --------------------------------------------------------------------------------

    @property
    def in_flight(self) -> int:
        """Number of requests without an answer."""
        return len(self._in_flight)

    @property
    def has_room(self) -> bool:
        """Whether another request may be sent now."""
        return (
            self.failure is None
            and len(self._in_flight) < MOST_IN_FLIGHT
            and not self._out
            and time.monotonic() >= self.muted_until
        )

    def version(self, kind: Any, highest: int, lowest: int = 0) -> int:
        """Returns the newest version of a request, from ``lowest`` to ``highest``, that the broker knows.

        Raises:
            OperatorError: if there is none.
        """
        low, high = self._versions.get(kind.API_KEY, (0, -1))
        if min(high, highest) < max(low, lowest):
            raise OperatorError(
                f"broker {self.address} does not support {kind.__name__}, version {highest} or older.",
                fix="upgrade the broker to Kafka 3.0 or newer.",
            )
        return min(high, highest)

    def send(self, request: Any, on_answer: OnAnswer, body: Buffers | None = None) -> None:
        """Sends a request; ``on_answer`` is called later, with the answer or an error.

        Args:
            request: a message of ``kafka-python``, whose version is set.
            on_answer: receives ``(answer, None)`` or ``(None, error)``, from `Network.wait`.
            body: the encoded body with its header's end; None = encode the message.
        """
        self._next_id = (self._next_id + 1) & 0x7FFFFFFF
        if self.failure is not None:
            on_answer(None, self.failure)
            return
        due = max(time.monotonic(), self.muted_until) + self._access.request_seconds
        self._in_flight.append(_InFlight(self._next_id, request, on_answer, due))
        if body is None:
            request.with_header(correlation_id=self._next_id, client_id=self._access.client_id)
            self._out.append(memoryview(bytes(request.encode(framed=True, header=True))))
        else:
            name = self._access.client_id.encode()
            head = struct.pack(">hhih", _PRODUCE, request.API_VERSION, self._next_id, len(name))
            head += name + b"\0"
            size = len(head) + sum(len(each) for each in body)
            self._out.append(memoryview(struct.pack(">i", size) + head))
            self._out.extend(memoryview(each) for each in body)
        self.write()

    # -- events, called by the network -----------------------------------------------------------

    @property
    def wants_to_write(self) -> bool:
        """Whether bytes wait for room in the socket."""
        return bool(self._out)

    @property
    def next_event(self) -> float:
        """When something is due without an answer, on the monotonic clock."""
        due = self._in_flight[0].due if self._in_flight else float("inf")
        return min(due, self.muted_until) if self.muted_until > time.monotonic() else due

    def write(self) -> None:
        """Writes as much as the socket takes."""
        try:
            while self._out:
                sent = self.socket.send(self._out[0])
                if sent == len(self._out[0]):
                    self._out.popleft()
                else:
                    self._out[0] = self._out[0][sent:]
        except (BlockingIOError, ssl.SSLWantWriteError, ssl.SSLWantReadError):
            return
        except OSError as error:
            self.fail(error)

    def read(self) -> None:
        """Reads what has arrived, and hands out complete answers."""
        try:
            while True:
                more = self.socket.recv(_READ_BYTES)
                if not more:
                    self.fail(ConnectionResetError(f"broker {self.address} closed the connection"))
                    return
                self._in += more
                if len(more) < _READ_BYTES and not isinstance(self.socket, ssl.SSLSocket):
                    break
        except (BlockingIOError, ssl.SSLWantReadError, ssl.SSLWantWriteError):
            pass
        except OSError as error:
            self.fail(error)
            return
        while len(self._in) >= 4:
            (size,) = struct.unpack_from(">i", self._in)
            if not 4 <= size <= _LARGEST_ANSWER_BYTES:
                self.fail(ConnectionError(f"{self.address} sent {size} bytes: it is not a Kafka broker"))
                return
            if len(self._in) < 4 + size:
                return
            answer = bytes(self._in[4 : 4 + size])
            del self._in[: 4 + size]
            self._answered(answer)

    def check_time(self) -> None:
        """Ends the connection if the oldest request has waited too long."""
        if self._in_flight and time.monotonic() >= self._in_flight[0].due:
            seconds = self._access.request_seconds
            self.fail(TimeoutError(f"broker {self.address} did not answer within {seconds:.0f} s"))

    def fail(self, error: Exception) -> None:
        """Closes the connection. Every request in flight fails with this error."""
        if self.failure is not None:
            return
        self.failure = error
        self._network.forget(self)
        self.socket.close()
        self._out.clear()
        waiting, self._in_flight = self._in_flight, deque()
        for each in waiting:
            each.on_answer(None, error)

    # -- inside ----------------------------------------------------------------------------------

    def _answered(self, data: bytes) -> None:
        if not self._in_flight:
            self.fail(ConnectionError(f"broker {self.address} sent an answer to no request"))
            return
        first = self._in_flight[0]
        try:
            answer = _decoded(first.request, data, first.correlation_id)
        except (ValueError, IndexError, struct.error, KeyError) as error:
            self.fail(ConnectionError(f"the answer of broker {self.address} is damaged: {error}"))
            return
        if isinstance(first.request, ApiVersionsRequest):
            try:
                self._learn(answer)
            except ConnectionError as error:
                self.fail(error)
                return
        self._in_flight.popleft()
        throttled_ms = getattr(answer, "throttle_time_ms", 0) or 0
        if throttled_ms > 0:
            self.muted_until = time.monotonic() + throttled_ms / 1000
        if self._in_flight:  # a broker serves the requests of a connection one after the other
            begins = max(time.monotonic(), self.muted_until)
            head = self._in_flight[0]
            head.due = max(head.due, begins + self._access.request_seconds)
        first.on_answer(answer, None)

    def _handshake(self, host: str) -> None:
        """Asks for versions and logs in, while the socket still blocks."""
        versions = ApiVersionsRequest(
            client_software_name=_SOFTWARE, client_software_version="1", version=_API_VERSIONS_VERSION
        )
        self._learn(self._ask(versions))
        login = self._access.mechanism(host)
        if login is None:
            return
        name, exchange = login
        answer = self._ask(SaslHandshakeRequest(mechanism=name, version=1))
        if answer.error_code:
            raise LoginRefusedError(f"the broker supports {', '.join(answer.mechanisms)}, not {name}")
        while not exchange.is_done():
            answer = self._ask(SaslAuthenticateRequest(auth_bytes=exchange.auth_bytes(), version=1))
            if answer.error_code:
                raise LoginRefusedError(answer.error_message or f"error {answer.error_code}")
            try:
                exchange.receive(answer.auth_bytes)
            except (ValueError, KafkaPythonError) as error:  # the broker does not know the password either
                raise LoginRefusedError(f"the broker's answer to {name} is wrong: {error}") from error
        if answer.session_lifetime_ms:
            self.expires = time.monotonic() + answer.session_lifetime_ms / 1000 * _SESSION_SHARE

    def _ask(self, request: Any) -> Any:
        """Sends a request, and blocks until its answer."""
        self._next_id += 1
        request.with_header(correlation_id=self._next_id, client_id=self._access.client_id)
        self.socket.sendall(request.encode(framed=True, header=True))
        (size,) = struct.unpack(">i", receive(self.socket, 4))
        if not 4 <= size <= _LARGEST_ANSWER_BYTES:
            raise ConnectionError(f"{self.address} sent {size} bytes: it is not a Kafka broker")
        return _decoded(request, receive(self.socket, size), self._next_id)

    def _learn(self, answer: Any) -> None:
        if answer.error_code:
            raise ConnectionError(f"broker {self.address} is older than Kafka 2.4")
        self._versions = {each.api_key: (each.min_version, each.max_version) for each in answer.api_keys}
        self.features = {each.name: each.max_version_level for each in answer.finalized_features or ()}


class Network:
    """Serves the connections of one client. Not thread-safe."""

    def __init__(self) -> None:
        self._selector = selectors.DefaultSelector()
        self._connections: set[Connection] = set()

    def connect(self, host: str, port: int, access: Access) -> Connection:
        """Connects and logs in.

        Raises:
            OSError: if that is not possible.
            LoginRefusedError: if the broker refuses the credentials.
        """
        connection = Connection(self, host, port, access)
        self._selector.register(connection.socket, selectors.EVENT_READ, connection)
        self._connections.add(connection)
        return connection

    def wait(self, seconds: float) -> None:
        """Serves every connection once; waits up to that long if nothing has arrived."""
        now = time.monotonic()
        for connection in self._connections:
            events = selectors.EVENT_READ | (selectors.EVENT_WRITE if connection.wants_to_write else 0)
            self._selector.modify(connection.socket, events, connection)
            seconds = min(seconds, max(0.0, connection.next_event - now))
        if not self._connections:
            time.sleep(min(seconds, 0.01))
        for key, events in self._selector.select(seconds):
            connection = key.data
            if events & selectors.EVENT_WRITE and connection.failure is None:
                connection.write()
            if events & selectors.EVENT_READ and connection.failure is None:
                connection.read()
        for connection in list(self._connections):
            connection.check_time()

    def forget(self, connection: Connection) -> None:
        """Stops serving a connection that ended."""
        if connection in self._connections:
            self._connections.discard(connection)
            self._selector.unregister(connection.socket)

    def close(self) -> None:
        """Closes every connection."""
        for connection in list(self._connections):
            connection.fail(ConnectionAbortedError("the client was closed"))
        self._selector.close()


def _decoded(request: Any, data: bytes, correlation_id: int) -> ApiMessage:
    """Returns the answer to a request.

    Raises:
        ValueError: if the bytes are not that answer.
    """
    kind = request.header.get_response_class() if request.header is not None else _response_of(request)
    (found,) = struct.unpack_from(">i", data)
    if found != correlation_id:
        raise ValueError(f"its correlation id is {found}, not {correlation_id}")
    version = request.API_VERSION
    is_flexible = kind.flexible_version_q(version) and kind.name != "ApiVersionsResponse"
    return kind[None].decode(memoryview(data)[5 if is_flexible else 4 :], version=version)


def _response_of(request: Any) -> Any:
    request.with_header(correlation_id=0, client_id="")
    return request.header.get_response_class()


def produce_body(
    transactional_id: str,
    timeout_ms: int,
    topics: Mapping[str, Iterable[tuple[int, memoryview]]],
) -> list[bytes | memoryview]:
    """Returns the body of a Produce request, version 9 to 12, without copying the batches.

    Args:
        transactional_id: of the producer.
        timeout_ms: how long the leader waits for the in-sync replicas.
        topics: partitions and their batches by topic, at most one batch for each partition.
    """
    out: list[bytes | memoryview] = []
    head = _compact(transactional_id.encode()) + struct.pack(">hi", -1, timeout_ms)
    head += _varint(len(topics) + 1)
    for topic, partitions in topics.items():
        parts = list(partitions)
        head += _compact(topic.encode()) + _varint(len(parts) + 1)
        for number, batch in parts:
            out += [head + struct.pack(">i", number) + _varint(len(batch) + 1), batch]
            head = b"\0"  # no tags of the partition
        head += b"\0"
    out.append(head + b"\0")
    return out


def _compact(text: bytes) -> bytes:
    return _varint(len(text) + 1) + text


def _varint(number: int) -> bytes:
    out = b""
    while number >= 0x80:
        out += bytes([number & 0x7F | 0x80])
        number >>= 7
    return out + bytes([number])
