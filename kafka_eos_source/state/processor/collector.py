"""Python's garbage collector, held back while the keys of a window are handled.

Rows become thousands of short-lived objects, and each few hundred of them set off a search for cycles that
finds none: a third of the time of a keyed count. Reference counting frees them all the same; the search runs
between windows, and whenever a batch is handed on.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def held_back() -> Iterator[None]:
    """No search for cycles inside; as it was afterwards."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()
