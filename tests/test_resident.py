"""Resident workers do the work of tasks in processes of their own, and end when nobody needs them."""

from __future__ import annotations

import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pyarrow as pa
import pytest
from crash_kit import until

from kafka_eos_source.errors import ResidentWorkerEndedError, StateError
from kafka_eos_source.resident import client, files
from kafka_eos_source.resident.client import run
from kafka_eos_source.resident.server import Server
from kafka_eos_source.runtime.processes import is_alive
from kafka_eos_source.spark.task import StreamingTask, running_task, working_for

TASK = StreamingTask("query", "7", "run", 3)


@pytest.fixture(autouse=True)
def folder(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A short path, because the system limits the names of sockets; ends the workers afterwards."""
    path = Path(tempfile.mkdtemp(prefix="kr-"))
    monkeypatch.setattr(tempfile, "tempdir", str(path))
    monkeypatch.setattr(files, "slots_of", lambda: 2)
    monkeypatch.setattr(client, "slots_of", lambda: 2)
    monkeypatch.setattr(client, "_unconfirmed_starts", {})
    monkeypatch.setattr(client, "_processes", [])
    yield path
    for process in client._processes:
        process.kill()
        process.wait()
    shutil.rmtree(path)


def rows(*values: int) -> pa.RecordBatch:
    return pa.record_batch({"value": pa.array(values)})


def here() -> Iterator[pa.RecordBatch]:
    """Work that tells which process does it."""
    yield rows(os.getpid())


def taken(work: Callable[[], Iterator[pa.RecordBatch]], number: int = 0) -> list[int]:
    """Does the work in a resident worker; it fails if this process has to do it."""

    def otherwise() -> Iterator[pa.RecordBatch]:
        raise AssertionError("there is no resident worker")

    return [value for batch in run(work, number, otherwise=otherwise) for value in batch[0].to_pylist()]


def started(number: int = 0) -> int:
    """Starts the resident worker of a slot; returns its process id."""

    def is_listening() -> bool:
        list(
            run(here, number, otherwise=here)
        )  # the system may not have released the lock of a killed worker
        connection = client._connect(client._slot(number))
        if connection is not None:
            connection.close()
        return connection is not None

    until(is_listening)
    (pid,) = taken(here, number)
    return pid


def test_the_first_task_does_its_work_itself_and_later_ones_in_the_same_resident_worker() -> None:
    first = [batch[0][0].as_py() for batch in run(here, 0, otherwise=here)]
    assert first == [os.getpid()]
    pid = started(0)
    assert pid != os.getpid()
    assert taken(here, 0) == taken(here, 2) == [pid], "both numbers have slot 0"
    assert started(1) != pid


def test_work_returns_all_batches_and_knows_its_task() -> None:
    def work() -> Iterator[pa.RecordBatch]:
        task = running_task()
        assert task is not None
        yield rows(task.partition)
        yield rows(*range(100_000))
        yield rows()

    started()
    with working_for(TASK):
        assert taken(work) == [3, *range(100_000)]
    assert taken(lambda: iter(())) == []


def test_no_second_worker_of_a_slot_is_started() -> None:
    """Not even by another process of the executor, which does not know about the first one."""
    list(run(here, 0, otherwise=here))
    client._unconfirmed_starts.clear()
    list(run(here, 0, otherwise=here))
    assert len(client._processes) == 1


def test_a_worker_that_cannot_start_is_not_started_again_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(client, "_PROGRAM", "raise SystemExit(1)")
    list(run(here, 0, otherwise=here))
    client._processes[0].wait()
    for _ in range(3):
        assert [batch[0][0].as_py() for batch in run(here, 0, otherwise=here)] == [os.getpid()]
    assert len(client._processes) == 1


def test_errors_of_the_work_arrive_with_their_traceback() -> None:
    class OwnError(Exception):
        def __init__(self, one: int, two: int) -> None:
            super().__init__(f"{one} and {two}")

    def fail(error: Callable[[], Exception]) -> Callable[[], Iterator[pa.RecordBatch]]:
        def place_of_the_failure() -> Iterator[pa.RecordBatch]:
            yield rows(1)
            raise error()

        return place_of_the_failure

    pid = started()
    with pytest.raises(StateError, match="no state") as caught:
        taken(fail(lambda: StateError("no state", fix="find it")))
    assert caught.value.fix == "find it"
    assert "place_of_the_failure" in str(caught.value.__cause__)
    with pytest.raises(RuntimeError, match="OwnError: 1 and 2") as other:
        taken(fail(lambda: OwnError(1, 2)))
    assert "place_of_the_failure" in str(other.value.__cause__)
    assert taken(here) == [pid], "the worker goes on"


def test_a_worker_that_is_killed_during_the_work_is_an_error_and_the_next_task_starts_another() -> None:
    def killed() -> Iterator[pa.RecordBatch]:
        yield rows(1)
        os.kill(os.getpid(), signal.SIGKILL)

    pid = started()
    with pytest.raises(ResidentWorkerEndedError):
        taken(killed)
    assert started() != pid


def test_a_worker_that_is_killed_before_the_work_began_leaves_the_work_to_the_task() -> None:
    slot = client._slot(0)
    slot._folder.create()
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(slot.socket_path)
        listener.listen()

        def refuse() -> None:
            connection, _ = listener.accept()
            connection.close()

        thread = threading.Thread(target=refuse)
        thread.start()
        assert [batch[0][0].as_py() for batch in run(here, 0, otherwise=here)] == [os.getpid()]
        thread.join()


#: A task that asks for work which never ends, then ends itself.
TASK_THAT_ENDS = """
import os, signal, sys, tempfile
tempfile.tempdir = sys.argv[1]
os.getppid = lambda: int(sys.argv[2])
from kafka_eos_source.resident import client
client.slots_of = lambda: 2
sys.path[:] = eval(sys.argv[3])
from test_resident import {work}, rows
for _ in client.run({work}, 0, otherwise=lambda: iter(())):
    os.kill(os.getpid(), signal.SIGKILL)
"""


def endless() -> Iterator[pa.RecordBatch]:
    while True:
        yield rows(1)


def hanging() -> Iterator[pa.RecordBatch]:
    yield rows(1)
    threading.Event().wait()


def killed_task(work: str, folder: Path) -> None:
    """Runs a task in a process that is killed when the first batch arrives."""
    program = TASK_THAT_ENDS.format(work=work)
    arguments = [str(folder), str(os.getppid()), repr(sys.path)]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    ended = subprocess.run([sys.executable, "-c", program, *arguments], check=False, env=environment)
    assert ended.returncode == -signal.SIGKILL


def test_a_worker_gives_up_the_work_of_a_task_that_was_killed(folder: Path) -> None:
    pid = started()
    killed_task("endless", folder)
    assert taken(here) == [pid]


def test_a_worker_whose_work_hangs_after_its_task_was_killed_ends(folder: Path) -> None:
    pid = started()
    killed_task("hanging", folder)
    until(lambda: not is_running(pid))
    assert started() != pid


def is_running(pid: int) -> bool:
    """Whether a process runs; one that ended and was not waited for does not."""
    for process in client._processes:
        process.poll()
    return is_alive(pid)


def test_a_consumer_that_stops_early_ends_the_work() -> None:
    pid = started()
    batches = run(endless, 0, otherwise=here)
    next(batches)
    batches.close()  # type: ignore[attr-defined]
    assert taken(here) == [pid]


def test_workers_end_with_the_process_that_started_sparks_workers(monkeypatch: pytest.MonkeyPatch) -> None:
    with subprocess.Popen(["sleep", "600"]) as daemon:
        monkeypatch.setattr(os, "getppid", lambda: daemon.pid)
        pid = started()
        daemon.kill()
        daemon.wait()
        until(lambda: not is_running(pid))


def test_a_worker_closes_what_it_keeps_when_it_is_asked_to_end(folder: Path) -> None:
    written = folder / "closed"

    def registers() -> Iterator[pa.RecordBatch]:
        import atexit

        atexit.register(written.touch)
        yield rows(1)

    pid = started()
    taken(registers)
    os.kill(pid, signal.SIGHUP)  # PySpark's daemon sends it to all its processes when the JVM ends
    until(lambda: not is_running(pid))
    assert written.exists()


def test_a_worker_without_requests_ends() -> None:
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(Path(tempfile.gettempdir()) / "idle"))
        listener.listen()
        began = time.monotonic()
        Server(listener, idle_seconds=0.1).serve()
        assert time.monotonic() - began >= 0.1


def test_files_of_workers_that_ended_are_removed() -> None:
    with subprocess.Popen(["true"]) as ended:
        ended.wait()
    kept, removed = files.SlotFiles(os.getpid(), "code", 0), files.SlotFiles(ended.pid, "code", 0)
    for slot in (kept, removed):
        with slot.claimed() as lock:
            assert lock is not None
    files.remove_leftovers()
    assert Path(kept._folder.path).exists()
    assert not Path(removed._folder.path).exists()
