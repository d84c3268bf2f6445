"""A TCP proxy in front of a broker that can hold, cut or drop single Kafka requests.

A request starts with its length, API key, version and correlation id. The broker advertises the proxy's
address, so clients talk to the proxy only. A `Rule` catches requests with one API key and says what happens
to them. Each connection has two threads, one for each direction.
"""

from __future__ import annotations

import contextlib
import socket
import struct
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from enum import Enum

from integration.support.processes import await_condition

#: API keys (``ApiKeys`` in Kafka).
PRODUCE, INIT_PRODUCER_ID, ADD_PARTITIONS, ADD_OFFSETS, END_TXN, TXN_OFFSET_COMMIT = 0, 22, 24, 25, 26, 28

_FIRST_FLEXIBLE_END_TXN = 3
_WAIT_SECONDS = 60.0


class Action(Enum):
    """What the proxy does with a caught request."""

    HOLD = "hold"  #: disconnect the client without delivering; `Caught.deliver` can send the request later
    DROP_ANSWER = "drop answer"  #: deliver the request, then disconnect the client instead of answering
    CUT = "cut"  #: disconnect the client without delivering


@dataclass
class Caught:
    """One request that a rule caught.

    Attributes:
        frame: the whole request, including its length field.
    """

    frame: bytes
    upstream: Callable[[], socket.socket]

    @property
    def correlation_id(self) -> int:
        return int(struct.unpack_from(">i", self.frame, 8)[0])

    def deliver(self, commit: bool | None = None) -> int:
        """Sends the held request to the broker on a new connection.

        Args:
            commit: new value of EndTxn's commit flag; None leaves it unchanged.

        Returns:
            The error code in the EndTxn response.
        """
        (version,) = struct.unpack_from(">h", self.frame, 6)
        # then header and body end with a number of tags, which is 0
        is_flexible = version >= _FIRST_FLEXIBLE_END_TXN
        frame = bytearray(self.frame)
        if commit is not None:
            frame[-2 if is_flexible else -1] = int(commit)
        with self.upstream() as connection:
            connection.sendall(frame)
            answer = _frame(connection)
        # length, correlation id, tags, throttle time, error code
        return int(struct.unpack_from(">h", answer, 13 if is_flexible else 12)[0])


@dataclass
class Rule:
    """Catches requests with one API key.

    Attributes:
        api_key: the API key to match.
        action: what to do with a match, see `Action`.
        times: how many more requests to catch.
        skip: how many matching requests to let through first.
        caught: the requests caught so far.
    """

    api_key: int
    action: Action
    times: int = 1
    skip: int = 0
    caught: list[Caught] = field(default_factory=list)

    def await_caught(self, number: int = 1) -> list[Caught]:
        """Waits until ``number`` requests are caught, and returns all that were."""
        await_condition(lambda: len(self.caught) >= number, _WAIT_SECONDS, f"{number} caught by {self}")
        return self.caught


class Proxy:
    """Listens on a free port of 127.0.0.1 until closed.

    Attributes:
        port: the port that clients connect to.
        upstream_port: the broker's port; set it before the first client connects.
        seen: number of requests seen, by API key.
    """

    def __init__(self) -> None:
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port: int = self._listener.getsockname()[1]
        self.upstream_port = 0
        self.seen: dict[int, int] = {}
        self._rules: list[Rule] = []
        self._lock = threading.Lock()
        self._open: set[socket.socket] = set()
        self._is_cut = False
        self._closed = False
        self._flows = threading.Event()
        self._flows.set()
        threading.Thread(target=self._accept, daemon=True).start()

    def catch(self, api_key: int, action: Action, *, times: int = 1, skip: int = 0) -> Rule:
        """Adds a rule, which applies to requests from now on."""
        rule = Rule(api_key, action, times, skip)
        with self._lock:
            self._rules.append(rule)
        return rule

    def catch_nothing(self) -> None:
        """Removes all rules. Requests that were caught already are kept."""
        with self._lock:
            self._rules.clear()

    def cut_for(self, seconds: float) -> None:
        """Resets every connection, and refuses new ones, for ``seconds``."""
        self._is_cut = True
        self._reset_all()
        threading.Event().wait(seconds)  # the fault itself
        self._is_cut = False

    def silence_for(self, seconds: float) -> None:
        """Delivers no request for ``seconds``, and then those that came meanwhile; connections stay open."""
        self._flows.clear()
        threading.Event().wait(seconds)  # the fault itself
        self._flows.set()

    def close(self) -> None:
        self._closed = True
        self._listener.close()
        self._flows.set()
        self._reset_all()

    def _reset_all(self) -> None:
        with self._lock:
            connections, self._open = self._open, set()
        for each in connections:
            _reset(each)

    def _accept(self) -> None:
        while not self._closed:
            try:
                client, _ = self._listener.accept()
            except OSError:
                return
            if self._is_cut:
                _reset(client)
                continue
            try:
                broker = self._upstream()
            except OSError:  # the broker is down, and so the proxy appears down too
                _reset(client)
                continue
            with self._lock:
                self._open = {each for each in self._open if each.fileno() >= 0} | {client, broker}
            link = _Link(client, broker)
            threading.Thread(target=self._requests, args=(link,), daemon=True).start()
            threading.Thread(target=link.answers, daemon=True).start()

    def _upstream(self) -> socket.socket:
        return socket.create_connection(("127.0.0.1", self.upstream_port))

    def _requests(self, link: _Link) -> None:
        try:
            while True:
                frame = _frame(link.client)
                self._flows.wait()
                rule = self._matching(struct.unpack_from(">h", frame, 4)[0])
                if rule is None:
                    link.broker.sendall(frame)
                    continue
                caught = Caught(frame, self._upstream)
                if rule.action is Action.DROP_ANSWER:
                    link.withhold(caught.correlation_id)
                    link.broker.sendall(frame)
                    link.withheld.wait(_WAIT_SECONDS)
                rule.caught.append(caught)
                return
        except OSError:
            return
        finally:
            link.close()

    def _matching(self, api_key: int) -> Rule | None:
        with self._lock:
            self.seen[api_key] = self.seen.get(api_key, 0) + 1
            for rule in self._rules:
                if rule.api_key != api_key or not rule.times:
                    continue
                if rule.skip:
                    rule.skip -= 1
                    continue
                rule.times -= 1
                return rule
        return None


class _Link:
    """One client's connection, paired with the proxy's connection to the broker."""

    def __init__(self, client: socket.socket, broker: socket.socket) -> None:
        self.client = client
        self.broker = broker
        self.withheld = threading.Event()
        self._withhold: int | None = None

    def withhold(self, correlation_id: int) -> None:
        self._withhold = correlation_id

    def answers(self) -> None:
        try:
            while True:
                frame = _frame(self.broker)
                if struct.unpack_from(">i", frame, 4)[0] == self._withhold:
                    return
                self.client.sendall(frame)
        except OSError:
            return
        finally:
            self.withheld.set()
            self.close()

    def close(self) -> None:
        for each in (self.client, self.broker):
            _reset(each)


def _frame(connection: socket.socket) -> bytes:
    """Reads one whole request or response.

    Raises:
        OSError: if the connection ended.
    """
    length = _exactly(connection, 4)
    return length + _exactly(connection, struct.unpack(">i", length)[0])


def _exactly(connection: socket.socket, size: int) -> bytes:
    parts = []
    while size:
        part = connection.recv(min(size, 1 << 20))
        if not part:
            raise ConnectionResetError("the other side ended the connection")
        parts.append(part)
        size -= len(part)
    return b"".join(parts)


def _reset(connection: socket.socket) -> None:
    with contextlib.suppress(OSError):  # it may be closed already
        connection.shutdown(socket.SHUT_RDWR)
    connection.close()
