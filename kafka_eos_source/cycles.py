"""Python's collector of reference cycles, kept from looking through what is in none."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager

#: Tasks that began in this process.
_tasks = 0


def spare_what_stays() -> None:
    """Called where a task begins: what this process holds for good is not looked through any more.

    PySpark's worker collects cycles after every task (``pyspark/daemon.py``). With PySpark, PyArrow and
    NumPy loaded that takes 40 ms of a core, most of what a small task costs. At the start of the second task
    what the first one loaded is there, and nothing is garbage: it was just collected. Later ones may load
    more, so it is done again at the 4th, 8th, 16th, …; what of these tasks themselves is kept in vain is
    little, and happens ever more rarely.
    """
    global _tasks
    _tasks += 1
    if _tasks > 1 and _tasks & (_tasks - 1) == 0:
        gc.freeze()


@contextmanager
def cycle_collection_paused() -> Iterator[None]:
    """For code that makes Kafka messages by the ten thousand, in no cycle: looking through them for cycles
    took a third of a whole read. Reference counts free them as ever."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()
