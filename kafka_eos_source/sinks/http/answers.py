"""What a service's answer means, and what it decides. Pure functions: no clock, no connection.

A time-out, a broken connection and a 5xx tell nothing: the service may have done it and died over the answer
(RFC 9110, 9.2.2: only an idempotent request is repeated by itself). Such an outcome is looked up, or the
request is repeated under the same id; it is never taken for a yes or a no.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from datetime import datetime, timezone
from email.utils import parsedate_to_datetime
from enum import Enum

_SHOWN_BYTES = 200


@dataclass(frozen=True)
class Answer:
    """Of one request.

    Attributes:
        status: HTTP's; None = no answer came, or half of one.
        body: its first bytes; without an answer, why there is none.
        retry_after_seconds: what the service asks for; None = it does not.
    """

    status: int | None
    body: bytes = b""
    retry_after_seconds: float | None = None

    def __str__(self) -> str:
        text = self.body[:_SHOWN_BYTES].decode(errors="replace").strip()
        return f"no answer ({text})" if self.status is None else f"HTTP {self.status} {text}".rstrip()


class Heard(Enum):
    """What one answer means."""

    DONE = "done"
    ALREADY = "already done, or under way"
    MISSING = "no such thing"
    LATER = "not done, ask later"
    REFUSED = "refused"
    UNKNOWN = "perhaps done"


class State(Enum):
    """Of an id, as the service's status endpoint has it."""

    UNKNOWN = "unknown"
    PENDING = "pending"
    PREPARED = "prepared"
    COMMITTED = "committed"
    ABORTED = "aborted"


class Decision(Enum):
    """What becomes of the call."""

    OK = "ok"
    AGAIN = "again"
    FATAL = "fatal"


#: What the state of an id says of a call whose answer did not. Not named: ask again.
DECIDES: dict[tuple[str, State], Decision] = {
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


def judge(answer: Answer) -> Heard:
    """The meaning of a status, for a request that carries an id."""
    status = answer.status
    if status is None or status >= 500 or status in (202, 408):  # 202: taken on, and not done yet
        return Heard.UNKNOWN
    if 200 <= status < 300:
        return Heard.DONE
    if status == 409:
        return Heard.ALREADY
    if status in (404, 410):
        return Heard.MISSING
    if status in (425, 429):
        return Heard.LATER
    return Heard.REFUSED  # a redirect too: where it leads has not been given the credentials


def state_of(answer: Answer) -> State | None:
    """What a status endpoint says: ``{"state": "prepared"}``; None = nothing that can be believed."""
    if answer.status in (404, 410):
        return State.UNKNOWN
    if answer.status != 200:
        return None
    try:
        return State(json.loads(answer.body)["state"])
    except (ValueError, KeyError, TypeError):
        return None


def pending_ids(answer: Answer) -> list[str] | None:
    """What the list of what is prepared says: ``{"pending": ["<id>", …]}``; None = it is no such list."""
    try:
        found = json.loads(answer.body)["pending"] if answer.status == 200 else None
    except (ValueError, KeyError, TypeError):
        return None
    return found if isinstance(found, list) and all(isinstance(each, str) for each in found) else None


def retry_after_seconds(header: str | None, now: datetime) -> float | None:
    """Value of ``Retry-After`` (RFC 9110, 10.2.3): seconds, or a date."""
    text = (header or "").strip()
    if text.isdecimal() and len(text) < 10:
        return float(text)
    try:
        at = parsedate_to_datetime(text)
    except ValueError:
        return None
    if at.tzinfo is None:
        at = at.replace(tzinfo=timezone.utc)
    return max(0.0, (at - now).total_seconds())
