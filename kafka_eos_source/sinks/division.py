"""Finds the rows that a system refuses by writing ever smaller ranges of a batch.

A system that refuses a batch rarely says which rows are to blame. The search tries ranges in the order of the
rows: a range that is accepted stays written, and the next one is twice as long; a range that is refused is
halved, down to a single row, unless the system says which row it does not like. So a row is refused because
of the rows before it, never because of those after it: of two rows that exclude each other, the first stays.
The order of a batch's rows is the same after a restart, and so is the result.

Of a batch of n rows with b refused ones, each refused row takes about ``log2(n / b)`` tries, or four if the
system names rows. All tries together write some 3 n rows.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from kafka_eos_source.runtime.deadline import Deadline
from kafka_eos_source.sinks.contract import RowRefusal

#: Number of refused rows that an error shows.
_MOST_SHOWN = 3


@dataclass(frozen=True)
class RangeRefusal:
    """Why a system refuses a range of rows.

    Attributes:
        why: the cause; that of the row, if the range is a single one.
        suspect: the row of the range that the system names, counted from the start of the range; None if it
            names none. The search only tries this row first, because the system may be wrong.
    """

    why: RowRefusal
    suspect: int | None = None


#: Writes the rows from ``start`` to before ``stop``. Returns None if the system accepts them, else why it
#: refuses them; then nothing of the range is written.
Try = Callable[[int, int], RangeRefusal | None]


class DivisionLimitError(Exception):
    """The search took too long, or too many tries.

    Attributes:
        refused: the refused rows that were found until then.
        suffices: whether they suffice, because the search need not find all.
    """

    def __init__(self, refused: dict[int, RowRefusal], *, suffices: bool) -> None:
        super().__init__(f"{len(refused)} refused rows were found")
        self.refused = refused
        self.suffices = suffices

    @property
    def found(self) -> str:
        """How many refused rows were found, and the first ones, as text for people."""
        first = sorted(self.refused.items())[:_MOST_SHOWN]
        shown = "; ".join(
            f"row {number}: {each.column and f'column {each.column!r} '}{each.why}" for number, each in first
        )
        return f"{len(self.refused):,} were found until then{': ' if shown else ''}{shown}"


@dataclass
class Division:
    """One search, which may go through several batches.

    Attributes:
        deadline: when to give up.
        most_tries: after how many tries to give up; None = any number.
        enough: after how many refused rows to stop (`contract.SinkContext.enough_refused`); None = find all.
        refused: the refused rows that were found, by their number.
    """

    deadline: Deadline
    most_tries: int | None = None
    enough: int | None = None
    refused: dict[int, RowRefusal] = field(default_factory=dict)
    _tries: int = 0
    _accepted: int = 0

    @classmethod
    def within(cls, deadline: Deadline, most_tries: int | None = None, enough: int | None = None) -> Division:
        """Returns a search that leaves half of the time to what comes after it."""
        return cls(Deadline.after_seconds(deadline.remaining_seconds() / 2), most_tries, enough)

    @property
    def has_enough(self) -> bool:
        """Whether the search may stop, because enough refused rows were found."""
        return self.enough is not None and len(self.refused) >= self.enough

    def run(self, count: int, attempt: Try, number: Callable[[int], int], *, refuses: bool = False) -> None:
        """Searches rows, and adds those that are refused to `refused`, until they are enough.

        Args:
            count: how many rows there are.
            attempt: writes a range of them.
            number: the number under which a row is reported.
            refuses: whether it is known that the system refuses all of them together.

        Raises:
            DivisionLimitError: if the deadline has passed, or too many ranges were tried.
        """
        start, size = 0, max(1, count)
        refused_end = count if refuses else None  # the system refuses the rows from `start` to here together
        suspect: int | None = None
        while start < count and not self.has_enough:
            if refused_end is None:
                stop = min(count, start + size)
            elif suspect is not None and start <= suspect < refused_end:
                stop = suspect if suspect > start else start + 1
            else:
                stop = start + max(1, (refused_end - start) // 2)
            self.count_try()
            found = attempt(start, stop)
            if found is None:
                self._accepted += stop - start
                if stop == refused_end:  # a single row, which is accepted alone
                    refused_end = None
                if stop - 1 == suspect:  # the suspicion was wrong
                    suspect = None
                start, size = stop, 2 * size
            elif stop - start > 1:
                refused_end = stop
                suspect = None if found.suspect is None else start + found.suspect
            else:
                self.refused[number(start)] = found.why
                # about as many rows as there are between two refused ones
                start, size = stop, max(1, self._accepted // len(self.refused))
                refused_end = suspect = None

    def count_try(self) -> None:
        """Counts a range that is about to be tried.

        Raises:
            DivisionLimitError: if the deadline has passed, or too many ranges were tried.
        """
        if self.deadline.expired or self._tries == self.most_tries:
            suffices = self.enough is not None and bool(self.refused)
            raise DivisionLimitError(self.refused, suffices=suffices)
        self._tries += 1
