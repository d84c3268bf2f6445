"""How long an operation may take: deadlines that are passed down, retries, and sockets that keep a deadline.

Every blocking call may use only what remains of its `Deadline`. `retry` repeats an operation that raises
errors. `Pauses` paces a loop that waits for something else, such as the end of a transaction or the leader of
a new partition.
"""

from __future__ import annotations

import random
import socket
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import islice
from typing import TypeVar


@dataclass(frozen=True)
class Deadline:
    """A point in time on the monotonic clock.

    Attributes:
        at: seconds on the scale of ``time.monotonic()``.
        budget_seconds: the time that was granted in total, for error messages.
    """

    at: float
    budget_seconds: float

    @classmethod
    def after_seconds(cls, seconds: float) -> Deadline:
        """Returns a deadline that many seconds from now."""
        return cls(time.monotonic() + seconds, seconds)

    @classmethod
    def after_ms(cls, ms: float) -> Deadline:
        """Returns a deadline that many milliseconds from now."""
        return cls.after_seconds(ms / 1000.0)

    def remaining_seconds(self, at_most: float | None = None) -> float:
        """Returns the seconds that are left: at least 0 and at most ``at_most``."""
        left = max(0.0, self.at - time.monotonic())
        return left if at_most is None else min(left, at_most)

    @property
    def expired(self) -> bool:
        """Whether the deadline has passed."""
        return time.monotonic() >= self.at


# -- retries ---------------------------------------------------------------------------------------

T = TypeVar("T")
E = TypeVar("E", bound=BaseException)


class Pauses:
    """The pauses between the tries of one operation. They may grow, and never extend past the deadline.

    Args:
        deadline: when to give up; None = never, because the caller decides.
        first_seconds: length of the first pause; 0 = no pauses.
        longest_seconds: pauses double up to this length. By default, all have the same length.
        most: number of pauses after which to give up; None = no limit.
        jitter: each pause is longer or shorter by a random share of at most this size, so that processes that
            collided do not collide again.
        sleep: sleeps for that many seconds; a caller that can be interrupted passes its own function.
    """

    def __init__(
        self,
        deadline: Deadline | None,
        first_seconds: float,
        longest_seconds: float | None = None,
        *,
        most: int | None = None,
        jitter: float = 0.0,
        sleep: Callable[[float], object] = time.sleep,
    ) -> None:
        self._deadline = deadline
        longest_seconds = first_seconds if longest_seconds is None else longest_seconds
        self._lengths = islice(_lengths(first_seconds, longest_seconds, jitter), most)
        self._next_seconds = next(self._lengths, None)
        self._sleep = sleep

    @property
    def expired(self) -> bool:
        """Whether the deadline has passed, or no pause is left."""
        return self._next_seconds is None or (self._deadline is not None and self._deadline.expired)

    @property
    def next_seconds(self) -> float:
        """Length of the next pause."""
        seconds = self._next_seconds or 0.0
        return seconds if self._deadline is None else self._deadline.remaining_seconds(seconds)

    def wait(
        self, timed_out: Callable[[], BaseException] | None = None, *, at_least_seconds: float = 0.0
    ) -> None:
        """Pauses before the next try.

        Args:
            timed_out: returns the error to raise instead if the deadline has passed, or no pause is left.
            at_least_seconds: a longer pause that the other side asked for; the deadline does not limit it.
        """
        if timed_out is not None and self.expired:
            raise timed_out()
        seconds = max(self.next_seconds, at_least_seconds)
        if seconds > 0:
            self._sleep(seconds)
        self._next_seconds = next(self._lengths, None)


def _lengths(first_seconds: float, longest_seconds: float, jitter: float) -> Iterator[float]:
    seconds = first_seconds
    while True:
        yield seconds * random.uniform(1 - jitter, 1 + jitter)
        seconds = min(2 * seconds, longest_seconds)


def retry(
    operation: Callable[[], T],
    on: type[E] | tuple[type[E], ...],
    pauses: Pauses,
    *,
    permanent: Callable[[E], BaseException | None] | None = None,
    timed_out: Callable[[E], BaseException] | None = None,
    report: Callable[[E, float], None] | None = None,
) -> T:
    """Calls ``operation`` until it succeeds, fails for good, or no time or pause is left.

    The operation runs at least once, even if the deadline has passed already.

    Args:
        operation: is safe to repeat.
        on: the classes of errors that may be temporary. Any other error is raised at once.
        pauses: the pauses between the tries, and the deadline.
        permanent: returns the error to raise for a failure that no retry can mend; None = retry.
        timed_out: returns the error to raise for a failure after the deadline; by default the failure itself.
        report: receives each failure that is retried, and the seconds until then, for the log.

    Returns:
        What ``operation`` returns.
    """
    while True:
        try:
            return operation()
        except on as failure:
            error = None if permanent is None else permanent(failure)
            if error is None and pauses.expired:
                error = failure if timed_out is None else timed_out(failure)
            if error is failure:
                raise
            if error is not None:
                raise error from failure
            if report is not None:
                report(failure, pauses.next_seconds)
        pauses.wait()


# -- sockets ---------------------------------------------------------------------------------------


def receive(connection: socket.socket, size: int, deadline: Deadline | None = None) -> bytes:
    """Receives exactly ``size`` bytes.

    Args:
        connection: the socket, which blocks.
        size: number of bytes.
        deadline: for all of them; None = the socket's own timeout limits each part that arrives.

    Raises:
        OSError: if the other side closes the connection before that, or does not answer in time.
    """
    received = b""
    while len(received) < size:
        if deadline is not None:
            limit(connection, deadline)
        more = connection.recv(size - len(received))
        if not more:
            raise ConnectionResetError("the broker closed the connection")
        received += more
    return received


def limit(connection: socket.socket, deadline: Deadline) -> None:
    """Limits the next operation of a blocking socket to the time that is left.

    Raises:
        TimeoutError: if no time is left.
    """
    if deadline.expired:
        raise TimeoutError("the other side did not answer in time")
    connection.settimeout(max(deadline.remaining_seconds(), 0.001))  # 0 would mean: do not block
