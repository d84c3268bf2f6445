"""Serves all connections of one client in the caller's thread."""

from __future__ import annotations

import selectors
import time

from kafka_eos_source.kafka.wire.access import Access
from kafka_eos_source.kafka.wire.connection import Connection


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
        connection = Connection(host, port, access, self.forget)
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
