"""What a system outside Kafka must be able to do to take a micro-batch with it, once or not at all.

::

    executors   stage ──┐ rows made durable where nobody reads them; a small token goes to the driver
                        │
    driver      prepare ┤ what was staged becomes one thing under one id: it can be committed whatever dies
                        │
                Kafka   ┤ commit_transaction: the decision. The token names the id
                        │
                commit ─┤ the thing becomes visible, all of it at once
                abort  ─┘ or it is as if it had never been

    at a start  recover   lists the ids that are prepared, and neither committed nor aborted

An id is ``<application.id>-<sink>-<sequence>-<attempt>``. It carries the name of the sink, so that two sinks
of one query, or of two queries, never share an id; everything that a sink stores is named by the id, or by
the application id and the sink together. The sequence is that of the Kafka transaction that commits the
batch. It only grows, while Spark's batch id goes back when a checkpoint is restored.

**An id is prepared under one owner of the transactional id and never under two**: after every
`init_transactions` there is a new attempt. So a new owner that lists what is prepared *before* it fences the
others, and reads the token after, knows for certain what becomes of each id on its list: the token names it,
or nobody ever will. `commit.sink_fate` decides; a sink never does.

The shape is that of Flink's ``Committer`` (commit is idempotent, "already committed" is a normal answer) and
of X/Open XA (prepare, commit, rollback, recover).

Every call may come twice, from two processes at once, and after a kill at any moment of the one before:

========== ============================ ============================= =================================
state      prepare                      commit                        abort
========== ============================ ============================= =================================
unknown    prepares                     `Fatal`: there is nothing     `OK`
prepared   `OK`, changes nothing        commits                       rolls back
committed  `OK`, changes nothing        `OK`, changes nothing         `OK`, **changes nothing**
aborted    prepares, or `Fatal`         `Fatal`: there is nothing     `OK`
========== ============================ ============================= =================================

`kafka_eos_source.testing.sinks` proves a sink against this table.
"""

from __future__ import annotations

import re
import secrets
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Protocol

import pyarrow as pa

from kafka_eos_source.runtime.deadline import Deadline
from kafka_eos_source.sinks.notes_folder import NotesFolder
from kafka_eos_source.sinks.options import SinkOption

_ID = re.compile(r"(.+)-([a-z][a-z0-9_]{0,31})-([0-9]{1,19})-([0-9a-f]{20})", re.DOTALL)
#: As it went with tokens of format 1: shared by all sinks of a query, with a shorter attempt.
_OLD_ID = re.compile(r"(.+)-([0-9]{1,19})-([0-9a-f]{16})", re.DOTALL)
_ATTEMPT_BYTES = 10


@dataclass(frozen=True, order=True)
class SinkTxn:
    """The id under which one sink prepares one batch.

    The text is parsed from its right end, where nothing but the application id may hold a hyphen.

    Attributes:
        application_id: option ``application.id``, or the id that is derived from the query.
        sink: name of the sink. Empty in an old id; see `is_old`.
        sequence: sequence number of the Kafka transaction that commits the batch; Spark's batch id in an old
            id.
        attempt: 20 random digits of lower-case hex, new each time that the batch is prepared; 16 in an old
            id.
    """

    application_id: str
    sink: str
    sequence: int
    attempt: str

    def __str__(self) -> str:
        sink = "" if self.is_old else f"{self.sink}-"
        return f"{self.application_id}-{sink}{self.sequence}-{self.attempt}"

    @property
    def is_old(self) -> bool:
        """Whether a version with tokens of format 1 prepared it: ``<application.id>-<batch>-<attempt>``."""
        return not self.sink

    @staticmethod
    def new_attempt() -> str:
        """A random attempt that nobody used before."""
        return secrets.token_hex(_ATTEMPT_BYTES)

    @classmethod
    def parse(cls, text: str) -> SinkTxn | None:
        """Reads an id of this version or of an old one.

        Returns:
            None if the text is not such an id.
        """
        if found := _ID.fullmatch(text):
            return cls(found[1], found[2], int(found[3]), found[4])
        if found := _OLD_ID.fullmatch(text):
            return cls(found[1], "", int(found[2]), found[3])
        return None


@dataclass(frozen=True)
class Ok:
    """It is done, by this call or an earlier one."""


@dataclass(frozen=True)
class Retryable:
    """Not now: the same call is made again, later.

    Attributes:
        why: for people; secrets are taken out before it is shown.
    """

    why: str


@dataclass(frozen=True)
class Fatal:
    """No retry mends it: a person must look.

    Attributes:
        why: for people.
        fix: what to do about it.
    """

    why: str
    fix: str = ""


Outcome = Ok | Retryable | Fatal
OK = Ok()


class Stage(Protocol):
    """One task attempt's rows for one sink, in an executor. Used by one thread."""

    def write(self, batch: pa.RecordBatch) -> None:
        """Takes rows of the context's schema; there is at least one."""

    def finish(self) -> Any:
        """Makes the rows durable, invisible to readers.

        Returns:
            A token: small, picklable; it reaches `prepare` if this attempt of the task counts.
        """

    def discard(self) -> None:
        """The task failed: what was written may go. Not called when the process dies."""


@dataclass(frozen=True)
class StageContext:
    """The task attempt that stages.

    Attributes:
        batch_id: Spark's batch id.
        attempt: of the task: unique hex, for names of files.
        schema: of the rows that come.
        parts: the project's own staging, beside the rows for Kafka: an Arrow file in the checkpoint, or
            bytes in the message while they are few.
    """

    batch_id: int
    attempt: str
    schema: pa.Schema
    parts: Callable[[], Stage]


class Staged(Protocol):
    """The rows of one batch for one sink, on the driver: those of the task attempts that count."""

    @property
    def rows(self) -> int:
        """How many there are; at least one."""

    @property
    def schema(self) -> pa.Schema:
        """Of all of them."""

    @property
    def tokens(self) -> Sequence[Any]:
        """What each `Stage.finish` returned, in the order of the tasks."""

    def batches(self) -> Iterator[pa.RecordBatch]:
        """The rows, of a sink that leaves staging to `StageContext.parts`. May be called again."""


@dataclass(frozen=True)
class SinkContext:
    """Who the sink works for.

    Attributes:
        name: of the sink in the query (option ``sinks``).
        application_id: of the query. With the name it says which ids `recover` lists; see `owns`.
        store: durable notes and rows in the query's checkpoint, for a sink whose own system has no place for
            what is prepared. None in executors.
    """

    name: str
    application_id: str
    store: NotesFolder | None = None

    def owns(self, txn: SinkTxn) -> bool:
        """Whether this sink of this query prepared the id; an old id belongs to every sink of its query."""
        return txn.application_id == self.application_id and txn.sink in (self.name, "")


class TwoPhaseSink(ABC):
    """One external system. Picklable until it is opened; opened once in each process that uses it.

    On the driver one thread makes its calls, in order. A call that neither returns nor draws rows until its
    deadline is left behind (`sinks.watched`), and the sink counts as down.

    A call may raise as well as return an outcome: `errors.RetriableError`, `OSError`, `ConnectionError` and
    `TimeoutError` count as `Retryable`, any other exception as `Fatal`, in `commit` as `Retryable`.

    Attributes:
        OPTIONS: what `sink.<name>.…` takes. `from_options` gets their values.
    """

    OPTIONS: ClassVar[tuple[SinkOption, ...]] = ()
    context: SinkContext

    @classmethod
    def from_options(cls, options: Mapping[str, Any]) -> TwoPhaseSink:
        """The sink that these options name; each of `OPTIONS` has its value. Connects to nothing.

        Raises:
            InvalidOptionError: two options do not go together.
        """
        return cls(**{name.removesuffix(".*").replace(".", "_"): value for name, value in options.items()})

    def open(self, context: SinkContext) -> None:
        """Before any other call, in every process. Connects to nothing yet."""
        self.context = context

    def close(self) -> None:
        """Gives back what the process holds. Prepared work stays prepared."""
        return

    def target(self) -> str | None:
        """Identifies the thing that the sink writes, without connecting: a folder, a table, a URL.

        Two sinks of one query with the same target are refused before the first batch. The text may be shown,
        so it must hold no password.

        Returns:
            The same text for the same thing, however the options spell it. None if that is not known.
        """
        return None

    def risks(self) -> Sequence[str]:
        """Says in which cases `commit` may refuse a batch that `prepare` accepted; called after `check`.

        The driver logs each of them as a warning before the first batch.
        """
        return ()

    def check(self, schema: pa.Schema, deadline: Deadline) -> None:
        """On the driver before the first batch of a run: can rows of this schema be taken?

        Raises:
            InvalidSchemaError, InvalidOptionError: they cannot.
            RetriableError, OSError: not known yet; it is asked again with the first batch.
        """
        return

    def stage(self, context: StageContext) -> Stage:
        """In an executor, for each task attempt that has rows. Connects to the outside only if it must."""
        return context.parts()

    @abstractmethod
    def prepare(self, txn: SinkTxn, staged: Staged, deadline: Deadline) -> Outcome:
        """After it, `commit` can succeed whatever dies. Readers see nothing yet.

        What executors staged stays usable: after an abort the same rows may be prepared under another id.
        """

    @abstractmethod
    def commit(self, txn: SinkTxn, deadline: Deadline) -> Outcome:
        """Makes the batch visible, all of it at once. Has the id alone: it may come from another process."""

    @abstractmethod
    def abort(self, txn: SinkTxn, deadline: Deadline) -> Outcome:
        """Takes `prepare` back, half of one too. What is committed stays."""

    @abstractmethod
    def recover(self, deadline: Deadline) -> Sequence[SinkTxn]:
        """Every id that this sink of this query prepared, wholly or half, and did not wholly end.

        Must ask the outside system (or the context's store, if prepared work lies there): an empty answer
        that is not true loses a batch.
        """

    def tidy(self, batch_id: int, deadline: Deadline) -> None:
        """Deletes what tasks staged for this batch and for those before it, which is finished everywhere.

        A failure is logged, and has no other effect. Batch ids go back when a checkpoint is restored, and
        then a driver of the time before may still call this: whatever is prepared must be spared.

        Args:
            batch_id: Spark's batch id, by which tasks stage.
            deadline: for the call.
        """
        return
