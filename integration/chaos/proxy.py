"""A proxy that knows Kafka's requests: each starts with its length, API key, version and correlation id.

It is the broker for its clients when the broker advertises the proxy's address. A `Rule` catches requests of
one API key; what happens to a caught one is the rule's action. Connections are threads in pairs, one a way.
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

_WAIT_SECONDS = 60.0


class Action(Enum):
    """What becomes of a caught request."""

    HOLD = "hold"  #: not delivered, and the client is cut off; `Caught.deliver` sends it, as late as you like
    DROP_ANSWER = "drop answer"  #: delivered; the answer is kept back and the client is cut off
    CUT = "cut"  #: not delivered, and the client is cut off


@dataclass
class Caught:
    """One request in the proxy's hands.

    Attributes:
        frame: the whole request, its length included.
    """

    frame: bytes
    upstream: Callable[[], socket.socket]

    @property
    def correlation_id(self) -> int:
        return int(struct.unpack_from(">i", self.frame, 8)[0])

    def deliver(self, commit: bool | None = None) -> int:
        """Sends it on a connection of its own.

        Args:
            commit: for EndTxn, what to make of its flag; None = as it is.

        Returns:
            The answer's error code (of EndTxn).
        """
        frame = self.frame if commit is None else self.frame[:-1] + (b"\x01" if commit else b"\x00")
        with self.upstream() as connection:
            connection.sendall(frame)
            answer = _frame(connection)
        # length, correlation id, throttle time, error code (EndTxn up to version 2)
        return int(struct.unpack_from(">h", answer, 12)[0])


@dataclass
class Rule:
    """Catches requests.

    Attributes:
        api_key: of the requests.
        action: see `Action`.
        times: how many more are caught.
        skip: how many are let through first.
        caught: those that were.
    """

    api_key: int
    action: Action
    times: int = 1
    skip: int = 0
    caught: list[Caught] = field(default_factory=list)

    def await_caught(self, number: int = 1) -> list[Caught]:
        """Until so many are caught."""
        await_condition(lambda: len(self.caught) >= number, _WAIT_SECONDS, f"{number} caught by {self}")
        return self.caught


class Proxy:
    """Listens on a free port of 127.0.0.1 until closed.

    Attributes:
        port: where clients come to.
        upstream_port: where the broker listens; set it before the first client comes.
        seen: requests by API key.
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
        threading.Thread(target=self._accept, daemon=True).start()

    def catch(self, api_key: int, action: Action, *, times: int = 1, skip: int = 0) -> Rule:
        """From now on."""
        rule = Rule(api_key, action, times, skip)
        with self._lock:
            self._rules.append(rule)
        return rule

    def catch_nothing(self) -> None:
        """From now on; what was caught stays so."""
        with self._lock:
            self._rules.clear()

    def cut_for(self, seconds: float) -> None:
        """Every connection is reset, and new ones are, for so long."""
        self._is_cut = True
        self._reset_all()
        threading.Event().wait(seconds)  # the fault itself
        self._is_cut = False

    def close(self) -> None:
        self._closed = True
        self._listener.close()
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
            except OSError:  # the broker is down: so are we
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
    """One client's connection, and ours to the broker."""

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
    """One whole request or answer.

    Raises:
        OSError: the connection ended.
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
    with contextlib.suppress(OSError):  # it may be gone already
        connection.shutdown(socket.SHUT_RDWR)
    connection.close()
