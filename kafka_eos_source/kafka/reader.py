"""Reads the keys and values of one partition as Arrow arrays, which refer to the C kernel's memory.

Also the pool of consumers that stay open between the tasks of a process.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from kafka_eos_source.errors import DataLossError, RecordsDamagedError, UnavailableError
from kafka_eos_source.kafka.failure import unreachable
from kafka_eos_source.kafka.kernel import KernelMessages
from kafka_eos_source.model import TopicPartition
from kafka_eos_source.runtime.deadline import Deadline, Pauses

if TYPE_CHECKING:
    from kafka_eos_source.kafka.fetch import RangeConsumer

_BOUNDS_SECONDS = 10.0
_WAIT_SECONDS = 0.5
#: Pause before a broker is asked again for an offset that its log should have.
_PAUSE_SECONDS = 0.1


_NO_KEYS = pa.nulls(0, pa.binary())


@dataclass(frozen=True)
class LogEnds:
    """The offsets of one partition's log.

    Attributes:
        earliest: the first offset in the log.
        stable: the last stable offset: ``read_committed`` consumers read up to it.
        end: the high watermark; above ``stable`` while a transaction is open in the partition.
    """

    earliest: int
    stable: int
    end: int


@dataclass(frozen=True, slots=True)
class Records:
    """Records in offset order.

    Attributes:
        offsets: offset of each record, int64.
        keys, values: binary arrays; a null value is a tombstone.
        position: the next offset to read. No record before it follows.
    """

    offsets: npt.NDArray[np.int64]
    keys: pa.BinaryArray
    values: pa.BinaryArray
    position: int

    def __len__(self) -> int:
        return len(self.offsets)

    def before(self, end: int) -> Records:
        """Returns the records with offsets below ``end``."""
        if self.position <= end:
            return self
        kept = slice(int(np.searchsorted(self.offsets, end)))
        return Records(self.offsets[kept], self.keys[kept], self.values[kept], end)

    def parts(self, at_most: int) -> Iterator[Records]:
        """Yields the records in parts of at most ``at_most``; one empty part if there are no records."""
        for first in range(0, max(1, len(self)), at_most):
            past = first + at_most
            position = int(self.offsets[past]) if past < len(self) else self.position
            part = slice(first, past)
            yield Records(self.offsets[part], self.keys[part], self.values[part], position)


@dataclass(slots=True)
class Pulled:
    """What one call of `ChangelogReader.take` returned.

    Attributes:
        records: None = nothing arrived. There may be no record among what arrived, only control records.
        log_end: set if the log was read to its end, which is this offset; control records count.
        out_of_range: whether the position is not, or no longer, in the log.
        gone: whether the cluster does not know, or no longer knows, the partition.
    """

    records: Records | None = None
    log_end: int | None = None
    out_of_range: bool = False
    gone: bool = False


class ChangelogReader:
    """Reads one partition through a consumer that is already open. Not thread-safe.

    Args:
        consumer: a ``read_committed`` consumer, from `state.changelog.topic.changelog_client`.
        tp: the partition.
    """

    def __init__(self, consumer: RangeConsumer, tp: TopicPartition) -> None:
        self._consumer = consumer
        self._tp = tp
        self._position = 0

    @property
    def last_complaint(self) -> str:
        """What the client reported last; the likely reason if no records arrive."""
        return self._consumer.last_complaint

    def start(self, position: int, end: int | None = None) -> None:
        """Starts reading at this offset, whatever was read before; ``end``: nothing from it on is wanted."""
        self._position = position
        ends = None if end is None else {self._tp: end}
        self._consumer.assign({self._tp: position}, ("key", "value"), ends)

    def stop(self) -> None:
        """Stops fetching."""
        self._consumer.release()

    def take(self, wait_seconds: float, end: int) -> Pulled:
        """Returns what has arrived; if nothing has, waits for records or an event.

        Args:
            wait_seconds: longest wait.
            end: records at this offset and above are left out.

        Raises:
            AuthorizationError: if brokers refuse the credentials, or an ACL on the topic is missing.
            RecordsDamagedError: if the next record batch is damaged.
        """
        taken = self._consumer.take(wait_seconds)
        for damage in taken.damaged:
            raise RecordsDamagedError(str(damage), fix=f"{damage.repair}.")
        pulled = Pulled(
            log_end=taken.log_ends.get(self._tp),
            out_of_range=self._tp in taken.out_of_range,
            gone=self._tp in taken.gone,
        )
        position = taken.reached.get(self._tp)
        if position is not None:
            position = max(position, self._position)
            pulled.records = self._records(taken.messages, position).before(end)
            self._position = position
        return pulled

    def _records(self, messages: KernelMessages | tuple[()], position: int) -> Records:
        """Returns messages without those that were not asked for: a record batch may begin before them."""
        if not messages:
            return Records(np.zeros(0, np.int64), _NO_KEYS, _NO_KEYS, position)
        wanted = messages[int(np.searchsorted(messages.offsets, self._position)) :]
        return Records(wanted.offsets, wanted.keys, wanted.values, position)

    def read(
        self, start: int, end: int, deadline: Deadline, *, if_gone: str, skips_deleted: bool = True
    ) -> Iterator[Records]:
        """Yields the records from offset ``start`` to ``end`` (excluded), in offset order.

        Args:
            start, end: offsets; ``end`` is not above the last stable offset.
            deadline: if no records arrive any more.
            if_gone: fix for the error if the topic was deleted.
            skips_deleted: whether records that the brokers deleted meanwhile are skipped, as compaction does.

        Raises:
            UnavailableError: if the topic was deleted, or nothing arrives before ``deadline``.
            DataLossError: if records were deleted that may not be skipped.
            RecordsDamagedError: if a record batch is damaged.
            AuthorizationError: if the principal may not read the topic.
        """
        if start >= end:
            return
        position, missing, pauses = start, "", Pauses(deadline, _PAUSE_SECONDS)
        self.start(position, end)
        try:
            while position < end:
                pulled = self.take(min(_WAIT_SECONDS, deadline.remaining_seconds()), end)
                if pulled.gone:
                    raise UnavailableError(
                        f"partition {self._tp} is gone, because the topic was deleted.", fix=if_gone
                    )
                if pulled.records is not None:
                    position, missing = pulled.records.position, ""
                    yield pulled.records
                if pulled.log_end is not None and pulled.log_end >= end:
                    return  # only control records were left
                if pulled.out_of_range:
                    low, high = self.readable(deadline)
                    if position >= low:  # the leader that was asked is outdated, or the log was cut
                        missing = f"offset {position} is not in the log, which ends at offset {high}"
                        pauses.wait(partial(self._silent, deadline, missing))
                    elif skips_deleted:
                        position = low
                    else:
                        raise DataLossError(
                            f"records of {self._tp} from offset {position} on were deleted.", fix=if_gone
                        )
                    self.start(position, end)
                elif pulled.records is None and deadline.expired:
                    raise self._silent(deadline, missing or self.last_complaint or "nothing arrives")
        finally:
            self.stop()

    def _silent(self, deadline: Deadline, why: str) -> UnavailableError:
        return unreachable(
            self._consumer.cluster.bootstrap, deadline.budget_seconds * 1000, f"reading {self._tp}: {why}"
        )

    def readable(self, deadline: Deadline) -> tuple[int, int]:
        """Returns the first offset in the log and the last stable offset, as they are now.

        Raises:
            UnavailableError: if no broker answers before ``deadline``, or the partition does not exist.
            AuthorizationError: if the principal may not read the topic.
        """
        return self._consumer.log_bounds(self._tp, deadline)

    def ends(self) -> LogEnds:
        """Returns all ends of the log.

        Raises:
            UnavailableError: if no broker answers, or the partition does not exist.
        """
        cluster, deadline = self._consumer.cluster, Deadline.after_seconds(_BOUNDS_SECONDS)

        def ask() -> LogEnds:
            earliest = cluster.offsets([self._tp], deadline, earliest=True)
            end = cluster.offsets([self._tp], deadline)
            # the stable offset last: else records that arrive in between would look like an open transaction
            stable = cluster.offsets([self._tp], deadline, committed=True)
            return LogEnds(earliest[self._tp], stable[self._tp], end[self._tp])

        return cluster.retried(f"looking up the offsets of {self._tp}", deadline, ask)


# -- consumers that stay open -------------------------------------------------------------------

#: Consumers with the same properties are interchangeable.
_Key = frozenset[tuple[str, str]]


@dataclass(slots=True)
class _Idle:
    consumer: RangeConsumer
    since: float


class ConsumerPool:
    """Idle consumers of this process, by configuration.

    Spark reuses a Python worker for many tasks, so a consumer that stays connected saves each small batch the
    TCP, TLS and metadata round trips. Positions do not survive a task: every task assigns its own ranges, so
    records that were prefetched for one batch cannot appear in the next.

    A worker runs one task at a time, so there is rarely more than one idle consumer. The bound matters to a
    process that serves many queries in turn. A forked child process must neither use nor close the
    connections of its parent, which both processes would then use. It keeps references to them.

    Args:
        capacity: the number of idle consumers to keep.
        idle_seconds: consumers that were idle for longer are closed at the next `borrow` (5 min, like
            ``spark.kafka.consumer.cache.timeout``).
    """

    def __init__(self, capacity: int = 4, idle_seconds: float = 300.0) -> None:
        self._capacity = capacity
        self._idle_seconds = idle_seconds
        self._idle: list[tuple[_Key, _Idle]] = []
        self._pid = os.getpid()
        self._of_parent: list[object] = []

    @contextmanager
    def borrow(self, conf: Mapping[str, str]) -> Iterator[RangeConsumer]:
        """Lends a consumer; takes it back if the block succeeds, closes it if the block fails.

        Args:
            conf: the properties of the consumer; see `RangeConsumer`.
        """
        # the import takes 0.1 s, which processes that only plan reads need not spend
        from kafka_eos_source.kafka.fetch import RangeConsumer

        self._after_fork()
        self._close_stale()
        key = frozenset(conf.items())
        consumer = self._pop(key) or RangeConsumer(conf)
        sound = False
        try:
            yield consumer
            sound = True
        except GeneratorExit:
            sound = True  # Spark stopped the task early, for example because of a LIMIT
            raise
        finally:
            if sound:
                consumer.release()
                self._idle.append((key, _Idle(consumer, time.monotonic())))
                self._shrink(self._capacity)
            else:
                consumer.close()

    def close(self) -> None:
        """Closes all idle consumers."""
        self._after_fork()
        self._shrink(0)

    def __len__(self) -> int:
        return len(self._idle)

    def _pop(self, key: _Key) -> RangeConsumer | None:
        for index in range(len(self._idle) - 1, -1, -1):
            if self._idle[index][0] == key:
                return self._idle.pop(index)[1].consumer
        return None

    def _close_stale(self) -> None:
        before = time.monotonic() - self._idle_seconds
        while self._idle and self._idle[0][1].since < before:
            self._idle.pop(0)[1].consumer.close()

    def _shrink(self, to: int) -> None:
        while len(self._idle) > to:
            self._idle.pop(0)[1].consumer.close()

    def _after_fork(self) -> None:
        if self._pid != os.getpid():
            self._of_parent.extend(self._idle)
            self._idle.clear()
            self._pid = os.getpid()


#: The pool of this process.
POOL = ConsumerPool()
