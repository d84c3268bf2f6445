"""What the sinks of table formats share: data files at stage, a note at prepare, one commit of the table.

Executors write the files into the table's folder, where no version of the table knows them. The note in the
query's checkpoint says which they are. The table itself says which batches it has: it is asked before each
commit, and a commit is refused by the format if somebody else's came in since; then it is asked again.
"""

from __future__ import annotations

import itertools
import random
import threading
from abc import abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any, Generic, TypeVar

from kafka_eos_source.errors import InvalidOptionError, SinkRetryableError
from kafka_eos_source.runtime import failpoints
from kafka_eos_source.runtime.deadline import Deadline
from kafka_eos_source.sinks.contract import OK, Fatal, Outcome, SinkTxn, TwoPhaseSink
from kafka_eos_source.sinks.notes_folder import NotesFolder

#: Of rows that a task holds: a Python worker has little memory, and a file wants to be of 10 MB and more.
HELD_BYTES = 128 << 20
#: For a task to look at the table.
STAGE_SECONDS = 60.0

_RESTORE = (
    "restore the file, or bring the rows of that batch to the table by hand (Kafka has them); let clean-up "
    "spare files that are younger than the longest time that a query may be down with a batch in Kafka."
)
_FIRST_PAUSE_SECONDS, _LONGEST_PAUSE_SECONDS = 0.05, 2.0

T = TypeVar("T")


class TableFormatSink(TwoPhaseSink, Generic[T]):
    """A sink whose table is a ``T`` of its library.

    A subclass writes the files (`stage`), notes them (`prepare`), and says of its tables what is asked below.
    """

    #: Reached when the table has the batch, and the note still is there.
    after_commit: str
    #: Its documentation, for errors.
    page: str

    @property
    @abstractmethod
    def label(self) -> str:
        """Names the table, for messages."""

    @abstractmethod
    def load(self) -> T | None:
        """The table as it is now; None = there is none."""

    @abstractmethod
    def is_committed(self, table: T, txn: SinkTxn) -> bool:
        """Whether the table has what was prepared under the id."""

    def was_committed(self, table: T, txn: SinkTxn) -> bool:
        """The same of an id that later ones may have followed; asked when nothing is noted under it."""
        return self.is_committed(table, txn)

    @abstractmethod
    def misfit(self, table: T, note: Mapping[str, Any]) -> str:
        """Why the files of a note do not fit the table any more; "" = they do."""

    @abstractmethod
    def absent(self, table: T, note: Mapping[str, Any]) -> str:
        """Names the first data file of a note that is not there as its task wrote it; "" = all are there."""

    @abstractmethod
    def publish(self, table: T, txn: SinkTxn, note: Mapping[str, Any]) -> Exception | None:
        """Makes the files part of the table, on top of what was loaded.

        Returns:
            The conflict, when somebody was quicker; None = they are.
        """

    def commit(self, txn: SinkTxn, deadline: Deadline) -> Outcome:
        notes = self.notes()
        pause = threading.Event()
        for attempt in itertools.count():
            # the note first: whoever ends the batch removes it after the table has the files
            note = notes.get(str(txn))
            table = self.load()
            if table is not None and self.is_committed(table, txn):
                break
            if note is None:
                if table is not None and self.was_committed(table, txn):
                    return OK
                return Fatal(f"nothing is prepared under {txn} for {self.label}")
            if table is None:
                return Fatal(f"{self.label} is gone, and with it the data of {txn}")
            changed = self.misfit(table, note)
            if changed:
                return Fatal(changed, f"see {self.page}, Changes of the table.")
            # a clean-up of the table may have deleted what no version of it named yet
            absent = self.absent(table, note)
            if absent:
                table = self.load()
                if table is not None and self.is_committed(table, txn):
                    break  # by another process at this moment, and rewritten since
                return Fatal(absent, _RESTORE)
            conflict = self.publish(table, txn, note)
            if conflict is None:
                break
            if deadline.expired:
                raise SinkRetryableError(f"others keep committing to {self.label}: {conflict}")
            wait = min(_FIRST_PAUSE_SECONDS * 2 ** min(attempt, 10), _LONGEST_PAUSE_SECONDS)
            pause.wait(min(wait * random.uniform(0.5, 1.5), deadline.remaining_seconds()))
        failpoints.reach(self.after_commit)
        notes.remove(str(txn))
        return OK

    def abort(self, txn: SinkTxn, deadline: Deadline) -> Outcome:
        # the data files stay: the batch may be prepared again from them
        self.notes().remove(str(txn))
        return OK

    def recover(self, deadline: Deadline) -> Sequence[SinkTxn]:
        notes = self.notes()
        parsed = (SinkTxn.parse(name) for name in notes.names())
        found = [each for each in parsed if each is not None and self.context.owns(each)]
        table = self.load() if found else None
        prepared = []
        for txn in sorted(found):
            if table is not None and self.is_committed(table, txn):
                notes.remove(str(txn))  # killed before it could note so
            else:
                prepared.append(txn)
        return prepared

    def notes(self) -> NotesFolder:
        """Where what is prepared is noted.

        Raises:
            InvalidOptionError: the query's checkpoint is not known.
        """
        if self.context.store is None:
            raise InvalidOptionError(
                f"sink {self.context.name!r} keeps the names of prepared files in the checkpoint, whose "
                "place it does not know.",
                fix="give .option('checkpointLocation', …) to the writer.",
            )
        return self.context.store
