"""Notices when the parent process ends."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable

from kafka_eos_source.runtime.retry import Pauses

_POLL_SECONDS = 0.1


def on_end_of_parent(act: Callable[[], object]) -> None:
    """Calls ``act`` in a thread when this process's parent has ended or was killed."""
    parent, pauses = os.getppid(), Pauses(None, _POLL_SECONDS)

    def watch() -> None:
        while os.getppid() == parent:
            pauses.wait()
        act()

    threading.Thread(target=watch, daemon=True).start()
