"""Blocking calls into other people's code, made so that one that never returns can be left behind.

librdkafka's transactional calls take a timeout and mostly keep it. Two ways are known in which they do not:
``send_offsets_to_transaction`` waits for ever when the group's coordinator is decommissioned meanwhile
(librdkafka issue 5511: seen here when the last connection to the last broker broke), and
``begin_transaction`` after a fatal error that was missed (4420). A database's driver waits for an answer
until TCP gives up, which may take hours where a network is cut without a word. A driver that hangs is worse
than one that fails: nobody restarts it.
"""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections.abc import Callable
from typing import Any, TypeVar

from kafka_eos_source.errors import RetriableError

#: How much longer than its timeout a call may take.
GRACE_SECONDS = 6.0

T = TypeVar("T")

_log = logging.getLogger(__name__)


class Pulse:
    """Shows that a long call goes on: time counts from the last beat."""

    def __init__(self) -> None:
        self._at = time.monotonic()

    def beat(self) -> None:
        self._at = time.monotonic()

    def seconds_since(self) -> float:
        return time.monotonic() - self._at


class Watchdog:
    """One thread that makes the calls of one client, one after the other.

    Args:
        name: of the client, for messages.
        pulse: what the calls beat while they get on; None = they do not.

    Attributes:
        is_lost: a call did not return. The client must not be called again, not even to be closed: it is
            in the middle of that call. (A new Kafka client of the same transactional id fences it.)
    """

    def __init__(self, name: str, pulse: Pulse | None = None) -> None:
        self.is_lost = False
        self._name = name
        self._pulse = pulse or Pulse()
        self._calls: queue.SimpleQueue[_Call | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._serve, name="kafka-eos-calls", daemon=True)
        self._thread.start()

    def call(self, doing: str, what: Callable[[], T], seconds: float) -> T:
        """``what()``, which was told to take at most ``seconds``.

        Raises:
            RetriableError: it did not return within that and `GRACE_SECONDS`, or an earlier call did not.
        """
        if not self.is_lost:
            made = _Call(what)
            self._calls.put(made)
            if self._returns(made, seconds):
                result: T = made.result()
                return result
            self.is_lost = True
            _log.warning("%s: %s did not return; it is left behind", self._name, doing)
        raise RetriableError(f"{doing}: the call did not return within {seconds + GRACE_SECONDS:.0f} s")

    def end(self, close: Callable[[], None], seconds: float) -> None:
        """Closes the client, now, or as soon as a call that hangs returns after all; ends the thread."""
        made = _Call(close)
        self._calls.put(made)
        self._calls.put(None)
        if not self.is_lost and made.done.wait(seconds):
            made.result()
        elif not self.is_lost:
            _log.warning("%s: it is not closed after %.0f s and left behind", self._name, seconds)

    def _returns(self, made: _Call, seconds: float) -> bool:
        self._pulse.beat()
        left = seconds
        while left >= 0:
            # in two parts: a process that was stopped meanwhile must not blame the client for that time
            if made.done.wait(left + GRACE_SECONDS / 2) or made.done.wait(GRACE_SECONDS / 2):
                return True
            left = seconds - self._pulse.seconds_since()
        return False

    def _serve(self) -> None:
        while (made := self._calls.get()) is not None:
            made.make()
            del made


class _Call:
    """Holds the client no longer than the call takes: the client ends with the last reference to it."""

    def __init__(self, what: Callable[[], Any]) -> None:
        self.done = threading.Event()
        self._what: Callable[[], Any] | None = what
        self._result: Any = None
        self._error: BaseException | None = None

    def make(self) -> None:
        assert self._what is not None, "a call is made once"
        try:
            self._result = self._what()
        except BaseException as error:  # noqa: BLE001 - raised again where it was asked for
            self._error = error
        self._what = None
        self.done.set()

    def result(self) -> Any:
        error, self._error = self._error, None
        if error is not None:
            try:
                raise error
            finally:
                del error  # the traceback holds this frame
        return self._result
