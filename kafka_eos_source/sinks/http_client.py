"""A client that repeats a request under its id, or reads the state of the id, until the outcome is known.

After a timeout, a broken connection or a 5xx status, the outcome of a request is unknown: the service may
have carried it out before the answer was lost (RFC 9110, 9.2.2: a client repeats only idempotent requests
automatically). The sink then reads the state of the id, or repeats the request under the same id. It never
assumes success or failure. What an answer means is decided by pure functions, without clock or connection.
"""

from __future__ import annotations

import http.client
import logging
import os
import ssl
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from datetime import datetime, timezone
from email.utils import parsedate_to_datetime
from enum import Enum
from urllib.parse import SplitResult, urlsplit

from urllib3.connection import HTTPConnection, HTTPSConnection
from urllib3.exceptions import HTTPError

from kafka_eos_source.errors import InvalidOptionError
from kafka_eos_source.runtime.deadline import Deadline, Pauses
from kafka_eos_source.runtime.json_input import JsonError, parse_json
from kafka_eos_source.secrets import NO_SECRETS, Secrets, shown_url
from kafka_eos_source.sinks.contract import OK, Fatal, Outcome, Retryable, RowRefusal

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
        text = _shown(self.body[:_SHOWN_BYTES].decode(errors="replace").strip())
        return f"no answer ({text})" if self.status is None else f"HTTP {self.status} {text}".rstrip()


def _shown(text: str) -> str:
    return "".join(each if each.isprintable() else " " for each in text[:_SHOWN_BYTES])


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
    """Returns a member of the JSON object in a body; None if the body is anything else, or lacks it."""
    try:
        found = parse_json(body)
    except JsonError:
        return None
    return found.get(name) if isinstance(found, dict) else None


def refused_rows(answer: Answer, rows: int) -> dict[int, RowRefusal] | None:
    """Parses the rows that a service refuses, ``{"rows": [{"row": 3, "reason": "…", "column": "amount"}]}``.

    Args:
        answer: the answer to a body of rows.
        rows: number of rows in the body.

    Returns:
        Why each row is refused, by its number in the body, from 0; None if the answer does not contain a
        valid list.
    """
    found = _member(answer.body, "rows")
    if not isinstance(found, list) or not 0 < len(found) <= rows:
        return None
    refused: dict[int, RowRefusal] = {}
    for each in found:
        number = each.get("row") if isinstance(each, dict) else None
        if type(number) is not int or not 0 <= number < rows:
            return None
        reason, column = each.get("reason"), each.get("column")
        why = _shown(reason) if isinstance(reason, str) and reason else f"HTTP {answer.status}"
        refused.setdefault(number, RowRefusal(why, _shown(column) if isinstance(column, str) else ""))
    return refused


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


# -- repeating requests --------------------------------------------------------------------------

_FIRST_PAUSE_SECONDS = 0.1
_LONGEST_PAUSE_SECONDS = 10.0

_REFUSED = "correct the sink's options or the service (search its log for the id), then restart the query."
_CREDENTIALS = (
    "correct the credentials (options 'auth' and 'auth.env') or their rights, then restart the query."
)
_ADDRESS = "correct the option 'url' or the service, then restart the query."
_MOVED = "set the option 'url' to the service's own address: the sink follows no redirects."
_TOO_LARGE = (
    "read less per batch (option maxOffsetsPerTrigger of the source), or configure the service to accept "
    "larger bodies."
)
#: What a person can do after a refusal, by the status.
_FIXES: Mapping[int, str] = {
    **dict.fromkeys((401, 403, 407), _CREDENTIALS),
    **dict.fromkeys((404, 405, 410), _ADDRESS),
    **dict.fromkeys(range(300, 400), _MOVED),
    413: _TOO_LARGE,
}
#: Statuses with which a service refuses rows: the request is wrong, and a repetition would be, too.
_OF_ROWS = frozenset({400, 422})


class RowsRefusedError(Exception):
    """A service refuses the rows in a body, and has prepared nothing under their id.

    Attributes:
        answer: its answer.
    """

    def __init__(self, answer: Answer) -> None:
        super().__init__(str(answer))
        self.answer = answer


@dataclass(frozen=True)
class Call:
    """One request that carries an id.

    Attributes:
        what: ``prepare``, ``commit``, ``abort`` or ``post``; a key of `DECISIONS`.
        target: path and query of the request.
        body, headers: content of the request.
        status_target: path and query that report the state of the id; None if the service has no such
            endpoint.
        conflict_is_done: whether status 409 means "already done" if the service has no status endpoint.
        may_refuse_rows: whether `ServiceClient.send` raises `RowsRefusedError` for an answer about rows.
    """

    what: str
    target: str
    body: memoryview | None = None
    headers: Mapping[str, str] | None = None
    status_target: str | None = None
    conflict_is_done: bool = False
    may_refuse_rows: bool = False

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
            RowsRefusedError: if the service refuses the rows; see `Call.may_refuse_rows`.
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
        if call.may_refuse_rows and answer.status in _OF_ROWS:
            raise RowsRefusedError(answer)
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
    return Fatal(f"{call}: {answer}", _FIXES.get(answer.status or 0, _REFUSED))


# -- the connection ------------------------------------------------------------------------------

#: Most bytes of an answer that are read. Answers contain a state, a list of ids or an error text.
_MAX_ANSWER_BYTES = 4 << 20
_MIN_TIMEOUT_SECONDS = 0.05


def _without_keys(record: logging.LogRecord) -> bool:
    """Hides the keys in the addresses that urllib3 logs if the head of an answer is malformed."""
    if isinstance(record.args, tuple):
        shown = (shown_url(each) if isinstance(each, str) and "://" in each else each for each in record.args)
        record.args = tuple(shown)
    return True


logging.getLogger("urllib3.connection").addFilter(_without_keys)


@dataclass(frozen=True)
class Credentials:
    """Header that authenticates the client. Its value is never shown.

    Attributes:
        header: name of the header.
        value: value of the header; None if there is none, or if `variable` names it.
        variable: environment variable that contains the value. Only the driver reads it, because only the
            driver sends requests.
    """

    header: str
    value: str | None = field(default=None, repr=False)
    variable: str | None = None

    def headers(self) -> dict[str, str]:
        """Returns the header with its value.

        Raises:
            InvalidOptionError: if the variable is not set, or the value contains characters that a header
                must not contain.
        """
        found = self.value
        if self.variable is not None:
            found = os.environ.get(self.variable, "").strip()
            if not found:
                raise InvalidOptionError(
                    f"the environment variable {self.variable!r} (option 'auth.env') is not set.",
                    fix="set it where the driver runs.",
                )
        if found is None:
            return {}
        if not found.isascii() or not found.isprintable():
            raise InvalidOptionError(
                f"the value (not shown) of the header {self.header!r} contains characters other than "
                "printable ASCII.",
                fix="set the option 'auth' to the exact header value, such as 'Bearer …'.",
            )
        return {self.header: found}

    @property
    def secrets(self) -> Secrets:
        """The value, and its last word: a service's error text may contain the token without "Bearer"."""
        value = self.value or os.environ.get(self.variable or "", "")
        return Secrets(frozenset({value, value.rpartition(" ")[2]}))


@dataclass
class Transport:
    """Connection to one service, used by one thread. Connects when the first request is sent.

    It uses a connection of urllib3, and not its pool: a connection neither repeats a request nor follows a
    redirect nor asks the environment for a proxy.

    Attributes:
        url: URL of the service.
        credentials: sent with each request.
        timeout_seconds: time limit for connecting, and for each wait for bytes.
        ca_file: PEM file of certificates to trust; None for the system's.
        secrets: what the text of a refusal or of an error must not show, besides the credentials.
    """

    url: str = field(repr=False)
    credentials: Credentials
    timeout_seconds: float
    ca_file: str | None = None
    secrets: Secrets = NO_SECRETS
    _connection: HTTPConnection | None = field(default=None, init=False, repr=False)

    def request(
        self,
        method: str,
        target: str,
        deadline: Deadline,
        *,
        body: memoryview | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> Answer:
        """Sends one request and returns the answer. Does not repeat it.

        Args:
            method: HTTP method.
            target: path and query.
            deadline: limits the timeout.
            body: content of the request.
            headers: headers in addition to the credentials.

        A service may refuse a request before it has read the whole body, and close the connection (RFC 9112,
        9.5). The refusal is then in what arrived before.

        Returns:
            The answer. Its status is None if the connection failed.

        Raises:
            InvalidOptionError: if the credentials or certificates cannot be used.
        """
        all_headers = {"User-Agent": "kafka-eos-source", **self.credentials.headers(), **(headers or {})}
        seconds = max(_MIN_TIMEOUT_SECONDS, deadline.remaining_seconds(self.timeout_seconds))
        connection = self._connected(seconds)
        try:
            broken = None
            try:
                connection.request(
                    method,
                    target,
                    body,  # type: ignore[arg-type]  # a buffer, which is sent without a copy
                    all_headers,
                    preload_content=False,
                    decode_content=False,
                )
            except (BrokenPipeError, ConnectionResetError) as error:
                broken = error
            try:
                response = connection.getresponse()
            except (OSError, http.client.HTTPException):
                if broken is not None:
                    raise broken from None
                raise
            if broken is not None and response.status < 400:  # it cannot mean the whole body
                raise broken
            content = b""
            while piece := response.read(
                _MAX_ANSWER_BYTES - len(content)
            ):  # until the end, which may be early
                content += piece
            if broken is not None or not response.closed:  # the answer is longer
                self.close()
        except (OSError, http.client.HTTPException, HTTPError) as error:
            self.close()
            return Answer(None, self._hidden(f"{type(error).__name__}: {error}").encode())
        after = retry_after_seconds(response.headers.get("Retry-After"), datetime.now(timezone.utc))
        if response.status >= 400:  # a text for people
            content = self._hidden(content.decode(errors="replace")).encode()
        return Answer(response.status, content, after)

    def connect(self, deadline: Deadline) -> str:
        """Connects to the service without a request. Returns what went wrong; "" if nothing did.

        Raises:
            InvalidOptionError: if the certificates cannot be used.
        """
        seconds = max(_MIN_TIMEOUT_SECONDS, deadline.remaining_seconds(self.timeout_seconds))
        try:
            self._connected(seconds).connect()
        except (OSError, http.client.HTTPException, HTTPError) as error:
            return self._hidden(f"{type(error).__name__}: {error}")
        finally:
            self.close()
        return ""

    def _hidden(self, text: str) -> str:
        return (self.credentials.secrets | self.secrets).hide(text)

    def close(self) -> None:
        """Closes the connection, if there is one."""
        if self._connection is not None:
            self._connection.close()
            self._connection = None

    def _connected(self, seconds: float) -> HTTPConnection:
        """Returns the connection; a new one if the service has closed it, which it does to idle ones."""
        known = self._connection
        if known is not None and known.is_connected:
            known.timeout = seconds  # urllib3 sets it on the socket, for the request and for the answer
            return known
        self.close()
        self._connection = self._new(urlsplit(self.url), seconds)
        return self._connection

    def _new(self, url: SplitResult, seconds: float) -> HTTPConnection:
        assert url.hostname is not None
        if url.scheme == "http":
            return HTTPConnection(url.hostname, url.port, timeout=seconds)
        try:
            trusted = ssl.create_default_context(cafile=self.ca_file)
        except (OSError, ssl.SSLError) as error:
            raise InvalidOptionError(
                f"option 'ca.file' has the value {self.ca_file!r}, which cannot be loaded: {error}.",
                fix="set it to a file of PEM certificates that the driver can read.",
            ) from error
        return HTTPSConnection(url.hostname, url.port, timeout=seconds, ssl_context=trusted)
