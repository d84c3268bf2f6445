"""Reads answers of Kafka's protocol from a plain socket."""

from __future__ import annotations

import socket


def receive(connection: socket.socket, size: int) -> bytes:
    """Receives exactly ``size`` bytes.

    Raises:
        OSError: if the other side closes the connection before that, or does not answer in time.
    """
    received = b""
    while len(received) < size:
        more = connection.recv(size - len(received))
        if not more:
            raise ConnectionResetError("the broker closed the connection")
        received += more
    return received
