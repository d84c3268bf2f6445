"""`HttpSink`: exactly-once delivery to a web service, by two-phase commit or by idempotency keys.

::

    TwoPhase    POST <url>/prepare/<id>                the rows
                POST <url>/commit/<id>, <url>/abort/<id>
                GET  <url>/status/<id>                 {"state": "prepared"}
                GET  <url>/pending?application=&cluster=&sink=   {"pending": ["<id>", …]}

    OneRequest  POST <url>, Idempotency-Key: <id>    the rows, at commit; the checkpoint has them until then
                GET  <status.url>                    {"state": "committed"}; this endpoint is optional

After a restart, `TwoPhase` believes the service. `OneRequest` believes the service about what is done, and
the rows in the checkpoint if their digest is in the token in Kafka.
"""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import ClassVar
from urllib.parse import parse_qsl, quote, urlencode, urlsplit

import numpy as np
import pyarrow as pa

from kafka_eos_source import option_values as values
from kafka_eos_source.errors import InvalidOptionError, KafkaEosError, SinkFailedError, SinkRetryableError
from kafka_eos_source.runtime import failpoints
from kafka_eos_source.runtime.deadline import Deadline
from kafka_eos_source.secrets import (
    ALLOW_HTTP,
    Secrets,
    is_secret,
    secrets_of_urls,
    shown_url,
)
from kafka_eos_source.sinks import formats
from kafka_eos_source.sinks.contract import (
    OK,
    Fatal,
    Ok,
    Outcome,
    Refused,
    Retryable,
    RowRefusal,
    SinkContext,
    SinkTxn,
    Staged,
    TwoPhaseSink,
)
from kafka_eos_source.sinks.division import Division, DivisionLimitError, RangeRefusal
from kafka_eos_source.sinks.http_client import (
    Answer,
    Call,
    Credentials,
    Meaning,
    RowsRefusedError,
    ServiceClient,
    State,
    Transport,
    meaning_of,
    pending_ids,
    refused_rows,
    state_of,
)
from kafka_eos_source.sinks.manifest import NotesFolder
from kafka_eos_source.sinks.row_checks import RowRule
from kafka_eos_source.sinks.sink_options import ALLOW_HTTP_OPTION, SinkOption
from kafka_eos_source.sinks.table_columns import utf8_rules, year_rules
from kafka_eos_source.sinks.targets import address, query_digest

BODY_FORMATS = {"json": "application/x-ndjson", "arrow": "application/vnd.apache.arrow.stream"}


def encode_body(kind: str, schema: pa.Schema, batches: Iterable[pa.RecordBatch]) -> memoryview:
    """Encodes the rows of a batch.

    The same rows always result in the same bytes, because a service may compare a repeated body with the
    first one.

    Args:
        kind: one of `FORMATS`.
        schema: schema of the rows.
        batches: rows.
    """
    out = pa.BufferOutputStream()
    if kind == "arrow":
        with pa.ipc.new_stream(out, schema) as stream:
            for batch in batches:
                stream.write_batch(batch)
    else:
        lines = formats.JsonLinesWriter(out)
        for batch in batches:
            lines.write_batch(batch)
    return memoryview(out.getvalue())


def body_headers(kind: str, rows: int) -> dict[str, str]:
    """Returns the headers that describe a body: its content type and its number of rows."""
    return {"Content-Type": BODY_FORMATS[kind], "Kafka-Eos-Rows": str(rows)}


# -- the sink ------------------------------------------------------------------------------------

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

    Made from its `OPTIONS`, which describe the arguments; `constructors.http` is for users.

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
            values.choice(*BODY_FORMATS),
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
        *,
        url: str,
        mode: str,
        format: str,
        auth: str | None,
        auth_env: str | None,
        auth_header: str,
        timeout: int,
        retries: int,
        ca_file: str | None,
        allow_http: bool,
        key_header: str | None,
        status_url: str | None,
        on_conflict: str | None,
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
            "batch (a 4xx status), also because of a single row, the query stops with SINK_FAILED. With "
            f"mode={TWO_PHASE}, the service can refuse rows earlier, and they become dead letters",
        )

    def check(self, schema: pa.Schema, deadline: Deadline) -> None:
        if self.format == "json":
            formats.check("json", schema)
        self._protocol.check(deadline)

    def make_ready(self, schema: pa.Schema, deadline: Deadline) -> None:
        if self.format == "json":
            formats.check("json", schema)
        self._protocol.make_ready(deadline)

    def row_rules(self, schema: pa.Schema, deadline: Deadline) -> Sequence[RowRule]:
        """Texts must be UTF-8 in both formats, and times in JSON must have four digits for the year."""
        label = f"format={self.format}"
        return [*utf8_rules(schema, label), *(year_rules(schema, label) if self.format == "json" else ())]

    @property
    def refuses_rows(self) -> bool:
        return self.mode == TWO_PHASE

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


# -- the protocols -------------------------------------------------------------------------------


class Protocol(ABC):
    """One protocol of `HttpSink`. The methods are those of `contract.TwoPhaseSink`."""

    @abstractmethod
    def check(self, deadline: Deadline) -> None:
        """Checks that the service can be reached and, if the protocol allows it, that it accepts requests."""

    @abstractmethod
    def make_ready(self, deadline: Deadline) -> None: ...

    @abstractmethod
    def prepare(self, txn: SinkTxn, staged: Staged, deadline: Deadline) -> Outcome: ...
    @abstractmethod
    def commit(self, txn: SinkTxn, deadline: Deadline) -> Outcome: ...
    @abstractmethod
    def abort(self, txn: SinkTxn, deadline: Deadline) -> Outcome: ...
    @abstractmethod
    def recover(self, deadline: Deadline) -> Sequence[SinkTxn]: ...
    def tidy(self, batch_id: int) -> None:
        return


#: Most parts of a batch that are sent to find the rows that a service refuses.
_MOST_PROBES = 200
_NAME_ROWS = (
    "let the service name the rows in its answer (docs/sink-http.md), correct the rows, or read less per "
    "batch (option maxOffsetsPerTrigger of the source)."
)


class _ProbeFailedError(Exception):
    """A part of a batch could not be prepared or aborted, for a reason other than its rows."""

    def __init__(self, outcome: Outcome) -> None:
        super().__init__(outcome)
        self.outcome = outcome


@dataclass
class TwoPhase(Protocol):
    """Two-phase commit with a service that has an endpoint for each step.

    Attributes:
        url: URL under which the endpoints are, without a slash at the end.
        kind: format of the body, a key of `BODY_FORMATS`.
        client: client of the service.
        context: context of the sink.
    """

    url: str
    kind: str
    client: ServiceClient
    context: SinkContext

    def check(self, deadline: Deadline) -> None:
        """Checks that the service lists prepared ids.

        Raises:
            SinkFailedError, SinkRetryableError: if it does not.
        """
        self.recover(deadline)

    def make_ready(self, deadline: Deadline) -> None:
        self.check(deadline)

    def prepare(self, txn: SinkTxn, staged: Staged, deadline: Deadline) -> Outcome:
        failpoints.reach("sink.http.before_prepare")
        try:
            return self._send_rows(txn, staged.schema, staged.batches(), staged.rows, deadline)
        except RowsRefusedError as refused:
            answer = refused.answer
        search = _Search(self, txn, staged, deadline)
        try:
            return search.outcome(answer)
        except _ProbeFailedError as failed:
            return failed.outcome
        except DivisionLimitError as limit:
            return Refused(limit.refused) if limit.suffices else search.too_long(answer, limit)

    def _send_rows(
        self,
        txn: SinkTxn,
        schema: pa.Schema,
        batches: Iterable[pa.RecordBatch],
        rows: int,
        deadline: Deadline,
    ) -> Outcome:
        """Lets the service prepare rows.

        Raises:
            RowsRefusedError: if it refuses them.
        """
        call = Call(
            "prepare",
            self._target("prepare", txn),
            encode_body(self.kind, schema, batches),
            body_headers(self.kind, rows),
            self._target("status", txn),
            may_refuse_rows=True,
        )
        return self.client.send(call, deadline)

    def probe(
        self,
        txn: SinkTxn,
        schema: pa.Schema,
        batches: Iterable[pa.RecordBatch],
        rows: int,
        deadline: Deadline,
    ) -> Answer | None:
        """Lets the service prepare rows under another id, and aborts that at once.

        Crash here ⇒ the next start lists the id, no token names it, and it is aborted.

        Returns:
            None if the service accepts the rows, else its refusal.

        Raises:
            _ProbeFailedError: if it does not decide about the rows, or does not abort them.
        """
        txn = replace(txn, attempt=SinkTxn.new_attempt(), digest="")
        try:
            outcome = self._send_rows(txn, schema, batches, rows, deadline)
        except RowsRefusedError as refused:
            return refused.answer
        failpoints.reach("sink.http.within_search")
        for each in (outcome, self._send("abort", txn, deadline)):
            if each != OK:
                raise _ProbeFailedError(each)
        return None

    def commit(self, txn: SinkTxn, deadline: Deadline) -> Outcome:
        return self._send("commit", txn, deadline)

    def abort(self, txn: SinkTxn, deadline: Deadline) -> Outcome:
        return self._send("abort", txn, deadline)

    def recover(self, deadline: Deadline) -> Sequence[SinkTxn]:
        own = self.context.txn(0, "")
        which = {"application": own.application_id, "cluster": own.cluster, "sink": own.sink}
        target = f"{urlsplit(self.url).path}/pending?{urlencode(which)}"
        answer = self.client.transport.request("GET", target, deadline)
        ids = pending_ids(answer)
        if ids is None:
            message = (
                f"GET {target}: {answer}; expected a JSON object of at most 4 MiB with the list 'pending'"
            )
            raise _unexpected(message, answer, "url")
        return sorted({txn for each in ids if (txn := self.context.own(each)) is not None})

    def _send(self, what: str, txn: SinkTxn, deadline: Deadline) -> Outcome:
        return self.client.send(
            Call(what, self._target(what, txn), status_target=self._target("status", txn)), deadline
        )

    def _target(self, what: str, txn: SinkTxn) -> str:
        return f"{urlsplit(self.url).path}/{what}/{quote(str(txn), safe='')}"


@dataclass
class _Search:
    """The search for the rows of a batch that a service refuses.

    The service may name rows in its answer; a probe of the others shows whether these are all. If it names
    none, probes of ever smaller parts find them.
    """

    protocol: TwoPhase
    txn: SinkTxn
    staged: Staged
    deadline: Deadline

    def outcome(self, answer: Answer) -> Outcome:
        """Returns the refused rows, or `Fatal` if they cannot be found.

        Args:
            answer: the refusal of the whole batch.

        Raises:
            DivisionLimitError: if the search takes too long, or too many requests.
            _ProbeFailedError: if the service does not decide about rows.
        """
        enough = self.protocol.context.enough_refused
        division = Division.within(self.deadline, _MOST_PROBES, enough)
        left = np.arange(self.staged.rows)
        rows = pa.Table.from_batches(self.staged.batches(), self.staged.schema)
        while (named := refused_rows(answer, len(left))) is not None:
            division.refused |= {int(left[number]): why for number, why in named.items()}
            rest = np.delete(np.arange(len(left)), list(named))
            left, rows = left[rest], rows.take(pa.array(rest))
            refusal = self._probe(rows, division) if len(left) and not division.has_enough else None
            if refusal is None:
                return Refused(division.refused)
            answer = refusal
        if len(left) == 1:
            division.refused[int(left[0])] = RowRefusal(str(answer))
            return Refused(division.refused)

        def attempt(start: int, stop: int) -> RangeRefusal | None:
            refusal = self._probe(rows.slice(start, stop - start), None)
            if refusal is None:
                return None
            named = refused_rows(refusal, stop - start) or {}
            why = named[0] if stop - start == 1 and named else RowRefusal(str(refusal))
            return RangeRefusal(why, min(named, default=None))

        division.run(len(left), attempt, lambda number: int(left[number]), refuses=True)
        if not division.refused:
            why = f"prepare {self.txn}: {answer}; the service accepts each part of the batch alone"
            return Fatal(why, _NAME_ROWS)
        return Refused(division.refused)

    def too_long(self, answer: Answer, limit: DivisionLimitError) -> Fatal:
        """Returns the outcome of a search that ended before it found all rows."""
        return Fatal(
            f"prepare {self.txn}: {answer}; {_MOST_PROBES} requests, or half of "
            f"{self.deadline.budget_seconds:.0f} s (commitTimeoutMs), did not find all rows that the service "
            f"refuses; {limit.found}",
            _NAME_ROWS,
        )

    def _probe(self, rows: pa.Table, division: Division | None) -> Answer | None:
        if division is not None:
            division.count_try()
        batches = rows.to_batches()
        return self.protocol.probe(self.txn, self.staged.schema, batches, rows.num_rows, self.deadline)


@dataclass
class OneRequest(Protocol):
    """One POST per batch to a service that recognises repeated requests by their idempotency key.

    Until the commit, the rows are in the sink's notes folder in the checkpoint::

        <id>.arrow       rows of a prepared batch
        <id>.done.json   the service accepted the batch; kept until a later batch is finished

    Attributes:
        url: URL that receives the rows.
        kind: format of the body, a key of `BODY_FORMATS`.
        client: client of the service.
        context: context of the sink.
        key_header: header that carries the id.
        status: URL that reports the state of an id, with the placeholder ``{id}``; None if there is none.
        conflict_is_done: whether status 409 means "already done".
    """

    url: str = field(repr=False)
    kind: str
    client: ServiceClient
    context: SinkContext
    key_header: str
    status: str | None = field(repr=False)
    conflict_is_done: bool
    _prepared_here: set[SinkTxn] = field(default_factory=set, init=False)
    _last_committed: SinkTxn | None = field(default=None, init=False)

    def check(self, deadline: Deadline) -> None:
        """Asks for the state of an id that nobody used; without ``status.url``, only connects to the service.

        Every other request would have to contain rows.

        Raises:
            InvalidOptionError: if the credentials or certificates cannot be used.
            SinkFailedError, SinkRetryableError: if the service cannot be reached, or does not report a state.
        """
        transport = self.client.transport
        transport.credentials.headers()
        if self.status is None:
            if failure := transport.connect(deadline):
                raise SinkRetryableError(f"{shown_url(self.url)}: {failure}")
            return
        unused = str(self.context.txn(0, SinkTxn.new_attempt()))
        answer = transport.request(
            "GET", _target(self.status.replace("{id}", quote(unused, safe=""))), deadline
        )
        if state_of(answer) is None:
            raise _unexpected(
                f"GET {shown_url(self.status)}: {answer}; expected status 404, or 200 and a JSON object with "
                "'state'",
                answer,
                "status.url",
            )

    def make_ready(self, deadline: Deadline) -> None:
        """Checks the configuration only.

        Raises:
            SinkFailedError: if the query has no checkpoint.
            InvalidOptionError: if the credentials cannot be used.
        """
        _ = self._store
        self.client.transport.credentials.headers()

    def prepare(self, txn: SinkTxn, staged: Staged, deadline: Deadline) -> Outcome:
        if self._is_done(txn):
            return OK
        self._prepared_here.add(txn)
        return Ok(self._store.put_rows(str(txn), staged.schema, staged.batches()))

    def commit(self, txn: SinkTxn, deadline: Deadline) -> Outcome:
        store = self._store
        if self._is_done(txn):
            store.remove(str(txn))
            return OK
        try:
            batches = list(store.rows(str(txn), txn.digest))
        except FileNotFoundError:
            # another process may have committed the batch since the check above
            return OK if self._is_done(txn) else Fatal(f"nothing is prepared under {txn} in {store.location}")
        outcome = self._post(txn, batches, deadline)
        if outcome == OK:
            failpoints.reach("sink.http.before_note")
            store.put(_done(txn), {"id": str(txn)})
            store.remove(str(txn))
            self._prepared_here.discard(txn)
            self._last_committed = txn
        return outcome

    def abort(self, txn: SinkTxn, deadline: Deadline) -> Outcome:
        self._store.remove(str(txn))
        self._prepared_here.discard(txn)
        return OK

    def recover(self, deadline: Deadline) -> Sequence[SinkTxn]:
        found = []
        for name in self._store.names():
            txn = self.context.own(name)
            if txn is None:
                continue
            if self._is_done(txn):
                self._store.remove(name)
            else:
                found.append(txn)
        return sorted(found)

    def tidy(self, batch_id: int) -> None:
        """Deletes the notes of all batches before the last one that this process committed.

        The note of the last one stays, because a later process may repeat its commit.
        """
        if self._last_committed is None:
            return
        for name in self._store.names():
            txn = self.context.own(name.removesuffix(_DONE)) if name.endswith(_DONE) else None
            if txn is not None and txn != self._last_committed:
                self._store.remove(name)

    def _post(self, txn: SinkTxn, batches: list[pa.RecordBatch], deadline: Deadline) -> Outcome:
        status_target = (
            None if self.status is None else _target(self.status.replace("{id}", quote(str(txn), safe="")))
        )
        # The process that prepared the batch may have sent it long ago, and the service may have expired the
        # idempotency key since. So ask for the state before sending the rows again.
        if status_target is not None and txn not in self._prepared_here:
            if (state := self.client.state(status_target, deadline)) is State.COMMITTED:
                return OK
            if state is None:
                return Retryable(
                    f"GET {shown_url(status_target)}: the service does not report the state of {txn}"
                )
        content = encode_body(self.kind, batches[0].schema, batches)
        headers = body_headers(self.kind, sum(each.num_rows for each in batches))
        call = Call(
            "post",
            _target(self.url),
            content,
            {**headers, self.key_header: str(txn)},
            status_target,
            self.conflict_is_done,
        )
        return self.client.send(call, deadline)

    def _is_done(self, txn: SinkTxn) -> bool:
        return self._store.digest(_done(txn)) is not None

    @property
    def _store(self) -> NotesFolder:
        store = self.context.store
        if store is None:
            raise SinkFailedError(
                f"sink {self.context.name!r} keeps its rows in the query's checkpoint until the commit, but "
                "the option 'checkpointLocation' is not set.",
                fix="set the option 'checkpointLocation', or use mode=two-phase.",
            )
        return store


def _unexpected(message: str, answer: Answer, option: str) -> KafkaEosError:
    """Returns the error for an answer that is not what the protocol says."""
    if meaning_of(answer) in (Meaning.UNKNOWN, Meaning.LATER):
        return SinkRetryableError(message)
    return SinkFailedError(
        message,
        fix=f"correct the option {option!r}, the credentials or the service; see docs/sink-http.md.",
    )


_DONE = ".done"


def _done(txn: SinkTxn) -> str:
    return f"{txn}{_DONE}"


def _target(url: str) -> str:
    parts = urlsplit(url)
    return f"{parts.path or '/'}{f'?{parts.query}' if parts.query else ''}"
