"""Notices when the parent process ends."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable

from kafka_eos_source.runtime.deadline import Pauses

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
