"""Base classes of the sinks for table formats (Delta Lake, Iceberg).

At stage, executors write data files into the table's folder; no version of the table refers to them yet. At
prepare, the driver lists the files in a note in the query's checkpoint. At commit, one new version of the
table adds the files and records the id of the batch. The sink checks before each try whether the table
already contains the id. If another writer commits in between, the format refuses the new version, and the
sink checks again.

After a restart, a sink believes the table about what is committed, and the note about the files only if the
note's digest is in the token in Kafka.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Generic, TypeVar

import pyarrow as pa

from kafka_eos_source import option_values as values
from kafka_eos_source.errors import (
    InvalidOptionError,
    InvalidSchemaError,
    SinkRetryableError,
)
from kafka_eos_source.runtime import failpoints
from kafka_eos_source.runtime.deadline import Deadline, Pauses, retry
from kafka_eos_source.sinks.contract import OK, Fatal, Ok, Outcome, SinkTxn, Staged, TwoPhaseSink
from kafka_eos_source.sinks.manifest import NotesFolder
from kafka_eos_source.sinks.row_checks import RowRule, check_rules
from kafka_eos_source.sinks.sink_options import SinkOption

#: Default size of the rows that a task buffers. A Python worker has little memory, but files should have at
#: least 10 MB.
BUFFER_BYTES = 128 << 20
#: Time limit for a task to load the table.
STAGE_SECONDS = 60.0
#: Values of the option ``schema.evolution``.
FAIL, ADD = "fail", "add"
#: Options of every sink for a table format.
CREATE = SinkOption(
    "create", values.boolean, True, "boolean", "Whether to create the table if it does not exist."
)
BUFFER = SinkOption(
    "buffer.bytes",
    values.integer(1 << 20),
    BUFFER_BYTES,
    "bytes",
    "Size of the rows that a task buffers in memory before it writes a file.",
)

_RESTORE = (
    "restore the file, or add the rows of that batch to the table by hand (Kafka has them). Configure the "
    "table's clean-up to spare files that are younger than the longest possible downtime of the query."
)
_FIRST_PAUSE_SECONDS, _LONGEST_PAUSE_SECONDS = 0.05, 2.0

T = TypeVar("T")


def fitting_table(
    evolve: Callable[[], tuple[T, str]],
    conflict: type[Exception],
    name: str,
    evolution: str,
    deadline: Deadline,
) -> T:
    """Returns a table that can hold the rows of the frame.

    Args:
        evolve: loads the table, evolves it if allowed, and says why it cannot hold the rows ("" if it can).
        conflict: raised by ``evolve`` if another writer changed the table meanwhile; it is called again.
        name: the table, for errors.
        evolution: `FAIL` or `ADD`.
        deadline: limit for the retries.

    Raises:
        SinkRetryableError: if other writers kept changing the table until the deadline.
        InvalidSchemaError: if the table cannot hold the rows.
    """
    table, problem = retry(
        evolve,
        conflict,
        Pauses(deadline, 0.0),
        timed_out=lambda error: SinkRetryableError(
            f"other writers kept changing the schema of the {name} until the deadline: {error}"
        ),
    )
    if problem:
        raise unfit(name, problem, evolution)
    return table


def unfit(name: str, problem: str, evolution: str) -> InvalidSchemaError:
    """Returns the error for a table that cannot hold the rows; the arguments are those of `fitting_table`."""
    return InvalidSchemaError(
        f"the {name} cannot hold the frame: {problem}",
        fix="cast columns, or exclude them with sink.<name>.columns"
        + ("." if evolution == ADD else "; or set schema.evolution=add to add columns."),
    )


class BufferedStage(ABC):
    """`contract.Stage` that buffers rows and writes data files when the buffer is full.

    Args:
        schema: schema of the rows.
        rules: rules of the table for rows that the task has not checked.
        buffer_bytes: size of the buffered rows at which files are written.
    """

    def __init__(self, schema: pa.Schema, rules: Iterable[RowRule], buffer_bytes: int) -> None:
        self._row_schema = schema
        self._rules = tuple(rules)
        self._buffer_bytes = buffer_bytes
        self._buffer: list[pa.RecordBatch] = []
        self._buffered_bytes = 0

    def write(self, batch: pa.RecordBatch) -> None:
        check_rules(self._rules, batch)
        self._buffer.append(batch)
        self._buffered_bytes += batch.nbytes
        if self._buffered_bytes >= self._buffer_bytes:
            self.flush()

    def flush(self) -> None:
        """Writes the buffered rows to files, if there are any."""
        if self._buffer:
            self.write_files(self._take())

    def discard(self) -> None:
        self._buffer = []
        self.delete_files()

    def _take(self) -> pa.Table:
        rows = pa.Table.from_batches(self._buffer, self._row_schema)
        self._buffer, self._buffered_bytes = [], 0
        return rows

    @abstractmethod
    def write_files(self, rows: pa.Table) -> None:
        """Writes rows to data files, which no version of the table contains yet."""

    @abstractmethod
    def delete_files(self) -> None:
        """Deletes the written files. If the process dies instead, the table's clean-up deletes them."""

    @abstractmethod
    def finish(self) -> Any:
        """Calls `flush`, and returns the receipt."""


class TableFormatSink(TwoPhaseSink, Generic[T]):
    """Sink for tables that a library represents as ``T``.

    A subclass writes the files (`stage`), and implements the operations on its kind of table below.
    """

    #: Failpoint between the commit of the table and the removal of the note.
    failpoint_after_commit: str
    #: Page of the documentation, for errors.
    docs_page: str

    @property
    @abstractmethod
    def label(self) -> str:
        """Name of the table, for messages."""

    @abstractmethod
    def load(self) -> T | None:
        """Loads the current version of the table; None if the table does not exist."""

    @abstractmethod
    def is_committed(self, table: T, txn: SinkTxn) -> bool:
        """Returns whether the table contains the batch that was prepared under the id."""

    def was_committed(self, table: T, txn: SinkTxn) -> bool:
        """Returns whether the table contains the batch, even if the sink has committed later ones since.

        Called only if no note of the id exists. The search may be slower than `is_committed`.
        """
        return self.is_committed(table, txn)

    @abstractmethod
    def note(self, receipts: Sequence[Any]) -> Mapping[str, Any]:
        """Returns the note that lists the files of some task attempts, as JSON."""

    @abstractmethod
    def read_note(self, note: Mapping[str, Any]) -> Mapping[str, Any]:
        """Validates a note, and returns it.

        Raises:
            ValueError, KeyError, TypeError: if it is none, or names files that no task of this sink wrote.
        """

    @abstractmethod
    def incompatibility(self, table: T, note: Mapping[str, Any]) -> str:
        """Describes why the files of a note no longer fit the table; empty if they fit."""

    @abstractmethod
    def missing_file(self, table: T, note: Mapping[str, Any]) -> str:
        """Describes the first data file of a note that is missing or has another size; empty if none is."""

    @abstractmethod
    def publish(self, table: T, txn: SinkTxn, note: Mapping[str, Any]) -> Exception | None:
        """Commits a new version of the loaded table that adds the files of the note.

        Returns:
            The conflict, if another writer committed since the table was loaded; otherwise None.
        """

    def prepare(self, txn: SinkTxn, staged: Staged, deadline: Deadline) -> Outcome:
        notes = self.notes()
        table = self.load()
        if table is None:
            return Fatal(f"{self.label} was deleted", "create the table again, then restart the query.")
        if self.is_committed(table, txn):
            return OK
        if (digest := notes.digest(str(txn))) is not None:
            return Ok(digest)
        whole = self.note(staged.receipts)
        for note in (*(self.note([each]) for each in staged.receipts), whole):
            if incompatibility := self.incompatibility(table, self.read_note(note)):
                return Fatal(incompatibility, "restart the query; it then stages the batch again.")
        if missing := self.missing_file(table, self.read_note(whole)):
            return Fatal(
                missing, "use a file system that driver and executors share, then restart the query."
            )
        return Ok(notes.put(str(txn), {**whole, "rows": staged.rows}))

    def commit(self, txn: SinkTxn, deadline: Deadline) -> Outcome:
        notes = self.notes()
        pauses = Pauses(deadline, _FIRST_PAUSE_SECONDS, _LONGEST_PAUSE_SECONDS, jitter=0.5)
        while True:
            # Read the note before the table: another process that commits the batch removes the note after
            # the table contains the files.
            note = notes.get(str(txn), txn.digest, self.read_note)
            table = self.load()
            if table is not None and self.is_committed(table, txn):
                break
            if note is None:
                if table is not None and self.was_committed(table, txn):
                    return OK
                return Fatal(f"nothing is prepared under {txn} for {self.label}")
            if table is None:
                return Fatal(f"{self.label} was deleted, and with it the data of {txn}")
            incompatibility = self.incompatibility(table, note)
            if incompatibility:
                return Fatal(incompatibility, f"see {self.docs_page}, Changes of the table.")
            # a clean-up of the table may have deleted files that no version referred to yet
            missing = self.missing_file(table, note)
            if missing:
                table = self.load()
                if table is not None and self.is_committed(table, txn):
                    break  # another process just committed the batch, and a compaction replaced its files
                return Fatal(missing, _RESTORE)
            conflict = self.publish(table, txn, note)
            if conflict is None:
                break
            if pauses.expired:
                raise SinkRetryableError(
                    f"other writers kept committing to {self.label} until the deadline: {conflict}"
                )
            pauses.wait()
        failpoints.reach(self.failpoint_after_commit)
        notes.remove(str(txn))
        return OK

    def abort(self, txn: SinkTxn, deadline: Deadline) -> Outcome:
        # the data files stay, because the driver may prepare them again under another id
        self.notes().remove(str(txn))
        return OK

    def recover(self, deadline: Deadline) -> Sequence[SinkTxn]:
        notes = self.notes()
        found = [txn for name in notes.names() if (txn := self.context.own(name)) is not None]
        table = self.load() if found else None
        prepared = []
        for txn in sorted(found):
            if table is not None and self.is_committed(table, txn):
                notes.remove(str(txn))  # the process was killed between the commit and this removal
            else:
                prepared.append(txn)
        return prepared

    def notes(self) -> NotesFolder:
        """Returns the folder that contains the notes of prepared batches.

        Raises:
            InvalidOptionError: if the location of the query's checkpoint is unknown.
        """
        if self.context.store is None:
            raise InvalidOptionError(
                f"sink {self.context.name!r} lists prepared files in the query's checkpoint, but the option "
                "'checkpointLocation' is not set.",
                fix="set .option('checkpointLocation', …) on the writer.",
            )
        return self.context.store
