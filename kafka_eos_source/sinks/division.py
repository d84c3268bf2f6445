"""Finds the rows that a system refuses by writing ever smaller ranges of a batch.

A system that refuses a batch rarely says which rows are to blame. The search tries ranges in the order of the
rows: a range that is accepted stays written, and the next one is twice as long; a range that is refused is
halved, down to a single row. So a row is refused because of the rows before it, never because of those after
it: of two rows that exclude each other, the first stays. The order of a batch's rows is the same after a
restart, and so is the result.

A batch of n rows with b refused ones takes about ``2 b log2(n / b)`` tries, which write some 3 n rows.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from kafka_eos_source.runtime.deadline import Deadline
from kafka_eos_source.sinks.contract import RowRefusal

#: Writes the rows from ``start`` to before ``stop``. Returns None if the system accepts them, else why it
#: refuses them; then nothing of the range is written.
Try = Callable[[int, int], RowRefusal | None]


class DivisionLimitError(Exception):
    """The search took too long, or too many tries.

    Attributes:
        refused: what was found until then.
    """

    def __init__(self, refused: dict[int, RowRefusal]) -> None:
        super().__init__(f"{len(refused)} refused rows were found")
        self.refused = refused


@dataclass
class Division:
    """One search, which may go through several batches.

    Attributes:
        deadline: when to give up.
        most_tries: after how many tries to give up; None = any number.
        refused: the refused rows that were found, by their number.
    """

    deadline: Deadline
    most_tries: int | None = None
    refused: dict[int, RowRefusal] = field(default_factory=dict)
    _tries: int = 0

    @classmethod
    def within(cls, deadline: Deadline, most_tries: int | None = None) -> Division:
        """Returns a search that leaves half of the time to what comes after it."""
        return cls(Deadline.after_seconds(deadline.remaining_seconds() / 2), most_tries)

    def run(self, count: int, attempt: Try, number: Callable[[int], int], *, refuses: bool = False) -> None:
        """Searches rows, and adds those that are refused to `refused`.

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
        while start < count:
            if refused_end is None or refused_end - start == 1:
                stop = min(count, start + size) if refused_end is None else refused_end
            else:
                stop = start + (refused_end - start) // 2
            why = self._try(attempt, start, stop)
            if why is None:
                if stop == refused_end:  # a single row, which is accepted alone
                    refused_end, size = None, 1
                start, size = stop, 2 * size
            elif stop - start > 1:
                refused_end = stop
            else:
                self.refused[number(start)] = why
                start, size, refused_end = stop, 1, None

    def _try(self, attempt: Try, start: int, stop: int) -> RowRefusal | None:
        if self.deadline.expired or self._tries == self.most_tries:
            raise DivisionLimitError(self.refused)
        self._tries += 1
        return attempt(start, stop)
