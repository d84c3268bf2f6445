"""A TCP relay to a server that can lose all traffic silently, in one direction or both."""

from __future__ import annotations

import contextlib
import socket
import threading
from enum import Enum


class Lost(Enum):
    """Which traffic the relay discards. It does not reset connections, so neither side notices."""

    NOTHING = "nothing"
    ANSWERS = "answers"
    EVERYTHING = "everything"


class Wire:
    """Listens on a free port of 127.0.0.1 and relays bytes to the server and back, until closed.

    Args:
        server_port: the server's port on 127.0.0.1.

    Attributes:
        port: the port that clients connect to.
    """

    def __init__(self, server_port: int) -> None:
        self._server_port = server_port
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port: int = self._listener.getsockname()[1]
        self._lost = Lost.NOTHING
        self._open: list[socket.socket] = []
        threading.Thread(target=self._accept, daemon=True).start()

    def lose(self, lost: Lost) -> None:
        """Sets what is lost from now on, on existing connections and new ones."""
        self._lost = lost

    def close(self) -> None:
        self._listener.close()
        for each in self._open:
            _end(each)

    def _accept(self) -> None:
        while True:
            try:
                client, _ = self._listener.accept()
            except OSError:
                return
            self._open.append(client)
            if self._lost is Lost.EVERYTHING:
                continue
            try:
                server = socket.create_connection(("127.0.0.1", self._server_port))
            except OSError:
                _end(client)
                continue
            self._open.append(server)
            for way in (
                (client, server, {Lost.EVERYTHING}),
                (server, client, {Lost.EVERYTHING, Lost.ANSWERS}),
            ):
                threading.Thread(target=self._pass, args=way, daemon=True).start()

    def _pass(self, source: socket.socket, target: socket.socket, lost_in: set[Lost]) -> None:
        try:
            while data := source.recv(1 << 16):
                if self._lost not in lost_in:
                    target.sendall(data)
        except OSError:
            return
        finally:
            if self._lost not in lost_in:  # the end of a connection is lost too
                _end(target)


def _end(connection: socket.socket) -> None:
    with contextlib.suppress(OSError):  # it may be closed already
        connection.shutdown(socket.SHUT_RDWR)
    connection.close()
