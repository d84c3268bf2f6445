"""A resident worker: a process that does the work of Spark's tasks, one after the other.

::

    start ──▶ waiting ──request──▶ working ──done──▶ waiting ──no request for a minute──▶ end
                 │                    │
                 │                    └── the task ended, and the work does not stop ──▶ exit at once
                 └── the process that started Spark's workers ended ──▶ end

What the work keeps open must survive an exit at any moment, as after ``kill -9``.
"""

from __future__ import annotations

import logging
import os
import select
import signal
import socket
import threading
from collections.abc import Iterator
from contextlib import closing, contextmanager, suppress
from pathlib import Path
from types import FrameType

import pyarrow as pa

from kafka_eos_source.resident.contents import Request, pack_error
from kafka_eos_source.resident.files import remove_leftovers
from kafka_eos_source.resident.messages import Kind, receive, send
from kafka_eos_source.runtime import failpoints, log_format
from kafka_eos_source.runtime.processes import wait_for_end
from kafka_eos_source.spark.pickled import from_message
from kafka_eos_source.spark.task import working_for
from kafka_eos_source.spark.worker import freeze_loaded_objects

_log = logging.getLogger(__name__)

#: A worker without a request for this long ends.
_IDLE_SECONDS = 60.0
#: How long the work may continue after the process of its task ended. Spark then runs the task again, and
#: the new attempt waits for this worker.
_GRACE_SECONDS = 2.0


class Server:
    """Does the work of requests that arrive at a socket.

    Args:
        listener: the socket, which listens.
        idle_seconds: the server ends if no request arrives for this long.
        grace_seconds: how long the work may continue after the process of its task ended.
    """

    def __init__(
        self,
        listener: socket.socket,
        idle_seconds: float = _IDLE_SECONDS,
        grace_seconds: float = _GRACE_SECONDS,
    ) -> None:
        self._listener = listener
        self._listener.settimeout(idle_seconds)
        self._grace_seconds = grace_seconds
        self._is_working = self._is_ending = False

    def end(self) -> None:
        """Ends the process now, or after its present work. A signal handler may call this."""
        self._is_ending = True
        if not self._is_working:
            raise SystemExit(0)

    def serve(self) -> None:
        """Does the work of all requests; returns when none arrives any more, or after `end`."""
        while not self._is_ending:
            try:
                connection, _ = self._listener.accept()
            except TimeoutError:
                return
            with connection:
                freeze_loaded_objects()
                connection.settimeout(None)
                self._is_working = True
                try:
                    self._answer(connection)
                finally:
                    self._is_working = False

    def _answer(self, connection: socket.socket) -> None:
        try:
            kind, contents = receive(connection)
        except (EOFError, OSError):
            return  # the task ended while it waited for its turn
        assert kind is Kind.WORK
        done = threading.Event()
        watch = threading.Thread(target=self._watch, args=(connection, done), daemon=True)
        watch.start()
        try:
            _work(connection, contents)
        except _TaskEndedError:
            _log.info("a task ended before its work was done")
        finally:
            done.set()
            with suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)  # ends `_watch`
            watch.join()

    def _watch(self, connection: socket.socket, done: threading.Event) -> None:
        """Ends this process if the task's process ends and the work continues for too long.

        The work may hang in code of the user. As long as it runs, no other attempt of the task can.
        """
        poll = select.poll()
        poll.register(connection, select.POLLIN | select.POLLHUP)
        poll.poll()  # the task sends nothing after its request, so this is the end of the connection
        if not done.wait(self._grace_seconds):
            _log.warning("a task ended, and its work did not; this resident worker ends")
            os._exit(1)


class _TaskEndedError(Exception):
    """The task has closed its connection, so nobody waits for the work."""


def _work(connection: socket.socket, packed: memoryview) -> None:
    """Does the work of a request and sends its batches.

    Raises:
        _TaskEndedError: if the task has closed the connection. The work is closed.
    """

    def reply(kind: Kind, contents: bytes | pa.Buffer = b"") -> None:
        try:
            send(connection, kind, contents)
        except OSError as error:
            raise _TaskEndedError from error

    failpoints.reach("resident.before_work")
    reply(Kind.BEGUN)
    schema: pa.Schema | None = None
    try:
        request: Request = from_message(packed)
        with working_for(request.task), ending(request.work()) as batches:
            for batch in batches:
                if schema is None:
                    schema = batch.schema
                    reply(Kind.SCHEMA, schema.serialize())
                reply(Kind.BATCH, batch.serialize())
    except _TaskEndedError:
        raise
    except Exception as error:  # noqa: BLE001 - the task raises it
        reply(Kind.FAILED, pack_error(error))
    else:
        failpoints.reach("resident.after_work")
        reply(Kind.DONE)


@contextmanager
def ending(batches: Iterator[pa.RecordBatch]) -> Iterator[Iterator[pa.RecordBatch]]:
    """Closes a generator at the end of the block, so that its ``finally`` clauses run then."""
    try:
        yield batches
    finally:
        close = getattr(batches, "close", None)
        if close is not None:
            close()


def _end_with(pid: int) -> None:
    """Ends this process when another one has ended."""
    wait_for_end(pid)
    os.kill(os.getpid(), signal.SIGTERM)


def main(socket_path: str, watched: str) -> None:
    """Runs a resident worker. Functions that the work registered with `atexit` close what it kept open.

    Args:
        socket_path: path of the socket. The process that started this one holds the lock of the slot for it.
        watched: id of the process with which the worker ends.
    """
    log_format.configure_if_wanted()
    failpoints.set_parent(int(watched))
    Path(socket_path).unlink(missing_ok=True)
    with closing(socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)) as listener:
        listener.bind(socket_path)
        listener.listen(128)
        server = Server(listener)

        def end(_number: int, _frame: FrameType | None) -> None:
            server.end()

        for number in (signal.SIGTERM, signal.SIGHUP):
            signal.signal(number, end)
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # a terminal sends it to all processes of a driver
        threading.Thread(target=_end_with, args=(int(watched),), daemon=True).start()
        remove_leftovers()
        try:
            server.serve()
        finally:
            with suppress(FileNotFoundError):
                os.unlink(socket_path)
