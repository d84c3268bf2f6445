"""Asks the process that keeps a database open to close it.

The file ``owner`` next to the database names the socket of that process. The socket is in the state folder,
so that processes of other containers which share the folder reach it, too. Who may not write to the folder
cannot connect. The request is the path of the database; the answer is the end of the connection, and says
nothing: the asker tries to open the database again.
"""

from __future__ import annotations

import logging
import os
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from kafka_eos_source.state.store.files import lease_socket_of

_log = logging.getLogger(__name__)

#: How long an asker waits for an owner, which may have to write tables before it can close.
_ANSWER_SECONDS = 5.0
_MOST_BYTES = 1 << 16


class LeaseListener:
    """Listens for requests to close databases, in a thread.

    Args:
        folder: the state folder, where the socket is created.
        release: closes the database with this path, if this process keeps it.

    Attributes:
        path: path of the socket.

    Raises:
        OSError: if the socket cannot be created there.
    """

    def __init__(self, folder: Path, release: Callable[[Path], object]) -> None:
        self.path = folder / f".lease-{os.getpid()}-{os.urandom(4).hex()}"
        self._release = release
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            with _short(self.path) as address:
                self._listener.bind(address)
            self.path.chmod(0o600)
            self._listener.listen(16)
        except BaseException:
            self._listener.close()
            raise
        threading.Thread(target=self._listen, daemon=True).start()

    def close(self) -> None:
        """Removes the socket."""
        self.path.unlink(missing_ok=True)
        with suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)  # wakes the thread

    def _listen(self) -> None:
        with self._listener:
            while True:
                try:
                    connection, _ = self._listener.accept()
                except OSError:
                    return  # closed
                with connection, suppress(OSError):
                    connection.settimeout(_ANSWER_SECONDS)
                    request = connection.recv(_MOST_BYTES)
                    if request:
                        self._release(Path(os.fsdecode(request)))


def ask_to_release(database: Path) -> None:
    """Asks the process that keeps a database open to close it; returns when it answered, or has ended."""
    path = lease_socket_of(database)
    if path is None:
        return
    try:
        with _short(path) as address, socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection:
            connection.settimeout(_ANSWER_SECONDS)
            connection.connect(address)
            connection.sendall(os.fsencode(database.resolve()))
            connection.recv(1)
    except OSError as error:
        _log.debug("the process that keeps %s open does not answer: %s", database, error)


@contextmanager
def _short(path: Path) -> Iterator[str]:
    """Gives a short name of a socket, because the system limits the name to about 100 bytes."""
    if len(os.fsencode(path)) < 100 or not os.path.isdir("/proc/self/fd"):
        yield str(path)
        return
    folder = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY)
    try:
        yield f"/proc/self/fd/{folder}/{path.name}"
    finally:
        os.close(folder)
