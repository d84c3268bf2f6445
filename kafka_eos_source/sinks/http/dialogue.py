"""One call to the service, until its outcome is known: repeated under its id, looked up, never guessed."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from kafka_eos_source.runtime.deadline import Deadline
from kafka_eos_source.sinks.contract import OK, Fatal, Outcome, Retryable
from kafka_eos_source.sinks.http.answers import DECIDES, Answer, Decision, Heard, State, judge, state_of
from kafka_eos_source.sinks.http.transport import Transport

_FIRST_PAUSE_SECONDS = 0.1
_LONGEST_PAUSE_SECONDS = 10.0

_REFUSED = "see to the request or to the service (its log knows the id); then restart the query."
_TOO_LARGE = (
    "read less per batch (maxOffsetsPerTrigger of the source), or let the service take larger bodies."
)


@dataclass(frozen=True)
class Call:
    """One request that carries an id.

    Attributes:
        what: ``prepare``, ``commit``, ``abort``, ``post``: for `answers.DECIDES`.
        target: path and query.
        body, headers: of the request.
        look: path of the id's state; None = there is no such endpoint.
        conflict_is_done: 409 without a state to look up means that it was done.
    """

    what: str
    target: str
    body: memoryview | None = None
    headers: Mapping[str, str] | None = None
    look: str | None = None
    conflict_is_done: bool = False


class Dialogue:
    """With one service.

    Args:
        transport: to it.
        retries: how often one call is repeated; then it is `Retryable`, and the commit goes on from there.
        wait: for so many seconds; of tests.
    """

    def __init__(
        self, transport: Transport, retries: int, wait: Callable[[float], object] | None = None
    ) -> None:
        self.transport = transport
        self._retries = retries
        self._wait = wait or threading.Event().wait

    def settle(self, call: Call, deadline: Deadline) -> Outcome:
        """Sends it until something is known.

        Raises:
            InvalidOptionError: no request can be made.
        """
        pause = _FIRST_PAUSE_SECONDS
        for left in range(self._retries, -1, -1):
            answer = self.transport.ask("POST", call.target, deadline, body=call.body, headers=call.headers)
            outcome = self._outcome(call, answer, deadline)
            if outcome is not None:
                return outcome
            seconds = max(pause, answer.retry_after_seconds or 0.0)
            if not left or seconds >= deadline.remaining_seconds():
                break
            self._wait(seconds)
            pause = min(2 * pause, _LONGEST_PAUSE_SECONDS)
        return Retryable(f"{call.what} {call.target}: {answer}; whether it was done is not known")

    def state(self, target: str, deadline: Deadline) -> State | None:
        """Of an id; None = the service does not tell."""
        return state_of(self.transport.ask("GET", target, deadline))

    def _outcome(self, call: Call, answer: Answer, deadline: Deadline) -> Outcome | None:
        """None = it is to be sent again."""
        heard = judge(answer)
        if heard is Heard.DONE:
            return OK
        if heard is Heard.LATER:
            return None
        if heard is Heard.REFUSED or (heard is Heard.MISSING and call.what in ("prepare", "post")):
            return _refused(call, answer)
        if heard is Heard.MISSING and call.what == "abort":
            return OK
        if call.look is None:
            if heard is Heard.MISSING:
                return _refused(call, answer)
            return OK if heard is Heard.ALREADY and call.conflict_is_done else None
        state = self.state(call.look, deadline)
        if state is None:
            return None
        decision = DECIDES.get((call.what, state), Decision.AGAIN)
        if decision is Decision.FATAL:
            return Fatal(
                f"{call.what} {call.target}: {answer}; the service says that it is {state.value}", _REFUSED
            )
        return OK if decision is Decision.OK else None


def _refused(call: Call, answer: Answer) -> Fatal:
    return Fatal(f"{call.what} {call.target}: {answer}", _TOO_LARGE if answer.status == 413 else _REFUSED)
