"""How much uncommitted state may be in memory, and what follows from it for the next micro-batch.

Kafka Streams commits early when its buffer is full (KIP-892). A micro-batch cannot: its offsets are written
down before it runs, and it is one transaction. So over the limit the *next* batch is made smaller, and far
over it the batch fails, naming how much smaller it must be.
"""

from __future__ import annotations

import math
import threading
from typing import Protocol

from kafka_eos_source.errors import InvalidOptionError, UncommittedBytesError


class Writer(Protocol):
    """One that shares the limit; told its share whenever that changes."""

    def set_share(self, soft_bytes: int | None, hard_bytes: int | None) -> None: ...


class UncommittedBudget:
    """One limit for all writers of a process, shared evenly.

    Args:
        max_bytes: ``statestore.uncommitted.max.bytes``; -1 = none.
        hard_factor: a writer fails over its share times this.

    Raises:
        InvalidOptionError: 0, or less than -1.
    """

    def __init__(self, max_bytes: int, hard_factor: int = 4) -> None:
        if max_bytes < 1 and max_bytes != -1:
            raise InvalidOptionError(
                f"statestore.uncommitted.max.bytes is {max_bytes}; expected at least 1, or -1 for none"
            )
        self._max_bytes = max_bytes
        self._hard_factor = hard_factor
        self._writers: list[Writer] = []
        self._lock = threading.Lock()

    def join(self, writer: Writer) -> None:
        with self._lock:
            self._writers.append(writer)
            self._tell()

    def leave(self, writer: Writer) -> None:
        """Also when it never joined."""
        with self._lock:
            self._writers = [other for other in self._writers if other is not writer]
            self._tell()

    def _tell(self) -> None:
        for writer in self._writers:
            if self._max_bytes == -1:
                writer.set_share(None, None)
            else:
                share = max(1, self._max_bytes // len(self._writers))
                writer.set_share(share, share * self._hard_factor)


def too_many_bytes(store: str, staged_bytes: int, soft_bytes: int, hard_bytes: int) -> UncommittedBytesError:
    factor = max(2, math.ceil(staged_bytes / soft_bytes))
    return UncommittedBytesError(
        f"store {store} has staged {staged_bytes} bytes in one micro-batch; the share of "
        f"statestore.uncommitted.max.bytes is {soft_bytes}, and {hard_bytes} is where a batch fails",
        fix=f"make micro-batches at least {factor} times smaller (maxOffsetsPerTrigger), or raise the limit",
    )


def rows_that_fit(rows: int, staged_bytes: int, limit_bytes: int | None) -> int | None:
    """How many input rows the next micro-batch may have, judged by the last one; None = any number.

    Args:
        rows: of the last batch.
        staged_bytes: what it staged.
        limit_bytes: what may be staged; None = any.
    """
    if limit_bytes is None or staged_bytes <= limit_bytes or rows <= 0:
        return None
    return max(1, rows * limit_bytes // staged_bytes)
