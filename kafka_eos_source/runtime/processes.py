"""Notices when another process ends, for example the parent process."""

from __future__ import annotations

import os
import select
import threading
from collections.abc import Callable

from kafka_eos_source.runtime.retry import Pauses

_POLL_SECONDS = 0.1


def on_end_of_parent(act: Callable[[], object], over: threading.Event | None = None) -> None:
    """Calls ``act`` in a thread when this process's parent has ended or was killed.

    Args:
        act: runs once, in that thread.
        over: ends the thread without a call when it is set; None = the thread lives as long as the process.
    """
    over = threading.Event() if over is None else over
    parent, pauses = os.getppid(), Pauses(None, _POLL_SECONDS, sleep=over.wait)

    def watch() -> None:
        while os.getppid() == parent:
            pauses.wait()
            if over.is_set():
                return
        act()

    threading.Thread(target=watch, daemon=True).start()


def is_alive(pid: int) -> bool:
    """Returns whether a process exists."""
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:  # it belongs to another user
        return True
    return True


def wait_for_end(pid: int) -> None:
    """Waits until a process of this user has ended, whether or not it is a child of this one."""
    open_pid = getattr(os, "pidfd_open", None)  # Linux
    if open_pid is None:
        pauses = Pauses(None, _POLL_SECONDS)
        while is_alive(pid):
            pauses.wait()
        return
    try:
        descriptor = open_pid(pid)
    except ProcessLookupError:
        return
    try:
        select.select([descriptor], [], [])
    finally:
        os.close(descriptor)
