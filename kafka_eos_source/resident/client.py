"""Passes the work of a task to a resident worker, or does it here if there is none."""

from __future__ import annotations

import hashlib
import json
import logging
import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator

import pyarrow as pa

from kafka_eos_source.errors import ResidentWorkerEndedError
from kafka_eos_source.resident.contents import Request, Work, unpack_error
from kafka_eos_source.resident.files import SlotFiles, slots_of
from kafka_eos_source.resident.messages import Kind, receive, send
from kafka_eos_source.spark.pickled import to_message
from kafka_eos_source.spark.task import running_task

_log = logging.getLogger(__name__)

#: A process starts the worker of a slot at most once in this time, so that a worker that cannot start costs
#: little.
_STARTED_AGAIN_SECONDS = 60.0
#: Program of a resident worker. Its import path is that of the Spark worker that starts it, which includes
#: the files that the user gave to Spark.
_PROGRAM = (
    "import json, sys; sys.path[:] = json.loads(sys.argv[1]); "
    "from kafka_eos_source.resident.server import main; main(*sys.argv[2:])"
)

#: When this process last started the worker of a slot which has not listened yet, on the monotonic clock.
_unconfirmed_starts: dict[SlotFiles, float] = {}
#: Resident workers that this process started.
_processes: list[subprocess.Popen[bytes]] = []


def run(work: Work, number: int, *, otherwise: Work) -> Iterator[pa.RecordBatch]:
    """Yields the batches of some work, which the resident worker of a slot does if it is running.

    Work with the same number is always done in the same resident worker of this executor, and never at the
    same time. If the consumer closes this iterator, or its process ends, the resident worker gives up the
    work.

    Args:
        work: for the resident worker; can be pickled.
        number: decides the slot, for example the number of a shard.
        otherwise: the same work for this process.

    Raises:
        ResidentWorkerEndedError: if the resident worker ended after it had begun the work.
        Exception: what the work raises, with its traceback in the resident worker as the cause.
    """
    slot = _slot(number)
    connection = _connect(slot)
    if connection is not None:
        _unconfirmed_starts.pop(slot, None)
        with connection:
            if _begins(connection, work):
                yield from _batches(connection)
                return
    else:
        _start(slot)
    yield from otherwise()


def _slot(number: int) -> SlotFiles:
    """Returns the files of a slot. Other code, and other executors, have slots of their own."""
    code = json.dumps([sys.executable, sys.path])
    return SlotFiles(os.getppid(), hashlib.sha256(code.encode()).hexdigest()[:8], number % slots_of())


def _connect(slot: SlotFiles) -> socket.socket | None:
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        connection.connect(slot.socket_path)
    except OSError:  # there is no worker, or it is starting or ending
        connection.close()
        return None
    return connection


def _begins(connection: socket.socket, work: Work) -> bool:
    """Sends the work and waits until the worker begins it; returns False if the worker ended before that."""
    try:
        send(connection, Kind.WORK, to_message(Request(running_task(), work)))
        kind, _ = receive(connection)
    except (EOFError, OSError):
        return False
    return kind is Kind.BEGUN


def _batches(connection: socket.socket) -> Iterator[pa.RecordBatch]:
    schema: pa.Schema | None = None
    while True:
        try:
            kind, contents = receive(connection)
        except (EOFError, OSError) as error:
            raise ResidentWorkerEndedError(
                "the resident worker of a shard ended before the shard was done.",
                fix="Spark retries the task if spark.task.maxFailures allows it (in local mode: "
                "local[cores, failures]); otherwise start the query again. If it happens again, look for "
                "memory that the host lacks, or set state.keep.open=false.",
            ) from error
        if kind is Kind.SCHEMA:
            schema = pa.ipc.read_schema(pa.py_buffer(contents))
        elif kind is Kind.BATCH:
            assert schema is not None
            yield pa.ipc.read_record_batch(pa.py_buffer(contents), schema)
        elif kind is Kind.FAILED:
            raise unpack_error(contents)
        else:
            return


def _start(slot: SlotFiles) -> None:
    """Starts the worker of a slot in the background, unless it is running or starting.

    A worker that ended before it listened is not started again for a while.
    """
    now = time.monotonic()
    began = _unconfirmed_starts.get(slot)
    if began is not None and now - began < _STARTED_AGAIN_SECONDS:
        return
    _processes[:] = [each for each in _processes if each.poll() is None]  # removes them from the system, too
    program = [sys.executable, "-c", _PROGRAM, json.dumps(sys.path), slot.socket_path, str(slot.watched_pid)]
    try:
        with slot.claimed() as lock:
            if lock is not None:
                _unconfirmed_starts[slot] = now
                # Spark reads the standard output of its Python daemon, so the worker must not write there
                _processes.append(
                    subprocess.Popen(program, stdin=subprocess.DEVNULL, stdout=2, pass_fds=[lock])
                )
    except OSError as error:
        _unconfirmed_starts[slot] = now
        _log.warning("cannot start a resident worker, so this task runs its shard itself: %s", error)
