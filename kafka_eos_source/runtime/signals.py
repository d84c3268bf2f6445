"""Handles signals for a while."""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from types import FrameType


@contextmanager
def handling(
    numbers: Iterable[signal.Signals], handler: Callable[[int, FrameType | None], object]
) -> Iterator[None]:
    """Installs a handler for the block, and restores the previous handlers afterwards.

    A command may run inside another program, such as a test runner, whose Ctrl-C must work again afterwards.

    Args:
        numbers: the signals. Only the main thread may handle signals.
        handler: receives the number of the signal and the interrupted frame.
    """
    before: dict[signal.Signals, signal._HANDLER] = {}
    try:
        for number in numbers:
            before[number] = signal.signal(number, handler)
        yield
    finally:
        for number, previous in before.items():
            # None stands for a handler that was not installed from Python, and cannot be restored from it
            signal.signal(number, signal.SIG_DFL if previous is None else previous)
