"""Finds and kills the processes that tests started, by a mark in their environment, and no others.

When a driver is killed, its JVM and Python workers become orphans, so the process tree does not lead to all
of them. But each one inherits the environment.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from threading import Event

import psutil

from kafka_eos_source.runtime.deadline import Deadline

#: Environment variable that marks every process that a test run starts.
RUN = "KAFKA_EOS_TEST_RUN"
#: Environment variable that marks every process that one driver starts.
DRIVER = "KAFKA_EOS_TEST_DRIVER"
#: Environment variable that marks every process that a soak starts; its value is the run's folder.
SOAK = "KAFKA_EOS_SOAK"
_LOOK_SECONDS = 0.1


def marked(mark: str, value: str) -> list[psutil.Process]:
    """Returns living processes with this mark, except the current process and its ancestors.

    Their ``info`` already holds ``name`` and ``cmdline``, because asking a process that just ended fails.
    """
    own = {os.getpid(), *(each.pid for each in psutil.Process().parents())}
    return [
        process
        for process in psutil.process_iter(["environ", "status", "name", "cmdline"])
        if (process.info["environ"] or {}).get(mark) == value
        and process.info["status"] != psutil.STATUS_ZOMBIE
        and process.pid not in own
    ]


def descendants(pid: int, holds: Callable[[psutil.Process], bool]) -> list[psutil.Process]:
    """Returns descendants for which ``holds`` is true, ignoring processes that end in the meantime."""

    def is_there_and_holds(process: psutil.Process) -> bool:
        try:
            return holds(process)
        except psutil.NoSuchProcess:
            return False

    return [each for each in psutil.Process(pid).children(recursive=True) if is_there_and_holds(each)]


def is_alive(process: psutil.Process) -> bool:
    """Returns whether a process is running; a zombie process counts as ended."""
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def kill_marked(mark: str, value: str, seconds: float = 30.0) -> None:
    """Sends SIGKILL repeatedly until no marked process is left, to catch those forked in the meantime.

    A process that is ending has lost its environment, and so its mark, a moment before it is gone.
    """
    killed: set[psutil.Process] = set()

    def none_left() -> bool:
        found = marked(mark, value)
        killed.update(found)
        for process in found:
            try:
                process.send_signal(signal.SIGKILL)
            except psutil.NoSuchProcess:
                continue
        return not any(is_alive(each) for each in killed)

    await_condition(none_left, seconds, f"no process is left of {mark}={value}")


def await_condition(condition: Callable[[], bool], seconds: float, what: str) -> None:
    """Polls until the condition holds; fails the test with ``what`` after ``seconds``."""
    deadline = Deadline.after_seconds(seconds)
    look = Event()
    while not condition():
        if deadline.expired:
            raise AssertionError(f"not within {seconds:.0f} s: {what}")
        look.wait(_LOOK_SECONDS)
