"""Serves all connections of one client in the caller's thread."""

from __future__ import annotations

import selectors
import time

from kafka_eos_source.kafka.wire.access import Access
from kafka_eos_source.kafka.wire.connection import Connection
from kafka_eos_source.runtime.deadline import Deadline


class Network:
    """Serves the connections of one client. Not thread-safe."""

    def __init__(self) -> None:
        self._selector = selectors.DefaultSelector()
        #: The events that the selector waits for, by connection.
        self._connections: dict[Connection, int] = {}

    def connect(self, host: str, port: int, access: Access, deadline: Deadline) -> Connection:
        """Connects and logs in.

        Raises:
            OSError: if that is not possible.
            LoginRefusedError: if the broker refuses the credentials.
        """
        connection = Connection(host, port, access, deadline, self.forget)
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
            seconds = min(seconds, max(0.0, connection.next_event - now))
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
            del self._connections[connection]
            self._selector.unregister(connection.socket)

    def close(self) -> None:
        """Closes every connection."""
        for connection in list(self._connections):
            connection.fail(ConnectionAbortedError("the client was closed"))
        self._selector.close()
