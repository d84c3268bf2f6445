"""How a worker is tuned: prompt TCP acknowledgements, and what tasks leave in its memory."""

from __future__ import annotations

import ctypes
import os
import socket
import subprocess
import sys
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context

import pytest

from kafka_eos_source.spark.worker import acknowledge


def _switched_on() -> None:
    assert acknowledge() == 0
    with (
        socket.create_server(("127.0.0.1", 0)) as server,
        socket.create_connection(server.getsockname()) as one,
        server.accept()[0] as other,
        socket.socketpair()[0],  # not a TCP socket
        open(__file__, "rb"),
    ):
        assert acknowledge() == 3
        one.sendall(b"all is as it was")
        assert other.recv(100) == b"all is as it was"
    assert acknowledge() == 0


def test_acknowledgements_are_switched_on_for_every_tcp_socket_and_no_other() -> None:
    """Runs in a separate process, because clients left by other tests may open sockets at any time."""
    with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as process:
        process.submit(_switched_on).result()


def test_a_system_without_the_socket_option_is_accepted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(socket, "TCP_QUICKACK")
    assert acknowledge() == 0


# ------------------------------------------------------------------ memory

TASKS = """
import gc, weakref
from kafka_eos_source.spark.worker import freeze_loaded_objects

class Node:
    pass

def task():
    freeze_loaded_objects()
    node = Node()
    node.itself = node
    left.append(weakref.ref(node))

left = []
for number in range(1, 10):
    task()
    before = gc.get_freeze_count()
    gc.collect()  # as PySpark's daemon does after each task
    assert left[-1]() is None, f"the cycle of task {number} stays"
    print(before)
"""


def test_objects_that_survive_the_first_task_are_not_scanned_by_later_collections() -> None:
    spared = [
        int(line)
        for line in subprocess.run(
            [sys.executable, "-c", TASKS], check=True, capture_output=True, text=True
        ).stdout.split()
    ]
    assert spared[0] == 0, "the first task loads what stays"
    assert spared[1] > 1000
    assert [number for number in range(2, 10) if spared[number - 1] > spared[number - 2]] == [2, 4, 8]


#: Fills the heap with blocks, and frees all but the last one, below which the C library keeps everything.
HEAP = """
import ctypes
from pathlib import Path
from kafka_eos_source.spark.worker import release_unused_memory

def resident_pages():
    return int(Path("/proc/self/statm").read_text().split()[1])

library = ctypes.CDLL(None)
library.malloc.restype, library.malloc.argtypes = ctypes.c_void_p, [ctypes.c_size_t]
library.memset.argtypes = [ctypes.c_void_p, ctypes.c_int, ctypes.c_size_t]
library.free.argtypes = [ctypes.c_void_p]
import pyarrow
size, blocks = 60_000, []
began = resident_pages()
for _ in range(2_000):
    blocks.append(library.malloc(size))
    library.memset(blocks[-1], 1, size)
for block in blocks[:-1]:
    library.free(block)
kept = resident_pages()
release_unused_memory()
print(began, kept, resident_pages())
"""


@pytest.mark.skipif(not hasattr(ctypes.CDLL(None), "malloc_trim"), reason="the C library is not glibc")
def test_freed_memory_is_returned() -> None:
    began, kept, left = map(
        int,
        subprocess.run(
            [sys.executable, "-c", HEAP], check=True, capture_output=True, text=True
        ).stdout.split(),
    )
    assert kept - began > 20_000, "the C library keeps what was freed"
    assert left - began < 2_000


_DAEMON = """
import io, os, sys
from pyspark import daemon
from pyspark.serializers import write_with_length
from kafka_eos_source.spark import worker

class Gone(io.BytesIO):
    def flush(self):
        raise ERROR("x")

opened = iter([io.BytesIO(), Gone()])
daemon.os.fdopen = lambda *_: next(opened)
daemon.os.dup = lambda _: 0
sys.argv = ["daemon", "pyspark.a_worker"]
module = sys.modules["pyspark.a_worker"] = type(sys)("a_worker")
module.main = lambda *_: worker.accept_closed_connections()
try:
    daemon.worker(type("Socket", (), {"fileno": lambda self: 0})(), True)
except Exception as error:
    print("raised", error)
"""


@pytest.mark.parametrize(
    ("error", "quiet", "printed"),
    [("BrokenPipeError", "", False), ("BrokenPipeError", "false", True), ("ValueError", "", True)],
)
def test_the_daemon_prints_no_traceback_if_spark_closed_the_connection(
    error: str, quiet: str, printed: bool
) -> None:
    done = subprocess.run(
        [sys.executable, "-c", _DAEMON.replace("ERROR", error)],
        env={**os.environ, "KAFKA_EOS_QUIET_LOGS": quiet},
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    assert (error in done.stderr) == printed, done.stderr
    assert "raised" not in done.stdout
