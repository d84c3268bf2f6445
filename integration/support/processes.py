"""Processes that tests start, found again by a mark in their environment: nobody else's are touched.

A killed driver's JVM and Python workers become orphans, so a walk down the tree of processes does not find
all of them; the environment is inherited by every one.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from threading import Event

import psutil

from kafka_eos_source.runtime.deadline import Deadline

#: In the environment of everything that a run of the tests starts.
RUN = "KAFKA_EOS_TEST_RUN"
#: In the environment of everything that one driver starts.
DRIVER = "KAFKA_EOS_TEST_DRIVER"
_LOOK_SECONDS = 0.1


def marked(mark: str, value: str) -> list[psutil.Process]:
    """Living processes with this in their environment, but for this one and its ancestors.

    Their ``info`` has ``name`` and ``cmdline``: to ask one that just ended would fail.
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
    """Those for which it holds; one that ends meanwhile, as Spark's many short ones do, is none of them."""

    def is_there_and_holds(process: psutil.Process) -> bool:
        try:
            return holds(process)
        except psutil.NoSuchProcess:
            return False

    return [each for each in psutil.Process(pid).children(recursive=True) if is_there_and_holds(each)]


def is_alive(process: psutil.Process) -> bool:
    """Not ended; one that nobody has waited for is no more alive."""
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def kill_marked(mark: str, value: str, seconds: float = 30.0) -> None:
    """SIGKILL until none is left: one that is forked meanwhile is met in the next round."""

    def none_left() -> bool:
        found = marked(mark, value)
        for process in found:
            try:
                process.send_signal(signal.SIGKILL)
            except psutil.NoSuchProcess:
                continue
        return not found

    await_condition(none_left, seconds, f"no process is left of {mark}={value}")


def await_condition(condition: Callable[[], bool], seconds: float, what: str) -> None:
    """Looks until it holds."""
    deadline = Deadline.after_seconds(seconds)
    look = Event()
    while not condition():
        if deadline.expired:
            raise AssertionError(f"not within {seconds:.0f} s: {what}")
        look.wait(_LOOK_SECONDS)
