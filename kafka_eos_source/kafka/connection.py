"""One connection to a broker: several requests in flight, answered in order."""

from __future__ import annotations

import selectors
import ssl
import struct
import sys
import time
from collections import deque
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any

from kafka.protocol.metadata import ApiVersionsRequest

from kafka_eos_source.errors import OperatorError
from kafka_eos_source.kafka.access import Access, broker_log, log_answer, log_request, open_session
from kafka_eos_source.kafka.messages import check_size, decoded, encoded, produce_head
from kafka_eos_source.runtime.deadline import Deadline, limit

#: Requests that may wait for an answer on one connection. Brokers recognise a batch that was sent again only
#: among the last five of a producer and partition.
MOST_IN_FLIGHT = 5

#: Buffers of one system call; no system accepts fewer than 16, and Linux accepts 1,024.
_MOST_BUFFERS = 256 if sys.platform == "linux" else 16
_READ_BYTES = 64 << 10
#: The limit of a large answer begins again when so much more of it has arrived.
_PROGRESS_BYTES = 4 << 10
#: Buffers below this size are copied together before they are sent, up to a larger size.
_SHORT_BYTES, _JOINED_BYTES = 16 << 10, 64 << 10
#: Longest pause that a broker's quota may ask for. Brokers ask for no more than a quota's window (11 s by
#: default), and mute the connection themselves.
_LONGEST_MUTE_SECONDS = 30.0

Buffers = Sequence[bytes | memoryview]
OnAnswer = Callable[[Any, Exception | None], None]
Decode = Callable[[Any, memoryview, int], Any]
#: A broker is silent if it has owed an answer for this long.
SILENT_SECONDS = 1.5
#: Pause between two reports of silent brokers, which is longer if the report itself took longer.
_REPORT_SECONDS = 0.5


@dataclass
class _InFlight:
    correlation_id: int
    request: Any
    on_answer: OnAnswer
    seconds: float
    due: float
    decode: Decode


class Connection:
    """One connection to one broker. `Network.connect` creates it.

    Args:
        host: of the broker.
        port: of the broker.
        access: TLS and login.
        deadline: for connecting, which also has its own limit.
        answer_seconds: limits the wait for the first answer, which takes no time if the broker does not hang.
        on_end: called once when the connection ends, before the socket is closed.

    Attributes:
        address: host and port of the broker.
        socket: the socket, with TLS if the protocol asks for it.
        muted_until: when the broker's quota allows the next request, on the monotonic clock.
        failure: why the connection ended; None = it works.
    """

    def __init__(
        self,
        host: str,
        port: int,
        access: Access,
        deadline: Deadline,
        answer_seconds: float,
        on_end: Callable[[Connection], None],
    ) -> None:
        self._access = access
        self._on_end = on_end
        self.address = f"{host}:{port}"
        self.failure: Exception | None = None
        self._in_flight: deque[_InFlight] = deque()
        self._out: deque[memoryview] = deque()
        self._in = bytearray()
        #: A large answer that has arrived in part, how much of it, and what must arrive within the limit; see
        #: `read`.
        self._large: memoryview | None = None
        self._arrived = self._enough = 0
        self.muted_until = 0.0
        connected = Deadline.after_seconds(deadline.remaining_seconds(access.connect_seconds))
        soon = Deadline.after_seconds(connected.remaining_seconds(answer_seconds))
        if soon.expired:
            raise TimeoutError(f"no time is left to connect to {self.address}")
        self.socket = access.addresses.connect(host, port, soon)
        try:
            limit(self.socket, soon)
            self.socket = access.wrapped(self.socket, host)
            self._session = open_session(self.socket, host, self.address, access, soon, connected)
            self.socket.setblocking(False)
        except BaseException:
            self.socket.close()
            raise
        self._next_id = self._session.requests
        #: When the last request was sent or answered, on the monotonic clock.
        self._used = time.monotonic()
        self._idle_seconds = access.idle_seconds

    # -- requests --------------------------------------------------------------------------------

    @property
    def expires(self) -> float:
        """When to replace the connection, on the monotonic clock: its session ends (KIP-368), or it idles."""
        return min(self._session.expires, self._used + self._idle_seconds)

    @property
    def features(self) -> Mapping[str, int]:
        """Finalized levels by feature, as of the last `ApiVersions` answer."""
        return self._session.features

    @property
    def in_flight(self) -> int:
        """Number of requests without an answer."""
        return len(self._in_flight)

    @property
    def owes_since(self) -> float:
        """Since when the broker owes an answer, on the monotonic clock; infinity = it owes none.

        The time that a request asks the broker to wait does not count.
        """
        return self._in_flight[0].due - self._access.request_seconds if self._in_flight else float("inf")

    @property
    def has_room(self) -> bool:
        """Whether another request of many may be sent now.

        No more requests follow when the session ends soon (KIP-368): once all are answered, `Cluster.broker`
        opens another connection.
        """
        return (
            self.failure is None
            and len(self._in_flight) < MOST_IN_FLIGHT
            and not self._out
            and self.muted_until <= time.monotonic() < self.expires
        )

    def version(self, kind: Any, highest: int, lowest: int = 0) -> int:
        """Returns the newest version of a request, from ``lowest`` to ``highest``, that the broker knows.

        Raises:
            OperatorError: if there is none.
        """
        low, high = self._session.versions.get(kind.API_KEY, (0, -1))
        if min(high, highest) < max(low, lowest):
            known = f"knows versions {low} to {high}" if high >= 0 else "does not know the request"
            raise OperatorError(
                f"broker {self.address} does not support {kind.__name__}, versions {lowest} to {highest}; "
                f"it {known}.",
                fix="upgrade the broker to Kafka 3.3 or newer, or use a service with this request.",
            )
        return min(high, highest)

    def send(
        self,
        request: Any,
        on_answer: OnAnswer,
        body: Buffers | None = None,
        decode: Decode = decoded,
        wait_seconds: float = 0.0,
    ) -> None:
        """Sends a request; ``on_answer`` is called later, with the answer or an error.

        Args:
            request: a message of ``kafka-python``, whose version is set.
            on_answer: receives ``(answer, None)`` or ``(None, error)``, from `Network.wait`.
            body: the encoded body with its header's end; None = encode the message.
            decode: receives the request, the answer with its header, and the correlation id; returns what
                ``on_answer`` gets.
            wait_seconds: how long the request asks the broker to wait; the answer may take that much longer.
        """
        self._next_id = (self._next_id + 1) & 0x7FFFFFFF
        self._used = time.monotonic()
        log_request(self.address, request, self._next_id)
        if self.failure is not None:
            on_answer(None, self.failure)
            return
        seconds = self._access.request_seconds + wait_seconds
        due = max(time.monotonic(), self.muted_until) + seconds
        self._in_flight.append(_InFlight(self._next_id, request, on_answer, seconds, due, decode))
        client_id = self._access.client_id
        if body is None:
            self._out.append(memoryview(encoded(request, self._next_id, client_id)))
        else:
            size = sum(len(each) for each in body)
            head = produce_head(request.API_VERSION, self._next_id, client_id, size)
            self._out.extend(_joined([head, *body]))
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
                if isinstance(self.socket, ssl.SSLSocket):  # which cannot send several buffers at once
                    sent = self.socket.send(self._out[0])
                else:
                    sent = self.socket.sendmsg(list(islice(self._out, _MOST_BUFFERS)))
                while sent:
                    first = self._out.popleft()
                    if sent < len(first):
                        self._out.appendleft(first[sent:])
                    sent -= min(sent, len(first))
        except (BlockingIOError, ssl.SSLWantWriteError, ssl.SSLWantReadError):
            return
        except OSError as error:
            self.fail(error)

    def read(self) -> None:
        """Reads what has arrived, and hands out complete answers.

        A large answer is read into a buffer of its size, because copying megabytes several times would cost
        more than all the rest.
        """
        try:
            while True:
                if self._large is not None:
                    count = self.socket.recv_into(self._large[self._arrived :])
                    if not count:
                        self.fail(ConnectionResetError(f"broker {self.address} closed the connection"))
                        return
                    self._arrived += count
                    if self._in_flight and self._arrived >= self._enough:
                        # megabytes may take longer than the limit, but not one byte after the other
                        self._enough = self._arrived + _PROGRESS_BYTES
                        head = self._in_flight[0]
                        head.due = max(head.due, time.monotonic() + head.seconds)
                    if self._arrived == len(self._large):
                        answer, self._large = self._large, None
                        self._answered(answer)
                        if self.failure is not None:
                            return
                    continue
                more = self.socket.recv(_READ_BYTES)
                if not more:
                    self._hand_out()  # what it answered before
                    self.fail(ConnectionResetError(f"broker {self.address} closed the connection"))
                    return
                self._in += more
                if len(more) == _READ_BYTES:
                    self._hand_out()
                    if self.failure is not None:
                        return
                elif not isinstance(self.socket, ssl.SSLSocket):
                    break
        except (BlockingIOError, ssl.SSLWantReadError, ssl.SSLWantWriteError):
            pass
        except OSError as error:
            self._hand_out()
            self.fail(error)
            return
        self._hand_out()

    def _hand_out(self) -> None:
        """Hands out every answer that is complete."""
        while len(self._in) >= 4 and self.failure is None:
            (size,) = struct.unpack_from(">i", self._in)
            try:
                check_size(size, self.address, self._access.most_bytes)
            except ConnectionError as error:
                self.fail(error)
                return
            if len(self._in) < 4 + size:
                if size > _READ_BYTES:
                    import numpy as np  # most connections receive only small answers

                    self._large = np.empty(size, np.uint8).data  # bytearray would clear the memory
                    self._arrived = len(self._in) - 4
                    self._enough = self._arrived + _PROGRESS_BYTES
                    self._large[: self._arrived] = self._in[4:]
                    self._in.clear()
                return
            answer = memoryview(bytes(self._in[4 : 4 + size]))
            del self._in[: 4 + size]
            self._answered(answer)

    def check_time(self) -> None:
        """Ends the connection if the oldest request has waited too long."""
        if self._in_flight and time.monotonic() >= self._in_flight[0].due:
            seconds = self._in_flight[0].seconds
            self.fail(TimeoutError(f"broker {self.address} did not answer within {seconds:.0f} s"))

    def fail(self, error: Exception) -> None:
        """Closes the connection. Every request in flight fails with this error."""
        if self.failure is not None:
            return
        self.failure = error
        broker_log.debug("%s: the connection ends: %s", self.address, error)
        self._on_end(self)
        self.socket.close()
        self._out.clear()
        waiting, self._in_flight = self._in_flight, deque()
        for each in waiting:
            each.on_answer(None, error)

    # -- inside ----------------------------------------------------------------------------------

    def _answered(self, data: memoryview) -> None:
        if not self._in_flight:
            self.fail(ConnectionError(f"broker {self.address} sent an answer to no request"))
            return
        first = self._in_flight[0]
        self._used = time.monotonic()
        log_answer(self.address, first.request, first.correlation_id, len(data))
        try:
            answer = first.decode(first.request, data, first.correlation_id)
        except (ValueError, IndexError, struct.error, KeyError) as error:
            self.fail(ConnectionError(f"the answer of broker {self.address} is damaged: {error}"))
            return
        if isinstance(first.request, ApiVersionsRequest):
            try:
                self._session.learn(answer, self.address)
            except ConnectionError as error:
                self.fail(error)
                return
        self._in_flight.popleft()
        throttled_ms = getattr(answer, "throttle_time_ms", 0) or 0
        if throttled_ms > 0:
            self.muted_until = time.monotonic() + min(throttled_ms / 1000, _LONGEST_MUTE_SECONDS)
        if self._in_flight:  # a broker serves the requests of a connection one after the other
            begins = max(time.monotonic(), self.muted_until)
            head = self._in_flight[0]
            head.due = max(head.due, begins + head.seconds)
        first.on_answer(answer, None)


def _joined(buffers: Buffers) -> Iterator[memoryview]:
    """Yields the same bytes, with short buffers copied together: each costs a system call and a packet."""
    short: list[bytes | memoryview] = []
    size = 0
    for each in buffers:
        if len(each) >= _SHORT_BYTES or size + len(each) > _JOINED_BYTES:
            if short:
                yield memoryview(b"".join(short))
            short, size = [], 0
        if len(each) >= _SHORT_BYTES:
            yield memoryview(each)
        else:
            short.append(each)
            size += len(each)
    if short:
        yield memoryview(b"".join(short))


class Network:
    """Serves the connections of one client. Not thread-safe.

    Args:
        on_silence: receives the connections to silent brokers, again and again while there are any.
    """

    def __init__(self, on_silence: Callable[[Collection[Connection]], None] = lambda _: None) -> None:
        self._on_silence = on_silence
        self._next_report = 0.0
        self._selector = selectors.DefaultSelector()
        #: The events that the selector waits for, by connection.
        self._connections: dict[Connection, int] = {}

    def connect(
        self, host: str, port: int, access: Access, deadline: Deadline, answer_seconds: float
    ) -> Connection:
        """Connects and logs in; the arguments are those of `Connection`.

        Raises:
            OSError: if that is not possible.
            LoginRefusedError: if the broker refuses the credentials.
        """
        connection = Connection(host, port, access, deadline, answer_seconds, self.forget)
        self._selector.register(connection.socket, selectors.EVENT_READ, connection)
        self._connections[connection] = selectors.EVENT_READ
        return connection

    @property
    def is_connected(self) -> bool:
        """Whether there is any connection."""
        return bool(self._connections)

    def wait(self, seconds: float) -> None:
        """Serves every connection once; waits up to that long if nothing has arrived.

        Without a connection nothing can arrive, so callers look for brokers again instead of waiting.
        """
        if not self._connections:
            return
        now = time.monotonic()
        for connection, before in self._connections.items():
            events = selectors.EVENT_READ | (selectors.EVENT_WRITE if connection.wants_to_write else 0)
            if events != before:
                self._selector.modify(connection.socket, events, connection)
                self._connections[connection] = events
            silent_at = max(connection.owes_since + SILENT_SECONDS, self._next_report)
            seconds = min(seconds, max(0.0, min(connection.next_event, silent_at) - now))
        for key, events in self._selector.select(seconds):
            connection = key.data
            if events & selectors.EVENT_WRITE and connection.failure is None:
                connection.write()
            if events & selectors.EVENT_READ and connection.failure is None:
                connection.read()
        for connection in list(self._connections):
            connection.check_time()
        self._report_silence()

    def _report_silence(self) -> None:
        now = time.monotonic()
        silent = [each for each in self._connections if now - each.owes_since >= SILENT_SECONDS]
        if silent and now >= self._next_report:
            self._on_silence(silent)
            ended = time.monotonic()
            self._next_report = ended + max(_REPORT_SECONDS, ended - now)

    def forget(self, connection: Connection) -> None:
        """Stops serving a connection that ended."""
        if connection in self._connections:
            del self._connections[connection]
            self._selector.unregister(connection.socket)

    def close(self) -> None:
        """Closes every connection."""
        for connection in list(self._connections):
            connection.fail(ConnectionAbortedError("the client was closed"))
        self._selector.close()
