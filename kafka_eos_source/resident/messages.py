"""Messages between a task and a resident worker, over a socket of the local machine.

::

    task                            resident worker
      │ WORK (pickled) ───────────────▶ │
      │ ◀─────────────────────── BEGUN  │   from now on the work may have effects
      │ ◀── SCHEMA, BATCH, BATCH, …     │   Arrow's IPC format
      │ ◀────────── DONE or FAILED      │
      ✕ either side closes the socket: the other one ended, or gave up

Each message is one byte with its kind, its length in bytes (8, big endian), and its contents.
"""

from __future__ import annotations

import socket
import struct
from enum import IntEnum

import pyarrow as pa

_HEADER = struct.Struct(">BQ")


class Kind(IntEnum):
    """Kind of a message."""

    WORK = 1
    BEGUN = 2
    SCHEMA = 3
    BATCH = 4
    DONE = 5
    FAILED = 6


def send(connection: socket.socket, kind: Kind, contents: bytes | pa.Buffer = b"") -> None:
    """Sends a message; raises OSError if the other side has closed the connection."""
    view = memoryview(contents).cast("B")
    connection.sendall(_HEADER.pack(kind, len(view)))
    if len(view):
        connection.sendall(view)


def receive(connection: socket.socket) -> tuple[Kind, memoryview]:
    """Waits for the next message and returns its kind and its contents.

    Raises:
        EOFError: if the other side closed the connection instead.
        OSError: if the connection failed.
    """
    kind, size = _HEADER.unpack(_exactly(connection, _HEADER.size))
    return Kind(kind), _exactly(connection, size)


def _exactly(connection: socket.socket, size: int) -> memoryview:
    contents = memoryview(bytearray(size))
    filled = 0
    while filled < size:
        count = connection.recv_into(contents[filled:])
        if not count:
            raise EOFError("the other side closed the connection")
        filled += count
    return contents
