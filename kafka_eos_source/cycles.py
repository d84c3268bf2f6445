"""Python's collector of reference cycles, kept from looking through what is in none."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager


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
