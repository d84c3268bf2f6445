"""Messages of a poll, divided into runs of one partition each."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import cached_property
from itertools import chain
from typing import Any, NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

from kafka_eos_source.model import TopicPartition


class Messages(Protocol):
    """Messages of any partitions, in offset order within each partition.

    `MessageList` contains message objects of confluent-kafka, `kafka.kernel_messages.KernelMessages` those of
    the C kernel.
    """

    def __len__(self) -> int: ...

    def __getitem__(self, part: slice, /) -> Messages: ...

    @property
    def offsets(self) -> npt.NDArray[np.int64]: ...

    @property
    def size_bytes(self) -> int:
        """Total size of the values."""

    def fitting(self, rows: int, size_bytes: int) -> int:
        """Returns how many messages from the first on fit this number of rows and bytes; at least one."""

    def partition_ids(self, one_topic: bool) -> npt.NDArray[np.int64]:
        """Returns a number for each message that is equal for messages of the same partition.

        Args:
            one_topic: whether all messages belong to one topic.
        """

    def partition_at(self, index: int) -> TopicPartition: ...


class MessageList:
    """Messages as objects of confluent-kafka."""

    def __init__(self, messages: Sequence[Any]) -> None:
        self._messages = messages

    def __len__(self) -> int:
        return len(self._messages)

    def __iter__(self) -> Iterator[Any]:
        return iter(self._messages)

    def __getitem__(self, part: slice) -> MessageList:
        return MessageList(self._messages[part])

    @cached_property
    def offsets(self) -> npt.NDArray[np.int64]:
        return np.fromiter([message.offset() for message in self._messages], np.int64, len(self._messages))

    @property
    def size_bytes(self) -> int:
        return sum(map(len, self._messages))

    def fitting(self, rows: int, size_bytes: int) -> int:  # noqa: ARG002
        """Returns all: the caller polled no more than it needs, and their size was unknown before."""
        return len(self)

    def partition_ids(self, one_topic: bool) -> npt.NDArray[np.int64]:
        if one_topic:
            numbers = [message.partition() for message in self._messages]
        else:
            keys = [(message.topic(), message.partition()) for message in self._messages]
            index = {key: number for number, key in enumerate(dict.fromkeys(keys))}
            numbers = [index[key] for key in keys]
        return np.fromiter(numbers, np.int64, len(numbers))

    def partition_at(self, index: int) -> TopicPartition:
        message = self._messages[index]
        return TopicPartition(message.topic(), message.partition())

    @staticmethod
    def joined(parts: Sequence[MessageList]) -> Sequence[Any]:
        """Returns the messages of all parts in one sequence."""
        if len(parts) == 1:
            return parts[0]._messages
        return list(chain.from_iterable(parts))


class Run(NamedTuple):
    """Consecutive messages of one partition, and their offsets."""

    tp: TopicPartition
    messages: Messages
    offsets: npt.NDArray[np.int64]


def row_count(runs: Sequence[Run]) -> int:
    """Returns the number of records in the runs."""
    return sum(len(run.offsets) for run in runs)


def where(runs: Sequence[Run], index: int) -> tuple[TopicPartition, int]:
    """Returns partition and offset of the message at ``index``, counted over all runs."""
    for run in runs:
        if index < len(run.offsets):
            return run.tp, int(run.offsets[index])
        index -= len(run.offsets)
    raise IndexError(index)


def halves(runs: Sequence[Run]) -> tuple[list[Run], list[Run]]:
    """Divides the rows into two non-empty parts. There must be at least two rows."""
    wanted = row_count(runs) // 2
    first: list[Run] = []
    second: list[Run] = []
    for tp, messages, offsets in runs:
        here = min(wanted, len(offsets))
        if here:
            first.append(Run(tp, messages[:here], offsets[:here]))
        if here < len(offsets):
            second.append(Run(tp, messages[here:], offsets[here:]))
        wanted -= here
    return first, second
