"""Interpretation of a service's answers, as pure functions without clock or connection.

After a timeout, a broken connection or a 5xx status, the outcome of a request is unknown: the service may
have carried it out before the answer was lost (RFC 9110, 9.2.2: a client repeats only idempotent requests
automatically). The sink then reads the state of the id, or repeats the request under the same id. It never
assumes success or failure.
"""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime, timezone
from email.utils import parsedate_to_datetime
from enum import Enum

from kafka_eos_source.runtime.json_input import JsonError, parse_json

_SHOWN_BYTES = 200


@dataclass(frozen=True)
class Answer:
    """Answer to one request.

    Attributes:
        status: HTTP status; None if no complete answer arrived.
        body: first bytes of the body. Without an answer, the error text.
        retry_after_seconds: value of the header ``Retry-After``; None if the answer does not have one.
    """

    status: int | None
    body: bytes = b""
    retry_after_seconds: float | None = None

    def __str__(self) -> str:
        text = self.body[:_SHOWN_BYTES].decode(errors="replace").strip()
        text = "".join(each if each.isprintable() else " " for each in text)
        return f"no answer ({text})" if self.status is None else f"HTTP {self.status} {text}".rstrip()


class Meaning(Enum):
    """What an answer says about the request."""

    DONE = "done"
    CONFLICT = "already done, or in progress"
    MISSING = "the id or the endpoint does not exist"
    LATER = "not done; the service asks to retry later"
    REFUSED = "refused"
    UNKNOWN = "perhaps done"


class State(Enum):
    """State of an id, as the service's status endpoint reports it."""

    UNKNOWN = "unknown"
    PENDING = "pending"
    PREPARED = "prepared"
    COMMITTED = "committed"
    ABORTED = "aborted"


class Decision(Enum):
    """How a call ends."""

    OK = "ok"
    RETRY = "retry"
    FATAL = "fatal"


#: Result of a call whose answer is inconclusive, by the state of its id. Pairs not listed mean `RETRY`.
DECISIONS: dict[tuple[str, State], Decision] = {
    ("prepare", State.PREPARED): Decision.OK,
    ("prepare", State.COMMITTED): Decision.OK,
    ("prepare", State.ABORTED): Decision.FATAL,
    ("commit", State.COMMITTED): Decision.OK,
    ("commit", State.ABORTED): Decision.FATAL,
    ("commit", State.UNKNOWN): Decision.FATAL,
    ("abort", State.ABORTED): Decision.OK,
    ("abort", State.UNKNOWN): Decision.OK,
    ("abort", State.COMMITTED): Decision.OK,
    ("post", State.COMMITTED): Decision.OK,
}


def meaning_of(answer: Answer) -> Meaning:
    """Returns the meaning of the answer to a request that carries an id."""
    status = answer.status
    if status is None or status >= 500 or status in (202, 408):  # 202: accepted, but not done yet
        return Meaning.UNKNOWN
    if 200 <= status < 300:
        return Meaning.DONE
    if status == 409:
        return Meaning.CONFLICT
    if status in (404, 410):
        return Meaning.MISSING
    if status in (425, 429):
        return Meaning.LATER
    return Meaning.REFUSED  # includes redirects: the credentials must not go to another server


def state_of(answer: Answer) -> State | None:
    """Parses the answer of a status endpoint, such as ``{"state": "prepared"}``.

    Returns:
        The state, or None if the answer does not contain a valid one.
    """
    if answer.status in (404, 410):
        return State.UNKNOWN
    if answer.status != 200:
        return None
    try:
        return State(_member(answer.body, "state"))
    except (ValueError, TypeError):
        return None


def pending_ids(answer: Answer) -> list[str] | None:
    """Parses the list of prepared ids, ``{"pending": ["<id>", …]}``.

    Returns:
        The ids, or None if the answer does not contain a valid list.
    """
    found = _member(answer.body, "pending") if answer.status == 200 else None
    return found if isinstance(found, list) and all(isinstance(each, str) for each in found) else None


def _member(body: bytes, name: str) -> object:
    """Returns a member of a JSON object; None if the body is none that has it, whatever it is instead."""
    try:
        found = parse_json(body)
    except JsonError:
        return None
    return found.get(name) if isinstance(found, dict) else None


def retry_after_seconds(header: str | None, now: datetime) -> float | None:
    """Parses the header ``Retry-After`` (RFC 9110, 10.2.3), which holds seconds or a date.

    Returns:
        Seconds from `now`, or None if the header is missing or malformed.
    """
    text = (header or "").strip()
    if text.isascii() and text.isdecimal() and len(text) < 10:
        return float(text)
    try:
        at = parsedate_to_datetime(text)
        if at.tzinfo is None:
            at = at.replace(tzinfo=timezone.utc)
        return max(0.0, (at - now).total_seconds())
    except (ValueError, OverflowError, TypeError, IndexError):  # of a year or offset that no calendar has
        return None
