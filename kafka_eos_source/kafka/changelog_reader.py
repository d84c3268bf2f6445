"""Reads the keys and values of one changelog partition as Arrow arrays.

With the C kernel, the arrays refer to the kernel's memory. Its Python twin copies them from librdkafka's
messages, which takes twice the CPU time (0.8 µs per record of 110 bytes, including librdkafka's threads).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import pyarrow as pa
from confluent_kafka import Message

from kafka_eos_source.errors import DataLossError, RetriableError, UnavailableError
from kafka_eos_source.kafka.cluster_reader import ClusterReader, LogEnds
from kafka_eos_source.kafka.consumer import AssignedConsumer
from kafka_eos_source.kafka.failure import unreachable
from kafka_eos_source.kafka.kernel_messages import KernelMessages
from kafka_eos_source.model import TopicPartition
from kafka_eos_source.runtime.deadline import Deadline
from kafka_eos_source.runtime.retry import Pauses, retry

_BOUNDS_SECONDS = 10.0
_WAIT_SECONDS = 0.5

#: Messages per call where the client creates Python objects: more do not fit into the processor's cache,
#: fewer need more calls.
_TAKE_MESSAGES = 1_000


@dataclass(frozen=True, slots=True)
class Records:
    """Records in offset order.

    Attributes:
        offsets: offset of each record, int64.
        keys, values: binary arrays; a null value is a tombstone.
        position: the next offset to read.
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
        records: None = no records arrived.
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
        consumer: a ``read_committed`` consumer, from `state.changelog.committed.changelog_client`.
        tp: the partition.
    """

    def __init__(self, consumer: AssignedConsumer, tp: TopicPartition) -> None:
        self._consumer = consumer
        self._tp = tp
        self._position = 0

    @property
    def last_complaint(self) -> str:
        """What the client reported last; the likely reason if no records arrive."""
        return self._consumer.last_complaint

    def start(self, position: int) -> None:
        """Starts reading at this offset, whatever was read before."""
        self._position = position
        self._consumer.want(("key", "value"))
        self._consumer.assign({self._tp: position})

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
        """
        at_most = max(1, end - self._position) if self._consumer.drains else _TAKE_MESSAGES
        taken = self._consumer.take(at_most, wait_seconds)
        pulled = Pulled(
            log_end=taken.log_ends.get(self._tp),
            out_of_range=self._tp in taken.out_of_range,
            gone=self._tp in taken.gone,
        )
        if len(taken.messages):
            found = _records(taken.messages)
            self._position = found.position
            pulled.records = found.before(end)
        return pulled

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
            AuthorizationError: if the principal may not read the topic.
        """
        if start >= end:
            return
        position = start
        self.start(position)
        try:
            while position < end:
                pulled = self.take(min(_WAIT_SECONDS, deadline.remaining_seconds()), end)
                if pulled.gone:
                    raise UnavailableError(
                        f"partition {self._tp} is gone, because the topic was deleted.", fix=if_gone
                    )
                if pulled.records is not None:
                    position = pulled.records.position
                    yield pulled.records
                if pulled.log_end is not None and pulled.log_end >= end:
                    return  # only control records were left
                if pulled.out_of_range:
                    if not skips_deleted:
                        raise DataLossError(
                            f"records of {self._tp} from offset {position} on were deleted.", fix=if_gone
                        )
                    position, _ = self.readable(deadline)
                    self.start(position)
                elif pulled.records is None and deadline.expired:
                    raise unreachable(
                        self._consumer.bootstrap_servers,
                        deadline.budget_seconds * 1000,
                        f"reading {self._tp}: {self.last_complaint or 'nothing arrives'}",
                    )
        finally:
            self.stop()

    def readable(self, deadline: Deadline) -> tuple[int, int]:
        """Returns the first offset in the log and the last stable offset, as they are now.

        Raises:
            UnavailableError: if no broker answers before ``deadline``, or the partition does not exist.
        """

        def bounds() -> tuple[int, int]:
            seconds = max(0.1, deadline.remaining_seconds(_BOUNDS_SECONDS))
            return self._consumer.log_bounds(self._tp, seconds)

        def timed_out(failure: RetriableError) -> UnavailableError:
            reason = self.last_complaint or failure.message
            return unreachable(self._consumer.bootstrap_servers, deadline.budget_seconds * 1000, reason)

        return retry(bounds, RetriableError, Pauses(deadline, 0.0), timed_out=timed_out)

    def ends(self) -> LogEnds:
        """Returns all ends of the log. Creates a client, so prefer `readable` where that is enough.

        Raises:
            UnavailableError: if no broker answers.
        """
        with ClusterReader(self._consumer.connection) as cluster:
            return cluster.logs([self._tp])[self._tp]


def _records(messages: KernelMessages | Sequence[Message]) -> Records:
    """Converts the messages of a `Taken`, at least one, to arrays."""
    if isinstance(messages, KernelMessages):
        offsets, keys, values = messages.offsets, messages.keys, messages.values
    else:
        offsets = np.array([message.offset() for message in messages], np.int64)
        keys = pa.array([message.key() for message in messages], pa.binary())
        values = pa.array([message.value() for message in messages], pa.binary())
    return Records(offsets, keys, values, int(offsets[-1]) + 1)
