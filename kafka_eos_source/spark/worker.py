"""Tunes Spark's Python workers, so that small tasks start and end quickly; tells which task a worker runs."""

from __future__ import annotations

import ctypes
import gc
import os
import socket
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from pyspark import TaskContext

from kafka_eos_source.runtime.logs import wants_all_logs

_DESCRIPTORS = "/proc/self/fd"

#: Number of tasks that have begun in this process.
_tasks = 0


def task_begins() -> None:
    """Tunes this worker process. Each task calls it first, before it waits for data of the JVM."""
    acknowledge()
    freeze_loaded_objects()
    accept_closed_connections()


def accept_closed_connections() -> None:
    """Keeps PySpark's daemon from printing a traceback when Spark closes the connection of a task.

    Spark does so if a query is stopped in the middle of a batch. The daemon, from which this process was
    forked, prints a traceback if it cannot write the rest of the task's output.
    """
    if wants_all_logs():
        return
    for name in ("__main__", "pyspark.daemon"):  # `python -m` runs the daemon as the former
        module = sys.modules.get(name)
        if hasattr(module, "compute_real_exit_code"):
            vars(module)["print"] = _print_unless_closed


def _print_unless_closed(*values: object, **options: Any) -> None:
    if not isinstance(sys.exc_info()[1], (BrokenPipeError, ConnectionResetError)):
        print(*values, **options)


def acknowledge() -> int:
    """Turns on prompt TCP acknowledgements for all connections of this process (Linux only).

    This saves 70 ms for each micro-batch. The JVM sends a task to its worker in small pieces (the function,
    its input, Arrow's schema, a batch) without ``TCP_NODELAY``, so each piece waits until the previous one is
    acknowledged (Nagle's algorithm, RFC 896). On an interactive connection, such as that of a reused worker,
    Linux delays acknowledgements by 40 ms (RFC 1122 4.2.3.2). The setting lasts until this process sends
    something, which a sink does only after it has received all rows. Nothing needs acknowledging if
    ``spark.python.unix.domain.socket.enabled`` is set.

    Returns:
        How many connections were set.
    """
    option = getattr(socket, "TCP_QUICKACK", None)
    if option is None or not os.path.isdir(_DESCRIPTORS):
        return 0
    yes = ctypes.c_int(1)
    # Called through the C library, because a Python socket object made from another owner's descriptor may
    # change the blocking mode of that descriptor.
    call = ctypes.CDLL(None).setsockopt
    done = [
        call(int(fd), socket.IPPROTO_TCP, option, ctypes.byref(yes), ctypes.sizeof(yes))
        for fd in os.listdir(_DESCRIPTORS)
    ]
    return done.count(0)  # the call fails on descriptors that are not TCP sockets


def freeze_loaded_objects() -> None:
    """Excludes the objects of this process from garbage collection at the 2nd, 4th, 8th, … task.

    PySpark's worker runs the collector after every task (``pyspark/daemon.py``). With PySpark, PyArrow and
    NumPy loaded, this takes 40 ms of CPU time, most of what a small task costs. When the second task begins,
    everything that the first one loaded is present and the collector has just run, so there is no garbage to
    freeze. Later tasks may load more modules, therefore the objects are frozen again, ever more rarely.
    """
    global _tasks
    _tasks += 1
    if _tasks > 1 and _tasks & (_tasks - 1) == 0:
        gc.freeze()


def release_unused_memory() -> None:
    """Returns memory that this process has freed to the operating system.

    Spark keeps a worker for further tasks. Arrow's pool and the C library keep freed memory for later use, so
    after a task that needed much memory, the next one would begin with it. A call takes some milliseconds.
    """
    import pyarrow as pa  # not all workers need it

    pa.default_memory_pool().release_unused()
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)  # glibc has it
    if trim is not None:
        trim(0)


@contextmanager
def cycle_collection_paused() -> Iterator[None]:
    """Pauses the collector of reference cycles while the caller creates many Kafka messages.

    Messages are in no reference cycle, and searching tens of thousands of them for cycles took a third of the
    time of a read. Reference counting still frees them.
    """
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


@dataclass(frozen=True)
class StreamingTask:
    """A running task. Outside of a streaming query, the ids are "".

    Attributes:
        query_id: id of the query in the checkpoint, the same in every run.
        batch_id: id of the micro-batch, as text.
        run_id: id of this run of the query.
        partition: number of the task in its stage.
    """

    query_id: str
    batch_id: str
    run_id: str
    partition: int = 0


def running_task() -> StreamingTask | None:
    """Returns the task that this process runs; None if it runs no task, as on the driver."""
    context = TaskContext.get()
    if context is None:
        return None

    def local_property(name: str) -> str:
        return context.getLocalProperty(name) or ""

    return StreamingTask(
        query_id=local_property("sql.streaming.queryId"),
        batch_id=local_property("streaming.sql.batchId"),
        run_id=local_property("spark.jobGroup.id"),
        partition=context.partitionId(),
    )
