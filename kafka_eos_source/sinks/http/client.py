"""A client that repeats a request under its id, or reads the state of the id, until the outcome is known."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from kafka_eos_source.runtime.deadline import Deadline, Pauses
from kafka_eos_source.secrets import shown_url
from kafka_eos_source.sinks.contract import OK, Fatal, Outcome, Retryable
from kafka_eos_source.sinks.http.answers import (
    DECISIONS,
    Answer,
    Decision,
    Meaning,
    State,
    meaning_of,
    state_of,
)
from kafka_eos_source.sinks.http.transport import Transport

_FIRST_PAUSE_SECONDS = 0.1
_LONGEST_PAUSE_SECONDS = 10.0

_REFUSED = "correct the sink's options or the service (search its log for the id), then restart the query."
_TOO_LARGE = (
    "read less per batch (option maxOffsetsPerTrigger of the source), or configure the service to accept "
    "larger bodies."
)


@dataclass(frozen=True)
class Call:
    """One request that carries an id.

    Attributes:
        what: ``prepare``, ``commit``, ``abort`` or ``post``; a key of `answers.DECISIONS`.
        target: path and query of the request.
        body, headers: content of the request.
        status_target: path and query that report the state of the id; None if the service has no such
            endpoint.
        conflict_is_done: whether status 409 means "already done" if the service has no status endpoint.
    """

    what: str
    target: str
    body: memoryview | None = None
    headers: Mapping[str, str] | None = None
    status_target: str | None = None
    conflict_is_done: bool = False

    def __str__(self) -> str:
        return f"{self.what} {shown_url(self.target)}"


class ServiceClient:
    """Client of one service.

    Args:
        transport: connection to the service.
        retries: number of times that one call is repeated before it returns `Retryable`. The driver's commit
            then has its own retries.
        wait: function that sleeps for a number of seconds; tests replace it.
    """

    def __init__(
        self, transport: Transport, retries: int, wait: Callable[[float], object] = time.sleep
    ) -> None:
        self.transport = transport
        self._retries = retries
        self._wait = wait

    def send(self, call: Call, deadline: Deadline) -> Outcome:
        """Sends a request, repeatedly if necessary, until its outcome is known.

        Returns:
            The outcome; `Retryable` if it is still unknown after all retries or at the deadline.

        Raises:
            InvalidOptionError: if the credentials or certificates cannot be used.
        """
        pauses = Pauses(
            deadline, _FIRST_PAUSE_SECONDS, _LONGEST_PAUSE_SECONDS, most=self._retries, sleep=self._wait
        )
        while True:
            answer = self.transport.request(
                "POST", call.target, deadline, body=call.body, headers=call.headers
            )
            outcome = self._outcome(call, answer, deadline)
            if outcome is not None:
                return outcome
            asked = answer.retry_after_seconds or 0.0
            if pauses.expired or max(pauses.next_seconds, asked) >= deadline.remaining_seconds():
                return Retryable(f"{call}: {answer}; the outcome is unknown")
            pauses.wait(at_least_seconds=asked)

    def state(self, target: str, deadline: Deadline) -> State | None:
        """Reads the state of an id; returns None if the service does not report a valid one."""
        return state_of(self.transport.request("GET", target, deadline))

    def _outcome(self, call: Call, answer: Answer, deadline: Deadline) -> Outcome | None:
        """Returns the outcome of a call, or None if the call must be repeated."""
        meaning = meaning_of(answer)
        if meaning is Meaning.DONE:
            return OK
        if meaning is Meaning.LATER:
            return None
        if meaning is Meaning.REFUSED or (meaning is Meaning.MISSING and call.what in ("prepare", "post")):
            return _refused(call, answer)
        if meaning is Meaning.MISSING and call.what == "abort":
            return OK
        if call.status_target is None:
            if meaning is Meaning.MISSING:
                return _refused(call, answer)
            return OK if meaning is Meaning.CONFLICT and call.conflict_is_done else None
        state = self.state(call.status_target, deadline)
        if state is None:
            return None
        decision = DECISIONS.get((call.what, state), Decision.RETRY)
        if decision is Decision.FATAL:
            return Fatal(
                f"{call}: {answer}; the service reports the state {state.value!r}",
                _REFUSED,
            )
        return OK if decision is Decision.OK else None


def _refused(call: Call, answer: Answer) -> Fatal:
    return Fatal(f"{call}: {answer}", _TOO_LARGE if answer.status == 413 else _REFUSED)
