"""Keeps measurement away from the query that is measured: its errors, and the time that its files take.

`guarded` logs an error and continues. `in_background` makes a call that touches files in a thread of its own,
so that a hung file system does not stop a query.
"""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Callable
from queue import SimpleQueue
from typing import Any, Generic, TypeVar

from kafka_eos_source.runtime.logs import warn_once

_log = logging.getLogger(__name__)

T = TypeVar("T")


def guarded(call: Callable[[], T]) -> T | None:
    """Makes a call that measures or observes; logs its error once, and returns None then."""
    try:
        return call()
    except Exception as error:  # noqa: BLE001 - whatever fails here, the query goes on
        warn_once(_log, f"a figure of the query is missing: {error!r}. The query is not affected.")
        return None


#: How long a caller waits for its call. A healthy file system answers in a fraction of a millisecond.
PATIENCE_SECONDS = 1.0


class Call(Generic[T]):
    """A call that the thread makes, or has made."""

    def __init__(self, call: Callable[[], T]) -> None:
        self.call = call
        self.result: T | None = None
        self.is_done = threading.Event()

    def run(self) -> None:
        """Makes the call."""
        self.result = guarded(self.call)
        self.is_done.set()


class Background:
    """One thread that makes calls for others, who wait for a short time only.

    While a call hangs, later calls are dropped at once. When it returns, the thread goes on.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._calls: SimpleQueue[Call[Any]] = SimpleQueue()
        self._hung: Call[Any] | None = None
        self._pid = 0

    def run(self, call: Callable[[], T]) -> T | None:
        """Makes a call in the thread; returns its result, or None if it failed or was dropped.

        A call that takes longer than `PATIENCE_SECONDS` continues without the caller.
        """
        with self._lock:
            mine = self._start(call)
            return None if mine is None else self._result(mine)

    def start(self, call: Callable[[], T]) -> Call[T] | None:
        """Begins a call whose result is needed later; None if it was dropped."""
        with self._lock:
            return self._start(call)

    def result(self, begun: Call[T]) -> T | None:
        """Returns the result of a call that `start` began, as `run` does."""
        with self._lock:
            return self._result(begun)

    def _start(self, call: Callable[[], T]) -> Call[T] | None:
        if self._hung is not None:
            if not self._hung.is_done.is_set():
                return None
            self._hung = None
        if self._pid != os.getpid():  # the first call, or a fork, which has no threads
            threading.Thread(target=self._work, name="kafka-eos-figures", daemon=True).start()
            self._pid = os.getpid()
        mine = Call(call)
        self._calls.put(mine)
        return mine

    def _result(self, begun: Call[T]) -> T | None:
        if begun.is_done.is_set():
            return begun.result
        if self._hung is None and not begun.is_done.wait(PATIENCE_SECONDS):
            self._hung = begun
            warn_once(
                _log,
                f"reading or writing figures of the query takes longer than {PATIENCE_SECONDS:g} s. The "
                "query continues, and figures are missing until the file system answers.",
            )
        return begun.result

    def _work(self) -> None:
        calls = self._calls
        while True:
            calls.get().run()


_background = Background()


def in_background(call: Callable[[], T]) -> T | None:
    """Makes a call in the thread of this process; see `Background.run`."""
    return guarded(lambda: _background.run(call))


def begun_in_background(call: Callable[[], T]) -> Call[T] | None:
    """Begins a call in the thread of this process; see `Background.start`."""
    return guarded(lambda: _background.start(call))


def result_from_background(begun: Call[T]) -> T | None:
    """Returns the result of a call that `begun_in_background` began; see `Background.result`."""
    return guarded(lambda: _background.result(begun))


def _replace_background() -> None:
    """Gives a fork a lock and a queue of its own: another thread may have held those of its parent."""
    global _background
    _background = Background()


os.register_at_fork(after_in_child=_replace_background)
