"""Serves all connections of one client in the caller's thread."""

from __future__ import annotations

import selectors
import time
from collections.abc import Callable, Collection

from kafka_eos_source.kafka.wire.access import Access
from kafka_eos_source.kafka.wire.connection import Connection
from kafka_eos_source.runtime.deadline import Deadline

#: A broker is silent if it has owed an answer for this long.
SILENT_SECONDS = 1.5
#: Pause between two reports of silent brokers, which is longer if the report itself took longer.
_REPORT_SECONDS = 0.5


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
