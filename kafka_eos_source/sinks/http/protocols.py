"""The two protocols for exactly-once delivery to a service: two-phase commit, and idempotency keys.

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

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field
from urllib.parse import quote, urlencode, urlsplit

import pyarrow as pa

from kafka_eos_source.errors import SinkFailedError, SinkRetryableError
from kafka_eos_source.runtime import failpoints
from kafka_eos_source.runtime.deadline import Deadline
from kafka_eos_source.secrets import shown_url
from kafka_eos_source.sinks.contract import OK, Fatal, Ok, Outcome, Retryable, SinkContext, SinkTxn, Staged
from kafka_eos_source.sinks.http import body as bodies
from kafka_eos_source.sinks.http.answers import Meaning, State, meaning_of, pending_ids
from kafka_eos_source.sinks.http.client import Call, ServiceClient
from kafka_eos_source.sinks.manifest import NotesFolder


class Protocol(ABC):
    """One protocol of `HttpSink`. The methods are those of `contract.TwoPhaseSink`."""

    @abstractmethod
    def check(self, deadline: Deadline) -> None:
        """Checks the configuration and, if the protocol allows it, that the service accepts requests."""

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


@dataclass
class TwoPhase(Protocol):
    """Two-phase commit with a service that has an endpoint for each step.

    Attributes:
        url: URL under which the endpoints are, without a slash at the end.
        kind: format of the body; one of `body.FORMATS`.
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

    def prepare(self, txn: SinkTxn, staged: Staged, deadline: Deadline) -> Outcome:
        content = bodies.encode(self.kind, staged.schema, staged.batches())
        call = Call(
            "prepare",
            self._target("prepare", txn),
            content,
            bodies.headers(self.kind, staged.rows),
            self._target("status", txn),
        )
        failpoints.reach("sink.http.before_prepare")
        return self.client.send(call, deadline)

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
            if meaning_of(answer) in (Meaning.UNKNOWN, Meaning.LATER):
                raise SinkRetryableError(message)
            raise SinkFailedError(
                message, fix="correct the option 'url' or the service; see docs/sink-http.md."
            )
        found = (SinkTxn.parse(each) for each in ids)
        return sorted({each for each in found if each is not None and self.context.owns(each)})

    def _send(self, what: str, txn: SinkTxn, deadline: Deadline) -> Outcome:
        return self.client.send(
            Call(what, self._target(what, txn), status_target=self._target("status", txn)), deadline
        )

    def _target(self, what: str, txn: SinkTxn) -> str:
        return f"{urlsplit(self.url).path}/{what}/{quote(str(txn), safe='')}"


@dataclass
class OneRequest(Protocol):
    """One POST per batch to a service that recognises repeated requests by their idempotency key.

    Until the commit, the rows are in the sink's notes folder in the checkpoint::

        <id>.arrow       rows of a prepared batch
        <id>.done.json   the service accepted the batch; kept until a later batch is finished

    Attributes:
        url: URL that receives the rows.
        kind: format of the body; one of `body.FORMATS`.
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
        """Checks the configuration only, because every request to the service would have to contain rows.

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
            txn = SinkTxn.parse(name)
            if txn is None or not self.context.owns(txn):
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
            txn = SinkTxn.parse(name.removesuffix(_DONE)) if name.endswith(_DONE) else None
            if txn is not None and self.context.owns(txn) and txn != self._last_committed:
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
        content = bodies.encode(self.kind, batches[0].schema, batches)
        headers = bodies.headers(self.kind, sum(each.num_rows for each in batches))
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


_DONE = ".done"


def _done(txn: SinkTxn) -> str:
    return f"{txn}{_DONE}"


def _target(url: str) -> str:
    parts = urlsplit(url)
    return f"{parts.path or '/'}{f'?{parts.query}' if parts.query else ''}"
