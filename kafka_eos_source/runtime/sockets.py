"""Reads answers of Kafka's protocol from a plain socket."""

from __future__ import annotations

import socket

from kafka_eos_source.runtime.deadline import Deadline


def receive(connection: socket.socket, size: int, deadline: Deadline | None = None) -> bytes:
    """Receives exactly ``size`` bytes.

    Args:
        connection: the socket, which blocks.
        size: number of bytes.
        deadline: for all of them; None = the socket's own timeout limits each part that arrives.

    Raises:
        OSError: if the other side closes the connection before that, or does not answer in time.
    """
    received = b""
    while len(received) < size:
        if deadline is not None:
            limit(connection, deadline)
        more = connection.recv(size - len(received))
        if not more:
            raise ConnectionResetError("the broker closed the connection")
        received += more
    return received


def limit(connection: socket.socket, deadline: Deadline) -> None:
    """Limits the next operation of a blocking socket to the time that is left.

    Raises:
        TimeoutError: if no time is left.
    """
    if deadline.expired:
        raise TimeoutError("the other side did not answer in time")
    connection.settimeout(max(deadline.remaining_seconds(), 0.001))  # 0 would mean: do not block
