"""One partition of a changelog, read for its keys and values, as Arrow arrays.

With the kernel they lie where it put them. Its twin makes lists of what librdkafka's messages hold: 0.8 µs a
record of CPU, librdkafka's own threads included (110-byte records), where the kernel takes half.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import pyarrow as pa
from confluent_kafka import Message

from kafka_eos_source.errors import RetriableError
from kafka_eos_source.kafka.cluster_reader import ClusterReader, LogEnds
from kafka_eos_source.kafka.consumer import AssignedConsumer
from kafka_eos_source.kafka.failure import unreachable
from kafka_eos_source.kafka.kernel_messages import KernelMessages
from kafka_eos_source.model import TopicPartition
from kafka_eos_source.runtime.deadline import Deadline

_BOUNDS_SECONDS = 10.0

#: Messages taken from a client that makes objects of them: more do not stay in the processor's cache, fewer
#: cost calls.
_TAKE_MESSAGES = 1_000


@dataclass(frozen=True, slots=True)
class Records:
    """Records in offset order.

    Attributes:
        offsets: of each, int64.
        keys, values: binary; a null value deletes.
        position: the offset behind the last one that was looked at.
    """

    offsets: npt.NDArray[np.int64]
    keys: pa.BinaryArray
    values: pa.BinaryArray
    position: int

    def __len__(self) -> int:
        return len(self.offsets)

    def before(self, end: int) -> Records:
        """Without those from offset ``end`` on."""
        if self.position <= end:
            return self
        kept = slice(int(np.searchsorted(self.offsets, end)))
        return Records(self.offsets[kept], self.keys[kept], self.values[kept], end)

    def parts(self, at_most: int) -> Iterator[Records]:
        """The same in successive parts of so many records; one where there are none."""
        for first in range(0, max(1, len(self)), at_most):
            past = first + at_most
            position = int(self.offsets[past]) if past < len(self) else self.position
            part = slice(first, past)
            yield Records(self.offsets[part], self.keys[part], self.values[part], position)


@dataclass(slots=True)
class Pulled:
    """What one look at the partition gave.

    Attributes:
        records: None = there was none.
        log_end: the log was read to its end, which is this offset; control markers count.
        out_of_range: the position is not in the log (any more).
        gone: the cluster does not know the partition (any more).
    """

    records: Records | None = None
    log_end: int | None = None
    out_of_range: bool = False
    gone: bool = False


class ChangelogReader:
    """Reads one partition with a client that is open anyhow. Not thread-safe.

    Args:
        consumer: from `state.changelog.committed.changelog_client`: read_committed.
        tp: the partition.
    """

    def __init__(self, consumer: AssignedConsumer, tp: TopicPartition) -> None:
        self._consumer = consumer
        self._tp = tp
        self._position = 0

    @property
    def last_complaint(self) -> str:
        """What the client last said, the likely reason when nothing comes."""
        return self._consumer.last_complaint

    def start(self, position: int) -> None:
        """Reads on from this offset, whatever was read before."""
        self._position = position
        self._consumer.want(("key", "value"))
        self._consumer.assign({self._tp: position})

    def stop(self) -> None:
        """Fetches no more."""
        self._consumer.release()

    def take(self, wait_seconds: float, end: int) -> Pulled:
        """What is there now; when nothing is, waits for something.

        Args:
            wait_seconds: how long.
            end: offsets from here on (excluded) are left out.

        Raises:
            AuthorizationError: credentials or an ACL on the topic.
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

    def readable(self, deadline: Deadline) -> tuple[int, int]:
        """First offset in the log, and the last stable offset, at this moment.

        Raises:
            UnavailableError: not answered before ``deadline``, or no such partition.
        """
        while True:
            try:
                return self._consumer.log_bounds(
                    self._tp, max(0.1, deadline.remaining_seconds(_BOUNDS_SECONDS))
                )
            except RetriableError as failure:
                if deadline.expired:
                    raise unreachable(
                        self._consumer.bootstrap_servers,
                        deadline.budget_seconds * 1000,
                        self.last_complaint or failure.message,
                    ) from failure

    def ends(self) -> LogEnds:
        """All ends of the log. Makes a client for it; where `readable` is not enough.

        Raises:
            UnavailableError: no broker answers.
        """
        with ClusterReader(self._consumer.connection) as look:
            return look.logs([self._tp])[self._tp]


def _records(messages: KernelMessages | Sequence[Message]) -> Records:
    """A `Taken`'s messages; there is one."""
    if isinstance(messages, KernelMessages):
        offsets, keys, values = messages.offsets, messages.keys, messages.values
    else:
        offsets = np.array([message.offset() for message in messages], np.int64)
        keys = pa.array([message.key() for message in messages], pa.binary())
        values = pa.array([message.value() for message in messages], pa.binary())
    return Records(offsets, keys, values, int(offsets[-1]) + 1)
