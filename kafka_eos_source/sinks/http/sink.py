"""The sink: its options, and which of the two protocols they mean."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import ClassVar
from urllib.parse import urlsplit

import pyarrow as pa

from kafka_eos_source import option_values as values
from kafka_eos_source.errors import InvalidOptionError
from kafka_eos_source.runtime.deadline import Deadline
from kafka_eos_source.sinks.contract import Outcome, SinkContext, SinkTxn, Staged, TwoPhaseSink
from kafka_eos_source.sinks.filesystem import formats
from kafka_eos_source.sinks.http import body as bodies
from kafka_eos_source.sinks.http.dialogue import Dialogue
from kafka_eos_source.sinks.http.protocols import OneRequest, Protocol, TwoPhase
from kafka_eos_source.sinks.http.transport import Credentials, Transport
from kafka_eos_source.sinks.options import SinkOption
from kafka_eos_source.sinks.targets import address

TWO_PHASE, ONE_REQUEST = "two-phase", "idempotency-key"
_KEY_HEADER = "Idempotency-Key"
_HEADER = re.compile(r"[!#$%&'*+.^_`|~0-9A-Za-z-]+")  # RFC 9110, 5.1


def _url(name: str, value: str) -> str:
    """Without a password in it: URLs get into logs of servers and proxies."""
    expected = "http://host[:port]/path or https://…, without user and password (see 'auth')"
    try:
        found = urlsplit(value.strip())
        well_formed = found.scheme in ("http", "https") and found.hostname and found.port != 0
    except ValueError:
        well_formed = False
    if not well_formed or "@" in found.netloc or found.fragment or not value.strip().isascii():
        shown = value.strip() if "@" not in value else "(not shown: there may be a password in it)"
        raise values.invalid(name, shown, expected)
    return value.strip()


def _status_url(name: str, value: str) -> str:
    if "{id}" not in value:
        raise values.invalid(name, value, "a URL with {id} in it")
    return _url(name, value)


def _header(name: str, value: str) -> str:
    if not _HEADER.fullmatch(value.strip()):
        raise values.invalid(name, value, "the name of a header")
    return value.strip()


class HttpSink(TwoPhaseSink):
    """``type=http``.

    Args:
        url: of the service: its endpoints lie under it, or it takes the rows itself.
        mode: ``two-phase`` or ``idempotency-key``.
        format: ``json`` (lines) or ``arrow`` (an IPC stream).
        auth: value of the header ``auth_header``.
        auth_env: variable of the driver's environment that has it instead.
        timeout: ms, of connecting and of each wait for an answer.
        retries: of one call, before the commit's own.
        ca_file: certificates to trust.
        key_header, status_url, on_conflict: of ``idempotency-key``.

    Raises:
        InvalidOptionError: two of them do not go together.
    """

    OPTIONS: ClassVar[tuple[SinkOption, ...]] = (
        SinkOption(
            "url",
            _url,
            None,
            "URL",
            "Of the service. `two-phase`: its endpoints lie under it. `idempotency-key`: it takes the rows.",
            required=True,
        ),
        SinkOption(
            "mode",
            values.choice(TWO_PHASE, ONE_REQUEST),
            TWO_PHASE,
            f"`{TWO_PHASE}`, `{ONE_REQUEST}`",
            "The service prepares, commits and aborts; or it takes one POST under a key that it knows again.",
        ),
        SinkOption(
            "format",
            values.choice(*bodies.FORMATS),
            "json",
            "`json`, `arrow`",
            "Of the body: one JSON object a line, or an Arrow IPC stream.",
        ),
        SinkOption(
            "auth",
            values.text,
            None,
            "text",
            "Value of the header `auth.header`, such as `Bearer …`. Never shown.",
            "none",
            secret=True,
        ),
        SinkOption(
            "auth.env", values.text, None, "text", "Variable of the driver's environment that has it.", "none"
        ),
        SinkOption("auth.header", _header, "Authorization", "text", "The header that says who asks."),
        SinkOption(
            "timeout",
            values.duration_ms,
            30_000,
            "time",
            "Of connecting, and of each wait for the answer. Its outcome is then unknown, and looked up.",
            "`30s`",
        ),
        SinkOption(
            "retries",
            values.integer(0),
            3,
            "count",
            "How often one call is repeated before it is left to the commit's own back-off.",
        ),
        SinkOption("ca.file", values.text, None, "path", "PEM certificates to trust.", "the system's"),
        SinkOption(
            "key.header", _header, None, "text", f"`{ONE_REQUEST}`: carries the id.", f"`{_KEY_HEADER}`"
        ),
        SinkOption(
            "status.url",
            _status_url,
            None,
            "URL with `{id}`",
            f"`{ONE_REQUEST}`: tells the state of an id; same host. Without it the request is repeated.",
            "none",
        ),
        SinkOption(
            "on.conflict",
            values.choice("done", "retry"),
            None,
            "`done`, `retry`",
            f"`{ONE_REQUEST}`: what 409 means: taken earlier, or (as in the IETF's draft) still under way.",
            "`done`",
        ),
    )

    def __init__(
        self,
        url: str,
        mode: str = TWO_PHASE,
        format: str = "json",
        auth: str | None = None,
        auth_env: str | None = None,
        auth_header: str = "Authorization",
        timeout: int = 30_000,
        retries: int = 3,
        ca_file: str | None = None,
        key_header: str | None = None,
        status_url: str | None = None,
        on_conflict: str | None = None,
    ) -> None:
        if auth is not None and auth_env is not None:
            raise InvalidOptionError("options 'auth' and 'auth.env' are both set.", fix="remove one of them.")
        if timeout < 1:
            raise values.invalid("timeout", str(timeout), "a time, 1ms or more")
        if mode == TWO_PHASE:
            _refuse_without_key(key_header=key_header, status_url=status_url, on_conflict=on_conflict)
            if urlsplit(url).query:
                raise InvalidOptionError(
                    "option 'url' has a query, and with mode=two-phase endpoints are added to its path.",
                    fix="remove the query.",
                )
        elif status_url is not None and urlsplit(status_url)[:2] != urlsplit(url)[:2]:
            raise InvalidOptionError(
                f"options 'url' and 'status.url' name two hosts: {urlsplit(url).netloc!r} and "
                f"{urlsplit(status_url).netloc!r}.",
                fix="give a status URL of the same service: the credentials go to one host.",
            )
        self.url = url
        self.mode = mode
        self.format = format
        self.credentials = Credentials(auth_header, auth, auth_env)
        self.timeout_ms = timeout
        self.retries = retries
        self.ca_file = ca_file
        self.key_header = key_header or _KEY_HEADER
        self.status_url = status_url
        self.conflict_is_done = on_conflict != "retry"

    def open(self, context: SinkContext) -> None:
        super().open(context)
        self.credentials.hide()
        self._transport = Transport(self.url, self.credentials, self.timeout_ms / 1000, self.ca_file)
        dialogue = Dialogue(self._transport, self.retries)
        self._protocol: Protocol = (
            TwoPhase(self.url.rstrip("/"), self.format, dialogue, context)
            if self.mode == TWO_PHASE
            else OneRequest(
                self.url,
                self.format,
                dialogue,
                context,
                self.key_header,
                self.status_url,
                self.conflict_is_done,
            )
        )

    def close(self) -> None:
        self._transport.close()

    def target(self) -> str | None:
        url = urlsplit(self.url)
        path = url.path.rstrip("/") + (f"?{url.query}" if url.query else "")
        return f"{url.scheme}://{address(url.scheme, url.hostname, url.port)}{path}"

    def risks(self) -> Sequence[str]:
        if self.mode == TWO_PHASE:
            return ()
        return (
            f"mode={ONE_REQUEST} sends the rows after Kafka has them: if the service then refuses a batch (a "
            f"4xx status), the query stops with SINK_FAILED; with mode={TWO_PHASE} it can refuse before",
        )

    def check(self, schema: pa.Schema, deadline: Deadline) -> None:
        if self.format == "json":
            formats.check("json", schema)
        self._protocol.check(deadline)

    def prepare(self, txn: SinkTxn, staged: Staged, deadline: Deadline) -> Outcome:
        return self._protocol.prepare(txn, staged, deadline)

    def commit(self, txn: SinkTxn, deadline: Deadline) -> Outcome:
        return self._protocol.commit(txn, deadline)

    def abort(self, txn: SinkTxn, deadline: Deadline) -> Outcome:
        return self._protocol.abort(txn, deadline)

    def recover(self, deadline: Deadline) -> Sequence[SinkTxn]:
        return self._protocol.recover(deadline)

    def tidy(self, batch_id: int, deadline: Deadline) -> None:
        self._protocol.tidy(batch_id)


def _refuse_without_key(**given: str | None) -> None:
    for name, value in given.items():
        if value is not None:
            raise InvalidOptionError(
                f"option {name.replace('_', '.')!r} belongs to mode={ONE_REQUEST}; the mode is {TWO_PHASE}.",
                fix=f"remove it, or set mode={ONE_REQUEST}.",
            )
