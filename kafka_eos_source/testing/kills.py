"""Kills a piece of code at each of its lines, to test what a dying process leaves behind.

The code runs in a forked child process, which gets SIGKILL right before it would run the n-th line of the
watched files: nothing is closed or flushed, and no ``finally`` runs. If the outside system is this process
itself, the line raises `Killed` instead, which no ``except Exception`` catches.
"""

from __future__ import annotations

import gc
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
    """Simulates the death of the process: raised at the line at which the process is killed."""


class Lines:
    """Counts the executed lines of watched files, and calls a function at one of them.

    Args:
        watched: paths of files, or of folders ending with a separator.
        end_at: number of the line, from 1; 0 = never.
        end: called right before that line.
    """

    def __init__(self, watched: Collection[str], end_at: int, end: Callable[[], None]) -> None:
        self._watched = tuple(watched)
        self._end_at = end_at
        self._end = end
        self.count = 0

    def run(self, action: Callable[[], object]) -> None:
        """Runs the action and counts its lines, in all threads."""
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
    """Returns how many watched lines ``action`` runs. With ``fork``, it runs in a child process."""
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
        assert status == 0, f"the code failed without a kill (status {status}); see its traceback"
        return int(os.read(readable, 32))
    finally:
        os.close(readable)


def killed_at(
    action: Callable[[], object], watched: Collection[str], line: int, *, fork: bool = True
) -> bool:
    """Runs ``action`` and kills it before its n-th watched line.

    Returns:
        Whether it was killed; False if it ended before that line.
    """
    if not fork:
        try:
            Lines(watched, line, _raise).run(action)
        except Killed:
            return True
        return False
    status = _child(lambda: Lines(watched, line, _kill).run(action))
    assert status in (0, -signal.SIGKILL), f"the code failed without a kill (status {status})"
    return status != 0


def spread(count: int, most: int) -> Iterator[int]:
    """Yields 1 to ``count``, or ``most`` of these numbers, evenly spread from the first to the last."""
    if count <= most:
        yield from range(1, count + 1)
    else:
        yield from sorted({1 + round(n * (count - 1) / (most - 1)) for n in range(most)})


def _child(action: Callable[[], object]) -> int:
    """Runs the action in a forked child process and waits for it.

    Returns:
        The exit code; minus the number of the signal that killed it.
    """
    sys.stdout.flush()
    sys.stderr.flush()
    pid = os.fork()
    if pid == 0:
        # The garbage collector of the child must not destroy objects of the parent. The fork did not copy the
        # threads of a Kafka consumer, for example, and librdkafka aborts the child that closes it.
        gc.freeze()
        try:
            action()
        except BaseException:  # noqa: BLE001 - a forked child must not return into the test runner
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
    raise AssertionError("end_at is 0, so no line calls this")
