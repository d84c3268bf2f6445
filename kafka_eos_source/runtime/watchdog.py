"""Notices what hangs or has ended: a call into a library that does not return, and the parent process.

A `Watchdog` makes blocking calls in a thread of its own, so that a call that hangs can be abandoned.
librdkafka's transactional calls take a timeout and usually respect it. Two exceptions are known:
``send_offsets_to_transaction`` waits forever if the group's coordinator is decommissioned during the call
(librdkafka issue 5511), and so does ``begin_transaction`` after a fatal error that went unnoticed (issue
4420). A database client waits until TCP gives up, which can take hours when a network drops packets
silently. A Spark driver that hangs is worse than one that fails: nobody restarts it.
"""

from __future__ import annotations

import logging
import os
import queue
import threading
import time
from collections.abc import Callable
from typing import Any, TypeVar

from kafka_eos_source.errors import RetriableError
from kafka_eos_source.runtime.deadline import Pauses

#: How much longer than its timeout a call may take before it is abandoned.
GRACE_SECONDS = 6.0

T = TypeVar("T")

_log = logging.getLogger(__name__)


class Pulse:
    """Signs of life of a long call. The watchdog measures time from the last `beat`."""

    def __init__(self) -> None:
        self._at = time.monotonic()

    def beat(self) -> None:
        """Records that the call makes progress."""
        self._at = time.monotonic()

    def seconds_since(self) -> float:
        """Returns the seconds since the last `beat`."""
        return time.monotonic() - self._at


class Watchdog:
    """A thread that makes the calls of one client, one after another.

    Args:
        name: name of the client, for log lines.
        pulse: the calls beat it while they make progress; None = they give no signs of life.

    Attributes:
        is_lost: whether a call did not return. The client must not be called again, not even to close it,
            because it is still inside that call. A new Kafka client with the same transactional id fences it.
    """

    def __init__(self, name: str, pulse: Pulse | None = None) -> None:
        self.is_lost = False
        self._name = name
        self._pulse = pulse or Pulse()
        self._calls: queue.SimpleQueue[_Call | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._serve, name="kafka-eos-calls", daemon=True)
        self._thread.start()

    def call(self, doing: str, what: Callable[[], T], seconds: float) -> T:
        """Calls ``what`` in the thread and returns its result.

        Args:
            doing: what the call does, for messages, such as "committing the transaction".
            what: the call; its own timeout is ``seconds``.
            seconds: how long the call may take; `GRACE_SECONDS` are added.

        Raises:
            RetriableError: if this call or an earlier one did not return in time.
        """
        if not self.is_lost:
            made = _Call(what)
            self._calls.put(made)
            if self._returns(made, seconds):
                result: T = made.result()
                return result
            self.is_lost = True
            _log.warning("%s: %s did not return; the call is abandoned", self._name, doing)
        raise RetriableError(f"{doing}: the call did not return within {seconds + GRACE_SECONDS:.0f} s")

    def end(self, close: Callable[[], None], seconds: float) -> None:
        """Closes the client and ends the thread.

        If a call hangs, the client is closed as soon as that call returns, which may be never.

        Args:
            close: closes the client.
            seconds: how long to wait for it.
        """
        made = _Call(close)
        self._calls.put(made)
        self._calls.put(None)
        if not self.is_lost and made.done.wait(seconds):
            made.result()
        elif not self.is_lost:
            _log.warning("%s did not close within %.0f s and is abandoned", self._name, seconds)

    def _returns(self, made: _Call, seconds: float) -> bool:
        self._pulse.beat()
        left = seconds
        while left >= 0:
            # two waits: if this process was suspended, the first one ends at once, and the call still gets
            # the second one to return
            if made.done.wait(left + GRACE_SECONDS / 2) or made.done.wait(GRACE_SECONDS / 2):
                return True
            left = seconds - self._pulse.seconds_since()
        return False

    def _serve(self) -> None:
        while (made := self._calls.get()) is not None:
            made.make()
            del made


class _Call:
    """One call and its outcome. It drops its reference to the client when the call returns.

    A client ends with the last reference to it, so a reference that stayed here would keep it alive.
    """

    def __init__(self, what: Callable[[], Any]) -> None:
        self.done = threading.Event()
        self._what: Callable[[], Any] | None = what
        self._result: Any = None
        self._error: BaseException | None = None

    def make(self) -> None:
        """Makes the call and stores its outcome."""
        assert self._what is not None, "a call is made once"
        try:
            self._result = self._what()
        except BaseException as error:  # noqa: BLE001 - `result` raises it in the caller's thread
            self._error = error
        self._what = None
        self.done.set()

    def result(self) -> Any:
        """Returns what the call returned, or raises what it raised."""
        error, self._error = self._error, None
        if error is not None:
            try:
                raise error
            finally:
                del error  # the traceback holds this frame
        return self._result


# -- the parent process ----------------------------------------------------------------------------

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
