"""The two ways to have a batch taken once: the service prepares it, or it knows a key again.

::

    TwoPhase    POST <url>/prepare/<id>                the rows
                POST <url>/commit/<id>, <url>/abort/<id>
                GET  <url>/status/<id>                 {"state": "prepared"}
                GET  <url>/pending?application=&sink=  {"pending": ["<id>", …]}

    OneRequest  POST <url>, Idempotency-Key: <id>    the rows, at commit; until then in the checkpoint
                GET  <status.url>                    {"state": "committed"}, if there is such an endpoint
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
from kafka_eos_source.sinks.contract import OK, Fatal, Outcome, Retryable, SinkContext, SinkTxn, Staged
from kafka_eos_source.sinks.http import body as bodies
from kafka_eos_source.sinks.http.answers import Heard, State, judge, pending_ids
from kafka_eos_source.sinks.http.dialogue import Call, Dialogue
from kafka_eos_source.sinks.notes_folder import NotesFolder


class Protocol(ABC):
    """As `contract.TwoPhaseSink`."""

    @abstractmethod
    def check(self, deadline: Deadline) -> None:
        """Can the service be reached, and does it know us?"""

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
    """The service has endpoints for each step.

    Attributes:
        url: under which they are, without a slash at the end.
        kind: of the body.
    """

    url: str
    kind: str
    dialogue: Dialogue
    context: SinkContext

    def check(self, deadline: Deadline) -> None:
        """Raises: SinkFailedError, SinkRetryableError: the list of what is prepared cannot be had."""
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
        return self.dialogue.settle(call, deadline)

    def commit(self, txn: SinkTxn, deadline: Deadline) -> Outcome:
        return self._end("commit", txn, deadline)

    def abort(self, txn: SinkTxn, deadline: Deadline) -> Outcome:
        return self._end("abort", txn, deadline)

    def recover(self, deadline: Deadline) -> Sequence[SinkTxn]:
        which = {"application": self.context.application_id, "sink": self.context.name}
        target = f"{urlsplit(self.url).path}/pending?{urlencode(which)}"
        answer = self.dialogue.transport.ask("GET", target, deadline)
        ids = pending_ids(answer)
        if ids is None:
            told = f"GET {target}: {answer}; expected a JSON object with the list 'pending'"
            if judge(answer) in (Heard.UNKNOWN, Heard.LATER):
                raise SinkRetryableError(told)
            raise SinkFailedError(
                told, fix="correct the option 'url', or the service: see docs/sink-http.md."
            )
        found = (SinkTxn.parse(each) for each in ids)
        return sorted({each for each in found if each is not None and self.context.owns(each)})

    def _end(self, what: str, txn: SinkTxn, deadline: Deadline) -> Outcome:
        return self.dialogue.settle(
            Call(what, self._target(what, txn), look=self._target("status", txn)), deadline
        )

    def _target(self, what: str, txn: SinkTxn) -> str:
        return f"{urlsplit(self.url).path}/{what}/{quote(str(txn), safe='')}"


@dataclass
class OneRequest(Protocol):
    """The service knows a request again by its key. Until the commit the rows lie in the checkpoint.

    ::

        <id>.arrow       the rows: prepared
        <id>.done.json   the service has taken them; kept until a later batch is finished

    Attributes:
        url: that takes the rows.
        kind: of the body.
        key_header: that carries the id.
        status: URL of an id's state, with ``{id}``; None = there is none.
        conflict_is_done: what 409 means.
    """

    url: str
    kind: str
    dialogue: Dialogue
    context: SinkContext
    key_header: str
    status: str | None
    conflict_is_done: bool
    _ours: set[SinkTxn] = field(default_factory=set, init=False)
    _last: SinkTxn | None = field(default=None, init=False)

    def check(self, deadline: Deadline) -> None:
        """Nothing can be asked: a request would be one with rows.

        Raises:
            SinkFailedError: there is no checkpoint.
            InvalidOptionError: the credentials are not there.
        """
        _ = self._store
        self.dialogue.transport.credentials.headers()

    def prepare(self, txn: SinkTxn, staged: Staged, deadline: Deadline) -> Outcome:
        if self._is_done(txn):
            return OK
        self._ours.add(txn)
        self._store.put_rows(str(txn), staged.schema, staged.batches())
        return OK

    def commit(self, txn: SinkTxn, deadline: Deadline) -> Outcome:
        store = self._store
        if self._is_done(txn):
            store.remove(str(txn))
            return OK
        try:
            batches = list(store.rows(str(txn)))
        except FileNotFoundError:
            # two may be at it: the other one may just have ended
            return OK if self._is_done(txn) else Fatal(f"nothing is prepared under {txn} in {store.location}")
        outcome = self._post(txn, batches, deadline)
        if outcome == OK:
            failpoints.reach("sink.http.before_note")
            store.put(_done(txn), {"id": str(txn)})
            store.remove(str(txn))
            self._ours.discard(txn)
            self._last = txn
        return outcome

    def abort(self, txn: SinkTxn, deadline: Deadline) -> Outcome:
        self._store.remove(str(txn))
        self._ours.discard(txn)
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
        """Forgets the batches before the last one that this process committed.

        The last one's note stays: a later process may ask for its commit once more.
        """
        if self._last is None:
            return
        for name in self._store.names():
            txn = SinkTxn.parse(name.removesuffix(_DONE)) if name.endswith(_DONE) else None
            if txn is not None and txn != self._last:
                self._store.remove(name)

    def _post(self, txn: SinkTxn, batches: list[pa.RecordBatch], deadline: Deadline) -> Outcome:
        look = None if self.status is None else self._look(txn, self.status)
        # prepared by another process, which may have sent it long ago: a key may have been forgotten since
        if look is not None and txn not in self._ours:
            if (state := self.dialogue.state(look, deadline)) is State.COMMITTED:
                return OK
            if state is None:
                return Retryable(f"GET {look}: the service does not tell whether it has {txn}")
        content = bodies.encode(self.kind, batches[0].schema, batches)
        about = bodies.headers(self.kind, sum(each.num_rows for each in batches))
        call = Call(
            "post",
            _target(self.url),
            content,
            {**about, self.key_header: str(txn)},
            look,
            self.conflict_is_done,
        )
        return self.dialogue.settle(call, deadline)

    def _look(self, txn: SinkTxn, status: str) -> str:
        return _target(status.replace("{id}", quote(str(txn), safe="")))

    def _is_done(self, txn: SinkTxn) -> bool:
        return self._store.get(_done(txn)) is not None

    @property
    def _store(self) -> NotesFolder:
        store = self.context.store
        if store is None:
            raise SinkFailedError(
                f"sink {self.context.name!r} keeps its rows in the checkpoint until the commit, and there is "
                "none.",
                fix="set the option 'checkpointLocation', or use mode=two-phase.",
            )
        return store


_DONE = ".done"


def _done(txn: SinkTxn) -> str:
    return f"{txn}{_DONE}"


def _target(url: str) -> str:
    parts = urlsplit(url)
    return f"{parts.path or '/'}{f'?{parts.query}' if parts.query else ''}"
