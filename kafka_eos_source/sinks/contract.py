"""The contract of a sink: an external system that receives each micro-batch exactly once, with Kafka.

A sink takes part in the commit of a micro-batch by two-phase commit::

    executors   stage ──┐ each task makes its rows durable but invisible; the driver gets a receipt
                        │
    driver      prepare ┤ binds the staged rows to one id; a commit then succeeds whichever process dies
                        │
                Kafka   ┤ commit_transaction decides; the commit token in that transaction names the id,
                        │ and the digest of what prepare wrote (`Ok.digest`)
                        │
                commit ─┤ makes all rows of the batch visible at once
                abort  ─┘ or removes the preparation, as if it had never existed

    at a start  recover   lists the ids that are prepared but neither committed nor aborted

An id has the form ``<application.id>-<cluster>-<sink>-<sequence>-<attempt>``. The first three parts are its
*owner*: one sink of one query on one Kafka cluster. A sink names everything that it stores by the id or by
the owner, and lists, commits, aborts and deletes only what belongs to its own owner (`SinkContext.owns`). So
two sinks never touch each other's work, even if they write to one target: not those of two queries, nor those
of one job that runs on two clusters, where application id, sink and sequence number are the same. The
sequence number is that of the Kafka transaction that commits the batch. It only grows, whereas Spark's batch
id goes back when somebody restores a checkpoint.

**Only one owner of the transactional id ever prepares an id**: the driver generates a new ``attempt`` after
every `init_transactions`. A new owner lists the prepared ids *before* it fences earlier owners, and reads the
commit token afterwards. It therefore knows the fate of each listed id for certain: either the token names the
id, or no token ever will. `commit.two_phase` makes that decision; a sink never does.

**A sink believes what it reads back only as far as somebody vouches for it.** Others may be able to write to
the storage that describes a prepared batch, so `prepare` returns a digest of the description, and `commit`
receives it from the token in Kafka (`sinks.manifest`). Without a digest, the names in it are validated.

The methods follow Flink's ``Committer`` (commit is idempotent, and "already committed" is a normal result)
and X/Open XA (prepare, commit, rollback, recover).

**A sink names the rows that it cannot hold.** A row that one output of a batch refuses leaves all outputs,
and becomes a dead letter (``onInvalidRecord``). What follows from the schema of the target, the sink says in
`TwoPhaseSink.row_rules`, and the tasks check it before they stage anything. What only the system itself can
know, such as a violated unique constraint, `prepare` returns as `Refused`: all rows that the system would
refuse, at once. Nothing is in Kafka then. The driver rolls back what other sinks prepared, stages the batch
again without these rows, and prepares it anew.

The driver may make any call twice, from two processes at the same time, and after a process was killed at
any point of an earlier call. The result depends on the state of the id:

========== ============================ ============================= =================================
state      prepare                      commit                        abort
========== ============================ ============================= =================================
unknown    prepares, or `Refused`       `Fatal`: nothing is prepared  `OK`
prepared   `OK`, changes nothing        commits                       rolls back
committed  `OK`, changes nothing        `OK`, changes nothing         `OK`, **changes nothing**
aborted    prepares, or `Fatal`         `Fatal`: nothing is prepared  `OK`
========== ============================ ============================= =================================

`kafka_eos_source.testing.sinks.SinkConformance` tests a sink against this table.
"""

from __future__ import annotations

import hashlib
import re
import secrets
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, Protocol

import pyarrow as pa

from kafka_eos_source.runtime.deadline import Deadline
from kafka_eos_source.secrets import NO_SECRETS, Secrets
from kafka_eos_source.sinks.manifest import NotesFolder
from kafka_eos_source.sinks.row_checks import RowRule
from kafka_eos_source.sinks.sink_options import SinkOption

_ID = re.compile(r"(.+)-([0-9a-f]{12})-([a-z][a-z0-9_]{0,31})-([0-9]{1,19})-([0-9a-f]{20})", re.DOTALL)
_ATTEMPT_BYTES = 10
#: What a digest consists of: hex digits, or Base64. A token has at most 4096 bytes, and a query 16 sinks.
_DIGEST = re.compile(r"[A-Za-z0-9+/=_:.-]{0,64}")


def cluster_hash(cluster_id: str) -> str:
    """Returns a hash of a Kafka cluster's id: 12 hex digits, whatever the id contains and however long."""
    return hashlib.sha256(cluster_id.encode()).hexdigest()[:12]


@dataclass(frozen=True, order=True)
class SinkTxn:
    """Sink transaction id: identifies one preparation of one batch by one sink.

    `parse` reads the text from its right end, because only the application id may contain a hyphen.

    Attributes:
        application_id: value of the option ``application.id``, or the id derived from the query.
        cluster: `cluster_hash` of the Kafka cluster whose transaction commits the batch.
        sink: name of the sink in the query.
        sequence: sequence number of the Kafka transaction that commits the batch.
        attempt: 20 random lower-case hex digits, generated each time the driver prepares the batch.
        digest: the `Ok.digest` that `prepare` returned, from the token in Kafka; empty if no token states
            one, as when a person decides that the batch is committed. Not part of the id.
    """

    application_id: str
    cluster: str
    sink: str
    sequence: int
    attempt: str
    digest: str = field(default="", compare=False)

    def __str__(self) -> str:
        return f"{self.application_id}-{self.cluster}-{self.sink}-{self.sequence}-{self.attempt}"

    @property
    def owner(self) -> str:
        """A hash of application id, cluster and sink: 16 hex digits, for names whose length is limited."""
        of = "\0".join((self.application_id, self.cluster, self.sink))
        return hashlib.sha256(of.encode()).hexdigest()[:16]

    @staticmethod
    def new_attempt() -> str:
        """Generates a random value for `attempt` that no earlier preparation used."""
        return secrets.token_hex(_ATTEMPT_BYTES)

    @classmethod
    def parse(cls, text: str) -> SinkTxn | None:
        """Parses an id; returns None if the text is not one."""
        found = _ID.fullmatch(text)
        return None if found is None else cls(found[1], found[2], found[3], int(found[4]), found[5])


@dataclass(frozen=True)
class Ok:
    """Outcome: the work is done, by this call or by an earlier one.

    Attributes:
        digest: of `prepare` only: identifies what `commit` must find. The driver puts it into the token in
            Kafka and passes it to `commit` in `SinkTxn.digest`. Empty if `commit` reads nothing back that
            others could have changed.
    """

    digest: str = field(default="", compare=False)

    def __post_init__(self) -> None:
        if not _DIGEST.fullmatch(self.digest):
            raise ValueError(
                f"the digest {self.digest[:100]!r} has {len(self.digest)} characters; expected at most 64 "
                "letters, digits and characters of '+/=_:.-', because the token in Kafka holds those of all "
                "sinks"
            )


@dataclass(frozen=True)
class Retryable:
    """Outcome: the call failed, but may succeed later. The driver repeats it.

    Attributes:
        why: cause, as text for people. The driver masks secrets before it logs or raises the text.
    """

    why: str


@dataclass(frozen=True)
class Fatal:
    """Outcome: no retry can succeed; a person must act.

    Attributes:
        why: cause, as text for people.
        fix: what the person can do.
    """

    why: str
    fix: str = ""


@dataclass(frozen=True)
class RowRefusal:
    """Why a sink refuses one row.

    Attributes:
        why: cause, as text for people, such as the text of a database's error. Without the row's values, as
            far as the system lets the sink choose. The driver masks secrets.
        column: the column that is to blame; "" if the system does not say so.
    """

    why: str
    column: str = ""


@dataclass(frozen=True)
class Refused:
    """Outcome of `prepare` only: the target will never hold these rows, but it can hold the others.

    Nothing is prepared under the id; the state of the id is the one before the call.

    Attributes:
        rows: every refused row, by its number in the order of `Staged.batches`, from 0. A sink names all of
            them at once, because each outcome of this kind makes the driver stage rows again; unless
            `SinkContext.enough_refused` says that some are enough.
    """

    rows: Mapping[int, RowRefusal]


Outcome = Ok | Retryable | Fatal | Refused
OK = Ok()


class Stage(Protocol):
    """Writer of one task attempt's rows for one sink. Lives in an executor and is used by one thread."""

    def write(self, batch: pa.RecordBatch) -> None:
        """Takes a batch of at least one row, with the schema of the `StageContext`."""

    def finish(self) -> Any:
        """Makes all rows durable, but invisible to readers.

        Returns:
            A receipt: a small picklable object that says what was staged. `prepare` receives it, in
            `Staged.receipts`, if Spark accepts this attempt of the task.
        """

    def discard(self) -> None:
        """Deletes what was written, after the task failed. Nobody calls this when the process dies."""


@dataclass(frozen=True)
class StageContext:
    """What a sink knows about the task attempt for which it stages rows.

    Attributes:
        batch_id: Spark's batch id.
        task_attempt_id: unique hex id of the task attempt, for use in file names.
        schema: schema of the rows.
        parts: creates a `Stage` that uses this package's own staging, together with the rows for Kafka: the
            rows go to an Arrow file in the checkpoint or, if they are few, into the task's commit message.
        checked: the rules that the task has checked (`TwoPhaseSink.row_rules`): those that the driver knew.
            They may be a minute old, and there are none if the target could not be made ready.
    """

    batch_id: int
    task_attempt_id: str
    schema: pa.Schema
    parts: Callable[[], Stage]
    checked: Sequence[RowRule] = ()


class Staged(Protocol):
    """Rows of one batch for one sink, on the driver. Contains only task attempts that Spark accepted."""

    @property
    def rows(self) -> int:
        """Number of rows; at least one."""

    @property
    def schema(self) -> pa.Schema:
        """Schema of all rows."""

    @property
    def receipts(self) -> Sequence[Any]:
        """Return values of `Stage.finish`, in the order of the tasks."""

    def batches(self) -> Iterator[pa.RecordBatch]:
        """Reads the rows, for a sink that uses `StageContext.parts` to stage. May be called repeatedly.

        The rows of each task come in the order in which `Stage.write` took them, and the tasks in the order
        of `receipts`. `Refused` counts the rows in this order, also if the sink stages them elsewhere.
        """


@dataclass(frozen=True)
class SinkContext:
    """What a sink knows about the query that it belongs to.

    Attributes:
        name: name of the sink in the query (option ``sinks``).
        application_id: application id of the query.
        cluster_id: Kafka's id of the cluster that commits the query's transactions.
        store: folder in the query's checkpoint for durable notes and rows, for a sink whose external system
            cannot hold prepared work itself. None in executors, and without a checkpoint.
        secrets: of the sink's options, for the texts of the external system.
        enough_refused: the number of refused rows after which `prepare` may stop to look for more, because
            they fail the batch (``onInvalidRecord=fail``) and an error shows no more of them. None if
            `prepare` must find all.
    """

    name: str
    application_id: str
    cluster_id: str
    store: NotesFolder | None = None
    secrets: Secrets = field(default=NO_SECRETS, repr=False)
    enough_refused: int | None = None

    def txn(self, sequence: int, attempt: str, digest: str = "") -> SinkTxn:
        """Returns an id of this sink."""
        cluster = cluster_hash(self.cluster_id)
        return SinkTxn(self.application_id, cluster, self.name, sequence, attempt, digest)

    def own(self, text: str) -> SinkTxn | None:
        """Parses an id; returns None if the text is none, or one of another sink, query or cluster."""
        found = SinkTxn.parse(text)
        return found if found is not None and self.owns(found) else None

    @property
    def owner(self) -> str:
        """`SinkTxn.owner` of this sink's ids, for folders, keys and properties."""
        return self.txn(0, "").owner

    def owns(self, txn: SinkTxn) -> bool:
        """Returns whether this sink of this query, on this cluster, prepared the id."""
        return txn == self.txn(txn.sequence, txn.attempt)


class TwoPhaseSink(ABC):
    """Base class of sinks. Derive from it to write micro-batches to an external system of your own.

    An instance must be picklable until it is opened. Each process that uses the sink opens it once.

    On the driver, one thread makes all calls, one after the other. If a call neither returns nor reads staged
    rows before its deadline, the driver abandons it (`sinks.watched`) and treats the sink as down.

    A call that returns an `Outcome` may also raise. The driver treats `errors.RetriableError`, `OSError`,
    `ConnectionError` and `TimeoutError` as `Retryable`. It treats any other exception as `Fatal`, except in
    `commit`, where it counts as `Retryable`.

    Attributes:
        OPTIONS: options that the sink accepts as ``sink.<name>.<option>``. `from_options` receives their
            values.
        context: the query that the sink belongs to; set by `open`.
    """

    OPTIONS: ClassVar[tuple[SinkOption, ...]] = ()
    context: SinkContext

    @classmethod
    def from_options(cls, options: Mapping[str, Any]) -> TwoPhaseSink:
        """Creates the sink from its options, without connecting to anything.

        The default passes each option to ``__init__`` under its name, with dots replaced by underscores.

        Args:
            options: parsed value of every option in `OPTIONS`, by name.

        Raises:
            InvalidOptionError: if two options contradict each other.
        """
        return cls(**{name.removesuffix(".*").replace(".", "_"): value for name, value in options.items()})

    def open(self, context: SinkContext) -> None:
        """Prepares the sink for use in this process. Called before any other call; must not connect yet."""
        self.context = context

    def close(self) -> None:
        """Releases connections and other resources of this process. Prepared work stays prepared."""
        return

    def target(self) -> str | None:
        """Identifies the folder, table or URL that the sink writes to, without connecting to it.

        The driver refuses a query in which two sinks have the same target. It may show the text, so the text
        must not contain a password.

        Returns:
            The same text for the same target, however the options spell it; None if the target is unknown.
        """
        return None

    def risks(self) -> Sequence[str]:
        """Describes the cases in which `commit` may refuse a batch that `prepare` accepted.

        The driver calls this after `recover`, before it commits the first batch of a run, and logs each case
        as a warning.
        """
        return ()

    def check(self, schema: pa.Schema, deadline: Deadline) -> None:
        """Checks that the sink can write rows of this schema, without any effect on its target. Optional.

        A query calls this when it is started, so that mistakes are found before the first batch. Check what
        the target tells without being changed: that it can be reached, that it accepts the login, that the
        table or the folder above it exists and may be written, and that the table has the columns.

        Anybody may call this at any time, also while the query runs in another process. So it must not write,
        create, lock or fence anything. The sink is open, and its `context` has no `store`; the application id
        and the cluster id in it are placeholders if they are not known yet.

        Args:
            schema: schema of the rows.
            deadline: time limit of the call.

        Raises:
            OperatorError: if the sink cannot write such rows until somebody changes something.
            RetriableError, OSError: if the target cannot be reached now.
        """
        return

    def make_ready(self, schema: pa.Schema, deadline: Deadline) -> None:
        """Makes the target ready for rows of this schema, on the driver, before the first batch of a run.

        This is where a sink creates its table or folder. The default calls `check`.

        Raises:
            InvalidSchemaError, InvalidOptionError: if the sink cannot accept such rows.
            RetriableError, OSError: if the target cannot be reached now. The driver calls again with the
                first batch.
        """
        self.check(schema, deadline)

    def row_rules(self, schema: pa.Schema, deadline: Deadline) -> Sequence[RowRule]:
        """Returns the rules for rows that follow from the schema of the target, for the tasks to check.

        The driver calls this after `make_ready`, and again about once a minute while the query runs, so that
        a column that somebody widened accepts longer values soon: read the schema anew. A row that breaks a
        rule reaches no sink. The rules must not be stricter than the target; what they do not catch,
        `prepare` may still refuse.

        Args:
            schema: schema of the rows.
            deadline: time limit of the call.

        Raises:
            RetriableError, OSError: if the target cannot be reached now. The driver then uses the rules that
                it knows.
        """
        return ()

    @property
    def refuses_rows(self) -> bool:
        """Whether `prepare` may return `Refused`. The driver asks after `make_ready`, or if that failed.

        The tasks then also keep all columns of the rows, so that the driver can stage them again. If a sink
        for which this is false returns `Refused`, the query stops with an error that names the rows.
        """
        return False

    def stage(self, context: StageContext) -> Stage:
        """Returns a writer for the rows of one task attempt. Called in an executor, if there are rows.

        Should not connect to the external system unless staging needs it. The default stages in the query's
        checkpoint.
        """
        return context.parts()

    @abstractmethod
    def prepare(self, txn: SinkTxn, staged: Staged, deadline: Deadline) -> Outcome:
        """Makes sure that `commit` can succeed whichever process dies. Readers must not see the rows yet.

        The staged rows must stay usable: after an abort, the driver may prepare them under another id.

        Returns:
            `Refused` only if `refuses_rows` is true, and not for rows that another try may accept.
        """

    @abstractmethod
    def commit(self, txn: SinkTxn, deadline: Deadline) -> Outcome:
        """Makes all rows of a prepared batch visible at once.

        Must work from the id and its digest alone, because the call may come from another process than
        `prepare`. If what the sink finds has another digest, it must change nothing and return `Fatal`.
        """

    @abstractmethod
    def abort(self, txn: SinkTxn, deadline: Deadline) -> Outcome:
        """Undoes `prepare`, even one that did not complete. Must not change a committed batch."""

    @abstractmethod
    def recover(self, deadline: Deadline) -> Sequence[SinkTxn]:
        """Lists every id that this sink of this query prepared and did not completely commit or abort.

        It lists nothing of another query, cluster or sink (`SinkContext.owns`). The list includes ids whose
        `prepare` did not complete. It must come from the external system (or from `SinkContext.store`, if the
        sink keeps prepared work there): an incomplete list loses a batch.
        """

    def tidy(self, batch_id: int, deadline: Deadline) -> None:
        """Deletes what tasks staged for this batch and earlier ones, after all sinks committed the batch.

        The driver only logs a failure. Must not delete anything that is prepared: batch ids go back when
        somebody restores a checkpoint, and a driver from before the restore may still make this call.

        Args:
            batch_id: Spark's batch id, under which tasks staged their rows.
            deadline: time limit of the call.
        """
        return
