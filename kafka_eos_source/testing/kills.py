"""Kills at every line of a piece of code: what a process that dies anywhere leaves behind.

The code runs in a child that is forked for it and dies (SIGKILL) as it is about to run the n-th line of the
files that are watched: nothing is closed, nothing is flushed, no ``finally`` runs. Where the outside system
is this process itself, the line raises `Killed` instead, which no ``except Exception`` stops.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
import traceback
from collections.abc import Callable, Collection, Iterator
from types import FrameType
from typing import Any

_FAILED = 3


class Killed(BaseException):
    """Stands for the end of the process."""


class Lines:
    """Counts the lines of watched files as they are reached, and ends it all at one of them.

    Args:
        watched: files, or folders with a separator at their end.
        end_at: number of the line, from 1; 0 = never.
        end: what to do there.
    """

    def __init__(self, watched: Collection[str], end_at: int, end: Callable[[], None]) -> None:
        self._watched = tuple(watched)
        self._end_at = end_at
        self._end = end
        self.count = 0

    def run(self, action: Callable[[], object]) -> None:
        before = sys.gettrace()
        threading.settrace(self._trace)
        sys.settrace(self._trace)
        try:
            action()
        finally:
            sys.settrace(before)
            threading.settrace(None)

    def _trace(self, frame: FrameType, event: str, _arg: Any) -> Any:
        if event == "call" and not frame.f_code.co_filename.startswith(self._watched):
            return None
        if event == "line":
            self.count += 1
            if self.count == self._end_at:
                self._end()
        return self._trace


def count_lines(action: Callable[[], object], watched: Collection[str], *, fork: bool = True) -> int:
    """How many lines ``action`` runs, when nothing happens to it. With ``fork`` it runs in a child."""
    if not fork:
        lines = Lines(watched, 0, _never)
        lines.run(action)
        return lines.count
    readable, writable = os.pipe()

    def counted() -> None:
        lines = Lines(watched, 0, _never)
        lines.run(action)
        os.write(writable, str(lines.count).encode())

    try:
        status = _child(counted)
        os.close(writable)
        assert status == 0, f"the code failed by itself (status {status}); see its traceback"
        return int(os.read(readable, 32))
    finally:
        os.close(readable)


def killed_at(
    action: Callable[[], object], watched: Collection[str], line: int, *, fork: bool = True
) -> bool:
    """Runs ``action`` and ends it before its n-th watched line; False = it was over before."""
    if not fork:
        try:
            Lines(watched, line, _raise).run(action)
        except Killed:
            return True
        return False
    status = _child(lambda: Lines(watched, line, _kill).run(action))
    assert status in (0, -signal.SIGKILL), f"the code failed by itself (status {status})"
    return status != 0


def some_of(count: int, most: int) -> Iterator[int]:
    """Lines 1 to ``count``, or ``most`` of them, the first and the last included."""
    if count <= most:
        yield from range(1, count + 1)
    else:
        yield from sorted({1 + round(n * (count - 1) / (most - 1)) for n in range(most)})


def _child(action: Callable[[], object]) -> int:
    """Forks, runs it, and waits: 0 = well, minus the signal's number = killed."""
    sys.stdout.flush()
    sys.stderr.flush()
    pid = os.fork()
    if pid == 0:
        try:
            action()
        except BaseException:  # noqa: BLE001 - a forked child may not return into the test runner
            traceback.print_exc()
            sys.stderr.flush()
            os._exit(_FAILED)
        os._exit(0)
    _, status = os.waitpid(pid, 0)
    return os.waitstatus_to_exitcode(status)


def _kill() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def _raise() -> None:
    raise Killed


def _never() -> None:
    raise AssertionError("no line was to end it")
