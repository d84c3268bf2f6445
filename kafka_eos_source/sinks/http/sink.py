"""`HttpSink`: the options of the sink, and the choice of its protocol."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import ClassVar
from urllib.parse import parse_qsl, urlsplit

import pyarrow as pa

from kafka_eos_source import option_values as values
from kafka_eos_source.errors import InvalidOptionError
from kafka_eos_source.runtime.deadline import Deadline
from kafka_eos_source.secrets import (
    ALLOW_HTTP,
    Secrets,
    is_secret,
    secrets_of_urls,
    shown_url,
)
from kafka_eos_source.sinks.contract import Outcome, SinkContext, SinkTxn, Staged, TwoPhaseSink
from kafka_eos_source.sinks.filesystem import formats
from kafka_eos_source.sinks.http import body as bodies
from kafka_eos_source.sinks.http.client import ServiceClient
from kafka_eos_source.sinks.http.protocols import OneRequest, Protocol, TwoPhase
from kafka_eos_source.sinks.http.transport import Credentials, Transport
from kafka_eos_source.sinks.options import ALLOW_HTTP_OPTION, SinkOption
from kafka_eos_source.sinks.targets import address, query_digest

TWO_PHASE, ONE_REQUEST = "two-phase", "idempotency-key"
_KEY_HEADER = "Idempotency-Key"
_HEADER = re.compile(r"[!#$%&'*+.^_`|~0-9A-Za-z-]+")  # RFC 9110, 5.1


def _url(name: str, value: str) -> str:
    """Parses a URL. Refuses one with a password, because URLs end up in logs of servers and proxies."""
    expected = "http://host[:port]/path or https://…, without user and password (use 'auth' instead)"
    try:
        found = urlsplit(value.strip())
        well_formed = found.scheme in ("http", "https") and found.hostname and found.port != 0
    except ValueError:
        well_formed = False
    if not well_formed or "@" in found.netloc or found.fragment or not value.strip().isascii():
        raise values.invalid(name, shown_url(value), expected)
    return value.strip()


def _status_url(name: str, value: str) -> str:
    if "{id}" not in value:
        raise values.invalid(name, shown_url(value), "a URL that contains {id}")
    return _url(name, value)


def _header(name: str, value: str) -> str:
    if not _HEADER.fullmatch(value.strip()):
        raise values.invalid(name, value, "the name of an HTTP header")
    return value.strip()


class HttpSink(TwoPhaseSink):
    """``type=http``: sends each batch to a web service.

    Args:
        url: URL under which the service's endpoints are (``two-phase``), or that receives the rows itself
            (``idempotency-key``).
        mode: ``two-phase`` or ``idempotency-key``.
        format: ``json`` (JSON lines) or ``arrow`` (an Arrow IPC stream).
        auth: value of the header ``auth_header``.
        auth_env: environment variable of the driver that contains the value of ``auth_header`` instead.
        auth_header: header that authenticates the client.
        timeout: time limit in ms for connecting, and for each wait for an answer.
        retries: number of retries of one call, before the driver retries the whole commit.
        ca_file: PEM file with the certificates to trust; None for the system's.
        allow_http: whether credentials may be sent over plain http.
        key_header, status_url, on_conflict: options that only ``idempotency-key`` uses.

    Raises:
        InvalidOptionError: if two options contradict each other.
    """

    OPTIONS: ClassVar[tuple[SinkOption, ...]] = (
        SinkOption(
            "url",
            _url,
            None,
            "URL",
            "URL of the service. `two-phase`: its endpoints are below it. `idempotency-key`: it receives the "
            "rows.",
            required=True,
        ),
        SinkOption(
            "mode",
            values.choice(TWO_PHASE, ONE_REQUEST),
            TWO_PHASE,
            f"`{TWO_PHASE}`, `{ONE_REQUEST}`",
            "`two-phase`: the service has endpoints to prepare, commit and abort. `idempotency-key`: it "
            "accepts one POST per batch and recognises a repetition by its key.",
        ),
        SinkOption(
            "format",
            values.choice(*bodies.FORMATS),
            "json",
            "`json`, `arrow`",
            "Format of the body: one JSON object per line, or an Arrow IPC stream.",
        ),
        SinkOption(
            "auth",
            values.text,
            None,
            "text",
            "Value of the header that `auth.header` names, such as `Bearer …`. Never shown.",
            "none",
            secret=True,
        ),
        SinkOption(
            "auth.env",
            values.text,
            None,
            "text",
            "Environment variable of the driver that contains the value of that header.",
            "none",
        ),
        SinkOption(
            "auth.header",
            _header,
            "Authorization",
            "text",
            "Name of the header that authenticates the client.",
        ),
        SinkOption(
            "timeout",
            values.duration_ms,
            30_000,
            "time",
            "Time limit for connecting, and for each wait for an answer. After it, the sink reads the state "
            "of the id or repeats the request.",
            "`30s`",
        ),
        SinkOption(
            "retries",
            values.integer(0),
            3,
            "count",
            "Number of retries of one call. After them, the driver retries the commit with its own back-off.",
        ),
        SinkOption(
            "ca.file", values.text, None, "path", "PEM file of certificates to trust.", "the system's"
        ),
        ALLOW_HTTP_OPTION,
        SinkOption(
            "key.header",
            _header,
            None,
            "text",
            f"`{ONE_REQUEST}`: name of the header that carries the id.",
            f"`{_KEY_HEADER}`",
        ),
        SinkOption(
            "status.url",
            _status_url,
            None,
            "URL with `{id}`",
            f"`{ONE_REQUEST}`: URL on the same host that reports the state of an id. Without it, the sink "
            "repeats the request.",
            "none",
        ),
        SinkOption(
            "on.conflict",
            values.choice("done", "retry"),
            None,
            "`done`, `retry`",
            f"`{ONE_REQUEST}`: meaning of status 409. `done`: an earlier request succeeded. `retry`: one is "
            "still in progress (as in the IETF draft).",
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
        allow_http: bool = False,
        key_header: str | None = None,
        status_url: str | None = None,
        on_conflict: str | None = None,
    ) -> None:
        if auth is not None and auth_env is not None:
            raise InvalidOptionError(
                "options 'auth' and 'auth.env' are both set; expected at most one of them.",
                fix="remove one of them.",
            )
        if timeout < 1:
            raise values.invalid("timeout", str(timeout), "a time of 1ms or more")
        if mode == TWO_PHASE:
            _refuse_key_options(key_header=key_header, status_url=status_url, on_conflict=on_conflict)
            if urlsplit(url).query:
                raise InvalidOptionError(
                    "option 'url' contains a query string; expected none with mode=two-phase, because the "
                    "sink appends the endpoints to the path.",
                    fix="remove the query string.",
                )
        elif status_url is not None and urlsplit(status_url)[:2] != urlsplit(url)[:2]:
            raise InvalidOptionError(
                "options 'url' and 'status.url' have different schemes or hosts: "
                f"{shown_url(url)!r} and {shown_url(status_url)!r}; the sink sends its "
                "credentials to one host only.",
                fix="use a status URL with the scheme and host of the option 'url'.",
            )
        queries = [urlsplit(each).query for each in (url, status_url or "")]
        has_key = any(is_secret(name) for query in queries for name, _ in parse_qsl(query))
        if auth is not None or auth_env is not None or has_key:
            sent = (
                "a key in the query" if auth is None and auth_env is None else f"the header {auth_header!r}"
            )
            values.refuse_plain_http("url", url, sent, ALLOW_HTTP, allowed=allow_http)
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
        urls = [each for each in (self.url, self.status_url) if each is not None]
        self._transport = Transport(
            self.url,
            self.credentials,
            self.timeout_ms / 1000,
            self.ca_file,
            Secrets(frozenset(secrets_of_urls(urls))),
        )
        client = ServiceClient(self._transport, self.retries)
        self._protocol: Protocol = (
            TwoPhase(self.url.rstrip("/"), self.format, client, context)
            if self.mode == TWO_PHASE
            else OneRequest(
                self.url,
                self.format,
                client,
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
        path = f"{url.path.rstrip('/')}{query_digest(url.query)}"
        return f"{url.scheme}://{address(url.scheme, url.hostname, url.port)}{path}"

    def risks(self) -> Sequence[str]:
        if self.mode == TWO_PHASE:
            return ()
        return (
            f"mode={ONE_REQUEST} sends the rows after Kafka committed them. If the service then refuses a "
            f"batch (a 4xx status), the query stops with SINK_FAILED. With mode={TWO_PHASE}, the service can "
            "refuse the batch earlier",
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


def _refuse_key_options(**options: str | None) -> None:
    for name, value in options.items():
        if value is not None:
            raise InvalidOptionError(
                f"option {name.replace('_', '.')!r} requires mode={ONE_REQUEST}, but the mode is "
                f"{TWO_PHASE}.",
                fix=f"remove it, or set mode={ONE_REQUEST}.",
            )
